"""Worker processes of tests/distributed/test_training.py: what surrounds the exchange in real training."""

from __future__ import annotations

import copy
import logging
import pickle
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from helpers import flat, log_lines, loss_of, residual, same_everywhere, sparse_sgd, sparse_wrap, tiny_model, total
from torch import nn
from torch.profiler import ProfilerActivity, profile
from tritoncomm import ConfigMismatchError, ConfigurationError

import laws


def accumulation(rank: int, world_size: int, send) -> None:
    """Two micro-batches equal one batch, with one exchange per optimizer step."""
    model, whole = tiny_model(), tiny_model()
    optimizer, reference = sparse_sgd(model), sparse_sgd(whole)
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(2):
            (loss_of(model, rank, 2 * step + micro) / 2).backward()
        optimizer.step()
        reference.zero_grad()
        (sum(loss_of(whole, rank, 2 * step + micro) for micro in range(2)) / 2).backward()
        reference.step()
        assert torch.allclose(residual(optimizer), residual(reference), atol=1e-6)
    assert optimizer.metrics()["steps"] == 4
    assert same_everywhere(flat(model))


def clipping(rank: int, world_size: int, send) -> None:
    """What is delivered is clipped after synchronize(). Before the exchange, it is local and excludes the residual."""
    model, other = tiny_model(), tiny_model()
    bare = torch.optim.SGD(model.parameters(), lr=0.1)
    by_hand = sparse_wrap(torch.optim.SGD(other.parameters(), lr=0.1))
    for step in range(3):
        by_hand.zero_grad()
        loss_of(other, rank, step).backward()
        by_hand.synchronize()
        assert nn.utils.clip_grad_norm_(other.parameters(), 0.05) > 0.05
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.grad = None if theirs.grad is None else theirs.grad.clone()
        by_hand.step()
        bare.step()
        assert flat(model) == flat(other)

    by_hand.zero_grad()
    loss_of(other, rank, 9).backward()
    nn.utils.clip_grad_norm_(other.parameters(), 0.01)
    held = total(residual(by_hand).double() + gradients(by_hand).double())
    by_hand.step()
    mean = gradients(by_hand).double()
    assert torch.allclose(mean * world_size + total(residual(by_hand).double()), held, atol=1e-6)


def gradients(optimizer: tritoncomm.SparseOptimizer) -> torch.Tensor:
    """Return the flat gradient that the exchange sees."""
    layout = optimizer._vector.layout
    return layout.read_gradients(torch.empty(layout.numel))


def flat_values(model: nn.Module) -> torch.Tensor:
    """Return all trained parameters as a flat vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])


def _flat_gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros(parameter.numel()) if parameter.grad is None else parameter.grad.reshape(-1)


def changed_settings(rank: int, world_size: int, send) -> None:
    """Learning rate, density and frozen parameters may change between steps without losing residuals."""
    for algo in ("oktopk", "spardl", "exdyna", "dgc", "random_k"):
        model = tiny_model()
        optimizer = sparse_wrap(torch.optim.SGD(model.parameters(), lr=0.1), algo, warmup_steps=1)
        for step in range(8):
            if step == 2:
                optimizer.param_groups[0]["lr"] = 0.01
            if step == 3:
                residual_before = residual(optimizer)
                state = optimizer.state_dict()
                sgd = torch.optim.SGD(model.parameters(), lr=0.01)
                optimizer = sparse_wrap(sgd, algo, warmup_steps=1, density=0.5)
                optimizer.load_state_dict(state)
                assert laws.same_bits(residual(optimizer), residual_before)
                assert optimizer.recipe.density == 0.5
            if step == 5:
                model[2].weight.requires_grad_(False)
                frozen = model[2].weight.detach().clone()
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            before = flat_values(model)
            optimizer.step()
            if algo != "dgc" and step < 5:  # DGC's updates are not the averaged gradients
                mean = torch.cat([_flat_gradient(p) for p in model.parameters() if p.requires_grad])
                rate = 0.01 if step >= 2 else 0.1
                assert torch.allclose(before - flat_values(model), rate * mean, atol=1e-6), (algo, step)
            delivered = optimizer.metrics()["density_delivered"]
            assert (delivered == 1) == (step == 0), (algo, step, delivered)
            if step == 4:
                assert delivered > 0.21, (algo, delivered)
        assert torch.equal(model[2].weight, frozen)
        assert same_everywhere(flat(model))
    for fields, said in (
        ({"density": (0.4, 0.3)}, r"density of OkTopk: .*rank 1 has 0\.3"),
        ({"values": ("8bit", "4bit")}, r"values of OkTopk: .*rank 1 has '4bit'"),
        ({"warmup_steps": (3, 4)}, r"steps of Warmup: .*rank 1 has 4"),
        ({"warmup_steps": (3, 0)}, r"recipe: .*'Warmup around OkTopk'.*rank 1 has 'OkTopk'"),
        ({"small": ("fp32", "8bit")}, r"argument small: .*rank 1 has '8bit'"),
    ):
        own = {name: values[rank == 1] for name, values in fields.items()}
        with pytest.raises(ConfigMismatchError, match=said) as caught:
            tritoncomm.wrap(torch.optim.SGD(model.parameters(), lr=0.1), **own)
        assert len(str(caught.value)) < 250


def flushing(rank: int, world_size: int, send) -> None:
    """flush() delivers the residuals once, and the model moves by exactly their mean."""
    for make in (partial(torch.optim.SGD, lr=0.5), partial(torch.optim.AdamW, lr=0.01)):
        model = tiny_model()
        optimizer = sparse_wrap(make(model.parameters()))
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        pending = total(residual(optimizer)) / world_size
        assert pending.any()
        before = copy.deepcopy(model)
        optimizer.flush()
        assert not residual(optimizer).any()
        assert all(p.grad is None for p in model.parameters())
        trained = [pair for pair in zip(before.parameters(), model.parameters(), strict=True) if pair[0].requires_grad]
        moved = torch.cat([(old - new).detach().reshape(-1) for old, new in trained])
        if make.func is torch.optim.SGD:
            assert torch.allclose(moved, 0.5 * pending, atol=1e-6)
        assert same_everywhere(flat(model))
        optimizer.flush()  # all residuals are zero, so this changes nothing
        loss_of(model, rank, 5).backward()
        optimizer.step()


def weight_decay(rank: int, world_size: int, send) -> None:
    """AdamW applies weight decay after the exchange, so decay leaves no residual. Without gradients it does nothing."""
    model = tiny_model()
    optimizer = sparse_wrap(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    before = flat(model)
    optimizer.step()
    assert flat(model) == before
    start = model[0].weight.detach().clone()
    for _ in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
    assert torch.allclose(model[0].weight, start * (1 - 0.1 * 0.5) ** 4)
    assert not residual(optimizer).any()


def nothing_is_late(rank: int, world_size: int, send) -> None:
    """With ``quantized``, AdamW takes its own step on the delivered mean, to the bit, and has no state of delays."""
    model, other = tiny_model(), tiny_model()
    with log_lines(logging.WARNING) as warned:
        optimizer = tritoncomm.wrap(torch.optim.AdamW(model.parameters(), lr=0.01), "quantized", dense_below=0)
        tritoncomm.wrap(torch.optim.Adadelta(tiny_model().parameters()), "quantized")
    bare = torch.optim.AdamW(other.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        held = total(residual(optimizer).double() + gradients(optimizer).double())
        optimizer.synchronize()
        kept = held - world_size * gradients(optimizer).double()
        for parameter, theirs in zip(model.parameters(), other.parameters(), strict=True):
            theirs.grad = None if parameter.grad is None else parameter.grad.clone()
        optimizer.step()
        bare.step()
        assert flat(model) == flat(other)
        assert torch.allclose(kept, total(residual(optimizer).double()), atol=1e-6)
        assert residual(optimizer).any()
    metrics = optimizer.metrics()
    assert metrics["density_delivered"] == 1.0
    assert {key for state in optimizer.state.values() for key in state} == {"step", "exp_avg", "exp_avg_sq"}
    assert not [line for line in warned if "staleness-aware" in line]
    assert same_everywhere(flat(model))


def double_reduction(rank: int, world_size: int, send) -> None:
    """Gradients that DDP averages are named, whichever was wrapped first, also if values are rounded."""
    model = nn.Linear(4, 3)
    ddp = nn.parallel.DistributedDataParallel(model)
    rounded = {"values": "4bit", "dense_below": 0}
    quantized = {"small": "8bit", "warmup_steps": 2}
    cases = (False, {}), (True, {}), (True, rounded), (True, {"small": "8bit", "dense_below": 4}), (True, quantized)
    for late, fields in cases:
        if late:
            del ddp
        optimizer = sparse_wrap(torch.optim.SGD(model.parameters(), lr=0.1), **fields)
        if late:
            ddp = nn.parallel.DistributedDataParallel(model)
        optimizer.zero_grad()
        ddp(torch.ones(2, 4) + rank).sum().backward()
        with log_lines(logging.WARNING) as warned:
            optimizer.step()
        found = [line for line in warned if "the first is that of" in line and "pass model=ddp_model" in line]
        assert len(found) == (rank == 0), (late, fields)
    # Equal data is legal, and worth a warning.
    with log_lines(logging.WARNING) as warned:
        for step, fields in ((step, fields) for fields in ({}, rounded, quantized) for step in range(2)):
            plain = nn.Linear(4, 3)
            warned.clear()
            alike = sparse_wrap(torch.optim.SGD(plain.parameters(), lr=0.1), broadcast_parameters=True, **fields)
            plain(torch.ones(2, 4) + step * rank).sum().backward()
            alike.step()
            found = [line for line in warned if line.startswith("in step 1, the gradients of 2 parameters are equal")]
            assert len(found) == (rank == 0 and step == 0), (step, fields)


def broadcast(rank: int, world_size: int, send) -> None:
    """``broadcast_parameters=True`` copies the first rank's parameters, including frozen and transposed ones."""

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        made = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
        made[0].weight = nn.Parameter(torch.randn(5, 4).t())
        made[1].bias.requires_grad_(False)
        return made

    def wrap(net: nn.Module, **fields) -> tritoncomm.SparseOptimizer:
        return sparse_wrap(torch.optim.SGD(net.parameters(), lr=0.1), **fields)

    net = model(rank)
    with pytest.raises(ConfigMismatchError, match=r"broadcast_parameters=True.*values of parameter 0"):
        wrap(net)
    assert same_everywhere(flat(net)) == (world_size == 1)
    optimizer = wrap(net, broadcast_parameters=True)
    assert flat(net) == flat(model(0))
    net(torch.ones(3, 5)).sum().backward()
    optimizer.step()
    assert same_everywhere(flat(net))
    with pytest.raises(ConfigMismatchError, match=r"broadcast_parameters: .*rank 1 has True"):
        wrap(model(0), broadcast_parameters=rank == 1)
    shapes = nn.Linear(2 + rank, 2)
    shapes.weight.requires_grad_(False)
    with pytest.raises(ConfigMismatchError, match="shape of parameter 0 of the optimizer"):
        wrap(shapes, broadcast_parameters=True)
    dtypes = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16 if rank == 1 else torch.float32))
    dtypes[1].requires_grad_(False)
    with pytest.raises(ConfigMismatchError, match=r"dtype of parameter \d of the optimizer.*bfloat16"):
        wrap(dtypes, broadcast_parameters=True)
    unwritable = nn.Linear(3, 2)
    if rank == 1:
        unwritable.weight = nn.Parameter(torch.zeros(1, 1).expand(2, 3))
    with pytest.raises(RuntimeError if rank == 1 else ConfigMismatchError, match="single memory location"):
        wrap(unwritable, broadcast_parameters=True)
    group = dist.new_group([1, 2])  # its first rank is 1
    if rank > 0:
        within = model(rank)
        wrap(within, broadcast_parameters=True, process_group=group)
        assert flat(within) == flat(model(1))


def logged_choice(rank: int, world_size: int, send) -> None:
    """One line logs the choice and its savings. It is a warning if there are none."""
    lines: list[tuple[int, str]] = []

    class Listener(logging.Handler):
        """Collects the log records."""

        def emit(self, record: logging.LogRecord) -> None:
            lines.append((record.levelno, record.getMessage()))

    logger = logging.getLogger("tritoncomm")
    logger.addHandler(Listener())
    logger.setLevel(logging.INFO)
    torch.manual_seed(0)
    tritoncomm.wrap(torch.optim.SGD(nn.Linear(300, 300).parameters(), lr=0.1), density=0.01)
    tritoncomm.wrap(torch.optim.SGD(nn.Linear(300, 300).parameters(), lr=0.1), density=0.9)
    model = nn.Linear(300, 300)
    slow = tritoncomm.wrap(torch.optim.SGD(model.parameters(), lr=0.1), "spardl", density=0.01, packed=True)
    model((1 + rank) * torch.randn(2, 300)).sum().backward()
    slow.step()
    assert slow.metrics()["bytes_received"] < 2400 + 0.8 * 8 * 4 * 900 * 2 / 3  # small tensors, and what is not saved
    if rank:
        assert not lines
        return
    (level, text), (other_level, other_text), _ = lines
    assert other_level == logging.WARNING  # at density 0.9, sparse messages exceed the dense volume
    assert "density=0.9" in other_text
    assert level == logging.INFO
    assert "OkTopk(density=0.01" in text
    assert "over 3 ranks: 90,300 values, of which 300 in small tensors are sent dense" in text
    assert "each rank receives " in text
    assert " times less than the 482 kB of a dense all-reduce" in text
    assert "not less than the 482 kB of a dense all-reduce: use algo='dense'" in other_text


def nodes(rank: int, world_size: int, send) -> None:
    """With node_group, nodes average densely and exchange sparsely, like the Hierarchical recipe."""
    node = dist.new_subgroups(2)[0]
    fields = {"density": 0.2, "dense_below": 0}
    first, second, third = tiny_model(), tiny_model(), tiny_model()
    by_group = tritoncomm.wrap(torch.optim.SGD(first.parameters(), lr=0.1), node_group=node, **fields)
    recipe = tritoncomm.Hierarchical(recipe=tritoncomm.OkTopk(density=0.2), node_size=2)
    by_recipe = tritoncomm.wrap(torch.optim.SGD(second.parameters(), lr=0.1), recipe, dense_below=0)
    exact = tritoncomm.wrap(torch.optim.SGD(third.parameters(), lr=0.1), "dense", node_group=node)
    plain = tiny_model()
    for step in range(4):
        for net, optimizer in ((first, by_group), (second, by_recipe), (third, exact)):
            optimizer.zero_grad()
            loss_of(net, rank, step).backward()
            optimizer.step()
        plain.zero_grad()
        for r in range(world_size):
            (loss_of(plain, r, step) / world_size).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert flat(first) == flat(second)
    assert same_everywhere(flat(first))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(third.parameters(), plain.parameters(), strict=True))
    odd = dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True)
    with pytest.raises(ConfigurationError, match="consecutive ranks"):
        tritoncomm.wrap(torch.optim.SGD(first.parameters(), lr=0.1), node_group=odd)


def profiled(rank: int, world_size: int, send) -> Counter[str]:
    """Return how often each name is an event of a profiler in the last two of three steps, in nodes of two ranks."""
    model = tiny_model()
    group = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    optimizer = sparse_sgd(model, node_group=group)
    loss_of(model, rank, 0).backward()
    optimizer.step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for step in (1, 2):
            loss_of(model, rank, step).backward()
            optimizer.step()
    return Counter(event.name for event in profiler.events())


def zero_learning_rate(rank: int, world_size: int, send) -> None:
    """A learning rate of zero, or a rank without gradients, does not skip the exchange."""
    model = tiny_model()
    optimizer = sparse_sgd(model)
    optimizer.param_groups[0]["lr"] = 0.0
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if rank == 1 and parameter.requires_grad else None
    if rank != 1:
        loss_of(model, rank, 0).backward()
    optimizer.step()
    assert optimizer.metrics()["steps"] == 1


def rejected_then_retried(rank: int, world_size: int, send) -> None:
    """After a rejected call, or a copy on one rank only, the next attempt trains."""
    model, extra = tiny_model(), nn.Parameter(torch.ones(6))
    with pytest.raises((ConfigurationError, ConfigMismatchError)):
        sparse_sgd(model, density=0.0 if rank == 1 else 0.2)
    optimizer = sparse_sgd(model)

    def train(step: int) -> None:
        optimizer.zero_grad()
        (loss_of(model, rank, step) + extra.sum()).backward()
        optimizer.step()
        assert same_everywhere(flat(model))

    train(0)
    with pytest.raises((ConfigurationError, ConfigMismatchError)):
        optimizer.add_param_group({"params": [nn.Parameter(extra.detach() * 1j) if rank == 0 else extra]})
    optimizer.add_param_group({"params": [extra]})
    train(1)
    if rank == 2:
        copy.deepcopy(optimizer)
        pickle.loads(pickle.dumps(optimizer))  # noqa: S301 - our own
    train(2)
    copies = copy.deepcopy((model, extra, optimizer))  # a copy on all ranks has its own exchange
    model, extra, optimizer = copies
    train(3)
