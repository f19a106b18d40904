"""Random-block and random-k: the shared random numbers, coverage, and waiting times."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tritoncomm import RandomBlock
from tritoncomm.primitives.shared_random import below, draw, draws

from baselines import RandomK
from baselines.random_k import all_below

VECTORS = [
    (0, 0, 0, 1000, 0x2130748AAAC80268, 129),
    (0, 1, 0, 1000, 0x68AC638DA2EDDA0C, 408),
    (0, 0, 1, 1000, 0x97693BFC00425025, 591),
    (42, 7, 3, 25557032, 0x6973108F51561EDA, 10527248),
    (42, 8, 3, 25557032, 0x4F23915A4B094773, 7900610),
    (123456789, 1000000, 17, 4096, 0x92647B6FD9067FBF, 2342),
]


@pytest.mark.parametrize(("seed", "step", "unit", "bound", "bits", "number"), VECTORS)
def test_shared_draws(seed: int, step: int, unit: int, bound: int, bits: int, number: int) -> None:
    """Random numbers match the published vectors, one by one and in bulk."""
    assert draw(seed, step, unit) == bits
    assert below(bits, bound) == number
    lanes = draws(seed, step, unit, 5)
    assert [int(lane) for lane in lanes] == [draw(seed, step, unit, lane) for lane in range(5)]
    assert all_below(lanes, np.full(5, bound)).tolist() == [below(int(lane), bound) for lane in lanes]


def blocks_of(recipe: RandomBlock, numel: int, steps: int) -> list[torch.Tensor]:
    """Return a boolean mask of the exchanged coordinates for each step."""
    algorithm, masks = recipe.build(numel), []
    for step in range(steps):
        mask = torch.zeros(numel, dtype=torch.bool)
        for start, stop in algorithm.ranges(step):
            assert 0 <= start < stop <= numel
            mask[start:stop] = True
        masks.append(mask)
    return masks


@given(st.sampled_from(["wrap", "grid", "perm"]), st.integers(2, 200), st.floats(0.05, 0.9), st.integers(0, 99))
def test_blocks_are_contiguous(mode: str, numel: int, density: float, seed: int) -> None:
    """A step exchanges one contiguous block of the requested size. Only the last block of a grid may be shorter."""
    recipe = RandomBlock(density=density, mode=mode, seed=seed, alignment=1)
    size = recipe.build(numel).size
    assert size == max(1, int(density * numel))
    for mask in blocks_of(recipe, numel, 20):
        edges = int((mask != mask.roll(1)).sum())
        assert edges in (0, 2)
        assert int(mask.sum()) == size or (mode != "wrap" and int(mask.sum()) == numel % size and mask[-1])


def test_perm_visits_every_block_once_a_round() -> None:
    """In perm mode each coordinate is visited once in M steps, and at most 2M - 1 steps lie between two visits."""
    masks = torch.stack(blocks_of(RandomBlock(density=0.1, alignment=1), 100, 200)).int()
    for first in range(0, 200, 10):
        assert (masks[first : first + 10].sum(0) == 1).all()
    for column in masks.t():
        visits = column.nonzero().flatten()
        assert int((visits[1:] - visits[:-1]).max()) <= 19
    orders = {tuple(masks[first : first + 10].argmax(1).tolist()) for first in range(0, 200, 10)}
    assert len(orders) > 15


@pytest.mark.parametrize(("mode", "expected"), [("grid", 15.0), ("wrap", 15.0), ("perm", 0.58 * 16)])
def test_waiting_time(mode: str, expected: float) -> None:
    """A value waits (1 - p) / p steps with independent draws and about 0.58 / p steps with permutations."""
    masks = torch.stack(blocks_of(RandomBlock(density=1 / 16, mode=mode, alignment=1), 64, 6000))
    age, total, count = torch.zeros(64), 0.0, 0
    for mask in masks:
        total += float(age.sum())
        count += 64
        age = torch.where(mask, torch.zeros(64), age + 1)
    assert total / count == pytest.approx(expected, rel=0.12)


def test_low_density_warns() -> None:
    """A density below 1/32 warns with the learning rate and the fix. ``reduced_lr=True`` silences the warning."""
    with pytest.warns(UserWarning, match=r"density 0.01.*about 0.01 of the learning rate.*reduced_lr=True"):
        RandomBlock(density=0.01)
    RandomBlock(density=0.01, reduced_lr=True)
    RandomBlock(density=1 / 32)


def test_grid_is_aligned() -> None:
    """Blocks of a grid start at multiples of 128 elements by default."""
    algorithm = RandomBlock(density=0.05).build(10_000)
    assert algorithm.size == 512
    assert all(start % 128 == 0 for step in range(20) for start, _ in algorithm.ranges(step))


@pytest.mark.parametrize("mode", ["wrap", "grid", "perm"])
def test_empty_vector_has_a_forecast(mode: str) -> None:
    """A vector without elements has no block. Its step is dense, and sends nothing."""
    algorithm = RandomBlock(density=0.25, mode=mode).build(0)
    for ordinary in (False, True):
        assert all(flow.sent.bytes == 0 for flow in algorithm.predicted_traffic(3, ordinary=ordinary).phases.values())


def test_random_k_is_uniform_and_without_replacement() -> None:
    """Random-k draws k distinct coordinates per step, each equally often (chi-square)."""
    algorithm, steps = RandomK(density=0.1, seed=3).build(200), 4000
    drawn = torch.stack([algorithm.indices(step) for step in range(steps)])
    assert (drawn[:, 1:] > drawn[:, :-1]).all()
    counts = torch.bincount(drawn.flatten().long(), minlength=200)
    expected = steps * 0.1
    chi_square = float((counts - expected).square().sum() / expected / 0.9)
    assert abs(chi_square - 180) < 4 * math.sqrt(2 * 180)
