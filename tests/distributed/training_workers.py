"""Worker processes of tests/distributed/test_training.py: features of real training around the exchange."""

from __future__ import annotations

import copy
import logging
import pickle
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from helpers import flat, loss_of, residual, same_everywhere, tiny_model, total
from torch import nn
from tritoncomm import ConfigMismatchError, ConfigurationError, NonFiniteError
from tritoncomm.amp import GradScaler

import laws

sparse_wrap = partial(tritoncomm.wrap, dense_below=0, density=0.2)
SMALL = 2.0**8
ROUTES = ("step", "unscale", "synchronize")


def sgd(model: nn.Module, **fields) -> tritoncomm.SparseOptimizer:
    """Return a wrapped SGD with momentum."""
    return sparse_wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **fields)


def finish_gradients(optimizer: tritoncomm.SparseOptimizer, model: nn.Module, route: str) -> None:
    """Clip this rank's gradient, the averaged gradient, or neither."""
    if route == "synchronize":
        optimizer.synchronize()
    if route != "step":
        assert float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)) > 0.01  # it does clip


def loss_scaling(rank: int, world_size: int, send, ours: bool, route: str) -> None:
    """After an overflow on one rank, all ranks skip the step. The run equals one without these batches."""
    model, plain = tiny_model(), tiny_model()
    optimizer, unscaled = sgd(model), sgd(plain)
    make = GradScaler if ours else torch.amp.GradScaler
    scaler = make("cpu", init_scale=SMALL, growth_interval=3)
    warned = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = warned.append
    logging.getLogger("tritoncomm").addHandler(handler)
    for step in range(7):
        overflow = step in {3, 5}
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, step)).backward()
        if overflow and rank == 1:
            model[0].weight.grad[2, 1] = float("inf")
        before, residual_before = flat(model), residual(optimizer)
        if route != "step":
            scaler.unscale_(optimizer)
        finish_gradients(optimizer, model, route)
        scaler.step(optimizer)
        scaler.update()
        if overflow:
            assert flat(model) == before
            assert laws.same_bits(residual(optimizer), residual_before)
            assert optimizer.metrics()["skipped_steps"] == (1 if step == 3 else 2)
        else:
            unscaled.zero_grad()
            loss_of(plain, rank, step).backward()
            finish_gradients(unscaled, plain, route)
            unscaled.step()
        assert same_everywhere(flat(model))
        assert not ours or same_everywhere(scaler.get_scale())
    logging.getLogger("tritoncomm").removeHandler(handler)
    assert scaler.get_scale() != SMALL  # it has grown or backed off on the way
    count = sum("all scales stay equal" in record.getMessage() for record in warned)
    assert count == (0 if ours or rank == 1 else 1)  # on ranks that keep their scale
    assert flat(model) == flat(plain)
    assert laws.same_bits(residual(optimizer), residual(unscaled))


def scaled_synchronize(rank: int, world_size: int, send) -> None:
    """Averaging before unscaling is rejected."""
    model = tiny_model()
    optimizer = sgd(model)
    for make, late in ((torch.amp.GradScaler, "step"), (GradScaler, "step"), (GradScaler, "unscale_")):
        scaler = make("cpu", init_scale=SMALL)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, 0)).backward()
        optimizer.synchronize()
        with pytest.raises(RuntimeError, match="averaged scaled gradients"):
            getattr(scaler, late)(optimizer)


def autocast(rank: int, world_size: int, send) -> None:
    """Replicas agree and the loss falls with bf16 forward passes and with bf16 parameters."""
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model().to(dtype)
        optimizer = sparse_wrap(torch.optim.AdamW(model.parameters(), lr=0.01))
        losses = []
        for step in range(30):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, rank, step % 3)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0]
        assert same_everywhere(torch.cat([p.detach().float().reshape(-1) for p in model.parameters()]).tolist())
        assert residual(optimizer).dtype == torch.float32


def non_finite(rank: int, world_size: int, send) -> None:
    """All ranks skip, raise or zero together, and the error names the rank and the parameter."""
    for policy in ("skip", "raise", "zero"):
        model = tiny_model()
        optimizer = sgd(model, on_nonfinite=policy)
        named = sparse_wrap(torch.optim.SGD(tiny_model().named_parameters(), lr=0.1), on_nonfinite=policy)
        loss_of(model, rank, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, rank, 1).backward()
        if rank == 1:
            model[2].weight.grad[0, :2] = torch.tensor([float("nan"), float("inf")])
        before, residual_before = flat(model), residual(optimizer)
        if policy == "raise":
            with pytest.raises(NonFiniteError, match=r"rank 1: parameter 3 of shape \(3, 20\) \(2 values\)") as caught:
                optimizer.step()
            assert caught.value.ranks == (1,)
        else:
            optimizer.step()
        metrics = optimizer.metrics()
        assert metrics["skipped_steps"] == (policy != "zero")
        assert metrics["zeroed_values"] == (2 if policy == "zero" and rank == 1 else 0)
        if policy != "zero":
            assert flat(model) == before
            assert laws.same_bits(residual(optimizer), residual_before)
        assert same_everywhere(flat(model))
        assert residual(optimizer).isfinite().all()
        del named


def names_in_messages(rank: int, world_size: int, send) -> None:
    """Errors contain the names of parameters that were passed with names."""
    model = tiny_model()
    optimizer = sparse_wrap(torch.optim.SGD(model.named_parameters(), lr=0.1), on_nonfinite="raise")
    loss_of(model, rank, 0).backward()
    model[0].bias.grad[rank] = float("nan") if rank != 1 else 0.0
    with pytest.raises(NonFiniteError, match=r"rank 0: 0\.bias \(1 values\); rank 2: 0\.bias \(1 values\)"):
        optimizer.step()


def accumulation(rank: int, world_size: int, send) -> None:
    """Two micro-batches equal one batch, with one exchange per optimizer step."""
    model, whole = tiny_model(), tiny_model()
    optimizer, reference = sgd(model), sgd(whole)
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
    """``max_grad_norm`` clips after synchronize(). Clipping before the exchange is local and excludes the residual."""
    model, other = tiny_model(), tiny_model()
    one_line, by_hand = sgd(model, max_grad_norm=0.05), sgd(other)
    for step in range(3):
        for net, optimizer in ((model, one_line), (other, by_hand)):
            optimizer.zero_grad()
            loss_of(net, rank, step).backward()
        one_line.step()
        by_hand.synchronize()
        norm = nn.utils.clip_grad_norm_(other.parameters(), 0.05)
        by_hand.step()
        assert one_line.metrics()["grad_norm"] == float(norm) > 0.05
    assert flat(model) == flat(other)
    assert laws.same_bits(residual(one_line), residual(by_hand))

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
    return layout.gather(torch.empty(layout.numel))


def flat_values(model: nn.Module) -> torch.Tensor:
    """Return all trained parameters as a flat vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])


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
                optimizer.set_density(0.5)
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
                mean = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.requires_grad])
                rate = 0.01 if step >= 2 else 0.1
                assert torch.allclose(before - flat_values(model), rate * mean, atol=1e-6), (algo, step)
            delivered = optimizer.metrics()["density_delivered"]
            assert (delivered == 1) == (step == 0), (algo, step, delivered)
            if step == 4:
                assert delivered > 0.21, (algo, delivered)
        assert torch.equal(model[2].weight, frozen)
        assert same_everywhere(flat(model))
    with pytest.raises(ConfigMismatchError, match=r"density: rank 1 has 0\.3|density: .*rank 1 has 0\.3"):
        optimizer.set_density(0.3 if rank == 1 else 0.4)
    with pytest.raises(ConfigMismatchError if rank else ConfigurationError, match=r"density=7"):
        optimizer.set_density(0.3 if rank else 7)
    assert optimizer.recipe.density == 0.5


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
    """The optimizer applies weight decay after the exchange, so decay leaves no residual."""
    for make in (torch.optim.SGD, torch.optim.AdamW):
        model = tiny_model()
        optimizer = sparse_wrap(make(model.parameters(), lr=0.1, weight_decay=0.5))
        before = model[0].weight.detach().clone()
        for _ in range(4):
            optimizer.zero_grad()
            optimizer.step()
        assert torch.allclose(model[0].weight, before * (1 - 0.1 * 0.5) ** 4)
        assert not residual(optimizer).any()


def double_reduction(rank: int, world_size: int, send) -> None:
    """Gradients that DDP averages are not averaged again, whichever was wrapped first, also if values are rounded."""
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
        before = model.weight.detach().clone()
        with pytest.raises(
            ConfigurationError, match=r"parameter 'weight' belongs to .*tritoncomm\.wrap\(optimizer, model"
        ):
            optimizer.step()
        assert torch.equal(model.weight, before)
        assert not residual(optimizer).any()
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("tritoncomm").addHandler(handler)
    # Equal data is legal, and worth a warning.
    for step, fields in ((step, fields) for fields in ({}, rounded, quantized) for step in range(2)):
        plain = nn.Linear(4, 3)
        warned.clear()
        alike = sparse_wrap(torch.optim.SGD(plain.parameters(), lr=0.1), broadcast_parameters=True, **fields)
        plain(torch.ones(2, 4) + step * rank).sum().backward()
        alike.step()
        found = [line for line in warned if "equal in the first step" in line]
        assert len(found) == (rank == 0 and step == 0), (step, fields)
    logging.getLogger("tritoncomm").removeHandler(handler)


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
    with pytest.raises(ConfigMismatchError, match=r"broadcast_parameters=True.*parameter values"):
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
    with pytest.raises(ConfigMismatchError, match="shapes and dtypes of all parameters"):
        wrap(shapes, broadcast_parameters=True)
    dtypes = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16 if rank == 1 else torch.float32))
    dtypes[1].requires_grad_(False)
    with pytest.raises(ConfigMismatchError, match=r"shapes and dtypes of all parameters.*bfloat16"):
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
    slow = tritoncomm.wrap(torch.optim.SGD(model.parameters(), lr=0.1), "spardl", density=0.01, packed="1mbit,1us")
    model((1 + rank) * torch.randn(2, 300)).sum().backward()
    slow.step()
    assert slow.metrics()["bytes_received"] < 2400 + 0.8 * 8 * 4 * 900 * 2 / 3  # small tensors, and what is not saved
    if rank:
        assert not lines
        return
    (level, text), (other_level, other_text), (_, slow_text) = lines
    assert "messages are plain: packing pays on links below" in text
    assert "messages are packed: packing saves" in slow_text
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
    by_group.set_density(0.5)
    assert by_group.recipe.recipe.density == 0.5
    odd = dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True)
    with pytest.raises(ConfigurationError, match="consecutive ranks"):
        tritoncomm.wrap(torch.optim.SGD(first.parameters(), lr=0.1), node_group=odd)


def traced(rank: int, world_size: int, send, file: str) -> None:
    """Record two of three steps in a trace."""
    model = tiny_model()
    optimizer = sgd(model)
    loss_of(model, rank, 0).backward()
    optimizer.step()
    with tritoncomm.trace(file):
        for step in (1, 2):
            loss_of(model, rank, step).backward()
            optimizer.step()


def no_gradients_under_a_scaler(rank: int, world_size: int, send) -> None:
    """A rank without gradients takes part in the exchange and in the scaler's agreement."""
    model = tiny_model()
    optimizer = sgd(model)
    scaler = GradScaler("cpu", init_scale=SMALL)
    for step in range(3):
        optimizer.zero_grad()
        loss = scaler.scale(loss_of(model, rank, step))
        if rank != 1:
            loss.backward()
        if step == 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.metrics()["steps"] == 3
    assert same_everywhere((flat(model), scaler.get_scale()))


def zero_learning_rate(rank: int, world_size: int, send) -> None:
    """A learning rate of zero, or a rank without gradients, does not skip the exchange."""
    model = tiny_model()
    optimizer = sgd(model)
    optimizer.param_groups[0]["lr"] = 0.0
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if rank == 1 and parameter.requires_grad else None
    if rank != 1:
        loss_of(model, rank, 0).backward()
    optimizer.step()
    assert optimizer.metrics()["steps"] == 1


def policies_under_a_scaler(rank: int, world_size: int, send) -> None:
    """This library's scaler skips an overflow for any ``on_nonfinite``. With torch's, ``on_nonfinite`` decides."""
    for policy in ("zero", "raise", "skip"):
        model = tiny_model()
        optimizer = sgd(model, on_nonfinite=policy)
        scaler = GradScaler("cpu", init_scale=SMALL)
        before = flat(model)
        scaler.scale(loss_of(model, rank, 0)).backward()
        if rank == 1:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        optimizer.synchronize()
        scaler.step(optimizer)
        scaler.update()
        assert flat(model) == before, policy
        assert optimizer.metrics()["skipped_steps"] == 1, policy
        assert optimizer.metrics()["zeroed_values"] == 0, policy
        assert scaler.get_scale() == SMALL / 2
        scaler = torch.amp.GradScaler("cpu", init_scale=SMALL)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, 0)).backward()
        if rank == 1:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        with pytest.raises(NonFiniteError) if policy == "raise" else nullcontext():
            optimizer.synchronize()
        if policy != "raise":
            scaler.step(optimizer)
        assert same_everywhere(flat(model))
        assert (flat(model) == before) == (policy != "zero")


def rejected_then_retried(rank: int, world_size: int, send) -> None:
    """After a rejected call, or a copy on one rank only, the next attempt trains."""
    model, extra = tiny_model(), nn.Parameter(torch.ones(6))
    with pytest.raises((ConfigurationError, ConfigMismatchError)):
        sgd(model, density=0.0 if rank == 1 else 0.2)
    optimizer = sgd(model)

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
    optimizer.set_density(0.3)
    train(2)
    copies = copy.deepcopy((model, extra, optimizer))  # a copy on all ranks has its own exchange
    model, extra, optimizer = copies
    train(3)
