"""Selection in units of Adam's step: the moment, the scale made of it, and where it is used."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch
import tritoncomm
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from tritoncomm import ConfigurationError, NonFiniteError, OkTopk, SimulatedWorld, SparseVector, TopkAllgather, Warmup
from tritoncomm.algorithms import Preconditioned
from tritoncomm.checkpoint import reshard
from tritoncomm.factored import Matrices
from tritoncomm.saved_state import written

SHAPES = st.lists(st.lists(st.integers(0, 5), min_size=0, max_size=3).map(tuple), min_size=0, max_size=4)


def as_matrices(dense: torch.Tensor, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """The oracle's view: one matrix per tensor; a vector is one cell, its mean."""
    parts = torch.split(dense, [math.prod(shape) for shape in shapes])
    return [
        part.reshape(shape[0], math.prod(shape[1:])) if len(shape) > 1 else part.reshape(1, -1)
        for part, shape in zip(parts, shapes, strict=True)
    ]


@given(shapes=SHAPES, seed=st.integers(0, 1000), share=st.sampled_from([0.0, 0.2, 1.0]), exponent=st.integers(-60, 60))
@settings(deadline=None)
def test_sums(shapes: list[tuple[int, ...]], seed: int, share: float, exponent: int) -> None:
    """Of squares by row and by column, of tensors of any shape, to 40 bits of the largest."""
    matrices, generator = Matrices(shapes), torch.Generator().manual_seed(seed)
    dense = torch.randn(matrices.numel, generator=generator) * 2.0**exponent
    dense[torch.rand(matrices.numel, generator=generator) >= share] = 0.0
    indices = dense.nonzero().reshape(-1)
    rows, columns = matrices.sums(SparseVector(indices.int(), dense[indices], matrices.numel))
    squares = [part.double().square() for part in as_matrices(dense, shapes)]
    by_row = [part.sum(1) for part in squares]
    by_column = [
        part.sum(0) if len(shape) > 1 else part.sum().reshape(1) for part, shape in zip(squares, shapes, strict=True)
    ]
    largest = float(dense.double().square().max()) if len(dense) else 0.0
    for found, parts in ((rows, by_row), (columns, by_column)):
        expected = torch.cat([rows[:0], *parts])
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, rtol=1e-11, atol=largest * 2.0**-40)


def test_sums_do_not_depend_on_the_order() -> None:
    """Entries in any order, as atomic additions of a GPU would take them: the same bits."""
    matrices = Matrices([(30, 40)])
    values = torch.randn(1200, generator=torch.Generator().manual_seed(0)) ** 5
    expected = matrices.sums(SparseVector.full(values))
    for seed in range(5):
        order = torch.randperm(1200, generator=torch.Generator().manual_seed(seed))
        found = matrices.sums(SparseVector(order.int(), values[order], 1200))
        assert all(map(torch.equal, found, expected))


@given(seed=st.integers(0, 1000), power=st.sampled_from([0.0, 0.5, 1.0]))
@settings(deadline=None)
def test_root(seed: int, power: float) -> None:
    """A second moment that is a product of rows and columns is found again, as the nearest power of two."""
    generator = torch.Generator().manual_seed(seed)
    shapes, floor = [(4, 6), (3, 2, 5), (7,)], 1e-3
    moments = [
        torch.outer(torch.rand(4, generator=generator), torch.rand(6, generator=generator)).double(),
        1e-4 * torch.outer(torch.rand(3, generator=generator), torch.rand(10, generator=generator)).double(),
        torch.full((1, 7), 0.3, dtype=torch.float64),
    ]
    rows = torch.cat([moment.sum(1) for moment in moments])
    columns = torch.cat([moments[0].sum(0), moments[1].sum(0), moments[2].sum().reshape(1)])
    scale = Matrices(shapes).root(rows, columns, power=power, floor=floor)
    flat = torch.cat([moment.reshape(-1) for moment in moments])
    exact = (flat / flat.mean() + floor) ** power
    assert scale.dtype == torch.float32
    assert (torch.frexp(scale).mantissa == 0.5).all()
    assert ((scale / exact).log2().abs() <= 0.5 + 1e-6).all()


def test_nothing_delivered() -> None:
    """Without a moment the scale is 1, and a vector may be empty."""
    matrices = Matrices([(2, 3)])
    zeros = matrices.sums(SparseVector.full(torch.zeros(6)))
    assert torch.equal(matrices.root(*zeros, power=0.5, floor=1e-3), torch.ones(6))
    empty = Matrices([])
    assert empty.root(*empty.sums(SparseVector.full(torch.zeros(0))), power=0.5, floor=1e-3).shape == (0,)


def delivered(recipe: tritoncomm.Recipe, steps: int) -> torch.Tensor:
    """How often each row of a matrix arrives whose last row has gradients a twentieth as large as the others."""
    world, generator = SimulatedWorld(recipe, 2, 80), torch.Generator().manual_seed(0)
    counts = torch.zeros(80)
    for step in range(steps):
        gradient = torch.randn(2, 8, 10, generator=generator)
        gradient[:, -1] /= 20
        mean = world.step(gradient.reshape(2, 80))[0]
        counts[mean.indices.long()] += step >= steps // 2
    return counts.reshape(8, 10).sum(1)


def test_rows_of_small_gradients_are_served() -> None:
    """By magnitude a row of small gradients waits; in units of its moment it arrives as often as the others."""
    inner = TopkAllgather(density=0.1)
    starved = delivered(inner, 80)
    assert starved[-1] < 0.02 * starved[:-1].mean()
    served = delivered(Preconditioned(recipe=inner, shapes=((8, 10),)), 80)
    assert served[-1] > 0.4 * served[:-1].mean()


def test_scale_is_renewed() -> None:
    """None before the first time, the same between two, and made of the mean that all ranks know."""
    recipe = Preconditioned(recipe=Warmup(recipe=OkTopk(density=0.1), steps=2), shapes=((5, 8),), renew_every=3)
    world, seen = SimulatedWorld(recipe, 3, 40), []
    for step in range(9):
        world.step(torch.randn(3, 40, generator=torch.Generator().manual_seed(step)))
        scales = [worker.algorithm.scale(torch.device("cpu")) for worker in world.workers]
        assert all(scale is None or torch.equal(scale, scales[0]) for scale in scales)
        seen.append(scales[0])
    assert [scale is None for scale in seen] == [True] * 2 + [False] * 7
    assert seen[2] is seen[3]
    assert seen[4] is not seen[5]


def test_overflow_of_the_mean() -> None:
    """A sum that fits in units of the scale and not in those of the gradient is refused, and nothing changes."""
    recipe = Preconditioned(recipe=TopkAllgather(density=0.1), shapes=((16, 2),), renew_every=1)
    world, gradient = SimulatedWorld(recipe, 2, 32), torch.full((2, 32), 1e-3)
    gradient[:, :2] = 1.0
    world.step(gradient)
    assert world.workers[0].algorithm.scale(torch.device("cpu"))[0] == 4
    for worker in world.workers:
        worker.residual[0] = 3e38
    gradient[:, 0] = 3e38  # with what is owed more than fp32 holds, but not a quarter of it
    held = world.residuals
    with pytest.raises(NonFiniteError, match="the mean of the gradients overflows"):
        world.step(gradient)
    assert torch.equal(world.residuals, held)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decay": 1.0}, "decay=1.0.*below 1"),
        ({"power": -0.5}, "power=-0.5.*0.5 for a root"),
        ({"floor": 0.0}, "floor=0.0.*above 0"),
        ({"renew_every": 0}, "renew_every=0.*at least 1"),
    ],
)
def test_fields(fields: dict[str, float], message: str) -> None:
    """Each is checked and named."""
    with pytest.raises(ConfigurationError, match=message):
        Preconditioned(recipe=OkTopk(), shapes=((2, 2),), **fields)


def test_shapes_must_fit() -> None:
    """The vector's length and that of the shapes."""
    with pytest.raises(ConfigurationError, match=r"shapes=\(\(2, 3\),\).*has 6 elements, this vector 7"):
        Preconditioned(recipe=OkTopk(), shapes=((2, 3),)).build(7)


# In a wrapped optimizer


def model() -> nn.Module:
    """One matrix that is exchanged sparsely, and small tensors."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 2))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    """Some steps on batches of their own."""
    for step in range(start, stop):
        x = torch.randn(16, 30, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (net(x) - x[:, :2]).square().mean().backward()
        optimizer.step()


def adamw(net: nn.Module, **fields) -> tritoncomm.SparseOptimizer:
    """AdamW, wrapped."""
    return tritoncomm.wrap(torch.optim.AdamW(net.parameters(), lr=0.01), density=0.02, **fields)


def is_preconditioned(optimizer: tritoncomm.SparseOptimizer) -> bool:
    """Whether entries are chosen in units of the moment."""
    return "preconditioned" in optimizer._exchange.settings


def test_where_it_is_used() -> None:
    """With the staleness-aware step unless refused, elsewhere when asked for, never where nothing is late."""

    def sgd(**fields) -> tritoncomm.SparseOptimizer:
        return tritoncomm.wrap(torch.optim.SGD(model().parameters(), lr=0.1), **fields)

    assert is_preconditioned(adamw(model()))
    assert not is_preconditioned(adamw(model(), preconditioner="off"))
    assert not is_preconditioned(adamw(model(), staleness="off"))
    assert is_preconditioned(adamw(model(), staleness="off", preconditioner="factored"))
    assert not is_preconditioned(sgd())
    assert is_preconditioned(sgd(preconditioner="factored"))
    assert not is_preconditioned(tritoncomm.wrap(torch.optim.AdamW(model().parameters()), algo="dense"))
    with pytest.raises(ConfigurationError, match="preconditioner='yes': choose one of 'auto', 'factored', 'off'"):
        sgd(preconditioner="yes")


def test_resume_across_a_renewal() -> None:
    """Saved before the scale is renewed, loaded and continued: never stopped, bit for bit."""
    net = model()
    optimizer = adamw(net)
    train(net, optimizer, 0, 35)
    again = copy.deepcopy(net)
    loaded = adamw(again)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(net, optimizer, 35, 65)
    train(again, loaded, 35, 65)
    assert all(map(torch.equal, net.parameters(), again.parameters()))
    assert torch.equal(optimizer._exchange.feedback.residual, loaded._exchange.feedback.residual)


def test_a_checkpoint_without() -> None:
    """What is owed is kept, what the method has learnt is not, and that is said."""
    net = model()
    optimizer = adamw(net, preconditioner="off")
    train(net, optimizer, 0, 5)
    loaded = adamw(copy.deepcopy(net))
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(logging.getLogger("tritoncomm"), "warning", lambda text, *_: said.append(text))
        loaded.load_state_dict(optimizer.state_dict())
    assert any("starts anew" in text for text in said)
    assert torch.equal(optimizer._exchange.feedback.residual, loaded._exchange.feedback.residual)
    assert loaded._exchange.feedback.algorithm.state[0].steps == 0


def test_a_checkpoint_of_other_shapes() -> None:
    """Is named; nothing is loaded."""
    optimizer, other = adamw(model()), adamw(model())
    state = optimizer._exchange.state_dict()
    state["algorithm"]["rows"] = torch.zeros(3, dtype=torch.float64)
    state = written(**{key: value for key, value in state.items() if key not in ("schema", "checksum")})
    with pytest.raises(ConfigurationError, match="a moment of 3 rows and 30 columns was loaded, needed are 50 and 30"):
        other._exchange.loaded(state)


def test_the_moment_outlives_the_density_and_the_world_size() -> None:
    """It is that of the mean, which does not depend on them."""
    net = model()
    optimizer = adamw(net)
    train(net, optimizer, 0, 25)
    before = optimizer._exchange.feedback.algorithm.state[0]
    optimizer.set_density(0.1)
    assert optimizer._exchange.feedback.algorithm.state[0] == before
    (half, _) = reshard([optimizer._exchange.state_dict()], 2)
    feedback = optimizer._exchange.feedback
    feedback.algorithm.migrate(**half["migrated"])
    assert feedback.algorithm.state[0] == before
