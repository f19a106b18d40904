"""Replicas that differ are found, and named on all ranks. Steps that would let them differ are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from kit import log_lines
from models import adamw, ddp, equal, exact, flat, loss_of, mesh, net, residual, sgd, sharded, tiny, train
from torch import nn
from tritoncomm import ConfigMismatchError, ConfigurationError, ProtocolMismatchError
from tritoncomm.step.agree import replica
from tritoncomm.step.tensors.shards import local

from ranks import ranks

SGD = partial(torch.optim.SGD, lr=0.1)


def flip(tensor: torch.Tensor, place: int = 0) -> None:
    """Change a low bit of an element."""
    bits = local(tensor.detach()).view(-1).view(torch.int32)
    bits[place] ^= 1 << 12


class Features(nn.Module):
    """A model with frozen random weights, a random buffer, and statistics of batches."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = tiny()
        torch.manual_seed(seed)
        self.features = nn.Linear(6, 6).requires_grad_(requires_grad=False)
        self.register_buffer("phases", torch.rand(6))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the model."""
        return self.net(self.norm((self.features(x) + self.phases).cos()))


@ranks(2)
def test_rest_of_a_model_in_ddp(rank, world_size):
    """What DDP was told to ignore may differ, and buffers that it broadcasts in each pass are not compared."""
    model = Features(rank)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["features.weight"])
    model.net.frozen.requires_grad_()
    outer = ddp(model)
    exact(SGD([p for p in outer.parameters() if p.requires_grad]), model=outer)
    assert not equal([model.features.weight])
    for broadcast in (True, False):
        outer = ddp(Features(0), broadcast_buffers=broadcast)
        outer(torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)))
        with log_lines() as lines:
            exact(adamw(outer), model=outer)
        assert any("buffers of the model differ" in line for line in lines) == (rank == 0 and not broadcast)
    other = Features(0)
    if rank:
        other.register_buffer("more", torch.ones(1))
    with pytest.raises(ConfigMismatchError, match=r"shape of more: rank 0 has nothing, rank 1 has \(1,\)"):
        exact(adamw(other), model=other)


CHANGES = {
    "net.0.weight": lambda model, _: flip(model.net[0].weight, 7),
    "features.bias": lambda model, _: flip(model.features.bias),  # which the optimizer does not hold
    "exp_avg of net.2.bias": lambda model, optimizer: flip(optimizer.state[model.net[2].bias]["exp_avg"], 2),
    "step of net.0.weight": lambda model, optimizer: optimizer.state[model.net[0].weight]["step"].add_(1),
}


@ranks(2)
@pytest.mark.parametrize("name", CHANGES)
def test_drift(rank, world_size, name):
    """One bit on one rank is found in the next check: all name the place, and the step after which it was equal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "EVERY", 3)
        model = Features(0)
        optimizer = exact(adamw(model.net if name == "features.bias" else model), model=model)
        train(model, optimizer, rank, range(4))
        is_state = " of " in name  # which changes parameters in the next steps
        train(model, optimizer, rank, range(4, 6 if is_state else 4))
        if rank == 1:
            CHANGES[name](model, optimizer)
        train(model, optimizer, rank, range(6 if is_state else 4, 6))
        before, held = flat(model), residual(optimizer)
        wanted = rf"{name} differs between ranks: rank 0 has .*, rank 1 has .*after step 3\..*broadcast_parameters"
        for _ in range(2):
            with pytest.raises(ProtocolMismatchError, match=wanted):
                train(model, optimizer, rank, [6])
        assert torch.equal(flat(model), before)
        assert torch.equal(residual(optimizer), held)


@ranks(4)
def test_drift_of_shards(rank, world_size):
    """Replicas of a sharded model are compared within their group, and all ranks learn what differs."""
    over = mesh()
    group = over["replicate"].get_group()
    model = sharded(net(), over)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "EVERY", 3)
        optimizer = exact(adamw(model), model=model, process_group=group)
        train(model, optimizer, rank, range(4))
        if rank == 3:
            flip(model[2].weight)
        train(model, optimizer, rank, range(4, 6))
        said = r"2\.weight differs between ranks: rank 1 has .*, rank 3 has .*after step 3\."
        with pytest.raises(ProtocolMismatchError, match=said):
            train(model, optimizer, rank, [6])


@ranks(2)
@pytest.mark.parametrize("local_steps", [1, 2])
def test_parameters_that_are_held_later(rank, world_size, local_steps):
    """Parameters that a group brings in later are compared as those of the optimizer from then on."""
    model = tiny()
    model[2].requires_grad_(requires_grad=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "EVERY", 1)
        optimizer = exact(SGD(model[0].parameters()), "dense", model=model, local_steps=local_steps)
        train(model, optimizer, rank, range(4))
        model[2].requires_grad_()
        optimizer.add_param_group({"params": list(model[2].parameters())})
        train(model, optimizer, rank, range(4, 8))
    assert equal(model)


class SAM(torch.optim.Optimizer):
    """An optimizer with two steps under other names, as sharpness-aware minimization has, and one inside."""

    def __init__(self, params, base: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base_optimizer = base(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        """Move up the gradient."""
        for p in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad, alpha=0.05)

    @torch.no_grad()
    def second_step(self) -> None:
        """Go back, and let the optimizer inside take its step."""
        for p in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            p.copy_(self.state[p]["old"])
        self.base_optimizer.step()

    def step(self, closure=None) -> None:
        """Take both steps."""
        assert closure is not None, "SAM requires closure, but it was not provided"
        self.first_step()
        closure()
        self.second_step()


@ranks(2)
def test_steps_by_other_names(rank, world_size):
    """Methods that change parameters by gradients raise, and say that the optimizer inside is to be wrapped."""
    model = tiny()
    base = SAM(model.parameters(), SGD)
    optimizer = exact(base, model=model)
    before = flat(model)
    with pytest.raises(ConfigurationError, match=r"SAM.step\(\) has failed: SAM requires closure.*inside SAM"):
        optimizer.step(lambda: loss_of(model, rank, 0).backward())
    loss_of(model, rank, 0).backward()
    assert torch.equal(flat(model), before)
    with pytest.raises(RuntimeError, match=r"first_step\(\) of SAM.*wrap the optimizer inside SAM"):
        optimizer.first_step()
    with pytest.raises(RuntimeError, match="a list or an optimizer that contains this SGD was wrapped"):
        optimizer.second_step()
    # As the error says.
    model = tiny()
    outer = SAM(model.parameters(), lambda groups: exact(SGD(groups), model=model))
    for step in range(3):
        for take in (outer.first_step, outer.second_step):
            outer.zero_grad()
            loss_of(model, rank, step).backward()
            take()
    assert equal(model)


class Lookahead(torch.optim.Optimizer):
    """An optimizer that lets others, in a list, take the step."""

    def __init__(self, *inside: torch.optim.Optimizer) -> None:
        super().__init__([group for each in inside for group in each.param_groups], {})
        self.param_groups = [group for each in inside for group in each.param_groups]
        self.inside = list(inside)

    def step(self, closure=None) -> None:
        """Let them step."""
        for each in self.inside:
            each.step()


@ranks(2)
def test_optimizers_inside(rank, world_size):
    """An outer step lets those inside step, with and without DDP, and trains like a step of theirs."""
    ends = []
    for kind in ("whole", "plain", "ddp"):
        model = tiny()
        halves = [SGD(model[0].parameters()), SGD([*model[2].parameters(), model.unused, model.frozen])]
        whole = SGD([{"params": group["params"]} for each in halves for group in each.param_groups])
        outer = ddp(model, find_unused_parameters=True) if kind == "ddp" else model
        optimizer = exact(whole if kind == "whole" else Lookahead(*halves), model=outer, updates=False)
        train(outer, optimizer, rank, range(3))
        ends.append(flat(model))
        loss_of(model, rank, 3).backward()
        for each in [] if kind == "whole" else halves:
            with pytest.raises((RuntimeError, ConfigurationError), match=r"this SGD.*wrap"):
                each.step()
        assert torch.equal(flat(model), ends[-1])
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


@ranks(2)
def test_optimizer_that_exchanges_by_itself(rank, world_size):
    """ZeRO is refused."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 - it takes a while

    zero = ZeroRedundancyOptimizer(net().parameters(), optimizer_class=torch.optim.Adam, lr=0.1)
    for fields in ({}, {"updates": False}):
        with pytest.raises(ConfigurationError, match="ZeroRedundancyOptimizer steps a part"):
            exact(zero, **fields)


@ranks(2)
def test_list_may_train_other_models_too(rank, world_size):
    """One that holds nothing of ``model`` is refused only if it is alone."""
    model, other = tiny(), tiny()
    with pytest.raises(ConfigurationError, match="model is a Sequential, and optimizer holds none of its parameters"):
        exact(adamw(other), model=model)
    exact([adamw(other), sgd(model[0])], model=model)
