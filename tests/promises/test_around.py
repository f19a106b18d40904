"""What runs around a step: hooks, closures, synchronize(), schedules, and an update that fails."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from kit import equal_on_all_ranks, everywhere, flat, gradient, sgd, sparse, take, total, weight
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from tritoncomm import ProtocolMismatchError

from ranks import ranks


@ranks(2)
def test_backward_pass_after_a_flush_that_failed_is_noticed(rank, world_size):
    """It would be lost: the step applies what the flush has averaged."""
    p, failures = weight(32), [ValueError("a hook")]
    optimizer = sparse(sgd([p]))

    def hook(*_):
        if failures:
            raise failures.pop()

    take(optimizer, [p], rank, range(2), world_size)
    handle = optimizer.register_step_pre_hook(hook)
    with pytest.raises(ValueError, match="a hook"):
        optimizer.flush()
    p.grad.add_(1.0)
    with pytest.raises(RuntimeError, match="changed since"):
        optimizer.step()
    optimizer.zero_grad()
    handle.remove()
    optimizer.flush()
    whole = [gradient(32, each, step, world_size) for step in range(2) for each in range(world_size)]
    assert torch.equal(flat([p]), -torch.stack(whole).sum(0) / world_size)


class _FailsAt(TorchFunctionMode):
    """Raises when a parameter is changed in place."""

    def __init__(self, parameter):
        super().__init__()
        self.parameter = parameter

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if args and args[0] is self.parameter and function.__name__.rstrip("_") + "_" == function.__name__:
            raise MemoryError
        return function(*args, **(kwargs or {}))


@ranks(2)
@pytest.mark.parametrize("everybody", [False, True])
def test_update_that_fails_in_the_middle_stops_the_training(rank, world_size, everybody):
    """Nobody saves or steps from parameters that are half updated. Loading a checkpoint ends this."""
    p, q = weight(), weight()
    optimizer = sparse(sgd([p, q]))
    take(optimizer, [p, q], rank, range(2), world_size)
    good, saved = [p.detach().clone(), q.detach().clone()], optimizer.state_dict()
    if rank == 1 or everybody:
        with pytest.raises(MemoryError), _FailsAt(q):
            take(optimizer, [p, q], rank, [2], world_size)
        assert torch.equal(q, good[1])
        assert not torch.equal(p, good[0])
        with pytest.raises(RuntimeError, match="checkpoint"):
            optimizer.state_dict()
    else:
        take(optimizer, [p, q], rank, [2], world_size)
    before = flat([p, q])
    with pytest.raises(ProtocolMismatchError, match="checkpoint"):
        take(optimizer, [p, q], rank, [3], world_size)
    assert torch.equal(flat([p, q]), before)
    with torch.no_grad():
        for parameter, values in zip([p, q], good, strict=True):
            parameter.copy_(values)
    optimizer.load_state_dict(saved)
    take(optimizer, [p, q], rank, [2], world_size)
    optimizer.flush()
    assert torch.equal(flat([p]), -total(16, range(3), world_size))
    assert torch.equal(flat([q]), -total(16, range(100, 103), world_size))


@ranks(2)
def test_hook_that_fails_before_the_update_loses_nothing(rank, world_size):
    """step() is called again, and takes the step that was exchanged."""
    p = weight()
    fails = [rank == 1]

    def hook(*_):
        if fails.pop() if fails else False:
            raise MemoryError

    bare = sgd([p])
    bare.register_step_pre_hook(hook)
    optimizer = sparse(bare)
    p.grad = gradient(16, rank, 0, world_size)
    if rank == 1:
        with pytest.raises(MemoryError):
            optimizer.step()
        assert not p.detach().any()
    optimizer.step()
    assert equal_on_all_ranks([p])
    assert optimizer.metrics()["steps"] == 1
    optimizer.flush()
    assert torch.equal(flat([p]), -total(16, range(1), world_size))


@ranks(2)
def test_hook_that_fails_behind_the_update_does_not_repeat_it(rank, world_size):
    """The step is taken: a call that is repeated does not take it again."""
    p = weight()
    fails = [True]

    def hook(*_):
        if fails.pop() if fails else False:
            raise MemoryError

    bare = sgd([p])
    bare.register_step_post_hook(hook)
    optimizer = sparse(bare)
    with pytest.raises(MemoryError):
        take(optimizer, [p], rank, [0], world_size)
    after = flat([p])
    assert after.any()
    optimizer.step()
    assert torch.equal(flat([p]), after)
    assert optimizer.metrics()["steps"] == 1


@ranks(2)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_hooks_run_once_and_may_change_the_mean(rank, world_size, momentum):
    """Hooks of one optimizer and of all run once in each step. A hook before it may scale the mean."""
    p, runs = weight(), []
    bare = sgd([p], momentum=momentum)
    bare.register_step_pre_hook(lambda *_: (p.grad.mul_(0.5), runs.append("before"))[1])
    bare.register_step_post_hook(lambda *_: runs.append("after"))
    optimizer = sparse(bare, density=1.0)
    everything = register_optimizer_step_post_hook(lambda *_: runs.append("all"))
    try:
        take(optimizer, [p], rank, [0], world_size)
    finally:
        everything.remove()
    assert sorted(runs) == ["after", "all", "before"]
    assert torch.equal(flat([p]), -0.5 * total(16, range(1), world_size))


@ranks(2)
def test_backward_after_synchronize_is_refused(rank, world_size):
    """Gradients of one rank must not be added to the mean. Clipping the mean is allowed."""
    p = weight()
    optimizer = sparse(sgd([p]))
    (p * gradient(16, rank, 0, world_size)).sum().backward()
    optimizer.synchronize()
    with torch.no_grad():
        p.grad.mul_(0.5)
    (p * gradient(16, rank, 1, world_size)).sum().backward()
    with pytest.raises(RuntimeError, match="backward"):
        optimizer.step()
    assert not p.detach().any()
    optimizer.zero_grad()
    (p * gradient(16, rank, 0, world_size)).sum().backward()
    optimizer.synchronize()
    shown = p.grad.clone()
    with torch.no_grad():
        p.grad.mul_(0.5)
    optimizer.step()
    assert shown.any()
    assert torch.equal(flat([p]), -0.5 * shown)


@ranks(2)
def test_synchronize_shows_the_mean_once(rank, world_size):
    """Every rank sees the same ``.grad``. A second call, or another ``.grad``, is an error."""
    p = weight()
    optimizer = sparse(sgd([p]), density=1.0)
    p.grad = gradient(16, rank, 0, world_size)
    optimizer.synchronize()
    assert optimizer.is_synchronized
    assert torch.equal(p.grad, total(16, range(1), world_size))
    with pytest.raises(RuntimeError, match="already"):
        optimizer.synchronize()
    with pytest.raises(RuntimeError, match="step"):
        optimizer.state_dict()
    optimizer.step()
    assert torch.equal(flat([p]), -total(16, range(1), world_size))
    take(optimizer, [p], rank, [1], world_size)
    before = flat([p])
    p.grad = gradient(16, rank, 2, world_size)
    optimizer.synchronize()
    p.grad = gradient(16, rank, 3, world_size)
    with pytest.raises(RuntimeError, match="synchronize"):
        optimizer.step()
    assert torch.equal(flat([p]), before)


@ranks(2)
def test_closure_is_called_once_with_gradients(rank, world_size):
    """step() returns the loss, also inside no_grad()."""
    p, calls = weight(), []
    optimizer = sparse(sgd([p]), density=1.0)

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = (p * gradient(16, rank, 0, world_size)).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [1]
    assert loss.item() == 0
    assert torch.equal(flat([p]), -total(16, range(1), world_size))


@ranks(2)
def test_state_for_a_checkpoint_is_made_without_an_exchange(rank, world_size):
    """torch.distributed.checkpoint lets one rank create the state of its optimizer. Nobody waits for the other."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # noqa: PLC0415 - takes a while

    model = nn.Linear(4, 4)
    optimizer = sparse(torch.optim.AdamW(model.parameters(), lr=0.1), model=model)
    before = flat(model.parameters())
    if rank == 0:
        state = get_optimizer_state_dict(model, optimizer)["state"]
        assert "exp_avg" in state["weight"]
    dist.barrier()
    if rank == 1:
        get_optimizer_state_dict(model, optimizer)
    assert torch.equal(flat(model.parameters()), before)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert equal_on_all_ranks(model.parameters())


@ranks(2)
def test_schedules_made_before_or_after_count_every_step(rank, world_size):
    """No schedule warns that it was stepped before the optimizer."""
    p = weight()
    bare = sgd([p])
    before = torch.optim.lr_scheduler.LambdaLR(bare, lambda step: 0.5**step)
    optimizer = sparse(bare)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take(optimizer, [p], rank, [0], world_size)
        before.step()
        assert optimizer.param_groups[0]["lr"] == 0.5
        after = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        take(optimizer, [p], rank, [1], world_size)
        after.step()
        assert optimizer.param_groups[0]["lr"] == 0.25


@ranks(1)
@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
def test_hook_that_fails_where_a_single_worker_has_a_new_parameter(rank, world_size, kind):
    """What has failed is the exchange of the parameters that there are now."""
    p, q, fails = weight(4), weight(4), [True]
    q.requires_grad_(False)
    optimizer = sparse(sgd([p, q]))

    def hook(*_):
        if fails:
            fails.clear()
            raise kind

    optimizer.register_step_pre_hook(hook)
    q.requires_grad_()
    p.grad, q.grad = torch.ones(4), torch.ones(4)
    with pytest.raises(kind):
        optimizer.step()
    p.grad.add_(1.0)
    with pytest.raises(
        (RuntimeError, ProtocolMismatchError), match="changed since" if kind is MemoryError else "an update has stopped"
    ):
        optimizer.step()
    assert not p.detach().any()


@ranks(1)
def test_a_parameter_that_a_single_worker_has_lost_is_named(rank, world_size):
    """Also if another one is trained from the same step on."""
    p, q = weight(4), weight(4)
    q.requires_grad_(False)
    optimizer = sparse(sgd([p, q]))
    optimizer.param_groups[0]["params"].pop(0)
    q.requires_grad_()
    q.grad = torch.ones(4)
    with pytest.raises(tritoncomm.ConfigurationError, match="lost parameters"):
        optimizer.step()


MODES = {
    "gradients": {"max_grad_norm": 1.0},
    "default": {"algo": "oktopk", "warmup_steps": 2, "dense_below": 8},
    "dense": {"algo": "dense", "density": None},
    "spardl": {"algo": "spardl", "density": 0.25},
    "exdyna": {"algo": "exdyna", "density": 0.25},
    "updates": {"updates": tritoncomm.Updates(outer_momentum=0.5)},
    "local steps": {"local_steps": 2, "max_grad_norm": 1.0},
}


@ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_the_default_device_is_that_of_the_user(rank, world_size, mode, tmp_path):
    """The library makes no tensor there: steps, and a checkpoint, have the same bits with ``set_default_device``."""
    folder, ends = everywhere(str(tmp_path))[0], []
    for device in ("cpu", "meta"):
        p, q = weight(32, 1.0), weight(4, 1.0)
        optimizer = tritoncomm.wrap(torch.optim.AdamW([p, q], lr=0.1), **MODES[mode])
        values = [(gradient(32, rank, step), gradient(4, rank, step)) for step in range(6)]
        with torch.device(device):
            for step, (one, two) in enumerate(values):
                p.grad, q.grad = one.clone(), two.clone()
                optimizer.step()
                if step == 3:
                    tritoncomm.checkpoint.save(optimizer, folder)
                    tritoncomm.checkpoint.load(optimizer, folder)
            optimizer.merge()
            optimizer.metrics()
            optimizer.flush()
        ends.append(flat([p, q]))
    assert torch.equal(*ends)
