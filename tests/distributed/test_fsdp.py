"""What FSDP2 leaves in ``.grad`` is exchanged among the replicas of each shard. What does not fit is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from kit import log_lines
from models import (
    Shards,
    Uneven,
    adamw,
    equal,
    exact,
    flat,
    gradients,
    loss_of,
    mesh,
    net,
    renewed_every,
    same,
    sgd,
    sharded,
    total,
    train,
)
from test_ddp import Stack
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from tritoncomm import ConfigMismatchError, ConfigurationError, ProtocolMismatchError
from tritoncomm.amp import GradScaler

from ranks import ranks

REFUSED = (ConfigurationError, ConfigMismatchError)  # a rank hears of the error of another one, or has its own


def shards_of(model: nn.Module | None = None, **fields) -> tuple[nn.Module, dist.ProcessGroup]:
    """Return a sharded model and the group of its replicas. There are two shards."""
    over = mesh()
    return sharded(model or Uneven(), over, **fields), over["replicate"].get_group()


@ranks(4)
@pytest.mark.parametrize(
    ("optimizer", "settings", "steps"),
    [
        (adamw, {"warmup_steps": 2}, 8),  # past a renewal of the scale
        (partial(adamw, amsgrad=True), {"algo": "topk_allgather"}, 3),
        (sgd, {"algo": "exdyna"}, 3),
        (sgd, {"dense_below": 16, "small": "8bit", "warmup_steps": 16}, 3),
    ],
)
def test_shards_of_two_ranks(rank, world_size, optimizer, settings, steps):
    """Each shard is exchanged with its replicas as plain parameters of this shape are."""
    model, group = shards_of()
    with renewed_every(5):
        pair = Shards(model, group, optimizer, **settings)
        for step in range(steps):
            pair.optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            pair.take()
    assert equal(model, group)
    if optimizer is adamw:
        assert pair.optimizer.metrics()["density_delivered"] < 0.5
        state = pair.optimizer.state[next(iter(model.parameters()))]
        assert isinstance(state["exp_avg"], DTensor)
        assert pair.optimizer.metrics()["longest_wait"] > 0  # not every coordinate in every step


POLICIES = {
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)},
    "fp16": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "not resharded": {"reshard_after_forward": False},
    "in turns": {"reshard_after_forward": True},
}


@ranks(4)
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_of_fsdp(rank, world_size, policy):
    """Mixed precision, offloaded parameters and every way to reshard: what is in ``.grad`` is exchanged."""
    model, group = shards_of(**POLICIES[policy])
    pair = Shards(model, group)
    for step in range(2):
        model.set_reshard_after_backward(policy != "in turns" or step == 0)
        pair.optimizer.zero_grad(set_to_none=step == 0)
        loss_of(model, rank, step).backward()
        pair.take()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert equal(model, group)


# For each micro-batch of a step, what FSDP2 is told before its backward pass.
SWITCHES = {
    "all are reduced": ("", ()),
    "the last one reduces": ("set_requires_gradient_sync", (False, False, True)),
    "one in between reduces, too": ("set_requires_gradient_sync", (True, False, True)),
    "the last one all-reduces": ("set_requires_all_reduce", (False, False, True)),
    "the last one is told": ("set_is_last_backward", (False, False, True)),
}


def summed(model, other, group, passes):
    """Take a dense step of the model after ``passes``, and one of ``other`` with the mean of all micro-batches.

    A pass is its micro-batch and what is called before it. ``other`` is a plain copy. Return what was logged.
    """
    optimizer = exact(sgd(model), model=model, process_group=group, algo="dense")
    optimizer.zero_grad()
    for micro, switch, value in passes:
        if switch:
            getattr(model, switch)(value)
        loss_of(model, dist.get_rank(), micro).backward()
    with log_lines() as lines:
        optimizer.step()
    ordinary = sgd(other)
    ordinary.zero_grad()
    for rank in range(4):
        for micro, *_ in passes:
            (loss_of(other, rank, micro) / 4).backward()
    ordinary.step()
    return lines


def full(model):
    """Return all parameters of a sharded model as one vector."""
    return torch.cat([each.full_tensor().reshape(-1) for each in model.parameters()])


@ranks(4)
@pytest.mark.parametrize("order", SWITCHES)
def test_accumulation(rank, world_size, order):
    """The micro-batches of all ranks add up, whatever FSDP reduces before the last of them. Nothing is warned of."""
    model, group = shards_of()
    other = Uneven()
    switch, values = SWITCHES[order]
    lines = summed(model, other, group, [(micro, switch, values and values[micro]) for micro in range(3)])
    torch.testing.assert_close(full(model), flat(other))
    assert not any("set_requires_gradient_sync" in line for line in lines)


class Twice(nn.Module):
    """Uses a layer twice, with or without recomputation in backward."""

    def __init__(self, *, recompute):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.recompute = nn.Linear(6, 6), nn.Linear(6, 3), recompute

    def forward(self, x):
        """Apply the same layer twice."""
        for _ in range(2):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=False) if self.recompute else self.layer(x))
        return self.head(x)


PASSES = {
    "twice": (partial(Twice, recompute=False), ["layer", ""]),
    "recomputed": (partial(Twice, recompute=True), ["layer", ""]),
    "recomputed in the root": (partial(Twice, recompute=True), [""]),
    "nested": (Stack, ["layers.0", "layers.1", "head", ""]),
    "no common root": (net, ["0", "2", "4"]),
}


@ranks(4)
@pytest.mark.parametrize("kind", PASSES)
def test_passes(rank, world_size, kind):
    """A layer that is used twice or recomputed, nested passes, and no common root. Hooks see this replica's own."""
    over = mesh()
    make, names = PASSES[kind]
    model = make()
    for name in names:
        fully_shard(model.get_submodule(name), mesh=over["shard"])
    pair, seen = Shards(model, over["replicate"].get_group()), []
    for parameter in pair.parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone()))
    for step in range(2):
        seen.clear()
        pair.optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        held = [p.grad.to_local() for p in pair.parameters]
        assert kind == "twice" or all(any(torch.equal(one, other) for other in held) for one in seen)
        pair.take()


@ranks(4)
def test_reduction_outside_of_autograd(rank, world_size):
    """As pipelining does."""
    model, group = shards_of()
    pair = Shards(model, group)
    for step in range(2):
        pair.optimizer.zero_grad()
        model.set_requires_gradient_sync(requires_gradient_sync=False)
        for micro in range(2):
            loss_of(model, rank, 2 * step + micro).backward()
        assert all(p.grad is None for p in model.parameters())
        model.set_requires_gradient_sync(requires_gradient_sync=True)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # as torch.distributed.pipelining.stage does
                fully_shard.state(module)._fsdp_param_group.post_backward()
        fully_shard.state(model)._root_post_backward_final_callback()
        assert all(p.grad is not None for p in model.parameters())
        pair.take()


@ranks(4)
def test_loss_scaling(rank, world_size):
    """An overflow in one shard skips the step of all, and scales stay equal. Other steps are as without a scaler."""
    (model, group), (other, _) = shards_of(), shards_of()
    optimizer, plain = (exact(adamw(each), model=each, process_group=group) for each in (model, other))
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(5):
        optimizer.zero_grad()
        factor = float("inf") if step == 3 and rank == 1 else 1.0
        scaler.scale(loss_of(model, rank, step) * factor).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if step != 3:
            train(other, plain, rank, [step])
        assert torch.equal(flat(model), flat(other)), step
        assert same(scaler.get_scale())
    assert optimizer.metrics()["skipped_steps"] == 1


@ranks(4)
def test_flush_and_clipping_after_synchronize(rank, world_size):
    """Both see all shards. Decay outweighs the gradients here, and would make up most of the norm."""
    model, group = shards_of()
    optimizer = exact(sgd(model, weight_decay=1.0), model=model, process_group=group)
    train(model, optimizer, rank, range(4))
    optimizer.flush()
    assert optimizer.metrics()["residual_norm"] == 0
    optimizer.zero_grad()
    loss_of(model, rank, 5, spare=False).backward()
    optimizer.synchronize()
    spare = flat(model.spare)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3).full_tensor()
    assert float(norm) < 2
    assert float(total(gradients(model).square().sum())) == pytest.approx(2 * 1e-6, rel=1e-2)
    optimizer.step()
    assert torch.equal(flat(model.spare), spare)
    assert equal(model, group)


def refused(trained: nn.Module, group: dist.ProcessGroup | None, match: str, **fields) -> None:
    """Wrap an optimizer of a model, with it as ``model`` unless ``fields`` have another one, and expect an error."""
    with pytest.raises(REFUSED, match=match):
        tritoncomm.wrap(adamw(trained), process_group=group, **{"model": trained} | fields)


@ranks(4)
def test_wrap_after_a_forward_pass(rank, world_size):
    """FSDP2 has then left whole tensors in the place of the root's parameters. The optimizer holds shards."""
    model, group = shards_of()
    inner = adamw(model)
    with torch.no_grad():
        model(torch.ones(1, 6))
    assert not hasattr(model.head.weight, "device_mesh")
    optimizer = exact(inner, model=model, process_group=group)
    train(model, optimizer, rank, range(2))
    assert equal(model, group)


@ranks(4)
def test_refused_models(rank, world_size):
    """HSDP, parameters that ``fully_shard`` missed, several meshes, other replicas, and FSDP1 are named."""
    over = mesh()
    group = over["replicate"].get_group()
    half = fully_shard(net(), mesh=over)  # replicas that FSDP averages itself
    refused(half, group, r'mesh\["(shard|replicate)"\]')
    refused(half, group, r"process_group", model=None)
    for ignored in (False, True):
        model = Uneven()
        for layer in (model.first, model.spare):
            fully_shard(layer, mesh=over["shard"])
        if ignored:
            fully_shard(model, mesh=over["shard"], ignored_params={model.head.weight, model.head.bias})
        refused(model, group, r"head\.weight.*fully_shard|fully_shard.*head\.weight")
    two = net()
    fully_shard(two[0], mesh=over["shard"])
    fully_shard(two[2], mesh=DeviceMesh("cpu", torch.arange(world_size)))
    fully_shard(two[4], mesh=over["shard"])
    refused(two, group, r"mesh|process_group")
    one = sharded(Uneven(), over)
    if rank == world_size - 1:  # the replicas of the other shard are equal
        one.head.weight.to_local().detach().fill_(1.0)
    refused(one, group, r"content of head\.weight: rank \d has")
    tritoncomm.wrap(adamw(one), model=one, process_group=group, broadcast_parameters=True)
    assert equal(one, group)
    refused(sharded(Uneven(), over), group, r"recipe|density", density=0.1 if rank < 2 else 0.2)
    first = FullyShardedDataParallel(Uneven(), device_id=torch.device("cpu"), use_orig_params=True)
    for given in (None, first):
        refused(first, None, r"FullyShardedDataParallel.* use fully_shard", model=given, broadcast_parameters=True)


@ranks(4)
def test_options_that_differ(rank, world_size):
    """A rate, or what is frozen, that differs between ranks with the same shard is named on the ranks of all shards."""
    model, group = shards_of()
    optimizer = exact(adamw(model), model=model, process_group=group)
    train(model, optimizer, rank, range(2))
    before, options = flat(model), optimizer.param_groups[0]
    for odd, said in (((3,), "rank 1 has 0.01, rank 3 has 0.02"), ((0, 3), "rank 0 has 0.02, rank 2 has 0.01")):
        options["lr"] = 0.02 if rank in odd else 0.01
        with pytest.raises(ProtocolMismatchError, match=f"nothing has changed.*lr of parameter group 0: {said}"):
            train(model, optimizer, rank, [2])
        options["lr"] = 0.01
    model.head.weight.requires_grad_(rank < 2)  # in one replica
    with pytest.raises(ProtocolMismatchError, match=r"frozen state of head\.weight: rank 0 has False, rank 2 has True"):
        train(model, optimizer, rank, [2])
    model.head.weight.requires_grad_()
    assert torch.equal(flat(model), before)
    train(model, optimizer, rank, range(2, 4))
    assert equal(model, group)
