"""Results do not depend on ``torch.set_default_dtype``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import tritoncomm
from tritoncomm import Recipe

import laws
from recipes import under_test

NUMEL, WORKERS = 700, 2
RECIPES = under_test(0.02)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create tensors in ``dtype`` where the code gives none."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def run(recipe: Recipe) -> list[torch.Tensor]:
    """Return the means and the residuals of some simulated steps."""
    case = laws.fitted(laws.Case(WORKERS, NUMEL, ()), recipe)
    world = tritoncomm.SimulatedWorld(recipe, case.world_size, case.numel)
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(laws.steps_of(recipe)):
        gradients = torch.randn(case.world_size, case.numel, generator=generator, dtype=torch.float32)
        found += [part for mean in world.step(gradients) for part in (mean.indices, mean.values)]
        found.append(world.residuals.clone())
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_simulated_equivalence(name: str) -> None:
    """Every recipe delivers the same bits, and keeps the same residuals."""
    expected = run(RECIPES[name])
    with default_dtype(torch.bfloat16):
        found = run(RECIPES[name])
    assert all(
        tensor.dtype == wanted.dtype and torch.equal(tensor, wanted)
        for tensor, wanted in zip(found, expected, strict=True)
    )
