"""Worker processes of tests/distributed/test_ddp.py: what surrounds a module in DDP, and what is refused by name."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from ddp_models import SETTINGS, Pair, ddp, net
from helpers import adamw, flat, log_lines, loss_of, residual, same_everywhere, train
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from tritoncomm import ConfigMismatchError, ConfigurationError, PeerLostError
from tritoncomm.step.agree import replica

import laws


def unwrapped_optimizer(rank: int, world_size: int, send) -> None:
    """DDP averages nothing once one optimizer is wrapped, so another one that is not wrapped cannot step."""
    model = ddp(net())
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    bare = torch.optim.SGD(vectors, lr=0.1)
    optimizer = tritoncomm.wrap(torch.optim.AdamW(matrices, lr=0.01), model=model, **SETTINGS)
    loss_of(model, rank, 0).backward()
    before = flat(model)
    fix = r"optimizer = tritoncomm\.wrap\(optimizer, model=model"
    with pytest.raises(ConfigurationError, match=rf"SGD steps '0\.bias'.*{fix}"):
        bare.step()
    assert flat(model) == before
    optimizer.step()
    other = tritoncomm.wrap(bare, model=model, **SETTINGS)
    for step in range(1, 4):
        for each in (optimizer, other):
            each.zero_grad()
        loss_of(model, rank, step).backward()
        for each in (optimizer, other):
            each.step()
    assert same_everywhere(flat(model))
    torch.optim.SGD(net().parameters(), lr=0.1).step()  # of another model
    averaged = ddp(net())
    loss_of(averaged, rank, 0).backward()
    torch.optim.SGD(averaged.parameters(), lr=0.1).step()  # of a model that DDP averages


def not_assigned(rank: int, world_size: int, send) -> None:
    """An optimizer that was wrapped without using the result raises the same error for every kind of model."""
    named = r"this {}, .*was wrapped.*own step\(\) does not exchange gradients: assign the result, optimizer = "
    for model in (net(), ddp(net())):
        base = adamw(model)
        kept = tritoncomm.wrap(base, model=model, **SETTINGS)
        loss_of(model, rank, 0).backward()
        before = flat(model)
        with pytest.raises(RuntimeError, match=named.format("AdamW") + r".*release\(\)"):
            base.step()
        with pytest.raises((ConfigurationError, ConfigMismatchError), match=r"returned.* pass optimizer\.optimizer"):
            tritoncomm.wrap(kept, model=model, **SETTINGS)
        assert flat(model) == before
        base = tritoncomm.wrap(base, model=model, **SETTINGS)  # as the error says
        train(model, base, rank, range(2))
        assert flat(model) != before
        assert same_everywhere(flat(model))
    for kind in (list, tritoncomm.OptimizerList):
        model = ddp(net())
        matrices = torch.optim.SGD([p for p in model.parameters() if p.dim() > 1], lr=0.1)
        vectors = torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1], lr=0.01)
        kept = tritoncomm.wrap(kind([matrices, vectors]), model=model, **SETTINGS)
        loss_of(model, rank, 0).backward()
        before = flat(model)
        for each in (matrices, vectors):
            with pytest.raises(RuntimeError, match=named.format(type(each).__name__)):
                each.step()
        assert flat(model) == before
        train(model, kept, rank, range(2))
    model = ddp(net())
    base = adamw(model)
    tritoncomm.wrap(base, model=model, **SETTINGS)  # nobody keeps it
    loss_of(model, rank, 0).backward()
    with pytest.raises(ConfigurationError, match=r"AdamW steps '0\.weight'.*optimizer = tritoncomm\.wrap\(optimizer,"):
        base.step()


class Around(torch.optim.Optimizer):
    """An optimizer that lets another one take its step, as Lookahead and SAM do."""

    def __init__(self, params) -> None:
        self.inner = torch.optim.SGD(params, lr=0.1)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)


def inner_optimizers(rank: int, world_size: int, send) -> None:
    """A wrapped optimizer may consist of others, which step its parameters, with DDP and beside DDP."""
    other = ddp(net())
    unrelated = tritoncomm.wrap(torch.optim.SGD(other.parameters(), lr=0.1), model=other, **SETTINGS)
    for model in (ddp(net()), net()):
        optimizer = tritoncomm.wrap(Around(model.parameters()), model=model, **SETTINGS)
        before = flat(model)
        train(model, optimizer, rank, range(3))
        assert flat(model) != before
        assert same_everywhere(flat(model))
    unrelated.zero_grad()


def released(rank: int, world_size: int, send) -> None:
    """The module of a released optimizer still averages nothing, and the error names the way back to dense."""
    model = ddp(net())
    original = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = tritoncomm.wrap(original, model=model, **SETTINGS)
    train(model, optimizer, rank, range(2))
    optimizer.release()
    with pytest.raises(ConfigurationError, match=r"put model\.module into a new DistributedDataParallel"):
        train(model, original, rank, range(1))
    inner = model.module
    del model
    gc.collect()
    again = ddp(inner)
    train(again, original, rank, range(2))
    assert same_everywhere(flat(again))


def averaged_before(rank: int, world_size: int, send) -> None:
    """A module that averages is named in the first exchange after whatever may have brought it in."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def scaled(model, optimizer) -> None:
        scaler.scale(loss_of(model, rank, 0)).backward()
        scaler.step(optimizer)

    def loaded(model, optimizer) -> None:
        plain = net()
        saved = tritoncomm.wrap(torch.optim.SGD(plain.parameters(), lr=0.1), **SETTINGS)
        train(plain, saved, rank, range(2))
        optimizer.load_state_dict(saved.state_dict())
        train(model, optimizer, rank, range(1))

    def copied(model, optimizer) -> None:
        told = tritoncomm.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model=model, **SETTINGS)
        train(*copy.deepcopy((model, told)), rank, range(1))

    def in_part(model, optimizer) -> None:
        box = nn.Sequential(model, nn.Linear(3, 2))
        optimizer = tritoncomm.wrap(torch.optim.SGD(box.parameters(), lr=0.1), **SETTINGS)
        box(torch.randn(4, 6) + rank).sum().backward()
        optimizer.step()

    for case in (scaled, loaded, copied, in_part):
        model = ddp(net())
        optimizer = tritoncomm.wrap(torch.optim.SGD(model.parameters(), lr=0.1), **SETTINGS)
        before = flat(model)
        with log_lines() as lines:
            case(model, optimizer)
        found = [line for line in lines if "equal on all ranks before the exchange" in line]
        assert len(found) == (rank == 0), case
        assert not found or "pass model=ddp_model to tritoncomm.wrap()" in found[0]
        assert case is copied or flat(model) != before, case


def containers(rank: int, world_size: int, send) -> None:
    """``model`` may contain several modules in DDP: all of them average nothing."""
    first, second = ddp(net()), ddp(net())
    box = nn.ModuleList([first, second])
    optimizer = tritoncomm.wrap(torch.optim.SGD(box.parameters(), lr=0.1), model=box, **SETTINGS)
    for model in (first, second):
        loss_of(model, rank, 0).backward()
        assert not same_everywhere([p.grad.tolist() for p in model.parameters()])
    optimizer.step()
    assert same_everywhere(flat(box))


def other_hooks(rank: int, world_size: int, send) -> None:
    """A module that has another communication hook is refused by the name of the hook. Nothing has changed."""

    def own_hook(state, bucket):  # DDP accepts no annotation that is text
        return allreduce_hook(None, bucket)

    for hook, state in (
        (fp16_compress_hook, None),
        (powerSGD_hook, PowerSGDState(None, matrix_approximation_rank=1)),
        (own_hook, None),
    ):
        model = ddp(net())
        model.register_comm_hook(state, hook)
        with pytest.raises((ConfigurationError, ConfigMismatchError), match=hook.__name__):
            tritoncomm.wrap(adamw(model), model=model, **SETTINGS)
    model = ddp(net())
    optimizer = tritoncomm.wrap(adamw(model), model=model, **SETTINGS)
    with pytest.raises(RuntimeError, match="can only be called once"):  # by DDP
        model.register_comm_hook(None, hook=fp16_compress_hook)
    train(model, optimizer, rank, range(2))
    assert same_everywhere(flat(model))
    ddp(net()).register_comm_hook(None, fp16_compress_hook)  # of another model
    copy.deepcopy(model).register_comm_hook(None, fp16_compress_hook)  # a copy averages
    halved = DistributedDataParallel(nn.Linear(6, 3), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    with pytest.raises((ConfigurationError, ConfigMismatchError), match=r"mixed_precision"):
        tritoncomm.wrap(adamw(halved), model=halved)
    other = nn.Linear(6, 3)
    other.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ConfigurationError, match=r"complex64.*view_as_real"):
        tritoncomm.wrap(adamw(other), model=DistributedDataParallel(other))
    model = ddp(net())
    with pytest.raises((ConfigurationError, ConfigMismatchError)):
        tritoncomm.wrap(adamw(model), model=model, density=7)
    untouched = ddp(net())
    for each in (model, untouched):  # a wrap() that failed leaves a module that averages
        loss_of(each, rank, 0).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), untouched.parameters(), strict=True))
    adamw(model).step()


def copied_model(rank: int, world_size: int, send) -> None:
    """A copy of a wrapped module, or a pickled one, averages as DDP does, until it is wrapped itself."""
    for copied in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):  # noqa: S301 - our own
        model = ddp(net())
        optimizer = tritoncomm.wrap(adamw(model), model=model, **SETTINGS)
        train(model, optimizer, rank, range(2))
        optimizer.zero_grad()
        clone, plain = copied(model), copy.deepcopy(model.module)
        again = tritoncomm.wrap(adamw(clone), model=clone, **SETTINGS)
        reference = tritoncomm.wrap(adamw(plain), **SETTINGS)
        for each, stepped in ((clone, again), (plain, reference), (model, optimizer)):
            train(each, stepped, rank, range(2, 5))
        assert flat(clone) == flat(plain)
        assert (again.metrics()["steps"], optimizer.metrics()["steps"]) == (3, 5)
        assert same_everywhere((flat(model), flat(clone)))
    inner = adamw(model)  # wrapped again, and a copy of the optimizer
    for _ in range(2):
        again = tritoncomm.wrap(inner, model=model, **SETTINGS)
    train(model, again, rank, range(5, 7))
    assert same_everywhere(flat(model))


def parameters_of_others(rank: int, world_size: int, send) -> None:
    """Parameters that were frozen for DDP, or that are not its own, are exchanged as all others."""
    for kind in ("unfrozen", "beside"):
        model, reference = net(), net()
        extra, other = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
        if kind == "unfrozen":
            model[0].weight.requires_grad_(requires_grad=False)
        outer = ddp(model)
        model[0].weight.requires_grad_(requires_grad=True)
        parameters = [*model.parameters(), *([extra] if kind == "beside" else [])]
        plain = [*reference.parameters(), *([other] if kind == "beside" else [])]
        optimizers = (
            tritoncomm.wrap(torch.optim.AdamW(parameters, lr=0.01), model=outer, **SETTINGS),
            tritoncomm.wrap(torch.optim.AdamW(plain, lr=0.01), **SETTINGS),
        )
        for step in range(4):
            for each, added, optimizer in ((outer, extra, optimizers[0]), (reference, other, optimizers[1])):
                optimizer.zero_grad()
                (loss_of(each, rank, step) + ((1 + rank) * added).square().sum()).backward()
                optimizer.step()
        assert all(map(torch.equal, parameters, plain)), kind
    table = ddp(nn.Sequential(nn.Embedding(8, 3, sparse=True), nn.Linear(3, 3)))
    optimizer = tritoncomm.wrap(torch.optim.SGD(table.parameters(), lr=0.1), model=table, **SETTINGS)
    table(torch.tensor([rank, 2])).square().sum().backward()
    with pytest.raises(ConfigurationError, match=r"Embedding\(sparse=False\)"):
        optimizer.step()


def groups_of_torch() -> int:
    """Return the number of process groups of this process."""
    return len(dist.distributed_c10d._world.pg_names)


def groups_are_used_again(rank: int, world_size: int, send) -> None:
    """Wrapping an optimizer again, or that of another model, creates no further process group."""
    gc.freeze()  # so that a collection does not look through all that is imported
    counts = []
    for number in range(6):
        model = ddp(net())
        optimizer = tritoncomm.wrap(adamw(model), model=model, **SETTINGS)
        train(model, optimizer, rank, range(2))
        optimizer = tritoncomm.wrap(optimizer.optimizer, model=model, **SETTINGS)
        counts.append(groups_of_torch())
        del model, optimizer
        if rank != 1 or number % 2:  # ranks need not collect the garbage at the same time
            gc.collect()
    assert counts[2:] == counts[2:3] * 4, counts


def early_termination(rank: int, world_size: int, send) -> None:
    """``join()`` is an error on all ranks, unless it ends training with the first rank that has no batch."""
    model = ddp(net())
    optimizer = tritoncomm.wrap(adamw(model), model=model, **SETTINGS)
    with pytest.raises(RuntimeError, match="exhausted"), model.join(throw_on_early_termination=True):
        train(model, optimizer, rank, range(3 + rank))
    assert optimizer.metrics()["steps"] == 3
    assert same_everywhere(flat(model))
    fix = r"every rank must call.*without a backward pass.*throw_on_early_termination=True"
    for context in (model.join, lambda: Join([model])):  # as Accelerate does
        before = flat(model)
        with pytest.raises(ConfigurationError, match=fix), context():
            train(model, optimizer, rank, range(3 + rank))
        assert flat(model) == before
    with model.join(enable=False):
        train(model, optimizer, rank, range(3, 5))
    assert same_everywhere(flat(model))
    with ddp(net()).join():  # of a model that averages
        pass


def new_module(rank: int, world_size: int, send) -> None:
    """``reset_process_group`` takes a new DDP module around the same module, in a smaller group, and names another."""
    model = ddp(net())
    optimizer = tritoncomm.wrap(adamw(model), model=model, **SETTINGS)
    train(model, optimizer, rank, range(4))
    pending = residual(optimizer)
    survivors = dist.new_group([0, 2])
    if rank != 1:
        smaller = ddp(model.module, process_group=survivors)
        optimizer.reset_process_group(survivors, model=smaller)
        assert torch.allclose(residual(optimizer), pending * 2 / 3)
        plain = copy.deepcopy(model.module)
        for step in range(4, 7):
            optimizer.zero_grad()
            loss_of(smaller, rank, step).backward()
            gradients = [p.grad.clone() for p in smaller.parameters()]
            plain.load_state_dict(smaller.module.state_dict())
            plain.zero_grad()
            loss_of(plain, rank, step).backward()  # the new module does not average either
            assert all(torch.equal(p.grad, g) for p, g in zip(plain.parameters(), gradients, strict=True))
            optimizer.step()
        assert same_everywhere(flat(smaller), survivors)
        assert optimizer.metrics()["steps"] == 7
    dist.barrier()


def nodes(rank: int, world_size: int, send) -> None:
    """With ``node_group``, ranks of a node average densely, as with the plain module. The module's group is in use."""
    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=77))
    node = dist.new_group([rank], use_local_synchronization=True)
    pair = Pair(settings=SETTINGS | {"node_group": node}, process_group=group)
    for step in range(3):
        pair.step(lambda model, step=step: loss_of(model, rank, step).backward())
    assert pair.of_ddp.process_group is group
    other = dist.new_group(list(range(world_size)))
    with pytest.raises((ConfigurationError, ConfigMismatchError), match="process_group"):
        tritoncomm.wrap(adamw(pair.ddp), model=pair.ddp, process_group=other)
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    with pytest.raises(ConfigMismatchError, match="number of process groups"):
        tritoncomm.wrap(adamw(net()), node_group=node, **SETTINGS)


def killed(rank: int, world_size: int, send) -> None:
    """If a rank dies in an exchange, ``step()`` names it and changes nothing. The others continue in a new module."""
    model = ddp(net())
    optimizer = tritoncomm.wrap(adamw(model), model=model, timeout=timedelta(seconds=5), **SETTINGS)
    train(model, optimizer, rank, range(3))
    optimizer.zero_grad()
    loss_of(model, rank, 3).backward()
    before, pending = flat(model), residual(optimizer)
    if rank == 1:
        optimizer._vector.scheduler._perform = lambda op: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match=r"step \d+, round \d+, phase .* of oktopk.*lost rank 1") as caught:
        optimizer.step()
    assert caught.value.peers == (1,)
    assert flat(model) == before
    assert laws.same_bits(residual(optimizer), pending)
    send((rank, "named"))
    group = dist.new_group([0, 2], timeout=timedelta(seconds=20), use_local_synchronization=True)
    model = DistributedDataParallel(model.module, process_group=group, init_sync=False)
    optimizer.reset_process_group(group, model=model)
    assert torch.allclose(residual(optimizer), pending * 2 / 3)
    train(model, optimizer, rank, range(3, 6))
    send((rank, "continued" if same_everywhere(flat(model), group) and flat(model) != before else "diverged"))
    os._exit(0)


def built_again(rank: int, world_size: int, send) -> None:
    """A DDP module that is built in the middle of training is named in the next check, and its advice works."""
    replica.EVERY = 6
    advice = "before the exchange, the first is that of 2.weight"
    for given in (True, False):  # the module in DDP was passed to wrap(), or there was none
        inner = net()
        model = ddp(inner) if given else inner
        optimizer = tritoncomm.wrap(adamw(inner), model=model, **SETTINGS)
        train(model, optimizer, rank, range(4))
        unused = ddp(inner)  # which averages nothing, because no pass runs through it
        train(model, optimizer, rank, range(4, 6))
        inner[0].requires_grad_(requires_grad=False)
        del unused
        model = ddp(inner)
        before = flat(inner)
        with log_lines() as lines:
            train(model, optimizer, rank, range(6, 7))
        found = [line for line in lines if advice in line]
        assert len(found) == (rank == 0)
        assert not found or "optimizer.reset_process_group(model=ddp_model)" in found[0]
        pending = residual(optimizer)
        optimizer.reset_process_group(model=model)
        assert torch.equal(residual(optimizer), pending)
        with log_lines() as lines:
            train(model, optimizer, rank, range(7, 9))
        assert not same_everywhere([p.grad.tolist() for p in gradients_of(model, rank)])
        assert not any("averages" in line or "equal" in line for line in lines)
        assert flat(inner) != before
        assert same_everywhere(flat(inner))
        assert optimizer.metrics()["steps"] == 9


def gradients_of(model: nn.Module, rank: int) -> list[nn.Parameter]:
    """Return the parameters of ``model`` that have a gradient after a new pass."""
    model.zero_grad()
    loss_of(model, rank, 0).backward()
    return [parameter for parameter in model.parameters() if parameter.grad is not None]


def averaged_later(rank: int, world_size: int, send) -> None:
    """Gradients that somebody averages are found in later checks, too, and named once."""
    replica.EVERY = 3
    model = net()
    optimizer = tritoncomm.wrap(adamw(model), **SETTINGS)
    train(model, optimizer, rank, range(4))
    with log_lines() as lines:
        for step in range(4, 14):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
    found = [line for line in lines if "equal on all ranks before the exchange" in line]
    assert len(found) == (rank == 0)
    assert not found or "in step 7," in found[0]
    copied = copy.deepcopy(ddp(net()))  # no constructor runs
    optimizer = tritoncomm.wrap(adamw(copied.module), **SETTINGS)
    train(copied.module, optimizer, rank, range(5))
    with log_lines() as lines:
        train(copied, optimizer, rank, range(5, 8))
    assert sum("equal on all ranks before the exchange" in line for line in lines) == (rank == 0)
