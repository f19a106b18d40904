"""Trainers with several optimizers, a scaler, and parameters that train later, beside the same training by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from test_integrations import LR, SETTINGS, needs, rows, under_torchrun
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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


def values(net: nn.Module) -> list[float]:
    """Return all parameters."""
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()]).tolist()


def batches(rank: int, world_size: int, count: int = STEPS) -> list[torch.Tensor]:
    """Return the batches of this rank."""
    return list(torch.stack(rows(world_size * 8 * count)).unflatten(0, (count, world_size, 8))[:, rank])


def check_equal_on_all_ranks(net: nn.Module) -> None:
    """The replicas have the same bits."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, values(net))
    assert all(each == gathered[0] for each in gathered)


def gan_by_hand(data: list[torch.Tensor], clip: Callable[[Any, Any], None]) -> Gan:
    """Train both players in turns. ``clip`` is given the parameters, whose averaged gradients exceed the limit."""
    net = Gan()
    model = DistributedDataParallel(net, find_unused_parameters=True)
    players = [tritoncomm.wrap(each, model=model, **SETTINGS) for each in net.optimizers()]
    for x in data:
        for player, optimizer in zip(("critic", "generator"), players, strict=True):
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
def test_accelerate_gan(rank, world_size):
    """Two models are clipped and stepped in turns. What is not clipped is not exchanged."""
    from accelerate import Accelerator, DistributedDataParallelKwargs  # noqa: PLC0415 - optional
    from tritoncomm.integrations.accelerate import wrap  # noqa: PLC0415 - optional

    under_torchrun(rank, world_size)
    data = batches(rank, world_size)
    for name in ("norm", "value"):
        unused = DistributedDataParallelKwargs(find_unused_parameters=True)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[unused])
        net = Gan()
        model, *players = accelerator.prepare(net, *net.optimizers())
        sparse = [wrap(accelerator, model, each, **SETTINGS) for each in players]
        clip = getattr(accelerator, f"clip_grad_{name}_")
        for x in data:
            for player, optimizer in zip(("critic", "generator"), players, strict=True):
                optimizer.zero_grad()
                accelerator.backward(model(x, player))
                clip(getattr(net, player).parameters(), MAX_NORM)
                assert [each.is_synchronized for each in sparse] == [player == "critic", player == "generator"]
                optimizer.step()
        assert values(net) == values(gan_by_hand(data, getattr(nn.utils, f"clip_grad_{name}_")))
        assert [each.metrics()["skipped_steps"] for each in sparse] == [0.0, 0.0]
        check_equal_on_all_ranks(net)


@needs("accelerate")
@ranks(2, limit=200.0)
def test_accelerate_gradient(rank, world_size):
    """With max_grad_norm, the accelerator returns the norm of the mean gradient, and does not clip again."""
    from accelerate import Accelerator  # noqa: PLC0415 - optional
    from tritoncomm.integrations.accelerate import wrap  # noqa: PLC0415 - optional

    under_torchrun(rank, world_size)
    found = []
    for clips in (True, False):
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model, optimizer = accelerator.prepare(net := nn.Linear(16, 16), torch.optim.AdamW(net.parameters(), lr=LR))
        sparse = wrap(accelerator, model, optimizer, **SETTINGS, max_grad_norm=MAX_NORM)
        for x in batches(rank, world_size):
            optimizer.zero_grad()
            accelerator.backward(model(x).square().mean())
            if clips:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1e-6)
            optimizer.step()
        found.append(values(net))
        if clips:
            assert float(norm) == pytest.approx(sparse.metrics()["grad_norm"])
            assert norm > MAX_NORM
    assert found[0] == found[1]


@needs("accelerate")
@ranks(2, limit=200.0)
def test_accelerate_fp16(rank, world_size):
    """A scaler needs no argument. An overflow on one rank is a skipped step, and a lower scale, on all."""
    from accelerate import Accelerator  # noqa: PLC0415 - optional
    from tritoncomm.integrations.accelerate import wrap  # noqa: PLC0415 - optional

    under_torchrun(rank, world_size)
    for clips in (True, False):
        accelerator = Accelerator(cpu=True)
        # Accelerate has no fp16 on a CPU. This is what it sets on a GPU.
        accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        torch.manual_seed(0)
        optimizer = torch.optim.SGD((net := nn.Linear(16, 16)).parameters(), lr=LR)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        model, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
        sparse = wrap(accelerator, model, optimizer, on_nonfinite="raise", **SETTINGS)
        skipped, rates, norms = [], [], []
        for step, x in enumerate(batches(rank, world_size)):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            accelerator.backward(loss * (float("inf") if (step, rank) == (2, 1) else 1.0))
            if clips:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)))
            optimizer.step()
            schedule.step()
            skipped.append(optimizer.step_was_skipped)
            rates.append(schedule.get_last_lr()[0])
        assert skipped == [step == 2 for step in range(STEPS)]
        assert rates[2] == rates[1] > rates[3]
        assert all(0.1 < norm < 10 for number, norm in enumerate(norms) if number != 2), "norms are unscaled"
        assert accelerator.scaler.get_scale() == 2.0
        assert sparse.metrics()["steps"] == STEPS - 1
        check_equal_on_all_ranks(net)


@needs("lightning")
@ranks(1, limit=200.0)
def test_alone(rank, world_size):
    """A single worker trains and clips in Accelerate and Lightning as without this library, to the bit."""
    import lightning  # noqa: PLC0415 - optional
    from accelerate import Accelerator  # noqa: PLC0415 - optional
    from lightning.pytorch.strategies import DDPStrategy  # noqa: PLC0415 - optional
    from tritoncomm.integrations.accelerate import wrap  # noqa: PLC0415 - optional
    from tritoncomm.integrations.lightning import SparseDDPStrategy  # noqa: PLC0415 - optional

    under_torchrun(rank, world_size)
    data = batches(rank, world_size)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Linear(16, 16)

        def training_step(self, x: torch.Tensor, _: int) -> torch.Tensor:
            return self.net(x).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LR)

    def with_lightning(strategy: Any) -> list[float]:
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, gradient_clip_val=MAX_NORM,
        )  # fmt: skip
        module = Module()
        trainer.fit(module, torch.utils.data.DataLoader(torch.cat(data), batch_size=8))
        return values(module)

    def with_accelerate(**settings: Any) -> list[float]:
        accelerator, module = Accelerator(cpu=True), Module()
        model, optimizer = accelerator.prepare(module.net, module.configure_optimizers())
        if settings:
            wrap(accelerator, model, optimizer, **settings)
        for x in data:
            optimizer.zero_grad()
            accelerator.backward(model(x).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
        return values(module)

    assert with_accelerate(**SETTINGS) == with_accelerate()
    dense, sparse = (
        DDPStrategy(process_group_backend="gloo"),
        SparseDDPStrategy(process_group_backend="gloo", **SETTINGS),
    )
    assert with_lightning(sparse) == with_lightning(dense)


@needs("lightning")
@ranks(2, limit=200.0)
def test_lightning_gan(rank, world_size, tmp_path):
    """Two optimizers of one module, toggled and clipped by manual optimization. Both continue from a checkpoint."""
    folder = str(tmp_path / "checkpoints")
    import lightning  # noqa: PLC0415 - optional
    from tritoncomm.integrations.lightning import SparseDDPStrategy  # noqa: PLC0415 - optional

    under_torchrun(rank, world_size)
    data = rows(world_size * 8 * STEPS)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = Gan()
            self.seen: list[torch.Tensor] = []

        def training_step(self, x: torch.Tensor, _: int) -> None:
            self.seen.append(x)
            for player, optimizer in zip(("critic", "generator"), self.optimizers(), strict=True):
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(self.net(x, player))
                self.clip_gradients(optimizer, MAX_NORM, "norm")
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return self.net.optimizers()

        def train_dataloader(self) -> torch.utils.data.DataLoader:
            half = world_size * 8 * SAVE_AT
            first = half * self.trainer.current_epoch
            return torch.utils.data.DataLoader(data[first : first + half], batch_size=8)

    def train(path: str | None) -> tuple[Module, list[Any]]:
        module = Module()
        strategy = SparseDDPStrategy(process_group_backend="gloo", find_unused_parameters=True, **SETTINGS)
        saving = lightning.pytorch.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        trainer = lightning.Trainer(
            accelerator="cpu", devices=world_size, strategy=strategy, max_epochs=2, logger=False,
            enable_progress_bar=False, enable_model_summary=False, reload_dataloaders_every_n_epochs=1,
            callbacks=[] if path else [saving], enable_checkpointing=path is None,
        )  # fmt: skip
        trainer.fit(module, ckpt_path=path)
        return module, trainer.optimizers

    module, optimizers = train(None)
    assert [each.metrics()["steps"] for each in optimizers] == [STEPS, STEPS]
    assert [each.metrics()["skipped_steps"] for each in optimizers] == [0, 0]
    assert values(module.net) == values(gan_by_hand(module.seen, nn.utils.clip_grad_norm_))
    check_equal_on_all_ranks(module.net)
    path = Path(folder) / "epoch=0.ckpt"
    assert {each.name for each in Path(folder).glob("epoch=0.ckpt.*")} == {
        "epoch=0.ckpt.tritoncomm", "epoch=0.ckpt.tritoncomm_1"
    }  # fmt: skip
    resumed, restored = train(str(path))
    assert values(resumed.net) == values(module.net)
    for one, other in zip(optimizers, restored, strict=True):
        assert one.state_dict()["tritoncomm"]["checksum"] == other.state_dict()["tritoncomm"]["checksum"]


@needs("lightning")
@ranks(2, limit=200.0)
def test_lightning_fp16(rank, world_size):
    """Mixed precision in fp16 with gradient_clip_val is the loop by hand. An overflow is skipped on all ranks."""
    import lightning  # noqa: PLC0415 - optional
    from tritoncomm.integrations.lightning import SparseDDPStrategy  # noqa: PLC0415 - optional

    under_torchrun(rank, world_size)
    data = batches(rank, world_size)

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        return model(data[step]).square().mean() * (float("inf") if (step, rank) == (2, 1) else 1.0)

    def network() -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(16, 16)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, _: torch.Tensor, step: int) -> torch.Tensor:
            return loss_of(self.net, step)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LR)

    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    plugin = lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=world_size, strategy=SparseDDPStrategy(process_group_backend="gloo", **SETTINGS),
        plugins=[plugin], max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, gradient_clip_val=MAX_NORM,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(world_size * STEPS, 1)))
    assert trainer.optimizers[0].metrics()["steps"] == STEPS - 1
    assert plugin.scaler.get_scale() == 2.0
    check_equal_on_all_ranks(module)

    net = network()
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
    folder = str(tmp_path / "checkpoints")
    import lightning  # noqa: PLC0415 - optional
    from tritoncomm.integrations.lightning import SparseDDPStrategy  # noqa: PLC0415 - optional

    under_torchrun(rank, world_size)
    data = rows(world_size * 8 * SAVE_AT)

    class Unfreeze(lightning.pytorch.callbacks.BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.backbone)

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch >= 1:  # again after it was resumed: Lightning restores groups, and no requires_grad
                self.unfreeze_and_add_param_group(module.backbone, optimizer)

    class Module(lightning.LightningModule):
        def __init__(self, *, every: bool = False) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.every, self.backbone, self.head = every, nn.Linear(16, 16), nn.Linear(16, 4)

        def training_step(self, x: torch.Tensor, _: int) -> torch.Tensor:
            return (self.head(self.backbone(x)) - 1).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            trained: Iterator[nn.Parameter] = filter(lambda p: self.every or p.requires_grad, self.parameters())
            return torch.optim.AdamW(trained, lr=LR)

    def train(path: str | None, *, every: bool = False) -> Module:
        saving = lightning.pytorch.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        trainer = lightning.Trainer(
            accelerator="cpu", devices=world_size, strategy=SparseDDPStrategy(process_group_backend="gloo", **settings),
            max_epochs=3, logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[Unfreeze(), *([] if path else [saving])], enable_checkpointing=path is None,
        )  # fmt: skip
        module = Module(every=every)
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8), ckpt_path=path)
        return module

    module = train(None)
    assert values(module.backbone) != values(Module().backbone)
    check_equal_on_all_ranks(module)
    for epoch in (0, 1):
        assert values(train(f"{folder}/epoch={epoch}.ckpt")) == values(module)
    with pytest.raises(tritoncomm.ConfigurationError, match=r"filter\(lambda p: p.requires_grad"):
        train(None, every=True)


@needs("lightning")
@ranks(2, limit=200.0)
def test_fabric(rank, world_size):
    """What Fabric has set up is refused with a fix, which trains as the loop by hand."""
    from lightning import Fabric  # noqa: PLC0415 - optional
    from lightning.fabric.strategies import DDPStrategy  # noqa: PLC0415 - optional

    under_torchrun(rank, world_size)
    strategy, found = DDPStrategy(process_group_backend="gloo"), []
    for launched in (Fabric(accelerator="cpu", strategy=strategy, devices=world_size), None):
        torch.manual_seed(0)
        net = nn.Linear(16, 16)
        optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
        if launched is None:
            model = DistributedDataParallel(net)
            optimizer = tritoncomm.wrap(optimizer, model=model, **SETTINGS)
        else:
            launched.launch()
            model, prepared = launched.setup(nn.Linear(16, 16), torch.optim.AdamW(net.parameters()))
            with pytest.raises(tritoncomm.ConfigurationError, match=r"fabric.setup_optimizers\(tritoncomm.wrap\("):
                tritoncomm.wrap(prepared, model=model)
            model = launched.setup_module(net)
            optimizer = launched.setup_optimizers(tritoncomm.wrap(optimizer, model=model, **SETTINGS))
        for x in batches(rank, world_size):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward() if launched is None else launched.backward(loss)
            optimizer.step()
        assert optimizer.metrics()["steps"] == STEPS
        found.append(values(net))
    assert found[0] == found[1]
    check_equal_on_all_ranks(net)


@needs("lightning")
@ranks(2, limit=200.0)
def test_refusals(rank, world_size):
    """Optimizers that a trainer has prepared are refused by wrap(), which names what to call instead."""
    from accelerate import Accelerator  # noqa: PLC0415 - optional
    from lightning.pytorch.core.optimizer import LightningOptimizer  # noqa: PLC0415 - optional

    under_torchrun(rank, world_size)
    model, prepared = Accelerator(cpu=True).prepare(net := nn.Linear(4, 4), torch.optim.AdamW(net.parameters()))
    with pytest.raises(tritoncomm.ConfigurationError, match=r"integrations.accelerate.wrap\(accelerator, model, opt"):
        tritoncomm.wrap(prepared, model=model)
    with pytest.raises(tritoncomm.ConfigurationError, match=r"AdamW .*SparseDDPStrategy"):
        tritoncomm.wrap(LightningOptimizer(torch.optim.AdamW(net.parameters())), model=model)
