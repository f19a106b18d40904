"""Runs a pattern on ``torch.distributed``: batched point-to-point messages and a few collectives."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from tritoncomm.errors import (
    ExchangeError,
    ExchangeTimeoutError,
    NonFiniteError,
    PeerLostError,
    ProtocolMismatchError,
)
from tritoncomm.scheduler import cost, failure_report, tracing, wire
from tritoncomm.scheduler.meter import Meter
from tritoncomm.scheduler.rounds import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Inbox,
    InSubgroup,
    Op,
    Pattern,
    Post,
    Result,
    Round,
    Ticket,
    Wait,
)

# Tags of the beginnings of messages, and as many for the rests of long ones.
_TAGS = 1 << 30
# Words of a message that are sent with its header; the rest of a longer one is a transfer of its own.
_BEGINNING = 1 << 12
# The highest number of an exchange in a group, by its name, and the groups that were made within groups.
_exchange_ids: Counter[str] = Counter()
_subgroups: dict[tuple[int, tuple[int, ...]], tuple[Any, dist.ProcessGroup | None]] = {}
# Where an exchange is before its first word.
_START = Round("start", {}, {})


def is_distributed() -> bool:
    """True when there is a default process group."""
    return dist.is_available() and dist.is_initialized()


class ProcessGroupScheduler:
    """One rank's end of the exchange. ``group=None`` is the default process group.

    ``device`` is where messages are received: the device of the vector that is exchanged.
    ``timeout`` limits each wait; None leaves it to the process group's own time-out. ``stamp`` says whose exchange
    it is, method first; every message carries it. ``meter`` holds
    the traffic and waiting time of the last pattern that was run.
    """

    # Held until the next one of this process begins. Made in a backward pass it keeps a Python object, and a thread of
    # gloo that lets go of it last, when the interpreter is ending, ends the process with SIGABRT.
    _last_collective: ClassVar[Any] = None

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
        self.step = 0  # exchanges begun
        self._number = 0  # of the word within the exchange
        self._method = stamp.split(" ", 1)[0] or "unnamed"
        self._owner = stamp
        self._stamp: int | None = None
        self._failure: ExchangeError | ProtocolMismatchError | None = None
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._global_ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._subgroups: dict[tuple[int, ...], ProcessGroupScheduler] = {}
        for ranks in subgroups:
            if self.rank in ranks:
                within = _subgroup(group or dist.group.WORLD, tuple(self._global_ranks[r] for r in ranks), timeout)
                self._subgroups[ranks] = ProcessGroupScheduler(within, timeout, device, f"{stamp} among {ranks}")

    def check(self) -> None:
        """Raise what this group has failed with, if it has: every exchange in it would fail."""
        if self._failure is not None:
            raise self._failure

    def fail(self, error: Exception) -> None:
        """Let the ranks of this group know, who may wait for this one, that it has failed elsewhere."""
        if self._failure is None:
            self._failed(_START, error)

    def agree_on_exchange_id(self) -> None:
        """Agree on a number that tells this exchange from others like it in the group; all ranks call this alike.

        Without it the first :meth:`run` does so. It is not counted when an exchange is made, as an attempt may have
        been refused on some ranks only, or a copy been made on one.
        """
        if self._stamp is None:
            self._stamp = 0
            self._adopt(self.run(self._next_exchange_id(), new_step=False))

    def _next_exchange_id(self) -> Pattern[int]:
        highest = torch.tensor([_exchange_ids[_name(self.group)]], dtype=torch.int32, device=self.device)
        everybody = yield AllGather("set-up", highest)
        return int(everybody.max()) + 1

    def _adopt(self, number: int) -> None:
        _exchange_ids[_name(self.group)] = number
        self._stamp = wire.stamp(f"{self._owner} {number}")
        for within in self._subgroups.values():
            within._adopt(number)  # noqa: SLF001 - of the same class

    def confirmation(self, trained: str = "") -> Pattern[None]:
        """Every rank has come to the end of the same step of the same exchange, and trains the same (``trained``)."""
        assert self._stamp is not None
        sign = (self.step << 32) + (self._stamp ^ wire.stamp(trained))
        total = yield AllReduce("confirm", torch.tensor([sign], dtype=torch.int64, device=self.device))
        if int(total) != sign * self.world_size:
            raise ProtocolMismatchError(
                f"rank {self.rank} is at the end of step {self.step} of {self._method}, another rank of another step "
                "or exchange, or with other parameters frozen: step optimizers in the same order on all ranks, "
                "and freeze alike"
            )

    def run(self, pattern: Pattern[Result], *, new_step: bool = True) -> Result:
        """Run ``pattern`` to its end and return its result; without a ``new_step`` it belongs to the one before.

        Raises :class:`PeerLostError` or :class:`ExchangeTimeoutError` when the network fails,
        :class:`ProtocolMismatchError` when a message belongs elsewhere, and whatever the pattern raises; the pattern
        is closed then. After the first three the group is of no more use.
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
            op = pattern.send(None)
            while True:
                try:
                    reply = self._perform(op)
                except NonFiniteError as error:  # of a group within this one, whose business it is not alone
                    op = pattern.throw(error)
                else:
                    op = pattern.send(reply)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        except NonFiniteError:  # on all ranks
            raise
        except Exception as error:
            if self._failure is not None:
                raise
            raise self._failed(op, error) from error  # the others must not wait for what the method made of it
        finally:
            pattern.close()

    def _perform(self, op: Op) -> Any:
        self._number += 1
        started = time.perf_counter()
        try:
            if isinstance(op, Round):
                return self._wait(self._post(op))
            if isinstance(op, Post):
                return self._post(op.round)
            if isinstance(op, Wait):
                return self._wait(op.ticket)
            if isinstance(op, InSubgroup):
                return self._run_in_subgroup(op)
            return self._collective(op)
        except (RuntimeError, ValueError) as error:
            raise self._failed(op, error) from error
        finally:
            if not isinstance(op, InSubgroup):  # which has counted by itself
                seconds = time.perf_counter() - started
                self.meter.wait(op.phase, seconds)
                self._trace(op, seconds)

    def _trace(self, op: Op, seconds: float) -> None:
        tracer = tracing.current()
        if tracer is None:
            return
        started = tracing.now() - seconds
        details = {"step": self.step, "round": self._number, "method": self._method, "kind": type(op).__name__}
        tracer.phase(dist.get_rank(), op.phase, started, seconds, details)
        round_ = op if isinstance(op, Round) else op.round if isinstance(op, Post) else None
        for sent, messages in ((True, round_.sends), (False, round_.receives)) if round_ is not None else ():
            for peer, content in messages.items():
                words = content.numel() if isinstance(content, torch.Tensor) else content
                size = cost.message(words).bytes
                tracer.message(dist.get_rank(), self._global_ranks[peer], op.phase, started, size, sent=sent)

    def _run_in_subgroup(self, op: InSubgroup) -> Any:
        group = self._subgroups[op.ranks]
        try:
            return group.run(op.pattern)
        finally:
            self.meter.add(group.meter)

    def _failed(self, op: Op, error: Exception) -> ExchangeError | ProtocolMismatchError:
        """What ``error`` was, once all ranks that are left have said what they saw."""
        where = f"step {self.step}, round {self._number}, phase {op.phase!r} of {self._method}"
        mismatch = isinstance(error, ProtocolMismatchError)
        kind = "protocol" if mismatch else "lost" if isinstance(error, PeerLostError) else failure_report.kind_of(error)
        own = failure_report.RankReport(kind, where, str(error), _peers(op))
        for within in self._subgroups.values():
            failure_report.cut_connections(within.group, within.rank, within._global_ranks)  # noqa: SLF001 - our own
        # Not by step or method, which may be what differs: a group fails only once.
        report = failure_report.collect(self.group, self.rank, self._global_ranks, _name(self.group), own)
        others = report.described(self.rank)
        message = f"rank {dist.get_rank()}, {where}{_described(op)}: "
        broken = {rank: r.text for rank, r in report.reports.items() if r.kind == "protocol"}
        failing = {rank: r.text for rank, r in report.reports.items() if r.kind == "error"}
        found: ExchangeError | ProtocolMismatchError
        if broken and not report.gone:
            found = ProtocolMismatchError(message + "; ".join(broken.values()) + (others and f" ({others})"))
        elif failing and not report.gone:
            named = "; ".join(f"rank {self._global_ranks[rank]}: {text}" for rank, text in failing.items())
            found = ExchangeError(message + named, [self._global_ranks[rank] for rank in failing])
        else:
            culprits = [self._global_ranks[rank] for rank in report.missing]
            who = f"rank{'s' * (len(culprits) > 1)} {', '.join(map(str, culprits)) or 'unknown'}"
            if report.timed_out:
                late = (
                    "the others did not wait longer for this rank" if self.rank in culprits else f"no answer from {who}"
                )
                found = ExchangeTimeoutError(f"{message}{late}; {others or error}", culprits)
            else:
                found = PeerLostError(f"{message}lost {who}; {others or error}", culprits)
        self._failure = found
        return found

    def _post(self, round_: Round) -> Ticket:
        assert self._stamp is not None
        frame = wire.Frame(self.step, self._number, round_.phase, self._stamp)
        buffers: dict[int, torch.Tensor] = {}
        sends: list[torch.Tensor] = []
        operations: list[dist.P2POp] = []
        for peer, words in round_.receives.items():
            # gloo ends the process when more arrives than there is room for, and takes less without a word: there is
            # always room for the beginning, whose header tells, and the rest comes only to who expects that much.
            room = max(words, _BEGINNING) if self._guarded else words
            buffers[peer] = torch.empty(room + cost.HEADER_WORDS, dtype=torch.int32, device=self.device)
            operations += self._operations(dist.irecv, buffers[peer], words, peer, self._received)
        for peer, payload in round_.sends.items():
            sends.append(wire.framed(payload, frame))
            operations += self._operations(dist.isend, sends[-1], payload.numel(), peer, self._sent)
        works = dist.batch_isend_irecv(operations) if operations else []
        self._count(round_)
        # The framed sends must live until the wait: the backend reads them in the background.
        return Ticket(round_.phase, (frame, works, buffers, dict(round_.receives), sends))

    def _operations(
        self, kind: Callable[..., Any], buffer: torch.Tensor, words: int, peer: int, counter: Counter[int]
    ) -> list[dist.P2POp]:
        """One message, or its beginning and its rest. Both ends count the messages between them, and these are tags.

        So a beginning meets the message that comes next, whatever it is, and a rest only one of its own length.
        """
        counter[peer] += 1
        beginning = cost.HEADER_WORDS + _BEGINNING
        tag = counter[peer] % _TAGS
        if not self._guarded or words <= _BEGINNING:
            return [dist.P2POp(kind, buffer, self._global_ranks[peer], self.group, tag)]
        rest = _TAGS + wire.stamp(f"{tag}/{words}") % (_TAGS - 1)
        return [
            dist.P2POp(kind, buffer[:beginning], self._global_ranks[peer], self.group, tag),
            dist.P2POp(kind, buffer[beginning:], self._global_ranks[peer], self.group, rest),
        ]

    def _wait(self, ticket: Ticket) -> Inbox:
        frame, works, buffers, words, _ = ticket.token
        waiting = list(works)  # each is waited for once: gloo counts
        totals: dict[int, int] = {}
        if self._guarded:  # beginnings first: the rest of a message that is too long or too short never comes
            at = 0
            for peer, buffer in buffers.items():
                self._finish(waiting.pop(at))
                with self._from(peer):
                    totals[peer] = wire.check_frame(buffer[: cost.HEADER_WORDS], frame, words[peer])
                at += words[peer] > _BEGINNING
        for work in waiting:
            self._finish(work)
        inbox: Inbox = {}
        for peer, buffer in buffers.items():
            inbox[peer] = buffer[cost.HEADER_WORDS : cost.HEADER_WORDS + words[peer]]
            with self._from(peer):
                if peer not in totals:
                    totals[peer] = wire.check_frame(buffer[: cost.HEADER_WORDS], frame, words[peer])
                wire.check_payload(inbox[peer], totals[peer])
        return inbox

    @contextmanager
    def _from(self, peer: int) -> Iterator[None]:
        """Say between which ranks a message does not fit."""
        try:
            yield
        except ProtocolMismatchError as error:
            raise ProtocolMismatchError(f"rank {self.rank} from rank {peer}: {error}") from error

    @property
    def _guarded(self) -> bool:
        """True where a message may be shorter than the room for it: not so on NCCL."""
        return self.device.type == "cpu"

    def _collective(self, op: Collective) -> torch.Tensor:
        tensor = op.tensor.contiguous()
        size, itemsize = tensor.numel(), tensor.element_size()
        if isinstance(op, AllReduce):
            result = tensor.clone()
            work = dist.all_reduce(result, group=self.group, async_op=True)
            traffic = cost.all_reduce(size, itemsize, self.world_size)
        elif isinstance(op, AllToAll):
            result = torch.empty_like(tensor)
            work = dist.all_to_all_single(result, tensor, group=self.group, async_op=True)
            traffic = cost.all_to_all(1, itemsize, self.world_size)
        else:
            assert isinstance(op, AllGather)
            result = tensor.new_empty(self.world_size, size)
            work = dist.all_gather(list(result), tensor, group=self.group, async_op=True)
            traffic = cost.all_gather(size, itemsize, self.world_size)
        ProcessGroupScheduler._last_collective = work  # before it may fail: who fails is likely to end next
        self._finish(work)
        self.meter.count(op.phase, traffic, traffic)
        return result

    def _finish(self, work: Any) -> None:
        if self.timeout is None:
            work.wait()
        else:
            work.wait(self.timeout)

    def _count(self, round_: Round) -> None:
        sent = [cost.message(payload.numel()) for payload in round_.sends.values()]
        received = [cost.message(words) for words in round_.receives.values()]
        self.meter.count(round_.phase, cost.total(sent), cost.total(received))


def _peers(op: Op) -> list[int]:
    """Whom ``op`` deals with; nobody in particular for a collective."""
    round_ = op if isinstance(op, Round) else op.round if isinstance(op, Post) else None
    return sorted({*round_.sends, *round_.receives}) if round_ is not None else []


def _described(op: Op) -> str:
    round_ = op if isinstance(op, Round) else op.round if isinstance(op, Post) else None
    if round_ is None:
        return ""
    return f" (sends to {sorted(round_.sends)}, expects from {sorted(round_.receives)})"


def _subgroup(
    group: dist.ProcessGroup | None, members: tuple[int, ...], timeout: timedelta | None
) -> dist.ProcessGroup | None:
    """A group of ``members``, made once for all exchanges in ``group``."""
    made, within = _subgroups.get((id(group), members), (None, None))
    if made is not group or within is None:
        within = dist.new_group(list(members), timeout=timeout, use_local_synchronization=True)
        _subgroups[id(group), members] = group, within
    return within


def _name(group: dist.ProcessGroup | None) -> str:
    """A name of ``group`` that all its ranks have in common."""
    return str(getattr(group or dist.group.WORLD, "group_name", ""))
