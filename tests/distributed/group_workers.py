"""Worker processes of tests/distributed/test_groups.py: four ranks in two nodes."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
import tritoncomm
from helpers import adamw, loss_of, residual, same_everywhere, tiny_model, total, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tritoncomm.algorithms import Hierarchical
from tritoncomm.amp import GradScaler
from tritoncomm.scheduler.watcher import timeout_of

from baselines import DGC


def scaler_of_a_group(rank: int, world_size: int, send) -> None:
    """An overflow lowers the scale on the ranks of the optimizer's group, and on no others."""
    group = dist.new_subgroups(2)[0]
    model = tiny_model()
    optimizer = tritoncomm.wrap(torch.optim.SGD(model.parameters(), lr=0.1), density=0.2, process_group=group)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model, rank, 0)).backward()
    if rank == 0:
        model[0].weight.grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (2.0 if rank < 2 else 4.0)
    assert optimizer.metrics()["steps"] == (0 if rank < 2 else 1)


def inherited_time_outs(rank: int, world_size: int, send) -> None:
    """The groups of the exchange, and of nodes in it, have the time-out of the group of DDP, not of torch."""
    expected = timedelta(seconds=77)
    group, node = dist.new_group(timeout=expected), dist.new_subgroups(2)[0]
    model = DistributedDataParallel(nn.Linear(40, 40), process_group=group)
    optimizer = tritoncomm.wrap(torch.optim.AdamW(model.parameters()), model=model, density=0.1, node_group=node)
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    (vector,) = optimizer._exchange.vectors
    groups = [vector.scheduler.group, *(inner.group for inner in vector.scheduler._subgroups.values())]
    assert len(groups) == 3
    assert [timeout_of(each, torch.device("cpu")) for each in groups] == [expected] * 3


def nodes_later(rank: int, world_size: int, send) -> None:
    """A run continues with nodes. Within a node, ranks share the residual; what all ranks hold together is kept."""
    model = tiny_model()
    optimizer = tritoncomm.wrap(torch.optim.SGD(model.parameters(), lr=0.1), density=0.1, dense_below=0)

    train(model, optimizer, rank, range(3))
    before = total(residual(optimizer))
    optimizer.reset_process_group(node_group=dist.new_subgroups(2)[0])
    assert isinstance(optimizer.recipe, Hierarchical)
    assert optimizer.recipe.node_size == 2
    assert before.any()
    torch.testing.assert_close(total(residual(optimizer)), before)
    train(model, optimizer, rank, range(3, 6))
    assert optimizer.metrics()["steps"] == 6
    assert same_everywhere([parameter.tolist() for parameter in model.parameters()])


def one_node_later(rank: int, world_size: int, send) -> None:
    """Each of two nodes continues alone, without nodes. Its share of the pending update is kept, to the bit."""
    node = dist.new_subgroups(2)[0]
    for recipe in ("oktopk", DGC(density=0.1)):
        model = tiny_model()
        inner = adamw(model) if recipe == "oktopk" else torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = tritoncomm.wrap(inner, recipe, dense_below=0, warmup_steps=1, node_group=node)
        train(model, optimizer, rank, range(4))
        before = residual(optimizer)
        assert before.any()
        optimizer.reset_process_group(node)
        assert not isinstance(optimizer.recipe, Hierarchical)
        assert torch.equal(residual(optimizer) / 2, before / world_size)
        train(model, optimizer, rank, range(4, 7))
        metrics = optimizer.metrics()
        assert metrics["steps"] == 7
        assert metrics["density_delivered"] < 0.6
        assert same_everywhere([parameter.tolist() for parameter in model.parameters()], node)
