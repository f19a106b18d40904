"""What the state of a wrapped optimizer holds: resuming from it, and rejecting another one's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit import equal_on_all_ranks
from test_rules import Lion
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from tritoncomm import ConfigurationError, checkpoint
from tritoncomm.step.saved import state as exchange_state

from ranks import ranks
from small_model import backward, model, sgd, sparse_wrap

RULES = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.05),
    "momentum": sgd,
    "nesterov": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=0.1),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
    "amsgrad": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01, amsgrad=True),
    "lion": lambda net: Lion(net.parameters()),
}


def outline(state: dict[str, object]) -> dict[str, object]:
    """Return what the entries of a parameter's state are."""
    return {
        name: (value.dtype, value.shape, value.device) if isinstance(value, torch.Tensor) else type(value)
        for name, value in state.items()
    }


def step(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Take a step by gradients of this ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


def states_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all entries of the state of ``optimizer``."""
    return [torch.as_tensor(value) for p in net.parameters() for _, value in sorted(optimizer.state[p].items())]


@ranks(2)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.float32) for kind in RULES), *((kind, torch.bfloat16) for kind in ("momentum", "amsgrad", "lion"))],
)
def test_state_is_that_of_the_original_optimizer(rank, world_size, kind, dtype) -> None:
    """Its entries are the original optimizer's alone: it loads them and goes on, and the wrapped one from there."""
    make, net, dense = RULES[kind], model().to(dtype), model().to(dtype)
    optimizer, bare = sparse_wrap(make(net), algo="topk_allgather", density=0.25, warmup_steps=0), make(dense)
    for number in range(5):
        step(net, optimizer, 2 * number + rank)
    step(dense, bare, 0)
    for ours, theirs in zip(net.parameters(), dense.parameters(), strict=True):
        assert outline(optimizer.state[ours]) == outline(bare.state[theirs])
    state, expected = (copy.deepcopy(each.state_dict()) for each in (optimizer, bare))
    assert [*map(outline, state["state"].values())] == [*map(outline, expected["state"].values())]
    bare.load_state_dict(state)
    assert all(map(torch.equal, states_of(net, optimizer), states_of(dense, bare)))
    step(dense, bare, 1)
    again = sparse_wrap(make(net), algo="topk_allgather", density=0.25, warmup_steps=0)
    again.load_state_dict(copy.deepcopy(bare.state_dict()))
    assert all(map(torch.equal, states_of(net, again), states_of(dense, bare)))
    for number in range(3):
        step(net, again, 2 * number + rank)
    assert equal_on_all_ranks(net.parameters())


def test_foreign_checkpoints_are_rejected() -> None:
    """What is saved by another version, or is incomplete, or of another model, is rejected and changes nothing."""
    net = model()
    optimizer = sparse_wrap(sgd(net))
    backward(net)
    optimizer.step()
    residual_norm = optimizer.metrics()["residual_norm"]
    other = sparse_wrap(sgd(nn.Linear(3, 2))).state_dict()
    newer, incomplete = optimizer.state_dict(), optimizer.state_dict()
    newer["tritoncomm"] |= {"schema": 99}
    newer["tritoncomm"]["checksum"] = exchange_state.checksum(newer["tritoncomm"])
    del incomplete["tritoncomm"]["algorithm"]
    for state, said in (
        (newer, "schema=99"),
        (incomplete, "corrupt"),
        (other, r"groups of \[2\] parameters, .* the optimizer have \[4\]"),
        (optimizer.state_dict() | {"tritoncomm": other["tritoncomm"]}, "other parameters"),
        ({"epoch": 3}, r"expected keys 'state', 'param_groups', got \['epoch'\]"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            optimizer.load_state_dict(state)
    assert optimizer.metrics()["residual_norm"] == residual_norm


def test_another_format_keeps_the_state(caplog: pytest.LogCaptureFixture) -> None:
    """A state that was saved with rounded values continues in fp32, thresholds included, and nothing is said."""
    net = model()
    rounded, exact, other = (
        sparse_wrap(torch.optim.AdamW(net.parameters()), density=density, values=values)
        for density, values in ((0.2, "4bit"), (0.2, "fp32"), (0.3, "4bit"))
    )
    for seed in range(3):
        step(net, rounded, seed)
    exact.load_state_dict(rounded.state_dict())
    assert not caplog.records
    assert exact.state_dict()["tritoncomm"]["algorithm"] == rounded.state_dict()["tritoncomm"]["algorithm"]
    other.load_state_dict(rounded.state_dict())
    assert "written with other settings" in caplog.text


class Nested(torch.optim.SGD):
    """Keeps tensors under keys whose texts are equal when they are joined."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for parameter in (each for group in self.param_groups for each in group["params"]):
            kept = [torch.full((3,), float(number)) for number in range(4)]
            self.state[parameter] = {"a": {"b.c": kept[0]}, "a.b": {"c": kept[1]}, "n": {1: kept[2], "1": kept[3]}}


def test_keys_of_a_state_are_told_apart(tmp_path: Path) -> None:
    """A checkpoint has each tensor of an optimizer's state, whatever keys lead to it."""
    states = []
    for saves in (True, False):
        net = model()
        optimizer = sparse_wrap(Nested(net.parameters(), lr=0.1))
        if saves:
            step(net, optimizer, 0)
            checkpoint.save(optimizer, tmp_path)
        else:
            checkpoint.load(optimizer, tmp_path)
        states.append(str(optimizer.state_dict()["state"]))
    assert states[0] == states[1]


def load_own(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the optimizer's own state without residuals."""
    bare = {key: each for key, each in optimizer.state_dict().items() if key != "tritoncomm"}
    optimizer.load_state_dict(copy.deepcopy(bare))


def load_own_by_torch(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Do the same by ``torch.distributed.checkpoint``, which returns no marks of a wrapped optimizer."""
    state = copy.deepcopy(get_optimizer_state_dict(net, optimizer))
    set_optimizer_state_dict(net, optimizer, {key: state[key] for key in ("state", "param_groups")})


@pytest.mark.parametrize("load", [load_own, load_own_by_torch])
def test_own_state_without_residuals_ends_no_wait(load: Callable[..., None]) -> None:
    """The residual stays, and so do the ages of what waits in it: the run goes on as if nothing had been loaded."""
    ends = []
    for loads in (False, True):
        net = model()
        optimizer = sparse_wrap(torch.optim.AdamW(net.parameters(), lr=0.01), density=0.1, warmup_steps=0)
        for seed in range(8):
            if loads and seed == 5:
                load(net, optimizer)
            step(net, optimizer, seed)
        ends.append(torch.cat([p.detach().reshape(-1) for p in net.parameters()]))
    assert torch.equal(*ends)


def test_root_mean_square_is_resumed() -> None:
    """A checkpoint restores the root mean square of a parameter, which only some steps compute, also of bf16."""
    net = model().bfloat16()
    optimizer = sparse_wrap(torch.optim.AdamW(net.parameters(), lr=0.01), density=0.2)
    for _ in range(21):  # the first steps all compute it
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    saved = optimizer.state_dict()
    net[0].weight.data.mul_(3)
    again = sparse_wrap(torch.optim.AdamW(net.parameters(), lr=0.01), density=0.2)
    again.load_state_dict(saved)
    again.step()
    before, after = (state["tritoncomm"]["rms"] for state in (saved, again.state_dict()))
    assert {each.dtype for each in after} == {torch.float32}
    assert all(map(torch.equal, before, after))


def load_dense(optimizer: torch.optim.Optimizer, bare: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Load the state of the unmodified optimizer."""
    optimizer.load_state_dict(copy.deepcopy(bare.state_dict()))
    return optimizer


def reset_residuals(optimizer: torch.optim.Optimizer, bare: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Load the optimizer's own state without residuals."""
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    assert optimizer.metrics()["longest_wait"] > 2
    optimizer.load_state_dict(state, residuals="reset")
    return optimizer


def wrap_loaded(optimizer: torch.optim.Optimizer, bare: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Wrap an optimizer that has loaded the state."""
    bare.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return sparse_wrap(bare, density=0.1, warmup_steps=0)


@pytest.mark.parametrize(("change", "steps"), [(load_dense, 7), (reset_residuals, 5), (wrap_loaded, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ages_end_with_residuals(change: Callable[..., torch.optim.Optimizer], steps: int, dtype: torch.dtype) -> None:
    """Where no residual waits any more, every coordinate counts as delivered in the last step of the optimizer."""
    net = model().to(dtype)
    optimizer = sparse_wrap(torch.optim.AdamW(net.parameters(), lr=0.01), density=0.1, warmup_steps=0)
    bare = torch.optim.AdamW(net.parameters(), lr=0.01)
    for seed in range(5):
        step(net, optimizer, seed)
    for seed in range(7):
        step(net, bare, seed)
    assert optimizer.metrics()["longest_wait"] > 2
    optimizer = change(optimizer, bare)
    assert optimizer.metrics()["longest_wait"] == 0
    step(net, optimizer, 5)
    assert optimizer.metrics()["longest_wait"] == 1
    assert all(float(state["step"]) == steps + 1 for state in optimizer.state.values())
