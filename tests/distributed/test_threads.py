"""Replicas on unlike processors stay equal, bit for bit: other numbers of threads, and other libraries."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from models import mesh, muon, renewed_every, same
from test_rules import Lion
from torch import nn
from torch.distributed.fsdp import fully_shard
from tritoncomm.step.tensors.shards import local

from depth import DEEP, trials
from ranks import ranks

STEPS = trials((1, 5), (16, 40))  # those that are dense, and all: scales are computed every 2
ROWS, COLUMNS = 700, 1500  # torch sums more than a million values in parts, one per thread
SPARSE = {"values": "4bit"}  # and the other defaults of wrap()
optim = torch.optim
# An optimizer, and arguments of wrap. A rate of 1 lets limits bind.
RUNS = {
    "momentum": (partial(optim.SGD, lr=1.0, momentum=0.9), SPARSE),
    "AdamW": (partial(optim.AdamW, lr=0.01), SPARSE | {"max_grad_norm": 0.5}),
    "Lion": (partial(Lion, lr=0.01), {"algo": "exdyna"}),  # which rounds no values
    "updates of Adafactor": (partial(optim.Adafactor, lr=0.01), {}),
    "local steps": (
        partial(optim.AdamW, lr=0.01),
        {"local_steps": 2, "updates": tritoncomm.Updates(outer_lr=0.9, outer_momentum=0.6)},
    ),
}
# They differ from one of these in what is computed alike for every entry.
DEEP_RUNS = {
    "Nesterov momentum": (partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01), SPARSE),
    "SGD": (partial(optim.SGD, lr=0.1, weight_decay=0.01), SPARSE),
    "Adam": (partial(optim.Adam, lr=0.01, weight_decay=0.01, amsgrad=True), {"algo": "spardl"}),
    "no rule": (partial(optim.AdamW, lr=0.01), SPARSE | {"late": False}),
    "quantized": (partial(optim.AdamW, lr=0.01), {"algo": "quantized", "values": "2bit"}),
    "updates of a list": (None, {}),
}


@renewed_every(2)
def trains_alike(rank: int, name: str, steps: int, shards: bool = False, **more) -> None:
    """Train by heavy-tailed gradients, and compare parameters after every exchange.

    Each rank has another number of threads, which changes in the middle, and rank 0 another library.
    """
    torch.manual_seed(0)
    net, group = nn.Sequential(nn.Linear(COLUMNS, ROWS), nn.LayerNorm(ROWS)), None
    make, fields = (RUNS | DEEP_RUNS)[name]
    if shards:
        over = mesh()
        net, group = fully_shard(net, mesh=over["shard"]), over["replicate"].get_group()
        more["process_group"] = group
    parameters = list(net.parameters())
    optimizer = tritoncomm.wrap(muon(net) if make is None else make(parameters), **fields | more)
    every = fields.get("local_steps", 1)
    common, own = (torch.randn(ROWS * COLUMNS, generator=torch.Generator().manual_seed(n)) ** 3 for n in (9, rank))
    try:
        with torch.backends.mkldnn.flags(enabled=rank > 0):
            for step in range(steps):
                torch.set_num_threads(1 + (rank + (step >= steps // 2)) % 2)
                for parameter in parameters:
                    parameter.grad = torch.zeros_like(parameter)
                    gradient = local(parameter.grad)
                    gradient.copy_((own.roll(7919 * step) + common)[: gradient.numel()].view(gradient.shape))
                optimizer.step()
                bits = [
                    int(local(p.detach()).contiguous().view(torch.int32).sum(dtype=torch.int64)) for p in parameters
                ]
                assert (step + 1) % every or same(bits, group), f"replicas differ after step {step + 1}"
    finally:
        torch.set_num_threads(1)


@ranks(2, limit=300.0)
@pytest.mark.parametrize("name", RUNS | (DEEP_RUNS if DEEP else {}))
@pytest.mark.parametrize(("warmup_steps", "steps"), [STEPS])  # workers do not know how deep a run is
def test_two_ranks(rank, world_size, name, warmup_steps, steps):
    """No sum that decides a bit of a parameter depends on how many threads compute it: of each rule and format."""
    trains_alike(rank, name, steps, warmup_steps=warmup_steps)


@ranks(4, limit=300.0)
@pytest.mark.parametrize("kind", ["nodes", "shards"])
def test_four_ranks(rank, world_size, kind):
    """Nor do those of nodes and of shards."""
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    more = {"node_group": nodes[rank // 2]} if kind == "nodes" else {}
    trains_alike(rank, "momentum", 4, kind == "shards", warmup_steps=1, **more)
