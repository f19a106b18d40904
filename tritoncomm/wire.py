"""What a message looks like: int32 words, a short frame, then indices and bit-cast values.

Indices are never converted to floats: fp32 is exact for integers only below 2^24.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence

import numpy as np
import torch

from tritoncomm.cost import HEADER_WORDS
from tritoncomm.errors import ProtocolMismatchError

_WORD_MASK = 0x7FFFFFFF
_FREE = -1


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
    if len(messages) == 1:
        return unpack(messages[0])
    at_index, at_value = _places([message.numel() // 2 for message in messages], messages[0].device)
    buffer = torch.cat(list(messages))
    return buffer[at_index], buffer[at_value].view(torch.float32)


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


def frame(payload: torch.Tensor, sequence: int, phase: str) -> torch.Tensor:
    """``payload`` (int32 ``[w]``) behind a header that says which round it belongs to."""
    header = torch.tensor(_header(payload.numel(), sequence, phase), dtype=torch.int32)
    return torch.cat([header.to(payload.device), payload])


def unframe(message: torch.Tensor, sequence: int, phase: str) -> torch.Tensor:
    """The payload of a framed message, a view.

    Raises :class:`ProtocolMismatchError` when the header belongs to another round, phase or length.
    """
    payload = message[HEADER_WORDS:]
    found = message[:HEADER_WORDS].tolist()
    expected = _header(payload.numel(), sequence, phase)
    if found != expected:
        raise ProtocolMismatchError(
            f"expected round {sequence}, phase {phase!r}, {payload.numel()} words; the header says round {found[0]}, "
            f"{'the same' if found[1] == expected[1] else 'another'} phase, {found[2]} words"
        )
    return payload


def _header(words: int, sequence: int, phase: str) -> list[int]:
    fields = [sequence & _WORD_MASK, zlib.crc32(phase.encode()) & _WORD_MASK, words]
    return [*fields, zlib.crc32(repr(fields).encode()) & _WORD_MASK]
