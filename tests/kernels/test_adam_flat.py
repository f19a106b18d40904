"""The Adam update of a flat list equals one update per tensor, bit for bit. Here, on the CPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import adam_oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import bits, cases, drawn, kernels_from

import tritoncomm_kernels as kernels
from tritoncomm_kernels import adam_numpy

SIZES = [0, 1, 33, 700, 20_000]  # the last one alone fills a part
KINDS = ("fp32", "fp32", "fp32", "half", "double", "strided")
DTYPES = {"half": torch.bfloat16, "double": torch.float64}


def tensor(kind: str, n: int, seed: int, *, positive: bool = False) -> torch.Tensor:
    """Return ``n`` values of a kind of tensor, a quarter of them special if the seed is a multiple of 4."""
    values = drawn("special" if seed % 4 == 0 else "heavy", n, seed)
    values = (values.abs() if positive else values).to(DTYPES.get(kind, torch.float32))
    if kind != "strided":
        return values
    held = torch.zeros(2 * n, dtype=values.dtype)[::2]
    return held.copy_(values)


def states(sizes: list[int], kinds: list[str], seed: int, *, amsgrad: bool, steps: int) -> kernels.AdamStates:
    """Return states of parameters of these sizes and kinds."""
    generator = torch.Generator().manual_seed(seed)

    def column(i: int) -> list[torch.Tensor]:
        return [
            tensor(kind, n, seed + 10 * j + i, positive=i > 1)
            for j, (kind, n) in enumerate(zip(kinds, sizes, strict=True))
        ]

    last = [torch.randint(0, steps, (n,), generator=generator, dtype=torch.int32) for n in sizes]
    rms = [torch.tensor([0.0, 0.01, 3.0, math.inf, math.nan][(seed + j) % 5]) for j in range(len(sizes))]
    return kernels.AdamStates(column(1), column(2), last, rms, column(3) if amsgrad else None)


def places(sizes: list[int], gap: int) -> tuple[list[int], int]:
    """Return the start of each tensor in a flat vector, ``gap`` elements behind the one before, and its length."""
    starts = [gap, *(gap + end for end in accumulate(size + gap for size in sizes))]
    return starts[:-1], starts[-1]


def one_by_one(
    parameters: list[torch.Tensor],
    state: kernels.AdamStates,
    starts: list[int],
    control: kernels.AdamControl,
    *,
    indices: torch.Tensor | None,
    values: torch.Tensor,
    keep: float,
) -> None:
    """Do what ``AdamFlat.update`` does with the oracle."""
    for i, (parameter, start) in enumerate(zip(parameters, starts, strict=True)):
        parameter.mul_(keep)
        inside = slice(start, start + parameter.numel())
        at = None
        if indices is not None:
            inside = (indices >= start) & (indices < start + parameter.numel())
            at = (indices[inside] - start).long()
        gradient = torch.zeros(parameter.numel(), dtype=parameter.dtype)
        gradient[... if at is None else at] = values[inside].to(parameter.dtype)
        adam_oracle.update(parameter, gradient.view(parameter.shape), adam_oracle.State.of(state, i), control, at)


@given(
    st.lists(st.tuples(st.sampled_from(SIZES), st.sampled_from(KINDS)), max_size=6),
    st.integers(0, 2**20),
    st.booleans(),
    st.data(),
)
@cases(80)
def test_equals_one_by_one(tensors: list[tuple[int, str]], seed: int, amsgrad: bool, data: st.DataObject) -> None:
    """Sizes, kinds and delays may be mixed. A delay may be longer than the table of decays. All may be delivered.

    Tensors may be updated in one or in several parts, and the entries of a part in one or in several chunks.
    """
    sizes, kinds = [n for n, _ in tensors], [kind for _, kind in tensors]
    starts, end = places(sizes, data.draw(st.sampled_from([0, 3])))
    steps = data.draw(st.sampled_from([1, 2, 30, 1000, 70_000, 1_000_000]))
    control = kernels.AdamControl.of(
        steps=steps,
        clock=data.draw(st.sampled_from([None, steps + 50, max(1, steps // 2)])),
        learning_rate=data.draw(st.sampled_from([0.0, 0.01])),
        betas=data.draw(st.sampled_from([(0.9, 0.999), (0.0, 0.95), (0.9999, 0.5)])),
        epsilon=1e-8,
        max_catch_up=data.draw(st.sampled_from([1.0, 20.0, math.inf])),
        max_sqrt_staleness=data.draw(st.sampled_from([3.0, math.inf])),
        max_relative_update=data.draw(st.sampled_from([0.0, 0.2, math.inf])),
        device=torch.device("cpu"),
        maximize=data.draw(st.booleans()),
    )
    share = data.draw(st.sampled_from([None, 0.0, 0.01, 1.0]))  # of the coordinates that are delivered
    indices, values = None, drawn("special" if seed % 4 == 0 else "heavy", end, seed)
    if share is not None:
        indices = (torch.rand(end, generator=torch.Generator().manual_seed(seed)) < share).nonzero().squeeze(1).int()
        padding = seed % 3
        values = torch.cat([values[indices.long()], torch.zeros(padding)])
        indices = torch.cat([indices, torch.full((padding,), -1, dtype=torch.int32)])
    arguments = {"indices": indices, "values": values, "keep": data.draw(st.sampled_from([1.0, 0.999]))}
    results = []
    with kernels_from("auto"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam_numpy, "_PART", data.draw(st.sampled_from([adam_numpy._PART, 1000])))
        patch.setattr(adam_numpy, "_CHUNK", data.draw(st.sampled_from([adam_numpy._CHUNK, 100])))
        for together in (False, True):
            parameters = [tensor(kind, n, seed + 10 * j) for j, (n, kind) in enumerate(tensors)]
            state = states(sizes, kinds, seed, amsgrad=amsgrad, steps=steps)
            if together:
                kernels.AdamFlat(parameters, state, starts).update(control=control, **arguments)
            else:
                one_by_one(parameters, state, starts, control, **arguments)
            results.append([bits(each) for column in (parameters, *state.columns()) for each in column])
    assert results[0] == results[1]


@given(st.lists(st.tuples(st.sampled_from(SIZES[1:]), st.sampled_from(KINDS)), max_size=6), st.integers(0, 2**20))
@cases(40)
def test_root_mean_squares(tensors: list[tuple[int, str]], seed: int) -> None:
    """Root mean squares of many tensors equal those of each."""
    each = [tensor(kind, n, seed + j) for j, (n, kind) in enumerate(tensors)]
    assert [bits(found) for found in kernels.root_mean_squares(each)] == [
        bits(kernels.root_mean_square(one)) for one in each
    ]


def prepared() -> tuple[list[torch.Tensor], kernels.AdamStates]:
    """Return two parameters and their states."""
    return [torch.ones(4), torch.ones(3)], states([4, 3], ["fp32", "fp32"], 1, amsgrad=False, steps=1)


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
    parameter = torch.arange(9.0).reshape(3, 3)
    state = kernels.AdamStates(
        *([torch.zeros(3, 3)] for _ in range(2)), [torch.zeros(3, 3, dtype=torch.int32)], [torch.ones(())]
    )
    flat = kernels.AdamFlat([parameter], state, [0])
    assert flat.holds([parameter], state, [0])
    parameter.data = parameter.data.t()
    assert not flat.holds([parameter], state, [0])


def test_updates_count_as_in_place() -> None:
    """Autograd notices that a parameter has changed."""
    parameters, state = prepared()
    versions = [parameter._version for parameter in parameters]
    control = kernels.AdamControl.of(
        steps=1, learning_rate=0.1, betas=(0.9, 0.99), epsilon=1e-8, max_catch_up=20, device=torch.device("cpu")
    )
    kernels.AdamFlat(parameters, state, [0, 4]).update(None, control, values=torch.ones(7))
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
