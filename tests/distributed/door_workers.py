"""Worker processes of tests/distributed/test_doors.py: optimizers wrapped around the hook of a model."""

from __future__ import annotations

import copy
import io
import logging
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from ddp_models import ddp, net
from helpers import adamw, flat, log_lines, loss_of, same_everywhere, total
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from tritoncomm import ConfigurationError, NonFiniteError
from tritoncomm.ddp import CommState, comm_hook, register
from tritoncomm.scheduler.together import run_together
from tritoncomm.step import carry_over
from tritoncomm.step.vector_exchange import ExchangeOptions, VectorExchange

import laws


def residuals(optimizer: tritoncomm.SparseOptimizer) -> dict[str, torch.Tensor]:
    """Return this rank's residuals by parameter name."""
    return optimizer.state_dict()["tritoncomm"]["residuals"]


def one_bucket_equals_wrap(rank: int, world_size: int, send) -> None:
    """With one bucket, DDP and ``wrap(model=)`` take the steps of ``wrap`` on the plain module, to the bit.

    There are two ranks, because the order of a dense sum depends on the position in the vector.
    """
    for algo, kind, options in (
        ("oktopk", torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
        ("topk_allgather", torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
        ("spardl", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ):
        model, plain = DistributedDataParallel(net()), net()
        # DDP orders parameters as their gradients become ready.
        reference = kind(list(reversed(list(plain.parameters()))), **options)
        settings = {"algo": algo, "density": 0.1, "warmup_steps": 2, "dense_below": 0}
        hooked = tritoncomm.wrap(kind(model.parameters(), **options), model=model, **settings)
        wrapped = tritoncomm.wrap(reference, **settings)
        for step in range(25):  # past the first renewal of the scale
            for each, optimizer in ((model, hooked), (plain, wrapped)):
                optimizer.zero_grad()
                loss_of(each, rank, step).backward()
                optimizer.step()
            assert flat(model.module) == flat(plain), (algo, step)
        assert hooked.metrics()["steps"] == wrapped.metrics()["steps"] == 25
        assert same_everywhere(flat(model))


def several_buckets(rank: int, world_size: int, send) -> None:
    """The aware step is taken over what each bucket delivered, and the scale survives the rebuilding of buckets."""
    model = ddp(net())
    optimizer = tritoncomm.wrap(adamw(model), model=model, density=0.1, dense_below=0)
    for step in range(45):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    vectors = optimizer._exchange.vectors
    assert len(vectors) > 1
    algorithms = [vector.feedback.algorithm.inner for vector in vectors]
    assert {type(algorithm).__name__ for algorithm in algorithms} == {"PreconditionedAlgorithm"}
    assert {algorithm.state[0].steps for algorithm in algorithms} == {45}  # one step in the first bucket
    assert any(algorithm.scale(torch.device("cpu")) is not None for algorithm in algorithms)
    states = [optimizer.state[parameter] for parameter in model.parameters()]
    assert all("last_delivered" in state for state in states)
    assert any(bool((state["last_delivered"] < 45).any()) for state in states)  # not every coordinate in every step
    assert same_everywhere(flat(model))


def buckets_keep_moments(rank: int, world_size: int, send) -> None:
    """A vector with new bounds takes over the moment of each tensor, and the scale in use."""
    options = ExchangeOptions(recipe=tritoncomm.TopkAllgather(density=0.5), by_update=True, single_worker_selects=True)
    parameters = [nn.Parameter(torch.ones(3 + i, 4)) for i in range(4)]
    whole = VectorExchange(parameters, list("abcd"), options)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(21):
        whole.flat.copy_(torch.randn(whole.flat.shape, generator=generator))
        run_together([whole.beginning()])
        whole.feedback.commit()
    parts = [
        VectorExchange(chosen, names, options) for chosen, names in ((parameters[2:], "cd"), (parameters[:2], "ab"))
    ]
    for part in parts:
        carry_over.across_layout(part, [whole])
    again = VectorExchange(parameters, list("abcd"), options)
    carry_over.across_layout(again, parts)
    moment, before = again.feedback.algorithm.inner.state[0], whole.feedback.algorithm.inner.state[0]
    assert moment == before
    assert moment.used is not None
    assert torch.equal(again.feedback.residual, whole.feedback.residual)


def registered_before(rank: int, world_size: int, send) -> None:
    """``wrap`` finds the hook by the optimizer's parameters, does not exchange again, and rejects other settings."""
    model = ddp(net())
    state = register(model, density=0.1, dense_below=0)
    optimizer = tritoncomm.wrap(adamw(model))
    assert optimizer.recipe == state.recipe
    assert state.connected
    loss_of(model, rank, 0).backward()
    sent = state.metrics()["bytes_sent_total"]
    optimizer.step()
    assert state.metrics()["bytes_sent_total"] == sent
    assert optimizer.metrics()["steps"] == 1
    with pytest.raises(ConfigurationError, match=r"density=0\.2: the model was registered with OkTopk\(density=0\.1"):
        tritoncomm.wrap(adamw(model), model=model, density=0.2)
    other = nn.Linear(3, 3)
    extra = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    with pytest.raises(ConfigurationError, match=r"2 parameters of the optimizer, the first of shape \(3, 3\)"):
        tritoncomm.wrap(extra, model=model)
    raw = ddp(net())
    raw.register_comm_hook(CommState(raw.process_group, density=0.1), comm_hook)
    found = tritoncomm.wrap(adamw(raw), model=raw)
    loss_of(raw, rank, 0).backward()
    found.step()
    late = ddp(net())
    register(late, density=0.1, dense_below=0)
    loss_of(late, rank, 0).backward()
    with pytest.raises(ConfigurationError, match="before the first backward pass"):
        tritoncomm.wrap(adamw(late), model=late)
    with pytest.raises(RuntimeError, match=r"copy optimizer\.optimizer"):
        copy.deepcopy(optimizer)


def warning_of_plain_adam(rank: int, world_size: int, send) -> None:
    """One warning names the fix for AdamW that is not wrapped. SGD and a wrapped optimizer get none."""
    with log_lines() as lines:
        for make, wrapped in ((torch.optim.AdamW, False), (torch.optim.SGD, False), (torch.optim.AdamW, True)):
            model = ddp(net())
            register(model, density=0.1, dense_below=0)
            optimizer = make(model.parameters(), lr=0.01)
            optimizer = tritoncomm.wrap(optimizer) if wrapped else optimizer
            for step in range(2):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
    warnings = [line for line in lines if "wrap(optimizer, model=ddp_model)" in line]
    assert len(warnings) == (rank == 0)
    assert all(line.startswith("AdamW treats") for line in warnings)


def life_of_a_step(rank: int, world_size: int, send) -> None:
    """Accumulation, clipping, a closure, ``zero_grad``, and a step without an exchange behave as documented."""
    model, whole = ddp(net()), ddp(net())
    settings = {"density": 0.1, "dense_below": 0}
    optimizer = tritoncomm.wrap(adamw(model), model=model, max_grad_norm=0.05, **settings)
    reference = tritoncomm.wrap(adamw(whole), model=whole, **settings)
    optimizer.step()  # without gradients, like any optimizer
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(2):
            with model.no_sync() if micro == 0 else nullcontext():
                (loss_of(model, rank, 2 * step + micro) / 2).backward()
        optimizer.synchronize()
        optimizer.step()

        def closure(step=step):
            reference.zero_grad()
            loss = sum(loss_of(whole, rank, 2 * step + micro) for micro in range(2)) / 2
            loss.backward()
            torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
            return loss

        assert reference.step(closure) > 0
    assert torch.allclose(
        torch.cat([p.reshape(-1) for p in model.parameters()]),
        torch.cat([p.reshape(-1) for p in whole.parameters()]),
        atol=1e-5,
    )
    assert optimizer.metrics()["grad_norm"] > 0.05
    before = flat(model)
    optimizer.zero_grad()
    with model.no_sync():
        loss_of(model, rank, 9).backward()
    with pytest.raises(RuntimeError, match=r"averaged no gradients since the last step.*no_sync"):
        optimizer.step()
    assert flat(model) == before
    fired: list[type] = []
    handle = register_optimizer_step_post_hook(lambda each, *_: fired.append(type(each)))
    optimizer.zero_grad()
    loss_of(model, rank, 10).backward()
    optimizer.step()
    handle.remove()
    assert fired == [tritoncomm.SparseOptimizer]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.zero_grad()
    loss_of(model, rank, 11).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def rejected_steps(rank: int, world_size: int, send) -> None:
    """After a NaN on one rank, every rank skips the step, raises, or goes on with zeros. Nothing else changes."""
    for policy in ("skip", "raise", "zero"):
        model = ddp(net())
        optimizer = tritoncomm.wrap(adamw(model), model=model, density=0.1, dense_below=0, on_nonfinite=policy)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        before, pending = flat(model), residuals(optimizer)
        optimizer.zero_grad()
        loss = loss_of(model, rank, 3)
        if rank == 1:
            model.module[0].weight.register_hook(lambda g: g.fill_(float("nan")))
        with log_lines(logging.WARNING) as lines:
            if policy == "raise":
                with pytest.raises(NonFiniteError, match=r"rank 1: 0\.weight \(240 values\)"):
                    loss.backward()
            else:
                loss.backward()
                optimizer.step()
        assert (flat(model) == before) == (policy != "zero")
        if policy != "zero":
            assert all(laws.same_bits(pending[name], now) for name, now in residuals(optimizer).items())
            assert optimizer.metrics()["skipped_steps"] == 1
        assert any("step skipped on all ranks" in line and "rank 1: 0.weight" in line for line in lines) == (
            policy == "skip"
        )
        assert all(parameter.isfinite().all() for parameter in model.parameters())


def loss_scaling(rank: int, world_size: int, send) -> None:
    """With a GradScaler the steps are those without one, and an overflow on one rank skips the step on all."""
    model, plain = ddp(net()), ddp(net())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    settings = {"density": 0.1, "dense_below": 0}
    optimizer = tritoncomm.wrap(adamw(model), model=model, scaler=scaler, **settings)
    reference = tritoncomm.wrap(adamw(plain), model=plain, **settings)
    for step in range(8):
        overflow = step == 4
        optimizer.zero_grad()
        before = flat(model)
        loss = loss_of(model, rank, step) * (float("inf") if overflow and rank == 1 else 1.0)
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if overflow:
            assert flat(model) == before
        else:
            reference.zero_grad()
            loss_of(plain, rank, step).backward()
            reference.step()
        assert same_everywhere((flat(model), scaler.get_scale()))
    assert flat(model) == flat(plain)
    assert optimizer.metrics()["skipped_steps"] == 1
    unknown = ddp(net())
    optimizer = tritoncomm.wrap(adamw(unknown), model=unknown, **settings)
    scaler.scale(loss_of(unknown, rank, 0)).backward()
    with pytest.raises(RuntimeError, match=r"wrap\(\.\.\., scaler=scaler\)"):
        scaler.step(optimizer)


def between_backward_and_step(rank: int, world_size: int, send) -> None:
    """What is delivered and not yet used cannot be saved or flushed. A scaler that was forgotten is noticed."""
    model = ddp(net())
    optimizer = tritoncomm.wrap(adamw(model), model=model, density=0.1, dense_below=0)
    optimizer.flush()  # before the first pass there is nothing to deliver
    assert optimizer.metrics()["steps"] == 0
    loss_of(model, rank, 0).backward()
    for action in (optimizer.state_dict, optimizer.flush, lambda: optimizer.set_density(0.2)):
        with pytest.raises(RuntimeError, match="have not been used yet"):
            action()
    optimizer.step()
    optimizer.state_dict()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, rank, 1)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"wrap\(\.\.\., scaler=scaler\)"):
        scaler.step(optimizer)


def rejected_while_buckets_change(rank: int, world_size: int, send) -> None:
    """A pass that is rejected while DDP changes its buckets leaves every parameter in one vector."""
    model, plain = ddp(net()), ddp(net())
    optimizer = tritoncomm.wrap(
        torch.optim.SGD(model.parameters(), lr=0.0), model=model, algo="topk_allgather", density=0.2, dense_below=0
    )
    delivered, dense = 0.0, 0.0
    for step in range(5):
        optimizer.zero_grad()
        plain.zero_grad()
        bad = step == 1
        loss = loss_of(model, rank, step)
        handle = model.module[0].weight.register_hook(lambda g: g * float("nan")) if bad and rank == 1 else None
        loss.backward()
        if handle is not None:
            handle.remove()
        names = optimizer.state_dict()["tritoncomm"]["algorithm"]["layout"] if bad else []
        assert len({name for part in names for name in part}) == sum(map(len, names))
        optimizer.step()
        if not bad:
            loss_of(plain, rank, step).backward()
            delivered = delivered + torch.cat([p.grad.reshape(-1) for p in model.parameters()])
            dense = dense + torch.cat([p.grad.reshape(-1) for p in plain.parameters()])
    pending = residuals(optimizer)
    left = total(torch.cat([pending[name] for name, _ in model.module.named_parameters()])) / world_size
    assert torch.allclose(delivered + left, dense, atol=1e-5)
    assert len(optimizer._exchange.vectors) > 1


def resume(rank: int, world_size: int, send) -> None:
    """Save, load and continue equals never stopped, to the bit, also through ``tritoncomm.checkpoint``."""
    settings = {"density": 0.1, "dense_below": 0, "warmup_steps": 2}

    def train(model: nn.Module, optimizer: tritoncomm.SparseOptimizer, first: int, last: int) -> None:
        for step in range(first, last):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()

    model = ddp(net())
    optimizer = tritoncomm.wrap(adamw(model), model=model, **settings)
    train(model, optimizer, 0, 23)
    file = io.BytesIO()
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, 23, 30)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = net(seed=1)
    again.load_state_dict(saved["model"])
    again = ddp(again)
    resumed = tritoncomm.wrap(adamw(again), model=again, **settings)
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.state_dict()["tritoncomm"]["checksum"] == saved["optimizer"]["tritoncomm"]["checksum"]
    train(again, resumed, 23, 30)
    assert flat(again) == flat(model)
    left, right = residuals(optimizer), residuals(resumed)
    assert all(laws.same_bits(left[name], right[name]) for name in left)
    with pytest.raises(ConfigurationError, match="saved by the hook of a model"):
        tritoncomm.wrap(adamw(net()), broadcast_parameters=True, **settings).load_state_dict(saved["optimizer"])


def density_and_flush(rank: int, world_size: int, send) -> None:
    """``set_density`` keeps residuals, and ``flush`` leaves none and moves the parameters by them."""
    model = ddp(net())
    optimizer = tritoncomm.wrap(torch.optim.SGD(model.parameters(), lr=1.0), model=model, density=0.1, dense_below=0)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        if step == 2:
            pending = residuals(optimizer)
            optimizer.set_density(0.3)
            assert all(laws.same_bits(pending[name], now) for name, now in residuals(optimizer).items())
    assert optimizer.recipe.density == 0.3
    assert 0.2 < optimizer.metrics()["density_delivered"] < 0.5
    pending = residuals(optimizer)
    names = [name for name, _ in model.module.named_parameters()]
    update = total(torch.cat([pending[name] for name in names])) / world_size
    before = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    optimizer.flush()
    after = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert torch.allclose(before - after, update, atol=1e-6)
    assert not any(left.any() for left in residuals(optimizer).values())
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizer.zero_grad()
    loss_of(model, rank, 9).backward()
    optimizer.step()


def new_module_after_a_lost_rank(rank: int, world_size: int, send) -> None:
    """A new DDP module around the same module continues in a smaller group with the residuals of its ranks."""
    model = ddp(net())
    optimizer = tritoncomm.wrap(adamw(model), model=model, density=0.1, dense_below=0)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    pending = residuals(optimizer)
    survivors = dist.new_group([0, 2])
    if rank != 1:
        with pytest.raises(ConfigurationError, match="pass model=, the new DistributedDataParallel"):
            optimizer.reset_process_group(survivors)
        model = ddp(model.module, process_group=survivors)
        optimizer.reset_process_group(model=model)
        kept = residuals(optimizer)
        assert all(torch.allclose(kept[name], pending[name] * 2 / 3) for name in pending)
        for step in range(3, 6):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        with pytest.raises(RuntimeError, match="were not reset"):  # the new module is watched, too
            loss_of(model, rank, 6).backward()
        optimizer.zero_grad()
        everybody = [None, None]
        dist.all_gather_object(everybody, flat(model), group=survivors)
        assert everybody[0] == everybody[1]
        assert optimizer.metrics()["steps"] == 6
    dist.barrier()


def ddp_options(rank: int, world_size: int, send) -> None:
    """DDP's options train, frozen parameters stay, and what cannot work is refused by name."""
    for fields in ({"gradient_as_bucket_view": True}, {"static_graph": True}):
        module = net()
        module[2].bias.requires_grad_(False)
        kept = module[2].bias.detach().clone()
        model = ddp(module, **fields)
        optimizer = tritoncomm.wrap(adamw(model), model=model, density=0.1, dense_below=0)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        assert torch.equal(module[2].bias, kept)
        assert same_everywhere(flat(model))
    model = ddp(net(), find_unused_parameters=True)
    with pytest.raises(ConfigurationError, match="find_unused_parameters=True: DDP discards"):
        tritoncomm.wrap(adamw(model), model=model)
    model = ddp(net())
    optimizer = tritoncomm.wrap(adamw(model), model=model, density=0.1, dense_below=0)
    group = {"params": list(nn.Linear(2, 2).parameters())}
    with pytest.raises(ConfigurationError, match="not in the model"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    plain = net()  # a plain module as model: the optimizer exchanges
    optimizer = tritoncomm.wrap(adamw(plain), model=plain, density=0.1, dense_below=0)
    loss_of(plain, rank, 0).backward()
    optimizer.step()
    assert optimizer.metrics()["bytes_sent"] > 0


def one_worker(rank: int, world_size: int, send) -> None:
    """With one worker every door takes the steps of the bare optimizer, to the bit, in any dtype."""
    for dtype in (torch.float32, torch.float64):
        plain, hooked, stepped, sharded = net().to(dtype), ddp(net().to(dtype)), net().to(dtype), net().to(dtype)
        grid = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        fully_shard(sharded, mesh=grid["shard"])
        bare = adamw(plain)
        settings = {"density": 0.01, "dense_below": 0}
        replicas = grid["replicate"].get_group()
        optimizers = [
            tritoncomm.wrap(adamw(hooked), model=hooked, **settings),
            tritoncomm.wrap(adamw(stepped), **settings),
            tritoncomm.wrap(adamw(sharded), model=sharded, process_group=replicas, **settings),
        ]
        for step in range(5):
            for model, optimizer in zip((plain, hooked, stepped, sharded), (bare, *optimizers), strict=True):
                optimizer.zero_grad()
                generator = torch.Generator().manual_seed(step)
                x, y = (torch.randn(8, n, generator=generator).to(dtype) for n in (6, 3))
                (model(x) - y).square().mean().backward()
                optimizer.step()
        for p, q, r in zip(plain.parameters(), hooked.parameters(), stepped.parameters(), strict=True):
            assert torch.equal(p, q)
            assert torch.equal(p, r)
        for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
            assert torch.equal(p, q.full_tensor())
        assert [optimizer.metrics()["residual_norm"] for optimizer in optimizers] == [0, 0, 0]
