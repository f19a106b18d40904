"""Failure report: after a failed exchange, find the missing ranks and collect what each rank saw.

A rank that detects a failure writes a report to the store of the default process group. It also closes its
connections. Ranks that wait for it then fail at once instead of at the time-out. A rank without a report is lost or
slow. A rank that an exchange in another group has found at fault is at fault here, too. Otherwise, if all ranks report,
a rank is at fault if the messages that did not arrive all were to it or from it, or if it cannot read the reports of
the others. All surviving ranks return the same list of missing ranks, as long as they reach the store.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from tritoncomm.errors import ExchangeError, ExchangeTimeoutError, PeerLostError, ProtocolMismatchError
from tritoncomm.scheduler.ranks import global_ranks, name_of, own_rank, rank_text, text_by_rank

# Tells whether an exception interrupts the program, and does not belong to the exchange.
IsInterruption = Callable[[BaseException], bool]

# Seconds to wait for reports of ranks whose connection is closed, and of all others, which may still be computing. No
# rank waits longer for anything here: a store whose host is lost does not answer, and does not time out either.
_CLOSED_SECONDS, _SILENT_SECONDS = 1.2, 1.3
# Seconds in which a rank with a working connection says that it has read all reports.
_READ_SECONDS = 0.6
_PROBE_SECONDS = 0.05
_PROBE_TAG = (1 << 31) - 1
_TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
# gloo's text for a connection that this process closed itself.
_CLOSED_HERE = re.compile("application timeout", re.IGNORECASE)
_LOST = re.compile(
    r"pair closure|closed by|reset by|read error|write error|broken pipe|refused"  # gloo
    r"|communicator was aborted|remote process exit",  # NCCL
    re.IGNORECASE,
)
_PROCEED = "To continue, call optimizer.reset_process_group() with a new process group"
# The groups in which an exchange has failed. Their connections may be closed. Names come again in a new default group.
_broken: WeakSet[dist.ProcessGroup] = WeakSet()


def ends_program(error: BaseException) -> bool:
    """Return True for what ends the program, such as KeyboardInterrupt. An exchange leaves it as it is."""
    return not isinstance(error, Exception)


def is_broken(group: dist.ProcessGroup | None) -> bool:
    """Return True if an exchange in ``group`` has failed on this rank."""
    return (group or dist.group.WORLD) in _broken


@dataclass(frozen=True)
class RankReport:
    """The report of one rank about a failed exchange. Ranks have their global numbers.

    ``kind`` is "timeout", "lost", "protocol", "error", "stopped" (an interruption), or "other": another rank has raised
    an exception. ``where`` names step, round, phase and method, ``text`` is the error message. ``peers`` are the ranks
    that it exchanged messages with. ``waiting`` are those whose message had not arrived, as far as known. ``at`` is the
    number of the step, of the round, and of the round within a subgroup, if any. ``at_fault`` are ranks that an
    exchange in another group has found at fault already.
    """

    kind: str
    where: str
    text: str
    peers: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    at_fault: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class FailureReport:
    """The reports of all ranks of a group about a failed exchange. Ranks have their global numbers.

    ``missing`` are the ranks without a report in time, or at fault by the reports of all. All ranks use the list of the
    first rank that finished waiting. ``gone`` is True if the connections of the missing ranks were closed: they are
    lost and not only slow. ``reports`` holds the reports by rank. ``silent_store`` is the address of the store if it
    has not answered: then nothing is known about other ranks.
    """

    missing: list[int]
    gone: bool
    reports: dict[int, RankReport]
    silent_store: str | None = None

    def _described(self, own: int) -> str:
        """Return where the other ranks were. Ranks that were at the same place as rank ``own`` are left out."""
        reports, mine = sorted(self.reports.items()), self.reports.get(own)
        others = {rank: report.where for rank, report in reports if mine is None or report.where != mine.where}
        waiting = {rank: rank_text(*report.waiting) for rank, report in reports if report.waiting}
        return "; ".join(filter(None, (text_by_rank(others, " was in"), text_by_rank(waiting, " waited for"))))

    def error(self, size: int, where: str, cause: BaseException, advice: str) -> ExchangeError | ProtocolMismatchError:
        """Return the error that this rank raises.

        ``size`` is the number of ranks in the group. ``where`` says where this rank was, ``cause`` is its own error,
        and ``advice`` is added to the text.
        """
        own = own_rank()
        message, others = f"exchange failed on {rank_text(own)}, {where}: ", self._described(own)
        texts: defaultdict[str, dict[int, str]] = defaultdict(dict)
        for rank, report in sorted(self.reports.items()):
            texts[report.kind][rank] = report.text
        restart = f", or restart from a checkpoint{advice and '. On NCCL, ' + advice}"
        if texts["stopped"] and not self.gone:
            reasons = text_by_rank(texts["stopped"], " stopped:")
            return ExchangeError(message + _advised(reasons, restart), texts["stopped"])
        if texts["protocol"] and not self.gone:
            return ProtocolMismatchError(message + "; ".join(texts["protocol"].values()) + (others and f" ({others})"))
        if texts["error"] and not self.gone:
            failures = text_by_rank(texts["error"], " failed, see its traceback:")
            return ExchangeError(message + _advised(failures, restart), texts["error"])
        missing = self.missing or [*others_at_fault(cause)]
        if texts["other"] and not self.gone:
            return ExchangeError(message + _advised("; ".join(texts["other"].values()), restart), missing)
        names = rank_text(*missing) if missing else "rank (number unknown)"
        more = f"({others or cause}). "
        if (self.gone or not texts["timeout"]) and self.silent_store is None:
            return PeerLostError(f"{message}lost {names} {more}{_PROCEED} of the remaining ranks{restart}", missing)
        problem = f"no answer from {names} within the time-out"
        if len(missing) == size - 1 > 1:
            problem += ", so this rank may be cut off"
        elif own in missing:
            problem = "the other ranks stopped waiting for this rank"
        elif self.silent_store is not None:
            where = self.silent_store and f", {self.silent_store}"
            problem = f"no answer from the store of the process group{where}: its host is lost, or this rank is cut off"
        return ExchangeTimeoutError(
            f"{message}{problem} {more}If a rank is only slow, increase the time-out. {_PROCEED}{restart}", missing
        )


def _advised(reasons: str, restart: str) -> str:
    """Add how to go on to ``reasons``, unless one of them says it: that of an exchange in a smaller group."""
    return reasons if _PROCEED in reasons else f"{reasons}. {_PROCEED}{restart}"


def report_of(
    error: BaseException,
    where: str,
    peers: list[int],
    waiting: Sequence[int] = (),
    at: Sequence[int] = (),
    *,
    is_interruption: IsInterruption,
) -> RankReport:
    """Return the report of this rank about ``error``. See :class:`RankReport`."""
    stops, name, text = is_interruption(error), type(error).__name__, ""
    with suppress(Exception):  # of the user's own class
        text = str(error)
    if stops:
        text = f"{name}: {text}" if text else name  # its type says what an interruption is
    kind = "stopped" if stops else _kind_of(error)
    return RankReport(kind, where, text or name, peers, [*waiting], [*at], [*others_at_fault(error)])


def _kind_of(error: BaseException) -> str:
    """Return the kind of ``error`` in a report. Errors of a backend differ only in their text."""
    if isinstance(error, ProtocolMismatchError):
        return "protocol"
    if isinstance(error, ExchangeTimeoutError):
        return "timeout"
    if isinstance(error, PeerLostError):
        return "lost"
    if isinstance(error, ExchangeError):
        return "other" if others_at_fault(error) else "error"
    text = str(error)
    if is_lost(error):
        return "lost"
    return "timeout" if _TIMED_OUT.search(text) else "error"


def is_lost(error: BaseException) -> bool:
    """Return True if ``error``, of a backend, says that a connection is closed."""
    return _LOST.search(str(error)) is not None


def others_at_fault(error: BaseException) -> tuple[int, ...]:
    """Return the global ranks that ``error``, of an exchange in another group, names as the reason for it.

    Empty if it names none, or this rank.
    """
    peers = error.peers if isinstance(error, ExchangeError) else ()
    return () if own_rank() in peers else peers


def has_arrived(work: Any) -> bool:
    """Return True if the message of ``work``, a work of gloo, was complete before its connection failed."""
    try:
        work.wait(timedelta(milliseconds=1))
    except RuntimeError:
        return False
    return True


def collect(group: dist.ProcessGroup | None, own: RankReport, patience: float = 0.0) -> FailureReport:
    """Write the report ``own`` to the store, and collect the reports of all ranks of ``group``.

    ``patience`` is the number of seconds that ranks need to notice a failure. If this rank has reported a failure of
    ``group`` before, that report stays. The key is the group alone: step and method may differ between the ranks, and a
    group fails only once. Returns when all ranks have reported or the waiting time is over.
    """
    deadline = time.monotonic() + _SILENT_SECONDS + patience
    ranks, prefix, closed = global_ranks(group), f"tritoncomm/{name_of(group)}/", cut_connections(group)
    collection = _Collection(_store(), prefix, ranks, own, closed, writes=not is_broken(group))
    # On a thread of its own, because operations of a store never end if its host cannot be reached.
    thread = threading.Thread(target=collection.run, args=(deadline,), daemon=True)
    thread.start()
    thread.join(deadline + _READ_SECONDS - time.monotonic())
    if (whole := group or dist.group.WORLD) is not None:
        _broken.add(whole)
    return collection.result(has_ended=not thread.is_alive())


class _Collection:
    """Collects the reports of ``ranks`` under ``prefix`` in ``store``. ``own`` is the report of this rank.

    Without ``writes``, the report that this rank has written before stays. ``closed`` are the ranks whose connections
    were closed.
    """

    def __init__(
        self, store: Any, prefix: str, ranks: Sequence[int], own: RankReport, closed: set[int], *, writes: bool
    ) -> None:
        self._store, self._prefix, self._ranks, self._rank = store, prefix, ranks, own_rank()
        self._reports = {self._rank: own}
        self._writes = writes
        self._closed = closed
        self._agreed: FailureReport | None = None

    def run(self, deadline: float) -> None:
        """Write the own report and read those of the others until ``deadline``, a time of ``time.monotonic()``."""
        store = self._store
        if store is None:
            return
        with suppress(RuntimeError):  # the process that hosted the store may have died
            if self._writes:
                store.set(f"{self._prefix}{self._rank}", json.dumps(asdict(self._reports[self._rank])))
            self._read(deadline)
            missing, gone = self._found()
            if len(self._reports) > 1 or len(self._ranks) <= 2:  # noqa: PLR2004 - a rank that reads nothing may be cut off
                # A rank that finishes waiting later returns the same result.
                content = store.compare_set(f"{self._prefix}missing", "", json.dumps([missing, gone]))
                missing, gone = json.loads(content)
            self._agreed = FailureReport(missing, gone=gone, reports=dict(self._reports))

    def result(self, *, has_ended: bool) -> FailureReport:
        """Return what was agreed on, or what this rank alone knows. ``has_ended`` is False if the store is silent."""
        if self._agreed is not None:
            return self._agreed
        reports = dict(self._reports)
        if not has_ended:  # a connection may be closed because a rank is lost, or because it could not wait longer
            return FailureReport([], gone=False, reports=reports, silent_store=_address(self._store))
        # There is no store, or its process has died. Only ranks that cannot be reached are known to be missing.
        found = self._silent() & (self._closed | set(reports[self._rank].peers))
        return FailureReport(sorted(found & self._closed or found), gone=bool(found & self._closed), reports=reports)

    def _silent(self) -> set[int]:
        return set(self._ranks) - set(self._reports)

    def _read(self, deadline: float) -> None:
        """Read the reports of the other ranks until all have reported, or it is not worth waiting longer."""
        closed_deadline = time.monotonic() + _CLOSED_SECONDS
        while self._silent():
            for other in self._silent():
                if self._store.check([f"{self._prefix}{other}"]):
                    self._reports[other] = RankReport(**json.loads(self._store.get(f"{self._prefix}{other}")))
            if time.monotonic() > (closed_deadline if self._silent() <= self._closed else deadline):
                return
            time.sleep(0.005)

    def _found(self) -> tuple[list[int], bool]:
        """Return the missing ranks, and whether they are lost and not only slow."""
        silent = self._silent()
        if silent & self._closed:
            return sorted(silent & self._closed), True
        waited_for = {other for report in self._reports.values() for other in report.waiting}
        known = {other for report in self._reports.values() for other in report.at_fault if other in self._ranks}
        if silent:
            return sorted(known | silent & waited_for) or sorted(silent), False
        if any(report.kind in ("protocol", "stopped", "error") for report in self._reports.values()):
            return [], False  # their texts say what is wrong
        if known:
            return sorted(known), False
        at_fault = by_messages(self._reports)
        return ([at_fault] if at_fault is not None else self._slow_readers()), False

    def _slow_readers(self) -> list[int]:
        """Return the ranks that do not read the reports of the others as fast as this rank, if they are the minority.

        A collective does not say which rank it waits for. A rank may be able to write its report, though hardly
        anything reaches it.
        """
        self._store.set(f"{self._prefix}read/{self._rank}", "")
        unread = set(self._ranks) - {self._rank}
        end = time.monotonic() + 0.9 * _READ_SECONDS
        while unread and time.monotonic() < end:
            unread = {other for other in unread if not self._store.check([f"{self._prefix}read/{other}"])}
            time.sleep(0.005)
        return sorted(unread) if 2 * len(unread) < len(self._ranks) else []


def by_messages(reports: Mapping[int, RankReport]) -> int | None:
    """Return the rank at fault by the ``reports`` of all ranks, or None if they do not say it.

    A message was lost on its way, or is slow, if its receiver waits for a rank that is as far as the receiver: sends
    come before waits. The rank at fault is an end of most such messages. Without one, the rank at fault is the one that
    is behind all others, and that another rank waits for.
    """
    ends: Counter[int] = Counter()
    for receiver, report in reports.items():
        for sender in report.waiting:
            if reports[sender].at >= report.at:
                ends.update((receiver, sender))
    if ends:
        return _only(rank for rank, count in ends.items() if count == max(ends.values()))
    least = min(report.at for report in reports.values())
    behind = _only(rank for rank, report in reports.items() if report.at == least)
    return behind if any(behind in report.waiting for report in reports.values()) else None


def _only(found: Iterable[int]) -> int | None:
    """Return the only element of ``found``, or None if there are several."""
    several = list(found)
    return several[0] if len(several) == 1 else None


def uses_gloo(group: dist.ProcessGroup | None) -> bool:
    """Return True if gloo carries messages of ``group`` that are in host memory."""
    return "cpu:gloo" in dist.get_backend_config(group)


def cut_connections(group: dist.ProcessGroup | None) -> set[int]:
    """Close this rank's connections, and return the ranks of ``group`` whose connections were already closed.

    Ranks that wait for this one then fail at once. gloo rejects a receive from a rank whose connection is closed. This
    finds the closed connections. gloo closes all connections of a process when a wait times out. Short waits therefore
    close them. On other backends this does nothing and returns an empty set.
    """
    if not uses_gloo(group):
        return set()
    time.sleep(_PROBE_SECONDS)  # a closed connection becomes visible only after some milliseconds
    probes: list[Any] = []
    closed: set[int] = set()
    for other in set(global_ranks(group)) - {own_rank()}:
        try:
            probes.append(
                dist.irecv(torch.empty(1, dtype=torch.int32, device="cpu"), other, group=group, tag=_PROBE_TAG)
            )
        except RuntimeError as error:
            if not _CLOSED_HERE.search(str(error)):
                closed.add(other)
    for probe in probes:  # the first one may not time out: its connection may have been closed meanwhile
        with suppress(RuntimeError):
            probe.wait(timedelta(milliseconds=1))
    return closed


def _address(store: Any) -> str:
    """Return the address of the process that hosts ``store``, or an empty text."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if hasattr(store, "host") else ""


def _store() -> Any:
    with suppress(RuntimeError, ValueError, AttributeError):
        return dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no public function returns it
    return None
