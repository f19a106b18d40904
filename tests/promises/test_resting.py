"""What takes no part in a step waits with its residual: without gradient, frozen, or without a learning rate."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from kit import equal_on_all_ranks, flat, gradient, mean, sgd, sparse, take, total, weight

from ranks import ranks


@ranks(2)
def test_parameter_without_gradient_anywhere_is_left_alone(rank, world_size):
    """It gets no decay and no state, as in PyTorch. One that any rank has a gradient of gets the mean."""
    used, unused, rare = weight(8, 1.0), weight(8, 1.0), weight(8, 1.0)
    optimizer = sparse(torch.optim.AdamW([used, unused, rare], lr=0.1, weight_decay=0.5))
    for _ in range(4):
        optimizer.zero_grad()
        used.grad = torch.ones(8)
        if rank == 1:
            rare.grad = torch.ones(8)
        optimizer.step()
    assert torch.equal(unused.detach(), torch.ones(8))
    assert unused not in optimizer.state
    assert unused.grad is None
    assert not torch.equal(rare.detach(), torch.ones(8))
    assert equal_on_all_ranks([rare])


@ranks(2)
def test_residual_takes_part_where_another_rank_has_a_gradient(rank, world_size):
    """A rank without gradient gives what it has kept, as soon as any rank has one."""
    p = weight(4)
    optimizer = sparse(sgd([p]), density=1 / 4)
    p.grad = torch.tensor([8.0, 6.0, 0.0, 0.0]) * (rank == 0)
    optimizer.step()  # delivers the first entry of rank 0
    optimizer.zero_grad()
    if rank == 1:
        p.grad = torch.tensor([0.0, 0.0, 2.0, 0.0])
    optimizer.step()  # and now the second one
    assert torch.equal(p.detach(), torch.tensor([-4.0, -3.0, -1.0, 0.0]))


@ranks(2)
def test_frozen_parameter_keeps_its_residual(rank, world_size):
    """What was not delivered before a parameter was frozen waits until it is not."""
    p, q = weight(16), weight(16)
    optimizer = sparse(sgd([p, q]), density=1 / 16)
    take(optimizer, [p, q], rank, range(2), world_size)
    whole = total(16, range(2), world_size), total(16, range(100, 102), world_size)
    q.requires_grad_(False)
    before = flat([q])
    for _ in range(8):
        p.grad = torch.zeros(16)
        optimizer.step()
        assert torch.equal(flat([q]), before)
    q.requires_grad_()
    optimizer.flush()
    assert torch.equal(flat([p]), -whole[0])
    assert torch.equal(flat([q]), -whole[1])


@ranks(2)
def test_group_with_a_rate_of_zero_keeps_its_residual(rank, world_size):
    """Nothing is delivered to it, where it would be lost, while another group learns."""
    p, q = weight(16), weight(16)
    optimizer = sparse(sgd([{"params": [p]}, {"params": [q]}]), density=1 / 16)
    take(optimizer, [p, q], rank, range(2), world_size)
    whole = total(16, range(100, 102), world_size)
    optimizer.param_groups[1]["lr"] = 0.0
    for _ in range(8):
        p.grad, q.grad = torch.zeros(16), torch.zeros(16)
        optimizer.step()
    optimizer.param_groups[1]["lr"] = 1.0
    optimizer.flush()
    assert torch.equal(flat([q]), -whole)


@ranks(2)
@pytest.mark.parametrize("kind", ["frozen", "rate of zero"])
@pytest.mark.parametrize("alone", [False, True])
def test_flush_leaves_the_residual_of_what_rests(rank, world_size, kind, alone):
    """Nobody would apply it: it waits, also on a worker that goes on alone and applies all other residuals."""
    p, q = weight(16), weight(16)
    optimizer = sparse(sgd([{"params": [p]}, {"params": [q]}]), density=1 / 16)
    take(optimizer, [p, q], rank, range(2), world_size)
    whole = total(16, range(2), world_size), total(16, range(100, 102), world_size)
    q.requires_grad_(kind != "frozen")
    optimizer.param_groups[1]["lr"] = 1.0 if kind == "frozen" else 0.0
    before = flat([q])
    if alone:
        optimizer.reset_process_group([dist.new_group([each]) for each in range(world_size)][rank])
        p.grad = torch.zeros(16)
        optimizer.step()
    else:
        optimizer.flush()
        assert torch.equal(flat([p]), -whole[0])
    assert torch.equal(flat([q]), before)
    q.requires_grad_()
    optimizer.param_groups[1]["lr"] = 1.0
    optimizer.flush()
    found = world_size * mean(flat([q])) - before if alone else flat([q])  # alone, each worker applies its share
    assert torch.equal(found, -whole[1])


@ranks(2)
def test_worker_that_goes_on_alone_is_the_bare_optimizer_beside_what_rests(rank, world_size):
    """The residual of a frozen parameter waits, and does not make gradients of what has none."""
    p, q, unused = weight(16, 1.0), weight(16, 1.0), weight(16, 1.0)
    optimizer = sparse(torch.optim.AdamW([p, q, unused], lr=0.1), density=1 / 16)
    take(optimizer, [p, q, unused], rank, range(3), world_size)
    optimizer.reset_process_group([dist.new_group([each]) for each in range(world_size)][rank])
    q.requires_grad_(False)
    for _ in range(2):  # the first step applies what is left of the others
        optimizer.zero_grad()
        p.grad = torch.ones(16)
        optimizer.step()
        before = flat([unused]), flat([q])
    optimizer.zero_grad()
    p.grad = torch.ones(16)
    optimizer.step()
    assert unused.grad is None
    assert torch.equal(flat([unused]), before[0])
    assert torch.equal(flat([q]), before[1])
    assert optimizer.metrics()["residual_norm"] > 0


@ranks(2)
def test_gradients_at_a_rate_of_zero_are_not_applied_later(rank, world_size):
    """What rounding has left of them is dropped with them, and what it had left before waits."""
    p, q = weight(16), weight(16)
    optimizer = sparse(sgd([{"params": [p]}, {"params": [q]}]), algo="quantized", updates=False)
    take(optimizer, [p, q], rank, range(2), world_size)
    optimizer.param_groups[1]["lr"] = 0.0
    for _ in range(3):
        p.grad, q.grad = torch.zeros(16), 100 * gradient(16, rank, 5, world_size)
        optimizer.step()
    optimizer.param_groups[1]["lr"] = 1.0
    optimizer.flush()
    torch.testing.assert_close(flat([q]), -total(16, range(100, 102), world_size), rtol=1e-4, atol=1e-3)


@ranks(2)
def test_frozen_parameter_stays_in_the_exchange_when_a_group_is_added(rank, world_size):
    """It keeps its residual, and trains when it is no longer frozen."""
    p, q = weight(16), weight(16)
    optimizer = sparse(sgd([p]), density=1 / 16)
    take(optimizer, [p], rank, range(2), world_size)
    p.requires_grad_(False)
    optimizer.add_param_group({"params": [q]})
    p.requires_grad_()
    take(optimizer, [p, q], rank, range(2, 4), world_size)
    optimizer.flush()
    assert torch.equal(flat([p]), -total(16, range(4), world_size))
