"""The estimate of the norm of a mean of vectors."""

from __future__ import annotations

import pytest
import torch
from tritoncomm.primitives.mean_norm import WIDTH, gain_of_mean, norm_of_mean, random_signs, sketch
from tritoncomm.scheduler.simulated import SimulatedScheduler


def gradient(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Return a gradient of a linear layer: a sum of four outer products, whose rows are alike."""
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(rows, 4, generator=generator), torch.randn(4, columns, generator=generator)
    return (left @ right).flatten()


@pytest.mark.parametrize("size", [6_000, 600_000])
@pytest.mark.parametrize("columns", [1, 3, 128, 509, 512])
def test_norm_of_alike_rows(columns: int, size: int) -> None:
    """The estimate is close to the norm, also where rows of a matrix are correlated."""
    errors = []
    for seed in range(20):
        vector = gradient(size // columns, columns, seed)
        norm = sketch(vector, random_signs(vector.numel(), "cpu")).norm() / vector.norm()
        errors.append(float(norm) - 1)
    spread = torch.tensor(errors).square().mean().sqrt()
    assert spread < 0.06


@pytest.mark.parametrize("numel", [140_000, 300_000, 3_000_000])
def test_norm_of_vectors_of_one_sign(numel: int) -> None:
    """Nor does it matter that all entries are equal, or positive, as gradients behind a ReLU may be."""
    generator, signs = torch.Generator().manual_seed(0), random_signs(numel, "cpu")
    rows = torch.rand(numel // 1000, 1, generator=generator) * torch.rand(1, 1000, generator=generator)
    for vector in (torch.ones(numel), torch.randn(numel, generator=generator).abs(), rows.flatten()):
        assert float(sketch(vector, signs).norm() / vector.norm()) == pytest.approx(1.0, abs=0.12)  # four deviations


def test_norm_of_huge_entries() -> None:
    """Squares that overflow in fp32 do not make a finite norm infinite."""
    vector = torch.full((WIDTH,), 1e20)
    (norm,) = SimulatedScheduler(1).run([norm_of_mean(sketch(vector, random_signs(WIDTH, "cpu")), 1)])
    assert float(norm) == pytest.approx(float(vector.double().norm()))


@pytest.mark.parametrize("numel", [0, 1, 508, 509, 510, 5000])
def test_mean_over_ranks(numel: int) -> None:
    """All ranks have the norm of the mean of their vectors, not the mean of the norms."""
    vectors = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    signs = random_signs(numel, "cpu")
    norms = SimulatedScheduler(3).run([norm_of_mean(sketch(vector, signs), 3) for vector in vectors])
    assert len({float(norm) for norm in norms}) == 1
    exact = torch.stack(vectors).mean(0).norm()
    # A vector that is not longer than the sketch loses nothing.
    assert float(norms[0]) == pytest.approx(float(exact), rel=1e-5 if numel <= WIDTH else 0.15)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 17])
def test_gain_of_mean(world_size: int) -> None:
    """The mean of equal vectors is as long as they are, that of independent ones shorter by the root of their number.

    Vectors that cancel, and vectors of zeros, have a finite gain.
    """
    signs = random_signs(20_000, "cpu")

    def gain(vectors: list[torch.Tensor]) -> float:
        found = SimulatedScheduler(world_size).run(
            [gain_of_mean(vector, sketch(vector, signs), world_size) for vector in vectors]
        )
        assert len(set(map(float, found))) == 1
        return float(found[0])

    every = [torch.randn(20_000, generator=torch.Generator().manual_seed(rank)) for rank in range(world_size)]
    assert gain(every) == pytest.approx(world_size**0.5, rel=0.1)
    assert gain(every[:1] * world_size) == pytest.approx(1.0, abs=0.1)
    assert gain([torch.zeros(20_000)] * world_size) == 1.0
    if world_size % 2 == 0:
        assert gain([every[0], -every[0]] * (world_size // 2)) == pytest.approx(world_size**0.5)


def test_norm_of_several_vectors() -> None:
    """The sum of sketches with other signs is a sketch of all vectors. With the same signs, equal vectors add up."""
    vectors = [torch.ones(100_000)] * 4
    exact = 400_000**0.5
    signs = [random_signs(100_000, "cpu", seed) for seed in range(4)]
    total = torch.stack([sketch(vector, own) for vector, own in zip(vectors, signs, strict=True)]).sum(0)
    assert float(total.norm()) == pytest.approx(exact, rel=0.12)
    same = torch.stack([sketch(vector, signs[0]) for vector in vectors]).sum(0)
    assert float(same.norm()) > 1.8 * exact
