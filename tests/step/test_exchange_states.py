"""The five states of a step: what each of them allows, and that nothing changes before a step is applied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from tritoncomm import NonFiniteError, PeerLostError, ProtocolMismatchError, SparseOptimizer
from tritoncomm.step.exchange.machine import TRANSITIONS, State

from emulated_cuda import ranks
from small_model import backward, model, sgd, sparse_wrap

# Made once, as the generator of torch belongs to all threads.
_MODEL = model()


class FailingSGD(torch.optim.SGD):
    """SGD whose update raises ``error`` once, after it has changed a parameter."""

    error: BaseException | None = None

    def _init_group(self, *args):
        """Go on with a step, or fail. The step itself is that of SGD."""
        if self.error is not None:
            error, self.error = self.error, None
            self.param_groups[0]["params"][0].add_(1.0)
            raise error
        return super()._init_group(*args)


def opened(inner: Callable[[nn.Module], torch.optim.Optimizer] = sgd, **settings) -> tuple[nn.Module, SparseOptimizer]:
    """Return a model and its wrapped optimizer, after two steps."""
    net = copy.deepcopy(_MODEL)
    optimizer = sparse_wrap(inner(net), **{"density": 0.2} | settings)
    train(net, optimizer, range(2))
    assert state_of(optimizer) is State.IDLE
    return net, optimizer


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Take ``steps``."""
    for step in steps:
        optimizer.zero_grad()
        backward(net, step)
        optimizer.step()


def state_of(optimizer: SparseOptimizer) -> State:
    """Return the state of the present step."""
    return optimizer._tritoncomm.setup.exchange.state


def held(net: nn.Module, optimizer: SparseOptimizer) -> list[Any]:
    """Return what a step changes: parameters, the residual, and the states of method and optimizer, as bits."""
    feedback = optimizer._tritoncomm.setup.vector.feedback
    inner = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*net.parameters(), feedback.residual, *(value for value in inner if isinstance(value, torch.Tensor))]
    flat = [tensor.detach().float().reshape(-1).view(torch.int32).tolist() for tensor in tensors]
    return [flat, repr(feedback.algorithm.state), optimizer.metrics()["steps"]]


def broken(*_: object) -> None:
    """Fail as a hook that writes a file may."""
    raise OSError("disk full")


def interrupted(*_: object) -> None:
    """Raise what Ctrl-C raises."""
    raise KeyboardInterrupt


def reached(start: State) -> set[State]:
    """Return the states that some events lead to, from ``start``."""
    found, new = set[State](), [start]
    while new:
        state = new.pop()
        for following in set(TRANSITIONS[state].values()) - found:
            found.add(following)
            new.append(following)
    return found


def test_the_table() -> None:
    """There are five states. Each can be reached, and each leads back to IDLE."""
    assert [state.name for state in State] == ["IDLE", "MEANS", "READY", "SUSPENDED", "STOPPED"]
    assert set(TRANSITIONS) == set(State)
    assert reached(State.IDLE) == set(State)
    assert all(State.IDLE in reached(state) for state in State)


@pytest.mark.parametrize("algo", ["oktopk", "spardl", "exdyna", "dgc", "random_k", "dense"])
def test_nothing_changes_before_the_step_is_applied(algo: str) -> None:
    """READY has the mean in ``.grad``, and everything else is as before. The step swaps the residual, once."""
    settings = {"algo": algo} if algo != "dense" else {"algo": "dense", "density": None}
    net, optimizer = opened(lambda net: torch.optim.SGD(net.parameters(), lr=0.05), **settings)
    optimizer.zero_grad()
    backward(net, 2)
    own = [p.grad.clone() for p in net.parameters()]
    before = held(net, optimizer)
    optimizer.synchronize()
    assert state_of(optimizer) is State.READY
    assert optimizer.is_synchronized
    assert held(net, optimizer) == before
    assert all(torch.equal(p.grad, grad) for p, grad in zip(net.parameters(), own, strict=True)) == (algo == "dense")
    optimizer.step()
    assert state_of(optimizer) is State.IDLE
    after = held(net, optimizer)
    assert after[0] != before[0]
    assert after[2] == before[2] + 1
    if algo != "dense":
        assert optimizer.metrics()["residual_norm"] > 0


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("algo", ["oktopk", "spardl", "exdyna", "dgc", "random_k"])
def test_zero_grad_throws_the_mean_away(algo: str, set_to_none: bool) -> None:
    """A mean that nobody used is a skipped step: residual and method are bit-identical, and so is all that follows."""
    plain = lambda net: torch.optim.SGD(net.parameters(), lr=0.05)  # noqa: E731
    (net, optimizer), (other, twin) = (opened(plain, algo=algo) for _ in range(2))
    for number in range(1, 3):
        before = held(net, optimizer)
        optimizer.zero_grad()
        backward(net, 9)
        optimizer.synchronize()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert state_of(optimizer) is State.IDLE
        assert held(net, optimizer) == before
        assert optimizer.metrics()["skipped_steps"] == number
    train(net, optimizer, range(2, 5))
    train(other, twin, range(2, 5))
    assert held(net, optimizer) == held(other, twin)


def test_ready_refuses_what_would_lose_the_mean() -> None:
    """In READY, the optimizer is neither saved nor changed, and gradients are not exchanged again."""
    net, optimizer = opened()
    optimizer.zero_grad()
    backward(net, 2)
    optimizer.synchronize()
    before = held(net, optimizer)
    for action in (
        optimizer.state_dict,
        optimizer.flush,
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    ):
        with pytest.raises(RuntimeError, match="have not been used yet: call step"):
            action()
    with pytest.raises(RuntimeError, match="exchanged already"):
        optimizer.synchronize()
    assert state_of(optimizer) is State.READY
    assert held(net, optimizer) == before
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: backward(net, 3))
    assert state_of(optimizer) is State.READY
    optimizer.zero_grad()
    backward(net, 3)
    optimizer.step()
    assert state_of(optimizer) is State.IDLE
    optimizer.state_dict()


@pytest.mark.parametrize("flushes", [False, True])
def test_a_hook_that_raises_before_the_update(flushes: bool) -> None:
    """The step is READY, and can be repeated or thrown away. Nothing is lost."""
    (net, optimizer), (other, twin) = opened(), opened()
    for discards in (True, False):
        before = held(net, optimizer)
        optimizer.zero_grad()
        if not flushes:
            backward(net, 2)
        handle = optimizer.register_step_pre_hook(broken)
        with pytest.raises(OSError, match="disk"):
            optimizer.flush() if flushes else optimizer.step()
        handle.remove()
        assert state_of(optimizer) is State.READY
        assert held(net, optimizer) == before
        if discards:
            optimizer.zero_grad()
            assert state_of(optimizer) is State.IDLE
            assert held(net, optimizer) == before
    optimizer.step()
    assert state_of(optimizer) is State.IDLE
    if flushes:
        twin.flush()
        assert optimizer.metrics()["residual_norm"] == 0
        optimizer.zero_grad()
    else:
        train(other, twin, range(2, 3))
    assert held(net, optimizer) == held(other, twin)


def test_gradients_that_change_while_ready() -> None:
    """A step that failed is not repeated with other gradients."""
    net, optimizer = opened()
    optimizer.zero_grad()
    backward(net, 2)
    handle = optimizer.register_step_pre_hook(broken)
    with pytest.raises(OSError, match="disk"):
        optimizer.step()
    handle.remove()
    before = held(net, optimizer)
    backward(net, 3)
    with pytest.raises(RuntimeError, match=r"gradients have changed.*zero_grad"):
        optimizer.step()
    assert state_of(optimizer) is State.READY
    assert held(net, optimizer) == before
    optimizer.zero_grad()
    train(net, optimizer, range(3, 5))


@pytest.mark.parametrize("error", [MemoryError("no room"), KeyboardInterrupt()])
def test_an_update_that_stops(error: BaseException) -> None:
    """STOPPED lasts until a state is loaded. Until then nothing is saved, and no step is taken."""
    net, optimizer = opened(lambda net: FailingSGD(net.parameters(), lr=0.05))
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    optimizer.error = error
    with pytest.raises(type(error)):
        train(net, optimizer, range(2, 3))
    assert state_of(optimizer) is State.STOPPED
    before = held(net, optimizer)[0][:4]  # the parameters
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"stopped update 3.*load"):
            optimizer.state_dict()
        with pytest.raises(ProtocolMismatchError, match=r"stopped.*load"):
            train(net, optimizer, range(3, 4))
        optimizer.zero_grad()
        assert state_of(optimizer) is State.STOPPED
        assert held(net, optimizer)[0][:4] == before
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert state_of(optimizer) is State.IDLE
    other, twin = opened(lambda net: FailingSGD(net.parameters(), lr=0.05))
    train(net, optimizer, range(2, 5))
    train(other, twin, range(2, 5))
    assert held(net, optimizer) == held(other, twin)


def test_a_signal_before_the_update() -> None:
    """Other ranks may take a step that all have confirmed: a signal stops it, whether it comes in a hook or later."""
    net, optimizer = opened()
    optimizer.zero_grad()
    backward(net, 2)
    handle = optimizer.register_step_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    handle.remove()
    assert state_of(optimizer) is State.STOPPED


def test_a_signal_in_the_exchange() -> None:
    """A signal before the confirmation changes nothing, and training goes on as without it."""
    (net, optimizer), (other, twin) = opened(), opened()
    before = held(net, optimizer)
    vector = optimizer._tritoncomm.setup.vector
    begin = vector.feedback.begin
    vector.feedback.begin = interrupted
    optimizer.zero_grad()
    backward(net, 2)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    vector.feedback.begin = begin
    assert state_of(optimizer) is State.IDLE
    assert held(net, optimizer) == before
    train(net, optimizer, range(2, 4))
    train(other, twin, range(2, 4))
    assert held(net, optimizer) == held(other, twin)


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_a_rejected_step(policy: str) -> None:
    """A NaN leads back to IDLE. If the step is skipped, the next ``step()`` applies nothing."""
    net, optimizer = opened(on_nonfinite=policy)
    optimizer.zero_grad()
    backward(net, 2)
    net[0].weight.grad[0, 0] = float("nan")
    before = held(net, optimizer)
    if policy == "raise":
        with pytest.raises(NonFiniteError):
            optimizer.synchronize()
    else:
        optimizer.synchronize()
        assert state_of(optimizer) is State.READY
        optimizer.step()
    assert state_of(optimizer) is State.IDLE
    assert held(net, optimizer) == before
    assert optimizer.metrics()["skipped_steps"] == 1
    train(net, optimizer, range(3, 4))


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


@pytest.mark.parametrize("lost_by", [(1,), (0, 1)], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("flushes", [False, True])
def test_a_lost_confirmation(lost_by: tuple[int, ...], flushes: bool) -> None:
    """SUSPENDED has changed nothing. In a new group the step is applied if another rank has done so, or rolled back."""

    def main(rank: int) -> list[Any]:
        net, optimizer = ours = opened(timeout=timedelta(seconds=5))
        exchange = optimizer._tritoncomm.setup.exchange
        confirm, before = exchange._confirm, held(*ours)

        def lost() -> None:
            confirm()
            raise PeerLostError("lost rank 2", [2])

        if rank in lost_by:
            exchange._confirm = lost
        optimizer.zero_grad()
        if not flushes:
            backward(net, 10 + rank)
        act = optimizer.flush if flushes else optimizer.step
        if rank in lost_by:
            with pytest.raises(PeerLostError):
                act()
            assert state_of(optimizer) is State.SUSPENDED
            assert held(*ours) == before
            assert optimizer.state_dict()["tritoncomm"]["steps"] == 2  # what is saved is before the step
            del exchange._confirm
        else:
            act()
            assert state_of(optimizer) is State.IDLE
        group = dist.new_group([0, 1], timeout=timedelta(seconds=5), use_local_synchronization=True)
        caught_up = optimizer.reset_process_group(group)
        assert caught_up == (rank in lost_by and len(lost_by) == 1)
        assert state_of(optimizer) is State.IDLE
        assert optimizer.metrics()["steps"] == (3 if len(lost_by) == 1 else 2)
        if len(lost_by) == 2:
            assert held(*ours)[0] == before[0]
        train(net, optimizer, range(3, 5))
        return held(*ours)[0][:4]

    found = ranks.run(main, 2, backend="gloo")
    assert found[0] == found[1]


def test_zero_grad_while_suspended() -> None:
    """A loop that resets gradients does not forget a step that other ranks may have applied."""

    def main(rank: int) -> list[Any]:
        net, optimizer = ours = opened(timeout=timedelta(seconds=5))
        confirm = optimizer._tritoncomm.setup.exchange._confirm

        def lost() -> None:
            confirm()
            raise PeerLostError("lost rank 2", [2])

        if rank == 1:
            optimizer._tritoncomm.setup.exchange._confirm = lost
        optimizer.zero_grad()
        backward(net, 10 + rank)
        if rank == 1:
            with pytest.raises(PeerLostError):
                optimizer.step()
            optimizer.zero_grad()
            assert state_of(optimizer) is State.SUSPENDED
        else:
            optimizer.step()
        group = dist.new_group([0, 1], timeout=timedelta(seconds=5), use_local_synchronization=True)
        assert optimizer.reset_process_group(group) == (rank == 1)
        return held(*ours)[0][:4]

    found = ranks.run(main, 2, backend="gloo")
    assert found[0] == found[1]
