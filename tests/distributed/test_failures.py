"""Failures between real processes: every survivor raises a named error in time, and nothing is lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import failure_workers
import pytest
import recovery_workers
from helpers import reports

from processes import end_soon, is_running


@pytest.mark.parametrize("algo", ["oktopk", "spardl", "exdyna", "topk_allgather", "dense", "hierarchical"])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_killed_rank(algo: str, number: int) -> None:
    """If a rank dies in any round, the survivors name it, lose nothing, regroup and train to the end."""
    assert reports(failure_workers.killed, 4, algo, number) == dict.fromkeys((0, 2, 3), ("trained to the end",))


@pytest.mark.parametrize("situation", ["schedule", "clipped", "own clipping", "flush", "clipped flush"])
def test_lost_in_confirmation(situation: str) -> None:
    """A step that some ranks have taken, and others could not confirm, is repeated on these. Otherwise all refuse."""
    outcome = "refused" if situation == "own clipping" else "trained to the end"
    assert reports(recovery_workers.lost_in_confirmation, 3, situation) == dict.fromkeys((0, 1), (outcome,))


def test_lost_with_scaler() -> None:
    """With ``tritoncomm.amp.GradScaler``, a lost rank is named, and the others go on."""
    assert reports(recovery_workers.lost_with_scaler, 3) == dict.fromkeys((0, 1), ("trained to the end",))


def test_slow_rank() -> None:
    """A slow rank causes a time-out that names it, also on itself. A new group continues with all ranks."""
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
    """The time-out names the rank that does not take part in an exchange."""
    heard = reports(failure_workers.skipped, 3)
    assert sorted(heard) == [0, 2]
    for kind, peers, seconds, text in heard.values():
        assert kind == "ExchangeTimeoutError", text
        assert peers == (1,)
        assert seconds < 8


@pytest.mark.parametrize(
    ("actual", "expected"), [(10, 20), (20, 10), (10, 100_000), (100_000, 10), (100_000, 100_001), (100_001, 100_000)]
)
def test_mismatched_lengths(actual: int, expected: int) -> None:
    """A message that is longer or shorter than expected raises an error on all ranks."""
    heard = reports(failure_workers.mismatched_lengths, 3, actual, expected)
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
        (failure_workers.mismatched_steps, "expected step 1, .* received step 2"),
        (
            failure_workers.mismatched_dtypes,
            r"phase 'ring' sends .*shape \(4,\) and dtype torch\.float32: .*one-dimensional",
        ),
        (failure_workers.mismatched_phases, "phase 'gather', 4 words; received .* phase 'balance'"),
        (failure_workers.mismatched_settings, "a different method or settings"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_mismatches(situation, said: str) -> None:
    """All ranks report the mismatch at once, with the values of both sides."""
    heard = reports(situation, 3)
    assert sorted(heard) == [0, 1, 2]
    for kind, _, seconds, text in heard.values():
        assert kind == "ProtocolMismatchError", text
        assert seconds < 5
        assert re.search(said, text), text


@pytest.mark.parametrize(("size", "raised"), [(3, "ProtocolMismatchError"), (1000, "ExchangeTimeoutError")])
def test_mismatched_operations(size: int, raised: str) -> None:
    """If one rank is in a collective and the others exchange messages, the error says where each rank was.

    A small collective consists of messages, too, and is noticed at once. A long one is noticed after the time-out.
    """
    heard = reports(failure_workers.mismatched_operations, 3, size)
    assert sorted(heard) == [0, 1, 2]
    for rank, (kind, _, seconds, text) in heard.items():
        assert kind == raised, text
        assert seconds < 8
        assert ("phase 'lists'" if rank == 1 else "rank 1 was in step 1, round 1, phase 'sums' of test") in text


def test_mismatched_versions() -> None:
    """Different releases are detected before anything is exchanged."""
    heard = reports(failure_workers.mismatched_versions, 3)
    assert all("version: " in text and "rank 1 has '0.0.1'" in text for *_, text in heard.values())
    assert sorted(heard) == [0, 1, 2]


def test_overlapping_messages() -> None:
    """Long and short messages that are in transit at the same time arrive complete and in order."""
    assert reports(failure_workers.overlapping, 3) == dict.fromkeys(range(3), ("whole",))


@pytest.mark.parametrize("width", [4, 400])
def test_optimizers_in_different_orders(width: int) -> None:
    """Optimizers with equal shapes that are stepped in different orders raise an error.

    Messages say of which optimizer they are. Long collectives do not, but the confirmation does.
    """
    heard = reports(failure_workers.different_orders, 2, width)
    assert sorted(heard) == [0, 1]
    for kind, _, _, text in heard.values():
        assert kind == "ProtocolMismatchError", text
        assert "step the same optimizers in the same order" in text.lower()


def test_computing_rank_is_not_blamed() -> None:
    """A mismatch between two ranks does not blame a third rank that is still computing."""
    heard = reports(failure_workers.computing_rank, 3)
    assert sorted(heard) == [0, 1, 2]
    for kind, _, _, text in heard.values():
        assert kind == "ProtocolMismatchError", text
        assert "phase 'balance'" in text


def test_broken_method() -> None:
    """If the method fails on one rank, all ranks report that failure without waiting for the time-out."""
    heard = reports(failure_workers.broken_method, 3)
    assert sorted(heard) == [0, 1, 2]
    for kind, peers, seconds, text in heard.values():
        assert kind == "ExchangeError", text
        assert peers == (1,)
        assert seconds < 10
        assert "rank 1 failed, see its traceback: no room for the lists" in text


@pytest.mark.parametrize(("is_subgroup", "hangs"), [(False, False), (True, False), (True, True)])
def test_failure_in_a_smaller_group(is_subgroup: bool, hangs: bool) -> None:
    """The ranks of a larger group name the rank at fault alone, and not a rank that only waited for it."""
    heard = reports(failure_workers.broken_in_smaller_group, 4, is_subgroup, hangs)
    assert sorted(heard) == [1, 2, 3]
    for kind, peers, seconds, text in heard.values():
        assert kind == ("ExchangeTimeoutError" if hangs else "ExchangeError"), text
        assert peers == (1,), text
        assert seconds < 10
    for rank in (2, 3):
        said = "no answer from rank 1 within" if hangs else "rank 1 failed, see its traceback: no room for the lists"
        assert said in heard[rank][-1]
    if is_subgroup:
        assert "phase 'team' of test, in round 2, phase 'inner' among ranks [1, 2]" in heard[2][-1]


def test_unknown_subgroup() -> None:
    """All ranks hear at once of a rank whose pattern names a subgroup that it does not have."""
    heard = reports(failure_workers.unknown_subgroup, 2)
    assert sorted(heard) == [0, 1]
    for kind, peers, seconds, text in heard.values():
        assert kind == "ExchangeError", text
        assert peers == (1,), text
        assert seconds < 10


def test_unconfirmed_step() -> None:
    """A step that one rank could not confirm is taken by all ranks after they regroup."""
    heard = reports(failure_workers.unconfirmed, 3)
    assert {rank: heard[rank] for rank in (10, 11, 12)} == dict.fromkeys((10, 11, 12), ("together again",))


def test_frozen_on_one_rank() -> None:
    """All ranks reject a step if a parameter is frozen on one of them."""
    heard = reports(failure_workers.frozen, 3)
    assert sorted(heard) == [0, 1, 2]
    for kind, _, _, text in heard.values():
        assert kind == "ProtocolMismatchError", text
        assert "frozen state of parameter 1 of shape (20, 6): ranks [0, 2] have False, rank 1 has True" in text
        assert "freeze the same parameters" in text


LAUNCHER = """
from failure_workers import asleep
from helpers import reports, run_workers
if __name__ == "__main__":
    run_workers(asleep, 2, listen=lambda number: print(number, flush=True))
"""


def test_workers_end_with_their_launcher(tmp_path: Path) -> None:
    """If the process that started workers is killed, they end, too."""
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as launcher:
        workers = [int(launcher.stdout.readline()) for _ in range(2)]
        assert all(map(is_running, workers))
        launcher.send_signal(signal.SIGKILL)
    assert end_soon(workers)
