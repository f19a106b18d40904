"""What surrounds the exchange in real training: every optimizer, precision, a broadcast and nodes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from kit import log_lines
from models import equal, exact, flat, gradients, loss_of, muon, sgd, tiny, total, train
from schedulefree import AdamWScheduleFree
from test_rules import Lion
from torch import nn
from tritoncomm import ConfigMismatchError, ConfigurationError, NonFiniteError

from depth import DEEP, trials
from ranks import ranks

# How each is made, and how far it may end above dense on a task this small.
OPTIMIZERS = {
    "Muon and AdamW": (muon, 2.0),
    "Muon": (lambda model: torch.optim.Muon(model.parameters(), lr=0.05, weight_decay=0.0), 2.2),
    "Lion": (lambda model: Lion(model.parameters(), lr=0.01), 1.25),
    "schedule-free": (lambda model: AdamWScheduleFree(model.parameters(), lr=0.05), 1.25),
    "Adafactor": (lambda model: torch.optim.Adafactor(model.parameters(), lr=0.05), 1.25),
    "Rprop": (lambda model: torch.optim.Rprop(model.parameters(), lr=0.01), 11.0),
    "SGD": (lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 1.25),
    "AdamW": (lambda model: torch.optim.AdamW(model.parameters(), lr=0.03), 1.25),
    # These exchange updates, as Adafactor does, and run in a deep run alone.
    "NAdam": (lambda model: torch.optim.NAdam(model.parameters(), lr=0.03), 1.25),
    "RAdam": (lambda model: torch.optim.RAdam(model.parameters(), lr=0.03), 2.0),
    "Adagrad": (lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1), 1.25),
    "RMSprop": (lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01), 1.25),
    "Adamax": (lambda model: torch.optim.Adamax(model.parameters(), lr=0.03), 1.25),
    "Adadelta": (lambda model: torch.optim.Adadelta(model.parameters(), lr=1.0), 1.25),
    "ASGD": (lambda model: torch.optim.ASGD(model.parameters(), lr=0.3), 1.25),
}


@ranks(2)
@pytest.mark.parametrize("name", [*OPTIMIZERS][: None if DEEP else 8])
@pytest.mark.parametrize("steps", [trials(30, 60)])
def test_every_optimizer_trains_at_its_defaults(rank, world_size, name, steps):
    """Most end where a dense run does, or lower, and nothing warns. The start is at 1.1."""
    make, limit = OPTIMIZERS[name]
    ends = []
    for settings in ({"algo": "dense", "updates": False}, {}):
        torch.manual_seed(0)
        bias = name != "Muon"
        model = nn.Sequential(nn.Linear(8, 32, bias=bias), nn.Tanh(), nn.Linear(32, 8, bias=bias))
        with log_lines() as lines:
            optimizer = tritoncomm.wrap(make(model), model=model, **settings)
        # On a model as small as this, all is sent dense, and that is said.
        assert not [line for line in lines if "of a dense all-reduce" not in line], lines
        if name == "schedule-free":
            optimizer.train()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        for step in range(steps):
            rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
            optimizer.zero_grad()
            (model(rows) - rows).square().mean().backward()
            optimizer.step()
            schedule.step()
        if name == "schedule-free":
            optimizer.eval()
        assert equal(model)
        rows = torch.randn(256, 8, generator=torch.Generator().manual_seed(9))
        ends.append(float((model(rows) - rows).square().mean().detach()))
    assert ends[1] < limit * ends[0], ends


@ranks(3)
def test_broadcast(rank, world_size):
    """It copies frozen and transposed parameters, too, from the first rank of a group. Others raise."""

    def model(seed):
        torch.manual_seed(seed)
        made = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
        made[0].weight = nn.Parameter(torch.randn(5, 4).t())
        made[1].bias.requires_grad_(False)
        return made

    net = model(rank)
    exact(sgd(net), broadcast_parameters=True)
    assert torch.equal(flat(net), flat(model(0)))
    unwritable = nn.Linear(3, 2)
    if rank == 1:
        unwritable.weight = nn.Parameter(torch.zeros(1, 1).expand(2, 3))
    with pytest.raises(RuntimeError if rank == 1 else ConfigMismatchError, match="single memory location"):
        exact(sgd(unwritable), broadcast_parameters=True)
    group = dist.new_group([1, 2])  # its first rank is 1
    if rank > 0:
        within = model(rank)
        exact(sgd(within), broadcast_parameters=True, process_group=group)
        assert torch.equal(flat(within), flat(model(1)))


@ranks(4)
def test_nodes(rank, world_size):
    """With node_group, nodes average densely and exchange sparsely, like the Hierarchical recipe."""
    node = dist.new_subgroups(2)[0]
    models = tiny(), tiny(), tiny()
    recipe = tritoncomm.Hierarchical(recipe=tritoncomm.OkTopk(density=0.2), node_size=2)
    optimizers = (
        exact(sgd(models[0]), node_group=node),
        exact(sgd(models[1]), recipe),
        exact(sgd(models[2]), "dense", node_group=node),
    )
    for step in range(4):
        for model, optimizer in zip(models[:2], optimizers[:2], strict=True):
            train(model, optimizer, rank, [step])
    assert torch.equal(flat(models[0]), flat(models[1]))
    assert equal(models[0])
    loss_of(models[2], rank, 0).backward()
    whole = total(gradients(models[2])) / world_size
    optimizers[2].step()
    assert torch.allclose(gradients(models[2]), whole, atol=1e-6)
    odd = dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True)
    with pytest.raises(ConfigurationError, match="consecutive ranks"):
        exact(sgd(models[0]), node_group=odd)


@ranks(2)
def test_policy_under_a_scaler_of_torch(rank, world_size):
    """``on_nonfinite`` decides about an overflow that ``synchronize`` finds, also after ``unscale_``."""
    model = tiny()
    optimizer, scaler = exact(sgd(model), on_nonfinite="raise"), torch.amp.GradScaler("cpu", init_scale=4.0)
    before = flat(model)
    scaler.scale(loss_of(model, rank, 0)).backward()
    if rank == 1:
        model[0].weight.grad[0, 0] = float("inf")
    scaler.unscale_(optimizer)
    with pytest.raises(NonFiniteError):
        optimizer.synchronize()
    assert torch.equal(flat(model), before)
