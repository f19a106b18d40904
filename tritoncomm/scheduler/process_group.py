"""Run a pattern on ``torch.distributed``: batched point-to-point messages and a few collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.profiler import record_function

from tritoncomm.errors import (
    ConfigurationError,
    ExchangeError,
    NonFiniteError,
    ProtocolMismatchError,
)
from tritoncomm.scheduler import cost, failure_report, group_collectives, watcher, wire
from tritoncomm.scheduler.messages import Messages
from tritoncomm.scheduler.meter import Meter
from tritoncomm.scheduler.new_group import needs_all_ranks, new_group
from tritoncomm.scheduler.ranks import global_ranks, resume
from tritoncomm.scheduler.rounds import (
    AllGather,
    AllReduce,
    Collective,
    InSubgroup,
    Op,
    Pattern,
    Post,
    Read,
    Result,
    Round,
    Ticket,
    Wait,
    round_of,
)
from tritoncomm.scheduler.span import Span
from tritoncomm.scheduler.together import Running, run_together

# The highest exchange id in each group, by the group's name; and the subgroups, by id of the group and members.
_exchange_ids: Counter[str] = Counter()
# The groups in which an exchange has failed. Their connections may be closed. Names come again in a new default group.
_broken: WeakSet[dist.ProcessGroup] = WeakSet()
_subgroups: dict[tuple[int, tuple[int, ...]], tuple[Any, dist.ProcessGroup | None]] = {}
# Stands for the operation in error messages before the first operation of an exchange.
_START = Round("start", {}, {})


def is_broken(group: dist.ProcessGroup | None) -> bool:
    """Return True if an exchange in ``group`` has failed on this rank."""
    return (group or dist.group.WORLD) in _broken


def is_distributed() -> bool:
    """Return True if the default process group is initialized."""
    return dist.is_available() and dist.is_initialized()


@contextmanager
def reporting(group: dist.ProcessGroup | None, device: torch.device | None, where: str) -> Iterator[None]:
    """Let the other ranks of ``group`` know if the body, in which ranks wait for each other, fails on this one.

    ``where`` says what the body does. An interruption leaves it as it is. On a GPU, ``device``, the wait for a lost
    rank ends after the time-out of ``group``.

    Raises:
        ExchangeError: A rank was lost, was interrupted, or did not take part. The group is unusable afterwards.
    """
    guard = watcher.of(group, device)
    try:
        with guard or nullcontext():
            yield
    except BaseException as error:
        is_interruption = failure_report.is_interruption(error)
        if not is_interruption and not isinstance(error, RuntimeError):
            raise
        found = report_failure(group, device, where, error, guard)
        if is_interruption:
            raise
        raise found from error


def report_failure(
    group: dist.ProcessGroup | None,
    device: torch.device | None,
    where: str,
    error: BaseException,
    guard: watcher.Watcher | None = None,
) -> Exception:
    """Report ``error``, outside of an exchange, to the ranks of ``group``, which may wait for this one on ``device``.

    Return what this rank raises if ``error`` is no interruption. ``where`` says what has failed. ``guard`` has watched
    it, if anything has.
    """
    if is_broken(group):
        return ExchangeError(f"{where} failed, because an exchange in this process group has failed before: {error}")
    guard = guard or watcher.of(group, device)
    if guard is not None:
        error = guard.fail(error)
    rank, ranks = dist.get_rank(group), global_ranks(group)
    peers = [other for other in range(len(ranks)) if other != rank]
    kind, text = failure_report.kind_of(error), failure_report.text_of(error)
    own = failure_report.RankReport(kind, where, text, peers)
    report = _collected(group, own, watcher.RELEASE_SECONDS if guard is not None else 0.0)
    return report.error(rank, ranks, where, error, watcher.advice() if guard is not None else "")


def _collected(
    group: dist.ProcessGroup | None, own: failure_report.RankReport, patience: float = 0.0
) -> failure_report.FailureReport:
    """Write the report ``own`` unless this rank has reported a failure of ``group`` before, and collect all reports."""
    rank, ranks = dist.get_rank(group), global_ranks(group)
    # The key is the group alone. Step and method may differ between the ranks, and a group fails only once.
    is_first, whole = not is_broken(group), group or dist.group.WORLD
    report = failure_report.collect(group, rank, ranks, _name(group), own, patience, writes=is_first)
    if whole is not None:
        _broken.add(whole)
    return report


class ProcessGroupScheduler:
    """Runs patterns on one rank of the process group ``group``. ``None`` is the default process group.

    ``device`` is the device on which messages are received, the one of the exchanged vector. ``timeout`` limits each
    wait. ``None`` means the time-out of the process group. ``stamp`` is a text that identifies the exchange. It starts
    with the name of the method, and every message carries a hash of it. ``subgroups`` are the ranks of each subgroup
    that a pattern may use. ``meter`` holds the traffic and the waiting time of the last pattern. ``step`` counts the
    exchanges that have started.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        device: torch.device | str = "cpu",
        stamp: str = "",
        subgroups: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self.group = group
        self.device = torch.device(device)
        self.timeout = timeout
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.meter = Meter()
        self.step = 0
        self._number = 0  # number of the operation within the step, called round in messages
        self._method = stamp.split(" ", 1)[0] or "unnamed"
        self._stamp_text = stamp
        self._stamp: int | None = None
        self._failure: ExchangeError | ProtocolMismatchError | None = None
        self._messages = Messages(group, self.device, timeout)
        self._global_ranks = global_ranks(group)
        self._watcher = watcher.of(group, self.device, timeout)
        self._is_nested = False  # failures are reported by the scheduler whose subgroup this is
        self._failed_op: Op | None = None  # of a nested scheduler
        self._subgroups: dict[tuple[int, ...], ProcessGroupScheduler] = {}
        for ranks in subgroups:
            if list(ranks) != sorted(set(ranks)):  # torch sorts the ranks of a group, and messages would go astray
                raise ConfigurationError(f"subgroup {ranks} of {stamp!r}: list its ranks once, in ascending order")
            if self.rank in ranks or needs_all_ranks():
                members = tuple(self._global_ranks[r] for r in ranks)
                limit = timeout or watcher.timeout_of(group, self.device)  # and not torch's default
                subgroup = _subgroup(group or dist.group.WORLD, members, limit, self._global_ranks)
            if self.rank in ranks:
                scheduler = ProcessGroupScheduler(subgroup, timeout, device, f"{stamp} among {ranks}")
                scheduler._is_nested = True
                if self._watcher is not None and subgroup is not None:
                    self._watcher.groups.append(subgroup)
                    scheduler._watcher = self._watcher
                self._subgroups[ranks] = scheduler

    def check(self) -> None:
        """Raise the error of an earlier failed exchange, if any. Every further exchange in the group would fail too."""
        if self._failure is not None:
            raise self._failure

    def fail(self, error: BaseException) -> Exception | None:
        """Report to the other ranks, which may wait for this rank, that it failed outside of an exchange.

        Return what every further exchange in the group raises. None if there are no other ranks, or another exchange in
        the group has reported a failure.
        """
        if self._failure is None and self.world_size > 1 and not is_broken(self.group):
            self._failed(_START, error)
        return self._failure

    def agree_on_exchange_id(self) -> None:
        """Agree with all ranks on an id that distinguishes this exchange from identically configured ones in the group.

        All ranks must call this together. Without this call, the first :meth:`run` does it. The constructor does not
        count the id: it may have failed on some ranks only, or one rank may have made a copy.
        """
        if self._stamp is None:
            self._stamp = 0
            self._set_exchange_id(self.run(self._next_exchange_id(), new_step=False))

    def _next_exchange_id(self) -> Pattern[int]:
        highest = torch.tensor([_exchange_ids[_name(self.group)]], dtype=torch.int32, device=self.device)
        gathered = yield AllGather("set-up", highest)
        return int(gathered.max()) + 1

    def _set_exchange_id(self, number: int) -> None:
        _exchange_ids[_name(self.group)] = number
        self._stamp = wire.stamp(f"{self._stamp_text} {number}")
        for subgroup in self._subgroups.values():
            subgroup._set_exchange_id(number)  # noqa: SLF001 - same class

    def run_beside(self, other: ProcessGroupScheduler) -> None:
        """Prepare for :func:`run_together` with ``other``, which has the same group and time-out.

        Both then have one watcher. The progress of one is that of the other, and each knows why communicators were
        aborted.
        """
        if self._watcher is None or self._watcher is other._watcher:
            return
        assert other._watcher is not None
        self._watcher = other._watcher
        for subgroup in self._subgroups.values():
            if subgroup.group is not None and subgroup.group not in self._watcher.groups:
                self._watcher.groups.append(subgroup.group)
            subgroup._watcher = self._watcher  # noqa: SLF001 - same class

    def confirmation(
        self,
        state: str = "",
        others: Sequence[ProcessGroupScheduler] = (),
        *,
        raises: bool = False,
    ) -> Pattern[tuple[bool, bool]]:
        """Return whether all ranks have reached the end of the same step of the same exchange, in the same state.

        The second answer is whether any rank ``raises`` a flag. The answers are the same on all ranks.

        Args:
            state: A text that must be equal on all ranks: it says which parameters are not frozen, and the options of
                the optimizer.
            others: Schedulers in the same group that have exchanged other vectors of this step.
            raises: A flag of this rank, which may differ between ranks.

        Raises:
            ProtocolMismatchError: A GPU has received a wrong header. All ranks raise it.
        """
        assert self._stamp is not None
        state += "".join(f" {other.step} {other._stamp}" for other in others)  # noqa: SLF001 - same class
        signature = (self.step << 32) + (self._stamp ^ wire.stamp(state))
        # Each word is filled by a kernel, because the host would wait for a GPU to copy them.
        words = [torch.full((1,), each, dtype=torch.int64, device=self.device) for each in (signature, int(raises))]
        words += take_suspects((self, *others))
        total, raised, *suspects = (yield AllReduce("confirm", torch.cat(words))).tolist()
        if any(suspects):
            raise self.suspicion()
        return bool(total == signature * self.world_size), bool(raised)

    @property
    def last_step(self) -> str:
        """Number and method of the last step, for messages."""
        return f"step {self.step} of {self._method}"

    def suspicion(self) -> ProtocolMismatchError:
        """Return the error for wrong headers that a GPU has received."""
        return ProtocolMismatchError(
            f"step {self.step} of {self._method}: a rank has received a message of another step, phase, method or "
            "length, or a corrupt one: run the same steps with the same settings on all ranks"
        )

    def run(self, pattern: Pattern[Result], *, new_step: bool = True) -> Result:
        """Run ``pattern`` to its end and return its result. See :meth:`running`."""
        (result,) = run_together([self.running(pattern, new_step=new_step)])
        return result

    def running(self, pattern: Pattern[Result], *, new_step: bool = True) -> Running[Result]:
        """Return a generator that runs ``pattern`` to its end, for :func:`run_together`.

        It yields the tensors that the pattern reads on the host, and returns the result of the pattern. The pattern
        starts a new step, or belongs to the previous step if ``new_step`` is False. It is always closed.

        Raises:
            PeerLostError: A rank is lost.
            ExchangeTimeoutError: A rank did not answer within the time-out.
            ProtocolMismatchError: A message does not fit the round.
            ExchangeError: The pattern raised an exception on some rank, or the backend another error.
            NonFiniteError: The pattern raised it, on all ranks.

        An interruption (:func:`~tritoncomm.scheduler.failure_report.is_interruption`) is raised as it is, and the other
        ranks raise :class:`ExchangeError`. The group is unusable after all of these except :class:`NonFiniteError`.
        """
        self.check()
        self.agree_on_exchange_id()
        self.meter = Meter()
        if new_step:
            self.step += 1
            self._number = 0
        reply: Any = None
        op: Op = _START
        try:
            with self._watcher or nullcontext():
                op = resume(pattern.send, None, self._global_ranks)
                while True:
                    try:
                        reply = (yield from self._read(op)) if isinstance(op, Read) else self._perform(op)
                    except NonFiniteError as error:  # from a subgroup: the pattern reports it to the other subgroups
                        op = resume(pattern.throw, error, self._global_ranks)
                    else:
                        op = resume(pattern.send, reply, self._global_ranks)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        except (NonFiniteError, GeneratorExit):  # raised on all ranks, or another run reports why this one is closed
            raise
        except BaseException as error:
            if self._failure is not None or self._is_nested:
                raise
            failure = self._failed(op, error)  # report it, so that no rank waits for this one
            if failure_report.is_interruption(error):
                raise
            raise failure from error
        finally:
            pattern.close()

    def _read(self, op: Read) -> Running[Any]:
        content = yield op.tensor
        if self._watcher is not None:
            self._watcher.check()
        return content

    def _perform(self, op: Op) -> Any:
        self._number += 1
        if self._watcher is not None:
            self._watcher.progress()
        span = Span(self.device)
        try:
            with record_function(op.phase):
                return self._reply_to(op)
        except (RuntimeError, ValueError) as error:
            if self._is_nested:
                self._failed_op = op
            if self._is_nested or failure_report.is_interruption(error):
                raise
            raise self._failed(op, error) from error
        finally:
            if not isinstance(op, InSubgroup):  # a subgroup has counted its own time
                self.meter.time(op.phase, span.end())

    def _reply_to(self, op: Op) -> Any:
        if isinstance(op, Round):
            return self._messages.wait(self._post(op))
        if isinstance(op, Post):
            return self._post(op.round)
        if isinstance(op, Wait):
            return self._messages.wait(op.ticket)
        if isinstance(op, InSubgroup):
            return self._run_in_subgroup(op)
        assert not isinstance(op, Read), "running() yields it"
        return self._collective(op)

    def _run_in_subgroup(self, op: InSubgroup) -> Any:
        group = self._subgroups[op.ranks]
        try:
            return group.run(op.pattern)
        finally:
            self.meter.add(group.meter)

    def _failed(self, op: Op, error: BaseException) -> ExchangeError | ProtocolMismatchError:
        """Report ``error`` in ``op`` to the other ranks, collect their reports, and return the error to raise."""
        if self._watcher is not None:
            error = self._watcher.fail(error)
        own, details = self._report(op, error)
        for subgroup in self._subgroups.values():
            failure_report.cut_connections(subgroup.group, subgroup.rank, subgroup._global_ranks)  # noqa: SLF001 - same class
        report = _collected(self.group, own, watcher.RELEASE_SECONDS if self._watcher is not None else 0.0)
        advice = watcher.advice() if self._watcher is not None else ""
        raised = report.error(self.rank, self._global_ranks, own.where + details, error, advice)
        self._failure = raised
        return raised

    def _report(self, op: Op, error: BaseException) -> tuple[failure_report.RankReport, str]:
        """Return the report of this rank about ``error`` in ``op``, and what its own error says in addition."""
        where = f"step {self.step}, round {self._number}, phase {op.phase!r} of {self._method}"
        at, waiting, details = [self.step, self._number], self._messages.waiting, self._peers_text(op)
        peers = _peers(op)
        ranks = op.ranks if isinstance(op, InSubgroup) else ()
        subgroup = next((each for members, each in self._subgroups.items() if members == ranks), None)
        inner = subgroup._failed_op if subgroup is not None else None  # noqa: SLF001 - same class
        if subgroup is not None and inner is not None:
            among = [self._global_ranks[rank] for rank in ranks]
            details = f", in round {subgroup._number}, phase {inner.phase!r} among ranks {among}"  # noqa: SLF001
            numbers = dict(enumerate(ranks))  # a pattern may name a peer that is not in the subgroup
            peers = [numbers[peer] for peer in _peers(inner) if peer in numbers]
            waiting = [numbers[peer] for peer in subgroup._messages.waiting if peer in numbers]  # noqa: SLF001
            at.append(subgroup._number)  # noqa: SLF001
        kind, others = failure_report.kind_of(error), failure_report.others_at_fault(error)
        at_fault = [self._global_ranks.index(rank) for rank in others if rank in self._global_ranks]
        text = failure_report.text_of(error)
        return failure_report.RankReport(kind, where, text, peers, waiting, at, at_fault), details

    def _peers_text(self, op: Op) -> str:
        if not isinstance(op, Round | Post):
            return ""
        to, source = (
            [rank for number, rank in enumerate(self._global_ranks) if number in peers]
            for peers in (round_of(op).sends, round_of(op).receives)
        )
        return f" (sends to ranks {to}, expects from ranks {source})"

    def _post(self, round_: Round) -> Ticket:
        ticket = self._messages.post(round_, self._frame(round_.phase))
        sent = cost.messages_of([payload.numel() for payload in round_.sends.values()])
        self.meter.count(round_.phase, sent, cost.messages_of(list(round_.receives.values())))
        return ticket

    def _collective(self, op: Collective) -> torch.Tensor:
        result = group_collectives.perform(op, self._messages, self._frame(op.phase))
        traffic = group_collectives.traffic(op, self.world_size)
        self.meter.count(op.phase, traffic, traffic)
        return result

    def _frame(self, phase: str) -> wire.Frame:
        assert self._stamp is not None
        return wire.Frame(self.step, self._number, phase, self._stamp)


def take_suspects(schedulers: Iterable[ProcessGroupScheduler]) -> list[torch.Tensor]:
    """Return the number of wrong words in headers since the last call (int64 ``[1]``), in subgroups too.

    There is one number for all ``schedulers`` on a GPU, and none on a CPU, where headers are checked when they arrive.
    """
    whole = [each for scheduler in schedulers for each in (scheduler, *scheduler._subgroups.values())]  # noqa: SLF001
    messages = [each._messages for each in whole if not each._messages.checks_on_arrival]  # noqa: SLF001 - same module
    if not messages:
        return []
    suspects = [each.suspect for each in messages]
    for each in messages:
        each.suspect = torch.zeros_like(each.suspect)
    return [torch.stack(suspects).sum(0).long()]


def _peers(op: Op) -> list[int]:
    """Return the peers of the point-to-point messages of ``op``, or an empty list."""
    round_ = round_of(op)
    return sorted({*round_.sends, *round_.receives})


def _subgroup(
    group: dist.ProcessGroup | None, members: tuple[int, ...], timeout: timedelta | None, callers: Sequence[int]
) -> dist.ProcessGroup | None:
    """Return the group of the global ranks ``members``. It is created once for all exchanges in ``group``.

    See :func:`~tritoncomm.scheduler.new_group.new_group`.
    """
    parent, subgroup = _subgroups.get((id(group), members), (None, None))
    if parent is not group or subgroup is None:
        subgroup = new_group(members, timeout, callers)
        _subgroups[id(group), members] = group, subgroup
    return subgroup


def _name(group: dist.ProcessGroup | None) -> str:
    """Return the name of ``group``, which is the same on all its ranks."""
    return str(getattr(group or dist.group.WORLD, "group_name", ""))
