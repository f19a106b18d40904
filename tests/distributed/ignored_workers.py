"""Worker processes of tests/distributed/test_ddp.py: parameters that DDP was told to ignore, such as experts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from ddp_models import SETTINGS, ddp
from helpers import flat, log_lines, loss_of, same_everywhere
from optimizer_list_workers import Lion
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tritoncomm import ConfigMismatchError, ConfigurationError, NonFiniteError, PeerLostError
from tritoncomm.step.agree import replica

import laws

EXPERTS = ["2.weight", "2.bias"]
SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
# Each with weight decay, if it has some. In lists, the second one has the head and its share of the experts.
KINDS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda params: AdamW(params, lr=0.01, weight_decay=0.1),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.1),
    "SGD": lambda params: SGD(params, lr=0.1, weight_decay=0.1),
    "SGD with momentum": lambda params: SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, maximize=False),
    "Lion": lambda params: Lion(params, lr=0.003),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, weight_decay=0.1),
}


def with_experts(rank: int) -> nn.Sequential:
    """Return a module whose third layer is this rank's own, and which says so to DDP."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    nn.init.normal_(model[2].weight, std=0.2, generator=torch.Generator().manual_seed(rank))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, EXPERTS)
    return model


def bits(parameters: list[nn.Parameter]) -> list[list[float]]:
    """Return the values of ``parameters``."""
    return [parameter.tolist() for parameter in parameters]


def exchanged(model: nn.Sequential) -> list[list[float]]:
    """Return what all ranks must have in common."""
    return bits([*model[0].parameters(), *model[4].parameters()])


class Beside:
    """The experts of a model, trained by the bare optimizer of a kind from the same gradients."""

    def __init__(self, model: nn.Sequential, kind: str) -> None:
        self.experts = [*model[2].parameters()]
        self.copies = [nn.Parameter(each.detach().clone()) for each in self.experts]
        self.optimizer = KINDS[kind](self.copies)

    def step(self) -> None:
        """Step by the present gradients of the experts."""
        for copied, expert in zip(self.copies, self.experts, strict=True):
            copied.grad = None if expert.grad is None else expert.grad.clone()
        self.optimizer.step()

    def is_equal(self) -> bool:
        """Return True if the experts have the same bits."""
        return all(map(laws.same_bits, self.experts, self.copies))


def experts(rank: int, world_size: int, send) -> None:
    """What DDP ignores stays this rank's own: the original step takes it by this rank's gradients, to the bit."""
    replica.EVERY = 3
    settings: list[dict[str, object]] = [SETTINGS, {"algo": "dense"}, {"exchange": "updates"}, {"local_steps": 2}]
    settings.append(SETTINGS | {"staleness": "off", "exchange": "gradients"})
    for number, (kind, make) in enumerate(KINDS.items()):
        for position, setting in enumerate(settings):
            model = with_experts(rank)
            outer, beside = ddp(model), Beside(model, kind)
            inner, broadcast = make([*model.parameters()]), (number + position) % 2 == 0
            optimizer = tritoncomm.wrap(inner, model=outer, broadcast_parameters=broadcast, **setting)
            for step in range(4):
                optimizer.zero_grad()
                loss_of(outer, rank, step).backward()
                beside.step()
                optimizer.step()
                assert beside.is_equal(), (kind, setting, step)
            assert same_everywhere(exchanged(model)), (kind, setting)
            assert not same_everywhere(bits([*model[2].parameters()]))
            assert optimizer.metrics()["steps"] == 4 / setting.get("local_steps", 1)


def as_dense(rank: int, world_size: int, send) -> None:
    """With ``algo="dense"``, a model with experts trains as bare DDP with the same list does."""
    models = [with_experts(rank) for _ in range(2)]
    outer = [*map(ddp, models)]
    bare, optimizer = (KINDS["AdamW"]([*model.parameters()]) for model in models)
    optimizer = tritoncomm.wrap(optimizer, model=outer[1], algo="dense")
    for step in range(4):
        for each, stepped in zip(outer, (bare, optimizer), strict=True):
            stepped.zero_grad()
            loss_of(each, rank, step).backward()
            stepped.step()
    for dense, own in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(own, dense, rtol=1e-4, atol=1e-6)
    assert same_everywhere(exchanged(models[1]))


def experts_in_lists(rank: int, world_size: int, send) -> None:
    """Experts may be in any optimizer of a list, or in one that is not wrapped. One with nothing else is refused."""
    for kinds in (("AdamW", "Adafactor"), ("Adafactor", "AdamW"), ("SGD", "AdamW")):
        for limit in (None, 0.01):
            model = with_experts(rank)
            outer, beside = ddp(model), Beside(model, kinds[1])
            parts = [KINDS[kinds[0]]([*model[0].parameters()]), KINDS[kinds[1]]([*model[2:].parameters()])]
            optimizer = tritoncomm.wrap(parts, model=outer, max_grad_norm=limit, **SETTINGS)
            for step in range(4):
                optimizer.zero_grad()
                loss_of(outer, rank, step).backward()
                beside.step()
                optimizer.step()
                assert limit or beside.is_equal()
            assert same_everywhere(exchanged(model)), kinds
    model = with_experts(rank)
    outer, beside = ddp(model), Beside(model, "AdamW")
    shared = [*model[0].parameters(), *model[4].parameters()]
    own = KINDS["AdamW"]([*model[2].parameters()])
    with pytest.raises(ConfigurationError, match=r"told to ignore, the first of them 2\.weight: .*do not wrap"):
        tritoncomm.wrap(own, model=outer, **SETTINGS)
    optimizer = tritoncomm.wrap(KINDS["AdamW"](shared), model=outer, **SETTINGS)
    for step in range(3):
        optimizer.zero_grad()
        own.zero_grad()
        loss_of(outer, rank, step).backward()
        beside.step()
        optimizer.step()
        own.step()
        assert beside.is_equal()
    optimizer.add_param_group({"params": [*model[2].parameters()]})  # later
    optimizer.step()
    assert not same_everywhere(bits(beside.experts))
    assert same_everywhere(exchanged(model))


def clipped_experts(rank: int, world_size: int, send) -> None:
    """``max_grad_norm`` limits the norm of the experts' gradients of each rank by itself."""
    model = with_experts(rank)
    outer, beside = ddp(model), Beside(model, "SGD")
    optimizer = tritoncomm.wrap(KINDS["SGD"]([*model.parameters()]), model=outer, max_grad_norm=0.01, **SETTINGS)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(outer, rank, step).backward()
        for copied, expert in zip(beside.copies, beside.experts, strict=True):
            copied.grad = expert.grad.clone()
        assert nn.utils.clip_grad_norm_(beside.copies, 0.01) > 0.01
        beside.optimizer.step()
        optimizer.step()
        assert beside.is_equal()
    assert same_everywhere(exchanged(model))


def scaled_experts(rank: int, world_size: int, send) -> None:
    """A ``GradScaler`` unscales the experts' gradients, and an overflow in them skips the step on all ranks."""
    for kind in ("AdamW", "Adafactor"):
        for unscales in (False, True):
            model = with_experts(rank)
            outer, beside = ddp(model), Beside(model, kind)
            optimizer = tritoncomm.wrap(KINDS[kind]([*model.parameters()]), model=outer, **SETTINGS)
            scaler = tritoncomm.amp.GradScaler("cpu", init_scale=1024.0)
            for step in range(5):
                optimizer.zero_grad()
                scaler.scale(loss_of(outer, rank, step)).backward()
                if step == 3:
                    model[2].weight.grad[0, 0] = torch.inf
                else:
                    for copied, expert in zip(beside.copies, beside.experts, strict=True):
                        copied.grad = expert.grad / scaler.get_scale()
                    beside.optimizer.step()
                if unscales:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                assert all(map(torch.allclose, beside.experts, beside.copies))
            assert same_everywhere(exchanged(model))


def broken_experts(rank: int, world_size: int, send) -> None:
    """A NaN in the gradient of one rank's expert is one of any gradient: skip, or raise."""
    for kind in ("AdamW", "Adafactor"):
        for policy in ("skip", "raise"):
            model = with_experts(rank)
            outer = ddp(model)
            optimizer = tritoncomm.wrap(
                KINDS[kind]([*model.parameters()]), model=outer, on_nonfinite=policy, **SETTINGS
            )
            for step in range(4):
                optimizer.zero_grad()
                loss_of(outer, rank, step).backward()
                own, common = bits([*model[2].parameters()]), exchanged(model)
                if step == 2 and rank == 1:
                    model[2].weight.grad[0, 0] = torch.nan
                if step == 2 and policy == "raise":
                    with pytest.raises(NonFiniteError, match=r"rank 1: 2\.weight \(1 values\)"):
                        optimizer.step()
                    optimizer.merge()  # of updates, which the error has not exchanged
                    continue
                with log_lines() as lines:
                    optimizer.step()
                told = [line for line in lines if "2.weight (1 values)" in line]
                if kind == "AdamW":
                    assert bool(told) == (step == 2)
                    assert (exchanged(model) == common) == (step == 2)
                elif step == 2 and rank == 1:  # a matter of its rank alone
                    assert told
                    assert bits([*model[2].parameters()]) == own
            assert torch.stack([each.isfinite().all() for each in model.parameters()]).all()
            assert same_everywhere(exchanged(model)), (kind, policy)


def sparse_tables(rank: int, world_size: int, send) -> None:
    """A table of each rank may have sparse gradients, which the exchange does not take."""
    model = nn.Sequential(nn.Embedding(8, 6, sparse=True), nn.Linear(6, 3))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    outer, table = ddp(model), model[0].weight
    inner = SGD([{"params": [table], "momentum": 0}, {"params": [*model[1].parameters()]}], lr=0.1, momentum=0.9)
    optimizer = tritoncomm.wrap(inner, model=outer, **SETTINGS)
    for step in range(3):
        optimizer.zero_grad()
        outer(torch.tensor([rank, step, step])).square().sum().backward()
        assert table.grad.is_sparse
        if step == 1:
            table.grad.mul_(torch.nan)
        expected = table.detach() - 0.1 * (table.grad.to_dense() if step != 1 else 0)
        optimizer.step()
        torch.testing.assert_close(table.detach(), expected)
    assert optimizer.metrics()["steps"] == 2
    assert same_everywhere(bits([*model[1].parameters()]))


def alone(rank: int, world_size: int, send) -> None:
    """A single worker takes the bare optimizer's steps, and clips all gradients together."""
    for kind, make in KINDS.items():
        models = [with_experts(rank) for _ in range(2)]
        outer = [*map(ddp, models)]
        bare, inner = (make([*model.parameters()]) for model in models)
        optimizer = tritoncomm.wrap(inner, model=outer[1], max_grad_norm=0.01)
        for step in range(3):
            for each, stepped in zip(outer, (bare, optimizer), strict=True):
                stepped.zero_grad()
                loss_of(each, rank, step).backward()
                if stepped is bare:
                    nn.utils.clip_grad_norm_(each.parameters(), 0.01)
                stepped.step()
        assert flat(models[0]) == flat(models[1]), kind


def saved_experts(rank: int, world_size: int, send) -> None:
    """Each rank saves and loads the state of its experts, and a copy of an optimizer knows them."""
    for kind in ("AdamW", "SGD with momentum", "Adafactor"):
        model = with_experts(rank)
        outer, beside = ddp(model), Beside(model, kind)
        optimizer = tritoncomm.wrap(KINDS[kind]([*model.parameters()]), model=outer, **SETTINGS)

        def step(outer, optimizer, number, *, unused: bool = False) -> None:
            optimizer.zero_grad()
            loss_of(outer, rank, number).backward()
            if unused:  # so that step counts of experts differ between ranks
                outer.module[2].weight.grad = outer.module[2].bias.grad = None
            optimizer.step()

        for number in range(3):
            step(outer, optimizer, number, unused=number == 1 and rank == 1)
        state, values = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
        again = with_experts(rank + 7)
        other = ddp(again)
        again.load_state_dict(values)
        loaded = tritoncomm.wrap(KINDS[kind]([*again.parameters()]), model=other, **SETTINGS)
        loaded.load_state_dict(state)
        clone, of_clone = copy.deepcopy((outer.module, optimizer))
        for number in range(3, 6):
            step(outer, optimizer, number)
            step(other, loaded, number)
            of_clone.zero_grad()
            loss_of(clone, rank, number).backward()
            of_clone.step()
        for each in (again, clone):
            assert all(map(laws.same_bits, each.parameters(), model.parameters())), kind
        assert same_everywhere(exchanged(model))
        optimizer.flush()  # discards the present gradients
        held = bits(beside.experts)
        loss_of(outer, rank, 7).backward()
        optimizer.flush()
        assert bits(beside.experts) == held
        optimizer.reset_process_group(model=ddp(model, init_sync=False))
        step(outer, optimizer, 8)
        assert same_everywhere(exchanged(model))


def differing_others(rank: int, world_size: int, send) -> None:
    """What DDP does not ignore must still be equal, in a container and under a second name, too."""
    model = with_experts(rank)
    box = nn.ModuleDict({"one": ddp(model), "two": nn.Linear(2, 2)})
    with torch.no_grad():
        box["two"].weight.fill_(rank)
    with pytest.raises(ConfigMismatchError, match=r"two\.weight"):
        tritoncomm.wrap(KINDS["AdamW"]([*box.parameters()]), model=box, **SETTINGS)
    optimizer = tritoncomm.wrap(KINDS["AdamW"]([*box.parameters()]), model=box, broadcast_parameters=True, **SETTINGS)
    assert not same_everywhere(bits([model[2].weight]))
    assert same_everywhere(bits([box["two"].weight]))
    loss_of(box["one"], rank, 0).backward()
    optimizer.step()
    tied = with_experts(0)
    tied[4] = nn.Linear(40, 40)
    tied[4].weight = tied[2].weight  # which DDP averages, because it has another name, too
    outer = ddp(tied)
    optimizer = tritoncomm.wrap(KINDS["AdamW"]([*tied.parameters()]), model=outer, **SETTINGS)
    outer(torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
    optimizer.step()
    assert same_everywhere(bits([tied[2].weight]))
    dist.barrier()


def experts_that_catch_up(rank: int, world_size: int, send) -> None:
    """A rank that applies a step later, because it could not confirm it, divides its experts' gradients once, too."""
    model = ddp(with_experts(rank))
    optimizer = tritoncomm.wrap(SGD(model.parameters(), lr=0.1), model=model, **SETTINGS)
    scaler = tritoncomm.amp.GradScaler("cpu", init_scale=1024.0)
    exchange, confirm = optimizer._exchange, optimizer._exchange._confirm

    def interrupted() -> None:
        confirm()
        exchange._confirm = confirm
        raise PeerLostError("lost rank 0", [0])

    if rank == 1:
        exchange._confirm = interrupted
    scaler.scale(loss_of(model, rank, 0)).backward()
    experts = [*model.module[2].parameters()]
    expected = [each.detach() - 0.1 * each.grad / 1024 for each in experts]
    if rank == 1:
        with pytest.raises(PeerLostError):
            scaler.step(optimizer)
    else:
        scaler.step(optimizer)
    assert optimizer.reset_process_group(model=model) == (rank == 1)
    assert all(torch.allclose(each, other, atol=1e-6) for each, other in zip(experts, expected, strict=True))
    assert same_everywhere(exchanged(model.module))
