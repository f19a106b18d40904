"""Selection by Adam's update: the second moment, the scale computed from it, and where it is used."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
import tritoncomm
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from tritoncomm import (
    ConfigurationError,
    Late,
    NonFiniteError,
    OkTopk,
    SimulatedWorld,
    SparseVector,
    TopkAllgather,
    Warmup,
)
from tritoncomm.algorithms.staged import Staged
from tritoncomm.primitives.second_moment import FactoredSecondMoment, Moment
from tritoncomm.step.saved import state as exchange_state

SHAPES = st.lists(st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple), min_size=0, max_size=4)


def as_matrices(dense: torch.Tensor, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Return each tensor as the matrix with the smallest rows + columns, and a vector as its sum, ``[1, 1]``."""
    found = []
    for part, shape in zip(torch.split(dense, [math.prod(shape) for shape in shapes]), shapes, strict=True):
        cuts = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(len(shape) + 1)]
        cuts = [cut for cut in cuts if 1 not in cut]
        found.append(part.view(min(cuts, key=sum)) if cuts else part.sum().view(1, 1))
    return found


@given(shapes=SHAPES, seed=st.integers(0, 1000), share=st.sampled_from([0.0, 0.2, 1.0]), exponent=st.integers(-60, 60))
def test_sums_of_squares(shapes: list[tuple[int, ...]], seed: int, share: float, exponent: int) -> None:
    """Sums of squares by row and by column match plain sums to 40 bits of the largest square, sparse and dense."""
    matrices, generator = FactoredSecondMoment(shapes), torch.Generator().manual_seed(seed)
    dense = torch.randn(matrices.numel, generator=generator) * 2.0**exponent
    dense[torch.rand(matrices.numel, generator=generator) >= share] = 0.0
    squares = as_matrices(dense.double().square(), shapes)
    indices = dense.nonzero().reshape(-1)
    largest = float(dense.double().square().max()) if len(dense) else 0.0
    for vector in (SparseVector(indices.int(), dense[indices], matrices.numel), SparseVector.full(dense)):
        for found, dimension in zip(matrices.sums(vector), (1, 0), strict=True):
            expected = torch.cat([found[:0], *(part.sum(dimension) for part in squares)])
            assert found.shape == expected.shape
            assert torch.allclose(found, expected, rtol=1e-11, atol=largest * 2.0**-40)


def test_sums_do_not_depend_on_the_order() -> None:
    """Sums have the same bits for any order of the entries, as in atomic additions on a GPU."""
    matrices = FactoredSecondMoment([(30, 40)])
    values = torch.randn(1199, generator=torch.Generator().manual_seed(0)) ** 5
    expected = matrices.sums(SparseVector(torch.arange(1199).int(), values, 1200))
    for seed in range(5):
        order = torch.randperm(1199, generator=torch.Generator().manual_seed(seed))
        found = matrices.sums(SparseVector(order.int(), values[order], 1200))
        assert all(map(torch.equal, found, expected))


@given(seed=st.integers(0, 1000))
def test_scale_of_a_factored_moment(seed: int) -> None:
    """The scale of a second moment with rank one is the exact root, rounded to a power of two."""
    generator = torch.Generator().manual_seed(seed)
    shapes, floor = [(4, 6), (3, 2, 5), (7,)], 2.0**-10
    moments = [
        torch.outer(torch.rand(4, generator=generator), torch.rand(6, generator=generator)).double(),
        1e-4 * torch.outer(torch.rand(6, generator=generator), torch.rand(5, generator=generator)).double(),
        torch.full((1, 7), 0.3, dtype=torch.float64),
    ]
    rows = torch.cat([moment.sum(1) for moment in moments])
    columns = torch.cat([moments[0].sum(0), moments[1].sum(0), moments[2].sum().reshape(1)])
    scale = FactoredSecondMoment(shapes).root(rows, columns, floor)
    flat = torch.cat([moment.reshape(-1) for moment in moments])
    means = torch.cat([moment.mean().expand(moment.numel()) for moment in moments])
    exact = ((flat + floor * means) / flat.mean() / floor).sqrt()
    assert scale.dtype == torch.float32
    assert (torch.frexp(scale).mantissa == 0.5).all()
    assert ((scale / exact).log2().abs() <= 0.5 + 1e-6).all()


def test_scale_is_renewed() -> None:
    """The scale is None at first, constant between two renewals, and equal on all ranks."""
    recipe = Staged(recipe=Warmup(recipe=OkTopk(density=0.1), steps=2), shapes=((5, 8),), renew_every=3)
    world, seen = SimulatedWorld(recipe, 3, 40), []
    for step in range(9):
        world.step(torch.randn(3, 40, generator=torch.Generator().manual_seed(step)))
        scales = [worker.algorithm.scale.divisors(torch.device("cpu")) for worker in world.workers]
        assert all(scale is None or torch.equal(scale, scales[0]) for scale in scales)
        seen.append(scales[0])
    assert [scale is None for scale in seen] == [True] * 2 + [False] * 7
    assert seen[2] is seen[3]
    assert seen[4] is not seen[5]


def test_values_near_overflow() -> None:
    """A sum that fits into fp32 only in scaled units is delivered. A single value that overflows is rejected."""
    recipe = Staged(recipe=TopkAllgather(density=0.1), shapes=((16, 2),), renew_every=1)
    world, gradient = SimulatedWorld(recipe, 2, 32), torch.full((2, 32), 1e-3)
    gradient[:, :2] = 1.0
    world.step(gradient)
    scale = world.workers[0].algorithm.scale.divisors(torch.device("cpu"))
    assert scale[0] / scale[-1] == 128
    gradient[:, 0] = 3e38
    assert world.step(gradient)[0].to_dense()[0] == gradient[0, 0]
    for worker in world.workers:
        worker.residual[0] = 3e38
    held = world.residuals
    with pytest.raises(NonFiniteError):
        world.step(gradient)
    assert torch.equal(world.residuals, held)


# In a wrapped optimizer


def model() -> nn.Module:
    """Return a model with one matrix that is exchanged sparsely, and small tensors."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 2))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    """Train for the steps from ``start`` to ``stop``. The batch depends on the step."""
    for step in range(start, stop):
        x = torch.randn(16, 30, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (net(x) - x[:, :2]).square().mean().backward()
        optimizer.step()


def adamw(net: nn.Module, **fields) -> tritoncomm.SparseOptimizer:
    """Return a wrapped AdamW."""
    return tritoncomm.wrap(torch.optim.AdamW(net.parameters(), lr=0.01), density=0.02, **fields)


def is_preconditioned(optimizer: tritoncomm.SparseOptimizer) -> bool:
    """Whether entries are selected by their update."""
    return optimizer._tritoncomm.setup.scope.vectors[0].scale is not None


def moment_of(optimizer: tritoncomm.SparseOptimizer) -> Moment:
    """Return the second moment that the scale is computed from."""
    return optimizer._tritoncomm.setup.scope.vectors[0].scale.moment


def test_select_by() -> None:
    """Selection by update is the default of the staleness-aware step. It needs a method that compares entries."""

    def sgd(algo: str = "oktopk", **fields) -> tritoncomm.SparseOptimizer:
        return tritoncomm.wrap(torch.optim.SGD(model().parameters(), lr=0.1), algo, **fields)

    assert is_preconditioned(adamw(model()))
    assert not is_preconditioned(adamw(model(), late=Late(select_by="gradient")))
    assert not is_preconditioned(adamw(model(), late=False))
    assert not is_preconditioned(sgd())  # without momentum, it has no rule
    assert is_preconditioned(tritoncomm.wrap(torch.optim.SGD(model().parameters(), lr=0.1, momentum=0.9)))
    assert is_preconditioned(sgd(late=Late(select_by="update")))
    assert not is_preconditioned(sgd("dense", late=Late(select_by="update")))
    for algo in ("dense", "random_k", "hard_threshold"):
        assert not is_preconditioned(tritoncomm.wrap(torch.optim.AdamW(model().parameters()), algo=algo))
    with pytest.raises(
        ConfigurationError, match=r"select_by='update' needs a method that compares entries, and 'dgc' does not"
    ):
        sgd("dgc", late=Late(select_by="update"))


@pytest.mark.parametrize("algo", ["oktopk", "exdyna", "micro", "spardl", "gtopk"])
def test_thresholds_after_a_renewal(algo: str) -> None:
    """Thresholds follow a renewal of the scale: the density stays about the same, without a burst."""
    recipe = Staged(recipe=tritoncomm.recipe(algo, density=0.02), shapes=((100, 50),))
    world, generator = SimulatedWorld(recipe, 4, 5000), torch.Generator().manual_seed(0)
    rows = torch.logspace(0, -3, 100)[:, None]
    densities = []
    for _ in range(45):
        gradient = torch.randn(4, 100, 50, generator=generator) * rows
        densities.append(world.step(gradient.reshape(4, 5000))[0].density)
    assert max(densities[20:]) <= 1.5 * max(densities[10:20])
    assert 0.6 <= sum(densities[20:]) / 25 / 0.02 <= 1.1


def test_resume_across_a_renewal() -> None:
    """A run that is saved and resumed before the scale is renewed equals an uninterrupted run."""
    net = model()
    optimizer = adamw(net)
    train(net, optimizer, 0, 35)
    again = copy.deepcopy(net)
    loaded = adamw(again)
    content = io.BytesIO()
    torch.save(optimizer.state_dict(), content)
    content.seek(0)
    loaded.load_state_dict(torch.load(content, weights_only=True))
    assert moment_of(loaded) == moment_of(optimizer)
    train(net, optimizer, 35, 65)
    train(again, loaded, 35, 65)
    assert all(map(torch.equal, net.parameters(), again.parameters()))
    assert torch.equal(
        optimizer._tritoncomm.setup.scope.vectors[0].feedback.residual,
        loaded._tritoncomm.setup.scope.vectors[0].feedback.residual,
    )


@pytest.mark.parametrize("algo", ["oktopk", "exdyna"])
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize(("saved_by", "loaded_by"), [("gradient", "update"), ("update", "gradient")])
def test_checkpoint_with_another_select_by(saved_by: str, loaded_by: str, carried: bool, algo: str) -> None:
    """Warm-up and residuals continue, thresholds and moment restart, also with another world size."""
    net = model()
    optimizer = adamw(net, algo=algo, late=Late(select_by=saved_by), warmup_steps=3)
    train(net, optimizer, 0, 25)
    loaded = adamw(copy.deepcopy(net), algo=algo, late=Late(select_by=loaded_by), warmup_steps=3)
    state = exchange_state.saved(optimizer._tritoncomm.setup.exchange)
    if carried:
        state = exchange_state.taken_over(state, [state], rank=0, world_size=1)
    (feedback,) = exchange_state.loaded(loaded._tritoncomm.setup.scope, state)
    loaded._tritoncomm.setup.scope.vectors[0].feedback = feedback
    assert torch.equal(feedback.residual, optimizer._tritoncomm.setup.scope.vectors[0].feedback.residual)
    assert feedback.algorithm.state_dict()["inner"]["taken"] == 25
    if loaded_by == "update":
        assert moment_of(loaded).steps == 0
    train(copy.deepcopy(net), loaded, 25, 30)


def test_moment_survives_changes() -> None:
    """The moment survives another density, another world size and added parameters."""
    net, more = model(), nn.Linear(40, 30)
    optimizer = adamw(net)
    train(net, optimizer, 0, 25)
    before = moment_of(optimizer)
    denser = tritoncomm.wrap(torch.optim.AdamW(model().parameters(), lr=0.01), density=0.1)
    denser.load_state_dict(optimizer.state_dict())
    loaded = moment_of(denser)
    assert loaded.steps == 25
    assert torch.equal(loaded.rows, before.rows)
    assert torch.equal(loaded.columns, before.columns)
    state = exchange_state.saved(optimizer._tritoncomm.setup.exchange)
    scope = optimizer._tritoncomm.setup.scope
    scope.restore(exchange_state.carry_over(scope, [state], 2.0))
    assert moment_of(optimizer) == before
    optimizer.add_param_group({"params": list(more.parameters())})
    after = moment_of(optimizer)
    assert after.steps == 25
    assert torch.equal(after.rows[:50], before.rows)
    assert not after.rows[50:].any()
    assert len(after.rows) == 80
    train(net, optimizer, 25, 45)


@pytest.mark.parametrize(("warmup_steps", "far"), [(20, 0.03), (0, 0.1)])
def test_a_tensor_with_tiny_gradients_does_not_starve(warmup_steps: int, far: float) -> None:
    """Adam does not mind the scale of a tensor's gradients, and neither does the selection: both tensors arrive.

    Without a warm-up, nothing is known of the smaller one at first.
    """
    one, other = (nn.Parameter(torch.zeros(64, 64)) for _ in range(2))
    optimizer = tritoncomm.wrap(torch.optim.AdamW([one, other], lr=0.02, eps=1e-18), warmup_steps=warmup_steps)
    for _ in range(400):
        optimizer.zero_grad()
        ((one - 1).square().mean() + 1e-6 * (other - 1).square().mean()).backward()
        optimizer.step()
    assert float(one.detach().mean()) == pytest.approx(0.998, abs=far)
    assert float(other.detach().mean()) == pytest.approx(0.998, abs=far)


def test_a_tensor_below_epsilon_is_not_enlarged() -> None:
    """Gradients far below Adam's epsilon do not change a parameter, and do not take the place of others."""
    matrices, floor = FactoredSecondMoment([(2, 2), (2, 2)]), 2.0**-10
    rows, columns = matrices.sums(SparseVector.full(torch.tensor([1.0] * 4 + [2.0**-20] * 4)))
    enlarged = matrices.root(rows, columns, floor)[4]
    assert matrices.root(rows, columns, floor)[0] / enlarged == 2**20
    assert matrices.root(rows, columns, floor, smallest=2.0**-20)[4] / enlarged == 2**5


def test_a_tensor_that_gets_gradients_late_does_not_take_everything() -> None:
    """Beside a tensor that was without gradients until now, the other one keeps a share."""
    recipe = Staged(recipe=TopkAllgather(density=0.1), shapes=((8, 10), (8, 10)), renew_every=5)
    world, generator = SimulatedWorld(recipe, 2, 160), torch.Generator().manual_seed(0)
    counts = torch.zeros(2)
    for step in range(80):
        gradient = torch.randn(2, 2, 80, generator=generator)
        gradient[:, 1] *= step >= 40
        mean = world.step(gradient.reshape(2, 160))[0]
        counts += (step >= 40) * torch.bincount(mean.indices.long() // 80, minlength=2)
    assert 0.3 < counts[0] / counts[1] < 1.1
