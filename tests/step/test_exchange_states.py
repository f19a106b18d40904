"""The states of a step: what each of them allows, and that nothing changes before a step is applied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import unconfirmed
from torch import nn
from tritoncomm import SparseOptimizer
from tritoncomm.step.exchange.pending import State

from emulated_cuda import ranks
from small_model import backward, model, sgd, sparse_wrap, train

# Made once, as the generator of torch belongs to all threads.
_MODEL = model()


def opened(**settings) -> tuple[nn.Module, SparseOptimizer]:
    """Return a model and its wrapped optimizer, after two steps."""
    net = copy.deepcopy(_MODEL)
    optimizer = sparse_wrap(sgd(net), **{"density": 0.2} | settings)
    train(net, optimizer, range(2))
    assert state_of(optimizer) is State.IDLE
    return net, optimizer


def state_of(optimizer: SparseOptimizer) -> State:
    """Return the state of the present step."""
    return optimizer._tritoncomm.setup.exchange.state


def held(net: nn.Module, optimizer: SparseOptimizer) -> list[Any]:
    """Return what a step changes: parameters, the residual, and the states of method and optimizer, as bits."""
    feedback = optimizer._tritoncomm.setup.scope.vectors[0].feedback
    inner = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*net.parameters(), feedback.residual, *(value for value in inner if isinstance(value, torch.Tensor))]
    flat = [tensor.detach().float().reshape(-1).view(torch.int32).tolist() for tensor in tensors]
    return [flat, repr(feedback.algorithm.state), optimizer.metrics()["steps"]]


def test_loading_in_every_state() -> None:
    """A state that is loaded replaces what is READY, too."""
    net, optimizer = opened()
    saved, before = copy.deepcopy(optimizer.state_dict()), held(net, optimizer)
    optimizer.zero_grad()
    backward(net, 2)
    optimizer.synchronize()
    optimizer.load_state_dict(saved)
    assert state_of(optimizer) is State.IDLE
    assert held(net, optimizer) == before
    optimizer.zero_grad()
    train(net, optimizer, range(3, 4))


@pytest.mark.parametrize(("lost_by", "act"), [((0, 1), "step"), ((0, 1), "flush"), ((1,), "zero_grad")])
def test_a_lost_confirmation(lost_by: tuple[int, ...], act: str) -> None:
    """SUSPENDED has changed nothing. In a new group the step is applied if another rank has done so, or rolled back.

    A loop that resets gradients does not forget it.
    """

    def main(rank: int) -> list[Any]:
        net, optimizer = ours = opened(timeout=timedelta(seconds=5))
        before = held(*ours)
        optimizer.zero_grad()
        if act != "flush":
            backward(net, 10 + rank)
        take = optimizer.flush if act == "flush" else optimizer.step
        with unconfirmed(optimizer) if rank in lost_by else nullcontext():
            take()
        if rank in lost_by:
            if act == "zero_grad":
                optimizer.zero_grad()
            assert state_of(optimizer) is State.SUSPENDED
            assert held(*ours) == before
            assert optimizer.state_dict()["tritoncomm"]["steps"] == 2  # what is saved is before the step
        else:
            assert state_of(optimizer) is State.IDLE
        group = dist.new_group([0, 1], timeout=timedelta(seconds=5), use_local_synchronization=True)
        assert optimizer.reset_process_group(group) == (rank in lost_by and len(lost_by) == 1)
        assert state_of(optimizer) is State.IDLE
        assert optimizer.metrics()["steps"] == (3 if len(lost_by) == 1 else 2)
        if len(lost_by) == 2:
            assert held(*ours)[0] == before[0]
        train(net, optimizer, range(3, 5))
        return held(*ours)[0][:4]

    found = ranks.run(main, 2, backend="gloo")
    assert found[0] == found[1]


@pytest.mark.parametrize("act", ["step", "synchronize"])
@pytest.mark.parametrize(
    ("kind", "options"), [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {"weight_decay": 0.1})]
)
def test_a_step_that_is_caught_up_has_the_bits_of_the_others(
    kind: Callable[..., torch.optim.Optimizer], options: dict[str, float], act: str
) -> None:
    """So does one by gradients in bf16, which hold a rounded mean, and with weight decay in it."""

    def main(rank: int) -> list[Any]:
        net = copy.deepcopy(_MODEL).bfloat16()
        inner = kind(net.parameters(), lr=0.01, **options)
        optimizer = sparse_wrap(inner, density=0.5, values="fp32", warmup_steps=0, timeout=timedelta(seconds=5))

        def gradients(step: int) -> None:
            generator = torch.Generator().manual_seed(10 * step + rank)
            for p in net.parameters():
                p.grad = torch.randn(p.shape, generator=generator).bfloat16()

        for step in range(3):
            gradients(step)
            if rank == 1 and step == 2:
                with unconfirmed(optimizer):
                    getattr(optimizer, act)()
                continue
            if act == "synchronize":
                optimizer.synchronize()
            optimizer.step()
        group = dist.new_group([0, 1], timeout=timedelta(seconds=5), use_local_synchronization=True)
        assert optimizer.reset_process_group(group) == (rank == 1)
        return [p.detach().view(torch.int16).tolist() for p in net.parameters()]

    first, second = ranks.run(main, 2, backend="gloo")
    assert first == second


def test_a_step_that_was_taken_before_its_hook_failed_is_not_skipped(caplog: pytest.LogCaptureFixture) -> None:
    """The call is repeated, and takes nothing. No scaler hears of an overflow."""
    net, fails = copy.deepcopy(_MODEL), [True]

    def hook(*_: object) -> None:
        if fails:
            fails.clear()
            raise MemoryError

    optimizer = sparse_wrap(sgd(net))
    optimizer.register_step_post_hook(hook)
    backward(net, 0)
    with pytest.raises(MemoryError):
        optimizer.step()
    optimizer.found_inf = torch.zeros(())  # as a GradScaler does
    optimizer.step()
    assert not optimizer.all_skipped
    assert optimizer.metrics()["steps"] == 1
    assert not caplog.messages


def test_flush_after_a_hook_that_failed_behind_the_update_of_one_rank() -> None:
    """The step is taken on all ranks, so no rank refuses to flush while others wait for it."""

    def main(rank: int) -> list[Any]:
        net, optimizer = opened(timeout=timedelta(seconds=5))

        def hook(*_: object) -> None:
            if rank == 1:
                raise MemoryError

        registered = optimizer.register_step_post_hook(hook)
        backward(net, 2 + rank)
        with pytest.raises(MemoryError) if rank == 1 else nullcontext():
            optimizer.step()
        registered.remove()
        optimizer.flush()
        assert optimizer.metrics()["steps"] == 4
        assert not optimizer.metrics()["residual_norm"]
        return held(net, optimizer)[0][:4]  # the parameters

    first, second = ranks.run(main, 2, backend="gloo")
    assert first == second
