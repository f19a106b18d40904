"""Failures on emulated GPUs: a rank that raises, dies or hangs is named on all others."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor  # the first collective would import it, which takes longer than the time-outs here
from tritoncomm import ExchangeError, ExchangeTimeoutError, NonFiniteError
from tritoncomm.scheduler import failure_report, watcher
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.scheduler.rounds import AllReduce, Op, Pattern, Round
from tritoncomm.step import agree
from tritoncomm.step.exchange.claim import Vote, vote
from tritoncomm.step.exchange.feedback import ErrorFeedback

import recipes
from emulated_cuda import ranks
from emulated_cuda.device import current_gpu, to_gpu, values_of
from emulated_cuda.network import Network

VICTIM, WORLD_SIZE, NUMEL = 1, 4, 90
SOON, LATE = timedelta(seconds=1), timedelta(seconds=15)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(watcher, "RELEASE_SECONDS", 0.5)
    monkeypatch.setattr(failure_report, "_SILENT_SECONDS", 0.3)


def failing_at(scheduler: ProcessGroupScheduler, number: int, fault: Callable[[], None]) -> None:
    """Call ``fault`` before the ``number``-th operation from now, also of a subgroup."""
    left = [number]
    for each in [scheduler, *scheduler._subgroups.values()]:
        perform = each._perform

        def faulty(op: Op, perform: Callable[[Op], Any] = perform) -> Any:
            left[0] -= 1
            if left[0] == -1:
                fault()
            return perform(op)

        each._perform = faulty


def exchange(rank: int, name: str, number: int, fault: Callable[[], None], timeout: timedelta) -> tuple[Any, ...]:
    """Exchange until the second step fails on this rank. Return the error, the seconds, and whether nothing changed."""
    recipe = recipes.under_test(0.1)[name]
    subgroups = recipe.subgroups(WORLD_SIZE)
    scheduler = ProcessGroupScheduler(None, timeout, "cuda", f"{recipe.name} {recipe!r}", subgroups)
    feedback = ErrorFeedback(recipe.build(NUMEL), "cuda")
    generator = torch.Generator().manual_seed(rank)
    for step in range(2):
        before = values_of(feedback.residual)
        gradient = to_gpu(torch.randn(NUMEL, generator=generator))
        ranks.meet()
        if step == 1 and rank == VICTIM:
            failing_at(scheduler, number, fault)
        started = time.monotonic()
        try:
            scheduler.run(feedback.begin(gradient, rank, WORLD_SIZE))
            scheduler.run(vote(Vote(), scheduler.device, [scheduler]), new_step=False)
        except Exception as error:
            feedback.rollback()
            with pytest.raises(type(error)):  # the failed group raises the same error again
                scheduler.run(feedback.begin(gradient, rank, WORLD_SIZE))
            return error, time.monotonic() - started, torch.equal(before, values_of(feedback.residual))
        feedback.commit()
    raise AssertionError(f"rank {rank} raised no error")


# A collective, messages and a subgroup. tests/emulated_cuda/test_failures.py has other methods.
CASES = [
    ("dense", 1, True),
    ("oktopk-short-periods", 0, False),
    ("hierarchical-2", 1, True),
    ("hierarchical-2", 3, False),
]


@pytest.mark.parametrize(("name", "number", "garbage"), CASES)
@pytest.mark.parametrize("dies", [False, True])
def test_a_rank_that_raises_or_dies(name: str, number: int, garbage: bool, dies: bool) -> None:
    """All ranks raise its error long before the time-out, and name one that dies after it.

    What they read after their wait was ended does not matter.
    """

    def fault() -> None:
        raise ranks.Died if dies else MemoryError("no room for the lists")

    network = Network(WORLD_SIZE, limit=5.0, garbage_after_abort=garbage)
    main = lambda rank: exchange(rank, name, number, fault, SOON if dies else LATE)  # noqa: E731
    found = ranks.run(main, WORLD_SIZE, network=network, errors=True)
    if dies:
        assert isinstance(found.pop(VICTIM), ranks.Died)
    for error, seconds, unchanged in found:
        assert type(error) is (ExchangeTimeoutError if dies else ExchangeError), error
        assert error.peers == (VICTIM,)
        said = "no answer from rank 1 within the time-out" if dies else "rank 1 failed, see its traceback: no room for"
        assert said in str(error)
        assert 0.9 * dies < seconds < 5
        assert unchanged


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


def test_a_rank_that_fails_outside_of_an_exchange() -> None:
    """The others wait in an exchange that this rank never enters."""

    def main(rank: int) -> Exception:
        scheduler = made(LATE)
        if rank == VICTIM:
            scheduler.fail(ValueError("a batch of the wrong shape"))
            return scheduler._failure
        with pytest.raises(ExchangeError) as caught:
            scheduler.run(sums())
        return caught.value

    for error in ranks.run(main, 3, network=Network(3, limit=5.0)):
        assert error.peers == (VICTIM,)
        assert "a batch of the wrong shape" in str(error)


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
