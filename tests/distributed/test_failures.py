"""Every failure between real processes is an error on every survivor, named, in time, and nothing is lost."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import timedelta

import failure_workers
import pytest
from helpers import run_workers
from tritoncomm.scheduler.local_workers import WorkerError


def reports(function, world_size: int, *args) -> dict[int, tuple]:
    """What each rank reported."""
    heard: list[tuple] = []
    with suppress(WorkerError):  # a rank may not find its way back to the others
        run_workers(function, world_size, *args, listen=heard.append, grace=timedelta(seconds=30))
    return {report[0]: report[1:] for report in heard}


@pytest.mark.parametrize("algo", ["oktopk", "spardl", "exdyna", "topk_allgather", "dense", "hierarchical"])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_killed_rank(algo: str, number: int) -> None:
    """Wherever it dies, the survivors name it, lose nothing, regroup, and train to the end."""
    assert reports(failure_workers.killed, 4, algo, number) == dict.fromkeys((0, 2, 3), ("trained to the end",))


def test_slow_rank() -> None:
    """A time-out on the others names it; it learns that it was given up; a new group goes on with all."""
    heard = reports(failure_workers.slow, 3)
    assert sorted(heard) == [0, 1, 2, 10, 11, 12]
    for rank in range(3):
        assert heard.pop(rank + 10) == ("goes on",)
    for rank, (kind, peers, seconds, text) in heard.items():
        assert kind == "ExchangeTimeoutError", heard
        assert peers == (1,)
        assert rank == 1 or seconds < 8
        assert "step 1, round" in text
        assert "of oktopk" in text


def test_skipped_exchange() -> None:
    """Who does not come to an exchange is named."""
    heard = reports(failure_workers.skipped, 3)
    assert sorted(heard) == [0, 2]
    for kind, peers, seconds, text in heard.values():
        assert kind == "ExchangeTimeoutError", text
        assert peers == (1,)
        assert seconds < 8


@pytest.mark.parametrize(
    ("actual", "expected"), [(10, 20), (20, 10), (10, 100_000), (100_000, 10), (100_000, 100_001), (100_001, 100_000)]
)
def test_lengths(actual: int, expected: int) -> None:
    """Longer or shorter than expected, within the first part of a message or not: no garbage, no abort."""
    heard = reports(failure_workers.lengths, 3, actual, expected)
    assert sorted(heard) == [0, 1, 2]
    for kind, _, seconds, text in heard.values():
        assert kind == "ProtocolMismatchError", text
        assert seconds < 5
        assert f"expected step 1, round 1, phase 'ragged', {expected} words; received step 1, round 1, phase " in text
        assert f"'ragged' (first 8 bytes), {actual} words" in text
        assert "rank 1 from rank 0" in text


@pytest.mark.parametrize(
    ("situation", "said"),
    [
        (failure_workers.another_step, "expected step 1, .* received step 2"),
        (failure_workers.dtypes, r"phase 'ring' sends .*shape \(4,\) and dtype torch\.float32: .*one-dimensional"),
        (failure_workers.phases, "phase 'gather', 4 words; received .* phase 'balance'"),
        (failure_workers.settings, "a different method or settings"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_mismatches(situation, said: str) -> None:
    """All ranks are told what does not fit, by both sides' names, at once."""
    heard = reports(situation, 3)
    assert sorted(heard) == [0, 1, 2]
    for kind, _, seconds, text in heard.values():
        assert kind == "ProtocolMismatchError", text
        assert seconds < 5
        assert re.search(said, text), text


def test_kinds() -> None:
    """A collective here and messages there: after the time-out everybody knows who was where."""
    heard = reports(failure_workers.kinds, 3)
    assert sorted(heard) == [0, 1, 2]
    for rank, (kind, _, seconds, text) in heard.items():
        assert kind == "ExchangeTimeoutError", text
        assert seconds < 8
        assert ("phase 'lists'" if rank == 1 else "rank 1 was in step 1, round 1, phase 'sums' of test") in text


def test_version() -> None:
    """Releases are compared before anything is exchanged."""
    heard = reports(failure_workers.version, 3)
    assert all("version: " in text and "rank 1 has '0.0.1'" in text for *_, text in heard.values())
    assert sorted(heard) == [0, 1, 2]


def test_overlapping_messages() -> None:
    """What is guarded against does not happen by itself."""
    assert reports(failure_workers.overlapping, 3) == dict.fromkeys(range(3), ("whole",))


def test_optimizers_in_another_order() -> None:
    """Models that have the same shapes are not mixed."""
    heard = reports(failure_workers.swapped, 2)
    assert sorted(heard) == [0, 1]
    for kind, _, _, text in heard.values():
        assert kind == "ProtocolMismatchError", text
        assert "step optimizers in the same order on all ranks" in text


def test_bystander() -> None:
    """Who has only been computing is not blamed."""
    heard = reports(failure_workers.bystander, 3)
    assert sorted(heard) == [0, 1, 2]
    for kind, _, _, text in heard.values():
        assert kind == "ProtocolMismatchError", text
        assert "phase 'balance'" in text


def test_broken_method() -> None:
    """Nobody waits for a rank whose method failed, and all are told how."""
    heard = reports(failure_workers.broken_method, 3)
    assert sorted(heard) == [0, 1, 2]
    for kind, peers, seconds, text in heard.values():
        assert kind == "ExchangeError", text
        assert peers == (1,)
        assert seconds < 10
        assert "rank 1 failed, see its traceback: no room for the lists" in text


def test_undecided_step() -> None:
    """A step that some could not confirm is taken by all in the end."""
    heard = reports(failure_workers.pending, 3)
    assert {rank: heard[rank] for rank in (10, 11, 12)} == dict.fromkeys((10, 11, 12), ("together again",))


def test_frozen_on_one_rank() -> None:
    """Replicas do not drift apart: the step is refused on all ranks."""
    heard = reports(failure_workers.frozen, 3)
    assert sorted(heard) == [0, 1, 2]
    for kind, _, _, text in heard.values():
        assert kind == "ProtocolMismatchError", text
        assert "freeze the same parameters" in text
