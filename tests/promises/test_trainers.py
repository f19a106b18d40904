"""Scalers and trainers: what they scale, clip, save and load is that of all ranks."""

from __future__ import annotations

import gc
import importlib
import os
import weakref
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import tritoncomm
from kit import equal_on_all_ranks, everywhere, flat, gradient, log_lines, sgd, sparse, weight
from torch import nn
from tritoncomm.amp import GradScaler

from ranks import ranks


def backward(p: torch.Tensor, scaler: GradScaler, own: torch.Tensor) -> None:
    """Let ``p.grad`` be a scaled gradient."""
    scaler.scale((p * own).sum()).backward()


@ranks(2)
@pytest.mark.parametrize("unscales", [False, True])
def test_scale_is_no_part_of_the_step(rank, world_size, unscales):
    """Parameters are those of a run without a scaler, whether or not the script unscales."""
    p, q = weight(), weight()
    optimizer, plain, scaler = sparse(sgd([p])), sparse(sgd([q])), GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        own = gradient(16, rank, step, world_size)
        optimizer.zero_grad()
        backward(p, scaler, own)
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        q.grad = own
        plain.step()
    optimizer.flush()
    plain.flush()
    assert torch.equal(p, q)
    assert p.detach().any()


@ranks(2)
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_overflow_on_one_rank_skips_and_lowers_all_scales(rank, world_size, policy, unscales):
    """Whatever on_nonfinite says: an overflow is what the scaler is for. Scales stay equal."""
    p = weight()
    optimizer, scaler = sparse(sgd([p]), on_nonfinite=policy), GradScaler("cpu", init_scale=2.0**10)
    own = gradient(16, rank, 0, world_size)
    if rank == 1:
        own[0] = torch.inf
    backward(p, scaler, own)
    if unscales:  # as before clipping
        scaler.unscale_(optimizer)
        optimizer.synchronize()
    scaler.step(optimizer)
    scaler.update()
    assert not p.detach().any()
    assert everywhere(scaler.get_scale()) == [2.0**9] * 2
    assert optimizer.metrics()["skipped_steps"] == 1
    optimizer.zero_grad()
    backward(p, scaler, gradient(16, rank, 1, world_size))
    scaler.step(optimizer)
    assert p.detach().any()
    assert equal_on_all_ranks([p])


@ranks(2)
def test_scaler_of_torch_skips_on_all_ranks(rank, world_size):
    """Its scales may differ, and parameters may not."""
    p = weight()
    optimizer, scaler = sparse(sgd([p])), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        own = gradient(16, rank, step, world_size)
        if rank == 1 and step == 1:
            own[0] = torch.nan
        optimizer.zero_grad()
        backward(p, scaler, own)
        scaler.step(optimizer)
        scaler.update()
    assert equal_on_all_ranks([p])
    assert optimizer.metrics()["skipped_steps"] == 1


@ranks(2)
def test_rank_without_gradients_agrees_about_an_overflow(rank, world_size):
    """It takes part, and lowers its scale, too."""
    p = weight()
    optimizer, scaler = sparse(sgd([p])), GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.ones(()))
    if rank == 1:
        backward(p, scaler, torch.full((16,), torch.inf))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert everywhere(scaler.get_scale()) == [2.0**9] * 2
    assert not p.detach().any()


@ranks(2)
def test_order_of_unscaling_and_averaging_is_checked(rank, world_size):
    """Scaled gradients are averaged with their scale, which nobody can take back."""
    p = weight()
    optimizer, scaler = sparse(sgd([p])), GradScaler("cpu", init_scale=2.0**10)
    backward(p, scaler, gradient(16, rank, 0, world_size))
    optimizer.synchronize()
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.step(optimizer)
    assert not p.detach().any()


@ranks(2)
def test_overflow_of_local_steps_is_a_matter_of_one_rank(rank, world_size):
    """The step is left out there, counts, and the gradients of other ranks are unscaled."""
    p = weight(8)
    optimizer = tritoncomm.wrap(sgd([p]), local_steps=2)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    for step in range(2):
        optimizer.zero_grad()
        backward(p, scaler, torch.full((8,), torch.inf if rank == 1 and step == 0 else 4.0))
        scaler.step(optimizer)
        scaler.update()
    assert equal_on_all_ranks([p])
    assert flat([p]).tolist() == pytest.approx([-6.0] * 8, rel=0.01)
    assert everywhere(scaler.get_scale()) == [2.0**10, 2.0**9]


class Net(nn.Module):
    """A regression that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, labels: object = None) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": (self.layers(x) - x.sum(1, keepdim=True)).square().mean()}


SETTINGS = {"algo": tritoncomm.TopkAllgather(density=0.1), "warmup_steps": 0, "dense_below": 0}
NORM = 0.05


def batch(rank: int, step: int) -> torch.Tensor:
    """Return the samples of a rank."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def under_torchrun(rank: int, world_size: int) -> None:
    """Set the variables of torchrun. The group exists already."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "GROUP_RANK": "0"}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}


def needs(framework: str):
    """Skip a test where ``framework`` is not installed."""
    return pytest.mark.skipif(find_spec(framework) is None, reason=f"{framework} is not installed")


def accelerated(**settings):
    """Return a prepared model and optimizer with what accelerates them, and the wrapped optimizer."""
    accelerate = importlib.import_module("accelerate")
    integration = importlib.import_module("tritoncomm.integrations.accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    return accelerator, model, optimizer, integration.wrap(accelerator, model, optimizer, **SETTINGS, **settings)


@needs("accelerate")
@ranks(2, limit=90.0)
@pytest.mark.parametrize("limits", [False, True])
def test_accelerate_clips_averages(rank, world_size, limits):
    """clip_grad_norm_() exchanges first, so that all ranks see one norm. If the exchange clips, it returns its norm."""
    under_torchrun(rank, world_size)
    accelerator, model, optimizer, sparse_optimizer = accelerated(**({"max_grad_norm": NORM} if limits else {}))
    for step in range(3):
        accelerator.backward(model(batch(rank, step))["loss"])
        own = torch.cat([each.grad.reshape(-1) for each in model.parameters()]).clone()
        assert not torch.equal(*everywhere(own))
        norm = float(accelerator.clip_grad_norm_(model.parameters(), NORM))
        assert sparse_optimizer.is_synchronized
        assert everywhere(norm) == [norm] * 2
        if limits:
            assert norm == pytest.approx(sparse_optimizer.metrics()["grad_norm"], rel=1e-6)
        else:
            clipped = torch.cat([each.grad.reshape(-1) for each in model.parameters()])
            assert float(clipped.norm()) == pytest.approx(min(norm, NORM), rel=1e-3)
        optimizer.step()
        optimizer.zero_grad()
    assert equal_on_all_ranks(model.parameters())
    assert sparse_optimizer.metrics()["steps"] == 3


@needs("accelerate")
@ranks(2, limit=90.0)
def test_accelerate_saves_the_residual_of_each_rank(rank, world_size, tmp_path):
    """save_state() and load_state() go on to the bit."""
    under_torchrun(rank, world_size)
    ends = []
    for resumes in (False, True):
        accelerator, model, optimizer, wrapped = accelerated()
        if resumes:
            accelerator.load_state(str(tmp_path / "saved"))
        for step in range(3 if resumes else 0, 6):
            if step == 3 and not resumes:
                accelerator.save_state(str(tmp_path / "saved"))
            accelerator.backward(model(batch(rank, step))["loss"])
            optimizer.step()
            optimizer.zero_grad()
        ends.append(torch.cat([flat(model.parameters()), torch.tensor([wrapped.metrics()["residual_norm"]])]))
    assert torch.equal(*ends)


@needs("accelerate")
@ranks(2, limit=90.0)
def test_accelerate_forgets_an_optimizer_whose_memory_was_freed(rank, world_size, tmp_path):
    """free_memory() ends an attempt: its parameters are freed, and only the next attempt is saved and loaded."""
    under_torchrun(rank, world_size)
    accelerate = importlib.import_module("accelerate")
    integration = importlib.import_module("tritoncomm.integrations.accelerate")
    accelerator, folder = accelerate.Accelerator(cpu=True), str(tmp_path / "saved")
    held = []  # as by the traceback of an attempt

    def attempt(first: int, last: int, *, fails: bool = False):
        """Train from step ``first`` up to ``last``, and save. Return the end, and a weak reference to a parameter."""
        accelerator.free_memory()
        net = Net()
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
        integration.wrap(accelerator, model, optimizer, **SETTINGS)
        held.append(optimizer)
        if first:
            accelerator.load_state(folder)
        for step in range(first, last):
            accelerator.backward(model(batch(rank, step))["loss"])
            accelerator.clip_grad_norm_(model.parameters(), NORM)
            if fails:  # as if memory were too short: the gradients are averaged, and no step follows
                return None, weakref.ref(net.layers[0].weight)
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                accelerator.save_state(folder)
        return flat(net.parameters()), weakref.ref(net.layers[0].weight)

    with log_lines() as lines:
        _, failed = attempt(0, 3, fails=True)
        end, healthy = attempt(0, 6)
        again, _ = attempt(3, 6)
        held.clear()
        gc.collect()
        assert failed() is None
        assert healthy() is None
        attempt(0, 3)
    assert torch.equal(end, again)
    assert not lines


def trained(folder: Path, rank: int, *, path: str | None = None, twice: bool = False, before=(), after=(), **settings):
    """Train with the Trainer of Transformers, and return the model and the wrapped optimizer.

    Its callbacks are those ``before`` ours, and those ``after`` it, which then ask for checkpoints.
    """
    transformers = importlib.import_module("transformers")
    integration = importlib.import_module("tritoncomm.integrations.transformers")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=4, max_grad_norm=NORM, learning_rate=0.01,
        use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True, logging_strategy="no",
        save_strategy="no" if path or twice or after else "steps", save_steps=2, lr_scheduler_type="constant",
    )  # fmt: skip
    data = [{"x": x, "labels": 0.0} for step in range(8) for x in batch(0, step)]
    callback = integration.SparseGradients(**{**SETTINGS, **settings})
    net = Net()
    trainer = transformers.Trainer(net, arguments, train_dataset=data, callbacks=[*before, callback, *after])
    trainer.train(resume_from_checkpoint=path)
    if twice:
        trainer.train()
    return net, callback.optimizer


@needs("transformers")
@ranks(2, limit=120.0)
def test_trainer_limits_gradients_and_resumes(rank, world_size, tmp_path):
    """``max_grad_norm`` of the Trainer is that of the exchange, and its checkpoints have the residual of each rank."""
    under_torchrun(rank, world_size)
    net, wrapped = trained(tmp_path, rank)
    assert equal_on_all_ranks(net.parameters())
    figures = wrapped.metrics()
    assert figures["steps"] == 4
    assert figures["grad_norm"] > NORM
    other, again = trained(tmp_path, rank, path=str(tmp_path / "checkpoint-2"))
    assert torch.equal(flat(net.parameters()), flat(other.parameters()))
    assert again.metrics()["residual_norm"] == figures["residual_norm"]
    _, own = trained(tmp_path, rank, max_grad_norm=123.0, path=str(tmp_path / "checkpoint-2"))
    assert own.metrics()["grad_norm"] < 123.0


@needs("transformers")
@ranks(2, limit=120.0)
def test_trainer_that_trains_twice_keeps_what_is_pending(rank, world_size, tmp_path):
    """A second train() goes on with the residual and the count of steps of the first one."""
    under_torchrun(rank, world_size)
    net, wrapped = trained(tmp_path, rank, twice=True)
    assert wrapped.metrics()["steps"] == 8
    assert equal_on_all_ranks(net.parameters())


@needs("transformers")
@ranks(2, limit=120.0)
def test_workers_are_equal_where_a_later_callback_saves(rank, world_size, tmp_path):
    """Local steps are merged before a checkpoint that any callback has asked for, whatever the order of callbacks."""
    under_torchrun(rank, world_size)
    transformers = importlib.import_module("transformers")
    seen = []

    class Sees(transformers.TrainerCallback):
        def on_save(self, *_, model, **__):
            seen.append(flat(model.parameters()))

    class Saves(transformers.TrainerCallback):
        def on_step_end(self, _args, state, control, **_):
            control.should_save = state.global_step == 2

    trained(tmp_path, rank, before=[Sees()], after=[Saves()], algo=None, warmup_steps=None, local_steps=4)
    (saved,) = seen
    assert all(torch.equal(saved, other) for other in everywhere(saved))


@needs("lightning")
@ranks(2, limit=120.0)
def test_lightning_trains_clips_and_resumes(rank, world_size, tmp_path):
    """The strategy exchanges before Lightning clips, and a checkpoint has the residual of each rank beside it."""
    under_torchrun(rank, world_size)
    lightning = importlib.import_module("lightning")
    integration = importlib.import_module("tritoncomm.integrations.lightning")
    norms = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, x, _):
            return self.net(x)["loss"]

        def on_before_optimizer_step(self, _):
            norms.append(float(nn.utils.get_total_norm([p.grad for p in self.parameters()])))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    def fit(path: str | None) -> tuple[torch.Tensor, float]:
        batches = torch.utils.data.DataLoader([batch(rank, 0)] * 6, batch_size=None)
        saves = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
        trainer = lightning.Trainer(
            strategy=integration.SparseDDPStrategy(process_group_backend="gloo", **SETTINGS), accelerator="cpu",
            devices=world_size, max_steps=6, logger=False, callbacks=[saves] if path is None else [],
            gradient_clip_val=NORM, enable_checkpointing=path is None, enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        module = Module()
        trainer.fit(module, batches, ckpt_path=path)
        assert equal_on_all_ranks(module.parameters())
        return flat(module.parameters()), trainer.optimizers[0].metrics()["residual_norm"]

    end, residual = fit(None)
    assert everywhere(norms) == [norms] * 2
    saved = sorted(tmp_path.glob("step=3*.ckpt"))
    assert saved
    again, same = fit(str(saved[0]))
    assert torch.equal(end, again)
    assert same == residual > 0


@needs("lightning")
@ranks(2, limit=120.0)
def test_lightning_takes_fields_of_a_method(rank, world_size):
    """The strategy takes what wrap(), the method, and DDP take, and names what none of them knows."""
    under_torchrun(rank, world_size)
    lightning = importlib.import_module("lightning")
    strategy = importlib.import_module("tritoncomm.integrations.lightning").SparseDDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, x, _):
            assert self.trainer.strategy.model.static_graph
            return self.net(x)["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    def bytes_sent(values: str) -> float:
        fields = {"density": 0.5, "warmup_steps": 0, "dense_below": 0, "repartition_every": 32, "values": values}
        trainer = lightning.Trainer(
            strategy=strategy("oktopk", process_group_backend="gloo", static_graph=True, **fields),
            accelerator="cpu", devices=world_size, max_steps=2, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(Module(), torch.utils.data.DataLoader([batch(rank, step) for step in range(2)], batch_size=None))
        return trainer.optimizers[0].metrics()["bytes_sent_total"]

    assert 0 < bytes_sent("4bit") < bytes_sent("8bit")
    for algo, name in ((None, "repartition_evry"), ("quantized", "repartition_every"), (None, "model"), (None, "blub")):
        with pytest.raises(tritoncomm.ConfigurationError, match=f"SparseDDPStrategy.*'{name}'"):
            strategy(algo, **{name: 1})
