"""Worker processes of tests/distributed/test_equality.py: replicas that differ are found, and named on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import tritoncomm
from ddp_models import ddp
from fsdp_models import Net, bits, mesh, sharded
from fsdp_models import train as train_sharded
from helpers import adamw, flat, log_lines, loss_of, residual, same_everywhere, sparse_wrap, tiny_model, train
from torch import nn
from tritoncomm import ConfigMismatchError, ConfigurationError, ProtocolMismatchError, checkpoint
from tritoncomm.step.agree import replica
from tritoncomm.step.tensors.shards import local


def flip(tensor: torch.Tensor, place: int = 0) -> None:
    """Change a low bit of an element."""
    bits = local(tensor.detach()).view(-1).view(torch.int32)
    bits[place] ^= 1 << 12


class SAM(torch.optim.Optimizer):
    """An optimizer with two steps under other names, as sharpness-aware minimization has, and one inside."""

    def __init__(self, params, base: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base_optimizer = base(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        """Move up the gradient."""
        for p in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad, alpha=0.05)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        """Go back, and let the optimizer inside take its step."""
        for p in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            p.copy_(self.state[p]["old"])
        self.base_optimizer.step()


class Lookahead(torch.optim.Optimizer):
    """An optimizer that lets others, in a list, take the step."""

    def __init__(self, *inside: torch.optim.Optimizer) -> None:
        super().__init__([group for each in inside for group in each.param_groups], {})
        self.param_groups = [group for each in inside for group in each.param_groups]
        self.inside = list(inside)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Let them step."""
        for each in self.inside:
            each.step()


class Features(nn.Module):
    """A model with frozen random weights, a random buffer, and statistics of batches."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = tiny_model()
        torch.manual_seed(seed)
        self.features = nn.Linear(6, 6).requires_grad_(requires_grad=False)
        self.register_buffer("phases", torch.rand(6))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the model."""
        return self.net(self.norm((self.features(x) + self.phases).cos()))


def rest_of_the_model(rank: int, world_size: int, send) -> None:
    """With ``model``, parameters that the optimizer does not hold are compared, or copied, as are buffers."""

    def wrap(outer: nn.Module, **fields) -> tritoncomm.SparseOptimizer:
        trained = [p for p in outer.parameters() if p.requires_grad]
        return sparse_wrap(torch.optim.SGD(trained, lr=0.1), **fields)

    model = Features(rank)
    with pytest.raises(ConfigMismatchError, match=r"broadcast_parameters=True.*values of features.weight: rank 0 has"):
        wrap(model, model=model)
    wrap(model)  # nobody sees it
    wrap(model, model=model, broadcast_parameters=True)
    assert same_everywhere([*map(torch.Tensor.tolist, model.state_dict().values())])
    wrap(model, model=model)
    # Statistics that each rank has collected, as after a resume of a plain module: a warning.
    model.norm(torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)))
    with log_lines() as lines:
        optimizer = wrap(model, model=model)
    found = [line for line in lines if "norm.running_mean" in line]
    assert len(found) == (rank == 0)
    assert not found or "2 buffers" in found[0]
    train(model, optimizer, rank, range(2))
    other = Features(0)
    if rank:
        other.register_buffer("more", torch.ones(1))
    with pytest.raises(ConfigMismatchError, match=r"shape of more: rank 0 has nothing, rank 1 has \(1,\)"):
        wrap(other, model=other)
    # DDP has broadcast what it was not told to ignore.
    model = Features(rank)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["features.weight"])
    model.net.frozen.requires_grad_()
    outer = ddp(model)
    wrap(outer, model=outer)
    assert not same_everywhere(model.features.weight.tolist())
    for broadcast in (True, False):  # in each pass, by DDP
        outer = ddp(Features(0), broadcast_buffers=broadcast)
        outer(torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)))
        with log_lines() as lines:
            sparse_wrap(adamw(outer), model=outer)
        assert any("buffers of the model differ" in line for line in lines) == (rank == 0 and not broadcast)


def drifting(rank: int, world_size: int, send) -> None:
    """One bit on one rank is found within 100 steps: all ranks name the parameter, and the step that was equal."""
    replica.EVERY = 3
    kinds = {
        "net.0.weight": lambda model, _: flip(model.net[0].weight, 7),
        "parameter": lambda model, _: flip(model.net.frozen),
        "exp_avg of net.2.bias": lambda model, optimizer: flip(optimizer.state[model.net[2].bias]["exp_avg"], 2),
        "step of net.0.weight": lambda model, optimizer: optimizer.state[model.net[0].weight]["step"].add_(1),
        "features.bias": lambda model, _: flip(model.features.bias),
    }
    for name, change in kinds.items():
        model = Features(0)
        base = adamw(model) if name != "features.bias" else adamw(model.net)
        given = {} if name == "parameter" else {"model": model}
        optimizer = sparse_wrap(base, **given)
        train(model, optimizer, rank, range(4))
        assert same_everywhere(flat(model))
        of_state = " of " in name  # it changes parameters in the next steps
        if rank == 1 and not of_state:
            change(model, optimizer)
        train(model, optimizer, rank, range(4, 6))
        if rank == 1 and of_state:
            change(model, optimizer)
        before, held, steps = flat(model), residual(optimizer), optimizer.metrics()["steps"]
        wanted = rf"{name}.* differs between ranks: rank 0 has .*, rank 1 has .*after step 3\..*broadcast_parameters"
        for _ in range(2):
            with pytest.raises(ProtocolMismatchError, match=wanted):
                train(model, optimizer, rank, range(6, 7))
        assert flat(model) == before
        assert torch.equal(residual(optimizer), held)
        assert optimizer.metrics()["steps"] == steps == 6


def steps_by_other_names(rank: int, world_size: int, send) -> None:
    """Methods that change parameters by gradients, and optimizers inside, raise. So replicas do not drift."""
    model = tiny_model()
    sgd = partial(torch.optim.SGD, lr=0.1)
    base = SAM(model.parameters(), sgd)
    optimizer = sparse_wrap(base, model=model)
    loss_of(model, rank, 0).backward()
    with pytest.raises(RuntimeError, match=r"first_step\(\) of SAM.*wrap the optimizer inside SAM"):
        optimizer.first_step(zero_grad=True)
    with pytest.raises(RuntimeError, match="this SGD, or a list or an optimizer that contains it, was wrapped"):
        optimizer.second_step()
    optimizer.release()
    base.base_optimizer.step()
    # As the error says.
    model = tiny_model()
    outer = SAM(model.parameters(), lambda groups: sparse_wrap(sgd(groups), model=model))
    for step in range(3):
        for take in (lambda: outer.first_step(zero_grad=True), outer.second_step):
            loss_of(model, rank, step).backward()
            take()
        outer.zero_grad()
    assert same_everywhere(flat(model))
    # An outer step lets those inside step, and trains like a step of theirs.
    weights = []
    for kind in ("whole", "plain", "ddp"):
        model = tiny_model()
        halves = [sgd(model[0].parameters()), sgd([*model[2].parameters(), model.unused, model.frozen])]
        whole = sgd([{"params": group["params"]} for each in halves for group in each.param_groups])
        outer = ddp(model, find_unused_parameters=True) if kind == "ddp" else model
        optimizer = sparse_wrap(whole if kind == "whole" else Lookahead(*halves), model=outer, exchange="gradients")
        train(outer, optimizer, rank, range(3))
        weights.append(flat(model))
        loss_of(model, rank, 3).backward()
        for each in [] if kind == "whole" else halves:
            with pytest.raises((RuntimeError, ConfigurationError), match=r"this SGD.*wrap"):
                each.step()
        assert flat(model) == weights[-1]
    assert weights[0] == weights[1] == weights[2]


class ClosureSAM(SAM):
    """The usual SAM, which insists on a closure that has a default."""

    def step(self, closure=None) -> None:
        """Take both steps."""
        assert closure is not None, "SAM requires closure, but it was not provided"
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


def optimizers_that_exchange(rank: int, world_size: int, send) -> None:
    """ZeRO, which exchanges by itself, is refused."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 - it takes a while

    wide = nn.Sequential(nn.Linear(6, 256), nn.Tanh(), nn.Linear(256, 3))
    zero = ZeroRedundancyOptimizer(wide.parameters(), optimizer_class=torch.optim.Adam, lr=0.1)
    for fields in ({}, {"exchange": "gradients"}, {"algo": "dense", "density": None}):
        with pytest.raises(ConfigurationError, match="ZeroRedundancyOptimizer steps a part"):
            sparse_wrap(zero, **fields)


def steps_that_need_a_closure(rank: int, world_size: int, send) -> None:
    """SAM's own step fails without its closure, and the error says what to wrap."""
    model = tiny_model()
    base = ClosureSAM(model.parameters(), partial(torch.optim.SGD, lr=0.1))
    optimizer = sparse_wrap(base, model=model)
    before = flat(model)
    with pytest.raises(
        ConfigurationError, match=r"ClosureSAM.step\(\) has failed: SAM requires closure.*inside ClosureS"
    ):
        optimizer.step(lambda: loss_of(model, rank, 0).backward())
    assert flat(model) == before


def parameters_of_another_model(rank: int, world_size: int, send) -> None:
    """An optimizer of copies, or of parameters that were replaced since, does not train the model."""
    model, other = tiny_model(), tiny_model()
    with pytest.raises(ConfigurationError, match="model is a Sequential, and optimizer holds none of its parameters"):
        sparse_wrap(adamw(other), model=model)
    sparse_wrap([adamw(other), torch.optim.SGD(model[0].parameters(), lr=0.1)], model=model)


def drift_from_the_first_step(rank: int, world_size: int, send) -> None:
    """What an optimizer that is not wrapped changes is found in the second step."""
    model = tiny_model()
    optimizer = sparse_wrap(torch.optim.SGD(model[0].parameters(), lr=0.1), model=model)
    forgotten = torch.optim.SGD(model[2].parameters(), lr=0.1)
    train(model, optimizer, rank, range(1))
    forgotten.step()
    with pytest.raises(ProtocolMismatchError, match=r"step 2 .*2.weight differs between ranks.*after step 0\."):
        train(model, optimizer, rank, range(1, 2))


def held_later(rank: int, world_size: int, send) -> None:
    """Parameters that a group brings in later are compared as those of the optimizer from then on."""
    replica.EVERY = 1
    for local_steps in (1, 2):
        model = tiny_model()
        model[2].requires_grad_(requires_grad=False)
        optimizer = sparse_wrap(
            torch.optim.SGD(model[0].parameters(), lr=0.1),
            model=model,
            **({"local_steps": 2, "density": None} if local_steps > 1 else {}),
        )
        train(model, optimizer, rank, range(4))
        model[2].requires_grad_()
        optimizer.add_param_group({"params": list(model[2].parameters())})
        train(model, optimizer, rank, range(4, 8))
        assert same_everywhere(flat(model))
    replica.EVERY = 100


def saved(rank: int, world_size: int, send, folder: str) -> None:
    """A save refuses replicas that differ, and writes no file."""
    model = tiny_model()
    optimizer = sparse_wrap(adamw(model), model=model)
    train(model, optimizer, rank, range(2))
    checkpoint.save(optimizer, Path(folder) / "equal")
    if rank == 1:
        flip(model[2].weight, 11)
    with pytest.raises(
        ConfigMismatchError, match=r"2.weight differs between ranks: rank 0 has .*, rank 1 has .*after step 2\."
    ):
        checkpoint.save(optimizer, Path(folder) / "other")
    assert not (Path(folder) / "other").exists()


def shards(rank: int, world_size: int, send) -> None:
    """Replicas of a sharded model are compared within their group, and all ranks learn what differs."""
    replica.EVERY = 3
    over = mesh()
    model = Net()
    torch.manual_seed(rank // 2)
    nn.init.normal_(model.head.weight)
    model = sharded(model, over["shard"])
    group = over["replicate"].get_group()
    with pytest.raises(ConfigMismatchError, match=r"values of head\.weight: rank [01] has"):
        sparse_wrap(adamw(model), model=model, process_group=group)
    optimizer = sparse_wrap(adamw(model), model=model, process_group=group, broadcast_parameters=True)
    assert same_everywhere(bits(model), group)
    train_sharded(model, optimizer, rank, range(4))
    if rank == 3:
        flip(model.layers[0].weight)
    train_sharded(model, optimizer, rank, range(4, 6))
    before = bits(model)
    with pytest.raises(
        ProtocolMismatchError,
        match=r"layers.0.weight differs between ranks: rank 1 has .*, rank 3 has .*after step 3\.",
    ):
        train_sharded(model, optimizer, rank, range(6, 7))
    assert bits(model) == before
