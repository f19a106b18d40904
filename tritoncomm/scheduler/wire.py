"""What a message looks like: int32 words, a short frame, then indices and bit-cast values.

Indices are never converted to floats: fp32 is exact for integers only below 2^24.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from tritoncomm.errors import ProtocolMismatchError

_WORD_MASK = 0x7FFFFFFF
_FREE = -1
_PHASE_BYTES = 8


def pack(indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One message ``[2m]`` int32 from int32 ``indices`` and fp32 ``values`` (both ``[m]``)."""
    return torch.cat([indices, values.view(torch.int32)])


def pack_parts(indices: torch.Tensor, values: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """One message as :func:`pack` makes them for each of the consecutive parts of ``counts`` entries.

    Written in one go into one buffer, of which the messages are views.
    """
    at_index, at_value = _places(counts, indices.device)
    buffer = indices.new_empty(2 * indices.numel())
    buffer[at_index] = indices
    buffer[at_value] = values.view(torch.int32)
    return list(torch.split(buffer, [2 * count for count in counts]))


def unpack_parts(messages: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of several messages of :func:`pack`, one after the other."""
    indices, values = torch.cat([message.view(2, -1) for message in messages], dim=1).unbind()
    return indices, values.view(torch.float32)


def _places(counts: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the indices and the values of parts of ``counts`` entries are in a buffer of packed messages."""
    sizes = np.asarray(counts, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    at_index = np.arange(int(sizes.sum())) + np.repeat(starts, sizes)
    return torch.from_numpy(at_index).to(device), torch.from_numpy(at_index + np.repeat(sizes, sizes)).to(device)


def unpack(message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values (views) of a packed message; :func:`check_indices` comes before any use of them."""
    indices, values = message.view(2, -1).unbind()
    return indices, values.view(torch.float32)


def pack_padded(indices: torch.Tensor, values: torch.Tensor, words: int) -> torch.Tensor:
    """One message of exactly ``words`` int32 from at most ``words // 2`` entries; free places have index -1.

    Its length is known to the receiver without asking.
    """
    message = indices.new_full((words,), _FREE)
    pairs = message.view(2, -1)
    pairs[0, : indices.numel()] = indices
    pairs[1, : indices.numel()] = values.view(torch.int32)
    return message


def unpack_padded(message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values (views) of a message of :func:`pack_padded`, without the free places."""
    indices, values = unpack(message)
    used = int(torch.count_nonzero(indices != _FREE))
    return indices[:used], values[:used]


def check_indices(indices: torch.Tensor, low: int, high: int, counts: Sequence[int] = ()) -> None:
    """Raise :class:`ProtocolMismatchError` unless ``indices`` ascend strictly inside ``[low, high)``.

    With ``counts``, each of the consecutive parts of so many does. A bad index from another rank must not
    reach a scatter.
    """
    if indices.numel() == 0:
        return
    starts = list(itertools.accumulate(counts))[:-1]
    if indices.device.type == "cpu":
        array = indices.numpy()
        rises = array[1:] > array[:-1]
        rises[[start - 1 for start in starts if 0 < start < len(array)]] = True
        sound = bool(rises.all()) and low <= array.min() and array.max() < high
    else:  # one verdict, one wait for the device
        ascending = indices[1:] > indices[:-1]
        ascending[[start - 1 for start in starts if 0 < start < indices.numel()]] = True
        sound = bool(ascending.all() & (indices.min() >= low) & (indices.max() < high))
    if not sound:
        raise ProtocolMismatchError(
            f"received indices do not ascend inside [{low}, {high}): "
            "the sender holds another partition or the message is corrupt"
        )


class Frame(NamedTuple):
    """Where a message belongs: the number of the exchange, of the round in it, its phase, and whose it is.

    ``stamp`` stands for everything that both ends must have in common: method, settings, length of the vector.
    """

    step: int
    number: int
    phase: str
    stamp: int

    def header(self, words: int, total: int) -> list[int]:
        """``HEADER_WORDS`` int32: step, round, words, stamp, the phase as text, the payload's sum, a check of these."""
        text = self.phase.encode()[:_PHASE_BYTES].ljust(_PHASE_BYTES, b"\0")
        phase = [int.from_bytes(text[at : at + 4], "little", signed=True) for at in range(0, _PHASE_BYTES, 4)]
        fields = [self.step & _WORD_MASK, self.number & _WORD_MASK, words, self.stamp & _WORD_MASK, *phase, total]
        return [*fields, zlib.crc32(repr((fields, self.phase)).encode()) & _WORD_MASK]


def stamp(text: str) -> int:
    """A number for what both ends must have in common."""
    return zlib.crc32(text.encode()) & _WORD_MASK


def framed(payload: torch.Tensor, frame: Frame) -> torch.Tensor:
    """``payload`` (int32 ``[w]``) behind the header of ``frame``."""
    if payload.dtype != torch.int32 or payload.dim() != 1:
        raise ProtocolMismatchError(
            f"phase {frame.phase!r} sends {tuple(payload.shape)} {payload.dtype}: messages are one-dimensional int32"
        )
    header = torch.tensor(frame.header(payload.numel(), _sum(payload)), dtype=torch.int32)
    return torch.cat([header.to(payload.device), payload])


def check_frame(header: torch.Tensor, frame: Frame, words: int) -> int:
    """The sum for :func:`check_payload`.

    Raises :class:`ProtocolMismatchError` unless ``header`` is that of ``words`` words in ``frame``.
    """
    found = header.tolist()
    total: int = found[6]
    expected = frame.header(words, total)
    if found == expected:
        return total
    phase = b"".join(word.to_bytes(4, "little", signed=True) for word in found[4:6]).rstrip(b"\0")
    raise ProtocolMismatchError(
        f"expected step {frame.step}, round {frame.number}, phase {frame.phase!r}, {words} words; the message says "
        f"step {found[0]}, round {found[1]}, phase {phase.decode(errors='replace')!r}, {found[2]} words, "
        f"{'the same' if found[3] == expected[3] else 'another'} method and settings"
    )


def check_payload(payload: torch.Tensor, total: int) -> None:
    """Raise :class:`ProtocolMismatchError` unless ``payload`` has the sum that its header says."""
    if _sum(payload) != total:
        raise ProtocolMismatchError("the message is corrupt: its words do not have the sum that its header says")


def _sum(payload: torch.Tensor) -> int:
    """Of all words, wrapped to a signed word: every bit of every word counts."""
    total = int(payload.sum(dtype=torch.int64)) & 0xFFFFFFFF
    return total - (1 << 32) if total > _WORD_MASK else total
