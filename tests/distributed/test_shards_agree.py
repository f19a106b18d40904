"""What fails on one rank, outside of a step, is raised on the ranks of all shards, and changes nothing on any."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from models import Uneven, adamw, equal, exact, flat, mesh, sharded, tiny, train
from torch import nn
from torch.distributed.fsdp import fully_shard
from tritoncomm import Hierarchical, OkTopk

from ranks import ranks

ERRORS = (tritoncomm.ConfigMismatchError, tritoncomm.ConfigurationError, RuntimeError, ValueError)
NUMBERS = "tritoncomm.step.setup.numbers"  # what compares values in wrap() and add_param_group()


def out_of_memory(*_, **__):
    """Fail as a kernel on a GPU does."""
    raise RuntimeError("out of memory")


def fails(call, match):
    """Expect an error on all ranks, and not that of a lost rank or of a time-out."""
    with pytest.raises(ERRORS, match=match) as found:
        call()
    assert not isinstance(found.value, tritoncomm.ExchangeError)


# What is wrong on rank 1: arguments of wrap(), or what fails. Rank 3 has the same shard.
FAULTS = {
    "density=2": {"density": 2.0},
    "process_group": {"process_group": "shard"},
    "density of .*: rank 1 has 0.2, rank 3 has 0.1": {"density": 0.2},
    "content of head.weight: rank 1 has": {"content": 1.0},
    "out of memory": {"fails": NUMBERS},
    "out of memory in the end": {"fails": "tritoncomm.wrapping.keep_gradients_local"},
}


@ranks(4, limit=30)
@pytest.mark.parametrize("said", FAULTS)
def test_wrap(rank, world_size, said):
    """Nobody waits for a rank with another argument, model or group, or without memory, and it can be repeated."""
    over = mesh()
    model, fault = sharded(Uneven(), over), FAULTS[said] if rank == 1 else {}
    given = {"density": 0.1, "model": model, "process_group": over["replicate"].get_group()}
    before = model.head.weight.to_local().detach().clone()
    own = {name: value for name, value in fault.items() if name in given}
    if "process_group" in fault:
        own["process_group"] = over["shard"].get_group()
    with pytest.MonkeyPatch.context() as patch:
        if "content" in fault:
            model.head.weight.to_local().detach().fill_(fault["content"])
        if "fails" in fault:
            patch.setattr(fault["fails"], out_of_memory)
        fails(lambda: tritoncomm.wrap(adamw(model), **given | own), said.removesuffix(" in the end"))
    with torch.no_grad():
        model.head.weight.to_local().copy_(before)
    train(model, tritoncomm.wrap(adamw(model), **given), rank, range(2))
    assert equal(model, given["process_group"])


@ranks(4, limit=30)
@pytest.mark.parametrize("fails_in", ["tritoncomm.step.agree.setup.local", "torch.distributed.broadcast"])
def test_broadcast(rank, world_size, fails_in):
    """Nobody waits for a rank that cannot copy parameters, or for two whose broadcast has failed."""
    model, groups = sharded(Uneven(), mesh()), [dist.new_group([0, 2]), dist.new_group([1, 3])]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(fails_in, out_of_memory)
        with pytest.raises(ERRORS, match="out of memory"):
            tritoncomm.wrap(adamw(model), model=model, process_group=groups[rank % 2], broadcast_parameters=True)
    tritoncomm.wrap(adamw(model), model=model, process_group=mesh()["replicate"].get_group())


@ranks(4, limit=30)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_nodes(rank, world_size, is_sharded):
    """Nobody waits in a process group of nodes for a rank that lacks memory for its vector."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])] if is_sharded else [None]
    model = sharded(Uneven(), mesh()) if is_sharded else Uneven()
    group = groups[rank % len(groups)]
    nodes = Hierarchical(recipe=OkTopk(density=0.1), node_size=2)
    given = {"model": model, "process_group": group, "algo": nodes}
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("tritoncomm.step.exchange.vector.with_form", out_of_memory)
        fails(lambda: tritoncomm.wrap(adamw(model), **given), "out of memory")
    optimizer = tritoncomm.wrap(adamw(model), **given)
    more = fully_shard(nn.Linear(4, 4), mesh=mesh()["shard"]) if is_sharded else nn.Linear(4, 4)
    held = [model.head.weight] if rank == 1 else [*more.parameters()]
    fails(lambda: optimizer.add_param_group({"params": held}), "appear in more than one")
    train(model, optimizer, rank, range(2))
    assert equal(model, group)


def refused(*_):
    """Fail as on all ranks of a group."""
    raise tritoncomm.ConfigMismatchError("refused")


@ranks(4, limit=30)
def test_what_fails_in_a_group(rank, world_size):
    """The ranks of other shards hear what all ranks of one have raised."""
    model = sharded(Uneven(), mesh())
    given = {"model": model, "process_group": mesh()["replicate"].get_group()}
    with pytest.MonkeyPatch.context() as patch:
        if rank % 2:
            patch.setattr("tritoncomm.scheduler.process_group.ProcessGroupScheduler.agree_on_exchange_id", refused)
        fails(lambda: tritoncomm.wrap(adamw(model), **given), "refused")
    train(model, tritoncomm.wrap(adamw(model), **given), rank, range(2))


@ranks(4, limit=30)
@pytest.mark.parametrize(
    "fault", ["it is held already", "lr", "memory", "memory of residuals", "memory of a text", "a hook"]
)
def test_add_param_group(rank, world_size, fault):
    """A group that one rank cannot add, or adds with other options, is added nowhere. Training goes on."""
    over = mesh()
    model, group = sharded(Uneven(), over), over["replicate"].get_group()
    more = fully_shard(nn.Linear(4, 4), mesh=over["shard"])
    for each in more.parameters():
        dist.broadcast(each.to_local().detach(), src=dist.get_process_group_ranks(group)[0], group=group)
    optimizer = exact(adamw(model), model=model, process_group=group)
    train(model, optimizer, rank, range(2))
    if fault == "a hook":  # has failed after the update of rank 1
        hook = optimizer.register_step_post_hook(out_of_memory if rank == 1 else lambda *_: None)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with pytest.raises(RuntimeError) if rank == 1 else nullcontext():
            optimizer.step()
        hook.remove()
    new = {"params": [*more.parameters()], "lr": 0.02 if fault == "lr" and rank == 1 else 0.01}
    if fault == "it is held already" and rank == 1:
        new["params"] = [model.head.weight]
    with pytest.MonkeyPatch.context() as patch:
        if fault == "memory" and rank == 1:
            patch.setattr(NUMBERS, out_of_memory)
        if fault == "memory of residuals" and rank == 1:
            patch.setattr("tritoncomm.step.saved.state.carry_over", out_of_memory)
        if fault == "memory of a text" and rank == 1:
            patch.setattr("tritoncomm.step.setup.settings_of", out_of_memory)
        said = {"it is held already": "some parameters appear in more than one", "lr": "lr of parameter group 1"}
        said["a hook"] = r"call zero_grad\(\) before add_param_group"
        fails(lambda: optimizer.add_param_group(dict(new)), said.get(fault, "out of memory"))
    assert len(optimizer.param_groups) == 1
    train(model, optimizer, rank, range(2, 4))
    assert equal(model, group)
    optimizer.add_param_group({"params": [*more.parameters()], "lr": 0.01})
    train(model, optimizer, rank, range(4, 6))
    assert equal(model, group)


@ranks(4, limit=30)
@pytest.mark.parametrize("said", ["^ranks are .* steps: ranks .0, 2, 3. have 2, rank 1 has 4", "step of .*", "memory"])
def test_load_state_dict(rank, world_size, said):
    """A state that one rank cannot load, or that differs from that of its replica, is loaded nowhere."""
    over = mesh()
    model, group = sharded(Uneven(), over), over["replicate"].get_group()
    optimizer = exact(adamw(model), model=model, process_group=group)
    train(model, optimizer, rank, range(2))
    first = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, rank, range(2, 4))
    before, odd = flat(model), copy.deepcopy(first)
    if rank == 1 and "steps" in said:
        odd = copy.deepcopy(optimizer.state_dict())
    if said.startswith("step of"):
        del odd["tritoncomm"]
        odd["state"][0]["step"] += rank == 1
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and said == "memory":
            patch.setattr("tritoncomm.step.saved.state.state_outline", out_of_memory)
        fails(lambda: optimizer.load_state_dict(odd), said)
    assert torch.equal(flat(model), before)
    train(model, optimizer, rank, range(4, 6))
    assert equal(model, group)
    optimizer.load_state_dict(first)


@ranks(4, limit=30)
@pytest.mark.parametrize("residuals", ["restore", "reset"])
def test_state_of_another_shard(rank, world_size, residuals):
    """It is refused on all ranks, also without residuals: the moments are of other entries. Their own shard is not."""
    over = mesh()
    model = sharded(tiny(), over)
    optimizer = exact(adamw(model), model=model, process_group=over["replicate"].get_group())
    train(model, optimizer, rank, range(2))
    optimizer.flush()
    told = [optimizer.state_dict() if rank < 2 else None]
    dist.broadcast_object_list(told, src=0)
    fails(lambda: optimizer.load_state_dict(told[0], residuals=residuals), "with shards=")
    of_shard = [optimizer.state_dict()]
    dist.broadcast_object_list(of_shard, group_src=0, group=over["replicate"].get_group())
    optimizer.load_state_dict(of_shard[0], residuals=residuals)
