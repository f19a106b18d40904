"""Point-to-point messages on ``torch.distributed``: a header with each, long ones in two parts, checked on arrival."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tritoncomm.errors import ProtocolMismatchError
from tritoncomm.scheduler import cost, failure_report, wire
from tritoncomm.scheduler.ranks import global_ranks, rank_text
from tritoncomm.scheduler.rounds import Inbox
from tritoncomm_kernels.devices import is_asynchronous

# Tags of the first parts of messages, and of the second parts of long ones. They are far from those that users choose.
_FIRST_TAGS, _SECOND_TAGS = 1 << 29, 1 << 30
# Payload words in the first part of a message, next to its header. A longer message has a second part with the rest.
_FIRST_PART_WORDS = 1 << 12
# Receives that gloo has for later messages of a peer. It sends a message when it has been told of the receive, which
# takes as long as the message itself. The one for the round after the next is posted with this round, and told before
# the messages of this round are there. With a single one, the next round may begin at the moment in which it is told.
_AHEAD = 2


# A posted receive of the first part of a message of a peer, whatever its length: its number, its buffer and its work.
_FirstPart = tuple[int, torch.Tensor, Any]


@dataclass
class _Mailbox:
    """What all exchanges in a process group share: messages sent to each peer, receives posted, those ahead.

    Both ends count alike, because all ranks perform the same rounds. Where one does not, the exchange fails, and the
    group is not used again.
    """

    sent: Counter[int] = field(default_factory=Counter)
    posted: Counter[int] = field(default_factory=Counter)
    ahead: defaultdict[int, deque[_FirstPart]] = field(default_factory=lambda: defaultdict(deque))


_mailboxes: WeakKeyDictionary[Any, _Mailbox] = WeakKeyDictionary()


@dataclass
class _Arrival:
    """A message to this rank: its first part, its payload if it is long, and what to wait for: for both, one by one."""

    words: int
    first: torch.Tensor
    payload: torch.Tensor | None
    first_work: Any | None
    rest_work: Any | None

    def whole(self) -> torch.Tensor:
        """Return the payload, which has arrived."""
        content = self.first[cost.HEADER_WORDS :]
        if self.payload is None:
            return content[: self.words]
        self.payload[:_FIRST_PART_WORDS] = content
        return self.payload


class Messages:
    """The messages of one rank in the process group ``group``. ``None`` is the default process group.

    On a CPU, the receive of a message is posted before its round begins. The peers of a group count their messages, so
    it matches the next one, whatever its length and whichever exchange sends it. The header says whether it is the
    expected one.

    Args:
        group: The process group.
        device: Device on which messages are received.
        timeout: Limit of each wait. None means the time-out of the process group.

    Attributes:
        rank: The number of this rank in the group.
        world_size: The number of ranks.
        checks_on_arrival: Whether messages are in host memory, and headers are checked when they arrive. On a GPU,
            wrong headers are counted on the device.
        suspect: Number of wrong words in the headers of messages that a GPU has received (int32 ``[1]``), since
            :meth:`take_suspect`.
        waiting: Global ranks of the peers whose messages had not arrived when a wait failed.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout: timedelta | None) -> None:
        self._given_group = group
        self._device = device
        # NCCL would poll. The watcher has the time-out.
        self._limit = () if timeout is None or is_asynchronous(device) else (timeout,)
        self.rank = dist.get_rank(group)
        self._global_ranks = global_ranks(group)
        self.world_size = len(self._global_ranks)
        self.checks_on_arrival = device.type == "cpu"
        self.suspect = torch.zeros(1, dtype=torch.int32, device=device)
        self.waiting: list[int] = []
        self._started: list[Any] = []  # the messages of the last round

    @cached_property
    def uses_gloo(self) -> bool:
        """Whether gloo carries the messages."""
        return self.checks_on_arrival and failure_report.uses_gloo(self._given_group)

    @property
    def group(self) -> Any:
        """The process group."""
        return self._given_group or dist.group.WORLD  # which is another one after another init_process_group()

    def post(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, int], frame: wire.Frame) -> Any:
        """Start to send and receive messages with the header ``frame``, and return what to :meth:`wait` for.

        ``sends`` and ``receives`` are those of a :class:`~tritoncomm.scheduler.rounds.Round`. A peer that does not
        exist raises :class:`~tritoncomm.ProtocolMismatchError`.
        """
        for peer in {**sends, **receives}:  # gloo would end the process, or wait for itself
            if not 0 <= peer < self.world_size or peer == self.rank:
                raise ProtocolMismatchError(
                    f"phase {frame.phase!r}: {rank_text(self._global_ranks[self.rank])} has a message to or from peer "
                    f"{peer}: peers are numbers below {self.world_size}, in the group of the exchange, and not its own"
                )
        if not self.checks_on_arrival:
            return frame, *self._post_on_device(sends, receives, frame)
        # These are the calls that isend() and irecv() make, without their time. gloo accepts messages that are shorter
        # than their buffers. It aborts the process when one is longer.
        self._started = []  # kept if one of them fails, because the backend may use the tensors of the others
        group = self.group
        box = _mailboxes.get(group) or _mailboxes.setdefault(group, _Mailbox())
        # A profiler wants to be told of the end of an operation, and must not be gone by then.
        is_watched = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # noqa: SLF001
        wanted = 1 + _AHEAD if self.uses_gloo and not is_watched else 1
        arrivals = {peer: self._receive(group, box, peer, words, wanted) for peer, words in receives.items()}
        works: list[tuple[int, Any]] = []
        framed: dict[int, torch.Tensor] = {}  # several peers may get the same payload
        for peer, payload in sends.items():
            key = id(payload)
            if key not in framed:
                framed[key] = wire.framed(payload, frame)
            works += self._send(group, box, peer, framed[key])
        # Messages are kept until the wait, because the backend reads them in the background.
        return frame, arrivals, works, framed

    def wait(self, token: Any) -> Inbox:
        """Wait for messages that were posted, and return what has arrived. ``token`` is what :meth:`post` returned.

        On a CPU, this waits for each work exactly once, as gloo counts the waits. First parts come first: the second
        part of a message of the wrong length never arrives.
        """
        if not self.checks_on_arrival:
            return self._wait_on_device(*token)
        frame, arrivals, sends, _ = token
        firsts, rests, totals, inbox = [], [], {}, {}
        for peer, arrival in arrivals.items():
            if arrival.first_work is not None:
                firsts.append((peer, arrival.first_work))
            if arrival.rest_work is not None:
                rests.append((peer, arrival.rest_work))
        left = [*firsts, *rests, *sends]
        try:
            for peer, arrival in arrivals.items():
                if arrival.first_work is not None:
                    self._wait_for_next(left)
                totals[peer] = wire.check_frame(arrival.first[: cost.HEADER_WORDS], frame, arrival.words)
            while left:
                self._wait_for_next(left)
            for peer, arrival in arrivals.items():
                inbox[peer] = arrival.whole()
                wire.check_payload(inbox[peer], totals[peer])
        except ProtocolMismatchError as error:
            raise self._from(peer, error) from error
        return inbox

    def _receive(self, group: Any, box: _Mailbox, peer: int, words: int, wanted: int) -> _Arrival:
        """Return the next message of ``peer``, with ``words`` words. Post ``wanted`` receives: also those that follow.

        A second part is received only by a rank that expects exactly its length: its tag depends on it.
        """
        ahead, is_here = box.ahead[peer], False
        for _ in range(len(ahead), wanted):
            buffer = torch.empty(cost.HEADER_WORDS + _FIRST_PART_WORDS, dtype=torch.int32, device=self._device)
            number = box.posted[peer] + 1
            try:
                work = group.recv([buffer], peer, _FIRST_TAGS + number % _FIRST_TAGS)
            except RuntimeError as error:  # the connection is closed, but this message may have arrived before
                is_here = failure_report.is_lost(error) and bool(ahead) and failure_report.has_arrived(ahead[0][2])
                if not is_here:
                    raise
                break
            box.posted[peer] = number
            ahead.append((number, buffer, work))
        self._started.append(ahead[0])
        number, first, work = ahead.popleft()
        payload, rest_work = None, None
        if words > _FIRST_PART_WORDS:
            payload = torch.empty(words, dtype=torch.int32, device=self._device)
            rest_work = group.recv([payload[_FIRST_PART_WORDS:]], peer, _second_tag(number, words))
            self._started.append((payload, rest_work))
        return _Arrival(words, first, payload, None if is_here else work, rest_work)

    def _send(self, group: Any, box: _Mailbox, peer: int, message: torch.Tensor) -> list[tuple[int, Any]]:
        """Start to send ``message`` in one part or two. Return ``peer`` and the work of each."""
        box.sent[peer] += 1
        number, end = box.sent[peer], cost.HEADER_WORDS + _FIRST_PART_WORDS
        works: list[tuple[int, Any]] = []
        self._started.append((message, works))
        works.append((peer, group.send([message[:end]], peer, _FIRST_TAGS + number % _FIRST_TAGS)))
        if message.shape[0] > end:
            tag = _second_tag(number, message.shape[0] - cost.HEADER_WORDS)
            works.append((peer, group.send([message[end:]], peer, tag)))
        return works

    def _post_on_device(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, int], frame: wire.Frame
    ) -> tuple[dict[int, torch.Tensor], list[Any], list[torch.Tensor]]:
        """Return the buffers of what is to arrive by peer, what to wait for, and the tensors of what is sent.

        NCCL has no tags, and needs to know the length of a message.
        """
        operations: list[dist.P2POp] = []
        buffers: dict[int, torch.Tensor] = {}
        messages: list[torch.Tensor] = []

        def add(kind: Callable[..., Any], tensor: torch.Tensor, peer: int) -> None:
            operations.append(dist.P2POp(kind, tensor, self._global_ranks[peer], self.group))

        for peer, words in receives.items():
            buffers[peer] = torch.empty(words + cost.HEADER_WORDS, dtype=torch.int32, device=self._device)
            add(dist.irecv, buffers[peer], peer)
        for peer, payload in sends.items():
            messages.append(wire.framed_on_device(payload, frame))
            add(dist.isend, messages[-1], peer)
        return buffers, dist.batch_isend_irecv(operations) if operations else [], messages

    def _wait_on_device(
        self, frame: wire.Frame, buffers: dict[int, torch.Tensor], works: list[Any], _: list[torch.Tensor]
    ) -> Inbox:
        """Wait, and count the wrong words of headers."""
        for work in works:
            self.wait_for(work)
        inbox: Inbox = {}
        for peer, buffer in buffers.items():
            header, inbox[peer] = buffer[: cost.HEADER_WORDS], buffer[cost.HEADER_WORDS :]
            self.suspect += wire.check_on_device(header, inbox[peer], frame)
        return inbox

    def _from(self, peer: int, error: ProtocolMismatchError) -> ProtocolMismatchError:
        """Return the ``error`` of a message with its sending and its receiving rank."""
        to, source = (rank_text(self._global_ranks[each]) for each in (self.rank, peer))
        return ProtocolMismatchError(f"message to {to} from {source}: {error}")

    def take_suspect(self) -> torch.Tensor:
        """Return :attr:`suspect`, and set it to zero."""
        found, self.suspect = self.suspect, torch.zeros_like(self.suspect)
        return found

    def wait_for(self, work: Any) -> None:
        """Wait for ``work``, an operation of torch, at most until the time-out."""
        work.wait(*self._limit)

    def _wait_for_next(self, left: list[tuple[int, Any]]) -> None:
        """Wait for the first work that is ``left``, and remove it. If that fails, note which others had not arrived.

        Each work has the peer of its message.
        """
        (peer, work), *others = left
        try:
            work.wait(*self._limit)
        except RuntimeError:
            late = {peer, *(other for other, work in others if not failure_report.has_arrived(work))}
            self.waiting = [self._global_ranks[each] for each in sorted(late)]
            raise
        left[:] = others


def _second_tag(number: int, words: int) -> int:
    return _SECOND_TAGS + wire.stamp(f"{number}/{words}") % (_SECOND_TAGS - 1)
