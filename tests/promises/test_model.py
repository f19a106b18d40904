"""Modules, shards and refusals: gradients stay local in whatever the model is wrapped, and mistakes are named."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from kit import equal_on_all_ranks, everywhere, flat, gradient, log_lines, mean, sgd, sparse, weight
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from tritoncomm import ConfigMismatchError, ConfigurationError

from ranks import ranks


def net() -> nn.Sequential:
    """Return a model, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def loss_of(model, rank: int, step: int = 0) -> torch.Tensor:
    """Return the loss of a batch of this rank."""
    return model(gradient(8, rank, step)[None] / 64).square().sum()


@ranks(2, 3)
def test_ddp_averages_nothing_and_ends_in_the_bits_of_a_plain_module(rank, world_size):
    """Gradients differ between ranks until step()."""
    ends = []
    for wrapped in (False, True):
        inner = net()
        model = DistributedDataParallel(inner) if wrapped else inner
        optimizer = sparse(torch.optim.AdamW(inner.parameters(), lr=0.01), model=model)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            assert not torch.equal(*everywhere(inner[0].weight.grad)[:2])
            optimizer.step()
        assert equal_on_all_ranks(inner.parameters())
        ends.append(flat(inner.parameters()))
    assert torch.equal(*ends)


@ranks(2)
def test_communication_hook_is_refused_by_name(rank, world_size):
    """It would average before the exchange."""
    model = DistributedDataParallel(net())
    model.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ConfigurationError, match="allreduce_hook"):
        sparse(sgd(model.parameters()), model=model)


@ranks(3)
def test_group_is_that_of_the_module(rank, world_size):
    """DDP's group is used, and another one refused."""
    group, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank == 2:
        return
    model = DistributedDataParallel(net(), process_group=group)
    with pytest.raises(ConfigurationError, match="process_group"):
        sparse(sgd(model.parameters()), model=model, process_group=other)
    optimizer = sparse(sgd(model.parameters()), model=model)
    loss_of(model, rank).backward()
    optimizer.step()
    assert equal_on_all_ranks(model.parameters(), group)


@ranks(2)
def test_optimizer_that_was_not_wrapped_cannot_step_a_wrapped_module(rank, world_size):
    """DDP averages nothing any more, so it would step by local gradients."""
    model = DistributedDataParallel(net())
    first, second = list(model.module[0].parameters()), list(model.module[2].parameters())
    sparse(sgd(first), model=model)
    other = sgd(second)
    loss_of(model, rank).backward()
    before = flat(second)
    with pytest.raises(ConfigurationError, match="wrap"):
        other.step()
    assert torch.equal(flat(second), before)


@ranks(2)
def test_ignored_parameters_are_their_ranks_own(rank, world_size):
    """They may differ, and step by the gradient of their rank alone. A NaN in one skips the step of all."""
    inner = net()
    with torch.no_grad():
        inner[2].weight.fill_(1.0 + rank)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["2.weight"])
    model = DistributedDataParallel(inner)
    optimizer = sparse(sgd(inner.parameters(), lr=0.1), model=model)
    loss_of(model, rank).backward()
    own, local = inner[2].weight.detach().clone(), inner[2].weight.grad.clone()
    optimizer.step()
    assert torch.allclose(inner[2].weight.detach(), own - 0.1 * local)
    assert equal_on_all_ranks([*inner[0].parameters(), inner[2].bias])
    optimizer.zero_grad()
    loss_of(model, rank, 1).backward()
    if rank == 1:
        inner[2].weight.grad[0, 0] = torch.nan
    before = flat(inner.parameters())
    optimizer.step()
    assert torch.equal(flat(inner.parameters()), before)
    assert optimizer.metrics()["skipped_steps"] == 1


def sharded():
    """Return a model over two replicas of two shards, and the mesh."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - takes a while

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(net(), mesh=mesh["shard"]), mesh


def whole(model) -> torch.Tensor:
    """Return the whole parameters of a sharded model."""
    return flat([each.full_tensor() for each in model.parameters()])


@ranks(4)
def test_shards_train_as_the_plain_module(rank, world_size):
    """FSDP2 averages over the shards, and the exchange over the replicas."""
    model, mesh = sharded()
    optimizer = sparse(sgd(model.parameters()), density=1.0, model=model, process_group=mesh["replicate"].get_group())
    plain = net()
    loss_of(plain, rank).backward()
    expected = flat(plain.parameters()) - mean(flat([each.grad for each in plain.parameters()]))
    loss_of(model, rank).backward()
    optimizer.step()
    assert torch.allclose(whole(model), expected, atol=1e-5)
    assert equal_on_all_ranks([whole(model)])


@ranks(2)
@pytest.mark.parametrize("local_steps", [1, 2])
def test_a_parameter_taken_out_of_the_optimizer_is_named(rank, world_size, local_steps, tmp_path):
    """On the rank that lost it: a checkpoint would fit no optimizer. The others skip an exchange, and say why."""
    model = net()
    optimizer = tritoncomm.wrap(torch.optim.AdamW(model.parameters(), lr=0.01), model=model, local_steps=local_steps)

    def train(step: int) -> None:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()

    for step in range(local_steps):
        train(step)
    own = optimizer.param_groups[0]["params"]
    gone = own.pop() if rank == 1 else None
    with log_lines() as lines:
        if rank == 1:
            with pytest.raises(ConfigurationError, match=r"lost parameters .*2\.bias"):
                train(2)
            own.append(gone)
        elif local_steps == 1:
            train(2)
            assert any("rank 1: the optimizer has lost parameters" in line for line in lines), lines
    for step in range(4, 4 + local_steps):
        train(step)
    assert equal_on_all_ranks(model.parameters())
    assert optimizer.metrics()["steps"] == 2
    model[2].bias.requires_grad_(False)
    own.pop()  # a frozen one may go, until its state is saved
    for step in range(8, 8 + local_steps):
        train(step)
    with pytest.raises(ConfigurationError, match=r"lost parameters .*2\.bias"):
        tritoncomm.checkpoint.save(optimizer, tmp_path)
    with pytest.raises(ConfigurationError, match=r"lost parameters .*2\.bias"):
        tritoncomm.checkpoint.ResidualState(optimizer).state_dict()


@ranks(4)
@pytest.mark.parametrize("updates", [False, True])
def test_a_pass_that_shards_keep_back_is_told_once(rank, world_size, updates):
    """What FSDP2 has not reduced is not in this step, with and without other gradients in ``.grad``."""
    model, mesh = sharded()
    fields = {"updates": True} if updates else {"density": 1.0}
    optimizer = sparse(sgd(model.parameters()), model=model, process_group=mesh["replicate"].get_group(), **fields)
    with log_lines() as lines:
        for step in range(2):
            for micro, is_reduced in enumerate([True, False]):
                model.set_requires_gradient_sync(is_reduced)
                loss_of(model, rank, 2 * step + micro).backward()
            optimizer.step()
    told = [line for line in lines if "set_requires_gradient_sync(True)" in line]
    assert len(told) == (rank == 0), lines


@ranks(4)
def test_a_pass_that_shards_keep_back_after_the_exchange_is_told(rank, world_size):
    """A pass between ``synchronize()`` and ``step()`` that FSDP2 has not reduced is noticed, too."""
    model, mesh = sharded()
    group = mesh["replicate"].get_group()
    optimizer = sparse(sgd(model.parameters()), density=1.0, model=model, process_group=group)
    loss_of(model, rank, 0).backward()
    optimizer.synchronize()
    model.set_requires_gradient_sync(False)
    loss_of(model, rank, 1).backward()
    with log_lines() as lines:
        optimizer.step()
    told = [line for line in lines if "set_requires_gradient_sync(True)" in line]
    assert len(told) == (rank == 0), lines


@ranks(4)
@pytest.mark.parametrize("is_given", [False, True])
def test_shards_need_the_model_to_notice_such_a_pass(rank, world_size, is_given):
    """Without ``model=``, ``wrap`` says once what nobody will notice."""
    model, mesh = sharded()
    with log_lines() as lines:
        sparse(sgd(model.parameters()), model=model if is_given else None, process_group=mesh["replicate"].get_group())
    told = [line for line in lines if "pass model=" in line]
    assert len(told) == (rank == 0 and not is_given), lines


@ranks(4)
@pytest.mark.parametrize("kind", ["frozen", "rate of zero"])
def test_frozen_shards_do_not_move_by_updates(rank, world_size, kind):
    """What is left of a parameter's updates waits, on all shards, while it is frozen or has no rate."""
    model, mesh = sharded()
    inner = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.01)
    optimizer = tritoncomm.wrap(inner, model=model, process_group=mesh["replicate"].get_group(), local_steps=2)

    def train(steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()

    train(range(4))
    model[2].requires_grad_(kind != "frozen")
    optimizer.param_groups[1]["lr"] = 0.01 if kind == "frozen" else 0.0
    before, other = whole(model[2]), whole(model[0])
    train(range(4, 8))
    optimizer.flush()
    assert torch.equal(whole(model[2]), before)
    assert not torch.equal(whole(model[0]), other)
    assert equal_on_all_ranks([whole(model)])


@ranks(4)
def test_no_shard_steps_alone(rank, world_size):
    """A NaN in one shard skips the step of all shards, and the norm that is limited is that of all."""
    model, mesh = sharded()
    group = mesh["replicate"].get_group()
    optimizer = sparse(sgd(model.parameters()), density=1.0, model=model, process_group=group, max_grad_norm=1.0)
    before = whole(model)
    for each in model.parameters():
        each.grad = torch.ones_like(each) * 2.0
    if rank == 3:
        next(model.parameters()).grad.to_local().fill_(torch.nan)
    optimizer.step()
    assert torch.equal(whole(model), before)
    assert optimizer.metrics()["skipped_steps"] == 1
    for each in model.parameters():
        each.grad = torch.ones_like(each) * 2.0
    optimizer.step()
    assert float((whole(model) - before).norm()) == pytest.approx(1.0, rel=0.15)


@ranks(4)
def test_shards_need_the_group_of_their_replicas(rank, world_size):
    """Without it, or with that of the shards, wrap() says which to pass."""
    model, mesh = sharded()
    with pytest.raises((ConfigurationError, ConfigMismatchError), match="process_group"):
        sparse(sgd(model.parameters()), model=model)
    with pytest.raises((ConfigurationError, ConfigMismatchError), match="process_group"):
        sparse(sgd(model.parameters()), model=model, process_group=mesh["shard"].get_group())
    with pytest.raises((ConfigurationError, ConfigMismatchError), match="process_group"):
        sparse(sgd(model.parameters()), process_group=mesh["shard"].get_group())


@ranks(2)
def test_parameters_without_values_are_refused_by_name(rank, world_size):
    """Lazy modules, and the meta device."""
    lazy = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))
    with pytest.raises(ConfigurationError, match=r"1\.weight.*lazy"):
        sparse(sgd(lazy.parameters()), model=lazy)
    with torch.device("meta"):
        meta = nn.Linear(4, 4)
    with pytest.raises(ConfigurationError, match=r"weight.*meta"):
        sparse(sgd(meta.parameters()), model=meta)
    with pytest.raises(ConfigurationError, match="complex"):
        sparse(sgd([weight(4, dtype=torch.complex64)]))


@ranks(2)
def test_model_must_be_what_the_optimizer_trains(rank, world_size):
    """A model of which the optimizer holds nothing is refused, and so is no model at all."""
    with pytest.raises(ConfigurationError, match="model"):
        sparse(sgd(net().parameters()), model=net())
    with pytest.raises(ConfigurationError, match="model"):
        sparse(sgd(net().parameters()), model="net")


@ranks(2)
def test_compiled_module_is_the_module(rank, world_size):
    """What torch.compile has put around it does not matter, also around DDP."""
    inner = net()
    model = torch.compile(DistributedDataParallel(inner))
    optimizer = sparse(sgd(inner.parameters()), model=model, on_nonfinite="raise")
    for each in inner.parameters():
        each.grad = torch.full_like(each, torch.nan)
    with pytest.raises(ArithmeticError, match=r"0\.weight") as caught:
        optimizer.step()
    assert "_orig_mod" not in str(caught.value)


@ranks(2)
def test_parameter_that_is_added_behind_the_back_is_refused_by_name(rank, world_size):
    """Its gradient would not be exchanged: add_param_group() is the way."""
    model = net()
    optimizer = sparse(sgd(model[0].parameters()), model=model)
    optimizer.param_groups[0]["params"].append(model[2].weight)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    before = flat(model.parameters())
    with pytest.raises(ConfigurationError, match=r"2\.weight.*add_param_group"):
        optimizer.step()
    assert torch.equal(flat(model.parameters()), before)


@ranks(2)
def test_parameter_that_was_frozen_at_wrap_cannot_train(rank, world_size):
    """It is named when it has a gradient."""
    model = net()
    model[0].weight.requires_grad_(False)
    optimizer = sparse(sgd(model.parameters()), model=model)
    model[0].weight.requires_grad_()
    loss_of(model, rank).backward()
    before = flat(model.parameters())
    with pytest.raises(ConfigurationError, match=r"0\.weight.*frozen"):
        optimizer.step()
    assert torch.equal(flat(model.parameters()), before)


class _Wrapper(torch.optim.SGD):
    """An optimizer with a method that changes parameters by gradients."""

    @torch.no_grad()
    def first_step(self):
        """Climb, as SAM does."""
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad)


@ranks(2)
def test_other_methods_that_use_gradients_are_refused(rank, world_size):
    """They would move parameters apart: only step() exchanges."""
    p = weight()
    optimizer = sparse(_Wrapper([p], lr=1.0))
    p.grad = gradient(16, rank, 0)
    with pytest.raises(RuntimeError, match="first_step"):
        optimizer.first_step()


class _Around(torch.optim.Optimizer):
    """Steps the optimizer inside, and moves parameters by what all ranks have in common, as Lookahead does."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        super().__init__(inside.param_groups[0]["params"], {})
        self.inside, self.param_groups = inside, inside.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        """Take the step, and halve the parameters."""
        self.inside.step()
        for p in self.param_groups[0]["params"]:
            p.mul_(0.5)


@ranks(2)
def test_optimizer_around_a_wrapped_one_steps(rank, world_size):
    """Also where DDP averages nothing. It cannot be wrapped, too: gradients would be exchanged twice."""
    model = DistributedDataParallel(net())
    inside = sparse(sgd(model.parameters(), lr=0.5), model=model, density=1.0)
    around, before = _Around(inside), flat(model.parameters())
    loss_of(model, rank).backward()
    means = mean(flat([p.grad for p in model.parameters()]))
    around.step()
    torch.testing.assert_close(flat(model.parameters()), (before - 0.5 * means) * 0.5)
    with pytest.raises(ConfigurationError, match="_Around, and the SGD inside it is wrapped already: step this"):
        sparse(around, model=model)


@ranks(2)
def test_optimizer_around_a_wrapped_one_of_some_parameters_cannot_step_others(rank, world_size):
    """Nobody would exchange their gradients. One that was wrapped as a whole may be wrapped anew."""
    model = DistributedDataParallel(net())
    inside = sgd(model.module[2].parameters())
    sparse(inside, model=model)
    around = _Around(inside)
    around.param_groups = [{"params": [*model.parameters()]}]
    loss_of(model, rank).backward()
    with pytest.raises(ConfigurationError, match=r"this _Around steps '0\.weight', and it is not wrapped"):
        around.step()
    inside = sgd(model.parameters())
    for _ in range(2):
        assert sparse(_Around(inside), model=model)


@ranks(2)
def test_buffers_that_ddp_broadcasts_are_no_warning(rank, world_size):
    """They may differ in between, in each of several models."""
    models = nn.ModuleList(DistributedDataParallel(nn.Sequential(net(), nn.BatchNorm1d(4))) for _ in range(2))
    for model in models:
        model(torch.randn(8, 8) + rank)
    with log_lines() as lines:
        sparse(sgd(models.parameters()), model=models)
    assert not any("buffers" in line for line in lines)
