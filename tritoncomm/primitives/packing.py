"""How entries are packed into the int32 words of a message. A header comes before them on the wire.

A plain message holds indices and bit-cast values. Indices are never converted to floats, because fp32 is exact only for
integers up to 2^24. A packed message consists of sections (:class:`Section`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch

from tritoncomm.errors import ProtocolMismatchError
from tritoncomm_kernels import Entries
from tritoncomm_kernels.formats import ENTRY_FORMATS, FORMATS, INDICES
from tritoncomm_kernels.quantize import sendable
from tritoncomm_kernels.section_layout import Layout
from tritoncomm_kernels.sections import check_rows, read_one, read_rows, write_one, write_rows

_PADDING = -1
_COARSE_BITS = 3
NO_VALUES = INDICES.name  # the format of messages that hold indices alone
_FORMATS = {name: FORMATS[name] for name in ENTRY_FORMATS} | {NO_VALUES: INDICES}


def encode(indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return one message (int32 ``[2m]``) with int32 ``indices`` and fp32 ``values`` (both ``[m]``)."""
    return torch.cat([indices, values.view(torch.int32)])


def decode(message: torch.Tensor) -> Entries:
    """Return the entries of a plain message, as views. Call :func:`check_indices` before using them."""
    indices, values = message.view(2, -1).unbind()
    return Entries(indices, values.view(torch.float32))


def pack_padded(indices: torch.Tensor, values: torch.Tensor, words: int) -> torch.Tensor:
    """Return a message of exactly ``words`` int32 with at most ``words // 2`` entries. Padding has the index -1.

    The fixed length saves a message that tells the receiver the number of entries.
    """
    message = indices.new_full((words,), _PADDING)
    pairs = message.view(2, -1)
    pairs[0, : indices.shape[0]] = indices
    pairs[1, : indices.shape[0]] = values.view(torch.int32)
    return message


def unpack_padded(message: torch.Tensor) -> Entries:
    """Return the entries of a message of :func:`pack_padded`, as views, without the padding."""
    entries = decode(message)
    return entries.slice(0, int(torch.count_nonzero(entries.indices != _PADDING)))


def check_indices(indices: torch.Tensor, low: int, high: int) -> None:
    """Raise :class:`ProtocolMismatchError` unless ``indices`` are strictly increasing and inside ``[low, high)``.

    This keeps invalid indices from other ranks out of a scatter.
    """
    if indices.numel() == 0:
        return
    if indices.device.type == "cpu":
        array = indices.numpy()
        valid = bool((array[1:] > array[:-1]).all()) and low <= array.min() and array.max() < high
    else:  # one combined result, so that the host waits for the device only once
        ascending = (indices[1:] > indices[:-1]).all()
        valid = bool(ascending & (indices.min() >= low) & (indices.max() < high))
    if not valid:
        raise ProtocolMismatchError(
            f"received indices are not strictly increasing inside [{low}, {high}): "
            "the sender has a different partition of the vector, or the message is corrupt"
        )


@dataclass(frozen=True)
class Section:
    """At most ``room`` entries with indices in ``[low, high)``, and their place in a message.

    Both ends know all fields, and therefore the length in ``words``. ``values`` is the format of the values, one of
    :data:`~tritoncomm_kernels.formats.ENTRY_FORMATS`, or :data:`NO_VALUES` for indices alone. Indices are packed by
    Elias-Fano, and values are rounded to that format. A section that would not become shorter, and one with
    ``packed=False``, is plain: int32 indices and fp32 values. ``packed="always"`` packs longer sections, too.

    The receiver gets values divided by ``divisor``, for example means instead of sums. A rounded value times the
    ``divisor`` is exact. The sender's residual is therefore the entry minus what was delivered, without loss.

    Attributes:
        layout: The layout of the packed form.
        is_packed: True if the section is packed. Plain sections have two words per entry of room.
        rounds: True if values are rounded. False if the receiver gets the bits of the sender, divided by ``divisor``.
            A plain section rounds only quotients. They lose so many bits that their product with ``divisor`` is exact.
        words: Length in words. The length does not depend on the entries.
    """

    low: int
    high: int
    room: int
    values: str = "fp32"
    divisor: int = 1
    packed: bool | str = True
    layout: Layout = field(init=False)
    is_packed: bool = field(init=False)
    rounds: bool = field(init=False)
    words: int = field(init=False)

    def __post_init__(self) -> None:
        layout = Layout.of(self.room, self.high - self.low, _FORMATS[self.values], self.divisor)
        plain_words = layout.room * (1 if self.values == NO_VALUES else 2)
        is_packed = self.room > 0 and bool(self.packed) and (self.packed == "always" or layout.words < plain_words)
        rounds = self.values not in ("fp32", NO_VALUES) and (is_packed or self.divisor > 1)
        words = layout.words if is_packed else plain_words
        self.__dict__.update(layout=layout, is_packed=is_packed, rounds=rounds, words=words)

    def sendable(self, entries: Entries) -> Entries:
        """Return the ``entries`` that the section can hold together.

        Rounding would more than double those that are too small beside the largest one, or turn them into 0. They are
        not sent, and stay in the residual. If an entry is NaN or Inf, all entries are returned.
        """
        if not self.rounds:
            return entries
        if self.is_packed:
            chosen = sendable(entries.values.cpu().numpy(), self.layout.fmt, self.divisor)
            if chosen is None:
                return entries
            keep = torch.from_numpy(chosen).to(entries.values.device)
        else:
            keep = rounded_quotients(entries.values, self.divisor) != 0
        if keep.all():
            return entries
        return Entries(entries.indices[keep], entries.values[keep])

    def encode(self, indices: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, Entries]:
        """Return the section (int32 ``[words]``) with ``indices`` (int32 ``[m]``, ascending) and ``values`` (fp32).

        Also returns the entries that the receiver will get, multiplied by ``divisor``. They are a part of the given
        entries (:meth:`sendable`), with rounded values. The difference belongs into the sender's residual.
        """
        if indices.shape[0] > self.room:
            raise ValueError(f"{indices.shape[0]} entries do not fit into a section with room={self.room}")
        if self.is_packed:
            return write_one(self.layout, self.low, indices, values)
        entries = self.sendable(Entries(indices, values))
        if self.values == NO_VALUES:
            return torch.nn.functional.pad(indices, (0, self.words - indices.numel()), value=_PADDING), entries
        sent = rounded_quotients(entries.values, self.divisor) if self.rounds else entries.values
        delivered = sent * self.divisor if self.rounds else sent
        return pack_padded(entries.indices, sent, self.words), Entries(entries.indices, delivered)

    def decode(self, section: torch.Tensor) -> Entries:
        """Return the entries of a received ``section`` (int32 ``[words]``), with values divided by ``divisor``.

        Raises :class:`ProtocolMismatchError` if they do not ascend inside the range, or the section is malformed.
        """
        if section.shape[0] != self.words:
            raise ProtocolMismatchError(
                f"received {section.shape[0]} words for the section [{self.low}, {self.high}), expected {self.words}"
            )
        if self.is_packed:
            try:
                entries = read_one(self.layout, self.low, section)
            except ValueError as error:
                raise ProtocolMismatchError(
                    f"received a malformed section for [{self.low}, {self.high}): {error}. "
                    "The sender has a different partition of the vector, or the message is corrupt"
                ) from None
        else:
            if self.values == NO_VALUES:
                indices = section[: int(torch.count_nonzero(section != _PADDING))]
                entries = Entries(indices, indices.new_empty(0, dtype=torch.float32))
            else:
                entries = unpack_padded(section)
            check_indices(entries.indices, self.low, self.high)
        if self.rounds or self.divisor == 1:
            return entries
        return entries._replace(values=quotients(entries.values, self.divisor))

    def encode_rows(self, lows: torch.Tensor, entries: Entries) -> tuple[torch.Tensor, Entries]:
        """Do the same as :meth:`encode` for each row of ``entries`` (``[rows, room]``). Nothing waits for a GPU.

        Ranges of the width of this one begin at ``lows`` (int32 ``[rows]``). There may be padding, also in the result.
        The messages are int32 ``[rows, words]``. The section is one of :attr:`Encoding.of_rows`.
        """
        if self.is_packed:
            return write_rows(self.layout, lows, entries)
        if self.values == NO_VALUES:
            return entries.indices, entries
        return torch.cat([entries.indices, entries.values.view(torch.int32)], dim=1), entries

    def decode_rows(self, lows: torch.Tensor, messages: torch.Tensor) -> tuple[Entries, torch.Tensor]:
        """Return the entries of ``messages`` of :meth:`encode_rows`, and the number of malformed rows (int32 ``[1]``).

        Rounded values are divided by ``divisor``. A malformed row has no entries, see
        :func:`tritoncomm_kernels.sections.read_rows`.
        """
        if self.is_packed:
            return read_rows(self.layout, lows, messages)
        room = self.layout.room
        indices, values = messages[:, :room], messages[:, room:].view(torch.float32)
        if self.values == NO_VALUES:
            values = torch.zeros_like(indices).float()
        return check_rows(Entries(indices, values), lows, self.high - self.low)


@dataclass(frozen=True)
class Encoding:
    """How a method sends entries: the format of ``values``, and whether they are ``packed``. See :class:`Section`."""

    values: str = "fp32"
    packed: bool | str = False

    @cached_property
    def rounds(self) -> bool:
        """True if values are rounded."""
        return self.values not in ("fp32", NO_VALUES)

    @property
    def is_coarse(self) -> bool:
        """True if values have so few levels that many sums of them are equal: 1, 2 or 3 bits."""
        return self.rounds and _FORMATS[self.values].bits <= _COARSE_BITS

    @property
    def of_rows(self) -> Encoding:
        """The encoding of rows with padding, see :meth:`Section.encode_rows`: rounded values are always packed.

        Where plain rows are shorter, they are a few entries long, and take more launches to write and read.
        """
        return Encoding(self.values, "always") if self.rounds else self

    def section(self, low: int, high: int, room: int, *, divisor: int = 1) -> Section:
        """Return the section of at most ``room`` entries in ``[low, high)``."""
        return _section(low, high, room, self.values, divisor, self.packed)

    def encode(self, low: int, high: int, entries: Entries) -> tuple[torch.Tensor, Entries]:
        """Return a section in ``[low, high)`` with room for what is sent of ``entries``, see :meth:`Section.encode`."""
        section = self.section(low, high, entries.indices.shape[0])
        message, sent = section.encode(entries.indices, entries.values)
        if sent.indices.shape[0] < entries.indices.shape[0]:  # a shorter section holds what can be sent together
            entries = section.sendable(entries)
            message, sent = self.section(low, high, entries.indices.shape[0]).encode(entries.indices, entries.values)
        return message, sent

    def words(self, span: int, room: int) -> int:
        """Return the length in words of a section of at most ``room`` entries in a range of ``span`` coordinates."""
        return self.section(0, span, room).words

    def words_at_most(self, span: int, entries: int, sections: int) -> int:
        """Return an upper bound in words for ``sections`` sections, with ``entries`` entries and ``span`` coordinates.

        It holds for any split of the entries and the coordinates over the sections.
        """
        entries = min(entries, span)
        plain = entries * (1 if self.values == NO_VALUES else 2)
        if not self.packed or entries == 0:
            return plain
        bits = _FORMATS[self.values].bits
        # A section of m entries in u coordinates needs at most m (2 + log2(u / m) + bits) bits, and whole words. The
        # first part is largest in total if all sections have the same ratio.
        packed = entries * (2 + math.log2(span / entries) + bits)
        packed += sections * (97 + 31 * (math.ceil(math.log2(max(2, span))) + min(bits, 8)))
        return math.ceil(packed / 32) if self.packed == "always" else min(plain, math.ceil(packed / 32))


PLAIN = Encoding()


# What one rank encodes, others decode, and computing a layout takes longer.
_section = lru_cache(maxsize=1024)(Section)


class Sections:
    """A message of several sections, one after the other.

    ``ranges`` holds (low, high, room) of each section. They ascend and do not overlap. ``encoding`` and ``divisor`` are
    those of all sections. A plain message is written and read as a whole, however many sections it has.
    """

    def __init__(self, encoding: Encoding, ranges: Sequence[tuple[int, int, int]], *, divisor: int = 1) -> None:
        self.ranges = ranges
        self.sections: list[Section] = []
        self.words = 0
        self.is_plain = not (encoding.packed or encoding.rounds) and divisor == 1
        if not self.is_plain:
            self.sections = [encoding.section(*bounds, divisor=divisor) for bounds in ranges]
            self.words = sum([section.words for section in self.sections])
        else:
            self.words = 2 * sum(min(room, high - low) for low, high, room in ranges)

    def encode(self, indices: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, Entries]:
        """Do the same as :meth:`Section.encode` for entries of all sections."""
        if self.is_plain or not self.words:
            return pack_padded(indices, values, self.words), Entries(indices, values)
        if len(self.sections) == 1:
            return self.sections[0].encode(indices, values)
        bounds = indices.new_tensor([section.low for section in self.sections[1:]])
        cuts = [0, *torch.searchsorted(indices, bounds).tolist(), indices.numel()]
        parts = [
            section.encode(indices[start:stop], values[start:stop])
            for section, (start, stop) in zip(self.sections, itertools.pairwise(cuts), strict=True)
        ]
        return torch.cat([message for message, _ in parts]), Entries.join([sent for _, sent in parts])

    def decode(self, message: torch.Tensor) -> Entries:
        """Do the same as :meth:`Section.decode` for a received ``message`` (int32 ``[words]``)."""
        if not self.words:
            return Entries(message, message.view(torch.float32))
        if len(self.sections) == 1:
            return self.sections[0].decode(message)
        if not self.is_plain:
            parts = message.split_with_sizes([section.words for section in self.sections])
            return Entries.join([section.decode(part) for section, part in zip(self.sections, parts, strict=True)])
        entries = unpack_padded(message)
        start = 0
        for run in runs(self.ranges):
            low, high = run[0][0], run[-1][1]
            last = high == self.ranges[-1][1]
            stop = entries.room if last else int(torch.searchsorted(entries.indices, high))
            check_indices(entries.indices[start:stop], low, high)
            start = stop
        return entries


def quotients(values: torch.Tensor, divisor: int) -> torch.Tensor:
    """Return ``values / divisor``, the same bits on a GPU as on a CPU."""
    # By a tensor: a GPU multiplies by the reciprocal of a number, which rounds differently.
    return values / values.new_full((), divisor)


def rounded_quotients(values: torch.Tensor, divisor: int) -> torch.Tensor:
    """Return ``values / divisor`` (fp32), rounded so that the product with ``divisor`` and its distance are exact."""
    dropped = 1 + (divisor - 1).bit_length()
    return (quotients(values, divisor).view(torch.int32) & -(1 << dropped)).view(torch.float32)


def runs(ranges: Sequence[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Return the parts of ``ranges``, each (low, high, room), between which there is a gap."""
    starts = [at for at in range(1, len(ranges)) if ranges[at][0] != ranges[at - 1][1]]
    return [list(ranges[a:b]) for a, b in itertools.pairwise([0, *starts, len(ranges)])]
