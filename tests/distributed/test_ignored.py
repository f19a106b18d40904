"""Parameters that DDP was told to ignore, such as experts, are their rank's own, and step as without an exchange."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import tritoncomm
from kit import everywhere, log_lines
from models import EXACT, ddp, equal, flat, loss_of, net, train, unconfirmed
from test_rules import Lion
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tritoncomm import ConfigurationError, NonFiniteError

import laws
from ranks import ranks

SPARSE = EXACT | {"density": 0.1}
KINDS = {
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.1),
    "SGD": partial(torch.optim.SGD, lr=0.1, weight_decay=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Lion": partial(Lion, lr=0.003),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.01),
}


class Experts:
    """A module in DDP whose third layer is this rank's own, and the bare optimizer of copies of it.

    Args:
        rank: The rank.
        kind: The optimizer, one of ``KINDS``.
        **fields: Arguments of ``wrap``.
    """

    def __init__(self, rank: int, kind: str, **fields) -> None:
        self.rank, self.inner = rank, net()
        nn.init.normal_(self.inner[2].weight, std=0.2, generator=torch.Generator().manual_seed(rank))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.inner, ["2.weight", "2.bias"])
        self.model, self.experts = ddp(self.inner), [*self.inner[2].parameters()]
        self.common = [*self.inner[0].parameters(), *self.inner[4].parameters()]
        self.copies = [nn.Parameter(each.detach().clone()) for each in self.experts]
        self.bare = KINDS[kind](self.copies)
        self.optimizer = tritoncomm.wrap(KINDS[kind]([*self.inner.parameters()]), model=self.model, **fields)

    def backward(self, step: int, factor: float = 1.0) -> None:
        """Compute gradients, and give the experts' to the copies."""
        self.optimizer.zero_grad()
        (factor * loss_of(self.model, self.rank, step)).backward()
        for copied, expert in zip(self.copies, self.experts, strict=True):
            copied.grad = expert.grad / factor

    def check(self) -> None:
        """Raise unless experts are what the bare optimizer makes of them, and all else is equal on all ranks."""
        assert all(map(laws.same_bits, self.experts, self.copies))
        assert equal(self.common)
        assert not equal(self.experts)


SETTINGS = {
    "sparse": SPARSE,
    "dense": {"algo": "dense"},
    "updates": {"updates": True},
    "local steps": {"local_steps": 2},
    "no rule": SPARSE | {"late": False, "updates": False},
}


# Every optimizer with a half of the settings, and every setting with a half of the optimizers.
PAIRS = [(kind, setting) for i, kind in enumerate(KINDS) for j, setting in enumerate(SETTINGS) if (i + j) % 2 == 0]


@ranks(2)
@pytest.mark.parametrize(("kind", "setting"), PAIRS)
def test_experts_step_by_themselves(rank, world_size, kind, setting):
    """To the bit, whatever is exchanged of the other parameters, and how."""
    run = Experts(rank, kind, broadcast_parameters=kind != "SGD", **SETTINGS[setting])
    for step in range(4):
        run.backward(step)
        run.bare.step()
        run.optimizer.step()
    run.check()


@ranks(2)
def test_experts_are_clipped_by_their_own_norm(rank, world_size):
    """``max_grad_norm`` limits the norm of the experts' gradients of each rank by itself."""
    run = Experts(rank, "SGD", max_grad_norm=0.01, **SPARSE)
    for step in range(3):
        run.backward(step)
        assert nn.utils.clip_grad_norm_(run.copies, 0.01) > 0.01
        run.bare.step()
        run.optimizer.step()
    run.check()


@ranks(2)
@pytest.mark.parametrize("kind", ["AdamW", "Adafactor"])
@pytest.mark.parametrize("unscales", [False, True])
def test_scaled_experts(rank, world_size, kind, unscales):
    """A ``GradScaler`` unscales the experts' gradients, and an overflow in them skips the step on all ranks."""
    run = Experts(rank, kind, **SPARSE)
    scaler = tritoncomm.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        run.backward(step, scaler.scale(torch.ones(())).item())
        if step == 2:
            run.inner[2].weight.grad[0, 0] = torch.inf
        else:
            run.bare.step()
        if unscales:
            scaler.unscale_(run.optimizer)
        scaler.step(run.optimizer)
        scaler.update()
    run.check()


@ranks(2)
@pytest.mark.parametrize("kind", ["AdamW", "Adafactor"])
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_nan_in_an_expert(rank, world_size, kind, policy):
    """It is one of any gradient: it skips the step of all, or raises. Of updates, it is a matter of its rank."""
    run = Experts(rank, kind, on_nonfinite=policy, **SPARSE)
    for step in range(3):
        run.backward(step)
        before = flat(run.common)
        if step == 1 and rank == 1:
            run.inner[2].weight.grad[0, 0] = torch.nan
        if step == 1 and policy == "raise":
            with pytest.raises(NonFiniteError, match=r"rank 1: 2\.weight \(1 values\)"):
                run.optimizer.step()
            run.optimizer.merge()  # of updates, which the error has not exchanged
            continue
        with log_lines() as lines:
            run.optimizer.step()
        told = any("2.weight (1 values)" in line for line in lines)
        assert told == (step == 1 and (kind == "AdamW" or rank == 1))
        assert kind != "AdamW" or torch.equal(flat(run.common), before) == (step == 1)
    assert flat(run.inner).isfinite().all()
    assert equal(run.common)


@ranks(2)
@pytest.mark.parametrize("kinds", [("AdamW", "Adafactor"), ("Adafactor", "AdamW"), ("SGD", "AdamW")])
def test_experts_in_a_list(rank, world_size, kinds):
    """They may be in any optimizer of it. One that holds nothing else is not wrapped, and the error says so."""
    run = Experts(rank, kinds[1], **SPARSE)
    run.optimizer.release()
    parts = [KINDS[kinds[0]]([*run.inner[0].parameters()]), KINDS[kinds[1]]([*run.inner[2:].parameters()])]
    run.optimizer = tritoncomm.wrap(parts, model=run.model, **SPARSE)
    for step in range(3):
        run.backward(step)
        run.bare.step()
        run.optimizer.step()
    run.check()
    with pytest.raises(ConfigurationError, match=r"told to ignore, the first of them 2\.weight: .*do not wrap"):
        tritoncomm.wrap(KINDS["AdamW"](run.experts), model=run.model, **SPARSE)


@ranks(2)
def test_table_with_sparse_gradients(rank, world_size):
    """A table of each rank may have sparse gradients, which the exchange does not take."""
    model = nn.Sequential(nn.Embedding(8, 6, sparse=True), nn.Linear(6, 3))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    outer, table = ddp(model), model[0].weight
    groups = [{"params": [table], "momentum": 0}, {"params": [*model[1].parameters()]}]
    optimizer = tritoncomm.wrap(torch.optim.SGD(groups, lr=0.1, momentum=0.9), model=outer, **SPARSE)
    for step in range(3):
        optimizer.zero_grad()
        outer(torch.tensor([rank, step, step])).square().sum().backward()
        if step == 1:
            table.grad.mul_(torch.nan)
        expected = table.detach() - 0.1 * (table.grad.to_dense() if step != 1 else 0)
        optimizer.step()
        torch.testing.assert_close(table.detach(), expected)
    assert optimizer.metrics()["steps"] == 2
    assert equal(model[1])


@ranks(1)
@pytest.mark.parametrize("kind", KINDS)
def test_one_worker(rank, world_size, kind):
    """A single worker takes the bare optimizer's steps, and clips all gradients together."""
    run, other = Experts(rank, kind, max_grad_norm=0.01), net()
    other.load_state_dict(run.inner.state_dict())
    bare = KINDS[kind]([*other.parameters()])
    for step in range(3):
        loss_of(other, rank, step).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.01)
        bare.step()
        bare.zero_grad()
    train(run.model, run.optimizer, rank, range(3))
    assert torch.equal(flat(other), flat(run.inner))


@ranks(2)
@pytest.mark.parametrize("kind", ["AdamW", "momentum", "Adafactor"])
def test_saved_experts(rank, world_size, kind):
    """Each rank saves and loads the state of its experts, and a flush leaves them."""
    run = Experts(rank, kind, **SPARSE)
    for step in range(3):
        run.backward(step)
        if step == 1 and rank == 1:  # so that step counts of experts differ between ranks
            run.inner[2].weight.grad = run.inner[2].bias.grad = None
        run.optimizer.step()
    again = Experts(rank + 7, kind, broadcast_parameters=True, **SPARSE)
    again.inner.load_state_dict(run.inner.state_dict())
    again.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    for model, optimizer in ((run.model, run.optimizer), (again.model, again.optimizer)):
        train(model, optimizer, rank, range(3, 6))
    assert torch.equal(flat(again.inner), flat(run.inner))
    held = flat(run.experts)
    run.backward(7)
    run.optimizer.flush()
    assert torch.equal(flat(run.experts), held)
    assert equal(run.common)


def interrupted(*_):
    """Fail before the update, and keep the mean."""
    raise RuntimeError("a hook")


@ranks(2)
@pytest.mark.parametrize("why", ["not confirmed", "a hook"])
def test_experts_that_catch_up(rank, world_size, why):
    """A rank that applies a step later, as it could not confirm it or a hook failed, divides gradients once, too."""
    run = Experts(rank, "SGD", **SPARSE)
    scaler = tritoncomm.amp.GradScaler("cpu", init_scale=1024.0)
    run.backward(0, scaler.scale(torch.ones(())).item())
    run.bare.step()
    hook = run.optimizer.register_step_pre_hook(interrupted if (rank, why) == (1, "a hook") else lambda *_: None)
    expected = pytest.raises(RuntimeError, match="a hook") if why == "a hook" else unconfirmed(run.optimizer)
    with expected if rank == 1 else nullcontext():
        scaler.step(run.optimizer)
    hook.remove()
    assert everywhere(run.optimizer.reset_process_group(model=run.model)) == [False, True]
    run.check()


@ranks(2)
def test_second_name_of_a_parameter_counts(rank, world_size):
    """A parameter that is ignored under one name alone is exchanged."""
    tied = net()
    tied[4] = nn.Linear(40, 40)
    tied[4].weight = tied[2].weight
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(tied, ["2.weight", "2.bias"])
    outer = ddp(tied)
    optimizer = tritoncomm.wrap(KINDS["AdamW"]([*tied.parameters()]), model=outer, **SPARSE)
    outer(torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
    optimizer.step()
    assert equal([tied[2].weight])
