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


def test_frame_mismatches_are_rejected() -> None:
    """A header with another step, round, phase, method or length is rejected by name. A damaged one is rejected too."""
    payload = torch.arange(5, dtype=torch.int32)
    frame = wire.Frame(7, 3, "gather", wire.stamp("oktopk of 100"))
    message = wire.framed(payload, frame)
    header = message[:HEADER_WORDS]
    assert torch.equal(message[HEADER_WORDS:], payload)
    total = wire.check_frame(header, frame, 5)
    wire.check_payload(payload, total)
    with pytest.raises(ProtocolMismatchError, match="corrupt"):
        wire.check_payload(payload ^ torch.tensor([0, 0, 1 << 30, 0, 0], dtype=torch.int32), total)
    for other, words, named in (
        (replace(frame, step=8), 5, "expected step 8, .* received step 7, .* the same method"),
        (replace(frame, number=4), 5, "round 4, .* received step 7, round 3"),
        (replace(frame, phase="balance"), 5, "phase 'balance', .* phase 'gather'"),
        (replace(frame, phase="gather of something long"), 5, "phase 'gather of something long', .* phase 'gather'"),
        (replace(frame, stamp=wire.stamp("spardl of 100")), 5, "a different method or settings"),
        (frame, 4, "4 words; .* 5 words"),
    ):
        with pytest.raises(ProtocolMismatchError, match=named):
            wire.check_frame(header, other, words)
    damaged = header.clone()
    damaged[-1] += 1
    with pytest.raises(ProtocolMismatchError):
        wire.check_frame(damaged, frame, 5)
    for wrong in (payload.float(), payload.view(1, 5)):
        with pytest.raises(ProtocolMismatchError, match="one-dimensional int32"):
            wire.framed(wrong, frame)
