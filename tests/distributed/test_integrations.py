"""Training with each trainer beside the same training by hand, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from kit import log_lines
from models import residual, same
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tritoncomm import ConfigMismatchError, ConfigurationError

from ranks import ranks

SETTINGS = {"algo": "oktopk", "density": 0.05, "warmup_steps": 2, "dense_below": 0}
STEPS, SAVE_AT, ACCUMULATE, MAX_NORM, LR = 8, 4, 2, 0.5, 3e-3


def needs(framework: str) -> Any:
    """Skip a test where ``framework`` is not installed."""
    is_missing = find_spec(framework) is None
    return pytest.mark.skipif(is_missing, reason=f"{framework} is not installed: tox -e trainers has it")


class Net(nn.Module):
    """A regression that records its batches and losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.batches: list[torch.Tensor] = []
        self.losses: list[float] = []
        self.norms: list[float] = []  # that the trainer has seen before it clips

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        loss = (self.layers(x) - x.sum(1, keepdim=True)).square().mean()
        self.batches.append(x)
        self.losses.append(loss.item())
        return {"loss": loss}


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return AdamW in the parameter groups of Transformers, which decays no bias."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=LR)


def linear_decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a schedule that ends at a learning rate of zero."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (STEPS - step) / STEPS))


def rows(n: int) -> list[torch.Tensor]:
    """Return ``n`` samples."""
    return list(torch.randn(n, 16, generator=torch.Generator().manual_seed(1)))


def under_torchrun(rank: int, world_size: int) -> None:
    """Set the variables of torchrun. The group exists already. Forget earlier tests."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "TORCHELASTIC_RUN_ID": "test",
        "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    states = sys.modules.get("accelerate.state")  # of a test before, in this process
    if states is not None:
        states.AcceleratorState._reset_state(reset_partial_state=True)
        states.GradientState._reset_state()


def by_hand(batches: list[torch.Tensor], *, in_wrap: bool) -> tuple[Net, list[float], tritoncomm.SparseOptimizer]:
    """Train on ``batches`` with tritoncomm.wrap(AdamW, model=ddp). Also return the norms before clipping."""
    net = Net()
    model = DistributedDataParallel(net)
    limit = {"max_grad_norm": MAX_NORM} if in_wrap else {}
    optimizer = tritoncomm.wrap(adamw(model), model=model, **SETTINGS, **limit)
    schedule, norms = linear_decay(optimizer), []
    for number, x in enumerate(batches):
        if (number + 1) % ACCUMULATE:
            with model.no_sync():
                (model(x)["loss"] / ACCUMULATE).backward()
            continue
        (model(x)["loss"] / ACCUMULATE).backward()
        if not limit:
            optimizer.synchronize()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        if limit:
            norms.append(optimizer.metrics()["grad_norm"])
        schedule.step()
        optimizer.zero_grad()
    return net, norms, optimizer


def weights(net: Net) -> torch.Tensor:
    """Return all weights as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def check_same_as_by_hand(net: Net, sparse: tritoncomm.SparseOptimizer, *, in_wrap: bool = False) -> None:
    """The same losses, weights and residuals, to the bit. One exchange per step, of averaged and clipped gradients.

    The trainer has seen the norms of averaged gradients.
    """
    reference, norms, optimizer = by_hand(net.batches, in_wrap=in_wrap)
    assert len(net.losses) == STEPS * ACCUMULATE
    assert net.losses == reference.losses
    assert torch.equal(weights(net), weights(reference))
    assert sparse.metrics()["steps"] == STEPS
    assert sparse.metrics()["bytes_sent"] > 0
    assert min(norms) > MAX_NORM, "some step was not clipped"
    assert net.norms == pytest.approx(norms, rel=1e-6)
    gathered = [torch.empty_like(weights(net)) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, weights(net))
    assert all(torch.equal(gathered[0], other) for other in gathered)
    ours, theirs = (found.state_dict()["tritoncomm"] for found in (sparse, optimizer))
    assert ours["steps"] == theirs["steps"]
    assert any(residual.any() for residual in ours["residuals"])
    assert all(map(torch.equal, ours["residuals"], theirs["residuals"]))


def check_resumed(
    whole: tuple[Net, tritoncomm.SparseOptimizer], resumed: tuple[Net, tritoncomm.SparseOptimizer]
) -> None:
    """The resumed run has the losses, weights and state of the run that was not interrupted, without a dense step."""
    (net, sparse), (other, restored) = whole, resumed
    assert other.losses == net.losses[SAVE_AT * ACCUMULATE :]
    assert torch.equal(weights(net), weights(other))
    assert restored.metrics()["steps"] == STEPS
    assert restored.metrics()["bytes_sent"] == sparse.metrics()["bytes_sent"]
    checksums = [found.state_dict()["tritoncomm"]["checksum"] for found in (sparse, restored)]
    assert checksums[0] == checksums[1]


def check_lost_residual(folder: Path, rank: int, resume: Callable[[str], Any], function: str) -> None:
    """Without the file of the second rank, all ranks raise an error with a fix, which works."""
    dist.barrier()
    if rank == 1:
        (lost,) = folder.glob("data-*/__1_0.distcp")
        lost.unlink()
    dist.barrier()
    with pytest.raises((ConfigurationError, ConfigMismatchError), match=r"residuals='reset'") as caught:
        resume("restore")
    assert function in str(caught.value)
    assert "__1_0.distcp" in str(caught.value)
    net, sparse = resume("reset")
    assert sparse.metrics()["steps"] == STEPS - SAVE_AT
    assert net.losses[0] > 0


@needs("accelerate")
@ranks(2, limit=200.0)
def test_accelerate(rank, world_size, tmp_path):
    """Train with accelerator.accumulate, clip_grad_norm_, save_state and load_state."""
    folder = str(tmp_path / "checkpoints")
    from accelerate import Accelerator  # noqa: PLC0415 - optional
    from tritoncomm.integrations.accelerate import wrap  # noqa: PLC0415 - optional

    under_torchrun(rank, world_size)
    batches = list(torch.stack(rows(2 * 8 * STEPS * ACCUMULATE)).unflatten(0, (-1, 2, 8))[:, rank])

    def train(first: int, residuals: str = "restore") -> tuple[Net, tritoncomm.SparseOptimizer]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE, step_scheduler_with_optimizer=False)
        net = Net()
        bare = adamw(net)
        model, optimizer, schedule = accelerator.prepare(net, bare, linear_decay(bare))
        sparse = wrap(accelerator, model, optimizer, residuals=residuals, **SETTINGS)
        if first:
            accelerator.load_state(folder)
            tritoncomm.checkpoint.save(optimizer, Path(folder) / "direct")  # takes Accelerate's wrapper
            tritoncomm.checkpoint.load(optimizer, Path(folder) / "direct")
        for number, x in enumerate(batches[first * ACCUMULATE :], start=1):
            with accelerator.accumulate(model):
                accelerator.backward(model(x)["loss"])
                norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM if accelerator.sync_gradients else 1e9)
                assert sparse.is_synchronized == accelerator.sync_gradients, "micro-batches are not exchanged"
                if accelerator.sync_gradients:
                    net.norms.append(float(norm))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            if not first and number == SAVE_AT * ACCUMULATE:
                accelerator.save_state(folder)
        assert schedule.get_last_lr() == [0.0, 0.0]
        return net, sparse

    whole = train(0)
    check_same_as_by_hand(*whole)
    check_resumed(whole, train(SAVE_AT))
    check_lost_residual(
        Path(folder) / "tritoncomm", rank, lambda residuals: train(SAVE_AT, residuals), "accelerate.wrap()"
    )
    accelerator = Accelerator(cpu=True)
    net = Net()
    model, optimizer = accelerator.prepare(net, adamw(net))
    with pytest.raises(ConfigurationError, match="model is a Net, not a DistributedDataParallel"):
        wrap(accelerator, net, optimizer)
    with pytest.raises(ConfigurationError, match=r"optimizer is a AdamW: pass the one that accelerator.prepare"):
        wrap(accelerator, model, adamw(net))
    with pytest.raises(ConfigurationError, match=r"optimizer is a AcceleratedOptimizer: pass the one that accelerator"):
        wrap(Accelerator(cpu=True), model, optimizer)
    with pytest.raises(ConfigurationError, match="optimizer is a AcceleratedOptimizer, which tritoncomm"):
        tritoncomm.checkpoint.save(optimizer, folder)


@needs("transformers")
@ranks(2, limit=200.0)
def test_transformers(rank, world_size, tmp_path):
    """Train with the Trainer, its AdamW, and its checkpoints."""
    folder = str(tmp_path / "checkpoints")
    import transformers  # noqa: PLC0415 - optional
    from tritoncomm.integrations.transformers import SparseGradients  # noqa: PLC0415 - optional

    under_torchrun(rank, world_size)
    data = [{"x": x, "labels": 0.0} for x in rows(2 * 8 * STEPS * ACCUMULATE)]

    def train(path: str | None, residuals: str = "restore", **clip: str) -> tuple[Net, tritoncomm.SparseOptimizer]:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=8, gradient_accumulation_steps=ACCUMULATE,
            max_grad_norm=MAX_NORM, learning_rate=LR, weight_decay=0.1, lr_scheduler_type="linear", use_cpu=True,
            ddp_backend="gloo", report_to=[], disable_tqdm=True, logging_steps=1,
            save_strategy="no" if path else "steps", save_steps=SAVE_AT,
        )  # fmt: skip
        callback = SparseGradients(residuals=residuals, **SETTINGS, **clip)
        net = Net()
        trainer = transformers.Trainer(net, arguments, train_dataset=data, callbacks=[callback])
        trainer.train(resume_from_checkpoint=path)
        net.norms = [each["grad_norm"] for each in trainer.state.log_history if "grad_norm" in each]
        assert arguments.max_grad_norm == MAX_NORM
        assert trainer.lr_scheduler.get_last_lr() == [0.0, 0.0]
        return net, callback.optimizer

    whole = train(None)
    check_same_as_by_hand(*whole, in_wrap=True)
    path = f"{folder}/checkpoint-{SAVE_AT}"
    check_resumed(whole, train(path))
    check_lost_residual(Path(path) / "tritoncomm", rank, lambda residuals: train(path, residuals), "SparseGradients()")
    check_limits(folder, data)
    check_interrupted(folder, data)
    check_trains_twice(folder, data)
    check_resumes_again(folder, data)
    check_refusals(folder, data)


def check_resumes_again(folder: str, data: list[Any]) -> None:
    """The Trainer that has trained resumes, too, although it loads the state of one rank on all of them first."""
    import transformers  # noqa: PLC0415 - optional
    from tritoncomm.integrations.transformers import SparseGradients  # noqa: PLC0415 - optional

    arguments = transformers.TrainingArguments(
        output_dir=f"{folder}/again", max_steps=4, use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True,
        logging_strategy="no", save_strategy="steps", save_steps=2,
    )  # fmt: skip
    trainer = transformers.Trainer(Net(), arguments, train_dataset=data, callbacks=[SparseGradients(**SETTINGS)])
    trainer.train()
    first = weights(trainer.model)
    trainer.train(resume_from_checkpoint=f"{folder}/again/checkpoint-2")
    assert torch.equal(weights(trainer.model), first)


@needs("transformers")
@ranks(1, limit=200.0)
def test_transformers_alone(rank, world_size, tmp_path):
    """A single worker with the callback trains as the Trainer without it, to the bit, and clips as it does."""
    folder = str(tmp_path / "checkpoints")
    import transformers  # noqa: PLC0415 - optional
    from tritoncomm.integrations.transformers import SparseGradients  # noqa: PLC0415 - optional

    under_torchrun(rank, world_size)
    data = [{"x": x, "labels": 0.0} for x in rows(8 * STEPS * ACCUMULATE)]

    def trained(*callbacks: Any) -> list[float]:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=8, gradient_accumulation_steps=ACCUMULATE,
            max_grad_norm=MAX_NORM, learning_rate=LR, weight_decay=0.1, use_cpu=True, ddp_backend="gloo", report_to=[],
            disable_tqdm=True, logging_strategy="no", save_strategy="no",
        )  # fmt: skip
        net = Net()
        transformers.Trainer(net, arguments, train_dataset=data, callbacks=[*callbacks]).train()
        return weights(net).tolist()

    assert trained(SparseGradients(**SETTINGS)) == trained()


def check_limits(folder: str, data: list[Any]) -> None:
    """Without a limit nothing is clipped. A limit that is passed has precedence. The Trainer clips again afterwards."""
    import transformers  # noqa: PLC0415 - optional
    from tritoncomm.integrations.transformers import SparseGradients  # noqa: PLC0415 - optional

    def trained(
        limit: float, *, part: bool = False, **settings: Any
    ) -> tuple[transformers.Trainer, tritoncomm.SparseOptimizer]:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=2, max_grad_norm=limit, use_cpu=True, ddp_backend="gloo", report_to=[],
            disable_tqdm=True, logging_strategy="no", save_strategy="no",
        )  # fmt: skip
        callback = SparseGradients(**SETTINGS, **settings)
        net = Net()
        own = {"optimizers": (torch.optim.AdamW(net.layers[0].parameters()), None)} if part else {}
        trainer = transformers.Trainer(net, arguments, train_dataset=data, callbacks=[callback], **own)
        trainer.train()
        everybody = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, weights(net).tolist())
        assert everybody[0] == everybody[1]
        return trainer, callback.optimizer

    for clips_itself in (trained(0.0), trained(-1.0), trained(MAX_NORM, part=True)):
        assert "grad_norm" not in clips_itself[1].metrics()
    trainer, optimizer = trained(MAX_NORM, max_grad_norm=123.0)
    assert optimizer._tritoncomm.setup.options.max_grad_norm == 123.0
    parameter = nn.Parameter(torch.ones(100))
    parameter.grad = torch.ones(100)
    trainer.accelerator.clip_grad_norm_([parameter], 1.0)
    assert float(parameter.grad.norm()) == pytest.approx(1.0)


def check_interrupted(folder: str, data: list[Any]) -> None:
    """After an interrupt, as in a notebook, the same Trainer trains again."""
    import transformers  # noqa: PLC0415 - optional
    from tritoncomm.integrations.transformers import SparseGradients  # noqa: PLC0415 - optional

    class Interrupt(transformers.TrainerCallback):
        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step == 1:
                raise KeyboardInterrupt

    arguments = transformers.TrainingArguments(
        output_dir=folder, max_steps=2, use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True,
        logging_strategy="no", save_strategy="no",
    )  # fmt: skip
    callback, interrupt = SparseGradients(**SETTINGS), Interrupt()
    trainer = transformers.Trainer(Net(), arguments, train_dataset=data, callbacks=[callback, interrupt])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(interrupt)
    trainer.train()
    assert callback.optimizer is trainer.optimizer.optimizer


def check_trains_twice(folder: str, data: list[Any]) -> None:
    """The pending update goes on in a second ``train()``, and after memory was short, without a warning."""
    import transformers  # noqa: PLC0415 - optional
    from tritoncomm.integrations.transformers import SparseGradients  # noqa: PLC0415 - optional

    class Begin(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            found.append((residual(callback.optimizer), callback.optimizer.metrics()["steps"]))

    class Short(Net):
        def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
            if len(x) == 8 and len(self.losses) == 4:
                raise RuntimeError("CUDA out of memory.")
            return super().forward(x, labels)

    for kind in (Net, Short):
        found: list[tuple[torch.Tensor, float]] = []
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=4 if kind is Net else 6, use_cpu=True, ddp_backend="gloo", report_to=[],
            disable_tqdm=True, logging_strategy="no", save_strategy="no", per_device_train_batch_size=8,
            auto_find_batch_size=kind is Short,
        )  # fmt: skip
        callback, net = SparseGradients(**SETTINGS), kind()
        trainer = transformers.Trainer(net, arguments, train_dataset=data, callbacks=[callback, Begin()])
        with log_lines() as lines:
            trainer.train()
            first = callback.optimizer
            if kind is Net:
                pending = residual(first)
                trainer.train()
                assert torch.equal(found[1][0], pending)
        assert not lines
        assert [steps for _, steps in found] == [0, 4]
        assert found[1][0].any()
        assert same(weights(net).tolist())
    trainer.model.layers[0].weight.requires_grad_(requires_grad=False)
    trainer.model_wrapped = trainer.model  # so that DDP knows
    trainer.train()  # by other parameters: the pending update is lost
    assert found[-1][1] == 0


def check_refusals(folder: str, data: list[Any]) -> None:
    """Errors say what a user of the Trainer did."""
    import transformers  # noqa: PLC0415 - optional
    from tritoncomm.integrations.transformers import SparseGradients  # noqa: PLC0415 - optional

    def trainer(*callbacks: Any, **fields: Any) -> transformers.Trainer:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=2, use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True,
            logging_strategy="no", save_strategy="no", **fields,
        )  # fmt: skip
        return transformers.Trainer(
            Net(), arguments, train_dataset=data, eval_dataset=data[:16], callbacks=[*callbacks]
        )

    evaluated = trainer(SparseGradients(**SETTINGS))
    evaluated.evaluate()
    with pytest.raises(ConfigurationError, match=r"evaluate\(\) or predict\(\) was called before train\(\)"):
        evaluated.train()
    late = trainer()
    late.add_callback(SparseGradients(**SETTINGS))
    late.train()
    with pytest.raises(ConfigurationError, match="enable_jit_checkpoint=True: such a checkpoint has no residuals"):
        trainer(SparseGradients(**SETTINGS), enable_jit_checkpoint=True).train()


@needs("lightning")
@ranks(2, limit=200.0)
def test_lightning(rank, world_size, tmp_path):
    """Train with a strategy, and ModelCheckpoint."""
    folder = str(tmp_path / "checkpoints")
    import lightning  # noqa: PLC0415 - optional
    from tritoncomm.integrations.lightning import SparseDDPStrategy  # noqa: PLC0415 - optional

    under_torchrun(rank, world_size)
    half = 2 * 8 * SAVE_AT * ACCUMULATE

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.net(batch)["loss"]

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
            self.net.norms.append(float(nn.utils.get_total_norm(gradients)))

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = adamw(self)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": linear_decay(optimizer), "interval": "step"}}

        def train_dataloader(self) -> torch.utils.data.DataLoader:
            first = half * self.trainer.current_epoch
            return torch.utils.data.DataLoader(rows(2 * half)[first : first + half], batch_size=8)

    def train(path: str | None, residuals: str = "restore") -> tuple[Net, tritoncomm.SparseOptimizer]:
        strategy = SparseDDPStrategy(process_group_backend="gloo", residuals=residuals, **SETTINGS)
        saving = lightning.pytorch.callbacks.ModelCheckpoint(folder, "{step}", save_top_k=-1)
        trainer = lightning.Trainer(
            accelerator="cpu", devices=world_size, strategy=strategy, max_epochs=2, logger=False,
            accumulate_grad_batches=ACCUMULATE, gradient_clip_val=MAX_NORM, enable_progress_bar=False,
            reload_dataloaders_every_n_epochs=1, enable_model_summary=False, num_sanity_val_steps=0,
            callbacks=[] if path else [saving], enable_checkpointing=path is None,
        )  # fmt: skip
        module = Module()
        trainer.fit(module, ckpt_path=path)
        assert trainer.lr_scheduler_configs[0].scheduler.get_last_lr() == [0.0, 0.0]
        trainer.save_checkpoint(f"{folder}/removed.ckpt")
        assert (Path(folder) / "removed.ckpt.tritoncomm/checkpoint.json").exists()
        dist.barrier()
        strategy.remove_checkpoint(f"{folder}/removed.ckpt")
        dist.barrier()
        assert not list(Path(folder).glob("removed.ckpt*"))
        return module.net, trainer.optimizers[0]

    whole = train(None)
    check_same_as_by_hand(*whole)
    path = f"{folder}/step={SAVE_AT}.ckpt"
    check_resumed(whole, train(path))
    check_lost_residual(
        Path(f"{path}.tritoncomm"), rank, lambda residuals: train(path, residuals), "SparseDDPStrategy()"
    )


def test_import_needs_no_framework():
    """Importing tritoncomm imports no framework."""
    frameworks = "{'accelerate', 'lightning', 'transformers'}"
    code = f"import sys, tritoncomm.integrations; print(sorted({frameworks} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603 - ours
    assert done.stdout.strip() == "[]"
