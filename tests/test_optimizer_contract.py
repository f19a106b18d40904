"""The contract of torch.optim.Optimizer, checked on bare optimizers (the control) and on wrapped ones."""

from __future__ import annotations

import copy
import io
import pickle
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
import tritoncomm
from torch import nn
from tritoncomm import algorithms
from tritoncomm.algorithms import at_density

from small_model import model, train

Make = Callable[[nn.Module], torch.optim.Optimizer]

BARE: dict[str, Make] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.05),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
}


def wrapped(make: Make) -> Make:
    """Return a factory of wrapped optimizers. The models are small, so ``dense_below=0`` keeps the exchange sparse."""
    return lambda net: tritoncomm.wrap(make(net), density=0.2, dense_below=0)


MAKERS = BARE | {f"wrapped-{name}": wrapped(make) for name, make in BARE.items()}
every = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
every_bare = pytest.mark.parametrize("make", BARE.values(), ids=BARE)


def same(a: nn.Module, b: nn.Module) -> bool:
    """Whether two models are equal bit for bit."""
    return all(map(torch.equal, a.parameters(), b.parameters()))


@every
def test_learning_rate_set_after_a_load(make: Make) -> None:
    """A learning rate that is set after load_state_dict() takes effect, and the state has the model's parameters."""
    net = model()
    optimizer = make(net)
    train(net, optimizer, range(2))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[0]["weight_decay"] = 0.0
    before = copy.deepcopy(net)
    train(net, optimizer, range(2, 3))
    assert same(net, before)
    assert all(parameter in set(net.parameters()) for parameter in optimizer.state)


@every
def test_state_and_groups_can_be_assigned(make: Make) -> None:
    """Equal copies of the state and the groups train to the same bits, and the assigned objects are those in use."""
    nets = model(), model()
    optimizers = [make(net) for net in nets]
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(net, optimizer, range(3))
    optimizer = optimizers[1]
    optimizer.state = defaultdict(dict, {key: copy.deepcopy(value) for key, value in optimizer.state.items()})
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
    for net, each in zip(nets, optimizers, strict=True):
        train(net, each, range(3, 6))
    assert same(*nets)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[0]["weight_decay"] = 0.0
    train(nets[1], optimizer, range(6, 7))
    assert same(*nets)


@pytest.mark.parametrize("algo", algorithms())
def test_state_dict_loads_with_weights_only(algo: str) -> None:
    """The state of every method loads with weights_only=True and continues the run bit for bit."""

    def make(net: nn.Module) -> torch.optim.Optimizer:
        recipe = at_density(algo, 0.2)
        return tritoncomm.wrap(torch.optim.SGD(net.parameters(), lr=0.05), recipe, dense_below=0)

    straight, stopped = model(), model()
    first, second = make(straight), make(stopped)
    train(straight, first, range(3))
    train(stopped, second, range(3))
    file = io.BytesIO()
    torch.save(second.state_dict(), file)
    file.seek(0)
    third = make(stopped)
    third.load_state_dict(torch.load(file, weights_only=True))
    train(straight, first, range(3, 6))
    train(stopped, third, range(3, 6))
    assert same(straight, stopped)


@every
def test_hooks(make: Make) -> None:
    """Step, state-dict and load hooks receive the optimizer they were registered on and may change the result."""
    net = model()
    optimizer = make(net)
    called: list[str] = []

    def note(name: str, answer: object = None) -> Callable[..., object]:
        def hook(subject: object, *_: object) -> object:
            assert subject is optimizer
            called.append(name)
            return answer

        return hook

    optimizer.register_step_pre_hook(note("step before"))
    optimizer.register_step_post_hook(note("step after"))
    optimizer.register_state_dict_pre_hook(note("save before"))
    optimizer.register_load_state_dict_pre_hook(note("load before"))
    optimizer.register_load_state_dict_post_hook(note("load after"))
    train(net, optimizer, range(1))
    plain = optimizer.state_dict()
    optimizer.register_state_dict_post_hook(note("save after", plain | {"mark": 1}))
    assert optimizer.state_dict()["mark"] == 1
    optimizer.load_state_dict(plain)
    assert called == [
        "step before", "step after", "save before", "save before", "save after", "load before", "load after"
    ]  # fmt: skip


@every_bare
def test_copies_are_refused(make: Make) -> None:
    """A wrapped optimizer is neither copied nor pickled, and nothing has changed."""
    net = model()
    optimizer = tritoncomm.wrap(make(net), density=0.2)
    train(net, optimizer, range(3))
    for action in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"neither copied nor pickled.*state_dict\(\)"):
            action(optimizer)
    train(net, optimizer, range(3, 6))


@every
def test_frozen_tied_and_empty_parameters(make: Make) -> None:
    """Frozen parameters stay unchanged, tied ones stay tied, and zero-element ones are accepted."""
    net = model()
    net.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    net.empty = nn.Parameter(torch.ones(0, 3))
    net.tied = net[0].weight
    optimizer = make(net)
    before = copy.deepcopy(net)
    train(net, optimizer, range(5))
    assert torch.equal(net.frozen, before.frozen)
    assert not torch.equal(net.tied, before.tied)
    assert net.tied is net[0].weight
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in net[:3].parameters())
