"""Worker processes of tests/distributed/test_misuse.py: what users do by mistake is an error on all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from copy import deepcopy
from functools import wraps
from itertools import product
from pathlib import Path
from types import MethodType

import numpy as np
import pytest
import torch
import torch.distributed as dist
import tritoncomm
from ddp_models import ddp, net
from door_workers import log_lines
from helpers import FailingSGD, flat, loss_of, residual, same_everywhere, tiny_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import ExponentialLR
from tritoncomm import ConfigMismatchError, ConfigurationError, ProtocolMismatchError, checkpoint
from tritoncomm.amp import GradScaler
from tritoncomm.ddp import CommState


def sparse(optimizer: torch.optim.Optimizer, **fields) -> tritoncomm.SparseOptimizer:
    """Wrap ``optimizer`` for sparse steps of small tensors."""
    return tritoncomm.wrap(optimizer, **{"density": 0.2, "dense_below": 0, **fields})


def adamw(model: nn.Module, **fields) -> torch.optim.AdamW:
    """Return AdamW for ``model``."""
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **fields})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    """Take ``steps``."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def original_stepped(rank: int, world_size: int, send) -> None:
    """The original optimizer cannot step while it is wrapped. Schedulers and hooks of the original one still work."""
    model, seen = tiny_model(), []
    base = adamw(model)
    base.register_step_pre_hook(lambda *_: seen.append(1))
    schedule = ExponentialLR(base, gamma=0.5)
    optimizer = sparse(base)
    train(model, optimizer, rank, range(2))
    schedule.step()
    assert len(seen) == 2
    before = flat(model)
    loss_of(model, rank, 2).backward()
    for name in ("AdamW", "tritoncomm.wrap"):
        with pytest.raises(RuntimeError, match=name):
            base.step()
    with pytest.raises(RuntimeError, match=r"tritoncomm\.wrap"):
        torch.amp.GradScaler("cpu", enabled=False).step(base)
    assert flat(model) == before
    again = sparse(base)  # wrapped twice: both may step
    train(model, again, rank, range(2, 3))
    train(model, optimizer, rank, range(3, 4))
    assert same_everywhere(flat(model))
    del optimizer, again
    base.step()


def parameters_added_to_original(rank: int, world_size: int, send) -> None:
    """Parameters that the user adds to the original optimizer are not exchanged, which is an error on all ranks."""
    for everywhere in (True, False):
        model, new = tiny_model(), nn.Parameter(torch.ones(3))
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = sparse(base, on_nonfinite="raise")
        train(model, optimizer, rank, range(1))
        before, held = flat(model), residual(optimizer)
        if everywhere or rank == 0:
            base.add_param_group({"params": [new]})
        loss_of(model, rank, 1).backward()
        with pytest.raises(
            (ConfigurationError, tritoncomm.NonFiniteError), match=r"add_param_group\(\) of the wrapped"
        ):
            optimizer.step()
        assert flat(model) == before
        assert torch.equal(residual(optimizer), held)
    model = ddp(net())
    base = adamw(model)
    optimizer = sparse(base, model=model)
    base.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    model(torch.ones(1, 6)).sum().backward()
    with pytest.raises(ConfigurationError, match=r"add_param_group\(\) of the wrapped"):
        optimizer.step()


def rejected_group(rank: int, world_size: int, send) -> None:
    """A parameter group that differs between ranks is rejected, and training goes on without it."""
    model = tiny_model()
    optimizer = sparse(adamw(model))
    with pytest.raises(ConfigMismatchError, match="parameter shapes"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3 + rank))]})
    train(model, optimizer, rank, range(2))
    assert same_everywhere(flat(model))


def other_state(rank: int, world_size: int, send) -> None:
    """Ranks whose optimizers hold different states are refused, with and without a broadcast of the parameters."""
    for broadcast in (True, False):
        model = tiny_model()
        optimizer = adamw(model)
        loss_of(model, 0, 0).backward()
        state = optimizer.state_dict()
        optimizer.step()
        if rank:
            optimizer.state.clear()
            optimizer.load_state_dict(state)
        with pytest.raises(ConfigMismatchError, match=r"load the same state on all ranks.*optimizer state, first at"):
            sparse(optimizer, broadcast_parameters=broadcast)
    sparse(torch.optim.Adagrad(tiny_model().parameters()))  # a state that is equal
    model = tiny_model()
    optimizer = sparse(adamw(model))
    train(model, optimizer, rank, range(2))
    saved, before = optimizer.state_dict(), (flat(model), residual(optimizer))
    tampered: dict[str, Callable[[dict], object]] = {
        "optimizer state": lambda state: state.update(state={}),
        "optimizer state, first at": lambda state: state["state"][0].update(step=torch.tensor(7.0)),
        "steps": lambda state: state.pop("tritoncomm"),
    }
    for field, tamper in tampered.items():
        loaded = deepcopy(saved)
        if rank:
            tamper(loaded)
        with pytest.raises(ConfigMismatchError, match=field):
            optimizer.load_state_dict(loaded)
        assert (flat(model), residual(optimizer).tolist()) == (before[0], before[1].tolist())
    train(model, optimizer, rank, range(2, 4))
    assert same_everywhere(flat(model))


def other_schedule(rank: int, world_size: int, send) -> None:
    """A learning rate that follows the loss of each rank is an error on all ranks, with option, values and ranks.

    Nothing has changed, and training goes on in the same process group once the rates are equal.
    """
    for tensor in (False, True):
        model = tiny_model()
        base = adamw(model, lr=torch.tensor(0.01) if tensor else 0.01)
        optimizer = sparse(base)
        train(model, optimizer, rank, range(2))
        before, held = flat(model), residual(optimizer)
        if rank == 1:
            optimizer.param_groups[0]["lr"] *= 0.5
        with pytest.raises(ProtocolMismatchError, match=r"lr of parameter group 0: rank 0 has 0.0.*, rank 1 has 0.00"):
            train(model, optimizer, rank, range(2, 3))
        assert flat(model) == before
        assert torch.equal(residual(optimizer), held)
        if rank == 1:
            optimizer.param_groups[0]["lr"] *= 2
        train(model, optimizer, rank, range(2, 4))
        assert flat(model) != before
        assert same_everywhere(flat(model))
    hooked = ddp(net())
    optimizer = sparse(adamw(hooked), model=hooked)
    train(hooked, optimizer, rank, range(1))
    optimizer.param_groups[0]["betas"] = [0.9, 0.99 if rank else 0.999]
    optimizer.zero_grad()
    with pytest.raises(
        ProtocolMismatchError, match=r"betas of parameter group 0: rank 0 has \(0.9, 0.999\), rank 1 has"
    ):
        hooked(torch.ones(1, 6)).sum().backward()


def failing_update(rank: int, world_size: int, send) -> None:
    """An update that stops in the middle is noticed on all ranks, and in checkpoints, until a state is loaded."""
    for door, fails in product(("wrap", "ddp"), ((1,), (0, 1))):
        model = net() if door == "wrap" else ddp(net())
        base = FailingSGD(model.parameters(), lr=0.1)
        optimizer = sparse(base, **({} if door == "wrap" else {"model": model}))
        train(model, optimizer, rank, range(3))
        saved = {"model": deepcopy(model.state_dict()), "optimizer": deepcopy(optimizer.state_dict())}
        base.fails = rank in fails
        with pytest.raises(MemoryError) if rank in fails else nullcontext():
            train(model, optimizer, rank, range(3, 4))
        if rank in fails:
            with pytest.raises(RuntimeError, match=r"stopped update.*load"):
                optimizer.state_dict()
        before, held = flat(model), residual(optimizer) if door == "wrap" else None
        for _ in range(2):
            loss_of(model, rank, 4).backward() if door == "wrap" else None  # a loop that resets gradients after step()
            with pytest.raises(ProtocolMismatchError, match=r"stopped.*load"):
                optimizer.step() if door == "wrap" else train(model, optimizer, rank, range(4, 5))
        assert flat(model) == before
        assert door == "ddp" or torch.equal(residual(optimizer), held)
        with pytest.raises((RuntimeError, ConfigMismatchError), match="stopped"):
            checkpoint.save(optimizer, "never-written")
        assert not Path("never-written").exists()
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer, rank, range(3, 6))
        assert same_everywhere(flat(model))


def failing_on_the_way(rank: int, world_size: int, send) -> None:
    """A rank that was interrupted between the commit of a mean and its update is noticed on all ranks."""
    model = net()
    optimizer = sparse(adamw(model))
    train(model, optimizer, rank, range(2))
    if rank == 1:
        optimizer._plain.step = interrupted
    with pytest.raises(KeyboardInterrupt) if rank == 1 else nullcontext():
        train(model, optimizer, rank, range(2, 3))
    vars(optimizer._plain).pop("step", None)
    before = flat(model)
    with pytest.raises(ProtocolMismatchError, match=r"completed updates: rank 0 has 3, rank 1 has 2"):
        train(model, optimizer, rank, range(3, 4))
    assert flat(model) == before
    with pytest.raises(ConfigMismatchError, match=r"completed updates"):
        checkpoint.save(optimizer, "never-written")


def interrupted(*_: object, **__: object) -> None:
    """Raise what Ctrl-C raises."""
    raise KeyboardInterrupt


def failing_hook(rank: int, world_size: int, send) -> None:
    """If a hook of the user raises before the step, on one rank or all, the step can be repeated. Nothing is lost."""
    for door, scaled, clipped, fails in product(("wrap", "ddp"), (False, True), (False, True), ((), (0,), (0, 1))):
        model = net() if door == "wrap" else ddp(net())
        base = adamw(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)  # ours has a collective in each call
        given = {} if door == "wrap" else {"model": model, "scaler": scaler if scaled else None}
        optimizer = sparse(base, max_grad_norm=0.05 if clipped else None, **given)
        norms = []
        for number in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, number)).backward()
            if number == 2 and rank in fails:
                hook = base.register_step_pre_hook(broken)
                with pytest.raises(OSError, match="disk"):
                    scaler.step(optimizer)
                hook.remove()
            scaler.step(optimizer)
            scaler.update()
            norms.append(optimizer.metrics().get("grad_norm"))
        if not fails:
            expected = flat(model), norms
        assert (flat(model), norms) == expected, (door, scaled, clipped, fails)


def given_up_step(rank: int, world_size: int, send) -> None:
    """A loop that goes on after a hook has failed does not apply gradients of one rank, or scaled ones."""
    for scaled in (False, True):
        scaler = GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        model = ddp(net())
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = sparse(base, model=model, scaler=scaler if scaled else None)
        changes = []
        for number in range(4):
            before = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])
            hook = base.register_step_pre_hook(broken) if number == 2 else None
            model.zero_grad(set_to_none=number < 3)
            scaler.scale(loss_of(model, rank, number)).backward()
            with pytest.raises(OSError, match="disk") if hook is not None else nullcontext():
                scaler.step(optimizer)
            if hook is not None:
                hook.remove()
            scaler.update()
            after = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
            changes.append(float((after - before).norm()))
        assert changes[2] == 0 < changes[3] < 10 * changes[1]
        assert same_everywhere(flat(model))
    model = net()
    base = adamw(model)
    optimizer = sparse(base)
    loss_of(model, rank, 0).backward()
    hook = base.register_step_pre_hook(broken)
    with pytest.raises(OSError, match="disk"):
        optimizer.step()
    hook.remove()
    model.zero_grad(set_to_none=False)
    loss_of(model, rank, 1).backward()
    with pytest.raises(RuntimeError, match="gradients have changed since a hook"):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, rank, range(2, 4))
    assert same_everywhere(flat(model))


def failing_after_the_step(rank: int, world_size: int, send) -> None:
    """If a hook after the step raises, a repeated call does not take the step again. A flush can be repeated."""
    for door in ("wrap", "ddp"):
        model = net() if door == "wrap" else ddp(net())
        base = adamw(model)
        optimizer = sparse(base, **({} if door == "wrap" else {"model": model}))
        train(model, optimizer, rank, range(1))
        optimizer.zero_grad()
        loss_of(model, rank, 1).backward()
        hook = base.register_step_post_hook(broken) if rank == 0 else None
        with pytest.raises(OSError, match="disk") if rank == 0 else nullcontext():
            optimizer.step()
        if hook is not None:
            hook.remove()
            before = flat(model)
            with suppress(RuntimeError):  # with a hook of DDP: no new gradients
                optimizer.step()
            assert flat(model) == before
        train(model, optimizer, rank, range(2, 3))
        assert same_everywhere(flat(model))
    weights = []
    for fails in (False, True):
        model = net()
        base = adamw(model)
        optimizer = sparse(base, max_grad_norm=0.01)
        train(model, optimizer, rank, range(3))
        if fails:
            hook = base.register_step_pre_hook(broken)
            with pytest.raises(OSError, match="disk"):
                optimizer.flush()
            hook.remove()
            optimizer.step()
        else:
            optimizer.flush()
        assert not residual(optimizer).any()
        weights.append(flat(model))
    assert weights[0] == weights[1]


def usual_scripts(rank: int, world_size: int, send) -> None:
    """What is not a mistake is not refused."""
    model = tiny_model()
    base = adamw(model)
    with pytest.raises(ConfigMismatchError) as caught:
        sparse(base, density=0.1 + 0.1 * rank)
    loss_of(model, 0, 0).backward()
    base.step()  # a wrap() that failed does not block the optimizer, while its error is alive
    assert caught.value
    optimizer = sparse(base)
    optimizer.release()
    base.step()
    # Numbers that are equal, in other types and another order; entries of the user; a removed group; states that were
    # looked at.
    first, second = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    base = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.1, weight_decay=0)
    if rank == 0:
        assert not base.state[first]
    optimizer = sparse(base)
    for number in range(4):
        for parameter in (first, second):
            parameter.grad = torch.full((4, 4), float(rank + number))
        if rank == 0:
            for group in base.param_groups:
                group["lr"] = np.float64(0.1)
                group["weight_decay"] = 0.0
        base.param_groups[0]["seconds"] = float(rank)
        if number == 2:
            del base.param_groups[1]
            second.requires_grad_(requires_grad=False)
        optimizer.step()
    assert same_everywhere(first.tolist())
    base.param_groups[0]["params"][0] = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ConfigurationError, match="wrap again"):
        optimizer.step()


class Proxy:
    """An object that shares the attributes of an optimizer, as those of Fabric do, and passes on its step."""

    def __new__(cls, inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return an instance of a class that is derived from the one of ``inner``."""
        kind = type("Proxied", (type(inner),), {"step": lambda self, closure=None: inner.step(closure)})
        proxy = kind.__new__(kind)
        proxy.__dict__ = inner.__dict__
        return proxy


def replaced_steps(rank: int, world_size: int, send) -> None:
    """A step that was replaced is called once, with its hooks. A scheduler, a bound method and a proxy replace none."""

    def trained(change: Callable[[torch.optim.Optimizer, list[int]], object]) -> tuple[int, int, bool]:
        model, called, hooked = tiny_model(), [], []
        base = adamw(model)
        change(base, called)
        base.register_step_pre_hook(lambda *_: hooked.append(1))
        optimizer = sparse(base)
        train(model, optimizer, rank, range(2))
        assert same_everywhere(flat(model))
        return len(called), len(hooked), any("last_delivered" in state for state in base.state.values())

    def counting(base: torch.optim.Optimizer, called: list[int]) -> None:
        own = base.step
        base.step = lambda closure=None: called.append(1) or own(closure)

    def marked(base: torch.optim.Optimizer, called: list[int]) -> None:
        ExponentialLR(base, gamma=0.9)
        own = base.step
        base.step = wraps(own)(lambda closure=None: called.append(1) or own(closure))

    def covered(base: torch.optim.Optimizer, called: list[int]) -> None:
        own = base.step
        base.step = MethodType(lambda self, closure=None: called.append(1) or own(closure), base)
        ExponentialLR(base, gamma=0.9)

    assert trained(counting) == trained(marked) == trained(covered) == (2, 2, False)
    assert trained(lambda base, _: ExponentialLR(base, gamma=0.9)) == (0, 2, True)
    assert trained(lambda base, _: setattr(base, "step", base.step)) == (0, 2, True)
    model, called = tiny_model(), []
    base = adamw(model)
    optimizer = sparse(base)
    train(model, optimizer, rank, range(1))
    counting(base, called)
    train(model, optimizer, rank, range(1, 3))
    assert called == [1, 1]
    model = tiny_model()
    optimizer = sparse(Proxy(torch.optim.SGD(model.parameters(), lr=0.1)))
    train(model, optimizer, rank, range(2))
    assert same_everywhere(flat(model))


def broken(*_: object) -> None:
    """Fail as a hook that writes a file may."""
    raise OSError("disk full")


def settings_of_some_ranks(rank: int, world_size: int, send) -> None:
    """A model, a scaler or a hook on some ranks only is named on all ranks."""
    model = ddp(net())
    first = rank == 0
    scaler = torch.amp.GradScaler("cpu")
    for given, named in (
        ({"model": model if first else None}, "model: rank 0 has 'DistributedDataParallel'"),
        ({"model": model, "scaler": scaler if first else None}, "scaler: rank 0 has True"),
    ):
        with pytest.raises(ConfigMismatchError, match=re.escape(named)):
            sparse(adamw(model), **given)
    assert not model._comm_hooks
    tritoncomm.ddp.register(model, density=0.2, dense_below=0)
    with pytest.raises(ConfigMismatchError, match="scaler: rank 0 has True"):
        sparse(adamw(model), model=model, scaler=scaler if first else None)
    assert tritoncomm.ddp.state_of(model).scaler is None
    other = ddp(net())
    tritoncomm.ddp.register(other, density=0.2, scaler=scaler if first else None)
    with pytest.raises(ConfigMismatchError, match="scaler"):
        other(torch.ones(1, 6)).sum().backward()
    model = ddp(net())
    if first:
        tritoncomm.ddp.register(model, density=0.2, dense_below=0)
    with pytest.raises(ConfigMismatchError, match="registered hook: rank 0 has True"):
        sparse(adamw(model), model=model)


def groups_that_are_none(rank: int, world_size: int, send) -> None:
    """A mesh, a list of ranks or a group of other ranks in the place of a process group is named."""
    mesh = init_device_mesh("cpu", (world_size,))
    other = [dist.new_group([each]) for each in range(world_size)][1 - rank]
    model = ddp(net())
    optimizer = sparse(adamw(tiny_model()))
    for group, named in ((mesh, "get_group"), ([0, 1], r"\[0, 1\]"), ("world", "'world'"), (other, "not a member")):
        for name in ("process_group", "node_group"):
            with pytest.raises(ConfigurationError, match=f"{name}.*{named}|{named}.*{name}"):
                sparse(adamw(tiny_model()), **{name: group})
        for call in (optimizer.reset_process_group, CommState, lambda given: GradScaler("cpu", process_group=given)):
            with pytest.raises(ConfigurationError, match=f"process_group.*{named}|{named}.*process_group"):
                call(group)
    train(model, sparse(adamw(model), model=model), rank, range(1))


def one_folder_for_two(rank: int, world_size: int, send, folder: str) -> None:
    """A warning says that a second optimizer overwrites the state of a first one. Two groups do not share a folder."""
    models = [tiny_model(seed) for seed in range(2)]
    first, second = (sparse(adamw(model)) for model in models)
    train(models[0], first, rank, range(1))
    place = Path(folder) / "one"
    checkpoint.save(first, place)
    with log_lines() as lines:
        checkpoint.save(first, place)
        again = sparse(first.optimizer)
        checkpoint.save(again, place)  # the same optimizer, wrapped again
        checkpoint.save(second, Path(folder) / "two")
        assert not any("another optimizer" in line for line in lines)
        checkpoint.save(second, place)
    assert any("state of another optimizer of this process" in line for line in lines)
    # Stages of a pipeline: the ranks 0 and 2, and the ranks 1 and 3.
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    stage = sparse(adamw(tiny_model(rank % 2)), process_group=groups[rank % 2])
    for number in range(2):  # one after the other
        if rank % 2 == number == 0:
            checkpoint.save(stage, Path(folder) / "stages")
        elif rank % 2 == number == 1:
            with pytest.raises((ConfigurationError, ConfigMismatchError), match=r"ranks \[0, 2\].*ranks \[1, 3\]"):
                checkpoint.save(stage, Path(folder) / "stages")
        dist.barrier()
    if rank % 2 == 0:
        checkpoint.load(stage, Path(folder) / "stages")
        checkpoint.save(stage, Path(folder) / "stages")
    refused = 0
    try:
        checkpoint.save(stage, Path(folder) / "at once")
    except (ConfigurationError, ConfigMismatchError):
        refused = 1
    everybody = torch.zeros(world_size)
    everybody[rank] = refused
    dist.all_reduce(everybody)
    assert everybody[0] == everybody[2]
    assert everybody[1] == everybody[3]
    assert everybody.sum()


def other_default_dtype(rank: int, world_size: int, send) -> None:
    """Training does not depend on the dtype in which torch creates tensors by default."""
    for door in ("wrap", "ddp"):
        for fields in (
            {"values": "fp32"},
            {"values": "4bit", "small": "8bit", "dense_below": 8},
            {"select_by": "update"},
        ):
            weights = []
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                model = net() if door == "wrap" else ddp(net())
                batches = [torch.randn(8, 6, generator=torch.Generator().manual_seed(9 * n + rank)) for n in range(4)]
                before = torch.get_default_dtype()
                torch.set_default_dtype(dtype)
                try:
                    given = {} if door == "wrap" else {"model": model}
                    optimizer = sparse(adamw(model), warmup_steps=1, max_grad_norm=1.0, **fields, **given)
                    for batch in batches:
                        optimizer.zero_grad()
                        model(batch).square().mean().backward()
                        optimizer.step()
                    optimizer.flush()
                finally:
                    torch.set_default_dtype(before)
                weights.append(flat(model))
            assert weights[0] == weights[1] == weights[2], (door, fields)
