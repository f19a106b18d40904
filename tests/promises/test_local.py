"""Optimizers that step alone: what they change is exchanged, and nothing of it is lost."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from kit import equal_on_all_ranks, everywhere, flat, gradient, log_lines, mean, sgd, sparse, take, weight
from torch import nn
from tritoncomm import ConfigurationError, NonFiniteError, ProtocolMismatchError

from ranks import ranks


def local(parameters, steps: int = 4, **fields) -> tritoncomm.SparseOptimizer:
    """Wrap SGD whose step is the gradient, and exchange every ``steps`` steps."""
    return tritoncomm.wrap(sgd(parameters), local_steps=steps, **fields)


def step(optimizer, parameter, value) -> None:
    """Take a step by a gradient."""
    parameter.grad = torch.as_tensor(value, dtype=parameter.dtype).expand(parameter.shape).clone()
    optimizer.step()


@ranks(2, 3)
def test_workers_are_apart_between_exchanges_and_together_after(rank, world_size):
    """Each worker steps by its own gradients. After ``local_steps`` all have the same bits, and nothing is lost."""
    p = weight(32)
    optimizer = local([p])
    for number in range(8):
        step(optimizer, p, gradient(32, rank, number, world_size))
        assert equal_on_all_ranks([p]) == (number % 4 == 3)
    figures = optimizer.metrics()
    assert figures["inner_steps"] == 8
    assert figures["exchanges"] == 2
    whole = sum(gradient(32, other, number, world_size) for other in range(world_size) for number in range(8))
    assert not torch.allclose(flat([p]), -whole / world_size)  # one bit per value: the rest is in the residual
    step(optimizer, p, gradient(32, rank, 8, world_size))  # flush() applies it, too
    whole += sum(gradient(32, other, 8, world_size) for other in range(world_size))
    optimizer.flush()
    assert torch.allclose(flat([p]), -whole / world_size, atol=1e-3)
    assert equal_on_all_ranks([p])


@ranks(1)
def test_single_worker_takes_the_steps_of_its_optimizer(rank, world_size):
    """To the bit, whatever local_steps says."""
    p, q = weight(32), weight(32)
    optimizer, bare = local([p]), sgd([q])
    for number in range(6):
        step(optimizer, p, gradient(32, 0, number) / 3)
        step(bare, q, gradient(32, 0, number) / 3)
        assert torch.equal(p, q)
    optimizer.merge()
    assert torch.equal(p, q)


@ranks(2)
def test_merge_exchanges_early_and_once(rank, world_size):
    """merge() makes all workers equal. Without steps since, it does nothing."""
    p = weight(32)
    optimizer = local([p])
    step(optimizer, p, gradient(32, rank, 0))
    assert not equal_on_all_ranks([p])
    optimizer.merge()
    assert equal_on_all_ranks([p])
    assert p.detach().any()
    before, sent = flat([p]), optimizer.metrics()["bytes_sent_total"]
    optimizer.merge()
    assert torch.equal(flat([p]), before)
    assert optimizer.metrics()["bytes_sent_total"] == sent


@ranks(2)
def test_other_numbers_of_steps_are_refused(rank, world_size):
    """Workers that have taken other numbers of steps raise an error that names the numbers, and may catch up."""
    p = weight(32)
    optimizer = local([p])
    for number in range(1 + rank):
        step(optimizer, p, gradient(32, rank, number))
    before = flat([p])
    with pytest.raises(ProtocolMismatchError, match="step"):
        optimizer.merge()
    assert torch.equal(flat([p]), before)
    if rank == 0:
        step(optimizer, p, gradient(32, rank, 1))
    optimizer.merge()
    assert equal_on_all_ranks([p])


@ranks(2)
def test_average_is_shown_and_taken_back(rank, world_size):
    """averaged() has the parameters that all workers have in common, and then this worker's own again."""
    p = weight(32)
    optimizer = local([p])
    for number in range(6):
        step(optimizer, p, gradient(32, rank, number))
    own = flat([p])
    with optimizer.averaged():
        assert equal_on_all_ranks([p])
        assert not torch.equal(flat([p]), own)
        with pytest.raises(RuntimeError, match="averaged"):
            optimizer.merge()
    assert torch.equal(flat([p]), own)
    with log_lines() as lines, optimizer.averaged():  # to evaluate, and again to save
        assert equal_on_all_ranks([p])
    assert not lines


@ranks(2)
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", ["frozen", "rate of zero"])
def test_flush_leaves_the_residual_of_what_rests(rank, world_size, kind, steps):
    """The parameter itself is frozen or has no rate, not what the workers have in common: it does not move."""
    p, q = weight(64), weight(64)
    optimizer = tritoncomm.wrap(sgd([{"params": [p]}, {"params": [q]}]), updates=True, local_steps=steps)
    take(optimizer, [p, q], rank, range(3), world_size)
    q.requires_grad_(kind != "frozen")
    optimizer.param_groups[1]["lr"] = 1.0 if kind == "frozen" else 0.0
    q.grad, before = None, flat([q])
    take(optimizer, [p], rank, range(3, 6), world_size)
    assert torch.equal(flat([q]), before)
    optimizer.flush()
    assert torch.equal(flat([q]), before)
    q.requires_grad_()
    optimizer.param_groups[1]["lr"] = 1.0
    optimizer.flush()
    assert equal_on_all_ranks([p, q])
    assert not torch.equal(flat([q]), before)
    if steps == 3:  # otherwise a mean update is lengthened
        whole = [gradient(64, each, 100 + step, world_size) for step in range(3) for each in range(world_size)]
        torch.testing.assert_close(flat([q]), -torch.stack(whole).sum(0) / world_size, rtol=1e-4, atol=1e-2)


@ranks(2)
def test_step_with_a_nan_is_left_out_on_its_worker(rank, world_size):
    """It counts, so that all workers exchange together, and the log names the parameter."""
    model = nn.Linear(8, 4, bias=False)
    optimizer = local(model.parameters(), steps=2, model=model)
    with log_lines() as lines:
        for number in range(2):
            nan = rank == 1 and number == 0
            step(optimizer, model.weight, torch.nan if nan else gradient(32, rank, number).view(4, 8))
    assert equal_on_all_ranks([model.weight])
    assert model.weight.isfinite().all()
    figures = optimizer.metrics()
    assert figures["inner_steps"] == 2
    assert figures["left_out_steps"] == (rank == 1)
    assert any("rank 1" in line and "weight" in line for line in lines) == (rank == 1)


@ranks(2)
def test_nan_is_an_error_on_all_workers_if_asked(rank, world_size):
    """With on_nonfinite="raise", all raise at the next exchange, and name rank and parameter."""
    model = nn.Linear(8, 4, bias=False)
    optimizer = local(model.parameters(), steps=2, model=model, on_nonfinite="raise")
    step(optimizer, model.weight, torch.nan if rank == 1 else 1.0)
    with pytest.raises(NonFiniteError, match="weight") as caught:
        step(optimizer, model.weight, 1.0)
    assert caught.value.ranks == (1,)
    optimizer.merge()  # it was said: the other steps count
    assert optimizer.metrics()["steps"] == 1


@ranks(2)
def test_nan_is_an_error_also_after_an_exchange_that_was_refused(rank, world_size):
    """It waits for the first exchange that all ranks make."""
    p = weight(8)
    optimizer = local([p], steps=1, updates=True, on_nonfinite="raise")
    optimizer.outer_lr = 1.0 + rank
    with pytest.raises(ProtocolMismatchError, match="lr of the common parameters"):
        step(optimizer, p, torch.nan if rank == 1 else 1.0)
    optimizer.outer_lr = 1.0
    with pytest.raises(NonFiniteError) as caught:
        optimizer.merge()
    assert caught.value.ranks == (1,)
    optimizer.merge()
    assert equal_on_all_ranks([p])


@ranks(2)
def test_nan_of_a_run_that_was_loaded_again_is_no_error(rank, world_size):
    """It belongs to steps that a load has thrown away."""
    p = weight(8)
    optimizer = local([p], steps=1, updates=True, on_nonfinite="raise")
    step(optimizer, p, 1.0)
    state, before = optimizer.state_dict(), flat([p])
    optimizer.outer_lr = 1.0 + rank
    with pytest.raises(ProtocolMismatchError, match="lr of the common parameters"):
        step(optimizer, p, torch.nan if rank == 1 else 1.0)
    with torch.no_grad():
        p.copy_(before)
    optimizer.load_state_dict(state)
    step(optimizer, p, 1.0)
    assert optimizer.metrics()["steps"] == 2
    assert equal_on_all_ranks([p])


@ranks(2)
def test_worker_whose_parameters_are_broken_goes_on_with_the_others(rank, world_size):
    """A step that makes parameters Inf adds nothing to the mean."""
    p = weight(8)
    optimizer = local([p], steps=2)
    optimizer.param_groups[0]["lr"] = 100.0
    for _ in range(2):
        step(optimizer, p, 3e38 if rank == 1 else 1.0)
    assert p.isfinite().all()
    assert equal_on_all_ranks([p])
    assert p.detach().any()
    assert optimizer.metrics()["dropped_deltas"] == (rank == 1)


@ranks(2)
def test_weights_that_one_worker_loads_are_refused(rank, world_size):
    """If all load the same, training goes on from there."""
    p = weight(8, 1.0)
    optimizer = local([p], steps=2)
    for _ in range(2):
        step(optimizer, p, 0.25 * rank)
    with torch.no_grad():
        p.copy_(torch.linspace(1, 64, 8))
    step(optimizer, p, 1.0)
    step(optimizer, p, 1.0)
    assert torch.allclose(flat([p]), torch.linspace(1, 64, 8) - 2, atol=0.5)
    if rank == 1:
        with torch.no_grad():
            p.fill_(7.0)
    step(optimizer, p, 1.0)
    with pytest.raises(ProtocolMismatchError, match="load"):
        step(optimizer, p, 1.0)


def load(model, value) -> None:
    """Give the weight other values, by a way of PyTorch."""
    model.load_state_dict({"weight": value})


WAYS = {
    "load_state_dict": load,
    "data": lambda model, value: model.weight.data.copy_(value),
    "other data": lambda model, value: setattr(model.weight, "data", value.clone()),
    "vector_to_parameters": lambda model, value: nn.utils.vector_to_parameters(value.flatten(), model.parameters()),
}


@ranks(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("beside", [0, 50_000])
def test_weights_that_all_workers_load_are_the_new_beginning(rank, world_size, way, beside):
    """Nothing of them is exchanged or left in a residual, however they were loaded, and however large others are."""
    model, large = nn.Linear(8, 8, bias=False), nn.Parameter(torch.full((beside,), 100.0))
    parameters = [*model.parameters(), *([large] if beside else [])]
    optimizer = local(parameters, 1 if beside else 3, updates=True)
    for number in range(3):
        model.weight.grad = gradient(64, rank, number).view(8, 8) / 64
        large.grad = torch.ones_like(large) / 64
        optimizer.step()
    optimizer.flush()
    other = torch.full((8, 8), 0.5)
    WAYS[way](model, other)
    for _ in range(3):
        model.weight.grad = torch.full((8, 8), 2.0**-20 * (1 + rank))
        large.grad = torch.zeros_like(large)
        optimizer.step()
    assert equal_on_all_ranks([model.weight])
    assert torch.allclose(model.weight, other, atol=1e-4)
    assert optimizer.metrics()["residual_norm"] < 1e-4


@ranks(2)
@pytest.mark.parametrize("way", ["state_dict", "checkpoint", "flush"])
def test_weights_loaded_before_a_save_are_saved(rank, world_size, way, tmp_path):
    """A checkpoint, a state and a flush begin with them, and not with those of the last exchange."""
    model, again = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    again.load_state_dict(model.state_dict())
    updates = tritoncomm.Updates(outer_lr=0.5)
    first, second = local(model.parameters(), 2, updates=updates), local(again.parameters(), 2, updates=updates)
    for number in range(2):
        step(first, model.weight, gradient(64, rank, number).view(8, 8) / 64)
    other, owed = torch.full((8, 8), 0.5), -0.5 * mean(residual_of(first)).view(8, 8)
    load(model, other)
    if way == "flush":
        first.flush()
        assert torch.allclose(model.weight, other + owed, atol=1e-5)
        return
    load(again, other)
    if way == "state_dict":
        second.load_state_dict(copy.deepcopy(first.state_dict()))
    else:
        folder = everywhere(str(tmp_path))[0]
        tritoncomm.checkpoint.save(first, folder)
        tritoncomm.checkpoint.load(second, folder)
    assert torch.equal(again.weight, other)


@ranks(2)
@pytest.mark.parametrize("savers", [(0,), (0, 1)])
def test_state_taken_while_an_average_is_swapped_in(rank, world_size, savers):
    """It changes nothing, also on one rank alone. Loaded with the weights of a model, it keeps them."""
    p, q = weight(32), weight(32)
    first, second = local([p], 2), local([q], 2)
    for number in range(2):
        step(first, p, gradient(32, rank, number) / 64)
    own, state = p.detach().clone(), None
    with torch.no_grad():
        p.fill_(0.5)
        if rank in savers:
            state = copy.deepcopy(first.state_dict())
        p.copy_(own)
    before = first.metrics()["bytes_sent_total"]
    for number in range(2):
        step(first, p, gradient(32, rank, number) / 64)
    assert equal_on_all_ranks([p])
    assert first.metrics()["bytes_sent_total"] > before
    if len(savers) == world_size:
        with torch.no_grad():
            q.copy_(own)
        second.load_state_dict(state)
        for number in range(2):
            step(second, q, gradient(32, rank, number) / 64)
        assert torch.equal(p, q)


@ranks(2)
def test_small_change_of_a_tensor_of_zeros_is_a_part_of_a_step(rank, world_size):
    """Workers may differ in it, as in their steps."""
    p, zeros = weight(64, 1.0), weight(64)
    optimizer = local([p, zeros], 1, updates=True)
    with torch.no_grad():
        zeros.add_(1e-9 * (rank + 1))
    p.grad, zeros.grad = torch.full_like(p, 0.5), torch.zeros_like(zeros)
    optimizer.step()
    assert equal_on_all_ranks([p, zeros])


@ranks(2)
@pytest.mark.parametrize("loads", [False, True])
def test_tensor_that_is_loaded_rounds_no_other(rank, world_size, loads):
    """Means that are less than the rounding of a parameter add up beside it."""
    p, other = weight(64, 1.0, dtype=torch.bfloat16), weight(64)
    optimizer = local([p, other], 1, updates=True)
    for number in range(64):
        p.grad, other.grad = torch.full_like(p, 2.0**-8 * (1 - rank)), torch.zeros_like(other)
        optimizer.step()
        if loads:
            with torch.no_grad():
                other.fill_(number)
    optimizer.flush()
    assert flat([p]).mean().item() == pytest.approx(1 - 64 * 2.0**-9, abs=2.0**-7)


@ranks(2)
def test_state_is_loaded_without_gradients(rank, world_size):
    """As torch does, whose hooks and subclasses may change parameters."""
    p = weight(8)
    optimizer, found = sparse(sgd([p])), []
    optimizer.register_load_state_dict_post_hook(lambda _: found.append(torch.is_grad_enabled()))
    optimizer.load_state_dict(optimizer.state_dict())
    assert found == [False]


def residual_of(optimizer) -> torch.Tensor:
    """Return the residual of the only parameter."""
    return optimizer.state_dict()["tritoncomm"]["residuals"][0].clone()


@ranks(2)
@pytest.mark.parametrize(
    "action", ["merge", "flush", "load_state_dict", "checkpoint", "add_param_group", "reset_process_group", "wrap"]
)
def test_evaluation_in_inference_mode_may_exchange(rank, world_size, action, tmp_path):
    """What is made there, as by merge(), flush(), a load or wrap(), can be changed by the steps that follow."""
    p = weight(32)
    optimizer = local([p], 4, updates=tritoncomm.Updates(outer_momentum=0.5))
    if action not in ("merge", "load_state_dict"):
        optimizer = sparse(torch.optim.AdamW([p], lr=0.1))
    if action in ("merge", "checkpoint", "reset_process_group"):
        step(optimizer, p, gradient(32, rank, 0))
    folder, new = everywhere(str(tmp_path))[0], weight(32)
    if action == "checkpoint":
        tritoncomm.checkpoint.save(optimizer, folder)
    with torch.inference_mode():
        if action == "load_state_dict":
            optimizer.load_state_dict(optimizer.state_dict())
        elif action == "checkpoint":
            tritoncomm.checkpoint.load(optimizer, folder)
        elif action == "add_param_group":
            optimizer.add_param_group({"params": [new]})
        elif action == "wrap":
            optimizer = sparse(torch.optim.AdamW([new], lr=0.1))
        else:
            getattr(optimizer, action)()
    for number in range(8):
        new.grad = gradient(32, rank, number) if action in ("add_param_group", "wrap") else None
        step(optimizer, p, gradient(32, rank, number))
    optimizer.flush()
    assert equal_on_all_ranks([p, new])


@ranks(2)
def test_loss_scale_is_divided_out_after_a_hook_has_failed(rank, world_size):
    """New gradients are scaled again, after zero_grad() threw away those of the step that failed."""
    p, fails = weight(4), [True]
    optimizer, scaler = local([p], 2), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer.register_step_pre_hook(lambda *_: 1 / (not fails.pop()) if fails else None)
    with pytest.raises(ZeroDivisionError):
        scaled_step(optimizer, scaler, p)
    scaler.update()
    optimizer.zero_grad()
    scaled_step(optimizer, scaler, p, batches=2)
    assert torch.equal(p.detach(), torch.full((4,), -2.0))


@ranks(2)
def test_overflow_leaves_out_the_step_of_its_worker(rank, world_size):
    """The metric counts it, and the other worker steps."""
    p = weight(4)
    optimizer, scaler = local([p], 2), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(p.sum() * (math.inf if rank else 1)).backward()
    scaler.step(optimizer)
    assert optimizer.metrics()["left_out_steps"] == rank
    assert p.detach().any() == (rank == 0)


def scaled_step(optimizer, scaler, parameter, batches=1) -> None:
    """Take a step by gradients of 1 for each batch."""
    for _ in range(batches):
        scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)


@ranks(2)
def test_small_means_add_up_in_half_precision(rank, world_size):
    """The common parameters are kept in fp32: what rounds to nothing in bf16 is not lost."""
    p = weight(64, 1.0, dtype=torch.bfloat16)
    optimizer = local([p], steps=2)
    ulp = 2.0**-7
    for _ in range(8):
        for number in range(2):
            step(optimizer, p, -ulp if rank == 0 and number == 0 else 0.0)
    assert equal_on_all_ranks([p])
    assert flat([p]).tolist() == pytest.approx([1 + 4 * ulp] * 64, abs=1.5 * ulp)


class _Own(torch.optim.SGD):
    """SGD with another step, which notes the gradients that it sees."""

    def step(self, closure=None):
        """Step by signs."""
        self.seen = [p.grad.clone() for group in self.param_groups for p in group["params"]]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad.sign(), alpha=group["lr"])


@ranks(2)
def test_optimizer_without_a_rule_steps_by_its_own_gradients(rank, world_size):
    """Also a subclass of SGD with a step of its own, whose sums are not linear in late gradients."""
    p = weight(32)
    bare = _Own([p], lr=1.0, momentum=0.9)
    optimizer = tritoncomm.wrap(bare)
    own = gradient(32, rank, 0)
    step(optimizer, p, own)
    assert torch.equal(optimizer.seen[0], own)
    assert equal_on_all_ranks([p])
    assert p.detach().any()


@ranks(2)
def test_optimizers_that_exchange_updates_end_equal(rank, world_size):
    """RMSprop, NAdam and Adagrad have no rule for late gradients."""
    for kind in (torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adagrad):
        model = nn.Linear(8, 4)
        before = flat(model.parameters())
        optimizer = tritoncomm.wrap(kind(model.parameters(), lr=0.01), model=model)
        for number in range(3):
            optimizer.zero_grad()
            model(gradient(8, rank, number)).square().sum().backward()
            optimizer.step()
        assert equal_on_all_ranks(model.parameters())
        assert not torch.equal(flat(model.parameters()), before)


@ranks(2)
def test_list_is_one_optimizer(rank, world_size):
    """Several optimizers step, are reset, saved and loaded together, and each keeps its options."""

    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        parts = [torch.optim.AdamW(model[0].parameters(), lr=0.01), sgd(model[1].parameters(), lr=0.1, momentum=0.5)]
        return model, sparse(parts, model=model)

    def train(model, optimizer, steps):
        for number in steps:
            optimizer.zero_grad()
            model(gradient(8, rank, number) / 64).square().sum().backward()
            optimizer.step()

    model, optimizer = made()
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.1]
    train(model, optimizer, range(3))
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(3, 6))
    other, again = made()
    other.load_state_dict(weights)
    again.load_state_dict(state)
    train(other, again, range(3, 6))
    assert torch.equal(flat(model.parameters()), flat(other.parameters()))
    assert equal_on_all_ranks(model.parameters())


@ranks(2)
def test_list_has_one_norm(rank, world_size):
    """``max_grad_norm`` limits the gradients of all optimizers of a list together, whether these have names or not."""
    for named in (True, False):
        model = nn.ParameterDict({"p": weight(4096), "q": weight(4096)})
        p, q = model["p"], model["q"]
        given = {"model": model} if named else {}
        optimizer = sparse([sgd([p]), sgd([q])], density=1.0, max_grad_norm=5.0, **given)
        p.grad, q.grad = torch.full((4096,), 3.0), torch.full((4096,), 4.0)
        optimizer.step()
        assert optimizer.metrics()["grad_norm"] == pytest.approx(5 * 64, rel=0.15)
        assert float(mean(flat([p, q])).norm()) == pytest.approx(5.0, rel=0.15)


@ranks(2)
def test_parameter_in_two_optimizers_of_a_list_is_refused_by_name(rank, world_size):
    """An empty list is refused, too."""
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigurationError, match="weight"):
        sparse([sgd(model.parameters()), sgd([model.weight])], model=model)
    with pytest.raises(ConfigurationError, match="optimizer"):
        sparse([])


@ranks(3)
def test_local_steps_in_a_part_of_the_ranks(rank, world_size):
    """Other ranks are not waited for."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return
    p = weight(16)
    optimizer = local([p], steps=2, process_group=group)
    for number in range(2):
        step(optimizer, p, gradient(16, rank, number))
    first, second = everywhere(flat([p]), group)
    assert torch.equal(first, second)
