"""The Adam update of a flat list: kernel and reference against one update per parameter, bit for bit."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DEVICES, INTERPRETED, Guarded, agree, bits, cases, drawn, kernels_from, seeds
from test_adam_flat import one_by_one

import tritoncomm_kernels as kernels
from tritoncomm_kernels import Entries, adam_flat

SIZES = st.lists(st.sampled_from([0, 1, 33, 256, 700]), min_size=1, max_size=4)
# Shapes of the tensors that may be in torch.channels_last or torch.channels_last_3d.
IMAGES = {256: (4, 4, 8, 2), 700: (5, 7, 2, 5, 2)}


def drawn_list(
    sizes: list[int], gap: int, share: float | None, seed: int
) -> tuple[list[int], torch.Tensor | None, torch.Tensor]:
    """Return the start of each parameter, with gaps between them, and a list of entries with padding.

    If ``share`` is None, there are no indices, and the values are those of the whole vector.
    """
    starts, at = [], gap
    for size in sizes:
        starts.append(at)
        at += size + gap
    if share is None:
        return starts, None, drawn("heavy", at, seed)
    generator = torch.Generator().manual_seed(seed)
    chosen = (torch.rand(max(at, 1), generator=generator) < share).nonzero().squeeze(1)
    values = drawn("heavy", len(chosen), seed)
    return starts, *Entries(chosen.int(), values).padded(len(chosen) + seed % 3)


def channels_last(guarded: Guarded, values: torch.Tensor) -> torch.Tensor:
    """Return guarded ``values`` (``[n]``) as an image with the channels innermost in memory."""
    shape = IMAGES[values.numel()]
    inner = values.view(shape).movedim(1, -1)
    return guarded.of(inner.reshape(-1)).view(inner.shape).movedim(-1, 1)


@pytest.mark.parametrize("device", DEVICES)
@given(SIZES, seeds, st.booleans(), st.data())
@cases(100)
def test_adam_flat(device: str, sizes: list[int], seed: int, amsgrad: bool, data: st.DataObject) -> None:
    """The kernel and the reference equal one update per parameter, with gaps, padding and images."""
    maximize, steps = data.draw(st.booleans()), data.draw(st.sampled_from([1, 2, 30, 1_000_000]))
    steady, keep = data.draw(st.booleans()), data.draw(st.sampled_from([1.0, 0.999]))
    change = data.draw(st.sampled_from([0.0, 0.2, math.inf]))
    rms = [data.draw(st.sampled_from([0.0, 0.01, 0.4, 3.0, math.inf, math.nan])) for _ in sizes]
    small = data.draw(st.sampled_from([1.0, 1e-12]))
    half = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter has no bf16
    dtype = data.draw(st.sampled_from([torch.float32, half]))
    share = data.draw(st.sampled_from([None, 0.0, 0.4, 1.0]))
    starts, indices, values = drawn_list(sizes, data.draw(st.sampled_from([0, 5])), share, seed)
    values = values.abs() if steady else values
    # One layout for all tensors of a parameter, or any for each of them.
    mixed = data.draw(st.booleans())
    layouts = [[size in IMAGES and data.draw(st.booleans()) for size in sizes] for _ in range(5 if mixed else 1)]
    generator = torch.Generator().manual_seed(seed)
    lasts = [torch.randint(0, steps + 1, (n,), generator=generator, dtype=torch.int32) for n in sizes]

    def call(guarded: Guarded, *, flat: bool = True) -> list[list[int]]:
        def held(column: list[torch.Tensor], number: int) -> list[torch.Tensor]:
            found = []
            for values, is_image in zip(column, layouts[number % len(layouts)], strict=True):
                shape = IMAGES.get(values.numel(), values.shape)
                found.append(channels_last(guarded, values) if is_image else guarded.of(values).view(shape))
            return found

        floats = [[drawn("heavy", n, seed + 9 * j + i) for j, n in enumerate(sizes)] for i in range(4)]
        # All gradients and first moments may be positive. First moments of 0 do not vote.
        positive = range(1, 4) if steady else range(2, 4)
        floats = [[v.abs() for v in column] if i in positive else column for i, column in enumerate(floats)]
        floats[2:] = [[small * v for v in column] for column in floats[2:]]
        if steady:
            floats[1] = [torch.where(torch.arange(len(first)) % 5 > 0, first, 0.0) for first in floats[1]]
        floats = [held([values.to(dtype) for values in column], i) for i, column in enumerate(floats)]
        parameters, first, second, maximum = floats
        last = held(lasts, 4)
        param_rms = [torch.tensor(size, device=guarded.device) for size in rms]
        states = kernels.AdamStates(first, second, last, param_rms, maximum if amsgrad else None)
        control = kernels.AdamControl.of(
            steps=steps, learning_rate=0.01, betas=(0.9, 0.999), epsilon=1e-8, max_catch_up=20,
            max_relative_update=change, device=torch.device(guarded.device), maximize=maximize,
            clock=steps + 7 * (seed % 2),
        )  # fmt: skip
        if flat:
            listed = None if indices is None else guarded.of(indices)
            kernels.AdamFlat(parameters, states, starts).update(listed, control, values=guarded.of(values), keep=keep)
        else:
            one_by_one(parameters, states, starts, control, indices=indices, values=values, keep=keep)
        return [bits(tensor) for column in (parameters, first, second, maximum, last) for tensor in column]

    with kernels_from("auto"):
        found = call(Guarded("cpu"), flat=False)
    assert agree(call, device) == found


@pytest.mark.parametrize(
    ("column", "change"),
    [(1, torch.Tensor.bfloat16), (3, "strided"), (5, torch.Tensor.bfloat16), (5, "strided")],
)
def test_states_that_a_kernel_cannot_update(column: int, change: object) -> None:
    """A parameter is left out if any of its states has other strides or another dtype than the kernel writes."""
    columns = [[torch.zeros(4, 6), torch.zeros(4, 6)] for _ in range(6)]
    columns[3] = [tensor.int() for tensor in columns[3]]
    columns[4] = [torch.tensor(1.0)] * 2
    other = columns[column][1]
    columns[column][1] = other.t().contiguous().t() if change == "strided" else change(other)
    states = kernels.AdamStates(*columns[1:5], columns[5])
    flat = kernels.AdamFlat(columns[0], states, [0, 24])
    assert [(positions, kind.fits) for kind, positions in flat._kinds.items()] == [([0], True), ([1], False)]


def test_images_are_updated_together() -> None:
    """Parameters in ``torch.channels_last`` share the launch of the others, and nothing waits for the host."""
    image = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    columns = [[torch.zeros(7), image.clone()] for _ in range(3)]
    last = [tensor.int() for tensor in columns[0]]
    states = kernels.AdamStates(*columns[1:], last, [torch.tensor(1.0)] * 2)
    flat = kernels.AdamFlat(columns[0], states, [0, 7])
    assert [(positions, kind.fits) for kind, positions in flat._kinds.items()] == [([0, 1], True)]


def test_strided_parameters_are_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where kernels run, the first parameter that they leave out is logged with its shape, once, and it is updated."""
    monkeypatch.setattr(adam_flat, "triton_runs", lambda tensor: True)
    monkeypatch.setattr(kernels.AdamFlat, "_has_logged", False)
    shapes = [(2, 3, 4, 4), (3, 2, 2, 2)]
    floats = [[torch.ones(shape).transpose(2, 3) for shape in shapes] for _ in range(3)]
    last = [torch.zeros(shape, dtype=torch.int32) for shape in shapes]
    states = kernels.AdamStates(*floats[1:], last, [torch.tensor(1.0)] * 2, None)
    control = kernels.AdamControl.of(
        steps=1, learning_rate=0.01, betas=(0.9, 0.999), epsilon=1e-8, max_catch_up=20, max_relative_update=0.2,
        device=torch.device("cpu"), maximize=False,
    )  # fmt: skip
    flat = kernels.AdamFlat(floats[0], states, [0, 96])
    indices = torch.tensor([5, 100], dtype=torch.int32)
    with caplog.at_level(logging.WARNING, "tritoncomm"):
        flat.update(indices, control, values=torch.ones(2))
        flat.update(indices, control, values=torch.ones(2))
    (message,) = [record.getMessage() for record in caplog.records]
    assert "no kernel can update a parameter of shape (2, 3, 4, 4)" in message
    assert "parameter.data.contiguous()" in message
    assert [int((parameter != 1).sum()) for parameter in floats[0]] == [1, 1]
