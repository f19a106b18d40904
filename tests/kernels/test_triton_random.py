"""Five kernels on many random cases: in the interpreter and compiled, each equals the reference, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from kernel_cases import DEVICES, FAMILIES, THRESHOLDS, Guarded, agree, bits, drawn, sparse

import tritoncomm_kernels as kernels
from depth import trials
from ptx.launch import EXECUTOR, ORDERS

Drawn = np.random.Generator


def values(rng: Drawn, n: int) -> torch.Tensor:
    """Return random values of a random family."""
    return drawn(rng.choice(FAMILIES), n, int(rng.integers(2**31)))


def top(rng: Drawn) -> Callable[[Guarded], object]:
    """Return the largest elements of segments."""
    n = int(rng.integers(1, 300))
    vector, cut = values(rng, n), int(rng.integers(0, n + 1))
    budgets = torch.from_numpy(rng.integers(0, 40, 2)).int()

    def call(guarded: Guarded) -> object:
        x, cuts = guarded.of(vector), guarded.of(torch.tensor([0, cut, n], dtype=torch.int32))
        found = kernels.top_k_rows(x, cuts, guarded.of(budgets), 30, workspace=kernels.Workspace())
        return [bits(part) for part in found]

    return call


def mark(rng: Drawn) -> Callable[[Guarded], object]:
    """Return marks of the elements that reach a threshold."""
    n = int(rng.integers(1, 300))
    vector, limit = values(rng, n), torch.tensor([rng.choice(THRESHOLDS)], dtype=torch.float32)

    def call(guarded: Guarded) -> object:
        x = guarded.of(vector)
        marks = kernels.Marks.empty(n, x.device, tile=64)
        kernels.mark(x, None, x, limit.to(x.device), marks)
        return [bits(part) for part in marks]

    return call


def expand(rng: Drawn) -> Callable[[Guarded], object]:
    """Return the entries of random marks, up to a random capacity."""
    n, room = int(rng.integers(1, 300)), int(rng.integers(1, 300))
    vector, limit = values(rng, n), torch.tensor([rng.choice(THRESHOLDS)], dtype=torch.float32)

    def call(guarded: Guarded) -> object:
        x = guarded.of(vector)
        marks = kernels.Marks.empty(n, x.device, tile=64)
        kernels.mark(x, None, x, limit.to(x.device), marks)
        indices, out, found = guarded.poison(room, torch.int32), guarded.poison(room), guarded.poison(1, torch.int64)
        kernels.expand(x, marks, indices, out, found)
        return [bits(part) for part in (indices, out, found)]

    return call


def merge(rng: Drawn) -> Callable[[Guarded], object]:
    """Return the union of lists, and the sums of their values."""
    n = int(rng.integers(1, 300))
    lists = [sparse(n, rng.random(), int(rng.integers(2**31)), rng.choice(FAMILIES)) for _ in range(2)]

    def call(guarded: Guarded) -> object:
        union, sums = kernels.merge([(guarded.of(at), guarded.of(each)) for at, each in lists], n)
        return bits(union), bits(sums)

    return call


def rebalance(rng: Drawn) -> Callable[[Guarded], object]:
    """Return moved partitions."""
    partitions = int(rng.integers(1, 40))
    blocks = torch.from_numpy(rng.integers(0, 40, partitions)).int()
    counts = torch.from_numpy(10 ** rng.uniform(0, 5, partitions)).int()
    numbers = {"iteration": int(rng.integers(-100, 10**6)), "block": 32, "numel": max(1, int(blocks.sum()) * 32)}
    rule, least = str(rng.choice(["paper", "prefix"])), int(rng.integers(0, 10))

    def call(guarded: Guarded) -> object:
        own, bounds = guarded.of(blocks), guarded.poison(partitions + 1, torch.int32)
        kernels.rebalance(own, bounds, guarded.of(counts), rule=rule, min_blocks=least, **numbers)
        return bits(own), bits(bounds)

    return call


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", trials([0], [*range(0, 10_000, 500)]))
@pytest.mark.parametrize("case", [top, mark, expand, merge, rebalance], ids=lambda case: case.__name__)
def test_random_cases(
    device: str, first: int, case: Callable[[Drawn], Callable[[Guarded], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deep run has 10,000 cases of each. In the executor, each case runs in one order, and the next in another."""
    for seed in range(first, first + trials(2, 500)):
        monkeypatch.setattr(EXECUTOR, "orders", (ORDERS[seed % len(ORDERS)],))
        agree(case(np.random.default_rng(seed)), device)
