"""Messages: how they are framed and checked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tritoncomm import ProtocolMismatchError
from tritoncomm.scheduler import wire
from tritoncomm.scheduler.cost import HEADER_WORDS


def test_every_bit_flip_is_detected() -> None:
    """A message with one flipped bit anywhere, in header or payload, is rejected."""
    frame = wire.Frame(7, 3, "reduce", wire.stamp("somebody"))
    payload = torch.tensor([3, 8, 1 << 30, -0x3E00_0000], dtype=torch.int32)
    message = wire.framed(payload, frame)

    def check(arrived: torch.Tensor) -> None:
        wire.check_payload(arrived[HEADER_WORDS:], wire.check_frame(arrived[:HEADER_WORDS], frame, len(payload)))

    check(message)
    for word in range(len(message)):
        for bit in range(32):
            flipped = message.clone()
            flipped[word] ^= int(np.uint32(1 << bit).view(np.int32))
            with pytest.raises(ProtocolMismatchError):
                check(flipped)


def test_names_of_phases_and_shapes_count() -> None:
    """A phase that begins alike is another one. A message has one dimension, and an error says if it is corrupt.

    Other steps, rounds, phases, methods and lengths are in ``tests/distributed/test_failures.py``.
    """
    frame = wire.Frame(7, 3, "gather", wire.stamp("oktopk of 100"))
    payload = torch.arange(5, dtype=torch.int32)
    header = wire.framed(payload, frame)[:HEADER_WORDS]
    with pytest.raises(ProtocolMismatchError, match=r"phase 'gather of all', .* phase 'gather'"):
        wire.check_frame(header, replace(frame, phase="gather of all"), 5)
    other = wire.framed(payload, replace(frame, phase="gather of all"))[:HEADER_WORDS]
    with pytest.raises(ProtocolMismatchError, match="phase 'gather of some', "):
        wire.check_frame(other, replace(frame, phase="gather of some"), 5)
    with pytest.raises(ProtocolMismatchError, match="corrupt"):
        wire.check_payload(payload ^ 1, wire.check_frame(header, frame, 5))
    with pytest.raises(ProtocolMismatchError, match="one-dimensional int32"):
        wire.framed(payload.view(1, 5), frame)
