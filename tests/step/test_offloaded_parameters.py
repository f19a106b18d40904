"""FSDP2 with CPUOffloadPolicy: parameters are on the CPU, gradients on a GPU, which "meta" stands for."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tritoncomm import fsdp
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.step import setup_checks
from tritoncomm.step.bucket import BucketLayout
from tritoncomm.step.delivered import Delivered
from tritoncomm.step.exchange import GradientExchange

SHARD = torch.device("meta")


def test_the_exchange_is_on_the_device_of_the_shard(group_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors, residuals, messages and the verdict are on the device where FSDP reduces, not where parameters are."""
    model = fully_shard(nn.Linear(40, 40), mesh=init_device_mesh("cpu", (1,)))
    for _, group in fsdp._parameter_groups(model):
        group.device = SHARD
    monkeypatch.setattr(GradientExchange, "agree_on_exchange_id", lambda exchange: None)  # "meta" sends nothing
    state = fsdp.register(model, dist.group.WORLD, "topk_allgather", density=0.1)
    (vector,) = state.exchange.vectors
    assert model.weight.device.type == "cpu"
    assert vector.flat.device == vector.feedback.residual.device == SHARD
    assert vector.scheduler.device == state.exchange.verdict.device == state.device == SHARD
    assert vector.layout.device.type == "cpu"


def test_ranks_compare_settings_from_that_device(group_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """wrap(), set_density() and checkpoints send objects from the GPU, although the parameters are on the CPU."""
    model = fully_shard(nn.Linear(40, 40), mesh=init_device_mesh("cpu", (1,)))
    for _, group in fsdp._parameter_groups(model):
        group.device = SHARD
    seen: list[torch.device | None] = []
    monkeypatch.setattr(GradientExchange, "agree_on_exchange_id", lambda exchange: None)
    monkeypatch.setattr(setup_checks, "on_device", lambda device: seen.append(device) or nullcontext())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = tritoncomm.wrap(optimizer, model=model, process_group=dist.group.WORLD, density=0.1, warmup_steps=0)
    assert wrapped._device == SHARD
    assert SHARD in seen
    assert not any(device.type == "cpu" for device in seen[: seen.index(SHARD)] if device is not None)


def test_the_optimizer_sees_entries_on_the_device_of_the_parameters() -> None:
    """What was delivered is moved to the parameters, once for all of them."""
    parameters = [nn.Parameter(torch.ones(size, device=SHARD)) for size in (2, 3)]
    mean = SparseVector(torch.arange(5, dtype=torch.int32), torch.ones(5), 5)
    entries = Delivered(mean, BucketLayout(parameters)).entries
    assert [each.values.shape for each in entries] == [(2,), (3,)]
    assert all(each.values.device == SHARD for each in entries)
