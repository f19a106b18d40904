"""Rules for late gradients: what all have in common, those of Lion and of SGD, and rules that users may write."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import tritoncomm
from test_rules import Lion
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tritoncomm import Late
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.step.exchange.feedback import Ages
from tritoncomm.step.exchange.layout import BucketLayout, Delivered
from tritoncomm.step.rules import choose
from tritoncomm.step.rules.adam import StalenessAwareAdam
from tritoncomm.step.rules.choose import exchanges_updates, find_rule
from tritoncomm.step.rules.late import AwareStep
from tritoncomm.step.rules.lion import LateLion
from tritoncomm.step.rules.sgd import LateSGD
from tritoncomm.step.rules.step import coupled_decay

from deliveries import ages_of, begin_step, forget_ages, take_step
from ranks import ranks
from tritoncomm_kernels import Entries

RATE, SHAPES = 0.01, ((6, 5), (7,))
BETAS = (0.9, 0.8, 0.95)


class Adan(torch.optim.Optimizer):
    """X. Xie et al., "Adan" (2022), without weight decay. It counts its steps in ``counts_in``."""

    def __init__(self, params, lr: float = RATE, counts_in: str = "group") -> None:
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
                average, change, square, before = (state.get(name, torch.zeros_like(p)) for name in OurLateAdan.held)
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


class OurLateAdan(tritoncomm.LateRule):
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


class OurLateAdanOfStates(OurLateAdan):
    """The same, where each parameter has a count."""

    counts_in = "state"


class Sizes(torch.optim.Optimizer):
    """Halves the size of a step each time. A size begins at the learning rate."""

    def __init__(self, params, lr: float = RATE) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Take a step."""
        for group in self.param_groups:
            for p in group["params"]:
                size = self.state[p].setdefault("size", torch.full_like(p, group["lr"]))
                p.sub_(size * p.grad.sign())
                size.mul_(0.5)


class LateSizes(tritoncomm.LateRule):
    """Its rule, which says what the state begins with."""

    held = ("size",)

    @staticmethod
    def fits(optimizer: torch.optim.Optimizer) -> bool:
        return isinstance(optimizer, Sizes)

    def initial(self, group, name, parameter):
        assert name == "size"
        return torch.full_like(parameter, group["lr"])

    def advance(self, group, held, mean, tau):
        return held["size"] / group["lr"] * mean.sign(), {"size": held["size"] * 0.5}


ADAMS = torch.optim.Adam, torch.optim.AdamW


class Kind(NamedTuple):
    """An optimizer with options, and its rule."""

    make: Callable[..., torch.optim.Optimizer]
    rule: type[AwareStep]
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed


def adams(**options: Any) -> dict[str, Kind]:
    """Return Adam and AdamW with some options."""
    label = ",".join(f"{name}={value}" for name, value in options.items())
    return {f"{kind.__name__} {label}": Kind(kind, StalenessAwareAdam, options) for kind in ADAMS}


KINDS = {
    **adams(),
    **adams(weight_decay=0.1),
    **adams(amsgrad=True),
    **adams(maximize=True, weight_decay=0.01),
    **adams(betas=(0.0, 0.9)),
    **adams(betas=(0.0, 0.0)),
    **adams(eps=1e-3, lr=torch.tensor(0.02)),
    **adams(foreach=True),
    "Lion": Kind(Lion, LateLion, {"weight_decay": 0.1}),
    **{
        f"SGD {options}": Kind(torch.optim.SGD, LateSGD, {"momentum": 0.5} | options)
        for options in ({}, {"nesterov": True}, {"maximize": True}, {"momentum": 1.0}, {"momentum": 0.9})
    },
    "Adan": Kind(Adan, OurLateAdan),
    "Adan of states": Kind(Adan, OurLateAdanOfStates, {"counts_in": "state"}),
    "Sizes": Kind(Sizes, LateSizes),
}


def made(kind: Kind) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Return two parameters and their optimizer, in groups with different rates."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = kind.make(parameters[:1], **{"lr": RATE} | kind.options)
    optimizer.add_param_group({"params": parameters[1:], "lr": 0.1 * RATE})
    return parameters, optimizer


def give_gradients(step: int, *owners: list[nn.Parameter]) -> None:
    """Give the parameters of all ``owners`` the gradients of a step."""
    generator = torch.Generator().manual_seed(step)
    for each in zip(*owners, strict=True):
        gradient = torch.randn(each[0].shape, generator=generator)
        for parameter in each:
            parameter.grad = gradient.clone()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("indexed", [False, True])
def test_delivered_at_once_is_the_optimizer_itself(kind: Kind, indexed: bool) -> None:
    """If every coordinate is delivered in every step, the optimizer itself would end there, or may go on from there."""
    (ours, late), (theirs, plain) = made(kind), made(kind)
    rule = kind.rule(late, Late())
    everything = [torch.arange(parameter.numel()) if indexed else None for parameter in ours]
    for step in range(20):
        give_gradients(step, ours, theirs)
        plain.step()
        if step in (10, 11):  # as after release() and another wrap()
            late.step()
            forget_ages(late) if step == 11 else None
            continue
        for parameter in ours:
            parameter.grad.add_(parameter.detach(), alpha=coupled_decay(late).get(id(parameter), 0.0))
        take_step(rule, ours, everything)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)
        for name, value in plain.state[other].items():
            if not (name == "step" and kind.rule is OurLateAdan):  # it counts in the group
                torch.testing.assert_close(late.state[one][name], value, rtol=2e-5, atol=2e-6, msg=name)
    if kind.rule is OurLateAdan:
        assert late.param_groups[0]["step"] == plain.param_groups[0]["step"] == 20
    if kind.rule is LateSGD:
        assert all(map(torch.equal, ours, theirs))


def late_sum(optimizer: torch.optim.Optimizer, late: Late, value: float, delivered: torch.Tensor) -> torch.Tensor:
    """Deliver the sum ``value`` of 16 steps to some coordinates. Return how far the parameter moves."""
    (parameter,) = optimizer.param_groups[0]["params"]
    rule, start = find_rule(optimizer)(optimizer, late), parameter.detach().clone()
    for step in range(16):
        parameter.grad = torch.full_like(parameter, value)
        take_step(rule, [parameter], [delivered if step == 15 else torch.arange(0)])
    return start - parameter.detach()


def lion(parameters: list[nn.Parameter], **options: Any) -> Lion:
    """Return Lion."""
    return Lion(parameters, **{"lr": RATE} | options)


def sgd(parameters: list[nn.Parameter], **options: Any) -> torch.optim.SGD:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, **{"lr": RATE, "momentum": 0.5} | options)


MOMENTUM = 3 * (1 - 0.5**16) / (1 - 0.5)  # of 16 steps with a gradient of 3
LATE = {
    "Lion": (lion, Late(), 12, ("exp_avg", 3 * (1 - 0.99**16))),  # 3 times the root of 16
    "SGD": (sgd, Late(), 16 * MOMENTUM, ("momentum_buffer", MOMENTUM)),
    "nesterov": (
        lambda parameters: sgd(parameters, nesterov=True), Late(), 16 * (3 + 0.5 * MOMENTUM),
        ("momentum_buffer", MOMENTUM),
    ),
    "limited": (sgd, Late(max_catch_up=5), 5 * MOMENTUM, ("momentum_buffer", MOMENTUM)),
}  # fmt: skip


@pytest.mark.parametrize(("make", "late", "steps", "kept"), LATE.values(), ids=LATE)
def test_a_late_sum(make, late: Late, steps: float, kept: tuple[str, float]) -> None:
    """A coordinate moves as in tau steps of the mean gradient, within the limits, and others rest."""
    parameter = nn.Parameter(torch.full((10,), 1000.0))
    optimizer = make([parameter])
    moved = late_sum(optimizer, late, 48.0, torch.tensor([3]))
    expected = torch.zeros(10).index_fill(0, torch.tensor(3), 1.0)
    torch.testing.assert_close(moved, RATE * steps * expected, rtol=0, atol=1e-3)
    name, value = kept
    torch.testing.assert_close(optimizer.state[parameter][name], value * expected)


@pytest.mark.parametrize(
    ("make", "start", "moved", "share"),
    [
        (lion, 1.0, 0.05, 1.0),
        (lion, 1e-3, RATE, 1.0),
        (sgd, 1.0, 2 * 0.05, 0.25),  # a quarter of the coordinates moves twice as far as the root mean square
        (sgd, 1e-3, 2 * RATE, 0.25),
        (sgd, 0.0, 2 * RATE, 0.25),
    ],
)
def test_catching_up_is_limited_by_the_tensor(make, start: float, moved: float, share: float) -> None:
    """A tensor moves by a twentieth of its norm at most, or each coordinate by a dense step."""
    optimizer = make([nn.Parameter(torch.full((100,), start))])
    found = late_sum(optimizer, Late(), 16.0, torch.arange(int(100 * share)))
    torch.testing.assert_close(found, moved * (torch.arange(100) < 100 * share), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("make", [torch.optim.Adam, sgd, lion])
def test_formats_of_parameters(make) -> None:
    """Parameters may have any strides, and fp64 is not rounded."""
    found, start = [], torch.linspace(-1, 1, 120, dtype=torch.float64).view(2, 3, 4, 5) / 3
    transposed = start.transpose(0, 3).contiguous().transpose(0, 3)
    for values in (start.clone(), start.clone(memory_format=torch.channels_last), transposed):
        parameter = nn.Parameter(values)
        optimizer = make([parameter], lr=1e-9)
        late = find_rule(optimizer)(optimizer, Late())
        for step in range(4):
            parameter.grad = torch.arange(1.0, 121, dtype=torch.float64).view(start.shape)
            take_step(late, [parameter], [torch.arange(step, 120, 2)])
        assert parameter.dtype == torch.float64
        assert not torch.equal(parameter.detach(), start)
        found.append(parameter.detach())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("value", [0.0, 0.9])
def test_momentum_may_change(value: float) -> None:
    """A schedule may set it, also to 0. A state that was saved without it starts with one of zeros."""
    (ours, late), (theirs, plain) = (made(KINDS["SGD {}"]) for _ in range(2))
    rule = LateSGD(late, Late())
    late.state[ours[0]]["momentum_buffer"] = None
    for step in range(6):
        for optimizer in (late, plain):
            optimizer.param_groups[0]["momentum"] = value if step in (2, 3) else 0.5
        give_gradients(step, ours, theirs)
        take_step(rule, ours, [None, None])
        plain.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("make", [lion, sgd])
def test_one_list_with_padding_is_the_same(make) -> None:
    """The form for a GPU, in which only the device knows the number of entries, ends with the same values."""
    (ours, first), (theirs, other) = (made(Kind(make, LateSGD)) for _ in range(2))
    by_list, by_flat = (find_rule(each)(each, Late()) for each in (first, other))
    layout = BucketLayout(theirs)
    generator = torch.Generator().manual_seed(2)
    for number in range(8):
        give_gradients(number, ours, theirs)
        chosen = (torch.rand(layout.numel, generator=generator) < 0.3).nonzero()[:, 0]
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in ours])
        padding = torch.full((3,), -1, dtype=torch.int32)
        entries = Entries(torch.cat([chosen.int(), padding]), torch.cat([flat[chosen], torch.zeros(3)]))
        reads = number % 2 == 1
        indices = [chosen[chosen < 30], chosen[chosen >= 30] - 30]
        take_step(by_list, ours, indices, None if reads else [flat[chosen[chosen < 30]], flat[chosen[chosen >= 30]]])
        mean = SparseVector.padded(entries, layout.numel)
        step = Delivered(mean, layout, begin_step(by_flat, layout))
        by_flat.step(step.read_again() if reads else step)
        for one, two in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, two)
            assert torch.equal(ages_of(first, one)[0], ages_of(other, two)[0])


@pytest.mark.parametrize(
    ("option", "plain", "other"),
    [
        ("maximize", False, True), ("caution", False, True), ("cautious", False, True), ("cautious_factor", 1.0, 0.5),
        ("weight_decouple", True, False), ("fixed_decay", False, True), ("corrected_weight_decay", False, True),
    ],
)  # fmt: skip
def test_variants_of_lion_have_no_rule(option: str, plain: object, other: object) -> None:
    """An option, or an attribute, by which a public Lion takes another step leaves this step to the optimizer."""
    optimizer = lion([nn.Parameter(torch.ones(4))])
    optimizer.update_fn = optimizer.step  # as some keep the arithmetic
    for values in (optimizer.param_groups[0], vars(optimizer)):
        for value, rule in ((other, None), (plain, LateLion)):
            values[option] = value
            assert find_rule(optimizer) is rule
    optimizer.defaults["adanorm"] = optimizer.param_groups[0]["adanorm"] = True  # nobody knows what it does
    assert find_rule(optimizer) is None
    assert find_rule(type("Tiger", (Lion,), {})([nn.Parameter(torch.ones(4))])) is None


def test_sgd_has_a_rule_with_momentum() -> None:
    """The defaults decide, since schedules change groups. Gradients travel either way, and not those of a subclass."""
    parameters, kind = [nn.Parameter(torch.ones(4))], type("Other", (torch.optim.SGD,), {"step": lambda self: None})
    assert find_rule(sgd(parameters)) is LateSGD
    assert find_rule(kind(parameters, lr=RATE, momentum=0.5)) is None
    for options in ({"momentum": 0.0}, {"dampening": 0.1}):
        assert find_rule(sgd(parameters, **options)) is None
        assert not exchanges_updates(sgd(parameters, **options))
        assert find_rule(sgd([{"params": parameters, **options}])) is LateSGD


def test_a_late_delivery_of_a_rule_that_counts() -> None:
    """All tensors of a group see one count, which grows without a delivery, too."""
    both = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = Adan(both)
    rule = OurLateAdan(optimizer, Late())
    for step in range(4):
        for each in both:
            each.grad = torch.full_like(each, 4.0)
        take_step(rule, both, [torch.tensor([3] if step == 3 else [], dtype=torch.int64), torch.arange(0)])
    assert optimizer.param_groups[0]["step"] == 4
    assert float(optimizer.state[both[0]]["average"].view(-1)[3]) == pytest.approx(1 - 0.9**4)
    assert float(optimizer.state[both[0]]["change"].abs().sum()) == 0  # it is the first delivery of the coordinate


@pytest.mark.parametrize("kind", [OurLateAdan, OurLateAdanOfStates])
def test_steps_count_again_after_a_load(kind: type[OurLateAdan], monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is loaded again and again repeats the same steps, and each counts."""
    monkeypatch.setattr(choose, "RULES", [kind])
    parameter = nn.Parameter(torch.ones(6, 5))
    optimizer = tritoncomm.wrap(Adan([parameter], counts_in=kind.counts_in), density=1.0)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    for _ in range(5):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        held = optimizer.param_groups[0] if kind.counts_in == "group" else optimizer.state[parameter]
        assert held["step"] == 2
        optimizer.load_state_dict(state)


def test_vectors_of_a_step_share_one_count() -> None:
    """A rule is called for each vector. The count of a group grows once in a step, also without a gradient."""
    both = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = Adan(both)
    rule = OurLateAdan(optimizer, Late())
    for _ in range(3):
        rule.begin()
        for each in both:
            layout = BucketLayout([each])
            each.grad = torch.ones_like(each)
            ages = Ages(layout.parameters, layout.bounds)
            ages.steps = 1
            ages.begin()
            rule.step(Delivered(SparseVector.full(torch.ones(each.numel())), layout, ages))
    assert optimizer.param_groups[0]["step"] == 3
    rule.begin()
    assert optimizer.param_groups[0]["step"] == 4


@ranks(4)
@pytest.mark.parametrize("counts_in", ["group", "state"])
def test_empty_shards_count(rank, world_size, counts_in):
    """A rank whose shard of a parameter is empty counts as the others do."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(8, 1, bias=False), mesh=mesh["shard"])
    tritoncomm.add_rule(OurLateAdan if counts_in == "group" else OurLateAdanOfStates)
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
    kind = type("Wrong", (OurLateAdan,), {"counts_in": "groups"})
    with pytest.raises(tritoncomm.ConfigurationError, match=r"counts_in='groups'.*'state'.*'group'"):
        kind(Adan([nn.Parameter(torch.ones(4))]), Late())


FORGETS = {
    "direction": lambda mean, direction, new: (direction[:1], new),
    "average": lambda mean, direction, new: (direction, {name: new[name] for name in new if name != "average"}),
    "change": lambda mean, direction, new: (direction, new | {"change": mean.sum()}),
}


@pytest.mark.parametrize("name", FORGETS)
def test_what_a_rule_returns_is_checked(name: str) -> None:
    """A direction or a state of another shape, or a missing one, is told: it would be broadcast, or stay as it was."""

    def advance(self, group, held, mean, tau):
        return FORGETS[name](mean, *OurLateAdan.advance(self, group, held, mean, tau))

    parameter = nn.Parameter(torch.zeros(4))
    rule = type("Wrong", (OurLateAdan,), {"advance": advance})(Adan([parameter]), Late())
    parameter.grad = torch.ones(4)
    layout = BucketLayout([parameter])
    step = Delivered(SparseVector.full(parameter.grad), layout, begin_step(rule, layout))
    with pytest.raises(tritoncomm.ConfigurationError, match=r"Wrong\.advance\(\) has .*each of shape \(4,\)"):
        rule.step(step)


def test_names_of_states_are_a_tuple() -> None:
    """A single text would count as its letters."""
    with pytest.raises(tritoncomm.ConfigurationError, match=r"held='v': must be a tuple of names, such as \('v',\)"):
        type("Wrong", (OurLateAdan,), {"held": "v"})(Adan([nn.Parameter(torch.ones(4))]), Late())
