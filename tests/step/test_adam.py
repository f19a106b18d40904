"""The staleness-aware Adam step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import tritoncomm
from torch import nn
from tritoncomm import ConfigurationError, Late
from tritoncomm.step.rules.adam import StalenessAwareAdam

from deliveries import ages_of, take_step
from depth import trials
from tritoncomm_kernels import root_mean_square


# Each of the three limits is the smallest in some.
@pytest.mark.parametrize("tau", [2, 5, 10, 40])
@pytest.mark.parametrize("catch_up", [1, 4, 20])
def test_delayed_deliveries_catch_up(tau: int, catch_up: int) -> None:
    """A constant gradient delivered every tau steps moves a part of the dense way.

    The first delivery has nothing to agree with. It makes up the smallest of three limits. Later ones make up more.
    """
    limited = min(tau, catch_up, 3 * math.sqrt(tau))
    steady = 0.6  # of 25 entries, all agree: 4 (25 - 3 * 5) / 25 - 1
    later = limited + steady * (min(tau, 3 * catch_up) - limited)
    parameter = nn.Parameter(torch.zeros(25))
    optimizer = torch.optim.AdamW([parameter], lr=0.02, weight_decay=0)
    aware = StalenessAwareAdam(optimizer, Late(max_catch_up=catch_up, max_relative_update=math.inf))
    for t in range(1, 20 * tau + 1):
        due = t % tau == 0
        parameter.grad = torch.full((25,), float(tau * due))
        take_step(aware, [parameter], [torch.arange(25 if due else 0)])
    moved = -0.02 * (limited + 19 * later)  # a dense step by a constant gradient is one learning rate
    assert torch.allclose(parameter.detach(), torch.tensor(moved), rtol=1e-4)


@pytest.mark.parametrize("beta2", [0.5, 0.95, 0.999, 0.99999])
# The last of the gradients of single steps, and what they are, beside means of 1.
@pytest.mark.parametrize(("start", "single"), [(0, 1.0), (16, 4.0), (16, 0.1)])
def test_means_outweigh_single_steps(beta2: float, start: int, single: float) -> None:
    """In the second moment, what is older and larger than a late delivery counts for a share of the average at most.

    The moment is compared with one that is kept without bias, in Python's floats. Up to 0.95, it is as if nothing was
    late.
    """
    deliveries = [*range(1, start + 1), 36, 37, 75, 76, 78, 140, 400]  # the others are in between
    average, last = 0.0, 0
    parameter = nn.Parameter(torch.ones(9))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, beta2))
    aware = StalenessAwareAdam(optimizer, Late())
    for t in range(1, deliveries[-1] + 1):
        due = t in deliveries
        parameter.grad = torch.full((9,), single if t <= start else float(t - last))  # means are 1 after the start
        take_step(aware, [parameter], [torch.arange(9 if due else 0)])
        if not due:
            continue
        tau, mean = t - last, single if t <= start else 1.0
        weight = beta2**tau * (1 - beta2**last) / (1 - beta2**t)
        past = max(last, 78)
        assert beta2 > 0.95 or weight <= (past / (past + tau)) ** 4
        if tau > 1 and mean**2 < average:
            weight = min(weight, (past / (past + tau)) ** 4)
        average, last = weight * average + (1 - weight) * mean**2, t
        kept = optimizer.state[parameter]["exp_avg_sq"]
        assert torch.allclose(kept, torch.tensor((1 - beta2**t) * average), rtol=1e-4), t


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize(("times", "steps"), [(4.0, 10), (6.0, 1), (1e4, 1)])
def test_an_outlier_counts_for_one_step(beta2: float, times: float, steps: int) -> None:
    """A late mean of more than five times the root of the moment before moves a coordinate by one dense step."""
    parameter = nn.Parameter(torch.ones(9))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.0, beta2), weight_decay=0.0)
    aware = StalenessAwareAdam(optimizer, Late(max_relative_update=math.inf))
    for t in range(1, 51):
        delivers = t % 10 == 0
        before = parameter.detach().clone()
        sign = 1.0 if t % 20 else -1.0  # not steady
        parameter.grad = torch.full((9,), 10 * sign * (times if t == 50 else 1.0))
        take_step(aware, [parameter], [torch.arange(9 if delivers else 0)])
    second = float(optimizer.state[parameter]["exp_avg_sq"][0]) / (1 - beta2**50)
    expected = min(steps, 3 * math.sqrt(10)) * times / math.sqrt(second) * 1e-3
    assert torch.allclose(before - parameter.detach(), torch.tensor(expected), rtol=1e-4)


@pytest.mark.parametrize("rate", [1e-5, 4e-4, 3e-3, 0.1])
@pytest.mark.parametrize("size", [0.0, 0.02])
@pytest.mark.parametrize("share", [1.0, 0.25, 0.01])
def test_relative_update_is_limited(rate: float, size: float, share: float) -> None:
    """One delivery changes a tensor by at most a twentieth of its norm, or one learning rate per coordinate."""
    parameter = nn.Parameter(size * torch.ones(10_000))
    aware = StalenessAwareAdam(torch.optim.AdamW([parameter], lr=0.0, weight_decay=0.0, betas=(0.0, 0.999)), Late())
    sign = torch.randint(0, 2, (10_000,), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    for t in range(1, 18):
        parameter.grad = sign * (1 if t == 1 else -16)  # not steady
        aware.optimizer.param_groups[0]["lr"] = rate if t == 17 else 0.0
        everything = {1: 1.0, 17: share}.get(t, 0.0)
        take_step(aware, [parameter], [torch.arange(int(10_000 * everything))])
    each = min(12.0, max(1.0, 0.05 * size / rate) / share**0.5)  # 12 is three square roots of 16
    delivered = parameter.detach()[: int(10_000 * share)]
    assert torch.allclose((delivered - size) / rate * sign[: len(delivered)], torch.tensor(each), rtol=5e-3)


@pytest.mark.parametrize("agree", [0, 600, 672, 700, 797, 798])
@pytest.mark.parametrize("change", [0.0, math.inf])
@pytest.mark.parametrize("tau", [16, 100])
def test_signs_decide_how_far_to_catch_up(agree: int, change: float, tau: int) -> None:
    """If clearly more than 5/8 of 1000 deliveries have the sign of those before, they come closer to tau steps.

    From 3/4 on they come all the way. Three standard deviations of the count are taken off first. No number of
    disagreements takes a delivery below the limits. Entries of 0 do not vote. Weights of zero do not keep a steady
    gradient from moving them.
    """
    parameter = nn.Parameter(torch.zeros(2000))
    adam = torch.optim.AdamW([parameter], lr=0.0, betas=(0.0, 0.999), weight_decay=0.0)
    aware = StalenessAwareAdam(adam, Late(max_relative_update=change))
    signs = torch.where(torch.arange(2000) % 1000 < agree, 1.0, -1.0) * (torch.arange(2000) < 1000)
    for t in range(1, tau + 2):
        parameter.grad = torch.ones(2000) if t == 1 else tau * signs
        adam.param_groups[0]["lr"] = 0.01 * (t == tau + 1)
        take_step(aware, [parameter], [None if t in (1, tau + 1) else torch.arange(0)])
    moved = -parameter.detach()[:1000] / 0.01 * signs[:1000]
    limited = min(3 * math.sqrt(tau), 20)
    if change == 0:  # the root mean square of the change is one learning rate: half of the entries move by its root
        limited = max(1.0, math.sqrt(2))
    surplus = (2 * agree - 1000 - 3 * math.sqrt(1000)) / 1000
    steady = 0.0 if surplus < 0.25 else 1.0 if surplus > 0.5 else 4 * surplus - 1
    assert (steady == 0, steady == 1) == (agree <= 672, agree >= 798)
    assert torch.allclose(moved, torch.tensor(limited + steady * (min(tau, 60) - limited)), rtol=2e-3)
    assert torch.equal(parameter.detach()[1000:], torch.zeros(1000))


def test_root_mean_square() -> None:
    """The root mean square is accurate and has the same bits for any order and dtype of the values."""
    values = torch.randn(3_000_017, generator=torch.Generator().manual_seed(0)).bfloat16().float() * 0.02
    found = root_mean_square(values)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(values.double().square().mean().sqrt()), rel=1e-5)
    backwards, whole = values.flip(0), values[:3_000_000].view(1000, 3000)
    assert torch.equal(found, root_mean_square(backwards))
    assert torch.equal(root_mean_square(whole), root_mean_square(whole.t()))
    half = values.bfloat16()
    assert torch.equal(root_mean_square(half), root_mean_square(half.float()))
    assert root_mean_square(values.double()) == pytest.approx(float(found), rel=1e-6)
    assert root_mean_square(torch.zeros(5)) == 0
    assert root_mean_square(torch.tensor([1.0, -math.inf, 2.0])).isnan()
    assert root_mean_square(torch.tensor([1.0, math.nan])).isnan()
    assert root_mean_square(torch.full((7,), 3e38)) == pytest.approx(3e38)
    assert root_mean_square(torch.full((7,), 1e-30)) == pytest.approx(1e-30)


@pytest.mark.parametrize("tau", trials([1, 50, 800], [1, 50, 800, 2000]))
def test_delayed_small_deliveries_are_accurate(tau: int) -> None:
    """For any delay and any size of a delivery, fp32 state agrees with the same rule in fp64."""
    moved, later = [], (1.0, 1e-2, 1e-4)
    for dtype in (torch.float32, torch.float64):
        parameters = [nn.Parameter(torch.zeros(1, dtype=dtype)) for _ in later]
        aware = StalenessAwareAdam(torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.95), weight_decay=0), Late())
        for step in range(1, tau + 2):
            for parameter, size in zip(parameters, later, strict=True):
                parameter.grad = torch.tensor([1.0 if step == 1 else size * tau], dtype=dtype)
            take_step(aware, parameters, [torch.arange(int(step in (1, tau + 1)))] * len(later))
        moved.append([float(parameter.detach()) for parameter in parameters])
    assert moved[0] == pytest.approx(moved[1], rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ages_are_counted_apart_from_the_optimizers_step(dtype: torch.dtype) -> None:
    """After 100 steps of its own, a delivery of four gradients counts as four steps, and bias corrections go on."""
    parameter = nn.Parameter(torch.ones(6, dtype=dtype))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.0, 0.99), weight_decay=0.0)
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    before = optimizer.state[parameter]["exp_avg_sq"].double().clone()
    aware = StalenessAwareAdam(optimizer, Late())
    for number in range(1, 5):
        parameter.grad = torch.full_like(parameter, 4.0)
        take_step(aware, [parameter], [torch.arange(6 if number == 4 else 0)])
    state = optimizer.state[parameter]
    assert float(state["step"]) == 104
    assert torch.equal(state["exp_avg"], torch.ones_like(parameter))
    expected = 0.99**4 * before + 1 - 0.99**4
    torch.testing.assert_close(
        state["exp_avg_sq"].double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0
    )
    assert ages_of(optimizer, parameter)[0].tolist() == [4] * 6


def replace_count(optimizer: torch.optim.Optimizer) -> None:
    """Put another tensor in the place of a count."""
    list(optimizer.state.values())[1]["step"] = torch.tensor(40.0)


INTERFERENCES: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "steps itself": lambda optimizer: optimizer.step(),
    "loads": lambda optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "replaces a count": replace_count,
    "writes a count": lambda optimizer: list(optimizer.state.values())[1]["step"].fill_(40.0),
    "forgets a state": lambda optimizer: optimizer.state.pop(optimizer.param_groups[0]["params"][0]),
    "leaves one out": lambda optimizer: setattr(optimizer.param_groups[0]["params"][2], "grad", None),
}


@pytest.mark.parametrize("interfere", INTERFERENCES.values(), ids=INTERFERENCES)
def test_state_that_somebody_changed(interfere: Callable[[torch.optim.Optimizer], object]) -> None:
    """A step that has kept tensors from earlier steps reads a state that somebody changed like one without them."""
    outcomes = []
    for keeps in (True, False):
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(6, 5, generator=generator)) for _ in range(3)]
        optimizer = torch.optim.AdamW(parameters, lr=0.02)
        aware = StalenessAwareAdam(optimizer, Late())
        for number in range(12):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            if number in (4, 8):
                interfere(optimizer)
            at = torch.arange(number % 4, 30, 4)
            take_step(aware if keeps else StalenessAwareAdam(optimizer, Late()), parameters, [at, None, at])
        states = [state for _, state in sorted(optimizer.state_dict()["state"].items())]
        outcomes.append([*parameters, *(state[name] for state in states for name in sorted(state))])
    for kept, fresh in zip(*outcomes, strict=True):
        assert torch.equal(kept, fresh)


def test_step_count_is_fp32() -> None:
    """The step count is fp32 even if the default dtype is bf16, which counts only to 256."""
    parameter = nn.Parameter(torch.ones(12))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(12)
    torch.set_default_dtype(torch.bfloat16)
    try:
        take_step(StalenessAwareAdam(optimizer, Late()), [parameter], [None])
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[parameter]["step"].dtype == ages_of(optimizer, parameter)[1].dtype == torch.float32


@pytest.mark.parametrize("options", [{"eps": 0}, {"capturable": True}, {"differentiable": True}], ids=str)
def test_options_that_the_rule_refuses_are_torchs(options: dict[str, object]) -> None:
    """Without the rule, as its error advises, the optimizer may have them."""
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(4))], **options)
    with pytest.raises(ConfigurationError, match=r"late=False"):
        tritoncomm.wrap(optimizer)
    assert tritoncomm.wrap(optimizer, late=False)
