"""Worker processes of tests/distributed/test_misuse.py: what users do by mistake is an error on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import wraps
from pathlib import Path
from types import MethodType

import numpy as np
import pytest
import torch
import torch.distributed as dist
import tritoncomm
from ddp_models import ddp, net
from helpers import adamw, flat, log_lines, loss_of, residual, same_everywhere, sparse_wrap, tiny_model, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import ExponentialLR
from tritoncomm import ConfigMismatchError, ConfigurationError, ProtocolMismatchError, checkpoint


def original_stepped(rank: int, world_size: int, send) -> None:
    """The original optimizer cannot step while it is wrapped. Schedulers and hooks of the original one still work."""
    model, seen = tiny_model(), []
    base = adamw(model)
    base.register_step_pre_hook(lambda *_: seen.append(1))
    schedule = ExponentialLR(base, gamma=0.5)
    optimizer = sparse_wrap(base)
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
    again = sparse_wrap(base)  # wrapped twice: both may step
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
        optimizer = sparse_wrap(base, on_nonfinite="raise")
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


def rejected_group(rank: int, world_size: int, send) -> None:
    """A parameter group that differs between ranks is rejected, and training goes on without it."""
    model = tiny_model()
    optimizer = sparse_wrap(adamw(model))
    with pytest.raises(ConfigMismatchError, match="shape of parameter"):
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
        with pytest.raises(ConfigMismatchError, match=r"load the same state on all ranks.*optimizer state: "):
            sparse_wrap(optimizer, broadcast_parameters=broadcast)
    sparse_wrap(torch.optim.Adagrad(tiny_model().parameters()))  # a state that is equal
    model = tiny_model()
    optimizer = sparse_wrap(adamw(model))
    train(model, optimizer, rank, range(2))
    saved, before = optimizer.state_dict(), (flat(model), residual(optimizer))
    tampered: dict[str, Callable[[dict], object]] = {
        "optimizer state": lambda state: state.update(state={}),
        "optimizer state: step of parameter": lambda state: next(iter(state["state"].values())).update(
            step=torch.tensor(7.0)
        ),
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
        optimizer = sparse_wrap(base)
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
    model = ddp(net())
    optimizer = sparse_wrap(adamw(model), model=model)
    train(model, optimizer, rank, range(1))
    optimizer.param_groups[0]["betas"] = [0.9, 0.99 if rank else 0.999]
    with pytest.raises(
        ProtocolMismatchError, match=r"betas of parameter group 0: rank 0 has \(0.9, 0.999\), rank 1 has"
    ):
        train(model, optimizer, rank, range(1, 2))


def usual_scripts(rank: int, world_size: int, send) -> None:
    """What is not a mistake is not refused."""
    model = tiny_model()
    base = adamw(model)
    with pytest.raises(ConfigMismatchError) as caught:
        sparse_wrap(base, density=0.1 + 0.1 * rank)
    loss_of(model, 0, 0).backward()
    base.step()  # a wrap() that failed does not block the optimizer, while its error is alive
    assert caught.value
    optimizer = sparse_wrap(base)
    optimizer.release()
    base.step()
    # Numbers that are equal, in other types and another order; entries of the user; a removed group; states that were
    # looked at.
    first, second = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    base = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.1, weight_decay=0)
    if rank == 0:
        assert not base.state[first]
    optimizer = sparse_wrap(base)
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
        optimizer = sparse_wrap(base)
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
    optimizer = sparse_wrap(base)
    train(model, optimizer, rank, range(1))
    counting(base, called)
    train(model, optimizer, rank, range(1, 3))
    assert called == [1, 1]
    model = tiny_model()
    optimizer = sparse_wrap(Proxy(torch.optim.SGD(model.parameters(), lr=0.1)))
    train(model, optimizer, rank, range(2))
    assert same_everywhere(flat(model))


def settings_of_some_ranks(rank: int, world_size: int, send) -> None:
    """A model that is passed on some ranks only is named on all ranks, and DDP still averages its gradients."""
    model = ddp(net())
    with pytest.raises(ConfigMismatchError, match="model: rank 0 has 'DistributedDataParallel'"):
        sparse_wrap(adamw(model), model=model if rank == 0 else None)
    loss_of(model, rank, 0).backward()
    assert same_everywhere([p.grad.tolist() for p in model.parameters()])
    model.zero_grad()
    train(model, sparse_wrap(adamw(model), model=model), rank, range(2))
    assert same_everywhere(flat(model))


def groups_that_are_none(rank: int, world_size: int, send) -> None:
    """A mesh, a list of ranks or a group of other ranks in the place of a process group is named."""
    mesh = init_device_mesh("cpu", (world_size,))
    other = [dist.new_group([each]) for each in range(world_size)][1 - rank]
    model = ddp(net())
    optimizer = sparse_wrap(adamw(tiny_model()))
    for group, named in ((mesh, "get_group"), ([0, 1], r"\[0, 1\]"), ("world", "'world'"), (other, "not a member")):
        for name in ("process_group", "node_group"):
            with pytest.raises(ConfigurationError, match=f"{name}.*{named}|{named}.*{name}"):
                sparse_wrap(adamw(tiny_model()), **{name: group})
        with pytest.raises(ConfigurationError, match=f"process_group.*{named}|{named}.*process_group"):
            optimizer.reset_process_group(group)
    train(model, sparse_wrap(adamw(model), model=model), rank, range(1))


def one_folder_for_two(rank: int, world_size: int, send, folder: str) -> None:
    """A warning says that a second optimizer overwrites the state of a first one. Two groups do not share a folder."""
    models = [tiny_model(seed) for seed in range(2)]
    first, second = (sparse_wrap(adamw(model)) for model in models)
    train(models[0], first, rank, range(1))
    place = Path(folder) / "one"
    checkpoint.save(first, place)
    with log_lines() as lines:
        checkpoint.save(first, place)
        again = sparse_wrap(first.optimizer)
        checkpoint.save(again, place)  # the same optimizer, wrapped again
        checkpoint.save(second, Path(folder) / "two")
        assert not any("another optimizer" in line for line in lines)
        checkpoint.save(second, place)
    assert any("state of another optimizer of this process" in line for line in lines)
    # Stages of a pipeline: the ranks 0 and 2, and the ranks 1 and 3.
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    stage = sparse_wrap(adamw(tiny_model(rank % 2)), process_group=groups[rank % 2])
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
    for kind in ("plain", "ddp"):
        for fields in (
            {"values": "fp32"},
            {"values": "4bit", "small": "8bit", "dense_below": 8},
            {"select_by": "update"},
        ):
            weights = []
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                model = net() if kind == "plain" else ddp(net())
                batches = [torch.randn(8, 6, generator=torch.Generator().manual_seed(9 * n + rank)) for n in range(4)]
                before = torch.get_default_dtype()
                torch.set_default_dtype(dtype)
                try:
                    given = {} if kind == "plain" else {"model": model}
                    optimizer = sparse_wrap(adamw(model), warmup_steps=1, max_grad_norm=1.0, **fields, **given)
                    for batch in batches:
                        optimizer.zero_grad()
                        model(batch).square().mean().backward()
                        optimizer.step()
                    optimizer.flush()
                finally:
                    torch.set_default_dtype(before)
                weights.append(flat(model))
            assert weights[0] == weights[1] == weights[2], (kind, fields)
