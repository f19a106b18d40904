"""Trainers with several optimizers, a scaler, parameters that train later, or none that we wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import tritoncomm
from kit import log_lines
from models import residual, same
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trainers import (
    LR,
    SETTINGS,
    Net,
    accelerator,
    batches,
    hugging_face,
    lightning,
    lightning_module,
    linear,
    needs,
    rows,
    sparse_gradients,
    under_torchrun,
    values,
    wrap_prepared,
)  # fmt: skip
from tritoncomm import ConfigurationError

from ranks import ranks

STEPS, SAVE_AT, MAX_NORM = 6, 3, 0.01


class Gan(nn.Module):
    """Two small networks. ``forward`` runs the one that is asked for, as DDP needs it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor, player: str) -> torch.Tensor:
        """Return the loss of ``player``. The generator's reaches the critic's parameters, too."""
        if player == "critic":
            return (
                self.critic(self.generator(x).detach()).mean() - self.critic(x).mean() + self.critic(x).square().mean()
            )
        return -self.critic(self.generator(x)).mean() + 0.1 * self.generator(x).square().mean()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers of the critic and of the generator."""
        return [torch.optim.AdamW(self.critic.parameters(), lr=LR), torch.optim.SGD(self.generator.parameters(), lr=LR)]


PLAYERS = ("critic", "generator")


def gan_by_hand(data: list[torch.Tensor], clip: Callable[[Any, Any], None]) -> Gan:
    """Train both players in turns. ``clip`` is given the parameters, whose averaged gradients exceed the limit."""
    net = Gan()
    model = DistributedDataParallel(net, find_unused_parameters=True)
    players = [tritoncomm.wrap(each, model=model, **SETTINGS) for each in net.optimizers()]
    for x in data:
        for player, optimizer in zip(PLAYERS, players, strict=True):
            optimizer.zero_grad()
            model(x, player).backward()
            optimizer.synchronize()
            parameters = list(getattr(net, player).parameters())
            assert max(parameter.grad.abs().max() for parameter in parameters) > MAX_NORM
            clip(parameters, MAX_NORM)
            optimizer.step()
    return net


@needs("accelerate")
@ranks(2, limit=200.0)
@pytest.mark.parametrize("name", ["norm", "value"])
def test_accelerate_gan(rank, world_size, name):
    """Two models are clipped and stepped in turns. What is not clipped is not exchanged."""
    data = batches(rank, world_size, STEPS)
    unused = import_module("accelerate").DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerated, net = accelerator(kwargs_handlers=[unused]), Gan()
    model, *players = accelerated.prepare(net, *net.optimizers())
    sparse = [wrap_prepared(accelerated, model, each, **SETTINGS) for each in players]
    clip = getattr(accelerated, f"clip_grad_{name}_")
    for x in data:
        for player, optimizer in zip(PLAYERS, players, strict=True):
            optimizer.zero_grad()
            accelerated.backward(model(x, player))
            clip(getattr(net, player).parameters(), MAX_NORM)
            assert [each.is_synchronized for each in sparse] == [player == each for each in PLAYERS]
            optimizer.step()
    assert values(net) == values(gan_by_hand(data, getattr(nn.utils, f"clip_grad_{name}_")))
    assert [each.metrics()["skipped_steps"] for each in sparse] == [0.0, 0.0]
    assert same(values(net))


@needs("accelerate")
@ranks(1, 2, limit=200.0)
@pytest.mark.parametrize("limit", [None, MAX_NORM])
def test_accelerate_clips_what_is_not_wrapped(rank, world_size, limit):
    """Gradients of another model, which DDP averages, are clipped together with those of the wrapped optimizer.

    Where the exchange clips, they are clipped by themselves.
    """
    accelerated, nets = accelerator(), [linear(), linear()]
    *models, optimizer, _ = accelerated.prepare(*nets, *(torch.optim.SGD(net.parameters(), lr=LR) for net in nets))
    wrap_prepared(accelerated, models[0], optimizer, algo="dense", small="fp32", max_grad_norm=limit)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
    accelerated.backward(models[0](x).square().sum() + models[1](x).square().sum())
    norm = accelerated.clip_grad_norm_([each for net in nets for each in net.parameters()], MAX_NORM)
    optimizer.step()  # a single worker clips here
    found = [nn.utils.get_total_norm([each.grad for each in net.parameters()]) for net in nets]
    assert norm > 2 * MAX_NORM
    torch.testing.assert_close(found, [torch.tensor(limit or MAX_NORM / 2**0.5)] * 2, rtol=0.2, atol=0.0)


@needs("accelerate")
@ranks(2, limit=200.0)
def test_accelerate_two_models_of_one_optimizer(rank, world_size):
    """They are passed as a list of modules. One alone is refused: DDP would average the other one densely."""
    accelerated, first, second = accelerator(), linear(), linear()
    inner = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=LR)
    first, second, optimizer = accelerated.prepare(first, second, inner)
    with pytest.raises(ConfigurationError, match=r"another prepared model.*model=torch.nn.ModuleList"):
        wrap_prepared(accelerated, first, optimizer, **SETTINGS)
    wrap_prepared(accelerated, nn.ModuleList([first, second]), optimizer, **SETTINGS)
    accelerated.backward(second(first(torch.full((2, 16), 1.0 + rank))).square().sum())
    gradients = torch.cat([each.grad.reshape(-1) for net in (first, second) for each in net.parameters()])
    assert not same(gradients.tolist())
    optimizer.step()
    assert same(values(first) + values(second))


@needs("accelerate")
@ranks(2, limit=200.0)
@pytest.mark.parametrize("clips", [True, False])
def test_accelerate_fp16(rank, world_size, clips):
    """A scaler needs no argument. An overflow on one rank is a skipped step, and a lower scale, on all."""
    accelerated, net = accelerator(), linear()
    # Accelerate has no fp16 on a CPU. This is what it sets on a GPU.
    accelerated.native_amp, accelerated.state._mixed_precision = True, "fp16"
    accelerated.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model, optimizer, schedule = accelerated.prepare(net, optimizer, schedule)
    sparse = wrap_prepared(accelerated, model, optimizer, on_nonfinite="raise", **SETTINGS)
    skipped, rates, norms = [], [], []
    for step, x in enumerate(batches(rank, world_size, STEPS)):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        accelerated.backward(loss * (float("inf") if (step, rank) == (2, 1) else 1.0))
        if clips:
            norms.append(float(accelerated.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        schedule.step()
        skipped.append(optimizer.step_was_skipped)
        rates.append(schedule.get_last_lr()[0])
    assert skipped == [step == 2 for step in range(STEPS)]
    assert rates[2] == rates[1] > rates[3]
    assert all(0.1 < norm < 10 for number, norm in enumerate(norms) if number != 2), "norms are unscaled"
    assert accelerated.scaler.get_scale() == 2.0
    assert sparse.metrics()["steps"] == STEPS - 1
    assert same(values(net))


@needs("accelerate")
@ranks(2, limit=200.0)
def test_load_after_one_that_failed(rank, world_size, tmp_path):
    """A load_state() that ends before it comes to the optimizer changes nothing of what is loaded later."""
    accelerated, net = accelerator(), Net()
    model, optimizer = accelerated.prepare(net, torch.optim.AdamW(net.parameters(), lr=LR))
    sparse = wrap_prepared(accelerated, model, optimizer, **SETTINGS)
    for number, x in enumerate(batches(rank, world_size, 3)):
        if number == 2:
            tritoncomm.checkpoint.save(sparse, tmp_path / "own")
        accelerated.backward(model(x)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    (tmp_path / "empty").mkdir(exist_ok=True)
    with pytest.raises(FileNotFoundError):
        accelerated.load_state(str(tmp_path / "empty"))
    tritoncomm.checkpoint.load(sparse, tmp_path / "own")
    assert sparse.metrics()["steps"] == 2


def alone_in_accelerate(data: list[torch.Tensor], folder: str, *, sparse: bool) -> nn.Module:
    """Train and clip."""
    accelerated, net = accelerator(), Net()
    model, optimizer = accelerated.prepare(net, torch.optim.AdamW(net.parameters(), lr=LR))
    if sparse:
        wrap_prepared(accelerated, model, optimizer, **SETTINGS)
    for x in data:
        optimizer.zero_grad()
        accelerated.backward(model(x)["loss"])
        accelerated.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return net


def alone_in_lightning(data: list[torch.Tensor], folder: str, *, sparse: bool) -> nn.Module:
    """Train and clip."""
    trainer = lightning(1, SETTINGS if sparse else None, max_epochs=1, gradient_clip_val=MAX_NORM)
    module = lightning_module(Net(), lambda net: torch.optim.AdamW(net.parameters(), lr=LR))
    trainer.fit(module, torch.utils.data.DataLoader(torch.cat(data), batch_size=8))
    return module.net


def alone_in_transformers(data: list[torch.Tensor], folder: str, *, sparse: bool) -> nn.Module:
    """Train and clip."""
    net, callbacks = Net(), [sparse_gradients(**SETTINGS)] if sparse else []
    hugging_face(folder, net, *callbacks, max_steps=STEPS, max_grad_norm=MAX_NORM, learning_rate=LR).train()
    return net


ALONE = {
    "accelerate": alone_in_accelerate, "lightning": alone_in_lightning, "transformers": alone_in_transformers
}  # fmt: skip


@ranks(1, limit=200.0)
@pytest.mark.parametrize("framework", [pytest.param(name, marks=needs(name)) for name in ALONE])
def test_alone(rank, world_size, framework, tmp_path):
    """A single worker trains and clips as without this library, to the bit."""
    data = batches(rank, world_size, STEPS)
    ours, bare = (values(ALONE[framework](data, str(tmp_path), sparse=each)) for each in (True, False))
    assert ours == bare != values(Net())


@needs("transformers")
@ranks(2, limit=200.0)
def test_limits_of_transformers(rank, world_size, tmp_path):
    """Without a limit nothing is clipped. A limit that is passed has precedence. The Trainer clips again afterwards."""

    def trained(limit: float, *, part: bool = False, **settings: Any) -> tuple[Any, tritoncomm.SparseOptimizer]:
        net, callback = Net(), sparse_gradients(**SETTINGS | settings)
        own = {"optimizers": (torch.optim.AdamW(net.layers[0].parameters()), None)} if part else {}
        trainer = hugging_face(str(tmp_path), net, callback, max_steps=2, max_grad_norm=limit, **own)
        trainer.train()
        assert same(values(net))
        return trainer, callback.optimizer

    for clips_itself in (trained(0.0), trained(-1.0), trained(MAX_NORM, part=True)):
        assert "grad_norm" not in clips_itself[1].metrics()
    trainer, optimizer = trained(MAX_NORM, max_grad_norm=123.0)
    assert optimizer._tritoncomm.setup.options.max_grad_norm == 123.0
    parameter = nn.Parameter(torch.ones(100))
    parameter.grad = torch.ones(100)
    trainer.accelerator.clip_grad_norm_([parameter], 1.0)
    assert float(parameter.grad.norm()) == pytest.approx(1.0)


@needs("transformers")
@ranks(2, limit=200.0)
def test_trainer_that_trains_again(rank, world_size, tmp_path):
    """After an interrupt, as in a notebook, and from a checkpoint, although it loads one rank's state on all first."""
    transformers = import_module("transformers")

    class Interrupt(transformers.TrainerCallback):
        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step == 1:
                raise KeyboardInterrupt

    callback, interrupt = sparse_gradients(**SETTINGS), Interrupt()
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer = hugging_face(str(tmp_path), Net(), callback, interrupt, max_steps=4, **saving)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(interrupt)
    trainer.train()
    assert callback.optimizer is trainer.optimizer.optimizer
    first = values(trainer.model)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert values(trainer.model) == first


@needs("transformers")
@ranks(2, limit=200.0)
def test_load_beside_a_trainer(rank, world_size, tmp_path):
    """A script that loads a checkpoint into the optimizer of a Trainer gets the residual of each rank."""
    callback = sparse_gradients(**SETTINGS)
    trainer = hugging_face(str(tmp_path), Net(), callback, max_steps=4, save_strategy="steps", save_steps=2)
    trainer.train()
    pending = residual(callback.optimizer)
    tritoncomm.checkpoint.load(callback.optimizer, tmp_path / "checkpoint-2" / "tritoncomm")
    assert callback.optimizer.metrics()["steps"] == 2
    assert not torch.equal(residual(callback.optimizer), pending)


class Short(Net):
    """Runs out of memory once."""

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        """Return the loss, or fail."""
        if len(x) == 8 and len(self.losses) == 4:
            raise RuntimeError("CUDA out of memory.")
        return super().forward(x, labels)


@needs("transformers")
@ranks(2, limit=200.0)
def test_pending_update_of_a_trainer(rank, world_size, tmp_path):
    """It goes on after memory was short, without a warning, and is lost if other parameters are trained."""

    class Begin(import_module("transformers").TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            found.append((residual(callback.optimizer), callback.optimizer.metrics()["steps"]))

    found: list[tuple[torch.Tensor, float]] = []
    callback, net = sparse_gradients(**SETTINGS), Short()
    trainer = hugging_face(
        str(tmp_path), net, callback, Begin(), max_steps=6, per_device_train_batch_size=8, auto_find_batch_size=True,
        samples=256,
    )  # fmt: skip
    with log_lines() as lines:
        trainer.train()
    assert not lines
    assert [steps for _, steps in found] == [0, 4]
    assert found[1][0].any()
    assert same(values(net))
    trainer.model.layers[0].weight.requires_grad_(requires_grad=False)
    trainer.model_wrapped = trainer.model  # so that DDP knows
    trainer.train()
    assert found[-1][1] == 0


@needs("lightning")
@ranks(2, limit=200.0)
def test_lightning_gan(rank, world_size, tmp_path):
    """Two optimizers of one module, toggled and clipped by manual optimization. Both continue from a checkpoint."""
    data = rows(world_size * 8 * STEPS)

    def turns(self: Any, x: torch.Tensor, _: int) -> None:
        self.seen.append(x)
        for player, optimizer in zip(PLAYERS, self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.net(x, player))
            self.clip_gradients(optimizer, MAX_NORM, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def epoch(self: Any) -> torch.utils.data.DataLoader:
        half = world_size * 8 * SAVE_AT
        first = half * self.trainer.current_epoch
        return torch.utils.data.DataLoader(data[first : first + half], batch_size=8)

    def train(path: str | None) -> tuple[Any, list[Any]]:
        module = lightning_module(Gan(), Gan.optimizers, training_step=turns, train_dataloader=epoch)
        module.automatic_optimization, module.seen = False, []
        settings = SETTINGS | {"find_unused_parameters": True}
        folder = None if path else str(tmp_path)
        trainer = lightning(world_size, settings, folder, max_epochs=2, reload_dataloaders_every_n_epochs=1)
        trainer.fit(module, ckpt_path=path)
        return module, trainer.optimizers

    module, optimizers = train(None)
    assert [each.metrics()["steps"] for each in optimizers] == [STEPS, STEPS]
    assert [each.metrics()["skipped_steps"] for each in optimizers] == [0, 0]
    assert values(module.net) == values(gan_by_hand(module.seen, nn.utils.clip_grad_norm_))
    assert same(values(module.net))
    assert {each.name for each in tmp_path.glob("epoch=0.ckpt.*")} == {
        "epoch=0.ckpt.tritoncomm", "epoch=0.ckpt.tritoncomm_1"
    }  # fmt: skip
    resumed, restored = train(str(tmp_path / "epoch=0.ckpt"))
    assert values(resumed.net) == values(module.net)
    for one, other in zip(optimizers, restored, strict=True):
        assert one.state_dict()["tritoncomm"]["checksum"] == other.state_dict()["tritoncomm"]["checksum"]


@needs("lightning")
@ranks(2, limit=200.0)
def test_lightning_fp16(rank, world_size):
    """Mixed precision in fp16 with gradient_clip_val is the loop by hand. An overflow is skipped on all ranks."""
    data = batches(rank, world_size, STEPS)

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        return model(data[step]).square().mean() * (float("inf") if (step, rank) == (2, 1) else 1.0)

    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    plugin = import_module("lightning").pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    trainer = lightning(world_size, SETTINGS, plugins=[plugin], max_epochs=1, gradient_clip_val=MAX_NORM)
    module = lightning_module(
        linear(), lambda net: torch.optim.AdamW(net.parameters(), lr=LR),
        training_step=lambda self, _, step: loss_of(self.net, step),
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(world_size * STEPS, 1)))
    assert trainer.optimizers[0].metrics()["steps"] == STEPS - 1
    assert plugin.scaler.get_scale() == 2.0
    assert same(values(module))

    net = linear()
    model = DistributedDataParallel(net)
    optimizer = tritoncomm.wrap(torch.optim.AdamW(net.parameters(), lr=LR), model=model, **SETTINGS)
    scaler = tritoncomm.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.half):
            loss = loss_of(model, step)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
    assert values(module) == values(net)


@needs("lightning")
@ranks(2, limit=200.0)
@pytest.mark.parametrize("settings", [SETTINGS, {"local_steps": 3}])  # an epoch has three
def test_lightning_fine_tuning(rank, world_size, settings, tmp_path):
    """A callback trains further layers from the second epoch on, and a run that resumes there continues to the bit."""
    data = rows(world_size * 8 * SAVE_AT)

    class Unfreeze(import_module("lightning").pytorch.callbacks.BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.net.layers[0])

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch >= 1:  # again after it was resumed: Lightning restores groups, and no requires_grad
                self.unfreeze_and_add_param_group(module.net.layers[0], optimizer)

    def adamw(net: nn.Module, *, every: bool) -> torch.optim.Optimizer:
        trained: Iterator[nn.Parameter] = filter(lambda p: every or p.requires_grad, net.parameters())
        return torch.optim.AdamW(trained, lr=LR)

    def train(path: str | None, *, every: bool = False) -> Any:
        folder = None if path else str(tmp_path)
        trainer = lightning(world_size, settings, folder, max_epochs=3, callbacks=[Unfreeze()])
        module = lightning_module(Net(), partial(adamw, every=every))
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8), ckpt_path=path)
        return module.net

    net = train(None)
    assert values(net.layers[0]) != values(Net().layers[0])
    assert same(values(net))
    for epoch in (0, 1):
        assert values(train(str(Path(tmp_path, f"epoch={epoch}.ckpt")))) == values(net)
    with pytest.raises(ConfigurationError, match=r"filter\(lambda p: p.requires_grad"):
        train(None, every=True)


@needs("lightning")
@ranks(2, limit=200.0)
def test_fabric(rank, world_size):
    """What Fabric has set up is refused with a fix, which trains as the loop by hand."""
    under_torchrun()
    library = import_module("lightning")
    strategy, found = library.fabric.strategies.DDPStrategy(process_group_backend="gloo"), []
    for launched in (library.Fabric(accelerator="cpu", strategy=strategy, devices=world_size), None):
        net = linear()
        optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
        if launched is None:
            model = DistributedDataParallel(net)
            optimizer = tritoncomm.wrap(optimizer, model=model, **SETTINGS)
        else:
            launched.launch()
            model, prepared = launched.setup(nn.Linear(16, 16), torch.optim.AdamW(net.parameters()))
            with pytest.raises(ConfigurationError, match=r"fabric.setup_optimizers\(tritoncomm.wrap\("):
                tritoncomm.wrap(prepared, model=model)
            model = launched.setup_module(net)
            optimizer = launched.setup_optimizers(tritoncomm.wrap(optimizer, model=model, **SETTINGS))
        for x in batches(rank, world_size, STEPS):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward() if launched is None else launched.backward(loss)
            optimizer.step()
        assert optimizer.metrics()["steps"] == STEPS
        found.append(values(net))
    assert found[0] == found[1]
    assert same(found[0])


@needs("lightning")
@ranks(2, limit=200.0)
def test_refused_optimizers(rank, world_size, tmp_path):
    """What is passed to the wrong function, or was prepared by another trainer, is refused with what to call."""
    prepared_by_lightning = import_module("lightning").pytorch.core.optimizer.LightningOptimizer(
        torch.optim.AdamW((net := linear()).parameters())
    )
    accelerated = accelerator()
    model, prepared = accelerated.prepare(net, torch.optim.AdamW(net.parameters()))
    for call, said in (
        (lambda: tritoncomm.wrap(prepared, model=model), r"integrations.accelerate.wrap\(accelerator, model, opt"),
        (lambda: tritoncomm.wrap(prepared_by_lightning, model=model), "AdamW .*SparseDDPStrategy"),
        (lambda: wrap_prepared(accelerated, net, prepared), "model is a Linear, not a DistributedDataParallel"),
        (
            lambda: wrap_prepared(accelerated, model, torch.optim.AdamW(net.parameters())),
            "optimizer is a AdamW: pass the one that accelerator.prepare",
        ),
        (
            lambda: wrap_prepared(accelerator(), model, prepared),
            "optimizer is a AcceleratedOptimizer: pass the one that accelerator",
        ),
        (
            lambda: tritoncomm.checkpoint.save(prepared, tmp_path),
            "optimizer is a AcceleratedOptimizer, which tritoncomm",
        ),
    ):
        with pytest.raises(ConfigurationError, match=said):
            call()


@needs("transformers")
@ranks(2, limit=200.0)
def test_refused_uses_of_a_trainer(rank, world_size, tmp_path):
    """Errors say what a user of the Trainer did. The callback may be added later."""
    evaluated = hugging_face(str(tmp_path), Net(), sparse_gradients(**SETTINGS), max_steps=2)
    evaluated.evaluate()
    with pytest.raises(ConfigurationError, match=r"evaluate\(\) or predict\(\) was called before train\(\)"):
        evaluated.train()
    late = hugging_face(str(tmp_path), Net(), max_steps=2)
    late.add_callback(sparse_gradients(**SETTINGS))
    late.train()
    jit = hugging_face(str(tmp_path), Net(), sparse_gradients(**SETTINGS), max_steps=2, enable_jit_checkpoint=True)
    with pytest.raises(ConfigurationError, match="enable_jit_checkpoint=True: such a checkpoint has no residuals"):
        jit.train()
