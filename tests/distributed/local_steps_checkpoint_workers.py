"""Worker processes of tests/distributed/test_local_steps.py that copy, save and load local steps."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import fsdp_models
import pytest
import torch
import torch.distributed.checkpoint as dcp
import tritoncomm
from helpers import flat, same_everywhere, total
from local_steps_workers import METHODS, adam_of, residual, train
from optimizer_list_workers import muon
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from tritoncomm.checkpoint import ResidualState


def copied(rank: int, world_size: int, send) -> None:
    """A deep copy and an unpickled optimizer continue to the bit, also between two exchanges."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = adam_of(model, METHODS["oktopk"])
    for step in range(4):
        train(model, optimizer, step, rank)
    twin, twins = copy.deepcopy((model, optimizer))
    for step in range(4, 8):
        train(model, optimizer, step, rank)
        train(twin, twins, step, rank)
    assert flat(model) == flat(twin)
    assert torch.equal(residual(optimizer), residual(twins))


def in_checkpoints(rank: int, world_size: int, send, folder: str) -> None:
    """Both kinds of checkpoints resume to the bit, after any number of local steps, whatever the saved model holds."""
    for kind, saved_after in itertools.product(("files", "dcp"), (3, 4, 5)):
        torch.manual_seed(0)
        path, model = Path(folder) / f"{kind}-{saved_after}", nn.Linear(8, 8)
        optimizer = adam_of(model, METHODS["2 bits"])
        for step in range(saved_after):
            train(model, optimizer, step, rank)
        if kind == "dcp":
            optimizer.merge()
            _save(model, optimizer, str(path))
        else:
            tritoncomm.checkpoint.save(optimizer, path)
        again = nn.Linear(8, 8)
        resumed = adam_of(again, METHODS["2 bits"], broadcast_parameters=True)
        if kind == "dcp":
            _load(again, resumed, str(path))
            again.load_state_dict(nn.Linear(8, 8).state_dict())  # what belongs to this rank comes after the model
        else:
            tritoncomm.checkpoint.load(resumed, path)
        assert resumed.metrics()["steps_until_exchange"] == 3
        with optimizer.averaged(), resumed.averaged():
            assert flat(again) == flat(model)
        for step in range(saved_after, 8):
            train(model, optimizer, step, rank)
            train(again, resumed, step, rank)
            assert flat(again) == flat(model), (kind, saved_after, step)


def list_in_a_checkpoint(rank: int, world_size: int, send, folder: str) -> None:
    """A list of optimizers is resumed by ``torch.distributed.checkpoint``, and by files of its own kind alone."""
    torch.manual_seed(0)

    def made(reverse: bool = False) -> tuple[nn.Module, tritoncomm.SparseOptimizer]:
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        parts = muon(model)
        return model, tritoncomm.wrap(parts[::-1] if reverse else parts, model=model, broadcast_parameters=True)

    model, optimizer = made()
    for step in range(3):
        train(model, optimizer, step, rank)
    _save(model, optimizer, folder)
    again, resumed = made()
    _load(again, resumed, folder)
    assert flat(again) == flat(model)
    for step in (3, 4):
        train(model, optimizer, step, rank)
        train(again, resumed, step, rank)
        assert flat(again) == flat(model)  # with the momentum of each rank's Muon
    tritoncomm.checkpoint.save(optimizer, Path(folder) / "own")
    with pytest.raises(
        tritoncomm.ConfigurationError, match="written for Muon and AdamW, this optimizer is AdamW and Muon"
    ):
        tritoncomm.checkpoint.load(made(reverse=True)[1], Path(folder) / "own")


def sharded(rank: int, world_size: int, send, folder: str) -> None:
    """With FSDP2, replicas exchange the updates of their shards. ``torch.distributed.checkpoint`` resumes them."""
    over = fsdp_models.mesh()
    replicas = over["replicate"].get_group()

    def made() -> tuple[nn.Module, tritoncomm.SparseOptimizer]:
        model = fsdp_models.sharded(fsdp_models.Net(), over["shard"])
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, tritoncomm.wrap(
            inner,
            model=model,
            process_group=replicas,
            local_steps=2,
            updates_algo=METHODS["oktopk"],
            outer_momentum=0.5,
        )

    for steps in (4, 5):  # no and one local step since the last exchange
        model, optimizer = made()
        fsdp_models.train(model, optimizer, rank, range(steps))
        with optimizer.averaged():
            assert same_everywhere(fsdp_models.bits(model), replicas)
        optimizer.merge()
        path = f"{folder}/{steps}"
        _save(model, optimizer, path)
        again, resumed = made()
        _load(again, resumed, path)
        owed = _owed(optimizer) / 2  # replicas
        fsdp_models.train(model, optimizer, rank, range(steps, steps + 5))
        fsdp_models.train(again, resumed, rank, range(steps, steps + 5))
        assert fsdp_models.bits(again) == fsdp_models.bits(model)
        assert torch.equal(residual(resumed), residual(optimizer))
        assert not same_everywhere(fsdp_models.bits(again), replicas)
        plain = fsdp_models.Net()
        inner = torch.optim.AdamW(plain.parameters(), lr=0.01)
        options = {"model": plain, "local_steps": 2, "updates_algo": METHODS["oktopk"], "outer_momentum": 0.5}
        other = tritoncomm.wrap(inner, **options)
        _load(plain, other, path, checkpoint_id=path)
        with other.averaged():
            assert same_everywhere(flat(plain))
        torch.testing.assert_close(_owed(other) / world_size, owed)
        fsdp_models.train(plain, other, rank, range(4, 8))
        assert same_everywhere(flat(plain))


def _owed(optimizer: tritoncomm.SparseOptimizer) -> torch.Tensor:
    """Return the sum over all ranks of residuals, and of what was changed since the last exchange."""
    return total(sum(each.double().sum() for each in (residual(optimizer), *optimizer._local._deltas())))


def _save(model: nn.Module, optimizer: tritoncomm.SparseOptimizer, path: str) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "residuals": ResidualState(optimizer)}, checkpoint_id=path)


def _load(model: nn.Module, optimizer: tritoncomm.SparseOptimizer, path: str, **fields) -> None:
    weights, state = get_state_dict(model, optimizer)
    content = {"model": weights, "optimizer": state, "residuals": ResidualState(optimizer, **fields)}
    dcp.load(content, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
