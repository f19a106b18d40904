"""Worker processes of tests/distributed/test_ddp.py: a module in DDP trains as the plain module, to the bit."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from ddp_models import SETTINGS, Branches, Pair, Stack, ddp, net
from helpers import adamw, flat, loss_of, same_everywhere
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

import laws


def methods(rank: int, world_size: int, send) -> None:
    """Several methods and optimizers, past the first renewal of the scale of Adam, while DDP builds its buckets."""
    for algo, optimizer in (
        ("oktopk", adamw),
        ("topk_allgather", lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)),
        ("spardl", lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)),
        ("dense", adamw),
    ):
        density = {} if algo == "dense" else {"density": 0.1}
        pair = Pair(optimizer=optimizer, settings={"algo": algo, "dense_below": 0, "warmup_steps": 2, **density})
        for step in range(25 if algo == "oktopk" else 6):
            pair.step(lambda model, step=step: loss_of(model, rank, step).backward())
        assert same_everywhere(flat(pair.ddp))
    pair = Pair(settings={})  # as most users call it: small tensors are dense, and a limit is in use
    for step in range(3):
        pair.step(lambda model, step=step: loss_of(model, rank, step).backward())


def accumulation(rank: int, world_size: int, send) -> None:
    """Micro-batches add up with ``no_sync()``, without it, and with both in turns. One exchange takes all of them."""

    def backward(model: nn.Module, *, step: int, way: str) -> None:
        for micro in range(3):
            quiet = {"no_sync": micro < 2, "turns": micro == 1, "all": True, "never": False}[way]
            with model.no_sync() if quiet and hasattr(model, "no_sync") else nullcontext():
                (loss_of(model, rank, 3 * step + micro) / 3).backward()

    for view in (False, True):
        pair = Pair(gradient_as_bucket_view=view)
        for step, way in enumerate(("no_sync", "never", "turns", "all", "no_sync", "never")):
            pair.step(partial(backward, step=step, way=way), set_to_none=step != 4)
        assert pair.of_ddp.metrics()["steps"] == 6


def unused_parameters(rank: int, world_size: int, send) -> None:
    """A parameter that one rank, or no rank, uses in a step counts as zero there, also in a part of the passes."""

    def backward(model: nn.Module, *, step: int, uses: tuple[bool, ...]) -> None:
        for micro, both in enumerate(uses):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
            model(x, both=both).square().mean().backward()

    for fields in ({}, {"gradient_as_bucket_view": True}):
        pair = Pair(Branches, find_unused_parameters=True, **fields)
        for step, uses in enumerate(
            ((True,), (rank != 1,), (False,), (rank == 1, True), (True, rank == 1), (False,), (True,))
        ):
            pair.step(partial(backward, step=step, uses=uses))
        assert same_everywhere(flat(pair.ddp))


def options_of_ddp(rank: int, world_size: int, send) -> None:
    """A static graph, gradients that are views of buckets, one bucket and many. A frozen parameter stays."""

    def frozen() -> nn.Module:
        model = net()
        model[2].bias.requires_grad_(False)
        return model

    for fields in (
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1000},
        {"bucket_cap_mb": 0.0001, "broadcast_buffers": False},
    ):
        pair = Pair(frozen, **fields)
        for step in range(4):
            pair.step(lambda model, step=step: loss_of(model, rank, step).backward(), set_to_none=step != 2)
        assert torch.equal(pair.ddp.module[2].bias, net()[2].bias)


def wrapped_gradients(rank: int, world_size: int, send) -> None:
    """Clipping after ``synchronize()``, a closure, a flush and a schedule, as without DDP."""
    pair = Pair(settings=SETTINGS | {"max_grad_norm": 0.5})
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for _, optimizer in pair.both]
    for step in range(6):
        for (model, optimizer), schedule in zip(pair.both, schedules, strict=True):

            def closure(model=model, optimizer=optimizer, step=step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, rank, step)
                loss.backward()
                return loss

            if step % 2:
                assert optimizer.step(closure) > 0
            else:
                closure()
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
            schedule.step()
        pair.check()
    for _, optimizer in pair.both:
        optimizer.flush()
        assert optimizer.metrics()["residual_norm"] == 0
    pair.check()
    clipped = Pair(settings=SETTINGS | {"max_grad_norm": 0.5})
    for step in range(4):
        clipped.step(lambda model, step=step: loss_of(model, rank, step).backward())
    assert clipped.of_ddp.metrics()["grad_norm"] == clipped.of_plain.metrics()["grad_norm"] > 0


def loss_scaling(rank: int, world_size: int, send) -> None:
    """A ``GradScaler``, torch's or this library's, is passed nowhere. An overflow on one rank skips the step on all."""
    for make, unscales in (
        (torch.amp.GradScaler, False),
        (torch.amp.GradScaler, True),
        (tritoncomm.amp.GradScaler, True),
    ):
        pair, reference = Pair(), Pair()
        scalers = [make("cpu", init_scale=2.0**8, growth_interval=3) for _ in pair.both]
        for step in range(7):
            overflow = step == 4
            before = flat(pair.ddp)
            for (model, optimizer), scaler in zip(pair.both, scalers, strict=True):
                optimizer.zero_grad()
                factor = float("inf") if overflow and rank == 1 else 1.0
                scaler.scale(loss_of(model, rank, step) * factor).backward()
                if unscales:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            pair.check()
            if overflow:
                assert flat(pair.ddp) == before
            else:
                reference.step(lambda model, step=step: loss_of(model, rank, step).backward())
            assert same_everywhere(scalers[1].get_scale()) or make is torch.amp.GradScaler
        assert pair.of_ddp.metrics()["skipped_steps"] == 1
        assert flat(pair.ddp) == flat(reference.ddp)


def non_finite(rank: int, world_size: int, send) -> None:
    """A NaN on one rank skips the step on all, or raises with its name. Nothing else changes."""
    for policy in ("skip", "raise"):
        pair = Pair(settings=SETTINGS | {"on_nonfinite": policy})
        for step in range(5):
            bad, before = step == 3, flat(pair.ddp)
            for model, optimizer in pair.both:
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                if bad and rank == 1:
                    next(model.parameters()).grad[0, 0] = float("nan")
                name = r"parameter 0 of shape \(40, 6\)" if model is pair.plain else r"0\.weight"
                raises = pytest.raises(tritoncomm.NonFiniteError, match=rf"rank 1: {name} \(1 values\)")
                with raises if bad and policy == "raise" else nullcontext():
                    optimizer.step()
            pair.check()
            assert (flat(pair.ddp) == before) == bad


class Statistics(nn.Module):
    """Normalizes by statistics of the batches of all ranks: a collective in both passes, as ``SyncBatchNorm`` has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 40), nn.Linear(40, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        x = self.first(x)
        return self.last(x - all_reduce(x.mean(0)) / dist.get_world_size())


def synchronized_statistics(rank: int, world_size: int, send) -> None:
    """Collectives of the module's own backward pass do not mix with the exchange."""
    pair = Pair(Statistics)
    for step in range(4):
        pair.step(lambda model, step=step: loss_of(model, rank, step).backward())


def buffers(rank: int, world_size: int, send) -> None:
    """DDP broadcasts the buffers of the first rank before each pass, as it does without an exchange."""

    def normed() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 3))

    averaging, model = ddp(normed()), ddp(normed())
    bare = torch.optim.SGD(averaging.parameters(), lr=0.1)
    optimizer = tritoncomm.wrap(torch.optim.SGD(model.parameters(), lr=0.1), "dense", model=model)
    for step in range(4):
        for each, stepped in ((averaging, bare), (model, optimizer)):
            stepped.zero_grad()
            loss_of(each, rank, step).backward()
            stepped.step()
    assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(averaging.parameters(), model.parameters(), strict=True))
    for each in (averaging, model):
        each.train(mode=False)
        loss_of(each, rank, 9)  # a forward pass, before which DDP broadcasts
    assert torch.allclose(averaging.module[1].running_mean, model.module[1].running_mean, atol=1e-6)
    assert same_everywhere([buffer.tolist() for buffer in model.buffers()])


def nested_passes(rank: int, world_size: int, send) -> None:
    """Reentrant checkpointing trains, and a hook of a gradient sees this worker's own gradient."""
    pair, seen = Pair(Stack), []
    for (model, _), kind in zip(pair.both, ("plain", "ddp"), strict=True):
        for name, parameter in getattr(model, "module", model).named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name, kind=kind: seen.append((kind, name, p.grad.clone()))
            )
    for step in range(3):
        seen.clear()
        pair.step(lambda model, step=step: loss_of(model, rank, step).backward())
        own = {kind: {name: grad for k, name, grad in seen if k == kind} for kind in ("plain", "ddp")}
        assert own["plain"].keys() == own["ddp"].keys() == dict(pair.plain.named_parameters()).keys()
        assert all(laws.same_bits(own["plain"][name], own["ddp"][name]) for name in own["plain"])
        assert not same_everywhere(own["ddp"]["head.weight"].tolist())


def other_strides(rank: int, world_size: int, send) -> None:
    """Parameters in other memory formats, and of two dtypes, which DDP never puts into one bucket."""

    def images(kind: str) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.Flatten(), nn.Linear(256, 7, bias=False))
        if kind == "channels_last":
            return model.to(memory_format=torch.channels_last)
        weight = model[2].weight.detach()
        # Dense with swapped strides, and with gaps: DDP lays out the second row by row.
        strided = weight.t().contiguous().t() if kind == "transposed" else weight.repeat(1, 2)[:, :256]
        model[2].weight = nn.Parameter(strided)
        return model

    def backward(model: nn.Module, *, step: int) -> None:
        generator = torch.Generator().manual_seed(10 * step + rank)
        x, y = torch.randn(4, 3, 6, 6, generator=generator), torch.randint(0, 7, (4,), generator=generator)
        nn.functional.cross_entropy(model(x), y).backward()

    for kind in ("channels_last", "transposed", "gaps"):
        pair = Pair(partial(images, kind))
        for step in range(4):
            pair.step(partial(backward, step=step))
    for static in (False, True):
        pair = Pair(TwoTypes, static_graph=static)
        for step in range(4):
            for model, optimizer in pair.both:
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
            assert all(map(torch.equal, pair.plain.parameters(), pair.ddp.parameters()))


class TwoTypes(nn.Module):
    """A model with parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(6, 40), nn.Linear(40, 40).bfloat16(), nn.Linear(40, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        return self.third(self.second(self.first(x).tanh().bfloat16()).tanh().float())


def several_optimizers(rank: int, world_size: int, send) -> None:
    """Two optimizers of one module, each wrapped with it, and one of the plain module that steps less often."""
    plain, model = net(), ddp(net())

    def wrapped(module: nn.Module, **fields) -> list[tritoncomm.SparseOptimizer]:
        matrices = [p for p in module.parameters() if p.dim() > 1]
        vectors = [p for p in module.parameters() if p.dim() == 1]
        return [
            tritoncomm.wrap(torch.optim.AdamW(matrices, lr=0.01), **SETTINGS, **fields),
            tritoncomm.wrap(torch.optim.SGD(vectors, lr=0.1), **SETTINGS, **fields),
        ]

    optimizers = wrapped(plain), wrapped(model, model=model)
    for step in range(6):
        for each, (first, second) in zip((plain, model), optimizers, strict=True):
            first.zero_grad()
            if step % 2 == 0:
                second.zero_grad()
            loss_of(each, rank, step).backward()
            first.step()
            if step % 2:  # over two passes
                second.step()
        assert flat(plain) == flat(model)
    assert optimizers[1][1].metrics()["steps"] == 3
    assert same_everywhere(flat(model))


def compiled(rank: int, world_size: int, send) -> None:
    """``torch.compile`` of the module in DDP, and of a function that takes the step."""
    pair = Pair(bucket_cap_mb=25)  # the smallest buckets are too small for torch.compile
    forward = {pair.plain: pair.plain, pair.ddp: torch.compile(pair.ddp, backend="eager")}
    assert tritoncomm.wrap(pair.of_ddp.optimizer, model=forward[pair.ddp], **SETTINGS)
    for model, optimizer in pair.both:

        def stepped(loss: torch.Tensor, optimizer=optimizer) -> None:
            loss.backward()
            optimizer.step()

        stepped = torch.compile(stepped, backend="eager") if model is pair.ddp else stepped
        for step in range(3):
            optimizer.zero_grad()
            stepped(loss_of(forward[model], rank, step))
    pair.check()


def one_worker(rank: int, world_size: int, send) -> None:
    """A single worker trains as the bare optimizer does behind bare DDP, to the bit, whatever bare DDP allows."""
    for kind in ("accumulation", "no sync", "twice", "join", "unused", "scaled", "not finite"):
        bare, wrapped = (_trained_alone(kind, rank, wrapped=each) for each in (False, True))
        assert bare == wrapped, kind


def _trained_alone(kind: str, rank: int, *, wrapped: bool) -> list[int]:
    model = net()
    if kind == "unused":
        model.register_parameter("extra", nn.Parameter(torch.ones(9)))
    outer = DistributedDataParallel(model, find_unused_parameters=kind == "unused")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if wrapped:
        optimizer = tritoncomm.wrap(optimizer, model=outer, density=0.01, dense_below=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=kind == "scaled")
    with outer.join() if kind == "join" else nullcontext():
        for step in range(4):
            if kind == "not finite" and step == 2 and not wrapped:
                continue  # the wrapped one skips this step
            optimizer.zero_grad()
            with outer.no_sync() if kind == "no sync" else nullcontext():
                for micro in range(2 if kind in ("accumulation", "no sync") else 1):
                    bad = kind == "not finite" and step == 2
                    scaler.scale(loss_of(outer, rank, 2 * step + micro) * (float("nan") if bad else 1.0)).backward()
            for _ in range(2 if kind == "twice" else 1):
                scaler.step(optimizer)
                scaler.update()
    return flat(model)
