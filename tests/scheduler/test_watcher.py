"""What watches the waits of an exchange on emulated GPUs. ``tests/emulated_cuda/test_failures.py`` has its failures."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor  # the first collective would import it, which takes longer than the time-outs here
from tritoncomm import ExchangeError, ExchangeTimeoutError, NonFiniteError
from tritoncomm.scheduler import failure_report, watcher
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.scheduler.rounds import AllReduce, Pattern, Round
from tritoncomm.step import agree

from emulated_cuda import ranks
from emulated_cuda.device import current_gpu
from emulated_cuda.network import Network

VICTIM = 1
SOON, LATE = timedelta(seconds=1), timedelta(seconds=15)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(watcher, "RELEASE_SECONDS", 0.5)
    monkeypatch.setattr(failure_report, "_SILENT_SECONDS", 0.3)


def sums(delay: float = 0.0, times: int = 1) -> Pattern[float]:
    """Add numbers of all ranks some times, and wait before each of them. Return the sum of what was read."""
    total = torch.zeros(1, device="cuda")
    for _ in range(times):
        time.sleep(delay)
        total = total + (yield AllReduce("sum", torch.ones(1, device="cuda")))
    return float(total)


def made(timeout: timedelta, device: torch.device | str = "cuda") -> ProcessGroupScheduler:
    """Return a scheduler whose ranks have met."""
    scheduler = ProcessGroupScheduler(None, timeout, device, "test")
    scheduler.agree_on_exchange_id()
    ranks.meet()
    return scheduler


@pytest.mark.parametrize("is_finite", [False, True])
def test_garbage_is_not_a_result(is_finite: bool) -> None:
    """A pattern that ends normally, or rejects the step, with what it read after the abort raises the failure."""

    def main(rank: int) -> Exception:
        scheduler = made(SOON)
        if rank == VICTIM:
            raise ranks.Died

        def pattern() -> Pattern[float]:
            total = yield from sums()
            if not is_finite:
                raise NonFiniteError("the sum is not finite")
            return total

        with pytest.raises(ExchangeTimeoutError) as caught:
            scheduler.run(pattern())
        return caught.value

    found = ranks.run(main, 3, network=Network(3, limit=5.0, garbage_after_abort=True), errors=True)
    assert [getattr(error, "peers", None) for error in found] == [(VICTIM,), None, (VICTIM,)]


def test_waits_have_no_time_out() -> None:
    """NCCL polls with sleeps in a wait with a time-out. The watcher limits the wait instead."""

    def main(rank: int) -> list[str]:
        def pattern() -> Pattern[None]:
            yield Round("ring", {1 - rank: torch.ones(4, dtype=torch.int32, device="cuda")}, {1 - rank: 4})
            yield from sums()

        ProcessGroupScheduler(None, LATE, "cuda", "test").run(pattern())
        return [kind for kind, _ in current_gpu().syncs if "time-out" in kind]

    assert ranks.run(main, 2) == [[], []]


def late_rank(rank: int) -> float:
    """A rank is late by less than the time-out in each of many waits, which take longer than it together."""
    return ProcessGroupScheduler(None, SOON, "cuda", "test").run(sums(0.5 * (rank == VICTIM), times=3))


def queued_work(rank: int) -> float:
    """The GPUs of all ranks are busy with earlier work for longer than the time-out."""
    scheduler = made(SOON)
    current_gpu().keep_busy(2.0)
    return scheduler.run(sums(times=3))


def earlier_report(rank: int) -> float:
    """A default group that was initialized again has the name and the store of one that failed."""
    ProcessGroupScheduler(None, LATE, "cuda", "test").watcher._tell(ValueError("a failure in an earlier group"))
    dist.barrier()
    watcher._stale.pop(dist.group.WORLD)  # as if the group was another one
    return ProcessGroupScheduler(None, LATE, "cuda", "test").run(sums(0.4 * (rank == VICTIM), times=3))


@pytest.mark.parametrize("main", [late_rank, queued_work, earlier_report])
def test_what_is_no_failure(main: Callable[[int], float]) -> None:
    """An exchange goes on with a rank that is late, behind queued work, and beside an old report."""
    assert ranks.run(main, 2) == [6.0, 6.0]


def test_the_thread_stays_on_the_device_of_its_rank() -> None:
    """A new thread begins on GPU 0. What asks for an event there would take memory of GPU 0 on every rank."""

    def main(rank: int) -> set[int]:
        torch.cuda.set_device(rank)
        scheduler = made(LATE, torch.device("cuda", rank))
        current_gpu().devices.clear()
        assert scheduler.run(sums(0.5 * (rank == VICTIM))) == 2.0
        return set(current_gpu().devices)

    assert ranks.run(main, 2, network=Network(2, several_gpus=True)) == [{0}, {1}]


def test_a_fast_exchange_does_not_ask_the_store() -> None:
    """Only a rank that waits long looks for reports. Nothing watches between exchanges."""

    def main(rank: int) -> list[int]:
        scheduler = ProcessGroupScheduler(None, LATE, "cuda", "test")
        asked: list[int] = []
        with scheduler.watcher as own:
            own._ask = lambda: asked.append(rank)
            own._since = time.monotonic() + 60.0  # keeps the thread from looking
            own.poll()
            soon = len(asked)
            own._since = time.monotonic() - 1.0
            own.poll()
        assert own not in watcher._under_way
        return [soon, len(asked) > 0]

    assert ranks.run(main, 2) == [[0, True], [0, True]]


def waits(own: watcher.Watcher, seconds: float) -> bool:
    """Return whether the communicators are aborted in an exchange that has waited for ``seconds``."""
    own._asking = threading.Thread()  # the thread of all watchers must not look first
    try:
        with own:
            watcher._under_way.discard(own)
            own._since = time.monotonic() - seconds
            own.poll()
    except ExchangeTimeoutError:
        return True
    return False


def test_a_wait_of_an_earlier_exchange_is_a_wait() -> None:
    """Without a read of the host, the exchange before may still wait for a rank. Its time counts in the next one."""

    def main(rank: int) -> list[bool]:
        first, second = (ProcessGroupScheduler(None, SOON, "cuda", "test").watcher for _ in range(2))
        with first:
            current_gpu().keep_busy(60.0)  # a collective without the others
        return [waits(first, 2.0), waits(second, 2.0)]

    assert ranks.run(main, 2) == [[True, True]] * 2


def test_queued_work_has_a_limit() -> None:
    """It may be a collective of the program with a lost rank. The time-out of the process group holds for it."""
    both = threading.Barrier(2, timeout=60)

    def main(rank: int) -> list[bool]:
        current_gpu().keep_busy(1e4)
        own = ProcessGroupScheduler(None, SOON, "cuda", "test").watcher
        within = waits(own, 590.0)
        both.wait()  # the rank that gives up tells the other
        return [within, waits(own, 610.0)]

    assert ranks.run(main, 2) == [[False, True]] * 2


class SilentStore:
    """The store of a host that cannot be reached."""

    def __init__(self, released: threading.Event) -> None:
        self._released = released

    def check(self, keys: list[str]) -> bool:
        """Never answer."""
        return not self._released.wait(30)

    def set(self, key: str, value: bytes) -> None:
        """Never answer."""
        self._released.wait(30)


def test_a_store_that_does_not_answer() -> None:
    """The time-out ends the wait all the same."""
    released = threading.Event()

    def main(rank: int) -> float:
        scheduler = made(SOON)
        if rank == VICTIM:
            raise ranks.Died
        scheduler.watcher._store = SilentStore(released)
        started = time.monotonic()
        with pytest.raises(ExchangeTimeoutError):
            scheduler.run(scheduler._next_exchange_id())
        return time.monotonic() - started

    found = ranks.run(main, 2, network=Network(2, limit=5.0), errors=True)
    released.set()
    assert 0.9 < found[0] < 5


def test_a_destroyed_group_frees_its_store() -> None:
    """A new group on the same port begins with an empty store, on the rank that hosts it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        connection = watcher._own_connection(dist.distributed_c10d._get_default_store())
        assert connection is watcher._own_connection(dist.distributed_c10d._get_default_store())
        connection.set("key of the first group", "")
    finally:
        dist.destroy_process_group()
    gc.collect()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        assert not dist.distributed_c10d._get_default_store().check(["key of the first group"])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("garbage", [False, True])
def test_ranks_that_compare_settings(garbage: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a rank, which is named, the comparison at wrap() ends after the time-out of the process group."""
    monkeypatch.setattr(watcher, "timeout_of", lambda group, device: SOON)

    def main(rank: int) -> float:
        if rank == VICTIM:
            raise ranks.Died
        started = time.monotonic()
        with pytest.raises(
            ExchangeError, match=r"configuration check .*same process_group.: no answer from rank 1 within the time-out"
        ):
            agree.compare({"density": 0.1}, None, torch.device("cuda", 0))
        return time.monotonic() - started

    network = Network(3, limit=5.0, garbage_after_abort=garbage)
    found = ranks.run(main, 3, network=network, errors=True)
    assert 0.9 < found[0] < 5
    assert 0.9 < found[2] < 5


@pytest.mark.parametrize("timeout", [None, LATE])
@pytest.mark.parametrize("setting", [None, "3", "0"])
def test_the_watchdog_of_nccl(
    setting: str | None, timeout: timedelta | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the setting that lets this rank report a failure, one message and the error name it, and its cost.

    The message is a warning only if the user has asked for errors in time.
    """
    caplog.set_level("INFO", "tritoncomm")
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    if setting is not None:
        monkeypatch.setenv(name, setting)
    watcher._log_advice.cache_clear()

    def main(rank: int) -> str:
        for _ in range(2):
            scheduler = ProcessGroupScheduler(None, timeout, "cuda", "test")
        scheduler.agree_on_exchange_id()
        ranks.meet()
        scheduler._failed(AllReduce("sum", torch.ones(1)), RuntimeError("remote process exited or there was an error"))
        return str(scheduler._failure)

    texts = ranks.run(main, 2)
    logged = [record for record in caplog.records if name in record.getMessage()]
    assert [record.levelname for record in logged] == ["INFO" if timeout is None else "WARNING"] * (setting != "0")
    for text in [*texts, *(record.getMessage() for record in logged)]:
        assert "lost rank" in text
        assert (f"set {name}=0 before init_process_group" in text) == (setting != "0")
        assert ("collectives of your own then wait for a lost rank without end" in text) == (setting != "0")
