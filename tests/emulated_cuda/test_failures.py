"""Ranks that raise, die or hang in the middle of a step, on emulated GPUs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor  # the first collective would import it, which takes longer than the time-outs here
import tritoncomm
from tritoncomm.scheduler import failure_report, watcher
from tritoncomm.scheduler.process_group import ProcessGroupScheduler

from emulated_cuda import device, doors, ranks
from emulated_cuda.network import Network

VICTIM, WORLD_SIZE = 1, 3
SOON, LATE = timedelta(seconds=1.5), timedelta(seconds=15)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(watcher, "RELEASE_SECONDS", 0.5)
    monkeypatch.setattr(failure_report, "_SILENT_SECONDS", 0.8)


def failing(scheduler: ProcessGroupScheduler, fault: Callable[[], None], operation: int = 2) -> None:
    """Call ``fault`` before the operation with this number from now."""
    perform, left = scheduler._perform, [operation]

    def faulty(op: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            fault()
        return perform(op)

    scheduler._perform = faulty


def raises() -> None:
    """Fail as a method does that has no memory."""
    raise MemoryError("no room for the lists")


def dies() -> None:
    """End the rank."""
    raise ranks.Died


def checked(error: tritoncomm.ExchangeError, seconds: float, fault: Callable[[], None]) -> None:
    """Check the error of a rank, and when it came."""
    assert error.peers == (VICTIM,)
    if fault is raises:
        assert type(error) is tritoncomm.ExchangeError
        assert "rank 1 failed, see its traceback: no room for the lists" in str(error)
        assert seconds < LATE.total_seconds() / 2
    else:
        assert type(error) is tritoncomm.ExchangeTimeoutError
        assert 1.5 < seconds < 6


@pytest.mark.parametrize("fault", [raises, dies])
@pytest.mark.parametrize("algo", ["oktopk", "topk_allgather", "spardl"])
def test_wrap(algo: str, fault: Callable[[], None]) -> None:
    """Parameters and residuals are as before the step. The other ranks go on in a new group, and stay equal."""

    def train(rank: int) -> list[Any]:
        model = doors.model_on("cuda")
        timeout = LATE if fault is raises else SOON
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = tritoncomm.wrap(inner, algo, density=0.1, warmup_steps=0, dense_below=0, timeout=timeout)
        for step in range(2):
            optimizer.zero_grad()
            doors.loss_of(model, rank, step, "cuda").backward()
            optimizer.step()
        ranks.meet()
        if rank == VICTIM:
            failing(optimizer._tritoncomm.setup.vector.scheduler, fault)
        optimizer.zero_grad()
        doors.loss_of(model, rank, 2, "cuda").backward()
        before, started = (
            doors.bits([*model.parameters(), optimizer._tritoncomm.setup.vector.feedback.residual]),
            time.monotonic(),
        )
        with pytest.raises(tritoncomm.ExchangeError) as caught:
            optimizer.step()
        checked(caught.value, time.monotonic() - started, fault)
        assert doors.bits([*model.parameters(), optimizer._tritoncomm.setup.vector.feedback.residual]) == before
        if rank == VICTIM:
            return []
        left = [each for each in range(WORLD_SIZE) if each != VICTIM]
        optimizer.reset_process_group(dist.new_group(left, timeout=LATE, use_local_synchronization=True))
        for step in range(3, 6):
            optimizer.zero_grad()
            doors.loss_of(model, rank, step, "cuda").backward()
            optimizer.step()
        after = doors.bits(model.parameters())
        assert after != before[: len(after)]
        return after

    network = Network(WORLD_SIZE, limit=6.0, garbage_after_abort=True)
    found = ranks.run(train, WORLD_SIZE, network=network, errors=True)
    assert isinstance(found[VICTIM], list if fault is raises else ranks.Died), found[VICTIM]
    assert isinstance(found[0], list), found[0]
    assert found[0] == found[2]


def opened(kind: str, timeout: timedelta, algo: str = "oktopk") -> tuple[torch.nn.Module, tritoncomm.SparseOptimizer]:
    """Return a plain module, or one that FSDP2 has sharded, and its wrapped optimizer."""
    model, given = doors.grouped("cuda") if kind == "fsdp" else (doors.model_on("cuda"), {})
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    fields = {"density": 0.1, "warmup_steps": 0, "dense_below": 5, "timeout": timeout}
    return model, tritoncomm.wrap(inner, algo, **fields, **given)


def step_of(model: torch.nn.Module, optimizer: tritoncomm.SparseOptimizer, rank: int, step: int) -> None:
    """Take a step."""
    optimizer.zero_grad()
    doors.loss_of(model, rank, step, "cuda").backward()
    optimizer.step()


@pytest.mark.parametrize("fault", [raises, dies])
def test_shards(fault: Callable[[], None]) -> None:
    """``step()`` raises on the other ranks, and the next one raises again."""

    def train(rank: int) -> None:
        model, optimizer = opened("fsdp", LATE if fault is raises else SOON)
        step_of(model, optimizer, rank, 0)
        ranks.meet()
        if rank == VICTIM:
            failing(optimizer._tritoncomm.setup.vector.scheduler, fault)
        optimizer.zero_grad()
        doors.loss_of(model, rank, 1, "cuda").backward()
        started = time.monotonic()
        with pytest.raises(tritoncomm.ExchangeError) as caught:
            optimizer.step()
        checked(caught.value, time.monotonic() - started, fault)
        with pytest.raises(tritoncomm.ExchangeError, match="rank 1"):
            optimizer.step()

    network = Network(WORLD_SIZE, limit=6.0, garbage_after_abort=True)
    found = ranks.run(train, WORLD_SIZE, network=network, errors=True)
    assert found[0] is None, found[0]
    assert found[2] is None, found[2]


@pytest.mark.parametrize(("kind", "garbage"), [("plain", 0x00), ("plain", 0x55), ("fsdp", 0xFF)])
def test_lost_rank_where_the_host_reads(kind: str, garbage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host reads after an abort is not taken for a NaN, or for anything else."""
    monkeypatch.setattr(device, "GARBAGE", garbage)

    def train(rank: int) -> None:
        model, optimizer = opened(kind, SOON, "topk_allgather")
        step_of(model, optimizer, rank, 0)
        ranks.meet()
        if rank == VICTIM:
            failing(optimizer._tritoncomm.setup.vector.scheduler, dies, operation=1)
        optimizer.zero_grad()
        doors.loss_of(model, rank, 1, "cuda").backward()
        started = time.monotonic()
        with pytest.raises(tritoncomm.ExchangeError) as caught:
            optimizer.step()
        checked(caught.value, time.monotonic() - started, dies)
        figures = optimizer.metrics()
        assert (figures["steps"], figures["skipped_steps"]) == (1, 0)

    network = Network(WORLD_SIZE, limit=15.0, garbage_after_abort=True, patience=0.2)
    found = ranks.run(train, WORLD_SIZE, network=network, errors=True)
    assert found[0] is None, found[0]
    assert found[2] is None, found[2]


def out_of_memory(*_: Any, **__: Any) -> None:
    """Fail as a copy does for which there is no memory."""
    raise MemoryError("no room for a copy")


@pytest.mark.parametrize("place", ["read_gradients", "begin"])
@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_rank_that_raises_beside_an_exchange(kind: str, place: str) -> None:
    """The other ranks do not wait for it until the time-out, and are told why it failed."""

    def train(rank: int) -> None:
        model, optimizer = opened(kind, LATE)
        step_of(model, optimizer, rank, 0)
        ranks.meet()
        vector = optimizer._tritoncomm.setup.vector
        if rank == VICTIM:
            setattr({"read_gradients": vector.layout, "begin": vector.feedback}[place], place, out_of_memory)
        optimizer.zero_grad()
        doors.loss_of(model, rank, 1, "cuda").backward()
        started = time.monotonic()
        with pytest.raises(MemoryError if rank == VICTIM else tritoncomm.ExchangeError) as caught:
            optimizer.step()
        assert time.monotonic() - started < 4
        if rank != VICTIM:
            assert caught.value.peers == (VICTIM,)
            assert "rank 1 failed, see its traceback: no room for a copy" in str(caught.value)
        with pytest.raises(tritoncomm.ExchangeError, match="rank 1 failed"):
            optimizer.step()

    network = Network(WORLD_SIZE, limit=6.0, garbage_after_abort=True)
    assert ranks.run(train, WORLD_SIZE, network=network, errors=True) == [None] * WORLD_SIZE


@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_rank_that_hangs(kind: str) -> None:
    """A rank that is busy elsewhere is named, also by itself when it goes on."""
    released = threading.Event()
    waiting = threading.Barrier(WORLD_SIZE - 1, action=released.set)

    def train(rank: int) -> tuple[int, ...]:
        model, optimizer = opened(kind, SOON)
        step_of(model, optimizer, rank, 0)
        ranks.meet()
        if rank == VICTIM:
            failing(optimizer._tritoncomm.setup.vector.scheduler, lambda: released.wait(10) and None)
        optimizer.zero_grad()
        doors.loss_of(model, rank, 1, "cuda").backward()
        with pytest.raises(tritoncomm.ExchangeTimeoutError) as caught:
            optimizer.step()
        if rank != VICTIM:
            waiting.wait(10)
        return caught.value.peers

    assert ranks.run(train, WORLD_SIZE, network=Network(WORLD_SIZE, limit=6.0)) == [(VICTIM,)] * WORLD_SIZE


class Interrupting(dict):
    """A parameter group that is interrupted as it is read."""

    def __getitem__(self, key: str) -> object:
        """Raise what Ctrl-C raises."""
        raise KeyboardInterrupt


def test_rank_that_is_interrupted_outside_of_a_step() -> None:
    """The others do not wait for the time-out in a comparison of settings, and learn which rank has stopped."""

    def change(rank: int) -> float:
        model, optimizer = opened("plain", LATE)
        step_of(model, optimizer, rank, 0)
        ranks.meet()
        group = Interrupting if rank == VICTIM else dict
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt if rank == VICTIM else tritoncomm.ExchangeError) as caught:
            optimizer.add_param_group(group(params=[torch.nn.Parameter(torch.ones(3, device="cuda"))]))
        assert rank == VICTIM or str(caught.value).endswith("rank 1 stopped: KeyboardInterrupt"), caught.value
        return time.monotonic() - start

    assert max(ranks.run(change, WORLD_SIZE, network=Network(WORLD_SIZE, limit=6.0))) < 4
