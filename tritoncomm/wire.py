"""What a message looks like: int32 words, a short frame, then indices and bit-cast values.

Indices are never converted to floats: fp32 is exact for integers only below 2^24.
"""

from __future__ import annotations

import zlib

import torch

from tritoncomm.cost import HEADER_WORDS
from tritoncomm.errors import ProtocolMismatchError

_WORD_MASK = 0x7FFFFFFF
_FREE = -1


def pack(indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One message ``[2m]`` int32 from int32 ``indices`` and fp32 ``values`` (both ``[m]``)."""
    return torch.cat([indices, values.view(torch.int32)])


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


def check_indices(indices: torch.Tensor, low: int, high: int) -> None:
    """Raise :class:`ProtocolMismatchError` unless ``indices`` ascend strictly inside ``[low, high)``.

    A bad index from another rank must not reach a scatter.
    """
    if indices.numel() == 0:
        return
    if indices.device.type == "cpu":
        array = indices.numpy()
        sound = low <= array[0] and array[-1] < high and bool((array[1:] > array[:-1]).all())
    else:  # one verdict, one wait for the device
        ascending = (indices[1:] > indices[:-1]).all()
        sound = bool(ascending & (indices[0] >= low) & (indices[-1] < high))
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
