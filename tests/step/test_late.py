"""The shared part of rules for late gradients, and those of Lion and of SGD with momentum."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import tritoncomm
from test_rules import Lion
from torch import nn
from tritoncomm import Late
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.step.exchange.layout import BucketLayout, Delivered
from tritoncomm.step.rules.choose import exchanges_updates, find_rule
from tritoncomm.step.rules.late import LateRule
from tritoncomm.step.rules.lion import LateLion
from tritoncomm.step.rules.sgd import LateSGD

from deliveries import ages_of, begin_step, forget_ages, take_step
from tritoncomm_kernels import Entries

RATE, DECAY = 0.01, 0.1


def made(**fields) -> tuple[list[nn.Parameter], Lion]:
    """Return two parameters and their optimizer."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((6, 5), (7,))]
    return parameters, Lion(parameters, **{"lr": RATE, "weight_decay": DECAY} | fields)


def gradients(steps: int) -> Iterator[list[torch.Tensor]]:
    """Yield the gradients of some steps."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield [torch.randn(shape, generator=generator) for shape in ((6, 5), (7,))]


def test_fits_by_name_and_options() -> None:
    """A class called Lion with Lion's options has the rule, others do not."""
    _, lion = made()
    assert find_rule(lion) is LateLion
    assert find_rule(type("Tiger", (Lion,), {})(made()[0])) is None


@pytest.mark.parametrize(
    ("option", "plain", "other"),
    [
        ("maximize", False, True), ("caution", False, True), ("cautious", False, True), ("cautious_factor", 1.0, 0.5),
        ("weight_decouple", True, False), ("fixed_decay", False, True), ("corrected_weight_decay", False, True),
    ],
)  # fmt: skip
def test_variants_have_no_rule(option: str, plain: object, other: object) -> None:
    """An option by which a public Lion takes another step than the paper's leaves this step to the optimizer."""
    _, lion = made()
    for value, rule in ((plain, LateLion), (other, None)):
        lion.param_groups[0][option] = value
        assert find_rule(lion) is rule


@pytest.mark.parametrize(("name", "value"), [("maximize", True), ("decoupled_wd", True), ("use_gc", True)])
def test_options_outside_of_groups(name: str, value: object) -> None:
    """What a Lion keeps as an attribute may change its step, too, and so may an option that nobody knows."""
    _, lion = made()
    lion.update_fn = lion.step  # as some keep the arithmetic
    setattr(lion, name, not value)
    assert find_rule(lion) is LateLion
    setattr(lion, name, value)
    assert find_rule(lion) is None
    delattr(lion, name)
    lion.defaults["adanorm"] = lion.param_groups[0]["adanorm"] = True
    assert find_rule(lion) is None


def test_delivered_at_once_is_the_optimizer_itself() -> None:
    """If every coordinate is delivered in every step, the result is Lion's."""
    (ours, lion), (theirs, plain) = made(), made()
    rule = LateLion(lion, Late())
    for given in gradients(6):
        for one, other, gradient in zip(ours, theirs, given, strict=True):
            one.grad, other.grad = gradient.clone(), gradient.clone()
        take_step(rule, ours, [None, None])
        plain.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(lion.state[one]["exp_avg"], plain.state[other]["exp_avg"])


def test_a_late_sum() -> None:
    """After tau steps, a coordinate moves by f learning rates, and its average by tau steps of the mean gradient."""
    parameter = nn.Parameter(torch.full((10,), 1000.0))
    lion = Lion([parameter], lr=RATE, weight_decay=0.0)
    rule = LateLion(lion, Late())
    for step in range(16):
        last = step == 15
        parameter.grad = torch.full((10,), 16.0 if last else 0.0)
        take_step(rule, [parameter], [torch.tensor([3])] if last else [torch.tensor([], dtype=torch.int64)])
    moved = torch.zeros(10)
    moved[3] = RATE * 12  # 16 steps, and 3 times their root at most
    torch.testing.assert_close(1000.0 - parameter.detach(), moved, rtol=0, atol=1e-3)
    expected = torch.zeros(10)
    expected[3] = 1 - 0.99**16
    torch.testing.assert_close(lion.state[parameter]["exp_avg"], expected)


def test_catching_up_is_limited_by_the_tensor() -> None:
    """A tensor moves by a twentieth of its norm at most, unless dense steps would move it further."""
    for start, factor in ((1.0, 0.05 / RATE), (1e-3, 1.0)):
        parameter = nn.Parameter(torch.full((100,), start))
        rule = LateLion(Lion([parameter], lr=RATE, weight_decay=0.0), Late())
        for step in range(16):
            last = step == 15
            parameter.grad = torch.ones(100)
            take_step(rule, [parameter], [torch.arange(100 if last else 0)])
        torch.testing.assert_close(start - parameter.detach(), torch.full((100,), RATE * factor))


def sgd(parameters: list[nn.Parameter], **options) -> torch.optim.SGD:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, **{"lr": RATE, "momentum": 0.5} | options)


def test_sgd_has_a_rule_with_momentum() -> None:
    """The defaults decide, since schedules change groups. Gradients travel either way, and not those of a subclass."""
    (parameters, _), kind = made(), type("Other", (torch.optim.SGD,), {"step": lambda self, closure=None: None})
    assert find_rule(sgd(parameters)) is LateSGD
    assert find_rule(kind(parameters, lr=RATE, momentum=0.5)) is None
    for options in ({"momentum": 0.0}, {"dampening": 0.1}):
        assert find_rule(sgd(parameters, **options)) is None
        assert not exchanges_updates(sgd(parameters, **options))
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "momentum": 0.0}]
    assert find_rule(sgd(groups)) is LateSGD


@pytest.mark.parametrize("option", [{"dampening": 0.5}, {"differentiable": True}], ids=str)
def test_sgd_refuses_options_by_name(option: dict[str, object]) -> None:
    """Those of a group that the rule cannot honour are refused, also when they come later."""
    (name, value), optimizer = *option.items(), sgd([nn.Parameter(torch.ones(4))])
    rule = LateSGD(optimizer, Late())
    optimizer.param_groups[0][name] = value
    with pytest.raises(tritoncomm.ConfigurationError, match=f"{name}={value}.*leave it out"):
        rule.check_options()


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"maximize": True}, {"momentum": 1.0}], ids=str)
def test_sgd_delivered_at_once_is_the_optimizer_itself(options: dict[str, bool]) -> None:
    """If every coordinate is delivered in every step, the result is torch's to the bit, which can continue from it."""
    (ours, _), (theirs, _) = made(), made()
    late, plain = sgd(ours, **options), sgd(theirs, **options)
    rule = LateSGD(late, Late())
    for step, given in enumerate(gradients(8)):
        for one, other, gradient in zip(ours, theirs, given, strict=True):
            one.grad, other.grad = gradient.clone(), gradient.clone()
        if step < 6:
            take_step(rule, ours, [None, None])
        else:
            late.step()
        plain.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(late.state[one]["momentum_buffer"], plain.state[other]["momentum_buffer"])


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_late_sum_of_sgd(nesterov: bool) -> None:
    """The momentum is that of tau steps of the mean gradient, and moves the coordinate tau times. Then it rests."""
    parameter = nn.Parameter(torch.full((10,), 1000.0))
    late = sgd([parameter], nesterov=nesterov)
    rule = LateSGD(late, Late())
    for step in range(20):
        last = step == 15
        parameter.grad = torch.full((10,), 48.0 if last else 0.0)
        take_step(rule, [parameter], [torch.tensor([3])] if last else [torch.tensor([], dtype=torch.int64)])
    momentum = 3 * (1 - 0.5**16) / (1 - 0.5)
    moved = torch.zeros(10)
    moved[3] = RATE * 16 * (3 + 0.5 * momentum if nesterov else momentum)
    torch.testing.assert_close(1000.0 - parameter.detach(), moved, rtol=0, atol=1e-3)
    assert float(late.state[parameter]["momentum_buffer"][3]) == pytest.approx(momentum)


@pytest.mark.parametrize(("start", "moved"), [(1.0, 2 * 0.05), (1e-3, RATE * 2), (0.0, RATE * 2)])
def test_catching_up_of_sgd_is_limited_by_the_tensor(start: float, moved: float) -> None:
    """A tensor moves by a twentieth of its norm at most, or each coordinate by a dense step."""
    parameter = nn.Parameter(torch.full((100,), start))
    rule = LateSGD(sgd([parameter]), Late())
    for step in range(16):
        last = step == 15
        parameter.grad = torch.full((100,), 16.0)
        take_step(rule, [parameter], [torch.arange(25 if last else 0)])
    expected = torch.zeros(100)
    expected[:25] = moved  # a quarter of the coordinates, which moves twice as far as the root mean square
    torch.testing.assert_close(start - parameter.detach(), expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("rule", [LateSGD, LateLion])
def test_formats_of_parameters(rule: type[LateRule]) -> None:
    """Parameters may have any strides, and fp64 is not rounded."""
    found, start = [], torch.linspace(-1, 1, 120, dtype=torch.float64).view(2, 3, 4, 5) / 3
    transposed = start.transpose(0, 3).contiguous().transpose(0, 3)
    for values in (start.clone(), start.clone(memory_format=torch.channels_last), transposed):
        parameter = nn.Parameter(values)
        kind = sgd([parameter]) if rule is LateSGD else Lion([parameter])
        late = rule(kind, Late())
        for step in range(4):
            parameter.grad = torch.full_like(parameter, 1e-9 if rule is LateSGD else 1.0)
            take_step(late, [parameter], [torch.arange(step, 120, 2)])
        assert parameter.dtype == torch.float64
        assert not torch.equal(parameter.detach(), start)
        found.append(parameter.detach())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_step_of_the_optimizer_delivers_every_coordinate() -> None:
    """A gradient after it is not late, and the momentum of those steps stays."""
    parameter = nn.Parameter(torch.ones(4))
    optimizer = sgd([parameter])
    rule = LateSGD(optimizer, Late())
    for _ in range(10):
        parameter.grad = torch.ones(4)
        take_step(rule, [parameter], [torch.arange(0)])
    optimizer.step()
    forget_ages(optimizer)
    again = LateSGD(optimizer, Late())  # as after release() and another wrap()
    take_step(again, [parameter], [torch.arange(4)])
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], torch.full((4,), 1.5))


@pytest.mark.parametrize("value", [0.0, 0.9])
def test_momentum_may_change(value: float) -> None:
    """A schedule may set it, also to 0, and torch does the same if every coordinate is delivered."""
    (ours, _), (theirs, _) = made(), made()
    late, plain = sgd(ours), sgd(theirs)
    rule = LateSGD(late, Late())
    for step, given in enumerate(gradients(6)):
        for optimizer in (late, plain):
            optimizer.param_groups[0]["momentum"] = value if step in (2, 3) else 0.5
        for one, other, gradient in zip(ours, theirs, given, strict=True):
            one.grad, other.grad = gradient.clone(), gradient.clone()
        take_step(rule, ours, [None, None])
        plain.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("limit", "factor"), [(None, 16), (5.0, 5)])
def test_catching_up_of_sgd_may_be_limited(limit: float | None, factor: float) -> None:
    """A sum counts for all its steps by default: noise has cancelled in it. ``max_catch_up`` limits that."""
    parameter = nn.Parameter(torch.full((4,), 1000.0))
    rule = LateSGD(sgd([parameter]), Late(max_catch_up=limit))
    for step in range(16):
        last = step == 15
        parameter.grad = torch.full((4,), 16.0)
        take_step(rule, [parameter], [torch.arange(4 if last else 0)])
    expected = torch.full((4,), factor * RATE * (1 - 0.5**16) / (1 - 0.5))
    torch.testing.assert_close(1000.0 - parameter.detach(), expected, rtol=0, atol=1e-3)


def test_momentum_that_torch_has_not_kept() -> None:
    """A state that was saved without momentum starts with one of zeros."""
    parameter = nn.Parameter(torch.ones(4))
    late = sgd([parameter])
    late.state[parameter]["momentum_buffer"] = None
    parameter.grad = torch.ones(4)
    take_step(LateSGD(late, Late()), [parameter], [None])
    torch.testing.assert_close(parameter.detach(), torch.full((4,), 1 - RATE))


@pytest.mark.parametrize(("rule", "kind"), [(LateLion, Lion), (LateSGD, sgd)])
def test_one_list_with_padding_is_the_same(rule: type[LateRule], kind: Callable[..., torch.optim.Optimizer]) -> None:
    """The form for a GPU, in which only the device knows the number of entries, ends with the same values."""
    (ours, _), (theirs, _) = made(), made()
    first, other = kind(ours), kind(theirs)
    by_list, by_flat = (rule(each, Late()) for each in (first, other))
    layout = BucketLayout(theirs)
    generator = torch.Generator().manual_seed(2)
    for number, given in enumerate(gradients(8)):
        chosen = (torch.rand(layout.numel, generator=generator) < 0.3).nonzero()[:, 0]
        flat = torch.cat([gradient.reshape(-1) for gradient in given])
        padding = torch.full((3,), -1, dtype=torch.int32)
        entries = Entries(torch.cat([chosen.int(), padding]), torch.cat([flat[chosen], torch.zeros(3)]))
        reads = number % 2 == 1
        indices = [chosen[chosen < 30], chosen[chosen >= 30] - 30]
        for parameters in (ours, theirs):
            for parameter, gradient in zip(parameters, given, strict=True):
                parameter.grad = gradient.clone()
        take_step(by_list, ours, indices, None if reads else [flat[chosen[chosen < 30]], flat[chosen[chosen >= 30]]])
        mean = SparseVector.padded(entries, layout.numel)
        step = Delivered(mean, layout, begin_step(by_flat, layout))
        by_flat.step(step.read_again() if reads else step)
        for one, two in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, two)
            assert torch.equal(ages_of(first, one)[0], ages_of(other, two)[0])


@pytest.mark.parametrize("kind", [Lion, sgd])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume(dtype: torch.dtype, kind: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    """A run that is saved and loaded continues to the bit, also with parameters that cannot hold step counts."""
    ends = []
    for resumes in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(40, 40).to(dtype)
        optimizer = tritoncomm.wrap(kind(list(model.parameters())), density=0.1, warmup_steps=2)
        generator = torch.Generator().manual_seed(3)
        for step in range(8):
            if resumes and step == 4:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer.release()
                optimizer = tritoncomm.wrap(kind(list(model.parameters())), density=0.1, warmup_steps=2)
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            model(torch.randn(4, 40, generator=generator).to(dtype)).square().mean().backward()
            optimizer.step()
        assert optimizer.metrics()["longest_wait"] > 0
        ends.append(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
    assert torch.equal(*ends)
