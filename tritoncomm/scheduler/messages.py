"""Point-to-point messages on ``torch.distributed``: a header with each, long ones in two parts, checked on arrival."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tritoncomm.errors import ProtocolMismatchError
from tritoncomm.scheduler import cost, failure_report, wire
from tritoncomm.scheduler.rounds import Inbox, Result, Round, Ticket
from tritoncomm_kernels.devices import is_asynchronous

# Number of tags for the first parts of messages. The second parts of long messages use as many tags above these.
_TAGS = 1 << 30
# Payload words in the first part of a message, next to its header. A longer message has a second part with the rest.
_FIRST_PART_WORDS = 1 << 12


class _Part(NamedTuple):
    """A message to or from ``peer``, or a part of it. ``kind`` is :func:`torch.distributed.isend` or ``irecv``."""

    kind: Callable[..., Any]
    tensor: torch.Tensor
    peer: int
    tag: int


class Messages:
    """The messages of one rank in the process group ``group``. ``None`` is the default process group.

    Args:
        group: The process group.
        device: Device on which messages are received.
        timeout: Limit of each wait. None means the time-out of the process group.

    Attributes:
        checks_on_arrival: Whether messages are in host memory, and headers are checked when they arrive. On a GPU,
            wrong headers are counted on the device.
        suspect: Number of wrong words in the headers of messages that a GPU has received (int32 ``[1]``), since
            somebody has set it to zero.
        waiting: Peers of the messages that had not arrived when a wait failed.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout: timedelta | None) -> None:
        self._group = group
        self._device = device
        self._timeout = timeout
        self._rank = dist.get_rank(group)
        self._global_ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.checks_on_arrival = device.type == "cpu"
        self.suspect = torch.zeros(1, dtype=torch.int32, device=device)
        self.waiting: list[int] = []
        self._started: list[Any] = []  # the messages of the last round
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    @property
    def _splits_messages(self) -> bool:
        """True if long messages are sent in two parts.

        This needs messages that are shorter than their buffers. gloo accepts them, NCCL does not.
        """
        return self._device.type == "cpu"

    def post(self, round_: Round, frame: wire.Frame) -> Ticket:
        """Start to send and receive the messages of ``round_``, with the header ``frame``."""
        buffers: dict[int, torch.Tensor] = {}
        sends: list[torch.Tensor] = []
        parts: list[_Part] = []
        for peer, words in round_.receives.items():
            # gloo aborts the process when a message is longer than its buffer, and does not report a shorter one. The
            # buffer therefore always has room for a whole first part, whose header holds the length. A second part is
            # received only by a rank that expects exactly its length.
            capacity = max(words, _FIRST_PART_WORDS) if self._splits_messages else words
            buffers[peer] = torch.empty(capacity + cost.HEADER_WORDS, dtype=torch.int32, device=self._device)
            parts += self._parts(dist.irecv, buffers[peer], words, peer, self._received)
        for peer, payload in round_.sends.items():
            framed = wire.framed if self.checks_on_arrival else wire.framed_on_device
            sends.append(framed(payload, frame))
            parts += self._parts(dist.isend, sends[-1], payload.numel(), peer, self._sent)
        works = self._start(parts)
        # Keep the sent messages until the wait, because the backend reads them in the background.
        peers = [part.peer for part in parts]
        return Ticket(round_.phase, (frame, works, buffers, dict(round_.receives), sends, peers))

    def _parts(
        self, kind: Callable[..., Any], buffer: torch.Tensor, words: int, peer: int, counter: Counter[int]
    ) -> list[_Part]:
        """Return the parts of one message: one of a short message, two of a long one.

        The tag of a first part is the number of the message, which both ends count. It therefore matches the next
        message of the peer, whatever its length. The tag of a second part also depends on the length. It matches only a
        second part of a message of the same length.
        """
        counter[peer] += 1
        first_part = cost.HEADER_WORDS + _FIRST_PART_WORDS
        tag = counter[peer] % _TAGS
        if not self._splits_messages or words <= _FIRST_PART_WORDS:
            return [_Part(kind, buffer, peer, tag)]
        second_tag = _TAGS + wire.stamp(f"{tag}/{words}") % (_TAGS - 1)
        return [_Part(kind, buffer[:first_part], peer, tag), _Part(kind, buffer[first_part:], peer, second_tag)]

    def _start(self, parts: Sequence[_Part]) -> list[Any]:
        """Send and receive ``parts`` in the background. Return what to wait for."""
        if self._device.type == "cpu":  # the calls that isend() and irecv() make, without their time
            group: Any = self._group or dist.group.WORLD
            starts = {dist.isend: group.send, dist.irecv: group.recv}
            self._started = []  # kept if one of them fails, because the backend may use the tensors of the others
            for part in parts:
                self._started.append(starts[part.kind]([part.tensor], part.peer, part.tag))
            return self._started
        operations = [
            dist.P2POp(part.kind, part.tensor, self._global_ranks[part.peer], self._group, part.tag) for part in parts
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def wait(self, ticket: Ticket) -> Inbox:
        """Wait for the messages of a posted round, and return what has arrived."""
        frame, works, buffers, words, _, peers = ticket.token
        pending = list(zip(peers, works, strict=False))  # wait for each exactly once, as gloo counts the waits
        totals: dict[int, int] = {}
        if self._splits_messages:  # first parts first: the second part of a message of the wrong length never arrives
            at = 0
            for peer, buffer in buffers.items():
                self._wait_for_one(*pending.pop(at), pending)
                header = buffer[: cost.HEADER_WORDS]
                totals[peer] = self._checked(peer, wire.check_frame, header, frame, words[peer])
                at += words[peer] > _FIRST_PART_WORDS
        while pending:
            self._wait_for_one(*pending.pop(0), pending)
        inbox: Inbox = {}
        for peer, buffer in buffers.items():
            inbox[peer] = buffer[cost.HEADER_WORDS : cost.HEADER_WORDS + words[peer]]
            if not self.checks_on_arrival:
                self.suspect += wire.check_on_device(buffer[: cost.HEADER_WORDS], inbox[peer], frame)
                continue
            self._checked(peer, wire.check_payload, inbox[peer], totals[peer])
        return inbox

    def _checked(self, peer: int, check: Callable[..., Result], *arguments: Any) -> Result:
        """Return the result of a check of a message. Add the sending and the receiving rank to its error."""
        try:
            return check(*arguments)
        except ProtocolMismatchError as error:
            raise ProtocolMismatchError(f"message to rank {self._rank} from rank {peer}: {error}") from error

    def wait_for(self, work: Any) -> None:
        """Wait for ``work``, an operation of torch, at most until the time-out."""
        if self._timeout is None or is_asynchronous(self._device):  # NCCL would poll. The watcher has the time-out
            work.wait()
        else:
            work.wait(self._timeout)

    def _wait_for_one(self, peer: int, work: Any, others: Sequence[tuple[int, Any]]) -> None:
        """Wait for a message to or from ``peer``. If that fails, note which ``others`` had not arrived either."""
        try:
            self.wait_for(work)
        except RuntimeError:
            if self._splits_messages:  # else a work may hold messages of several peers
                self.waiting = sorted(
                    {peer, *(other for other, left in others if not failure_report.has_arrived(left))}
                )
            raise
