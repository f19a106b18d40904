"""Worker processes of tests/distributed/test_threads.py: replicas on unlike processors stay equal, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import tritoncomm
from fsdp_models import mesh
from helpers import same_everywhere
from test_rules import Lion
from torch import nn
from torch.distributed.fsdp import fully_shard
from tritoncomm.step.tensors.shards import local

Made = torch.optim.Optimizer | list[torch.optim.Optimizer]

STEPS = 60
ROWS, COLUMNS = 700, 1500  # torch sums more than a million values in parts, one per thread
SHIPPED = {"density": 0.03, "small": "8bit", "warmup_steps": 16}
optim = torch.optim


def _muon(parameters: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
    matrices, rest = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]
    return [optim.Muon(matrices, lr=0.01), optim.AdamW(rest, lr=0.01)]


# A name, an optimizer, and arguments of wrap. A rate of 1 lets limits bind.
GRADIENTS: dict[str, tuple[Callable[[list[nn.Parameter]], Made], dict[str, Any]]] = {
    "SGD with momentum": (lambda p: optim.SGD(p, lr=1.0, momentum=0.9), {}),
    "SGD with Nesterov momentum": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01), {}),
    "SGD": (lambda p: optim.SGD(p, lr=0.1, weight_decay=0.01), {}),
    "AdamW": (lambda p: optim.AdamW(p, lr=0.01), {}),
    "Adam": (lambda p: optim.Adam(p, lr=0.01, weight_decay=0.01, amsgrad=True), {"algo": "spardl"}),
    "Lion": (lambda p: Lion(p, lr=0.01), {"algo": "exdyna"}),
    "no rule": (lambda p: optim.AdamW(p, lr=0.01), {"staleness": "off"}),
    "a limit of the gradient": (lambda p: optim.AdamW(p, lr=0.01), {"max_grad_norm": 0.5}),
    "quantized": (
        lambda p: optim.AdamW(p, lr=0.01),
        {"algo": "quantized", "density": None, "values": "2bit", "warmup_steps": None},
    ),
}
UPDATES: dict[str, tuple[Callable[[list[nn.Parameter]], Made], dict[str, Any]]] = {
    "updates of Adafactor": (lambda p: optim.Adafactor(p, lr=0.01), {}),
    "updates of a list": (_muon, {}),
    "local steps": (
        lambda p: optim.AdamW(p, lr=0.01),
        {"local_steps": 4, "outer_lr": 0.9, "outer_momentum": 0.6},
    ),
}


# The others differ from one of these in what is computed alike for every entry. Deep runs train them, too.
FIRST = "SGD with momentum", "AdamW", "Lion", "a limit of what is delivered", "updates of Adafactor", "local steps"


def two_ranks(rank: int, world_size: int, send, deep: bool) -> None:
    """Every rule, method and format, with another number of threads on each rank, which changes in the middle."""
    for name, (make, fields) in GRADIENTS.items():
        if name not in FIRST and not deep:
            continue
        values = {} if fields.get("algo") == "exdyna" else {"values": "4bit"}  # ExDyna rounds none
        _train(name, _net(), make, rank, SHIPPED | values | fields)
    for name, (make, fields) in UPDATES.items():
        if name in FIRST or deep:
            _train(name, _net(), make, rank, fields)


def four_ranks(rank: int, world_size: int, send, deep: bool) -> None:
    """Nodes of two ranks, and two replicas of two shards."""
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for name in ("SGD with momentum", "AdamW")[: 2 if deep else 1]:
        make, fields = GRADIENTS[name]
        _train(
            f"{name} on nodes",
            _net(),
            make,
            rank,
            SHIPPED | fields | {"values": "4bit", "node_group": nodes[rank // 2]},
        )
        over = mesh()
        group = over["replicate"].get_group()
        net = fully_shard(_net(), mesh=over["shard"])
        _train(
            f"{name} on shards", net, make, rank, SHIPPED | fields | {"values": "4bit", "process_group": group}, group
        )


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(COLUMNS, ROWS), nn.LayerNorm(ROWS))


def _train(
    name: str,
    net: nn.Module,
    make: Callable[[list[nn.Parameter]], Made],
    rank: int,
    fields: dict[str, Any],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Train by heavy-tailed gradients, and compare parameters within ``group`` after every exchange."""
    torch.set_num_threads(1 + rank % 2)
    parameters = list(net.parameters())
    optimizer = tritoncomm.wrap(make(parameters), **fields)
    every = fields.get("local_steps", 1)
    common, own = (
        torch.randn(ROWS * COLUMNS, generator=torch.Generator().manual_seed(seed)) ** 3 for seed in (9, rank)
    )
    with torch.backends.mkldnn.flags(enabled=rank > 0):
        for step in range(STEPS):
            if step == STEPS // 2:
                torch.set_num_threads(2 - rank % 2)
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
                gradient = local(parameter.grad)
                gradient.copy_((own.roll(7919 * step) + common)[: gradient.numel()].view(gradient.shape))
            optimizer.step()
            if (step + 1) % every == 0:
                assert same_everywhere(_figures(parameters), group), f"{name}: replicas differ after step {step + 1}"
    torch.set_num_threads(1)


def _figures(parameters: Sequence[torch.Tensor]) -> list[int]:
    """Return a figure of the bits of each of ``parameters``."""
    return [int(local(p.detach()).contiguous().view(torch.int32).sum(dtype=torch.int64)) for p in parameters]
