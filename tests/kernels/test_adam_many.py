"""The Adam update of many tensors equals one update per tensor, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

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


def in_buffers(state: kernels.AdamStates, gap: int) -> kernels.AdamStates:
    """Return the same states as parts of one buffer per field, with ``gap`` other values after each."""

    def joined(column: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        padded = [torch.cat([each, torch.ones(gap, dtype=each.dtype)]) for each in column]
        parts = torch.split(torch.cat(padded), list(map(len, padded)))
        return [part[: len(each)] for part, each in zip(parts, column, strict=True)]

    maximum = None if state.maximum is None else joined(state.maximum)
    return kernels.AdamStates(joined(state.first), joined(state.second), joined(state.last), state.param_rms, maximum)


def values_at(gradient: torch.Tensor, at: torch.Tensor | None) -> torch.Tensor:
    """Return the values of ``gradient`` at the delivered coordinates."""
    return (gradient if at is None else gradient[at]).to(torch.float32).contiguous()


shares = st.sampled_from([None, 0.0, 0.01, 1.0])  # of the coordinates that are delivered


@given(
    st.lists(st.tuples(st.sampled_from(SIZES), st.sampled_from(KINDS), shares), max_size=6),
    st.integers(0, 2**20),
    st.booleans(),
    st.data(),
)
@cases(60)
def test_equals_one_by_one(
    tensors: list[tuple[int, str, float | None]], seed: int, amsgrad: bool, data: st.DataObject
) -> None:
    """Sizes, kinds and delays may be mixed. A delay may be longer than the table of decays. Values may be given.

    Tensors may be updated in one or in several parts, and the entries of a part in one or in several chunks.
    """
    gap = data.draw(st.sampled_from([None, 0, 3]))
    if gap is not None:  # only fp32 may be in one buffer
        tensors = [(n, "fp32", share) for n, _, share in tensors]
    sizes, kinds = [n for n, _, _ in tensors], [kind for _, kind, _ in tensors]
    steps = data.draw(st.sampled_from([1, 2, 30, 1000, 70_000, 1_000_000]))
    keep = data.draw(st.sampled_from([1.0, 0.999]))
    control = kernels.AdamControl.of(
        steps=steps,
        learning_rate=data.draw(st.sampled_from([0.0, 0.01])),
        betas=data.draw(st.sampled_from([(0.9, 0.999), (0.0, 0.95), (0.9999, 0.5)])),
        epsilon=1e-8,
        max_catch_up=data.draw(st.sampled_from([1.0, 20.0, math.inf])),
        max_sqrt_staleness=data.draw(st.sampled_from([3.0, math.inf])),
        max_relative_update=data.draw(st.sampled_from([0.0, 0.2, math.inf])),
        device=torch.device("cpu"),
        maximize=data.draw(st.booleans()),
    )
    generator = torch.Generator().manual_seed(seed)
    gradients = [tensor(kind, n, seed + 10 * j + 4) for j, (n, kind, _) in enumerate(tensors)]
    delivered = [
        None if share is None else (torch.rand(n, generator=generator) < share).nonzero().squeeze(1)
        for n, _, share in tensors
    ]
    values = [values_at(gradient, at) for gradient, at in zip(gradients, delivered, strict=True)]
    given = data.draw(st.sampled_from([None, values]))
    results = []
    with kernels_from("auto"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam_numpy, "_PART", data.draw(st.sampled_from([adam_numpy._PART, 1000])))
        patch.setattr(adam_numpy, "_CHUNK", data.draw(st.sampled_from([adam_numpy._CHUNK, 100])))
        for together in (False, True):
            parameters = [tensor(kind, n, seed + 10 * j) for j, (n, kind, _) in enumerate(tensors)]
            state = states(sizes, kinds, seed, amsgrad=amsgrad, steps=steps)
            if together:
                state = state if gap is None or not tensors else in_buffers(state, gap)
                kernels.AdamMany(parameters, state).update(gradients, control, delivered, keep=keep, values=given)
            else:
                for j, parameter in enumerate(parameters):
                    parameter.mul_(keep)
                    kernels.adam_update(parameter, gradients[j], state.at(j), control, delivered[j])
            results.append([bits(each) for column in (parameters, *state.columns()) for each in column])
    assert results[0] == results[1]


@pytest.mark.parametrize("part", [1000, 1 << 16])
def test_whole_tensors_with_gaps_between_their_states(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of whole tensors may be apart in their buffers, for example if other parameters take no step."""
    monkeypatch.setattr(adam_numpy, "_PART", part)
    sizes, control = (
        [700, 20_000, 33],
        kernels.AdamControl.of(
            steps=9, learning_rate=0.1, betas=(0.9, 0.99), epsilon=1e-8, max_catch_up=20, device=torch.device("cpu")
        ),
    )
    gradients = [tensor("fp32", n, 10 * j + 5) for j, n in enumerate(sizes)]
    results = []
    with kernels_from("auto"):
        for together in (False, True):
            parameters = [tensor("fp32", n, 10 * j + 1) for j, n in enumerate(sizes)]
            state = in_buffers(states(sizes, ["fp32"] * 3, 1, amsgrad=False, steps=9), 3)
            if together:
                kernels.AdamMany(parameters, state).update(gradients, control, [None] * 3)
            else:
                for j, parameter in enumerate(parameters):
                    kernels.adam_update(parameter, gradients[j], state.at(j), control)
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
    many = kernels.AdamMany(parameters, state)
    assert many.holds(list(parameters), state)
    assert not many.holds(parameters[:1], state)
    change([parameters, *state.columns()][column])
    assert not many.holds(parameters, state)


def test_turned_parameters_are_noticed() -> None:
    """holds() returns False after a parameter has got other strides in the same memory."""
    parameter = torch.arange(9.0).reshape(3, 3)
    state = kernels.AdamStates(
        *([torch.zeros(3, 3)] for _ in range(2)), [torch.zeros(3, 3, dtype=torch.int32)], [torch.ones(())]
    )
    many, flat = kernels.AdamMany([parameter], state), kernels.AdamFlat([parameter], state, [0])
    assert many.holds([parameter], state)
    assert flat.holds([parameter], state, [0])
    parameter.data = parameter.data.t()
    assert not many.holds([parameter], state)
    assert not flat.holds([parameter], state, [0])


@pytest.mark.parametrize("at", [None, [1, 3]])
def test_given_values_replace_gradients(at: list[int] | None) -> None:
    """Where values are given, gradients are not read."""
    indices = None if at is None else torch.tensor(at)
    gradient, results = torch.randn(4, generator=torch.Generator().manual_seed(1)), []
    control = kernels.AdamControl.of(
        steps=3, learning_rate=0.1, betas=(0.9, 0.99), epsilon=1e-8, max_catch_up=20, device=torch.device("cpu")
    )
    for values in (None, [values_at(gradient, indices)]):
        parameter, state = torch.ones(4), states([4], ["fp32"], 1, amsgrad=False, steps=3)
        read = gradient if values is None else torch.full((4,), math.nan)
        with kernels_from("auto"):
            kernels.AdamMany([parameter], state).update([read], control, [indices], values=values)
        results.append([bits(tensor) for tensor in (parameter, *(column[0] for column in state.columns()))])
    assert results[0] == results[1]


@pytest.mark.parametrize("values", [torch.ones(1), torch.ones(2, dtype=torch.float64), torch.ones(2, 1)])
def test_wrong_values_are_rejected(values: torch.Tensor) -> None:
    """There is one fp32 value per delivered coordinate."""
    parameters, state = prepared()
    at = [torch.tensor([0, 2]), None]
    with pytest.raises(ValueError, match=r"values\[0\] is .* expected float32 of shape \(2,\)"):
        kernels.AdamMany(parameters, state).update(parameters, None, at, values=[values, torch.ones(3)])


def test_updates_count_as_in_place() -> None:
    """Autograd notices that a parameter has changed."""
    parameters, state = prepared()
    versions = [parameter._version for parameter in parameters]
    control = kernels.AdamControl.of(
        steps=1, learning_rate=0.1, betas=(0.9, 0.99), epsilon=1e-8, max_catch_up=20, device=torch.device("cpu")
    )
    kernels.AdamMany(parameters, state).update([torch.ones(4), torch.ones(3)], control, [None, None])
    assert all(parameter._version > version for parameter, version in zip(parameters, versions, strict=True))


@pytest.mark.parametrize("at", [[-1, 2], [0, 3]])
def test_wrong_indices_change_nothing(at: list[int]) -> None:
    """An index outside its parameter raises an error, and no tensor has changed."""
    parameters, state = prepared()
    control = kernels.AdamControl.of(
        steps=1, learning_rate=0.1, betas=(0.9, 0.99), epsilon=1e-8, max_catch_up=20, device=torch.device("cpu")
    )
    many, before = kernels.AdamMany(parameters, state), [bits(parameter) for parameter in parameters]
    with kernels_from("auto"), pytest.raises(ValueError, match=r"indices\[1\] has an index outside \[0, 3\)"):
        many.update([torch.ones(4), torch.ones(3)], control, [None, torch.tensor(at)], keep=0.5)
    assert [bits(parameter) for parameter in parameters] == before


def test_wrong_shapes_are_rejected() -> None:
    """Missing states, and states or gradients of other shapes, are rejected."""
    parameters, state = prepared()
    with pytest.raises(ValueError, match="one tensor in each field for each of 1 parameters"):
        kernels.AdamMany(parameters[:1], state)
    with pytest.raises(ValueError, match=r"a state has shape \(4,\) on cpu: expected \(3,\) on cpu"):
        kernels.AdamMany(parameters[::-1], state)
    with pytest.raises(ValueError, match=r"gradients have shapes .*3.*4.* expected"):
        kernels.AdamMany(parameters, state).update(parameters[::-1], None, [None, None])
