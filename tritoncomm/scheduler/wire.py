"""The header of a message: int32 words that say where in the exchange it belongs, with a checksum of what follows."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from tritoncomm.errors import ProtocolMismatchError
from tritoncomm_kernels.memory import copied_to

_WORD_MASK = 0x7FFFFFFF
_PHASE_BYTES = 8
_CHECKSUM = 6  # position of the checksum in a header


@dataclass(frozen=True)
class Frame:
    """The place of a message in the exchange: step, round and phase. Its header is made from these.

    ``number`` is the number of the round within the step. ``stamp`` is a hash of everything that must be equal at both
    ends, such as method, settings and parameter shapes. See :func:`stamp`.
    """

    step: int
    number: int
    phase: str
    stamp: int

    def header(self, words: int, total: int) -> list[int]:
        """Return the ``HEADER_WORDS`` int32 words of the header.

        They are the step, the round, the number of payload words, the stamp, the first 8 bytes of the phase (two
        words), the checksum ``total`` of the payload, and a CRC-32 of all these and the whole phase.
        """
        place = self.step & _WORD_MASK, self.number & _WORD_MASK, words, self.stamp & _WORD_MASK
        fields = [*place, *_phase_words(self.phase), total]
        return [*fields, zlib.crc32(f"{fields, self.phase}".encode()) & _WORD_MASK]


@cache
def _phase_words(phase: str) -> list[int]:
    """Return the first 8 bytes of the name of a phase as two words."""
    text = phase.encode()[:_PHASE_BYTES].ljust(_PHASE_BYTES, b"\0")
    return [int.from_bytes(text[at : at + 4], "little", signed=True) for at in range(0, _PHASE_BYTES, 4)]


def stamp(text: str) -> int:
    """Return a 31-bit hash of ``text``, which describes everything that must be equal at both ends."""
    return zlib.crc32(text.encode()) & _WORD_MASK


def framed(payload: torch.Tensor, frame: Frame) -> torch.Tensor:
    """Return the message: the header of ``frame``, followed by ``payload`` (int32 ``[w]``, in host memory)."""
    if payload.dtype != torch.int32 or payload.ndim != 1:
        raise ProtocolMismatchError(
            f"phase {frame.phase!r} sends a tensor of shape {tuple(payload.shape)} and dtype {payload.dtype}: "
            "a message must be one-dimensional int32"
        )
    header = torch.tensor(frame.header(payload.shape[0], _sum(payload)), dtype=torch.int32, device="cpu")
    return torch.cat([header, payload])


def check_frame(header: torch.Tensor, frame: Frame, words: int) -> int:
    """Check that ``header`` is the header of ``frame`` with ``words`` payload words, and return the payload's checksum.

    The checksum is for :func:`check_payload`. Raises :class:`ProtocolMismatchError` when the header is another one.
    """
    found = header.tolist()
    total: int = found[6]
    expected = frame.header(words, total)
    if found == expected:
        return total
    phase = b"".join(word.to_bytes(4, "little", signed=True) for word in found[4:6]).rstrip(b"\0")
    raise ProtocolMismatchError(
        f"expected step {frame.step}, round {frame.number}, phase {frame.phase!r}, {words} words; "
        f"received step {found[0]}, round {found[1]}, phase {phase.decode(errors='replace')!r} (first 8 bytes), "
        f"{found[2]} words, "
        f"{'the same method and settings' if found[3] == expected[3] else 'a different method or settings'}: "
        "run the same steps with the same settings on all ranks, and step the same optimizers in the same order; "
        "where step() raises on one rank alone, as by a hook of yours, call it again there"
    )


def framed_on_device(payload: torch.Tensor, frame: Frame) -> torch.Tensor:
    """Do the same as :func:`framed` for a ``payload`` on a GPU, without waiting for it."""
    header = _device_header(payload, frame)
    return torch.cat([header, payload])


def check_on_device(header: torch.Tensor, payload: torch.Tensor, frame: Frame) -> torch.Tensor:
    """Return 0 if ``header`` is that of ``payload`` in ``frame``, and otherwise a larger number (int32 ``[1]``).

    Both are on a GPU, and nothing waits for it.
    """
    return (header != _device_header(payload, frame)).sum(dtype=torch.int32).reshape(1)


def _device_header(payload: torch.Tensor, frame: Frame) -> torch.Tensor:
    """Return the header with the checksum of ``payload``. Its CRC-32 is that of a header with the checksum 0."""
    header = copied_to(torch.tensor(frame.header(payload.numel(), 0), dtype=torch.int32, device="cpu"), payload.device)
    header[_CHECKSUM : _CHECKSUM + 1] = payload.sum(dtype=torch.int64).to(torch.int32)
    return header


def check_payload(payload: torch.Tensor, total: int) -> None:
    """Raise :class:`ProtocolMismatchError` unless ``payload`` has the checksum ``total`` of its header."""
    if _sum(payload) != total:
        raise ProtocolMismatchError("the message is corrupt: its payload does not match the checksum in its header")


def _sum(payload: torch.Tensor) -> int:
    """Return the sum of all words on the CPU, wrapped to a signed word. A change of any single bit changes it."""
    # numpy wraps around, and is ten times as fast as a sum of torch in 64 bits.
    return int(np.add.reduce(payload.numpy(), dtype=np.int32))
