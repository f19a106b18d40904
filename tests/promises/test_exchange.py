"""From ``.grad`` to parameters: nothing is lost, nothing counts twice, and a step is all or nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from kit import equal_on_all_ranks, everywhere, flat, gradient, log_lines, mean, sgd, sparse, take, total, weight
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from tritoncomm import ConfigurationError, NonFiniteError, ProtocolMismatchError

from ranks import ranks


@ranks(1, 2, 3, 5)
def test_sum_of_all_steps_and_a_flush_is_dense(rank, world_size):
    """What was delivered and what flush() delivers are together the sum of all mean gradients, to the bit."""
    p = weight()
    optimizer = sparse(sgd([p]))
    take(optimizer, [p], rank, range(6), world_size)
    if world_size > 1:
        assert not torch.equal(flat([p]), -total(16, range(6), world_size)), "this step was dense"
        assert equal_on_all_ranks([p])
    optimizer.flush()
    assert torch.equal(flat([p]), -total(16, range(6), world_size))
    assert optimizer.metrics()["residual_norm"] == 0


@ranks(2)
@pytest.mark.parametrize("algo", ["oktopk", "spardl", "exdyna", "random_block"])
def test_thrown_away_mean_leaves_no_trace(rank, world_size, algo):
    """A mean that zero_grad() throws away counts as skipped. The next steps are as if it had never been."""
    ends = []
    for throws in (False, True):
        p = weight(64)
        recipe = tritoncomm.recipe(algo, density=0.25)
        optimizer = tritoncomm.wrap(sgd([p]), recipe, warmup_steps=0, dense_below=0)
        take(optimizer, [p], rank, range(2), world_size)
        if throws:
            p.grad = gradient(64, rank, 50, world_size)
            optimizer.synchronize()
            optimizer.zero_grad()
            assert p.grad is None
            assert optimizer.metrics()["skipped_steps"] == 1
        take(optimizer, [p], rank, range(2, 5), world_size)
        middle = flat([p])
        optimizer.flush()
        ends.append((middle, flat([p])))
    assert all(map(torch.equal, *ends))


@ranks(2, 3)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradient_skips_the_step_everywhere(rank, world_size, bad):
    """One rank's NaN skips the step on all ranks, which changes nothing but counts: bytes that were sent count."""
    p = weight()
    optimizer = sparse(sgd([p]))
    take(optimizer, [p], rank, range(2), world_size)
    before, norm = flat([p]), optimizer.metrics()["residual_norm"]
    sent = optimizer.metrics()["bytes_sent_total"]
    p.grad = gradient(16, rank, 9, world_size)
    if rank == 1:
        p.grad[3] = bad
    with log_lines() as lines:
        optimizer.step()
    assert torch.equal(flat([p]), before)
    assert optimizer.metrics()["residual_norm"] == norm
    assert optimizer.metrics()["skipped_steps"] == 1
    assert optimizer.metrics()["bytes_sent_total"] == sent + optimizer.metrics()["bytes_sent"] > sent
    assert any("rank 1" in line for line in lines)
    take(optimizer, [p], rank, range(2, 4), world_size)
    optimizer.flush()
    assert torch.equal(flat([p]), -total(16, range(4), world_size))


@ranks(2, 3)
@pytest.mark.parametrize("values", ["4bit", "1bit"])
def test_flush_delivers_what_rounding_has_taken_away(rank, world_size, values):
    """A method that delivers every entry has a residual, too, if it rounds."""
    p = weight(64)
    optimizer = tritoncomm.wrap(sgd([p]), algo="quantized", values=values, dense_below=0)
    take(optimizer, [p], rank, range(4), world_size)
    assert optimizer.metrics()["residual_norm"] > 0
    optimizer.flush()
    assert optimizer.metrics()["residual_norm"] == 0
    assert torch.allclose(flat([p]), -total(64, range(4), world_size), atol=1e-4)
    assert equal_on_all_ranks([p])


@ranks(1, 2)
def test_flush_changes_nothing_where_nothing_can_wait(rank, world_size):
    """A dense exchange, and a single worker, deliver all in each step. A step of AdamW would go on by its moments."""
    p, q = weight(16), weight(16, 1.0)
    optimizer = sparse(torch.optim.AdamW([p, q], lr=0.1), algo=tritoncomm.Dense())
    optimizer.flush()
    q.requires_grad_(False)
    take(optimizer, [p], rank, range(3), world_size)
    before = flat([p, q])
    optimizer.flush()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.flush()
    assert torch.equal(flat([p, q]), before)
    assert optimizer.metrics()["steps"] == 3
    q.requires_grad_()
    take(optimizer, [p, q], rank, range(3, 5), world_size)
    assert equal_on_all_ranks([p, q])


@ranks(3)
def test_error_about_a_nan_names_rank_and_parameter_in_a_group(rank, world_size):
    """Ranks are named by their global numbers, and parameters by their names."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = sparse(sgd(model.parameters()), model=model, process_group=group, on_nonfinite="raise")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if rank == 2:
        model[1].weight.grad[0, 0] = float("nan")
    before = flat(model.parameters())
    with pytest.raises(NonFiniteError, match=r"1\.weight") as caught:
        optimizer.step()
    assert caught.value.ranks == (2,)
    assert torch.equal(flat(model.parameters()), before)


@ranks(2)
def test_overflow_in_half_precision_is_refused(rank, world_size):
    """A mean with residuals that overflows in fp16 is no step."""
    p = weight(8, dtype=torch.float16)
    optimizer = sparse(sgd([p], lr=2.0**-12), density=0.25)
    for _ in range(3):
        p.grad = torch.full((8,), 40000.0, dtype=torch.float16)
        p.grad[0] = 60000.0
        optimizer.step()
    assert p.isfinite().all()
    assert optimizer.metrics()["skipped_steps"] >= 1


@ranks(2)
def test_overflow_is_found_in_the_first_entry_of_a_tensor(rank, world_size):
    """A residual and a gradient overflow together in fp16, beside a tensor in fp32 for which they do not."""
    wide, p = weight(8), weight(8, dtype=torch.float16)
    optimizer = sparse(sgd([wide, p], lr=2.0**-12), density=1 / 8)
    for first in ([40000.0, 61440.0, 61440.0], [40000.0, 0.0, 0.0]):
        wide.grad, p.grad = torch.zeros(8), torch.tensor([*first, *[0.0] * 5], dtype=torch.float16)
        optimizer.step()
    assert flat([p]).tolist()[:3] == [0.0, -15.0, -15.0]
    assert optimizer.metrics()["skipped_steps"] == 1


@ranks(2)
def test_parameters_are_not_added_in_a_step_that_was_skipped(rank, world_size):
    """The error says how to end the step, and nothing has changed."""
    p, q = weight(8), weight(8)
    optimizer = sparse(sgd([p]))
    p.grad = torch.full((8,), torch.nan if rank == 1 else 1.0)
    optimizer.synchronize()
    with pytest.raises(RuntimeError, match=r"call zero_grad\(\) before add_param_group"):
        optimizer.add_param_group({"params": [q]})
    assert len(optimizer.param_groups) == 1
    optimizer.zero_grad()
    optimizer.add_param_group({"params": [q]})
    take(optimizer, [p, q], rank, [0], world_size)
    assert equal_on_all_ranks([p, q])


@ranks(2)
def test_gradient_that_cannot_be_exchanged_is_refused_by_name(rank, world_size):
    """The rank with a sparse gradient says what to do. The others skip the step, and all go on."""
    model = nn.ModuleDict({"words": nn.Embedding(4, 4, sparse=rank == 1), "head": nn.Linear(4, 4)})
    optimizer = sparse(sgd(model.parameters()), model=model, broadcast_parameters=True)
    before = flat(model.parameters())
    model["head"](model["words"](torch.tensor([1, 2]))).sum().backward()
    if rank == 1:
        with pytest.raises(tritoncomm.ConfigurationError, match=r"words\.weight.*sparse"):
            optimizer.step()
    else:
        optimizer.step()
    assert torch.equal(flat(model.parameters()), before)
    optimizer.zero_grad()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert equal_on_all_ranks(model.parameters())
    assert not torch.equal(flat(model.parameters()), before)


@ranks(2)
def test_max_grad_norm_limits_the_mean_of_this_step(rank, world_size):
    """The norm is that of the mean over ranks of this step's gradients. Residuals are not limited again."""
    p = weight(4096)
    optimizer = sparse(sgd([p]), density=1.0, max_grad_norm=2.0)
    p.grad = torch.ones(4096) * (10.0 if rank == 0 else -4.0)  # a mean of 3, with norm 192
    optimizer.step()
    assert float(flat([p]).norm()) == pytest.approx(2.0, rel=0.15)
    assert optimizer.metrics()["grad_norm"] == pytest.approx(192, rel=0.15)
    q = weight(4096)
    optimizer = sparse(sgd([q]), density=1 / 64, max_grad_norm=2.0)
    for _ in range(8):
        q.grad = torch.full((4096,), 1 / 64)  # a norm of 1
        optimizer.step()
    optimizer.flush()
    assert torch.equal(flat([q]), torch.full((4096,), -8 / 64))


@ranks(2)
def test_small_tensors_and_dense_groups_travel_whole(rank, world_size):
    """A bias, a tensor below dense_below and a group that says dense=True get their whole mean in each step."""
    large, bias, small = nn.Parameter(torch.zeros(8, 8)), weight(32), nn.Parameter(torch.zeros(2, 4))
    marked = nn.Parameter(torch.zeros(8, 8))
    groups = [{"params": [large, bias, small]}, {"params": [marked], "dense": True}]
    optimizer = sparse(sgd(groups), density=1 / 64, dense_below=16)
    every = [large, bias, small, marked]
    take(optimizer, every, rank, [0], world_size)
    for number, p in enumerate(every):
        whole = total(p.numel(), range(100 * number, 100 * number + 1), world_size)
        near = torch.allclose(flat([p]), -whole, atol=2.0)  # small tensors travel in 8 bits
        assert near == (p is not large)


@ranks(2)
def test_first_steps_are_dense(rank, world_size):
    """``warmup_steps`` exchanges deliver everything."""
    p = weight(64)
    optimizer = sparse(sgd([p]), warmup_steps=2)
    shares = []
    for step in range(3):
        take(optimizer, [p], rank, [step], world_size)
        shares.append(optimizer.metrics()["density_delivered"])
    assert shares[:2] == [1, 1]
    assert shares[2] < 1


@ranks(2)
def test_metrics_count_bytes_and_steps(rank, world_size):
    """Totals are sums over steps, and a step that was skipped counts apart."""
    p = weight(1024)
    optimizer = sparse(sgd([p]))
    sent = 0.0
    for step in range(3):
        take(optimizer, [p], rank, [step], world_size)
        sent += optimizer.metrics()["bytes_sent"]
    figures = optimizer.metrics()
    assert figures["steps"] == 3
    assert figures["skipped_steps"] == 0
    assert figures["bytes_sent_total"] >= sent > 0


@ranks(2)
def test_group_that_cannot_be_joined_changes_nothing(rank, world_size):
    """Workers go on in the group that they had, with its rule for late gradients."""
    found = []
    for fails in (False, True):
        p = weight(16, 1.0)
        optimizer = sparse(torch.optim.AdamW([p], lr=0.1), density=1 / 16)
        own = [dist.new_group([each]) for each in range(world_size)][rank]
        take(optimizer, [p], rank, range(3), world_size)
        if fails:
            other = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), process_group=own)
            other.register_comm_hook(None, allreduce_hook)
            with pytest.raises(ConfigurationError):
                optimizer.reset_process_group(own, model=other)
        take(optimizer, [p], rank, range(3, 6), world_size)
        found.append(flat([p]))
    assert torch.equal(*found)


@ranks(2)
@pytest.mark.parametrize("maximize", [False, True])
def test_coupled_decay_reaches_coordinates_without_gradient(rank, world_size, maximize):
    """Weight decay that is a part of the gradient shrinks what is never delivered about as far as in a dense run."""
    p = weight(16, 1.0)
    sign = -1 if maximize else 1
    optimizer = sparse(sgd([p], lr=0.01, weight_decay=0.5, maximize=maximize))
    for _ in range(140):
        p.grad = torch.zeros(16)
        p.grad[:4] = sign * torch.tensor([2.0, -2.0, 1.0, -1.0])
        optimizer.step()
    dense = (1 - 0.01 * 0.5) ** 140
    assert p.detach()[4:].tolist() == pytest.approx([dense] * 12, rel=0.3)


@ranks(2)
@pytest.mark.parametrize("option", ["lr", "weight_decay"])
def test_options_that_differ_are_refused_in_the_step(rank, world_size, option):
    """Ranks with other learning rates or decays all raise an error that names the option. The step can be repeated."""
    p = weight()
    optimizer = sparse(sgd([p]))
    take(optimizer, [p], rank, range(2), world_size)
    before, group = flat([p]), optimizer.param_groups[0]
    held = group[option]
    if rank == 1:
        group[option] = 0.5
    p.grad = gradient(16, rank, 2, world_size)
    with pytest.raises(ProtocolMismatchError, match=option):
        optimizer.step()
    assert torch.equal(flat([p]), before)
    group[option] = held
    optimizer.step()
    optimizer.flush()
    assert torch.equal(flat([p]), -total(16, range(3), world_size))


@ranks(2)
def test_parameters_frozen_on_one_rank_are_refused(rank, world_size):
    """All ranks name what is frozen on some."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = sparse(sgd(model.parameters()), model=model)
    for step in range(2):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if step == 0:
            optimizer.step()
    before = flat(model.parameters())
    if rank == 1:
        model[1].weight.requires_grad_(False)
    with pytest.raises(ProtocolMismatchError, match=r"frozen.*1\.weight"):
        optimizer.step()
    assert torch.equal(flat(model.parameters()), before)


@ranks(2)
@pytest.mark.parametrize("kind", ["expanded", "transposed", "channels_last"])
def test_gradients_may_have_any_strides(rank, world_size, kind):
    """The mean is right wherever the elements of ``.grad`` and of the parameter are in memory."""
    p = nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
    if kind == "expanded":
        given = torch.tensor(float(rank * world_size)).expand(p.shape)
    else:
        given = torch.arange(1.0, p.numel() + 1).view(p.shape)
        if kind == "channels_last":
            given = given.to(memory_format=torch.channels_last)
        else:
            given = given.transpose(2, 3).contiguous().transpose(2, 3)
    whole = mean(given)
    optimizer = sparse(sgd([p]), density=0.25)
    p.grad = given
    optimizer.step()
    delivered = p.detach() != 0
    assert torch.equal(p.detach()[delivered], -whole[delivered])
    assert delivered.any()
    optimizer.flush()
    assert torch.equal(p.detach(), -whole)


@ranks(2)
@pytest.mark.parametrize("kind", ["plain", "channels_last", "size 1", "gaps"])
def test_mean_is_written_into_the_gradient_of_the_backward_pass(rank, world_size, kind):
    """What holds ``.grad``, such as a bucket of DDP, sees the mean."""
    whole = torch.ones(4, 3, 1, 2).to(memory_format=torch.channels_last) if kind == "size 1" else torch.ones(4, 3, 2, 2)
    whole = whole.to(memory_format=torch.channels_last) if kind == "channels_last" else whole
    p = nn.Parameter(whole[..., ::2] if kind == "gaps" else whole)
    optimizer = sparse(sgd([p]), density=1.0)
    ((1.0 + rank) * p).sum().backward()
    held = p.grad
    optimizer.synchronize()
    assert p.grad is held
    assert torch.equal(held, torch.full_like(held, 1.5))


@ranks(2)
@pytest.mark.parametrize("algo", ["dense", "quantized"])
def test_strides_of_a_gradient_on_one_rank_change_no_bits(rank, world_size, algo):
    """A mean has the strides of its parameter, on the rank whose gradient has others and on one without gradient."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(8, 4, 3, 3, dtype=torch.bfloat16))
    optimizer = tritoncomm.wrap(sgd([p], lr=0.1, momentum=0.9), algo=algo, dense_below=0)
    for number in range(4):
        own = torch.randn(p.shape, generator=torch.Generator().manual_seed(number)).bfloat16()
        p.grad = None if rank else own.to(memory_format=torch.channels_last)
        optimizer.synchronize()
        assert p.grad.stride() == p.stride()
        optimizer.step()
        assert equal_on_all_ranks([p])


@ranks(2)
def test_group_that_is_added_keeps_the_residual(rank, world_size):
    """add_param_group() loses nothing, and if ranks add other groups, all raise and nothing has changed."""
    p, q = weight(), weight()
    optimizer = sparse(sgd([p]), density=1 / 16)
    take(optimizer, [p], rank, range(2), world_size)
    with pytest.raises(tritoncomm.ConfigMismatchError):
        optimizer.add_param_group({"params": [weight(4 + rank)]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [q]})
    take(optimizer, [p, q], rank, [2], world_size)
    optimizer.flush()
    assert torch.equal(flat([p]), -total(16, range(3), world_size))
    assert torch.equal(flat([q]), -total(16, range(102, 103), world_size))


@ranks(3)
def test_smaller_group_keeps_the_share_of_its_residuals(rank, world_size):
    """Ranks that go on without another one still owe what they would have added to the mean."""
    p = weight()
    optimizer = sparse(sgd([p]), density=1 / 16)
    take(optimizer, [p], rank, range(2), world_size)
    delivered, own = flat([p]), flat([p]).clone()
    owed = [gradient(16, rank, step, world_size) for step in range(2)]
    rest = torch.stack(everywhere(torch.stack(owed).sum(0)))  # of all ranks
    group = dist.new_group([0, 1])
    if rank == 2:
        return
    assert optimizer.reset_process_group(group) is False
    optimizer.flush()
    assert equal_on_all_ranks([p], group)
    # Rank 2 has taken its own residual with it: ranks 0 and 1 deliver theirs, divided by 3 as before.
    moved = (flat([p]) - own).abs()
    untouched = delivered == 0
    assert untouched.any()
    assert torch.equal(moved[untouched], (rest[:2].sum(0) / 3).abs()[untouched])
