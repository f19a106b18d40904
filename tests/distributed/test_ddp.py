"""A module in DDP trains as the plain module, to the bit. What surrounds it is heard, or refused by name."""

from __future__ import annotations

import copy
import gc
import pickle
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from kit import log_lines
from models import (
    Pair,
    Uneven,
    adamw,
    ddp,
    equal,
    exact,
    flat,
    gradients,
    loss_of,
    mesh,
    net,
    renewed_every,
    residual,
    same,
    sgd,
    sharded,
    train,
)
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.join import Join
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint
from tritoncomm import ConfigMismatchError, ConfigurationError
from tritoncomm.step.agree import replica
from tritoncomm.step.exchange.layout import Delivered

from ranks import ranks

REFUSED = (ConfigurationError, ConfigMismatchError)  # a rank has its own error, or hears of that of another one
AVERAGED = "equal on all ranks before the exchange"


@ranks(2)
def test_a_mean_that_nobody_sees_is_not_read_again(rank, world_size):
    """The rule for late gradients takes what was delivered, not ``.grad``, which may be rounded to another dtype."""
    pair = Pair()
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(Delivered, "read_again")
        pair.step(lambda model: loss_of(model, rank, 0).backward())


@ranks(3)
@pytest.mark.parametrize("view", [False, True])
def test_accumulation(rank, world_size, view):
    """Micro-batches add up with ``no_sync()``, without it, and with both in turns. One exchange takes all of them."""

    def backward(model, step, way):
        for micro in range(3):
            quiet = {"no_sync": micro < 2, "turns": micro == 1, "all": True, "never": False}[way]
            with model.no_sync() if quiet and hasattr(model, "no_sync") else nullcontext():
                (loss_of(model, rank, 3 * step + micro) / 3).backward()

    pair = Pair(gradient_as_bucket_view=view)
    for step, way in enumerate(("no_sync", "never", "turns", "all", "no_sync", "never")):
        pair.step(partial(backward, step=step, way=way), set_to_none=step != 4)
    assert pair.of_model.metrics()["steps"] == 6


@ranks(3)
@pytest.mark.parametrize("view", [False, True])
def test_unused_parameters(rank, world_size, view):
    """A parameter that one rank, or no rank, uses in a step counts as zero there, also in a part of the passes."""

    def backward(model, step, uses):
        for micro, spare in enumerate(uses):
            loss_of(model, rank, 10 * step + micro, spare=spare).backward()

    pair = Pair(make=Uneven, find_unused_parameters=True, gradient_as_bucket_view=view, bucket_cap_mb=0.0003)
    uses = ((True,), (rank != 1,), (False,), (rank == 1, True), (True, rank == 1), (False,), (True,))
    for step, used in enumerate(uses):
        pair.step(partial(backward, step=step, uses=used))
    assert equal(pair.model)


class Statistics(nn.Module):
    """Normalizes by statistics of the batches of all ranks: a collective in both passes, as ``SyncBatchNorm`` has."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 40), nn.Linear(40, 3)

    def forward(self, x):
        """Return the output."""
        x = self.first(x)
        return self.last(x - all_reduce(x.mean(0)) / dist.get_world_size())


class Stack(nn.Module):
    """Two layers with reentrant checkpointing, whose backward passes are within another one, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]), nn.Linear(6, 3)

    def forward(self, x):
        """Return the output."""
        x = x.requires_grad_()
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        return self.head(x)


class TwoTypes(nn.Module):
    """A model with parameters of two dtypes, which DDP never puts into one bucket."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(6, 40), nn.Linear(40, 40).bfloat16(), nn.Linear(40, 3)

    def forward(self, x):
        """Return the output."""
        return self.third(self.second(self.first(x).tanh().bfloat16()).tanh().float())


def strided(kind):
    """Return a model with a matrix whose strides are swapped, or which has gaps between its rows."""
    model = net()
    weight = model[2].weight.detach()
    model[2].weight = nn.Parameter(weight.t().contiguous().t() if kind == "swapped" else weight.repeat(1, 2)[:, :40])
    return model


def frozen():
    """Return a model with a bias that does not train."""
    model = net()
    model[2].bias.requires_grad_(False)
    return model


SITUATIONS = {
    "a renewal of the scale, and while DDP builds its buckets": {"settings": {"warmup_steps": 2}, "steps": 8},
    "AMSGrad": {"optimizer": partial(adamw, amsgrad=True), "settings": {"algo": "topk_allgather"}},
    "clipped": {"optimizer": sgd, "settings": {"algo": "spardl", "max_grad_norm": 0.5}},
    "as most users call it": {
        "optimizer": sgd, "settings": {"dense_below": 1024, "small": "8bit", "warmup_steps": 16}
    },
    "views of buckets": {"make": frozen, "gradient_as_bucket_view": True},
    "a static graph": {"make": frozen, "static_graph": True},
    "views in a static graph": {"make": frozen, "static_graph": True, "gradient_as_bucket_view": True},
    "one bucket": {"bucket_cap_mb": 1000},
    "many buckets": {"bucket_cap_mb": 0.0001, "broadcast_buffers": False},
    "a collective in a backward pass": {"make": Statistics},
    "nested passes": {"make": Stack},
    "two dtypes": {"make": TwoTypes},
    "swapped strides": {"make": partial(strided, "swapped")},
    "gaps": {"make": partial(strided, "gaps")},
}  # fmt: skip


@ranks(2)
@pytest.mark.parametrize("name", SITUATIONS)
def test_situations(rank, world_size, name):
    """Methods, options of DDP and kinds of layers: all train as in a plain module. Hooks see this rank's gradients."""
    fields = dict(SITUATIONS[name])
    steps = fields.pop("steps", 3)
    with renewed_every(5):
        pair, seen = Pair(**fields), []
        for parameter in pair.model.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        for step in range(steps):
            seen.clear()
            pair.step(lambda model, step=step: loss_of(model, rank, step).backward(), set_to_none=step != 2)
            assert len(seen) == sum(parameter.requires_grad for parameter in pair.plain.parameters())
            assert not equal(seen)
    assert equal(pair.model)
    assert pair.of_model.metrics().get("grad_norm") == pair.of_plain.metrics().get("grad_norm")
    if fields.get("make") is frozen:
        assert torch.equal(pair.model.module[2].bias, net()[2].bias)


@ranks(3)
def test_buffers(rank, world_size):
    """DDP broadcasts the buffers of the first rank before each pass, as it does without an exchange."""

    def normed():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 3))

    averaging, model = ddp(normed()), ddp(normed())
    bare = torch.optim.SGD(averaging.parameters(), lr=0.1)
    optimizer = tritoncomm.wrap(torch.optim.SGD(model.parameters(), lr=0.1), "dense", model=model)
    for each, stepped in ((averaging, bare), (model, optimizer)):
        train(each, stepped, rank, range(4))
        each.train(mode=False)
        loss_of(each, rank, 9)  # a forward pass, before which DDP broadcasts
    assert torch.allclose(flat(averaging), flat(model), atol=1e-6)
    assert torch.allclose(averaging.module[1].running_mean, model.module[1].running_mean, atol=1e-6)
    assert equal(model.buffers())


@ranks(3)
def test_several_modules(rank, world_size):
    """``model`` may contain several modules in DDP."""
    box = nn.ModuleList([ddp(net()), ddp(net())])
    optimizer = exact(torch.optim.SGD(box.parameters(), lr=0.1), model=box)
    for model in box:
        loss_of(model, rank, 0).backward()
        assert not same(gradients(model).tolist())
    optimizer.step()
    assert equal(box)


@ranks(2, limit=120.0)
def test_compiled(rank, world_size):
    """``torch.compile`` of the module in DDP, and of a function that takes the step."""
    pair = Pair(bucket_cap_mb=25)  # the smallest buckets are too small for torch.compile
    compiled = torch.compile(pair.model, backend="eager")
    pair.of_model.release()
    exact(pair.of_model, model=compiled)
    for model, optimizer in ((pair.plain, pair.of_plain), (compiled, pair.of_model)):

        def stepped(loss, optimizer=optimizer):
            loss.backward()
            optimizer.step()

        stepped = torch.compile(stepped, backend="eager") if model is compiled else stepped
        for step in range(3):
            optimizer.zero_grad()
            stepped(loss_of(model, rank, step))
    pair.check()


@ranks(1)
@pytest.mark.parametrize("kind", ["accumulation", "no sync", "twice", "join", "unused", "scaled", "not finite"])
def test_one_worker(rank, world_size, kind):
    """A single worker trains as the bare optimizer does behind bare DDP, to the bit, whatever bare DDP allows."""
    assert torch.equal(*(trained_alone(kind, wrapped=each) for each in (False, True)))


def trained_alone(kind, *, wrapped):
    """Train with or without this library, and return the parameters."""
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
            bad = kind == "not finite" and step == 2
            if bad and not wrapped:
                continue  # the wrapped one skips this step
            optimizer.zero_grad()
            with outer.no_sync() if kind == "no sync" else nullcontext():
                for micro in range(2 if kind in ("accumulation", "no sync") else 1):
                    scaler.scale(loss_of(outer, 0, 2 * step + micro) * (float("nan") if bad else 1.0)).backward()
            for _ in range(2 if kind == "twice" else 1):
                scaler.step(optimizer)
                scaler.update()
    return flat(model)


@ranks(2)
def test_released(rank, world_size):
    """The module of a released optimizer still averages nothing, and the error names the way back to dense."""
    model = ddp(net())
    optimizer = exact(sgd(model), model=model)
    train(model, optimizer, rank, range(2))
    optimizer.release()
    with pytest.raises(ConfigurationError, match=r"put model\.module into a new DistributedDataParallel"):
        train(model, optimizer, rank, range(1))
    inner = model.module
    del model
    gc.collect()
    again = ddp(inner)
    train(again, optimizer, rank, range(2))
    assert equal(again)


@ranks(2)
@pytest.mark.parametrize(
    "way", ["passed to nobody", "scaled", "in a part", "rounded", "of a copy", "later", "equal data"]
)
def test_averaged_gradients_are_heard(rank, world_size, way):
    """The first rank says once that gradients are equal before the exchange, and names the argument that is missing."""
    model = net() if way in ("later", "equal data") else ddp(net())
    trained = nn.Sequential(model, nn.Linear(3, 3)) if way == "in a part" else model
    if way == "of a copy":
        exact(sgd(model), model=model)
        trained = copy.deepcopy(model)
    rounded = {"warmup_steps": 2, "small": "8bit"} if way == "rounded" else {}
    optimizer = exact(sgd(trained), **rounded)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=way == "scaled")
    with log_lines() as lines, pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "EVERY", 3)
        for step in range(-1, 8) if way == "later" else range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(trained, 0 if way == "equal data" else rank, max(step, 0))).backward()
            if step < 0:  # NaN on all ranks are equal, too, and nobody has averaged them
                for parameter in trained.parameters():
                    parameter.grad.fill_(torch.nan)
            if way == "later" and step > 3:
                for parameter in trained.parameters():
                    dist.all_reduce(parameter.grad)
            scaler.step(optimizer)
            scaler.update()
    found = [line for line in lines if AVERAGED in line]
    assert len(found) == (rank == 0)
    assert all("pass model=ddp_model" in line for line in found)
    assert all(f"in step {7 if way == 'later' else 1}," in line for line in found)


@ranks(2)
def test_module_in_ddp_that_is_built_again(rank, world_size):
    """It is named in the next check, and the advice works: ``reset_process_group(model=...)`` keeps the residual."""
    inner = net()
    optimizer = exact(adamw(inner), model=ddp(inner))
    model = ddp(inner)
    with log_lines() as lines:
        train(model, optimizer, rank, range(1))
    found = [line for line in lines if AVERAGED in line]
    assert len(found) == (rank == 0)
    assert all("optimizer.reset_process_group(model=ddp_model)" in line for line in found)
    pending = residual(optimizer)
    optimizer.reset_process_group(model=model)
    assert torch.equal(residual(optimizer), pending)
    train(model, optimizer, rank, range(1, 3))
    model.zero_grad()
    loss_of(model, rank, 3).backward()
    assert not same(gradients(model).tolist())
    assert equal(inner)


def own_hook(state, bucket):  # DDP accepts no annotation that is text
    """Return the bucket as it is."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@ranks(2)
def test_replicate_is_told_that_it_averages(rank, world_size):
    """It has a method of FSDP2, and shards nothing."""
    model = replicate(net())
    optimizer = exact(adamw(model), model=model)
    with log_lines() as lines:
        train(model, optimizer, rank, range(2))
    assert equal(model)
    assert rank or any("are equal on all ranks before the exchange" in line for line in lines), lines


@ranks(2)
def test_what_ddp_does_beside(rank, world_size):
    """What averages beside the hook is refused, a failed wrap() leaves one that averages, and a hook comes too late."""
    halved = DistributedDataParallel(nn.Linear(6, 3), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    with pytest.raises(REFUSED, match="mixed_precision"):
        exact(adamw(halved), model=halved)
    inner = net()
    own = {"delay_all_reduce_named_params": [("0.bias", inner[0].bias)], "param_to_hook_all_reduce": inner[0].weight}
    delayed = DistributedDataParallel(inner, **own)
    with pytest.raises(REFUSED, match="delay_all_reduce_named_params"):
        exact(adamw(delayed), model=delayed)
    model, untouched = ddp(net()), ddp(net())
    with pytest.raises(REFUSED):
        exact(adamw(model), model=model, max_grad_norm=-1)
    for each in (model, untouched):  # a wrap() that failed leaves a module that averages
        loss_of(each, rank, 0).backward()
    assert torch.equal(gradients(model), gradients(untouched))
    adamw(model).step()
    exact(adamw(model), model=model)
    with pytest.raises(RuntimeError, match="can only be called once"):  # by DDP
        model.register_comm_hook(None, own_hook)


@ranks(2)
@pytest.mark.parametrize("way", ["copied", "pickled"])
def test_copied_model(rank, world_size, way):
    """A copy of a wrapped module averages as DDP does, until it is wrapped itself."""
    model = ddp(net())
    optimizer = exact(adamw(model), model=model)
    train(model, optimizer, rank, range(2))
    optimizer.zero_grad()
    clone = copy.deepcopy(model) if way == "copied" else pickle.loads(pickle.dumps(model))  # noqa: S301 - our own
    plain = copy.deepcopy(model.module)
    loss_of(clone, rank, 9).backward()
    assert same(gradients(clone).tolist())
    for each, stepped in ((clone, exact(adamw(clone), model=clone)), (plain, exact(adamw(plain)))):
        train(each, stepped, rank, range(2, 5))
    train(model, optimizer, rank, range(2, 5))
    assert torch.equal(flat(clone), flat(plain))
    assert optimizer.metrics()["steps"] == 5
    assert equal(model)


@ranks(2)
@pytest.mark.parametrize("kind", ["unfrozen", "beside"])
def test_parameters_that_ddp_does_not_know(rank, world_size, kind):
    """Those that were frozen as it was built, or are not its own, are exchanged as all others."""
    ends = []
    for is_plain in (True, False):
        model, extra = net(), nn.Parameter(torch.ones(5))
        model[0].weight.requires_grad_(kind != "unfrozen")
        outer = model if is_plain else ddp(model)
        model[0].weight.requires_grad_()
        parameters = [*model.parameters(), *([extra] if kind == "beside" else [])]
        optimizer = exact(torch.optim.AdamW(parameters, lr=0.01), **({} if is_plain else {"model": outer}))
        for step in range(4):
            optimizer.zero_grad()
            (loss_of(outer, rank, step) + ((1 + rank) * extra).square().sum()).backward()
            optimizer.step()
        ends.append(flat(parameters))
    assert torch.equal(*ends)


@ranks(4)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_process_groups_are_used_again(rank, world_size, kind):
    """Wrapping an optimizer again, or that of another model, creates no further process group."""
    over, counts = mesh(), []
    given = {"process_group": over["replicate"].get_group()} if kind == "fsdp" else {}
    for number in range(4):
        model = ddp(net()) if kind == "ddp" else sharded(net(), over)
        optimizer = exact(adamw(model), model=model, **given)
        train(model, optimizer, rank, range(1))
        optimizer.release()
        exact(optimizer, model=model, **given)
        counts.append(len(dist.distributed_c10d._world.pg_names))
        del model, optimizer
        if rank != 1 or number % 2:  # ranks need not collect the garbage at the same time
            gc.collect()
    assert counts[2] == counts[3], counts


@ranks(2)
def test_early_termination(rank, world_size):
    """``join()`` is an error on all ranks, unless it ends training with the first rank that has no batch."""
    model = ddp(net())
    optimizer = exact(adamw(model), model=model)
    with pytest.raises(RuntimeError, match="exhausted"), model.join(throw_on_early_termination=True):
        train(model, optimizer, rank, range(3 + rank))
    assert optimizer.metrics()["steps"] == 3
    fix = r"every rank must call.*without a backward pass.*throw_on_early_termination=True"
    for context in (model.join, lambda: Join([model])):  # as Accelerate does
        before = flat(model)
        with pytest.raises(ConfigurationError, match=fix), context():
            train(model, optimizer, rank, range(3 + rank))
        assert torch.equal(flat(model), before)
    with model.join(enable=False):
        train(model, optimizer, rank, range(3, 5))
    assert equal(model)
    with ddp(net()).join():  # of a model that averages
        pass
