"""The Adam update of a flat list: reference and kernel equal one update per tensor, bit for bit."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any
from unittest import mock

import adam_oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import INTERPRETED, Guarded, agree, bits, both, cases, drawn, kernels_from, seeds

import tritoncomm_kernels as kernels
from tritoncomm_kernels import Entries, adam_flat, adam_numpy
from tritoncomm_kernels.adam import OUTLIER, Scalars

# The reference also takes other types and strides, alone or mixed. A list of 20,000 elements fills a part alone.
KINDS = {"fp32": torch.float32, "half": torch.bfloat16, "double": torch.float64, "strided": torch.float32}
# Shapes of the tensors that may be in torch.channels_last or torch.channels_last_3d.
IMAGES = {256: (4, 4, 8, 2), 700: (5, 7, 2, 5, 2)}
CONTROL = {"steps": 1, "learning_rate": 0.01, "betas": (0.9, 0.999), "epsilon": 1e-8, "max_catch_up": 20.0}


def control_of(device: str = "cpu", **fields: Any) -> kernels.AdamControl:
    """Return the control of a step with these fields."""
    return kernels.AdamControl.of(**CONTROL | fields, device=torch.device(device))


def listed(end: int, share: float | None, seed: int, family: str) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return a list of entries with padding. If ``share`` is None, all ``end`` values without indices."""
    if share is None:
        return None, drawn(family, end, seed)
    generator = torch.Generator().manual_seed(seed)
    chosen = (torch.rand(max(end, 1), generator=generator) < share).nonzero().squeeze(1)
    entries = Entries(chosen.int(), drawn(family, len(chosen), seed)).padded(len(chosen) + seed % 3)
    return entries.indices, entries.values


def typed(values: torch.Tensor, kind: str) -> torch.Tensor:
    """Return ``values`` in the type of a kind of tensor."""
    return values.to(torch.float16 if INTERPRETED and kind == "half" else KINDS[kind])  # no bf16 in the interpreter


def placed(guarded: Guarded, values: torch.Tensor, kind: str, *, channels_last: bool) -> torch.Tensor:
    """Return guarded ``values`` (``[n]``), perhaps as an image with the channels innermost in memory, or strided."""
    shape = IMAGES.get(values.numel(), values.shape)
    if kind == "strided":
        return guarded.of(values.repeat_interleave(2))[::2]
    if not channels_last:
        return guarded.of(values.view(shape))
    return guarded.of(values.view(shape).movedim(1, -1)).movedim(-1, 1)


def one_by_one(
    parameters: list[torch.Tensor], states: kernels.AdamStates, starts: list[int], control: kernels.AdamControl,
    indices: torch.Tensor | None, values: torch.Tensor,
) -> None:  # fmt: skip
    """Do what ``AdamFlat.update`` does with the oracle."""
    for i, (parameter, start) in enumerate(zip(parameters, starts, strict=True)):
        inside, at = slice(start, start + parameter.numel()), slice(None)
        if indices is not None:
            inside = (indices >= start) & (indices < start + parameter.numel())
            at = (indices[inside] - start).long()
        gradient = torch.zeros(parameter.numel(), dtype=parameter.dtype)
        gradient[at] = values[inside].to(parameter.dtype)
        adam_oracle.update(parameter, gradient, states, i, control, at)


def check(
    device: str, make: Callable[[Guarded], tuple[list[torch.Tensor], kernels.AdamStates]], starts: list[int],
    fields: dict[str, Any], indices: torch.Tensor | None, values: torch.Tensor, keep: float = 1.0,
) -> None:  # fmt: skip
    """Assert that an update of what ``make`` returns leaves the same bits in all implementations and the oracle."""

    def call(guarded: Guarded, *, flat: bool = True) -> list[list[int]]:
        parameters, states = make(guarded)
        control, at = control_of(guarded.device, **fields), None if indices is None else guarded.of(indices)
        if flat:
            kernels.AdamFlat(parameters, states, starts).update(at, control, values=guarded.of(values), keep=keep)
        else:
            for parameter in parameters:
                parameter.mul_(keep)
            one_by_one(parameters, states, starts, control, indices, values)
        return [bits(each) for column in (parameters, *states.columns()) for each in column]

    with kernels_from("auto"):
        found = call(Guarded("cpu"), flat=False)
    assert agree(call, device) == found


@both
@given(st.data(), seeds, st.booleans())
@cases(100)
def test_adam_flat(device: str, data: st.DataObject, seed: int, amsgrad: bool) -> None:
    """Sizes, gaps, padding, images, delays and (for the reference) types and strides may be mixed.

    A delay may be longer than the table of decays. Everything or nothing may be delivered. The reference works in one
    or in several parts and chunks.
    """

    def draw(*values: Any) -> Any:
        return data.draw(st.sampled_from(values))

    def vary(*values: Any) -> Any:
        return draw(*values) if own else values[0]

    own = device == "reference"  # it is faster, and has more cases
    sizes = data.draw(
        st.lists(st.sampled_from([0, 1, 33, 256, 700, *([20_000] if own else [])]), min_size=1, max_size=4)
    )
    gap, keep, steps, steady = (
        draw(0, 5),
        draw(1.0, 0.999),
        draw(1, 2, 30, 1_000_000, *([1000, 70_000] if own else [])),
        draw(False, True),
    )
    small, kind = draw(1.0, 1e-12), draw("fp32", "half")
    kinds = [draw(*KINDS) if own else kind for _ in sizes]
    rms = [draw(0.0, 0.01, 0.4, 3.0, math.inf, math.nan) for _ in sizes]
    fields = {
        "steps": steps, "clock": draw(None, steps + 50, max(1, steps // 2)), "learning_rate": vary(0.01, 0.0),
        "betas": vary((0.9, 0.999), (0.0, 0.95), (0.9999, 0.5)), "max_catch_up": vary(20.0, 1.0, math.inf),
        "max_sqrt_staleness": vary(3.0, math.inf), "max_relative_update": draw(0.0, 0.2, math.inf),
        "maximize": draw(False, True),
    }  # fmt: skip
    starts = [gap, *(gap + end for end in accumulate(size + gap for size in sizes))]
    indices, values = listed(starts.pop(), draw(None, 0.0, 0.4, 1.0), seed, vary("heavy", "special"))
    values = values.abs() if steady else values
    # One layout for all tensors of a parameter, or any for each of them.
    layouts = [[size in IMAGES and draw(False, True) for size in sizes] for _ in range(5 if draw(False, True) else 1)]
    generator = torch.Generator().manual_seed(seed)
    lasts = [torch.randint(0, steps + 1, (n,), generator=generator, dtype=torch.int32) for n in sizes]
    family, parts, chunks = vary("heavy", "special"), vary(adam_numpy._PART, 1000), vary(adam_numpy._CHUNK, 100)

    def make(guarded: Guarded) -> tuple[list[torch.Tensor], kernels.AdamStates]:
        def held(column: list[torch.Tensor], number: int) -> list[torch.Tensor]:
            each = zip(column, kinds, layouts[number % len(layouts)], strict=True)
            return [placed(guarded, values, kind, channels_last=image) for values, kind, image in each]

        floats = [[drawn(family, n, seed + 9 * j + i) for j, n in enumerate(sizes)] for i in range(4)]
        # All gradients and first moments may be positive. First moments of 0 do not vote.
        positive = range(1, 4) if steady else range(2, 4)
        floats = [[v.abs() for v in column] if i in positive else column for i, column in enumerate(floats)]
        floats[2:] = [[small * v for v in column] for column in floats[2:]]
        if steady:
            floats[1] = [torch.where(torch.arange(len(first)) % 5 > 0, first, 0.0) for first in floats[1]]
        floats = [[typed(*each) for each in zip(column, kinds, strict=True)] for column in floats]
        parameters, first, second, maximum, last = (held(column, i) for i, column in enumerate([*floats, lasts]))
        param_rms = [torch.tensor(size, device=guarded.device) for size in rms]
        return parameters, kernels.AdamStates(first, second, last, param_rms, maximum if amsgrad else None)

    with mock.patch.multiple(adam_numpy, _PART=parts, _CHUNK=chunks):
        check(device, make, starts, fields, indices, values, keep)


def test_positions_have_the_names_of_fields() -> None:
    """The kernel reads each number, and each column, where Python writes it."""
    kernel = pytest.importorskip("tritoncomm_kernels.adam_triton")
    for fields in (Scalars._fields, kernel.Row._fields):
        assert [getattr(kernel, name.upper()).value for name in fields] == [*range(len(fields))]


@both
def test_votes(device: str) -> None:
    """Entries of a tensor vote together on how far it catches up, also where a program has several tensors.

    Those of the first disagree, and make up as much as a walk in 25 steps, but not ten outliers. Ten more would be
    outliers if their moments were not so young. A fifth of all have no moment, and do not vote. Those of the second and
    the third agree, so few of the second that they could by chance. They waited for longer than what a steady tensor
    makes up.
    """
    sizes, starts, steps = [400, 30, 400], [0, 400, 430], 200
    waited = [torch.full((size,), late) for size, late in zip(sizes, (25, 100, 100), strict=True)]
    signs = torch.where(torch.arange(sum(sizes)) < sizes[0], torch.arange(sum(sizes)) % 2 * 2 - 1, 1)
    signs[:10] *= 1000
    signs[10:20] *= round(1.5 * OUTLIER)
    moments = torch.where(torch.arange(sum(sizes)) % 5 > 0, 0.5, 0.0)
    fields = {"steps": steps, "max_relative_update": math.inf}

    def make(guarded: Guarded) -> tuple[list[torch.Tensor], kernels.AdamStates]:
        parameters, first, second = (
            [guarded.of(part) for part in values.split(sizes)]
            for values in (torch.ones(sum(sizes)), moments, torch.ones(sum(sizes)))
        )
        last = [guarded.of((steps - late).int()) for late in waited]
        rms = [torch.tensor(1.0, device=guarded.device) for _ in sizes]
        return parameters, kernels.AdamStates(first, second, last, rms)

    check(device, make, starts, fields, None, (signs * torch.cat(waited)).float())


@given(st.lists(st.tuples(st.sampled_from([1, 33, 700, 20_000]), st.sampled_from([*KINDS])), max_size=6), seeds)
@cases(40)
def test_root_mean_squares(tensors: list[tuple[int, str]], seed: int) -> None:
    """Root mean squares of many tensors equal those of each."""
    guarded = Guarded("cpu")
    values = [drawn("special" if seed % 4 == 0 else "heavy", n, seed + j) for j, (n, _) in enumerate(tensors)]
    kinds = [kind for _, kind in tensors]
    each = [placed(guarded, typed(v, kind), kind, channels_last=False) for v, kind in zip(values, kinds, strict=True)]
    with kernels_from("auto"):
        assert list(map(bits, kernels.root_mean_squares(each))) == [bits(kernels.root_mean_square(x)) for x in each]


def states_of(parameters: list[torch.Tensor]) -> kernels.AdamStates:
    """Return new states of ``parameters``, with the same strides."""
    first, second, last = ([torch.zeros_like(each) for each in parameters] for _ in range(3))
    return kernels.AdamStates(first, second, [each.int() for each in last], [torch.tensor(1.0) for _ in parameters])


def prepared() -> tuple[list[torch.Tensor], kernels.AdamStates]:
    """Return two parameters and their states."""
    parameters = [torch.ones(4), torch.ones(3)]
    return parameters, states_of(parameters)


def replace(tensors: list[torch.Tensor]) -> None:
    """Replace a tensor."""
    tensors[1] = tensors[1].clone()


def move(tensors: list[torch.Tensor]) -> None:
    """Replace the memory of a tensor, as ``module.to()`` does."""
    tensors[1].data = tensors[1].clone()


@pytest.mark.parametrize("change", [replace, move])
@pytest.mark.parametrize("column", range(5))
def test_changed_tensors_are_noticed(change: Callable[[list[torch.Tensor]], None], column: int) -> None:
    """holds() returns False after a tensor was replaced or moved."""
    parameters, state = prepared()
    flat = kernels.AdamFlat(parameters, state, [0, 4])
    assert flat.holds(list(parameters), state, [0, 4])
    assert not flat.holds(parameters[:1], state, [0, 4])
    assert not flat.holds(parameters, state, [0, 5])
    change([parameters, *state.columns()][column])
    assert not flat.holds(parameters, state, [0, 4])


def test_turned_parameters_are_noticed() -> None:
    """holds() returns False after a parameter has got other strides in the same memory."""
    parameters = [torch.arange(9.0).reshape(3, 3)]
    state = states_of(parameters)
    flat = kernels.AdamFlat(parameters, state, [0])
    assert flat.holds(parameters, state, [0])
    parameters[0].data = parameters[0].data.t()
    assert not flat.holds(parameters, state, [0])


def test_updates_count_as_in_place() -> None:
    """Autograd notices that a parameter has changed."""
    parameters, state = prepared()
    versions = [parameter._version for parameter in parameters]
    kernels.AdamFlat(parameters, state, [0, 4]).update(None, control_of(), values=torch.ones(7))
    assert all(parameter._version > version for parameter, version in zip(parameters, versions, strict=True))


AT = torch.tensor([0, 2], dtype=torch.int32)
WRONG: dict[str, dict[str, Any]] = {
    "values has 1 elements, expected 2": {"indices": AT, "values": torch.ones(1)},
    "values has dtype torch.float64": {"indices": AT, "values": torch.ones(2, dtype=torch.float64)},
    r"values has shape \(2, 1\)": {"indices": AT, "values": torch.ones(2, 1)},
    "values has 6 elements: without indices, pass all 7": {"indices": None, "values": torch.ones(6)},
    "indices has dtype torch.int64": {"indices": AT.long(), "values": torch.ones(2)},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_gradients_change_nothing(message: str) -> None:
    """A gradient that does not fit is rejected by name, and no tensor has changed."""
    parameters, state = prepared()
    before = [bits(parameter) for parameter in parameters]
    with pytest.raises(ValueError, match=message):
        kernels.AdamFlat(parameters, state, [0, 4]).update(control=None, keep=0.5, **WRONG[message])
    assert [bits(parameter) for parameter in parameters] == before


def test_wrong_states_are_rejected() -> None:
    """Missing states, and states of other shapes, are rejected."""
    parameters, state = prepared()
    with pytest.raises(ValueError, match="one tensor in each field for each of 1 parameters"):
        kernels.AdamFlat(parameters[:1], state, [0])
    with pytest.raises(ValueError, match=r"a state has shape \(4,\) on cpu: expected \(3,\) on cpu"):
        kernels.AdamFlat(parameters[::-1], state, [0, 3])
    with pytest.raises(ValueError, match=r"last has dtype torch.int64: convert it to torch.int32"):
        kernels.AdamFlat(parameters, dataclasses.replace(state, last=[each.long() for each in state.last]), [0, 4])


def strided(image: torch.Tensor) -> torch.Tensor:
    """Return the same values in another order in memory, which is none of torch's formats."""
    return image.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize(
    ("column", "change"),
    [(1, torch.Tensor.bfloat16), (3, strided), (5, torch.Tensor.bfloat16), (5, strided), (0, None)],
)
def test_which_parameters_a_kernel_updates(column: int, change: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """A parameter in ``torch.channels_last`` shares the launch of the others.

    It is left out if any of its states has other strides or another dtype than the kernel writes.
    """
    image = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    columns = [[torch.zeros(7), image.clone()] for _ in range(6)]
    columns[3] = [tensor.int() for tensor in columns[3]]
    columns[4] = [torch.tensor(1.0)] * 2
    if change is not None:
        columns[column][1] = change(columns[column][1])
    flat = kernels.AdamFlat(columns[0], kernels.AdamStates(*columns[1:5], columns[5]), [0, 7])
    found = [(positions, kind.fits) for kind, positions in flat._kinds.items()]
    assert found == ([([0, 1], True)] if change is None else [([0], True), ([1], False)])


def test_strided_parameters_are_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where kernels run, the first parameter that they leave out is logged with its shape, once, and it is updated."""
    monkeypatch.setattr(adam_flat, "triton_runs", lambda tensor: True)
    monkeypatch.setattr(kernels.AdamFlat, "_has_logged", False)
    parameters = [strided(torch.ones(shape)) for shape in ((2, 3, 4, 4), (3, 2, 2, 2))]
    flat = kernels.AdamFlat(parameters, states_of(parameters), [0, 96])
    with caplog.at_level(logging.WARNING, "tritoncomm"):
        for _ in range(2):
            flat.update(torch.tensor([5, 100], dtype=torch.int32), control_of(), values=torch.ones(2))
    (message,) = [record.getMessage() for record in caplog.records]
    assert "no kernel can update a parameter of shape (2, 3, 4, 4)" in message
    assert "parameter.data.contiguous()" in message
    assert [int((parameter != 1).sum()) for parameter in parameters] == [1, 1]
