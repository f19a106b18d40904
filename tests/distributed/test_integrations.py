"""Training with each trainer beside the same training by hand, to the bit, whatever the optimizer exchanges."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from models import same
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from trainers import (
    FRAMEWORKS,
    LR,
    MAX_NORM,
    SETTINGS,
    Net,
    accelerator,
    batches,
    hugging_face,
    lightning,
    lightning_module,
    needs,
    rows,
    sparse_gradients,
    values,
    wrap_prepared,
)  # fmt: skip
from tritoncomm import ConfigMismatchError, ConfigurationError

from depth import python
from ranks import ranks

STEPS, SAVE_AT, ACCUMULATE = 6, 3, 2
Trained = tuple[Net, tritoncomm.SparseOptimizer]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return AdamW in the parameter groups of Transformers, which decays no bias."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=LR)


def mixed(model: nn.Module) -> tritoncomm.OptimizerList:
    """Return one that exchanges updates, and one that exchanges gradients."""
    matrices, others = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() <= 1]
    return tritoncomm.OptimizerList([torch.optim.Muon(matrices, lr=LR), torch.optim.AdamW(others, lr=LR)])


UPDATES = tritoncomm.Updates(algo=tritoncomm.Quantized(values="2bit"), outer_momentum=0.5)
# An optimizer, and arguments of wrap. The numbers of steps of a run are no multiples of the local steps.
RUNS: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], dict[str, Any]]] = {
    "gradients": (adamw, SETTINGS),
    "local steps": (adamw, {"local_steps": 2, "updates": UPDATES}),
    "list": (mixed, {}),
}
every_run = pytest.mark.parametrize("kind", RUNS)


def linear_decay(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Return a schedule that ends at a learning rate of zero."""
    return LambdaLR(optimizer, lambda step: max(0.0, (STEPS - step) / STEPS))


def held_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return its parameters, in the order in which a norm is rounded."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def by_hand(kind: str, data: list[torch.Tensor], *, in_wrap: bool) -> Trained:
    """Train in DDP on ``data``, clip, and merge where a trainer saves and at the end."""
    make, settings = RUNS[kind]
    net = Net()
    model = DistributedDataParallel(net)
    limit = {"max_grad_norm": MAX_NORM} if in_wrap else {}
    optimizer = tritoncomm.wrap(make(net), model=model, **settings, **limit)
    schedule = linear_decay(optimizer)
    for number, x in enumerate(data, 1):
        is_last = number % ACCUMULATE == 0
        with nullcontext() if is_last else model.no_sync():
            (model(x)["loss"] / ACCUMULATE).backward()
        if not is_last:
            continue
        if not limit:
            optimizer.synchronize()
            net.norms.append(float(nn.utils.clip_grad_norm_(held_by(optimizer), MAX_NORM)))
        optimizer.step()
        if limit:
            net.norms.append(optimizer.metrics()["grad_norm"])
        schedule.step()
        optimizer.zero_grad()
        if number // ACCUMULATE in (SAVE_AT, STEPS):
            optimizer.merge()
    return net, optimizer


def check(kind: str, whole: Trained, *, in_wrap: bool = False) -> None:
    """The same losses, weights and residuals as by hand, to the bit. The trainer has seen the norms before it clips."""
    (net, sparse), (reference, optimizer) = whole, by_hand(kind, whole[0].batches, in_wrap=in_wrap)
    assert len(net.losses) == STEPS * ACCUMULATE
    assert net.losses == reference.losses
    assert values(net) == values(reference)
    assert same(values(net))
    assert min(reference.norms) > MAX_NORM, "some step was not clipped"
    assert kind != "gradients" or net.norms == pytest.approx(reference.norms, rel=1e-6)
    ours, theirs = (found.state_dict()["tritoncomm"] for found in (sparse, optimizer))
    assert sparse.metrics()["inner_steps" if kind != "gradients" else "steps"] == STEPS
    assert ours["steps"] == theirs["steps"]
    assert any(residual.any() for residual in ours["residuals"])
    assert all(map(torch.equal, ours["residuals"], theirs["residuals"]))


def check_resumed(whole: Trained, resumed: Trained) -> None:
    """The resumed run has the losses, weights and state of the run that was not interrupted, without a dense step."""
    (net, sparse), (other, restored) = whole, resumed
    assert other.losses == net.losses[SAVE_AT * ACCUMULATE :]
    assert values(net) == values(other)
    assert restored.metrics()["steps"] == sparse.metrics()["steps"]
    assert restored.metrics()["bytes_sent"] == sparse.metrics()["bytes_sent"] > 0
    checksums = [found.state_dict()["tritoncomm"]["checksum"] for found in (sparse, restored)]
    assert checksums[0] == checksums[1]


def check_lost_residual(folder: Path, rank: int, resume: Callable[[str], Trained], function: str) -> None:
    """Without one of the files, all ranks raise an error with a fix, which works."""
    dist.barrier()
    lost = max(folder.glob("data-*/*"))
    dist.barrier()
    if rank == 1:
        lost.unlink()
    dist.barrier()
    with pytest.raises((ConfigurationError, ConfigMismatchError), match=r"residuals='reset'") as caught:
        resume("restore")
    assert function in str(caught.value)
    assert lost.name in str(caught.value)
    net, sparse = resume("reset")
    assert sparse.metrics()["steps"] == STEPS - SAVE_AT
    assert net.losses[0] > 0


@needs("accelerate")
@ranks(2, limit=200.0)
@every_run
def test_accelerate(rank, world_size, kind, tmp_path):
    """Train with accelerator.accumulate, clip_grad_norm_, save_state and load_state."""
    folder, (make, settings) = str(tmp_path / "checkpoints"), RUNS[kind]
    data = batches(rank, world_size, STEPS * ACCUMULATE)

    def train(first: int, **residuals: str) -> Trained:
        accelerated = accelerator(gradient_accumulation_steps=ACCUMULATE, step_scheduler_with_optimizer=False)
        net = Net()
        bare = make(net)
        model, optimizer, schedule = accelerated.prepare(net, bare, linear_decay(bare))
        sparse = wrap_prepared(accelerated, model, optimizer, **residuals, **settings)
        if first:
            accelerated.load_state(folder)
            tritoncomm.checkpoint.save(optimizer, Path(folder) / "direct")  # takes Accelerate's wrapper
            tritoncomm.checkpoint.load(optimizer, Path(folder) / "direct")
        for number, x in enumerate(data[first * ACCUMULATE :], start=1):
            with accelerated.accumulate(model):
                accelerated.backward(model(x)["loss"])
                is_last = accelerated.sync_gradients
                norm = accelerated.clip_grad_norm_(held_by(optimizer), MAX_NORM if is_last else 1e9)
                assert kind != "gradients" or sparse.is_synchronized == is_last, "micro-batches are not exchanged"
                if is_last:
                    net.norms.append(float(norm))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            if not first and number == SAVE_AT * ACCUMULATE:
                accelerated.save_state(folder)
        assert schedule.get_last_lr() == [0.0, 0.0]
        sparse.merge()
        return net, sparse

    whole = train(0)
    check(kind, whole)
    check_resumed(whole, train(SAVE_AT))
    if kind == "gradients":
        place = Path(folder) / "tritoncomm"
        check_lost_residual(place, rank, lambda each: train(SAVE_AT, residuals=each), "accelerate.wrap()")


@needs("transformers")
@ranks(2, limit=200.0)
@every_run
def test_transformers(rank, world_size, kind, tmp_path):
    """Train, evaluate and save with the Trainer, by its AdamW or an optimizer that is passed."""
    folder, (make, settings) = str(tmp_path / "checkpoints"), RUNS[kind]

    def train(path: str | None, **residuals: str) -> Trained:
        net = Net()
        callback = sparse_gradients(**residuals, **settings)
        own = {} if kind == "gradients" else {"optimizers": (make(net), None)}
        saving = {} if path else {"save_strategy": "steps", "save_steps": SAVE_AT}
        trainer = hugging_face(
            folder, net, callback, samples=2 * 8 * STEPS * ACCUMULATE, max_steps=STEPS, per_device_train_batch_size=8,
            gradient_accumulation_steps=ACCUMULATE, max_grad_norm=MAX_NORM, learning_rate=LR, weight_decay=0.1,
            lr_scheduler_type="linear", logging_strategy="steps", logging_steps=1, eval_strategy="steps",
            eval_steps=SAVE_AT, **saving, **own,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=path)
        net.norms = [each["grad_norm"] for each in trainer.state.log_history if "grad_norm" in each]
        assert trainer.args.max_grad_norm == MAX_NORM
        assert trainer.lr_scheduler.get_last_lr() == [0.0, 0.0]
        return net, callback.optimizer

    whole, path = train(None), f"{folder}/checkpoint-{SAVE_AT}"
    check(kind, whole, in_wrap=True)
    check_resumed(whole, train(path))
    if kind == "gradients":
        place = Path(path) / "tritoncomm"
        check_lost_residual(place, rank, lambda each: train(path, residuals=each), "SparseGradients()")


@needs("lightning")
@ranks(2, limit=200.0)
@every_run
def test_lightning(rank, world_size, kind, tmp_path):
    """Train, validate and save with a strategy, and ModelCheckpoint."""
    folder, (make, settings) = str(tmp_path / "checkpoints"), RUNS[kind]
    half = 2 * 8 * SAVE_AT * ACCUMULATE

    def seen(self: Any, optimizer: Any) -> None:
        self.net.norms.append(float(nn.utils.get_total_norm([each.grad for each in held_by(optimizer)])))

    def scheduled(net: nn.Module) -> dict[str, Any]:
        optimizer = make(net)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": linear_decay(optimizer), "interval": "step"}}

    def epoch(self: Any) -> torch.utils.data.DataLoader:
        first = half * self.trainer.current_epoch
        return torch.utils.data.DataLoader(rows(2 * half)[first : first + half], batch_size=8)

    def train(path: str | None, **residuals: str) -> Trained:
        module = lightning_module(
            Net(), scheduled, on_before_optimizer_step=seen, train_dataloader=epoch,
            val_dataloader=lambda _: torch.utils.data.DataLoader(rows(32), batch_size=8),
        )  # fmt: skip
        trainer = lightning(
            world_size, residuals | settings, None if path else folder, save_steps=SAVE_AT, max_epochs=2,
            accumulate_grad_batches=ACCUMULATE, gradient_clip_val=MAX_NORM, reload_dataloaders_every_n_epochs=1,
        )  # fmt: skip
        trainer.fit(module, ckpt_path=path)
        assert trainer.lr_scheduler_configs[0].scheduler.get_last_lr() == [0.0, 0.0]
        trainer.save_checkpoint(f"{folder}/removed.ckpt")
        assert (Path(folder) / "removed.ckpt.tritoncomm/checkpoint.json").exists()
        dist.barrier()
        trainer.strategy.remove_checkpoint(f"{folder}/removed.ckpt")
        dist.barrier()
        assert not list(Path(folder).glob("removed.ckpt*"))
        return module.net, trainer.optimizers[0]

    whole, path = train(None), f"{folder}/step={SAVE_AT}.ckpt"
    check(kind, whole)
    check_resumed(whole, train(path))
    if kind == "gradients":
        place = Path(f"{path}.tritoncomm")
        check_lost_residual(place, rank, lambda each: train(path, residuals=each), "SparseDDPStrategy()")


def test_import_needs_no_framework(tmp_path):
    """Importing tritoncomm imports no framework."""
    script = tmp_path / "imports.py"
    # A fresh import, where one of a framework fails. The process is forked from one that has imported all of them.
    script.write_text(f"""import sys
for name in [each for each in sys.modules if each.partition(".")[0] == "tritoncomm"]:
    del sys.modules[name]
sys.modules |= dict.fromkeys({FRAMEWORKS})
import tritoncomm.integrations
assert "tritoncomm.wrapping" in sys.modules
""")
    subprocess.run([*python(), str(script)], check=True)  # noqa: S603 - ours
