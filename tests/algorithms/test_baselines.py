"""The baseline methods: what distinguishes each of them, and defects that public implementations have."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import tritoncomm
from tritoncomm import ConfigurationError, NonFiniteError, SimulatedWorld, TopkAllgather, Warmup
from tritoncomm.algorithms.staged import Staged
from tritoncomm.scheduler.cost import HEADER_WORDS, WORD

import laws
from baselines import DGC, GaussianK, GTopk, HardThreshold, SIDCo, TopkDSA
from baselines.threshold_allgather import gaussian_selection, sidco_selection
from laws import normal

LAWS = {
    "normal": normal,
    "laplace": lambda n: normal(n).sign() * torch.empty(n).exponential_(generator=torch.Generator().manual_seed(1)),
    "student": lambda n: normal(n) / (normal(3, n, seed=2).square().mean(0)).sqrt(),
    "gamma": lambda n: normal(n, seed=5).square() * normal(n, seed=6).sign(),
}


@pytest.mark.parametrize("density", [0.02, 0.3])
@pytest.mark.parametrize("switch", [0.0, 2 / 3, 1.0])
@pytest.mark.parametrize("world_size", [2, 5, 8])
def test_dsa_equals_topk_allgather(world_size: int, switch: float, density: float) -> None:
    """TopkDSA gives the same bits as TopkAllgather, whether it sends pairs or values."""
    dsa = SimulatedWorld(TopkDSA(density=density, dense_switch=switch), world_size, 300)
    plain = SimulatedWorld(TopkAllgather(density=density), world_size, 300)
    for step in range(4):
        gradient = normal(world_size, 300, seed=step)
        assert laws.same_bits(dsa.step(gradient)[0].to_dense(), plain.step(gradient)[0].to_dense())
        assert laws.same_bits(dsa.residuals, plain.residuals)


def test_dsa_switches_to_dense() -> None:
    """From two thirds of the dense volume on, every rank receives plain values: n - n/P of them."""
    gradient, received = normal(8, 800), []
    for density, switch in ((0.055, 2 / 3), (0.055, 1.0), (0.2, 1.0)):
        world = SimulatedWorld(TopkDSA(density=density, dense_switch=switch), 8, 800)
        world.step(gradient)
        received.append(world.scheduler.meters[0].received_by_phase["all-gather"].bytes)
    dense = WORD * (700 + 3 * HEADER_WORDS)
    assert received[0] == received[2] == dense
    assert received[1] < dense


def test_hard_threshold_bounds_residuals() -> None:
    """All residuals stay below the threshold, from empty results to full ones."""
    world = SimulatedWorld(HardThreshold(threshold=0.8), 4, 200)
    for step, scale in enumerate((1.0, 0.001, 100.0, 0.3)):
        mean = world.step(normal(4, 200, seed=step) * scale)[0]
        assert float(world.residuals.abs().max()) < 0.8
        if scale == 100.0:
            assert len(mean) == 200
    nothing = SimulatedWorld(HardThreshold(threshold=10.0), 4, 200)
    assert len(nothing.step(normal(4, 200))[0]) == 0


def test_hard_threshold_from_density() -> None:
    """Without a threshold, the first step computes one: the mean over workers of the quantile of the density."""
    gradient = normal(3, 1000)
    world = SimulatedWorld(HardThreshold(density=0.1), 3, 1000)
    world.step(gradient)
    expected = gradient.abs().sort(dim=1, descending=True).values[:, 99].double().mean()
    assert world.workers[0].algorithm.state.threshold == pytest.approx(float(expected))
    world.step(gradient * 3)
    assert world.workers[0].algorithm.state.threshold == pytest.approx(float(expected))


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
def test_gaussian_fit(density: float) -> None:
    """On normal values the count is within a quarter of k, and on heavy tails the cap holds."""
    values, k = normal(200_000), int(200_000 * density)
    assert 0.75 <= gaussian_selection(values, k).room / k <= 1.25
    heavy = LAWS["gamma"](200_000)
    world = SimulatedWorld(GaussianK(density=density), 1, 200_000)
    assert len(world.step(heavy[None])[0]) <= math.ceil(1.5 * k)


@pytest.mark.parametrize("density", [0.01, 0.001])
@pytest.mark.parametrize("law", LAWS)
def test_sidco_fit(law: str, density: float) -> None:
    """Three stages of Pareto fits select within 15 % of k on four distributions."""
    k = int(1_000_000 * density)
    selected = sidco_selection(LAWS[law](1_000_000), k, 3)
    assert selected is not None
    assert 0.85 <= selected.room / k <= 1.15


def test_sidco_adapts_its_stages() -> None:
    """Too many entries on average remove a stage, and too few add one, within the limits."""
    algorithm = SIDCo(density=0.01).build(100_000)
    for ratio, expected in ((1.5, 2), (1.5, 1), (1.5, 1), (0.5, 2), (1.1, 2), (0.1, 3)):
        for _ in range(5):
            algorithm.state = algorithm._adapted(ratio)
        assert algorithm.state.stages == expected


@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_at_density_one_equals_momentum_sgd(nesterov: bool) -> None:
    """At density 1 the updates equal the steps of SGD with momentum."""
    parameter = torch.zeros(20, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9, nesterov=nesterov)
    world, total = SimulatedWorld(DGC(density=1.0, nesterov=nesterov), 2, 20), torch.zeros(20)
    for step in range(6):
        gradients = normal(2, 20, seed=step)
        parameter.grad = gradients.mean(0)
        optimizer.step()
        total += world.step(gradients)[0].to_dense()
        assert torch.allclose(parameter.detach(), -total, rtol=1e-5, atol=1e-6)


def test_dgc_clears_sent_entries() -> None:
    """Sent entries leave the residual, and with masking they leave the momentum as well."""
    for masking in (True, False):
        world = SimulatedWorld(DGC(density=0.2, masking=masking), 3, 50)
        gradient = normal(3, 50)
        world.step(gradient)
        for rank, worker in enumerate(world.workers):
            sent = gradient[rank].abs().topk(10).indices
            assert not world.residuals[rank, sent].any()
            assert worker.algorithm.state.velocity[sent].any() != masking


def test_dgc_accumulates_momentum() -> None:
    """An entry that is not sent accumulates g, then g + (0.9 g + g), and so on."""
    world = SimulatedWorld(DGC(density=0.5), 1, 2)
    gradient = torch.tensor([[1.0, 100.0]])
    for expected in (1.0, 1.0 + 1.9, 1.0 + 1.9 + 2.71):
        world.step(gradient)
        assert float(world.residuals[0, 0]) == pytest.approx(expected)


@pytest.mark.parametrize(("scale", "limit"), [("one", 2.0), ("sqrtP", 4.0), ("inv_sqrtP", 1.0)])
def test_dgc_clips_before_it_accumulates(scale: str, limit: float) -> None:
    """Each worker clips its gradient to the scaled limit before accumulation. Small gradients stay unchanged."""
    recipe = DGC(density=0.01, momentum=0.0, clip_norm=2.0, clip_scale=scale)
    world = SimulatedWorld(recipe, 4, 300)
    gradient = normal(4, 300) * torch.tensor([[10.0], [1.0], [0.001], [10.0]])
    mean = world.step(gradient)[0].to_dense()
    assert float(mean.norm()) <= limit
    added = world.residuals.clone()
    added[:, mean != 0] = 0.0
    assert float(added.norm(dim=1).max()) <= limit + 1e-4
    assert float(added[0].norm()) > 0.7 * limit


@pytest.mark.parametrize("kind", [partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.AdamW])
def test_dgc_rejects_optimizers_with_momentum(kind: Callable[..., torch.optim.Optimizer]) -> None:
    """DGC rejects an optimizer with momentum, also under a warm-up, or has none itself. It accepts plain SGD."""
    parameters = [torch.zeros(3, requires_grad=True)]
    for warmup_steps in (0, 3):
        with pytest.raises(ConfigurationError, match="momentum=0"):
            tritoncomm.wrap(kind(parameters), "dgc", warmup_steps=warmup_steps)
    assert tritoncomm.wrap(kind(parameters), "dgc", density=0.01, momentum=0.0).recipe == DGC(momentum=0.0)
    tritoncomm.wrap(torch.optim.SGD(parameters, lr=0.1), "dgc")


def test_dgc_clips_the_whole_gradient() -> None:
    """The clipped norm covers large and small tensors together."""
    net = torch.nn.Linear(40, 40)
    optimizer = tritoncomm.wrap(
        torch.optim.SGD(net.parameters(), lr=1.0), "dgc", density=1.0, momentum=0.0, clip_norm=1.0
    )
    before = [parameter.detach().clone() for parameter in net.parameters()]
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, net.parameters(), strict=True)])
    assert float(moved.detach().norm()) == pytest.approx(1.0, rel=1e-5)


def test_dgc_rejects_an_overflow_in_small_tensors() -> None:
    """Momentum of small tensors that overflows rejects the step, and nothing changes."""
    world = SimulatedWorld(Staged(recipe=DGC(density=0.1), tail=4), 2, 40)
    gradient = torch.zeros(2, 40)
    gradient[:, 38] = 1e38
    for _ in range(3):  # 2.7e38 after three steps
        world.step(gradient)
    before = world.state_dict()
    with pytest.raises(NonFiniteError):
        world.step(gradient)
    after = world.state_dict()
    assert str(before) == str(after)
    assert torch.isfinite(world.workers[0].algorithm.inner.state.dense_velocity).all()


@pytest.mark.parametrize("small", ["fp32", "8bit"])
def test_nan_in_small_tensors_is_no_overflow(small: str) -> None:
    """With messages of a fixed length, the error does not call a NaN of one rank an overflow of finite gradients."""
    world = SimulatedWorld(Staged(recipe=TopkAllgather(density=0.1, static=True), tail=20, small=small), 2, 60)
    gradient = torch.ones(2, 60)
    gradient[1, 50] = torch.nan
    with pytest.raises(NonFiniteError, match="a gradient or a sum of gradients contains NaN or Inf"):
        world.step(gradient)


@pytest.mark.parametrize("density", [0.1, 1.0])
def test_dgc_with_momentum_obeys_laws(density: float) -> None:
    """DGC with momentum obeys the laws that do not compare results with gradients."""
    case = laws.Case(5, 60, ("random", "ties", "zero", "sparse", "random"))
    for recipe in (DGC(density=density, nesterov=density < 1), Warmup(recipe=DGC(density=density), steps=3)):
        run = laws.recorded(recipe, case)
        for law in (laws.agreement, laws.form, laws.budget, laws.resume):
            law.check(run)
        laws.atomicity(recipe, case)
        laws.refusal(recipe, case)


def test_residual_overflow_is_rejected() -> None:
    """All ranks reject a step in which a residual would overflow, so no residual becomes infinite."""
    world = SimulatedWorld(GTopk(density=0.5), 2, 2)
    with pytest.raises(NonFiniteError):
        world.step(torch.tensor([[3e38, 2.5e38], [0.0, 2.6e38]]))
    assert len(world.scheduler.raised) == 2
    assert not world.residuals.any()


@pytest.mark.parametrize("shift", [0.0, 0.3, 5.0])
@pytest.mark.parametrize("recipe", [GaussianK(density=0.02), SIDCo(density=0.02)], ids=lambda recipe: recipe.name)
def test_fit_without_a_tail(recipe: tritoncomm.Recipe, shift: float) -> None:
    """If there is no tail to fit, the k largest values are delivered, ties by index."""
    signs = torch.ones(3, 200)
    signs[:, ::2] = -1.0
    world = SimulatedWorld(recipe, 3, 200)
    mean = world.step(signs + shift)[0]
    assert len(mean) >= 4
    assert len(world.step(signs + shift)[0]) >= 4
    if not shift:
        assert mean.indices.tolist() == [0, 1, 2, 3]


def test_the_first_threshold_names_every_rank() -> None:
    """A NaN on one rank hides no Inf on another in the step that sets the threshold."""
    gradients = torch.zeros(3, 10)
    gradients[0, 3], gradients[1, 4] = float("inf"), float("nan")
    world = SimulatedWorld(HardThreshold(density=0.1), 3, 10)
    with pytest.raises(NonFiniteError) as caught:
        world.step(gradients)
    assert caught.value.ranks == (0, 1)
    assert not world.residuals.any()
