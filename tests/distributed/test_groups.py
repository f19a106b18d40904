"""Four ranks in two nodes, or in groups."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from models import adamw, equal, exact, loss_of, residual, sgd, tiny, total, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tritoncomm import ConfigMismatchError
from tritoncomm.algorithms import Hierarchical
from tritoncomm.amp import GradScaler
from tritoncomm.scheduler.watcher import timeout_of

from baselines import DGC
from ranks import ranks


@ranks(4)
def test_scaler_of_a_group(rank, world_size):
    """An overflow lowers the scale on the ranks of the optimizer's group, and on no others."""
    model = tiny()
    optimizer, scaler = exact(sgd(model), process_group=dist.new_subgroups(2)[0]), GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model, rank, 0)).backward()
    if rank == 0:
        model[0].weight.grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (2.0 if rank < 2 else 4.0)
    assert optimizer.metrics()["steps"] == (0 if rank < 2 else 1)


@ranks(4)
def test_inherited_time_outs(rank, world_size):
    """The groups of the exchange, and of nodes in it, have the time-out of the group of DDP, not of torch."""
    expected = timedelta(seconds=77)
    group, node = dist.new_group(timeout=expected), dist.new_subgroups(2)[0]
    model = DistributedDataParallel(nn.Linear(6, 3), process_group=group)
    optimizer = exact(adamw(model), model=model, node_group=node)
    train(model, optimizer, rank, [0])
    (vector,) = optimizer._tritoncomm.setup.scope.vectors
    groups = [vector.scheduler.group, *(inner.group for inner in vector.scheduler._subgroups.values())]
    assert len(groups) == 3
    assert [timeout_of(each, torch.device("cpu")) for each in groups] == [expected] * 3


@ranks(4)
def test_nodes_later(rank, world_size):
    """A run continues with nodes. Within a node, ranks share the residual; what all ranks hold together is kept."""
    model = tiny()
    optimizer = exact(sgd(model))
    train(model, optimizer, rank, range(3))
    before = total(residual(optimizer))
    optimizer.reset_process_group(node_group=dist.new_subgroups(2)[0])
    assert isinstance(optimizer.recipe, Hierarchical)
    assert optimizer.recipe.node_size == 2
    assert before.any()
    torch.testing.assert_close(total(residual(optimizer)), before)
    train(model, optimizer, rank, range(3, 6))
    assert optimizer.metrics()["steps"] == 6
    assert equal(model)


@ranks(2)
def test_nodes_on_some_ranks(rank, world_size):
    """If only some ranks pass a node group, all are told this, and nothing else that does not differ."""
    model = tiny()
    nodes = dist.new_subgroups(2)
    node = nodes[0] if rank == 0 else None
    optimizer = exact(sgd(model), model=model)
    for call in (
        lambda: exact(sgd(model), model=model, node_group=node),
        lambda: optimizer.reset_process_group(node_group=node),
    ):
        with pytest.raises(ConfigMismatchError) as error:
            call()
        assert str(error.value).endswith("identically: node size (node_group): rank 0 has 2, rank 1 has None")


@ranks(4)
def test_nodes_later_with_other_groups(rank, world_size):
    """The groups that nodes need would never meet if a rank has made more groups. It is told, and nothing changes."""
    model = tiny()
    optimizer = exact(sgd(model))
    train(model, optimizer, rank, range(2))
    node = dist.new_subgroups(2)[0]
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    with pytest.raises(ConfigMismatchError, match="number of process groups"):
        optimizer.reset_process_group(node_group=node)
    train(model, optimizer, rank, range(2, 4))
    assert optimizer.metrics()["steps"] == 4
    assert equal(model)


@ranks(4)
@pytest.mark.parametrize("recipe", ["oktopk", "dgc"])
def test_one_node_later(rank, world_size, recipe):
    """Each of two nodes continues alone, without nodes. Its share of the pending update is kept, to the bit."""
    node, model = dist.new_subgroups(2)[0], tiny()
    inner = adamw(model) if recipe == "oktopk" else torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = exact(inner, DGC(density=0.1) if recipe == "dgc" else recipe, warmup_steps=1, node_group=node)
    train(model, optimizer, rank, range(4))
    before = residual(optimizer)
    assert before.any()
    optimizer.reset_process_group(node)
    assert not isinstance(optimizer.recipe, Hierarchical)
    assert torch.equal(residual(optimizer) / 2, before / world_size)
    train(model, optimizer, rank, range(4, 7))
    assert optimizer.metrics()["steps"] == 7
    assert optimizer.metrics()["density_delivered"] < 0.6
    assert equal(model, node)


@ranks(2)
def test_without_process_groups(rank, world_size):
    """A state without residuals can be loaded when all process groups are gone. A step in a destroyed group ends."""
    model = tiny()
    group = dist.new_group([0, 1])
    optimizer = exact(adamw(model), process_group=group)
    train(model, optimizer, rank, range(12))  # until nothing looks for clipping any more
    bare = {name: part for name, part in optimizer.state_dict().items() if name != "tritoncomm"}
    dist.destroy_process_group(group)
    train(model, optimizer, rank, [12])
    dist.destroy_process_group()
    optimizer.load_state_dict(bare)
