"""Run a pattern on ``torch.distributed``: batched point-to-point messages and a few collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tritoncomm.errors import ConfigurationError, ExchangeError, NonFiniteError, ProtocolMismatchError
from tritoncomm.scheduler import failure_report, group_collectives, watcher, wire
from tritoncomm.scheduler.failure_report import IsInterruption
from tritoncomm.scheduler.messages import Messages
from tritoncomm.scheduler.meter import Meter
from tritoncomm.scheduler.new_group import needs_all_ranks, new_group
from tritoncomm.scheduler.ranks import global_ranks, members, name_of, own_rank, rank_text
from tritoncomm.scheduler.rounds import (
    OPERATIONS,
    AllGather,
    InSubgroup,
    Op,
    Pattern,
    Post,
    Read,
    Result,
    Round,
    Ticket,
    Wait,
    no_operation,
    round_of,
    traffic,
)
from tritoncomm.scheduler.span import Span
from tritoncomm.scheduler.together import Running, run_together

# The highest exchange id in each group, by the group's name; and the subgroups, by id of the group and members.
_exchange_ids: Counter[str] = Counter()
_subgroups: dict[tuple[int, tuple[int, ...]], tuple[Any, dist.ProcessGroup | None]] = {}
# Stands for the operation in error messages before the first operation of an exchange.
_START = Round("start", {}, {})


def is_distributed() -> bool:
    """Return True if the default process group is initialized."""
    return dist.is_available() and dist.is_initialized()


@contextmanager
def reporting(
    group: dist.ProcessGroup | None,
    device: torch.device | None,
    where: str,
    is_interruption: IsInterruption = failure_report.ends_program,
) -> Iterator[None]:
    """Let the other ranks of ``group`` know if the body, in which ranks wait for each other, fails on this one.

    ``where`` says what the body does. An interruption leaves it as it is. On a GPU, ``device``, the wait for a lost
    rank ends after the time-out of ``group``.

    Raises:
        ExchangeError: A rank was lost, was interrupted, or did not take part. The group is unusable afterwards.
    """
    guard = watcher.of(group, device, None, is_interruption)
    try:
        with guard or nullcontext():
            yield
    except BaseException as error:
        stops = is_interruption(error)
        if not stops and not isinstance(error, RuntimeError):
            raise
        found = report_failure(group, device, where, error, is_interruption, guard)
        if stops:
            raise
        raise found from error


def report_failure(
    group: dist.ProcessGroup | None,
    device: torch.device | None,
    where: str,
    error: BaseException,
    is_interruption: IsInterruption = failure_report.ends_program,
    guard: watcher.Watcher | None = None,
) -> Exception:
    """Report ``error``, outside of an exchange, to the ranks of ``group``, which may wait for this one on ``device``.

    Return what this rank raises if ``error`` is no interruption. ``where`` says what has failed. ``guard`` has watched
    it, if anything has.
    """
    if failure_report.is_broken(group):
        return ExchangeError(f"{where} failed, because an exchange in this process group has failed before: {error}")
    guard = guard or watcher.of(group, device)
    if guard is not None:
        error = guard.fail(error)
    peers = [other for other in global_ranks(group) if other != own_rank()]
    own = failure_report.report_of(error, where, peers, is_interruption=is_interruption)
    return _error(group, own, where, error, guard)


def _error(
    group: dist.ProcessGroup | None,
    own: failure_report.RankReport,
    where: str,
    error: BaseException,
    guard: watcher.Watcher | None,
) -> ExchangeError | ProtocolMismatchError:
    """Exchange the report ``own`` with the other ranks of ``group``, and return the error that this rank raises."""
    report = failure_report.collect(group, own, watcher.RELEASE_SECONDS if guard is not None else 0.0)
    return report.error(dist.get_world_size(group), where, error, watcher.advice() if guard is not None else "")


class _Place(NamedTuple):
    """Where a rank is in an operation: the group, the round, the phase, and with whom it exchanges messages.

    ``waiting`` are the peers whose messages had not arrived. Ranks have their global numbers.
    """

    ranks: list[int]
    number: int
    phase: str
    to: list[int]
    source: list[int]
    waiting: list[int]


class ProcessGroupScheduler:
    """Runs patterns on one rank of the process group ``group``. ``None`` is the default process group.

    Args:
        group: The process group.
        timeout: Limit of each wait. None means the time-out of the process group.
        device: The device on which messages are received, the one of the exchanged vector.
        stamp: A text that identifies the exchange. It starts with the name of the method, and every message carries a
            hash of it.
        subgroups: The ranks of each subgroup that a pattern may use.
        is_interruption: Tells which exceptions are raised as they are, because they do not belong to the exchange.
        parent: The scheduler of which ``group`` is a subgroup. It reports failures, and numbers the exchange.

    Attributes:
        ranks: The global ranks of the group, in its order.
        meter: The traffic and the waiting time of the last pattern.
        step: The number of exchanges that have started.
        stamp: Hash of the text and of the id that :meth:`agree_on_exchange_id` finds. None before.
        watcher: What watches the exchanges on a GPU, in subgroups too. None on a CPU, and in a group of one rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        device: torch.device | str = "cpu",
        stamp: str = "",
        subgroups: Sequence[tuple[int, ...]] = (),
        *,
        is_interruption: IsInterruption = failure_report.ends_program,
        parent: ProcessGroupScheduler | None = None,
    ) -> None:
        self.group = group
        self.device = torch.device(device)
        self.timeout = timeout
        self.rank = dist.get_rank(group)
        self.ranks = global_ranks(group)
        self.world_size = len(self.ranks)
        self.meter = Meter()
        self.step = 0
        self.stamp: int | None = None
        self._number = 0  # number of the operation within the step, called round in messages
        self._method = stamp.split(" ", 1)[0] or "unnamed"
        self._stamp_text = stamp
        self._failure: ExchangeError | ProtocolMismatchError | None = None
        self._messages = Messages(group, self.device, timeout)
        self._is_interruption = is_interruption
        self._parent = parent
        self._inside: _Place | None = None  # where the scheduler of a subgroup has failed
        self.watcher: watcher.Watcher | None = (
            watcher.of(group, self.device, timeout, is_interruption) if parent is None else parent.watcher
        )
        self._subgroups: dict[tuple[int, ...], ProcessGroupScheduler] = {}
        for ranks in subgroups:
            members = tuple(self.ranks[r] for r in ranks)
            if list(ranks) != sorted(set(ranks)):  # torch sorts the ranks of a group, and messages would go astray
                raise ConfigurationError(
                    f"subgroup of {rank_text(*members)} in {stamp!r}: list its ranks once, in ascending order"
                )
            if self.rank in ranks or needs_all_ranks():
                limit = timeout or watcher.timeout_of(group, self.device)  # and not torch's default
                subgroup = _subgroup(group or dist.group.WORLD, members, limit, self.ranks)
            if self.rank in ranks:
                text = f"{stamp} among {ranks}"
                self._subgroups[ranks] = ProcessGroupScheduler(subgroup, timeout, device, text, parent=self)
                if self.watcher is not None and subgroup is not None:
                    self.watcher.groups.append(subgroup)

    def check(self) -> None:
        """Raise the error of an earlier failed exchange, if any. Every further exchange in the group would fail too."""
        if self._failure is not None:
            raise self._failure

    def fail(self, error: BaseException) -> Exception | None:
        """Report to the other ranks, which may wait for this rank, that it failed outside of an exchange.

        Return what every further exchange in the group raises. None if there are no other ranks, or another exchange in
        the group has reported a failure.
        """
        if self._failure is None and self.world_size > 1 and not failure_report.is_broken(self.group):
            self._failed(_START, error)
        return self._failure

    def agree_on_exchange_id(self) -> None:
        """Agree with all ranks on an id that distinguishes this exchange from identically configured ones in the group.

        All ranks must call this together. Without this call, the first :meth:`run` does it. The constructor does not
        count the id: it may have failed on some ranks only, or one rank may have made a copy.
        """
        if self.stamp is None:
            self.stamp = 0
            number = self.run(self._next_exchange_id(), new_step=False)
            _exchange_ids[name_of(self.group)] = number
            self.set_exchange_id(number)

    def _next_exchange_id(self) -> Pattern[int]:
        highest = torch.tensor([_exchange_ids[name_of(self.group)]], dtype=torch.int32, device=self.device)
        gathered = yield AllGather("set-up", highest)
        return int(gathered.max()) + 1

    def set_exchange_id(self, number: int) -> None:
        """Take ``number`` as the id of this exchange, also in subgroups. All ranks of the group must take the same."""
        self.stamp = wire.stamp(f"{self._stamp_text} {number}")
        for subgroup in self._subgroups.values():
            subgroup.set_exchange_id(number)

    def run_beside(self, other: ProcessGroupScheduler) -> None:
        """Prepare for :func:`run_together` with ``other``, which has the same group and time-out.

        Both then have one watcher. The progress of one is that of the other, and each knows why communicators were
        aborted.
        """
        if self.watcher is not None and other.watcher is not None and self.watcher is not other.watcher:
            other.watcher.groups += [group for group in self.watcher.groups if group not in other.watcher.groups]
            for each in (self, *self._subgroups.values()):
                each.watcher = other.watcher

    def take_suspects(self) -> Iterator[torch.Tensor]:
        """Yield the numbers of wrong words in headers since the last call, of this group and its subgroups."""
        if not self._messages.checks_on_arrival:
            yield self._messages.take_suspect()
        for subgroup in self._subgroups.values():
            yield from subgroup.take_suspects()

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

        An interruption is raised as it is, and the other ranks raise :class:`ExchangeError`. The group is unusable
        after all of these except :class:`NonFiniteError`.
        """
        self.check()
        self.agree_on_exchange_id()
        self.meter = Meter()
        if new_step:
            self.step += 1
            self._number = 0
        op: Op = _START
        before = members.get()
        members.set(self.ranks)
        try:
            with self.watcher or nullcontext():
                op = pattern.send(None)
                while True:
                    try:
                        reply = (yield from self._read(op)) if type(op) is Read else self._perform(op)
                    except NonFiniteError as error:  # from a subgroup: the pattern reports it to the other subgroups
                        op = pattern.throw(error)
                    else:
                        op = pattern.send(reply)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        except (NonFiniteError, GeneratorExit):  # raised on all ranks, or another run reports why this one is closed
            raise
        except BaseException as error:
            if self._failure is not None or self._parent is not None:
                raise
            failure = self._failed(op, error)  # report it, so that no rank waits for this one
            if self._is_interruption(error):
                raise
            raise failure from error
        finally:
            pattern.close()
            members.set(before)

    def _read(self, op: Read) -> Running[Any]:
        members.set(None)  # another run may begin or end in the meantime
        content = yield op.tensor
        members.set(self.ranks)
        if self.watcher is not None:
            self.watcher.check()
        return content

    def _perform(self, op: Op) -> Any:
        self._number += 1
        if self.watcher is not None:
            self.watcher.progress()
        if op.__class__ not in OPERATIONS:
            raise no_operation(op)
        span = Span(self.device, op.phase)
        try:
            return self._reply_to(op)
        except (RuntimeError, ValueError) as error:
            if self._parent is not None:
                self._parent.note_place(self._place(op))
                raise
            if self._is_interruption(error):
                raise
            raise self._failed(op, error) from error
        finally:
            span.end()
            if type(op) is not InSubgroup:  # a subgroup has counted its own time
                self.meter.time(op.phase, span)

    def _reply_to(self, op: Op) -> Any:
        match op:
            case Round():
                return self._messages.wait(self._post(op))
            case Post():
                return Ticket(op.phase, self._post(op.round))
            case Wait():
                return self._messages.wait(op.ticket.token)
            case InSubgroup():
                return self._run_in_subgroup(op)
            case Read():
                raise AssertionError("running() yields it")
        result = group_collectives.perform(op, self._messages, self._frame(op.phase))
        self.meter.count(op.phase, *traffic(op, self.world_size))
        return result

    def _run_in_subgroup(self, op: InSubgroup) -> Any:
        group = self._subgroups.get(op.ranks)
        if group is None:
            raise ConfigurationError(
                f"the pattern runs in {op.ranks}, and subgroups() of its recipe returns {[*self._subgroups]} for this "
                "rank: return all that its patterns use"
            )
        try:
            return group.run(op.pattern)
        finally:
            self.meter.add(group.meter)

    def note_place(self, place: _Place) -> None:
        """Note where a scheduler whose parent this is has failed, for the report."""
        self._inside = place

    def _place(self, op: Op) -> _Place:
        """Return where this rank is in ``op``."""
        sends, receives = round_of(op).sends, round_of(op).receives
        # A pattern may name a peer that is not in the group.
        to, source = (
            [self.ranks[peer] for peer in range(self.world_size) if peer in each] for each in (sends, receives)
        )
        return _Place(self.ranks, self._number, op.phase, to, source, self._messages.waiting)

    def _failed(self, op: Op, error: BaseException) -> ExchangeError | ProtocolMismatchError:
        """Report ``error`` in ``op`` to the other ranks, collect their reports, and return the error to raise."""
        if op.__class__ not in OPERATIONS:
            op = _START
        if self.watcher is not None:
            error = self.watcher.fail(error)
        place, at, details = self._place(op), [self.step, self._number], ""
        where = f"step {self.step}, round {self._number}, phase {op.phase!r} of {self._method}"
        if isinstance(op, Round | Post):
            details = f" (sends to {rank_text(*place.to)}, expects from {rank_text(*place.source)})"
        if isinstance(op, InSubgroup) and self._inside is not None:
            place = self._inside
            at.append(place.number)
            details = f", in round {place.number}, phase {place.phase!r} among {rank_text(*place.ranks)}"
        peers = sorted({*place.to, *place.source})
        own = failure_report.report_of(error, where, peers, place.waiting, at, is_interruption=self._is_interruption)
        for subgroup in self._subgroups.values():
            failure_report.cut_connections(subgroup.group)
        self._failure = _error(self.group, own, where + details, error, self.watcher)
        return self._failure

    def _post(self, round_: Round) -> Any:
        token = self._messages.post(round_.sends, round_.receives, self._frame(round_.phase))
        self.meter.count(round_.phase, *traffic(round_, self.world_size))
        return token

    def _frame(self, phase: str) -> wire.Frame:
        assert self.stamp is not None
        return wire.Frame(self.step, self._number, phase, self.stamp)


def take_suspects(schedulers: Iterable[ProcessGroupScheduler]) -> list[torch.Tensor]:
    """Return the number of wrong words in headers since the last call (int64 ``[1]``), in subgroups too.

    There is one number for all ``schedulers`` on a GPU, and none on a CPU, where headers are checked when they arrive.
    """
    suspects = [suspect for scheduler in schedulers for suspect in scheduler.take_suspects()]
    return [torch.stack(suspects).sum(0).long()] if suspects else []


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
