"""Rules of optimizers that count their steps, or keep what does not begin at zero."""

from __future__ import annotations

import pytest
import torch
import tritoncomm
from torch import nn
from tritoncomm.step.settings import WrapOptions

from deliveries import forget_ages, take_step

BETAS = (0.9, 0.8, 0.95)


class Adan(torch.optim.Optimizer):
    """X. Xie et al., "Adan" (2022), without weight decay. It counts its steps in ``counts_in``."""

    def __init__(self, params, lr: float = 0.01, counts_in: str = "group") -> None:
        super().__init__(params, {"lr": lr})
        self.counts_in = counts_in

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Take a step."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                at = group["step"] if self.counts_in == "group" else state["step"]
                average, change, square, before = (state.get(name, torch.zeros_like(p)) for name in LateAdan.held)
                difference = p.grad - before if at > 1 else torch.zeros_like(p)
                one, two, three = BETAS
                state["average"] = one * average + (1 - one) * p.grad
                state["change"] = two * change + (1 - two) * difference
                state["square"] = three * square + (1 - three) * (p.grad + two * difference).square()
                state["before"] = p.grad.clone()
                root = (state["square"] / (1 - three**at)).sqrt() + 1e-8
                p.sub_(
                    (state["average"] / (1 - one**at) + two * state["change"] / (1 - two**at)) / root, alpha=group["lr"]
                )


class LateAdan(tritoncomm.LateRule):
    """Its rule: the gradient has changed once since the last delivery of a coordinate."""

    held = ("average", "change", "square", "before")
    counts_in = "group"

    @staticmethod
    def fits(optimizer: torch.optim.Optimizer) -> bool:
        return isinstance(optimizer, Adan)

    def advance(self, group, held, mean, tau):
        one, two, three = BETAS
        difference = torch.where(held["step"] == tau, 0.0, mean - held["before"])  # nothing was delivered before
        kept, added = self.powers(one, tau)
        average = kept * held["average"] + added * mean
        kept, _ = self.powers(two, tau)
        change = kept * held["change"] + kept / two * (1 - two) * difference
        kept, added = self.powers(three, tau)
        square = kept * held["square"] + added * (mean + two * difference).square()
        lost = [self.powers(beta, held["step"])[1] for beta in BETAS]
        direction = (average / lost[0] + two * change / lost[1]) / ((square / lost[2]).sqrt() + 1e-8)
        return direction, {"average": average, "change": change, "square": square, "before": mean}


class LateAdanOfStates(LateAdan):
    """The same, where each parameter has a count."""

    counts_in = "state"


def parameters() -> list[nn.Parameter]:
    """Return two parameters."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((6, 5), (7,))]


@pytest.mark.parametrize("kind", [LateAdan, LateAdanOfStates])
def test_a_rule_that_counts_steps(kind: type[LateAdan]) -> None:
    """The count is the optimizer's own: if every entry is delivered, either may continue what the other has begun."""
    ours, theirs = parameters(), parameters()
    mixed, plain = Adan(ours, counts_in=kind.counts_in), Adan(theirs, counts_in=kind.counts_in)
    rule = kind.from_options(mixed, WrapOptions())
    generator = torch.Generator().manual_seed(1)
    for step in range(9):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        plain.step()
        if step // 3 == 1:
            mixed.step()
            continue
        if step == 6:
            forget_ages(mixed)
        take_step(rule, ours, [None, None])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
        if kind.counts_in == "state":
            assert mixed.state[one]["step"] == plain.state[other]["step"] == 9
    if kind.counts_in == "group":
        assert mixed.param_groups[0]["step"] == plain.param_groups[0]["step"] == 9


def test_a_late_delivery_of_a_rule_that_counts() -> None:
    """All tensors of a group see one count, which grows without a delivery, too."""
    both = parameters()
    optimizer = Adan(both)
    rule = LateAdan.from_options(optimizer, WrapOptions())
    nothing = torch.tensor([], dtype=torch.int64)
    for step in range(4):
        for each in both:
            each.grad = torch.full_like(each, 4.0)
        take_step(rule, both, [torch.tensor([3]) if step == 3 else nothing, nothing])
    assert optimizer.param_groups[0]["step"] == 4
    assert float(optimizer.state[both[0]]["average"].view(-1)[3]) == pytest.approx(1 - 0.9**4)
    assert float(optimizer.state[both[0]]["change"].abs().sum()) == 0  # it is the first delivery of the coordinate


class Sizes(torch.optim.Optimizer):
    """Halves the size of a step each time. A size begins at the learning rate."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Take a step."""
        for p in self.param_groups[0]["params"]:
            size = self.state[p].setdefault("size", torch.full_like(p, self.param_groups[0]["lr"]))
            p.sub_(size * p.grad.sign())
            size.mul_(0.5)


class LateSizes(tritoncomm.LateRule):
    """Its rule."""

    held = ("size",)

    @staticmethod
    def fits(optimizer: torch.optim.Optimizer) -> bool:
        return isinstance(optimizer, Sizes)

    def initial(self, group, name, parameter):
        assert name == "size"
        return torch.full_like(parameter, group["lr"])

    def advance(self, group, held, mean, tau):
        return held["size"] / group["lr"] * mean.sign(), {"size": held["size"] * 0.5}


def test_a_rule_whose_state_does_not_begin_at_zero() -> None:
    """It says what the optimizer begins with."""
    ours, theirs = parameters(), parameters()
    late, plain = Sizes(ours), Sizes(theirs)
    rule = LateSizes.from_options(late, WrapOptions())
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad, other.grad = torch.ones_like(one), torch.ones_like(other)
        take_step(rule, ours, [None, None])
        plain.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
        assert torch.equal(late.state[one]["size"], plain.state[other]["size"])
