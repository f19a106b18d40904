"""Messages: how entries are packed, framed and checked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tritoncomm import ProtocolMismatchError
from tritoncomm.scheduler import wire
from tritoncomm.scheduler.cost import HEADER_WORDS


@given(st.sets(st.integers(0, 2**31 - 2)))
def test_pack_and_unpack(chosen: set[int]) -> None:
    """Packing keeps indices and values bit for bit, NaN and -0.0 included."""
    indices = torch.tensor(sorted(chosen), dtype=torch.int32)
    values = torch.tensor([float("nan"), -0.0, 1e-45, 3.0]).repeat(len(chosen))[: len(chosen)]
    got, floats = wire.decode(wire.encode(indices, values))
    wire.check_indices(got, 0, 2**31 - 1)
    assert torch.equal(got, indices)
    assert torch.equal(floats.view(torch.int32), values.view(torch.int32))


@given(st.lists(st.sets(st.integers(0, 99), max_size=8), min_size=1, max_size=6), st.integers(0, 3))
def test_pack_parts(parts: list[set[int]], free: int) -> None:
    """Messages are read together as they are one by one. Padded messages keep their length."""
    lists = [torch.tensor(sorted(part), dtype=torch.int32) for part in parts]
    values = [torch.randn(len(indices)) for indices in lists]
    messages = [wire.encode(indices, floats) for indices, floats in zip(lists, values, strict=True)]
    for indices, floats in zip(lists, values, strict=True):
        padded = wire.pack_padded(indices, floats, 2 * (len(indices) + free))
        assert padded.numel() == 2 * (len(indices) + free)
        assert all(map(torch.equal, wire.unpack_padded(padded), (indices, floats)))
    indices, floats = wire.decode_parts(messages)
    assert torch.equal(indices, torch.cat(lists))
    assert torch.equal(floats, torch.cat(values))


def test_every_bit_flip_is_detected() -> None:
    """A message with one flipped bit anywhere, in header or payload, is rejected."""
    frame = wire.Frame(7, 3, "reduce", wire.stamp("somebody"))
    payload = wire.encode(torch.tensor([3, 8], dtype=torch.int32), torch.tensor([2.0, -1e-30]))
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


@pytest.mark.parametrize("indices", [[-1, 2], [2, 2], [3, 1], [4, 10], [1, 5, 4, 9], [5, 1, 2, 3], [1, 2, 3, 10]])
def test_malformed_indices_are_rejected(indices: list[int]) -> None:
    """Indices that do not ascend inside the receiver's range are rejected."""
    message = wire.encode(torch.tensor(indices, dtype=torch.int32), torch.ones(len(indices)))
    with pytest.raises(ProtocolMismatchError, match="not strictly increasing"):
        wire.check_indices(wire.decode(message)[0], 0, 10)


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
        (frame._replace(step=8), 5, "expected step 8, .* received step 7, .* the same method"),
        (frame._replace(number=4), 5, "round 4, .* received step 7, round 3"),
        (frame._replace(phase="balance"), 5, "phase 'balance', .* phase 'gather'"),
        (frame._replace(phase="gather of something long"), 5, "phase 'gather of something long', .* phase 'gather'"),
        (frame._replace(stamp=wire.stamp("spardl of 100")), 5, "a different method or settings"),
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
