"""Workers that step alone between exchanges: nothing of what they change is lost."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tritoncomm
from kit import log_lines
from models import Uneven, content, equal, flat, load, loss_of, mesh, net, sharded, total, train
from torch import nn
from tritoncomm import ConfigMismatchError, ConfigurationError, NonFiniteError, OkTopk, ProtocolMismatchError, Updates
from tritoncomm.checkpoint import ResidualState

from ranks import ranks

TWO_BITS = tritoncomm.recipe("quantized", values="2bit")
SHAPES = [(16, 16), (40,), (8, 8, 2)]


def parameters_of(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Return parameters that are small integers, the same on all ranks."""
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randint(-8, 9, shape, generator=generator).to(dtype)) for shape in SHAPES]


def give(parameters, step: int, rank: int, world_size: int) -> torch.Tensor:
    """Give every parameter a gradient of integers that are multiples of the number of workers, and return them."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    for parameter in parameters:
        drawn = torch.randint(-8, 9, parameter.shape, generator=generator)
        parameter.grad = (drawn * world_size).to(parameter.dtype)
    return flat(p.grad for p in parameters)


def wrapped(parameters, recipe, outer_momentum=0.0, **settings) -> tritoncomm.SparseOptimizer:
    """Return SGD that changes parameters by their gradients, and exchanges updates."""
    inner = torch.optim.SGD(parameters, lr=1.0)
    updates = Updates(algo=recipe, outer_momentum=outer_momentum)
    return tritoncomm.wrap(inner, updates=updates, **settings)


def owed(optimizer) -> torch.Tensor:
    """Return the residual of this worker, in the order of the parameters."""
    return torch.cat(list(optimizer._tritoncomm.setup.scope.vectors[0].residuals_by_parameter().values()))


def adam_of(model: nn.Module, algo: str | tritoncomm.Recipe = TWO_BITS) -> tritoncomm.SparseOptimizer:
    """Return Adam with three local steps and outer momentum."""
    inner = torch.optim.Adam(model.parameters(), lr=0.05)
    updates = Updates(algo=algo, outer_lr=0.8, outer_momentum=0.6)
    return tritoncomm.wrap(inner, model=model, local_steps=3, updates=updates)


@ranks(2)
@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.AdamW])
def test_worker_that_is_left_alone(rank, world_size, kind):
    """It applies what it owes, also to what has no gradient any more, and is then the bare optimizer, to the bit."""
    alone = [dist.new_group([each]) for each in range(world_size)][rank]
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 30, bias=False))
    settings = {"density": 0.1, "dense_below": 0, "warmup_steps": 0} if kind is torch.optim.AdamW else {}
    optimizer = tritoncomm.wrap(kind(model.parameters(), lr=0.05), model=model, broadcast_parameters=True, **settings)
    generator = torch.Generator().manual_seed(rank)
    for step in range(8):
        optimizer.zero_grad()
        hidden = model[0](torch.randn(4, 8, generator=generator))
        (model[1](hidden) if step < 5 else hidden).square().mean().backward()
        if step == 5:
            optimizer.reset_process_group(alone)
            assert owed(optimizer).any()
        bare = copy.deepcopy(model)
        own = kind(bare.parameters(), lr=0.05)
        own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for mine, theirs in zip(bare.parameters(), model.parameters(), strict=True):
            mine.grad = None if theirs.grad is None else theirs.grad.clone()
        optimizer.step()
        if step > 4:
            assert not owed(optimizer).any()
        if step > 5:
            own.step()
            assert torch.equal(flat(bare), flat(model))


@ranks(2, 3)
@pytest.mark.parametrize("is_common", [False, True])
def test_length_is_matched(rank, world_size, is_common):
    """The mean of independent updates gets the length of one of them, and that of equal updates keeps its length."""
    parameters = [nn.Parameter(torch.zeros(20_000))]
    optimizer = wrapped(parameters, "dense")
    gradient = torch.randn(20_000, generator=torch.Generator().manual_seed(0 if is_common else rank))
    parameters[0].grad = gradient.clone()
    optimizer.step()
    ratio = float(flat(parameters).norm() / (total(gradient) / world_size).norm())
    assert ratio == pytest.approx(1.0 if is_common else world_size**0.5, rel=0.1)
    assert equal(parameters)


@ranks(3)
def test_flush_with_an_outer_rate(rank, world_size):
    """It moves the common parameters by the rate times what all owe and have changed since the last exchange."""
    model = net()
    optimizer = adam_of(model, "oktopk")
    train(model, optimizer, rank, range(5))
    assert optimizer.metrics()["steps_until_exchange"] == 1
    anchors = flat(optimizer._tritoncomm.setup.local.anchors)
    pending = total(owed(optimizer) + anchors - flat(model)) / world_size
    optimizer.outer_lr = 0.8 + rank
    with pytest.raises(ProtocolMismatchError, match="lr of the common parameters"):
        optimizer.flush()
    optimizer.outer_lr = 0.8
    optimizer.flush()
    assert not owed(optimizer).any()
    assert equal(model)
    torch.testing.assert_close(flat(model), anchors - 0.8 * pending)


@ranks(2)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_outer_step(rank, world_size, momentum):
    """It is that of SGD. Its rate can be set, and one that differs between ranks, or is invalid, is refused by name."""
    parameters = parameters_of()
    optimizer = wrapped(parameters, "dense", momentum, local_steps=2)
    buffer = torch.zeros_like(flat(parameters))
    for rate in (1.0, 0.5):
        optimizer.outer_lr = rate
        before, given = flat(parameters), 0.0
        for step in range(2):
            given = given + give(parameters, step, rank, world_size)
            optimizer.step()
        mean = total(given) / world_size
        buffer = momentum * buffer + mean
        torch.testing.assert_close(before - flat(parameters), rate * (mean + momentum * buffer))
    with pytest.raises(ConfigurationError, match="outer_lr=-1"):
        optimizer.outer_lr = -1
    optimizer.outer_lr = 1.0 + rank
    give(parameters, 0, rank, world_size)
    optimizer.step()
    before = flat(parameters), optimizer.state_dict()["tritoncomm"]["checksum"]
    with pytest.raises(ProtocolMismatchError, match="lr of the common parameters"):
        optimizer.merge()
    assert torch.equal(flat(parameters), before[0])
    assert optimizer.state_dict()["tritoncomm"]["checksum"] == before[1]
    optimizer.outer_lr = 1.0
    optimizer.merge()
    assert equal(parameters)


@ranks(2)
@pytest.mark.parametrize("way", ["exchange", "flush"])
def test_worker_whose_parameters_are_broken(rank, world_size, way):
    """It adds nothing to a mean or to its residual, and forgets the state of its optimizer, which may be NaN, too."""
    model = net()
    optimizer = adam_of(model)
    train(model, optimizer, rank, range(2))
    if rank == 1:
        with torch.no_grad():
            model[0].weight[0, 0] = torch.nan
    if way == "exchange":
        train(model, optimizer, rank, [2])
    else:
        optimizer.flush()
    assert bool(optimizer.state) == (rank == 0)
    assert owed(optimizer).isfinite().all()
    assert flat(model).isfinite().all()
    assert equal(model)


@ranks(2)
def test_broken_worker_that_loads(rank, world_size):
    """What it loads is complete, although the exchange that would have mended its parameters was refused."""
    model = net()
    optimizer = adam_of(model)
    train(model, optimizer, rank, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.outer_lr = 0.8 + rank
    if rank == 1:
        with torch.no_grad():
            model[0].weight[0, 0] = torch.nan
    with pytest.raises(ProtocolMismatchError, match="lr of the common parameters"):
        train(model, optimizer, rank, range(3, 6))
    optimizer.load_state_dict(state)
    assert optimizer.state_dict()["state"].keys() == state["state"].keys()


@ranks(2)
def test_name_of_a_parameter_that_is_added(rank, world_size):
    """An error about what it has changed calls it by its name, as those from the beginning."""
    first, second = (nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    inner = torch.optim.SGD([("first", first)], lr=100.0)
    optimizer = tritoncomm.wrap(inner, updates=True, on_nonfinite="raise")
    optimizer.add_param_group({"params": [("second", second)]})
    first.grad, second.grad = torch.ones(4, 4), torch.ones(4, 4)
    if rank == 1:
        second.grad[0, 0] = 3e38  # its step is Inf
    with pytest.raises(NonFiniteError, match=r"second \(1 values\)"):
        optimizer.step()


@ranks(2)
def test_rates_of_local_steps_may_differ(rank, world_size):
    """Also numbers that an optimizer keeps in its groups, once it has stepped by itself. Other options may not."""
    model = net()
    optimizer = tritoncomm.wrap(torch.optim.AdamW(model.parameters(), lr=0.1), model=model, local_steps=2)
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank * (step > 1))
        train(model, optimizer, rank, [step])
    assert equal(model)
    optimizer.reset_process_group()
    optimizer.param_groups[0]["amsgrad"] = rank == 0
    with pytest.raises(ConfigMismatchError, match="amsgrad of parameter group 0"):
        optimizer.reset_process_group()


@ranks(2)
def test_figures(rank, world_size):
    """Metrics count steps, exchanges and bytes. Synchronizing leaves gradients alone."""
    parameters = parameters_of()
    optimizer = wrapped(parameters, tritoncomm.recipe("quantized", values="1bit"), local_steps=2)
    moved = 0.0
    for step in range(2):
        own = give(parameters, step, rank, world_size)
        optimizer.synchronize()
        assert torch.equal(flat(p.grad for p in parameters), own)
        moved = moved + own
        optimizer.step()
        figures = optimizer.metrics()
        assert figures["inner_steps"] == step + 1
        assert figures["exchanges"] == figures["steps"] == step
        assert figures["bytes_per_step"] == pytest.approx(figures["bytes_sent_total"] / (step + 1))
    assert figures["delta_norm"] == pytest.approx(float(moved.norm()))


@ranks(3)
@pytest.mark.parametrize("settings", [{}, {"outer_momentum": 0.5}])
def test_worker_that_joins(rank, world_size, settings):
    """It has the state of another, and owes nothing. The others owe the same in the larger group."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    parameters = parameters_of(torch.float64)
    recipe = OkTopk(density=0.1)
    optimizer = wrapped(parameters, recipe, local_steps=2, process_group=groups[rank == 2], **settings)
    for step in range(4 if rank < 2 else 0):
        give(parameters, step, rank, 2)
        optimizer.step()
    state = [[p.detach() for p in parameters], optimizer.state_dict()] if rank == 0 else [None, None]
    dist.broadcast_object_list(state, src=0)
    if rank == 2:
        with torch.no_grad():
            torch._foreach_copy_(parameters, state[0])
        optimizer.load_state_dict(state[1], residuals="reset")
    before = owed(optimizer)
    assert (rank == 2) != bool(before.any())
    optimizer.reset_process_group(dist.group.WORLD)
    torch.testing.assert_close(owed(optimizer), before * 3 / 2)
    kept, anchor, given = total(owed(optimizer)), flat(optimizer._tritoncomm.setup.local.anchors), 0.0
    for step in range(4, 8):
        given = given + give(parameters, step, rank, world_size)
        optimizer.step()
    assert equal(parameters)
    assert optimizer.metrics()["exchanges"] == 4
    if not settings:
        moved = world_size * (anchor - flat(parameters)) + total(owed(optimizer))
        torch.testing.assert_close(moved, kept + total(given), rtol=0, atol=1e-2)


@ranks(4)
def test_one_bad_shard(rank, world_size):
    """The shards of a replica leave out a step together. What all replicas load afterwards is the new beginning."""
    over = mesh()
    model, group = sharded(Uneven(), over), over["replicate"].get_group()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = tritoncomm.wrap(inner, model=model, process_group=group, local_steps=2, max_grad_norm=1.0)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        if step == 1 and rank == 0:
            model.head.weight.grad.to_local().fill_(float("nan"))
        optimizer.step()
    assert equal(model, group)
    assert optimizer.metrics()["exchanges"] == 2
    assert optimizer.metrics()["left_out_steps"] == (rank < 2)
    loaded = {name: 2 * parameter.detach() for name, parameter in model.state_dict().items()}
    model.load_state_dict(loaded)
    optimizer.param_groups[0]["lr"] = 1e-4
    train(model, optimizer, rank, range(2))
    assert equal(model, group)
    assert all((p - loaded[name]).to_local().abs().max() < 1e-2 for name, p in model.state_dict().items() if p.numel())


@ranks(2)
def test_inside_averaged(rank, world_size):
    """Inside ``averaged()``, which may be nested, whatever would use or replace this worker's parameters raises."""
    model = net()
    optimizer = adam_of(model)
    train(model, optimizer, rank, [0])
    own, state = flat(model), optimizer.state_dict()
    actions = {
        "state_dict()": optimizer.state_dict,
        "merge()": optimizer.merge,
        "flush()": optimizer.flush,
        "step()": optimizer.step,
        "load_state_dict()": lambda: optimizer.load_state_dict(state),
    }
    with optimizer.averaged():
        with optimizer.averaged():
            assert equal(model)
        for name, action in actions.items():
            with pytest.raises(RuntimeError, match=re.escape(f"{name} inside averaged()")):
                action()
    assert torch.equal(flat(model), own)


@ranks(2)
def test_loaded_weights(rank, world_size):
    """Between two exchanges they count as a step, and a warning says so once. Behind one they are the new beginning."""
    model, other = net(), net(1)
    optimizer = tritoncomm.wrap(torch.optim.RMSprop(model.parameters(), lr=1e-3), model=model, local_steps=4)
    train(model, optimizer, rank, [0])
    with log_lines() as lines:
        with optimizer.averaged():
            pass
        assert not lines
        model.load_state_dict(other.state_dict())
        for _ in range(2):
            with optimizer.averaged():
                assert not torch.equal(flat(model), flat(other))
    assert len([line for line in lines if "Before you load weights, call merge()" in line]) == 1
    optimizer.merge()
    model.load_state_dict(other.state_dict())
    train(model, optimizer, rank, [1])
    with optimizer.averaged():
        assert torch.equal(flat(model), flat(other))


@ranks(2)
@pytest.mark.parametrize("saved_after", [3, 4, 5])
def test_checkpoint_of_torch(rank, world_size, saved_after, tmp_path):
    """It resumes to the bit, after any number of local steps, if they were merged."""
    model = net()
    optimizer = adam_of(model)
    train(model, optimizer, rank, range(saved_after))
    if saved_after > 3:
        with pytest.raises(RuntimeError, match=r"local steps? w.* not exchanged: call merge\(\)"):
            ResidualState(optimizer).state_dict()
    optimizer.merge()
    dcp.save(content(model, optimizer), checkpoint_id=tmp_path)
    again = net()
    resumed = adam_of(again)
    load(again, resumed, tmp_path)
    again.load_state_dict(net(1).state_dict())  # what belongs to this rank comes after the model
    with resumed.averaged():
        assert torch.equal(flat(again), flat(model))
    for step in range(saved_after, saved_after + 4):
        train(model, optimizer, rank, [step])
        train(again, resumed, rank, [step])
        assert torch.equal(flat(again), flat(model))


NAMES = ["first", "second"]


def with_keys(state, of) -> dict:
    """Return a state dict with other keys of parameters."""
    groups = [group | {"params": [*map(of, group["params"])]} for group in state["param_groups"]]
    return state | {"state": {of(key): each for key, each in state["state"].items()}, "param_groups": groups}


@ranks(1, 2)
def test_checkpoint_of_torch_with_hooks(rank, world_size, tmp_path):
    """Hooks that give states other keys see what a script saves and loads, and nothing else."""
    runs = []
    for _ in range(2):
        parameters = parameters_of()[:2]
        optimizer = tritoncomm.wrap(torch.optim.Adam(parameters, lr=0.1), updates=True)
        optimizer.register_state_dict_post_hook(lambda _, state: with_keys(state, NAMES.__getitem__))
        optimizer.register_load_state_dict_pre_hook(lambda _, state: with_keys(state, NAMES.index))
        runs.append((parameters, optimizer))
    (parameters, optimizer), (others, again) = runs
    for step in range(3):
        give(parameters, step, rank, world_size)
        optimizer.step()
    dcp.save({"residuals": ResidualState(optimizer)}, checkpoint_id=tmp_path)
    dcp.load({"residuals": ResidualState(again, tmp_path)}, checkpoint_id=tmp_path)
    for each, own in runs:
        give(each, 3, rank, world_size)
        own.step()
    assert torch.equal(flat(parameters), flat(others))


@ranks(4)
def test_checkpoint_of_shards(rank, world_size, tmp_path):
    """Two replicas of two shards resume to the bit, and as plain modules of other ranks owe the same."""
    steps = 3  # one since the last exchange
    settings = {"local_steps": 2, "updates": Updates(algo=OkTopk(density=0.1), outer_momentum=0.5)}
    over = mesh()
    group = over["replicate"].get_group()

    def made(is_sharded):
        model = sharded(Uneven(), over) if is_sharded else Uneven()
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, tritoncomm.wrap(inner, model=model, process_group=group if is_sharded else None, **settings)

    def pending(optimizer):
        return total(
            sum(each.double().sum() for each in (owed(optimizer), *optimizer._tritoncomm.setup.local._deltas()))
        )

    model, optimizer = made(True)
    train(model, optimizer, rank, range(steps))
    optimizer.merge()
    dcp.save(content(model, optimizer), checkpoint_id=tmp_path)
    again, resumed = made(True)
    load(again, resumed, tmp_path)
    before = pending(optimizer) / 2  # replicas
    for each in ((model, optimizer), (again, resumed)):
        train(*each, rank, range(steps, steps + 2))
    assert torch.equal(flat(again), flat(model))
    assert torch.equal(owed(resumed), owed(optimizer))
    plain, other = made(False)
    load(plain, other, tmp_path, checkpoint_id=tmp_path)
    torch.testing.assert_close(pending(other) / world_size, before)
    train(plain, other, rank, range(steps, steps + 2))
    assert equal(plain)
