"""What users do by mistake is an error on all ranks, and what is no mistake is not."""

from __future__ import annotations

import gc
from copy import deepcopy
from functools import wraps
from types import MethodType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from kit import everywhere, log_lines
from models import adamw, ddp, equal, exact, flat, gradients, loss_of, net, residual, same, tiny, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import ExponentialLR
from tritoncomm import ConfigMismatchError, ConfigurationError, Late, ProtocolMismatchError, checkpoint

from ranks import ranks


@ranks(2)
def test_step_of_a_part(rank, world_size):
    """It raises while its list is wrapped, by a scaler, too, and steps again when nobody holds the list.

    Until then, it cannot be wrapped again.
    """
    model = tiny()
    base = adamw(model)
    optimizer = exact([base])
    loss_of(model, rank, 0).backward()
    before = flat(model)
    with pytest.raises(RuntimeError, match=r"AdamW.*tritoncomm\.wrap"):
        base.step()
    with pytest.raises(RuntimeError, match=r"tritoncomm\.wrap"):
        torch.amp.GradScaler("cpu", enabled=False).step(base)
    assert torch.equal(flat(model), before)
    for again in (base, [base]):
        with pytest.raises(ConfigurationError, match="AdamW, which is wrapped already, by itself or in a list"):
            exact(again)
    train(model, optimizer, rank, range(2, 3))
    assert equal(model)
    del optimizer
    gc.collect()
    base.step()
    exact(base)


STATES = {
    "optimizer state": lambda state: state.update(state={}),
    "optimizer state: step of parameter": lambda state: next(iter(state["state"].values())).update(step=torch.ones(())),
    "steps": lambda state: state.pop("tritoncomm"),
}


@ranks(2)
@pytest.mark.parametrize("field", STATES)
def test_states_that_differ(rank, world_size, field):
    """Nothing is loaded, and training goes on."""
    model = tiny()
    optimizer = exact(adamw(model))
    train(model, optimizer, rank, range(2))
    before, loaded = residual(optimizer), deepcopy(optimizer.state_dict())
    if rank:
        STATES[field](loaded)
    with pytest.raises(ConfigMismatchError, match=field):
        optimizer.load_state_dict(loaded)
    assert torch.equal(residual(optimizer), before)
    train(model, optimizer, rank, range(2, 4))
    assert equal(model)


@ranks(2)
def test_numbers_that_differ(rank, world_size):
    """Rates that are tensors, and options that are several numbers, are named, with the ranks. Training can go on."""
    model = ddp(net())
    optimizer = exact(adamw(model, lr=torch.tensor(0.01)), model=model)
    train(model, optimizer, rank, range(2))
    options = optimizer.param_groups[0]
    options["lr"] = options["lr"] / (1 + rank)
    with pytest.raises(ProtocolMismatchError, match=r"lr of parameter group 0: rank 0 has 0.0.*, rank 1 has 0.00"):
        train(model, optimizer, rank, [2])
    options["lr"], options["betas"] = torch.tensor(0.01), [0.9, 0.99 if rank else 0.999]
    with pytest.raises(ProtocolMismatchError, match=r"betas of parameter group 0: rank 0 has \(0.9, 0.999\), rank 1"):
        train(model, optimizer, rank, [2])
    options["betas"] = (0.9, 0.999)
    train(model, optimizer, rank, [2])
    assert equal(model)


@ranks(2)
def test_numbers_that_are_equal(rank, world_size):
    """Other types, entries of the user, a removed group and states that were looked at are no difference."""
    first, second = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    base = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.1, weight_decay=0)
    if rank == 0:
        assert not base.state[first]
    optimizer = exact(base)
    for number in range(4):
        for parameter in (first, second):
            parameter.grad = torch.full((4, 4), float(rank + number))
        if rank == 0:
            for group in base.param_groups:
                group["lr"], group["weight_decay"] = np.float64(0.1), 0.0
        base.param_groups[0]["seconds"] = float(rank)
        if number == 2:
            del base.param_groups[1]
            second.requires_grad_(requires_grad=False)
        optimizer.step()
    assert equal([first])
    base.param_groups[0]["params"][0] = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ConfigurationError, match="wrap again"):
        optimizer.step()


def counting(base: torch.optim.Optimizer, called: list[int]) -> None:
    """Replace the step."""
    own = base.step
    base.step = lambda closure=None: called.append(1) or own(closure)


def marked(base: torch.optim.Optimizer, called: list[int]) -> None:
    """Replace the step over that of a scheduler, as decorators do."""
    ExponentialLR(base, gamma=0.9)
    own = base.step
    base.step = wraps(own)(lambda closure=None: called.append(1) or own(closure))


def covered(base: torch.optim.Optimizer, called: list[int]) -> None:
    """Replace the step under that of a scheduler."""
    own = base.step
    base.step = MethodType(lambda self, closure=None: called.append(1) or own(closure), base)
    ExponentialLR(base, gamma=0.9)


# What changes the step, and how often its replacement is called.
REPLACED = {
    "counting": (counting, 2),
    "marked": (marked, 2),
    "covered": (covered, 2),
    "a scheduler": (lambda base, _: ExponentialLR(base, gamma=0.9), 0),
    "a bound method": (lambda base, _: setattr(base, "step", base.step), 0),
}


@ranks(2)
@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.parametrize("is_late", [False, True])
def test_replaced_steps(rank, world_size, name, is_late):
    """A step that was replaced before wrap is refused: it would hide ours. A scheduler and a bound method replace none.

    What is put around the step of a wrapped optimizer calls that.
    """
    change, calls = REPLACED[name]
    model, called, hooked = tiny(), [], []
    base = adamw(model)
    if not is_late:
        change(base, called)
        if calls:
            with pytest.raises(ConfigurationError, match=r"replaced step\(\) of this one AdamW"):
                exact(base)
            return
    base.register_step_pre_hook(lambda *_: hooked.append(1))
    optimizer = exact(base)
    if is_late:
        change(base, called)
    train(model, optimizer, rank, range(2))
    assert (len(called), len(hooked)) == (calls, 2)
    assert optimizer.metrics()["steps"] == 2
    assert equal(model)


@ranks(2)
def test_model_of_one_rank(rank, world_size):
    """A model that is passed on some ranks only is named on all ranks, and DDP still averages its gradients."""
    model = ddp(net())
    with pytest.raises(ConfigMismatchError, match="model: rank 0 has 'DistributedDataParallel'"):
        exact(adamw(model), model=model if rank == 0 else None)
    loss_of(model, rank, 0).backward()
    assert same(gradients(model).tolist())


@ranks(2)
def test_groups_that_are_none(rank, world_size):
    """A mesh, a list of ranks or a group of other ranks in the place of a process group is named."""
    mesh = init_device_mesh("cpu", (world_size,))
    other = [dist.new_group([each]) for each in range(world_size)][1 - rank]
    optimizer = exact(adamw(tiny()))
    for group, named in ((mesh, "get_group"), ([0, 1], r"\[0, 1\]"), ("world", "'world'"), (other, "not a member")):
        for name in ("process_group", "node_group"):
            with pytest.raises(ConfigurationError, match=f"{name}.*{named}|{named}.*{name}"):
                exact(adamw(tiny()), **{name: group})
        with pytest.raises(ConfigurationError, match=f"process_group.*{named}|{named}.*process_group"):
            optimizer.reset_process_group(group)


@ranks(4)
def test_folder_that_all_ranks_have_used_since(rank, world_size, tmp_path):
    """It holds the state of all ranks: a smaller group that used it before is no matter any more."""
    pairs = dist.new_subgroups(2)[0]
    if rank < 2:
        checkpoint.save(exact(adamw(tiny()), process_group=pairs), tmp_path / "folder")
    dist.barrier()
    checkpoint.save(exact(adamw(tiny())), tmp_path / "folder")
    if rank >= 2:
        checkpoint.save(exact(adamw(tiny()), process_group=pairs), tmp_path / "folder")


@ranks(4)
def test_one_folder_for_two(rank, world_size, tmp_path):
    """A warning says that a second optimizer overwrites a first one. Two groups do not share a folder, nor at once."""
    first, second = (exact(adamw(tiny(seed))) for seed in range(2))
    checkpoint.save(first, tmp_path / "one")
    with log_lines() as lines:
        checkpoint.save(first, tmp_path / "one")
        checkpoint.save(second, tmp_path / "two")
        assert not any("another optimizer" in line for line in lines)
        checkpoint.save(second, tmp_path / "one")
    assert any("state of another optimizer of this process" in line for line in lines)
    # Stages of a pipeline: the ranks 0 and 2, and the ranks 1 and 3.
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    stage = exact(adamw(tiny(rank % 2)), process_group=groups[rank % 2])
    refused = False
    try:
        checkpoint.save(stage, tmp_path / "at once")
    except (ConfigurationError, ConfigMismatchError) as error:
        refused = True
        assert all(text in str(error) for text in ("ranks [0, 2]", "ranks [1, 3]"))  # noqa: PT017 - one group does
    of_ranks = everywhere(refused)
    assert of_ranks[:2] == of_ranks[2:]
    assert any(of_ranks)


@ranks(2)
@pytest.mark.parametrize(
    "fields", [{"values": "4bit", "small": "8bit", "dense_below": 8}, {"late": Late(select_by="update")}]
)
def test_default_dtype(rank, world_size, fields):
    """Training does not depend on the dtype in which torch creates tensors by default."""
    ends = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model = ddp(net())
        batches = [torch.randn(8, 6, generator=torch.Generator().manual_seed(9 * n + rank)) for n in range(3)]
        torch.set_default_dtype(dtype)
        try:
            optimizer = exact(adamw(model), model=model, max_grad_norm=1.0, **fields)
            for batch in batches:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
            optimizer.flush()
        finally:
            torch.set_default_dtype(torch.float32)
        ends.append(flat(model))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
