"""Rules of optimizers that count their steps, or keep what does not begin at zero."""

from __future__ import annotations

import copy

import pytest
import torch
import tritoncomm
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tritoncomm import Late
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.step import settings
from tritoncomm.step.exchange.feedback import Ages, Ledger
from tritoncomm.step.exchange.layout import BucketLayout, Delivered
from tritoncomm.step.rules import choose

from deliveries import forget_ages, take_step
from ranks import ranks

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

    @classmethod
    def fits(cls, optimizer: torch.optim.Optimizer) -> bool:
        return isinstance(optimizer, Adan) and optimizer.counts_in == cls.counts_in

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
    rule = kind(mixed, Late())
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
    rule = LateAdan(optimizer, Late())
    nothing = torch.tensor([], dtype=torch.int64)
    for step in range(4):
        for each in both:
            each.grad = torch.full_like(each, 4.0)
        take_step(rule, both, [torch.tensor([3]) if step == 3 else nothing, nothing])
    assert optimizer.param_groups[0]["step"] == 4
    assert float(optimizer.state[both[0]]["average"].view(-1)[3]) == pytest.approx(1 - 0.9**4)
    assert float(optimizer.state[both[0]]["change"].abs().sum()) == 0  # it is the first delivery of the coordinate


@pytest.mark.parametrize("kind", [LateAdan, LateAdanOfStates])
def test_steps_count_again_after_a_load(kind: type[LateAdan], monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is loaded again and again repeats the same steps, and each counts."""
    monkeypatch.setattr(settings, "is_alone", lambda _: False)
    monkeypatch.setattr(choose, "RULES", [kind])
    (parameter,) = parameters()[:1]
    optimizer = tritoncomm.wrap(Adan([parameter], counts_in=kind.counts_in), density=1.0, warmup_steps=0)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state, counts = copy.deepcopy(optimizer.state_dict()), []
    for _ in range(20):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        held = optimizer.param_groups[0] if kind.counts_in == "group" else optimizer.state[parameter]
        counts.append(held["step"])
        optimizer.load_state_dict(state)
    assert counts == [2] * 20


def test_vectors_of_a_step_share_one_count() -> None:
    """A rule is called for each vector. The count of a group grows once in a step, also without a gradient."""
    both = parameters()
    optimizer = Adan(both)
    rule = LateAdan(optimizer, Late())
    for _ in range(3):
        rule.begin()
        for each in both:
            layout = BucketLayout([each])
            each.grad = torch.ones_like(each)
            mean = SparseVector.full(torch.ones(each.numel()))
            ledger = Ledger(torch.zeros(each.numel()), None)
            ages = Ages(layout.parameters, layout.bounds)
            ages.open(ledger, 1)
            ages.begin()
            rule.step(Delivered(mean, layout, ages))
    assert optimizer.param_groups[0]["step"] == 3
    rule.begin()
    assert optimizer.param_groups[0]["step"] == 4


@ranks(4)
@pytest.mark.parametrize("counts_in", ["group", "state"])
def test_empty_shards_count(rank, world_size, counts_in):
    """A rank whose shard of a parameter is empty counts as the others do."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(8, 1, bias=False), mesh=mesh["shard"])
    tritoncomm.add_rule(LateAdan if counts_in == "group" else LateAdanOfStates)
    fields = {"dense_below": 0, "warmup_steps": 0, "model": model, "process_group": mesh["replicate"].get_group()}
    optimizer = tritoncomm.wrap(Adan(model.parameters(), counts_in=counts_in), density=0.5, **fields)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).sum().backward()
        optimizer.step()
    held = optimizer.param_groups[0] if counts_in == "group" else optimizer.state[model.weight]
    assert held["step"] == 3


def test_counts_in_is_checked() -> None:
    """Another place is an error that names the two."""
    kind = type("Wrong", (LateAdan,), {"counts_in": "groups"})
    with pytest.raises(tritoncomm.ConfigurationError, match=r"counts_in='groups'.*'state'.*'group'"):
        kind(Adan(parameters()), Late())


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
    rule = LateSizes(late, Late())
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad, other.grad = torch.ones_like(one), torch.ones_like(other)
        take_step(rule, ours, [None, None])
        plain.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
        assert torch.equal(late.state[one]["size"], plain.state[other]["size"])
