"""What an optimizer does with a late sum: it catches up, and it is itself if nothing is late."""

from __future__ import annotations

import pytest
import torch
import tritoncomm
from kit import equal_on_all_ranks, everywhere, flat, gradient, mean, sparse, take, weight
from tritoncomm import ConfigurationError

from ranks import ranks


class Lion(torch.optim.Optimizer):
    """Lion as its paper has it."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        """Step by the sign of an average."""
        for group in self.param_groups:
            read, kept = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_((read * average + (1 - read) * p.grad).sign(), alpha=group["lr"])
                average.lerp_(p.grad, 1 - kept)


KINDS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, maximize=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, nesterov=True, maximize=True),
    "lion": lambda p: Lion(p, lr=0.1, weight_decay=0.1),
}


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_is_itself_if_everything_is_delivered(rank, world_size, kind):
    """At density 1, parameters are those of the original optimizer with averaged gradients."""
    p, q = weight(32, 1.0), weight(32, 1.0)
    optimizer, bare = sparse(KINDS[kind]([p]), density=1.0), KINDS[kind]([q])
    for step in range(12):
        p.grad = gradient(32, rank, step, world_size) / 64
        q.grad = mean(p.grad)
        optimizer.step()
        bare.step()
    assert torch.allclose(p, q, rtol=1e-4, atol=1e-5)
    assert equal_on_all_ranks([p])


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_group_whose_rate_begins_at_zero_has_its_state_if_everything_is_delivered(rank, world_size, kind):
    """At density 1, a group with a rate of 0 beside others keeps its state as the original optimizer does."""
    ours, bare = [weight(32, 1.0), weight(32, 1.0)], [weight(32, 1.0), weight(32, 1.0)]
    optimizers = [KINDS[kind]([{"params": [each]} for each in own]) for own in (ours, bare)]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, [lambda _: 1.0, lambda step: float(step >= 3)]) for each in optimizers
    ]
    optimizer = sparse(optimizers[0], density=1.0)
    for step in range(8):
        for number, (p, q) in enumerate(zip(ours, bare, strict=True)):
            p.grad = gradient(32, rank, 100 * number + step, world_size) / 64
            q.grad = mean(p.grad)
        for each in (optimizer, optimizers[1], *schedules):
            each.step()
    for p, q in zip(ours, bare, strict=True):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-5)
    assert equal_on_all_ranks(ours)


@ranks(2)
@pytest.mark.parametrize("kind", ["adamw", "lion", "sgd"])
def test_steady_gradient_moves_as_far_as_in_a_dense_run(rank, world_size, kind):
    """A coordinate that is delivered every few steps catches up, and momentum does not coast in between."""
    made = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0),
        "lion": lambda p: Lion(p, lr=0.01),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    }[kind]
    p = weight(32, 100.0)
    optimizer = sparse(made([p]), density=1 / 4)
    for _ in range(80):
        p.grad = torch.linspace(1.0, 1.1, 32)
        optimizer.step()
    moved = (100 - flat([p])) / (80 * 0.01 * (torch.linspace(1.0, 1.1, 32) / 0.1 if kind == "sgd" else 1.0))
    assert 0.75 < float(moved.mean()) < 1.1
    assert float(moved.min()) > 0.6


@ranks(2)
@pytest.mark.parametrize("kind", ["adamw", "lion", "momentum"])
def test_coordinate_that_is_not_delivered_does_not_move(rank, world_size, kind):
    """A step changes what it delivers, and nothing else."""
    p = weight(64, 100.0)
    optimizer = sparse(KINDS[kind]([p]), density=1 / 8)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    for step in range(6):
        p.grad = gradient(64, rank, step, world_size)
        before = p.detach().clone()
        optimizer.synchronize()
        delivered = p.grad != 0
        optimizer.step()
        assert torch.equal(p.detach() != before, delivered)


@ranks(2)
@pytest.mark.parametrize("kind", ["adamw", "lion"])
def test_decoupled_decay_is_never_late(rank, world_size, kind):
    """It shrinks every coordinate in every step, delivered or not."""
    p = weight(16, 1.0)
    optimizer = sparse(KINDS[kind]([p]))
    for _ in range(10):
        p.grad = torch.zeros(16)
        p.grad[0] = 1.0
        optimizer.step()
    assert p.detach()[1:].tolist() == pytest.approx([0.99**10] * 15, rel=1e-4)


@ranks(2)
def test_catching_up_changes_a_tensor_by_a_small_part(rank, world_size):
    """A late sum of SGD moves a tensor by a twentieth of its norm at most, unless the dense step is longer."""
    p = weight(64, 1.0)
    optimizer = sparse(torch.optim.SGD([p], lr=0.05, momentum=0.5), density=1 / 64)
    largest = 0.0
    for _ in range(40):
        p.grad = torch.full((64,), 0.4)
        before = flat([p])
        optimizer.step()
        largest = max(largest, float((flat([p]) - before).norm() / before.norm()))
    assert largest < 0.07


@ranks(2)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_clipped_mean_is_what_counts(rank, world_size, momentum):
    """What a script makes of ``.grad`` between synchronize() and step() is what moves the parameters."""
    ends = []
    for factor in (1.0, 0.5):
        p = weight(64, 100.0)
        optimizer = sparse(torch.optim.SGD([p], lr=1.0, momentum=momentum))
        p.grad = gradient(64, rank, 0, world_size)
        optimizer.synchronize()
        with torch.no_grad():
            p.grad.mul_(factor)
        optimizer.step()
        ends.append(100 - flat([p]))
    assert ends[0].any()
    assert torch.equal(ends[0] * 0.5, ends[1])


class _Halved(torch.optim.AdamW):
    """An optimizer that has a rule of the library, and gets another one."""


class _HalvedRule(tritoncomm.LateRule):
    """Steps by half of the late sum's mean."""

    @staticmethod
    def fits(optimizer):
        """Return True for one class."""
        return isinstance(optimizer, _Halved)

    def advance(self, group, held, mean, tau):
        """Return the direction."""
        return mean / 2, held


@ranks(2)
def test_rule_of_a_user_comes_first(rank, world_size):
    """add_rule() replaces the step of the optimizers that the rule fits."""
    tritoncomm.add_rule(_HalvedRule)
    p = weight(8, 1000.0)
    optimizer = sparse(_Halved([p], lr=1.0, weight_decay=0.0), density=1.0)
    p.grad = torch.arange(1.0, 9.0) * (1 + rank)
    optimizer.step()
    assert torch.equal(1000 - flat([p]), torch.arange(1.0, 9.0) * 0.75)


@ranks(2)
def test_options_that_no_rule_supports_are_refused_by_name(rank, world_size):
    """At wrap(), and if they are set later."""
    p = weight()
    with pytest.raises(ConfigurationError, match="eps"):
        sparse(torch.optim.AdamW([p], eps=0))
    with pytest.raises(ConfigurationError, match="capturable"):
        sparse(torch.optim.AdamW([p], capturable=True))
    with pytest.raises(ConfigurationError, match="differentiable"):
        sparse(torch.optim.SGD([p], momentum=0.9, differentiable=True))
    optimizer = sparse(torch.optim.AdamW([p], lr=0.1))
    with pytest.raises(ConfigurationError, match="eps"):
        optimizer.add_param_group({"params": [weight()], "eps": 0})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0]["eps"] = 0
    p.grad = torch.zeros(16)
    with pytest.raises(ConfigurationError, match="eps"):
        optimizer.step()
    assert torch.equal(p.detach(), torch.zeros(16))
    optimizer = sparse(torch.optim.SGD([p], lr=0.1, momentum=0.9))
    optimizer.param_groups[0]["dampening"] = 0.5
    with pytest.raises(ConfigurationError, match="dampening"):
        take(optimizer, [p], rank, [0], world_size)


@ranks(2)
def test_optimizers_that_cannot_be_exchanged_are_refused_by_name(rank, world_size):
    """They need several gradients in a step, sparse gradients, a closure, or have been wrapped already."""
    p = weight()
    with pytest.raises(ConfigurationError, match="LBFGS"):
        sparse(torch.optim.LBFGS([p]))
    with pytest.raises(ConfigurationError, match="SparseAdam"):
        sparse(torch.optim.SparseAdam([p]))

    class Searches(torch.optim.SGD):
        def step(self, closure):
            closure()

    with pytest.raises(ConfigurationError, match="closure"):
        sparse(Searches([p], lr=0.1))
    with pytest.raises(ConfigurationError, match="wrap"):
        sparse(sparse(torch.optim.SGD([p], lr=0.1)))
    with pytest.raises(ConfigurationError, match="requires_grad"):
        sparse(torch.optim.SGD([weight().requires_grad_(False)], lr=0.1))


@ranks(2)
def test_state_of_every_rank_stays_the_same(rank, world_size):
    """Moments are those of the mean: replicas of the optimizer's state are equal to the bit."""
    p = weight(64, 1.0)
    optimizer = sparse(torch.optim.AdamW([p], lr=0.1), density=1 / 8)
    take(optimizer, [p], rank, range(12), world_size)
    first, second = everywhere(
        [optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"], optimizer.state[p]["step"]]
    )
    assert all(map(torch.equal, first, second))
    assert float(optimizer.state[p]["step"]) == 12
