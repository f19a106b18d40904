"""Worker processes of tests/distributed/test_door_edges.py: what a hook does in unusual situations."""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from ddp_models import ddp, net
from helpers import adamw, flat, log_lines, loss_of, same_everywhere
from torch import nn
from tritoncomm import ConfigurationError
from tritoncomm.ddp import CommState, comm_hook, register, state_of


def settings_of_a_hook(rank: int, world_size: int, send) -> None:
    """Every setting that is given to ``wrap`` must be that of the hook, also if it is the default of ``wrap``."""
    model = ddp(net())
    state = register(model, "spardl", density=0.1, warmup_steps=3, dense_below=0, teams=1)
    node = dist.new_subgroups(1)[0]
    for given, named in (
        ({"algo": "oktopk"}, r"algo='oktopk': the model was registered with Warmup\(.*SparDL"),
        ({"algo": tritoncomm.OkTopk(density=0.1)}, r"algo=OkTopk\("),
        ({"density": 0.01}, r"density=0\.01: the model was registered with .*leave out density"),
        ({"warmup_steps": 20}, r"warmup_steps=20: "),
        ({"warmup_steps": 0}, r"warmup_steps=0: "),
        ({"teams": 3}, r"teams=3: "),
        ({"dense_below": 1024}, r"dense_below=1024: the model was registered with dense_below=0"),
        ({"node_group": node}, r"node_group=1 ranks: "),
    ):
        with pytest.raises(ConfigurationError, match=named):
            tritoncomm.wrap(adamw(model), model=model, **given)
    with pytest.raises(ConfigurationError, match=r"has no argument 'bucket_width'"):
        tritoncomm.wrap(adamw(model), model=model, bucket_width=2)
    method = state.recipe.recipe
    for given in (
        {},
        {"algo": "spardl"},
        {"algo": method},
        {"algo": state.recipe},
        {"density": 0.1, "warmup_steps": 3, "teams": 1, "dense_below": 0},
    ):
        optimizer = tritoncomm.wrap(adamw(model), model=model, **given)
        assert optimizer.recipe == state.recipe
        assert state.exchange.options.dense_below == 0
        del optimizer


def copied_model(rank: int, world_size: int, send) -> None:
    """A copy of a DDP module, or a pickled one, has no hook, as DDP copies none. It can be registered like others."""
    for copied in (copy.deepcopy, pickled):
        check_copy(copied, rank)


def pickled(model: nn.Module) -> nn.Module:
    """Return ``model`` after it was saved and loaded."""
    return pickle.loads(pickle.dumps(model))  # noqa: S301 - our own


def check_copy(copied, rank: int) -> None:
    """Train a model and its copy beside each other."""
    model = ddp(net())
    optimizer = tritoncomm.wrap(adamw(model), model=model, density=0.1, dense_below=0)
    loss_of(model, rank, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    clone = copied(model)
    assert state_of(model) is optimizer._hook
    assert state_of(clone) is None
    plain = ddp(copy.deepcopy(model.module))
    for each in (clone, plain):
        loss_of(each, rank, 1).backward()
    for p, q in zip(clone.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # averaged by DDP, densely
        p.grad = None
    again = tritoncomm.wrap(adamw(clone), model=clone, density=0.1, dense_below=0)
    assert again._hook is state_of(clone)
    assert again._hook is not optimizer._hook
    for step in range(1, 3):
        for each, stepped in ((model, optimizer), (clone, again)):
            stepped.zero_grad()
            loss_of(each, rank, step).backward()
            stepped.step()
    assert again.metrics()["steps"] == 2
    assert optimizer.metrics()["steps"] == 3
    assert same_everywhere((flat(model), flat(clone)))
    raw = ddp(net())  # a copied state is a new one with the same settings
    raw.register_comm_hook(copy.deepcopy(again._hook), comm_hook)
    loss_of(raw, rank, 0).backward()
    assert state_of(raw).steps == 1


def joined(rank: int, world_size: int, send, *, known: bool, started: bool) -> None:
    """``join()`` raises an error that names it on all ranks, in the first pass or in the first one that is uneven."""
    model = ddp(net())
    if known:
        register(model, density=0.1, dense_below=0, timeout=timedelta(seconds=20))
    else:
        state = CommState(model.process_group, density=0.1, dense_below=0, timeout=timedelta(seconds=20))
        model.register_comm_hook(state, comm_hook)
    for step in range(3 if started else 0):
        model.zero_grad()
        loss_of(model, rank, step).backward()
    text = ""
    try:
        with model.join():
            for step in range(2 if rank else 0):
                model.zero_grad()
                loss_of(model, rank, step).backward()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    # A rank that ends closes its connections. Another one, which has not raised its own error yet, would see only that.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"raised {rank}", "")
    try:
        store.wait([f"raised {other}" for other in range(world_size)], timedelta(seconds=15))
    except RuntimeError:
        text = "another rank raised nothing for 15 s"
    send((rank, text))
    os._exit(0)


def early_termination(rank: int, world_size: int, send) -> None:
    """``join(throw_on_early_termination=True)`` trains until the first rank has no batch, and raises on all ranks."""
    model = ddp(net())
    optimizer = tritoncomm.wrap(adamw(model), model=model, density=0.1, dense_below=0)

    def train(steps: int) -> None:
        with model.join(throw_on_early_termination=True):
            for step in range(steps):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()

    with pytest.raises(RuntimeError, match="exhausted"):
        train(3 + rank)
    assert optimizer.metrics()["steps"] == 3
    assert same_everywhere(flat(model))


class Branches(nn.Module):
    """A model whose second branch is used on request."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(6, 40), nn.Linear(6, 40), nn.Linear(40, 3)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        """Run with or without the second branch."""
        return self.head(self.first(x) + self.second(x) if both else self.first(x))


def unused_parameter(rank: int, world_size: int, send, *, everywhere: bool, started: bool) -> None:
    """If a rank does not use a parameter, all ranks raise an error that names the cause and the ways out."""
    model = ddp(Branches())
    optimizer = tritoncomm.wrap(adamw(model), model=model, density=0.1, dense_below=0, timeout=timedelta(seconds=5))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    for _ in range(3 if started else 0):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    text = ""
    try:
        model(x, both=not everywhere and rank != 1).square().sum().backward()
        optimizer.step()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    send((rank, text))
    os._exit(0)


def groups_of_torch() -> int:
    """Return the number of process groups of this process."""
    return len(dist.distributed_c10d._world.pg_names)


def groups_are_used_again(rank: int, world_size: int, send) -> None:
    """A hook that replaces another one uses its process group. Two living hooks have two groups."""
    gc.freeze()  # so that a collection does not look through all that is imported
    counts = []
    for number in range(6):
        model = ddp(net())
        optimizer = tritoncomm.wrap(adamw(model), model=model, density=0.1, dense_below=0)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        counts.append(groups_of_torch())
        if number < 4:
            del model, optimizer
            if rank != 1 or number % 2:  # ranks need not collect the garbage at the same time
                gc.collect()
    assert counts[2:5] == counts[2:3] * 3, counts
    first, second = ddp(net()), ddp(net())
    for each in (first, second):
        register(each, density=0.1, dense_below=0)
    (loss_of(first, rank, 0) + loss_of(second, rank, 0)).backward()  # both exchange at the same time
    groups = {id(state_of(each).exchange.options.group) for each in (model, first, second)}
    assert len(groups) == 3
    assert [p.grad.tolist() for p in first.parameters()] == [p.grad.tolist() for p in second.parameters()]
    before = groups_of_torch()
    for _ in range(5):
        again = tritoncomm.wrap(optimizer.optimizer, model=model)
    assert groups_of_torch() == before
    assert again._hook is optimizer._hook


def groups_and_settings(rank: int, world_size: int, send) -> None:
    """Ranks may belong to other groups, and a hook that is registered keeps its settings or says so."""
    only_first = dist.new_group([0])
    model = ddp(net())
    state = register(model, density=0.1, dense_below=0)
    with pytest.raises(ConfigurationError, match=r"dense_below=7: the model was registered with dense_below=0"):
        tritoncomm.wrap(adamw(model), dense_below=7)
    with pytest.raises(ConfigurationError, match="small='8bit': the model was registered with small='fp32'"):
        tritoncomm.wrap(adamw(model), small="8bit")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = tritoncomm.wrap(adamw(model), model=model, scaler=scaler, on_nonfinite="raise")
    assert state.scaler is scaler
    before = flat(model)
    scaler.scale(loss_of(model, rank, 0) * (float("inf") if rank == 1 else 1.0)).backward()
    scaler.step(optimizer)  # an overflow is skipped, whatever on_nonfinite
    scaler.update()
    assert flat(model) == before
    assert scaler.get_scale() == 2.0
    some = dist.new_group([0, 1])  # the groups of a rank count where only some ranks exchange
    if rank < 2:
        part = ddp(net(), process_group=some)
        register(part, density=0.1)
        with pytest.raises(
            tritoncomm.ConfigMismatchError,
            match=r"number of process groups .* rank 0 has",
        ):
            loss_of(part, rank, 0).backward()
    dist.barrier()
    del only_first


def two_optimizers(rank: int, world_size: int, send) -> None:
    """Two optimizers share the hook of one model. Each steps its own parameters over what was delivered."""
    model = ddp(net())
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    first = tritoncomm.wrap(torch.optim.AdamW(matrices, lr=0.01), model=model, density=0.1, dense_below=0)
    second = tritoncomm.wrap(torch.optim.SGD(vectors, lr=0.1))
    for step in range(3):
        first.zero_grad()
        second.zero_grad()
        loss_of(model, rank, step).backward()
        before = [p.detach().clone() for p in vectors]
        first.step()
        assert all(map(torch.equal, before, vectors))
        second.step()
        assert not all(map(torch.equal, before, vectors))
    assert same_everywhere(flat(model))
    before = [[p.detach().clone() for p in part] for part in (matrices, vectors)]
    assert first.metrics()["residual_norm"] > 0
    first.flush()  # one exchange, which both use
    for part, old in zip((matrices, vectors), before, strict=True):
        assert not all(map(torch.equal, part, old))
    assert second.metrics()["residual_norm"] == 0


def states_of_other_ranks(rank: int, world_size: int, send) -> None:
    """The state of a hook without residual loads on any rank. With a residual it needs ``residuals="reset"``."""

    def trained(steps: int) -> tuple[CommState, torch.optim.Optimizer, nn.Module]:
        model = ddp(net())
        state = register(model, "topk_allgather", density=0.1, dense_below=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        return state, optimizer, model

    state, optimizer, model = trained(4)
    owing = [state.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(owing)
    state.flush()
    optimizer.step()
    flushed = [state.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(flushed)
    again, second, other = trained(1)
    before = again.state_dict()
    with pytest.raises(tritoncomm.TritoncommError, match=r'rank=0, here it is .*residuals="reset"'):
        again.load_state_dict(owing[0])
    assert again.state_dict()["checksum"] == before["checksum"]
    other.module.load_state_dict(model.module.state_dict())
    again.load_state_dict(flushed[0])
    assert again.steps == state.steps
    for step in range(5, 8):
        for each, stepped in ((model, optimizer), (other, second)):
            stepped.zero_grad()
            loss_of(each, rank, step).backward()
            stepped.step()
    assert flat(other) == flat(model)
    again.load_state_dict(owing[0], residuals="reset")
    assert not any(left.any() for left in again.state_dict()["residuals"].values())
    with pytest.raises(ConfigurationError, match="residuals='drop': choose one of"):
        again.load_state_dict(owing[0], residuals="drop")


def replaced_optimizer(rank: int, world_size: int, send) -> None:
    """An optimizer whose parameters another one has taken over cannot step. A warning names both."""
    model = ddp(net())
    inner = adamw(model)
    first = tritoncomm.wrap(inner, model=model, density=0.1, dense_below=0)
    with log_lines(logging.WARNING) as lines:
        again = tritoncomm.wrap(inner, model=model)  # the same optimizer: nothing is lost
    assert not lines
    with log_lines(logging.WARNING) as lines:
        second = tritoncomm.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    assert len(lines) == (rank == 0)
    assert all("AdamW" in line and "SGD" in line and "same parameters" in line for line in lines)
    loss_of(model, rank, 0).backward()
    before = flat(model)
    for old in (first, again):
        for action in (old.step, old.synchronize, old.flush):
            with pytest.raises(RuntimeError, match=r"another optimizer \(SGD\) was wrapped for the same parameters"):
                action()
    assert flat(model) == before
    second.step()
    assert flat(model) != before
    del second
    gc.collect()
    with log_lines(logging.WARNING) as lines:
        third = tritoncomm.wrap(adamw(model), model=model)
    assert not lines  # the one before is gone
    third.zero_grad()
    loss_of(model, rank, 1).backward()
    third.step()
    assert same_everywhere(flat(model))


def zero_gradients(rank: int, world_size: int, send) -> None:
    """Zero gradients are used by a step if the hook has averaged them. Otherwise an error says what is missing."""
    model, plain = ddp(net()), ddp(net())
    settings = {"algo": "dense"}
    optimizer = tritoncomm.wrap(adamw(model), model=model, **settings)
    reference = adamw(plain)
    for step in range(4):
        for each, stepped in ((model, optimizer), (plain, reference)):
            stepped.zero_grad(set_to_none=False)
            loss_of(each, rank, step).backward()
            if step == 1:
                stepped.zero_grad(set_to_none=False)  # after the pass, as a guard against bad batches does
            if step == 2:
                for parameter in each.parameters():
                    parameter.grad.zero_()
            stepped.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)
    optimizer.zero_grad(set_to_none=False)
    optimizer.state_dict()
    for action in (optimizer.step, optimizer.synchronize):
        with pytest.raises(RuntimeError, match="the hook has averaged no gradients since the last step"):
            action()
    loss_of(model, rank, 9).backward()
    optimizer.zero_grad()
    optimizer.step()  # without gradients, like any optimizer
    with pytest.raises(RuntimeError, match="the hook has averaged no gradients since the last step"):
        optimizer.synchronize()
    loss_of(model, rank, 9).backward()
    optimizer.synchronize()
    optimizer.step()
    assert same_everywhere(flat(model))


def sparse_gradients(rank: int, world_size: int, send) -> None:
    """A sparse gradient under DDP's hook is rejected by name. One worker, which exchanges nothing, accepts it."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # explicitly, otherwise torch logs a warning

    def embedding() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(8, 3, sparse=True), nn.Linear(3, 3))

    model, plain = ddp(embedding()), embedding()
    optimizer = tritoncomm.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model=model, density=0.1, dense_below=0)
    if world_size > 1:
        with pytest.raises(ConfigurationError, match=r"0\.weight has a sparse gradient.*Embedding\(sparse=False\)"):
            model(torch.tensor([rank, 2])).square().sum().backward()
        return
    bare = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        for each, stepped in ((model, optimizer), (plain, bare)):
            stepped.zero_grad()
            each(torch.tensor([step, 2, 2])).square().sum().backward()
            stepped.step()
    assert flat(model) == flat(plain)
    optimizer.zero_grad()
    (model(torch.tensor([1])) * float("nan")).sum().backward()
    optimizer.step()
    assert flat(model) == flat(plain)  # skipped
