"""The Adam update of a flat list: kernel and reference against one update per parameter, bit for bit."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DEVICES, INTERPRETED, Guarded, agree, bits, cases, drawn, kernels_from, seeds

import tritoncomm_kernels as kernels
from tritoncomm_kernels import Padded, Selection, adam_flat

SIZES = st.lists(st.sampled_from([0, 1, 33, 256, 700]), min_size=1, max_size=4)
# Shapes of the tensors that may be in torch.channels_last or torch.channels_last_3d.
IMAGES = {256: (4, 4, 8, 2), 700: (5, 7, 2, 5, 2)}


def drawn_list(sizes: list[int], gap: int, share: float, seed: int) -> tuple[list[int], Padded]:
    """Return the start of each parameter, with gaps between them, and a list of entries with padding."""
    starts, at = [], gap
    for size in sizes:
        starts.append(at)
        at += size + gap
    generator = torch.Generator().manual_seed(seed)
    chosen = (torch.rand(max(at, 1), generator=generator) < share).nonzero().squeeze(1)
    values = drawn("heavy", len(chosen), seed)
    return starts, Padded.of(Selection.of(chosen.int(), values), len(chosen) + seed % 3)


def channels_last(guarded: Guarded, values: torch.Tensor) -> torch.Tensor:
    """Return guarded ``values`` (``[n]``) as an image with the channels innermost in memory."""
    shape = IMAGES[values.numel()]
    inner = values.view(shape).movedim(1, -1)
    return guarded.of(inner.reshape(-1)).view(inner.shape).movedim(-1, 1)


def check(device: str, sizes: list[int], seed: int, amsgrad: bool, data: st.DataObject, *, kernel: bool) -> None:
    """Compare the reference, and on ``device`` the ``kernel``, with one update per parameter."""
    maximize, steps = data.draw(st.booleans()), data.draw(st.sampled_from([1, 30, 1_000_000]))
    steady, keep = data.draw(st.booleans()), data.draw(st.sampled_from([1.0, 0.999]))
    change = data.draw(st.sampled_from([0.0, 0.2, math.inf]))
    rms = [data.draw(st.sampled_from([0.0, 0.01, 3.0, math.inf, math.nan])) for _ in sizes]
    half = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter has no bf16
    dtype, compact = data.draw(st.sampled_from([torch.float32, half])), data.draw(st.booleans())
    starts, entries = drawn_list(
        sizes, data.draw(st.sampled_from([0, 5])), data.draw(st.sampled_from([0.0, 0.4, 1.0])), seed
    )
    if steady:
        entries = Padded(entries.indices, entries.values.abs())
    # One layout for all tensors of a parameter, or any for each of them.
    mixed = data.draw(st.booleans())
    layouts = [[size in IMAGES and data.draw(st.booleans()) for size in sizes] for _ in range(6 if mixed else 1)]
    generator = torch.Generator().manual_seed(seed)
    lasts = [torch.randint(0, steps + 1, (n,), generator=generator, dtype=torch.int32) for n in sizes]

    def call(guarded: Guarded, *, flat: bool = True) -> list[list[int]]:
        def held(column: list[torch.Tensor], number: int) -> list[torch.Tensor]:
            found = []
            for values, is_image in zip(column, layouts[number % len(layouts)], strict=True):
                shape = IMAGES.get(values.numel(), values.shape)
                found.append(channels_last(guarded, values) if is_image else guarded.of(values).view(shape))
            return found

        floats = [[drawn("heavy", n, seed + 9 * j + i) for j, n in enumerate(sizes)] for i in range(5)]
        # All gradients and first moments may be positive.
        positive = range(1, 5) if steady else range(3, 5)
        floats = [[v.abs() for v in column] if i in positive else column for i, column in enumerate(floats)]
        floats = [held([values.to(dtype) for values in column], i) for i, column in enumerate(floats)]
        parameters, gradients, first, second, maximum = floats
        last = held(lasts, 5)
        param_rms = [torch.tensor(size, device=guarded.device) for size in rms]
        states = kernels.AdamStates(first, second, last, param_rms, maximum if amsgrad else None)
        control = kernels.AdamControl.of(
            steps=steps, learning_rate=0.01, betas=(0.9, 0.999), epsilon=1e-8, max_catch_up=20,
            max_relative_update=change, device=torch.device(guarded.device), maximize=maximize,
        )  # fmt: skip
        listed = Padded(guarded.of(entries.indices), guarded.of(entries.values))
        if flat:
            kernels.AdamFlat(parameters, states, starts).update(
                listed, control, keep=keep, gradients=None if compact else gradients
            )
        else:
            for i, parameter in enumerate(parameters):
                parameter.mul_(keep)
                inside = (entries.indices >= starts[i]) & (entries.indices < starts[i] + sizes[i])
                at = (entries.indices[inside] - starts[i]).long()
                dense = torch.zeros(sizes[i], dtype=dtype)
                dense[at] = entries.values[inside].to(dtype)
                gradient = dense.view(parameter.shape) if compact else gradients[i]
                kernels.adam_update(parameter, gradient, states.at(i), control, at)
        return [bits(tensor) for column in (parameters, first, second, maximum, last) for tensor in column]

    with kernels_from("auto"):
        found = call(Guarded("cpu"))
        assert call(Guarded("cpu"), flat=False) == found
    if kernel:
        assert agree(call, device) == found


@pytest.mark.parametrize("device", DEVICES)
@given(SIZES, seeds, st.booleans(), st.data())
@cases(25)
def test_adam_flat(device: str, sizes: list[int], seed: int, amsgrad: bool, data: st.DataObject) -> None:
    """The kernel equals the reference, with gaps between parameters, padding, and gradients from either source."""
    check(device, sizes, seed, amsgrad, data, kernel=True)


@given(SIZES, seeds, st.booleans(), st.data())
@cases(40)
def test_reference(sizes: list[int], seed: int, amsgrad: bool, data: st.DataObject) -> None:
    """The reference equals one update per parameter."""
    check("cpu", sizes, seed, amsgrad, data, kernel=False)


@pytest.mark.parametrize(
    ("column", "change"),
    [(1, torch.Tensor.bfloat16), (3, torch.Tensor.long), (3, "strided"), (5, torch.Tensor.bfloat16), (5, "strided")],
)
def test_states_that_a_kernel_cannot_update(column: int, change: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter is left out if any of its states has other strides or another dtype than the kernel writes."""
    monkeypatch.setattr(adam_flat, "triton_runs", lambda tensor: True)
    columns = [[torch.zeros(4, 6), torch.zeros(4, 6)] for _ in range(6)]
    columns[3] = [tensor.int() for tensor in columns[3]]
    columns[4] = [torch.tensor(1.0)] * 2
    other = columns[column][1]
    columns[column][1] = other.t().contiguous().t() if change == "strided" else change(other)
    states = kernels.AdamStates(*columns[1:5], columns[5])
    launched: list[list[int]] = []
    monkeypatch.setattr(kernels.AdamFlat, "_launch", lambda self, entries, control, dtype, at, own: launched.append(at))
    monkeypatch.setattr(kernels.AdamFlat, "_one_by_one", lambda self, entries, control, at, own: launched.append(at))
    flat = kernels.AdamFlat(columns[0], states, [0, 24])
    flat.update(Padded(torch.tensor([5], dtype=torch.int32), torch.ones(1)), control=None)
    assert launched == [[0], [1]]


def test_images_are_updated_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters in ``torch.channels_last`` share the launch of the others, and nothing waits for the host."""
    monkeypatch.setattr(adam_flat, "triton_runs", lambda tensor: True)
    launched: list[tuple[list[int], bool]] = []
    monkeypatch.setattr(
        kernels.AdamFlat, "_launch", lambda self, entries, control, dtype, at, own: launched.append((at, own is None))
    )
    monkeypatch.setattr(kernels.AdamFlat, "_one_by_one", lambda *_: pytest.fail("the host reads where entries are"))
    image = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    columns = [[torch.zeros(7), image.clone()] for _ in range(3)]
    last = [tensor.int() for tensor in columns[0]]
    states = kernels.AdamStates(*columns[1:], last, [torch.tensor(1.0)] * 2)
    entries = Padded(torch.tensor([5], dtype=torch.int32), torch.ones(1))
    flat = kernels.AdamFlat(columns[0], states, [0, 7])
    flat.update(entries, control=None)
    flat.update(entries, control=None, gradients=columns[0])
    assert launched == [([0, 1], True), ([0, 1], False)]


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
    entries = Padded(torch.tensor([5, 100], dtype=torch.int32), torch.ones(2))
    with caplog.at_level(logging.WARNING, "tritoncomm"):
        flat.update(entries, control)
        flat.update(entries, control)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "a parameter of shape (2, 3, 4, 4) or its state is not contiguous" in message
    assert "parameter.data.contiguous()" in message
    assert [int((parameter != 1).sum()) for parameter in floats[0]] == [1, 1]
