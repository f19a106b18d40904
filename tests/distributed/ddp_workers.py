"""Worker processes of tests/distributed/test_ddp.py: registering, exchanging, resuming, and losing a rank."""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
import signal
import threading
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from ddp_models import HeadFirst, ddp, net, residuals
from helpers import flat, log_lines, loss_of, same_everywhere, total
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel
from tritoncomm import ConfigurationError, PeerLostError
from tritoncomm.ddp import CommState, comm_hook, register

import laws


def dense_equals_ddp(rank: int, world_size: int, send) -> None:
    """Density 1 and the dense method give the same gradients as DDP without a hook, with every relevant DDP option."""
    for fields in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}):
        for recipe in ({"algo": "dense"}, {"algo": "oktopk", "density": 1.0}):
            plain, hooked = ddp(net(), **fields), ddp(net(), **fields)
            register(hooked, **recipe)
            for step in range(3):
                for model in (plain, hooked):
                    model.zero_grad()
                    loss_of(model, rank, step).backward()
                for p, q in zip(plain.parameters(), hooked.parameters(), strict=True):
                    assert torch.allclose(p.grad, q.grad, atol=1e-6), fields


def conservation(rank: int, world_size: int, send) -> None:
    """For every method, delivered gradients plus residuals equal the dense sum while DDP rebuilds its buckets."""
    algos = ("oktopk", "spardl", "exdyna", "topk_allgather", "topk_dsa", "gtopk", "random_k", "gaussiank")
    for build, algo in [*((net, algo) for algo in algos), (HeadFirst, "oktopk"), (HeadFirst, "exdyna")]:
        model, plain = ddp(build()), ddp(build())
        state = register(model, algo, density=0.1, dense_below=0)
        delivered, dense = 0, 0
        buckets = []
        for step in range(5):
            model.zero_grad()
            plain.zero_grad()
            loss_of(model, rank, step).backward()
            loss_of(plain, rank, step).backward()
            delivered = delivered + torch.cat([p.grad.reshape(-1) for p in model.parameters()])
            dense = dense + torch.cat([p.grad.reshape(-1) for p in plain.parameters()])
            buckets.append([tuple(vector.names) for vector in state.exchange.vectors])
        assert set(buckets[0]) != set(buckets[1]), "DDP is expected to rebuild its buckets"
        assert len(buckets[1]) > 1
        assert set(buckets[1]) == set(buckets[-1])
        residual = torch.cat([residuals(state)[name].reshape(-1) for name, _ in model.module.named_parameters()])
        assert residual.any()
        assert torch.allclose(delivered + total(residual) / world_size, dense, atol=1e-5), algo
        assert same_everywhere(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).tolist())
        metrics = state.metrics()
        assert metrics["steps"] == 5
        assert metrics["bytes_sent"] > 0
        assert 0.05 < metrics["density_delivered"] < 0.35, (algo, metrics["density_delivered"])
        assert all(isinstance(value, float) for value in metrics.values())


def warm_up(rank: int, world_size: int, send) -> None:
    """Every bucket is dense in the steps of the warm-up, and sparse after them, also one that DDP has rebuilt."""
    for build in (net, HeadFirst):
        model = ddp(build())
        state = register(model, density=0.1, dense_below=0, warmup_steps=3)
        for step in range(5):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            delivered = [vector.density_delivered() for vector in state.exchange.vectors]
            assert all((each == 1) == (step < 3) for each in delivered), (build.__name__, step, delivered)
        assert len(delivered) > 1


def training(rank: int, world_size: int, send) -> None:
    """The loss falls about as with dense averaging, also after a warm-up."""
    finals = []
    for recipe in ({"algo": "dense"}, {"algo": "oktopk", "density": 0.2, "warmup_steps": 5, "dense_below": 0}):
        model = ddp(net())
        state = register(model, **recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(60):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step % 4)
            loss.backward()
            optimizer.step()
            if step in (2, 9):
                assert (state.metrics()["density_delivered"] == 1) == (recipe["algo"] == "dense" or step == 2)
        assert same_everywhere(flat(model))
        finals.append(float(total(loss.detach())))
    assert finals[1] < 1.5 * finals[0] + 0.1


def exchange_thread(rank: int, world_size: int, send) -> None:
    """The exchange runs in its own thread."""
    model = ddp(net())
    state = register(model, density=0.1)
    threads = set()
    average = state._average_ready

    def spy(*arguments, **fields):
        threads.add(threading.current_thread().name)
        return average(*arguments, **fields)

    state._average_ready = spy
    loss_of(model, rank, 0).backward()
    assert threads == {"tritoncomm_0"}


def accumulation(rank: int, world_size: int, send) -> None:
    """Under no_sync() there is one exchange. Without it, an error names no_sync(), and training can continue."""
    model, whole = ddp(net()), ddp(net())
    state, reference = register(model, density=0.1), register(whole, density=0.1)
    for step in range(3):
        model.zero_grad(set_to_none=step != 1)
        whole.zero_grad()
        for micro in range(3):
            with model.no_sync() if micro < 2 else nullcontext():
                (loss_of(model, rank, 3 * step + micro) / 3).backward()
        (sum(loss_of(whole, rank, 3 * step + micro) for micro in range(3)) / 3).backward()
        for name, residual in residuals(reference).items():
            assert torch.allclose(residuals(state)[name], residual, atol=1e-6)
    assert state.metrics()["steps"] == 3
    with pytest.raises(RuntimeError, match="no_sync"):
        loss_of(model, rank, 9).backward()
    loss = loss_of(model, rank, 10)
    model.zero_grad()  # after the forward pass, as many training loops do
    loss.backward()
    assert state.metrics()["steps"] == 4


def raw_accumulation(rank: int, world_size: int, send) -> None:
    """With the raw hook and without no_sync(), delivered gradients plus residuals equal the dense sum."""
    model, plain = ddp(net()), ddp(net())
    state = CommState(algo="topk_allgather", density=0.1, dense_below=0)
    model.register_comm_hook(state, comm_hook)
    delivered, dense = 0.0, 0.0
    for step in range(3):
        model.zero_grad()
        plain.zero_grad()
        for micro in range(3):
            loss_of(model, rank, 3 * step + micro).backward()
            loss_of(plain, rank, 3 * step + micro).backward()
        delivered = delivered + torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        dense = dense + torch.cat([p.grad.reshape(-1) for p in plain.parameters()])
    by_parameter = {id(p): left for e in state.exchange.vectors for p, left in e.residuals_by_parameter().items()}
    left = torch.cat([by_parameter[id(p)].reshape(-1) for p in model.module.parameters()])
    assert torch.allclose(delivered + total(left) / world_size, dense, atol=1e-5)


def killed(rank: int, world_size: int, send) -> None:
    """If a rank dies in the exchange of a bucket, backward() raises on the others, and residuals do not change.

    The others continue in a new group, with a new DDP module around the same module.
    """
    model = ddp(net())
    state = register(model, density=0.1, dense_below=0, timeout=timedelta(seconds=5))
    optimizer = tritoncomm.wrap(torch.optim.AdamW(model.parameters(), lr=0.01))
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    optimizer.zero_grad()
    before, pending = flat(model), residuals(state)
    if rank == 1:
        scheduler = state.exchange.vectors[0].scheduler
        scheduler._perform = lambda op: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match=r"step \d+, round \d+, phase .* of oktopk.*lost rank 1") as caught:
        loss_of(model, rank, 2).backward()
    assert caught.value.peers == (1,)
    assert flat(model) == before
    assert all(laws.same_bits(pending[name], now) for name, now in residuals(state).items())
    optimizer.zero_grad()
    with pytest.raises(PeerLostError):  # the next pass raises as well, instead of a hang
        loss_of(model, rank, 3).backward()
    send((rank, "named"))
    group = dist.new_group([0, 2], timeout=timedelta(seconds=20), use_local_synchronization=True)
    model = DistributedDataParallel(model.module, process_group=group, init_sync=False)
    optimizer.reset_process_group(model=model)
    kept = residuals(state)
    assert all(torch.allclose(kept[name], pending[name] * 2 / 3) for name in pending)
    for step in range(2, 5):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    everybody = [None, None]
    dist.all_gather_object(everybody, flat(model), group=group)
    send((rank, "continued" if everybody[0] == everybody[1] != before else "diverged"))
    os._exit(0)


def changed_density(rank: int, world_size: int, send) -> None:
    """After set_density() and flush(), delivered gradients plus residuals still equal the dense sum."""
    model, plain = ddp(net()), ddp(net())
    state = register(model, "topk_allgather", density=0.05, dense_below=0)
    names = [name for name, _ in model.module.named_parameters()]
    delivered, dense, shares = 0.0, 0.0, []
    for step in range(6):
        if step == 3:
            pending = residuals(state)
            state.set_density(0.5)
            assert all(laws.same_bits(pending[name], now) for name, now in residuals(state).items())
        model.zero_grad()
        plain.zero_grad()
        loss_of(model, rank, step).backward()
        loss_of(plain, rank, step).backward()
        delivered = delivered + torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        dense = dense + torch.cat([p.grad.reshape(-1) for p in plain.parameters()])
        shares.append(state.metrics()["density_delivered"])
    assert max(shares[:3]) < 0.3 < min(shares[3:])
    left = total(torch.cat([residuals(state)[name].reshape(-1) for name in names])) / world_size
    assert torch.allclose(delivered + left, dense, atol=1e-5)
    state.flush()
    rest = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    assert torch.allclose(rest, left, atol=1e-6)
    assert not any(now.any() for now in residuals(state).values())
    with pytest.raises(tritoncomm.ConfigMismatchError, match="density"):
        state.set_density(0.1 if rank else 0.2)
    assert state.recipe.density == 0.5


def small_tensors(rank: int, world_size: int, send) -> None:
    """Biases and norms are sent dense with any buckets of DDP, and the choice is logged once."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    model = DistributedDataParallel(inner, bucket_cap_mb=0.0001)  # a bucket for every tensor
    with log_lines() as logged:
        state = register(model, "topk_allgather", density=0.01, dense_below=10)
        for step in range(3):
            model.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(4, 64, generator=generator)).square().sum().backward()
    assert {name for name, left in residuals(state).items() if not left.any()} == {
        name for name, parameter in inner.named_parameters() if parameter.dim() <= 1
    }
    chosen = [line for line in logged if "values, of which 256 in small tensors are sent dense" in line]
    assert len(chosen) == (rank == 0)


def resume(rank: int, world_size: int, send) -> None:
    """A resumed run equals an uninterrupted one to the bit. Damaged and foreign states are rejected."""
    recipe = {"density": 0.1, "warmup_steps": 2, "dense_below": 0}
    model = ddp(net())
    state = register(model, **recipe)
    for step in range(4):
        model.zero_grad()
        loss_of(model, rank, step).backward()
    assert len(state.exchange.vectors) > 1
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = ddp(copy.deepcopy(model.module))
    resumed = register(again, **recipe)
    for field, value in (("rank", 7), ("world_size", 9), ("checksum", "0")):
        with pytest.raises(ConfigurationError):
            resumed.load_state_dict(saved | {field: value})
    with pytest.raises(tritoncomm.ConfigMismatchError if rank else ConfigurationError, match="rank=8"):
        resumed.load_state_dict(saved if rank else saved | {"rank": 8})
    resumed.load_state_dict(saved)
    assert resumed.state_dict()["checksum"] == saved["checksum"]  # saved again before the first pass
    for step in range(4, 8):
        for each in (model, again):
            each.zero_grad()
            loss_of(each, rank, step).backward()
        for p, q in zip(model.parameters(), again.parameters(), strict=True):
            assert laws.same_bits(p.grad, q.grad)
    assert resumed.metrics()["density_delivered"] < 0.5  # the warm-up is over
    assert resumed.state_dict()["checksum"] == state.state_dict()["checksum"]
    resumed.load_state_dict(saved)  # between two passes
    again.zero_grad()
    assert resumed.state_dict()["checksum"] == saved["checksum"]
    unused = register(ddp(net()), **recipe)
    unused.load_state_dict(register(ddp(net()), **recipe).state_dict())  # from before the first pass
    raw = CommState(algo="oktopk", **recipe)  # it learns the names of parameters in the first pass
    raw.load_state_dict(saved)
    assert raw.state_dict()["checksum"] == saved["checksum"]
    copied = pickle.loads(pickle.dumps(state))  # noqa: S301 - our own
    assert copied.recipe == state.recipe
    assert copied.metrics()["steps"] == 0


def mismatched_settings(rank: int, world_size: int, send) -> None:
    """backward() raises an error on every rank that names the different setting."""
    model = ddp(net())
    register(model, density=0.2 if rank == 1 else 0.1)
    with pytest.raises(tritoncomm.ConfigMismatchError, match=r"recipe: .*rank 1 has"):
        loss_of(model, rank, 0).backward()
    with pytest.raises(ConfigurationError, match="DDP discards the entries"):
        register(ddp(net(), find_unused_parameters=True))
    with pytest.raises(ConfigurationError, match=r"register\(\) has no argument 'densty' \(did you mean 'density'\?\)"):
        register(ddp(net()), densty=0.1)
    with pytest.raises(ConfigurationError, match=r"model is a Sequential: pass the DistributedDataParallel"):
        register(net())


def hooks_that_torch_rejects(rank: int, world_size: int, send) -> None:
    """comm_hook avoids everything that register_comm_hook() rejects."""

    def misnamed(state, stuff):
        return stuff

    def as_text(state, bucket: dist.GradBucket):
        return bucket

    class Callable_:  # noqa: N801 - a callable without a name
        """A hook without ``__name__``."""

        def __call__(self, state, bucket):
            return bucket

    partly = partial(comm_hook)
    for hook, error in (
        (misnamed, KeyError), (as_text, ValueError), (Callable_(), AttributeError), (partly, AttributeError),
    ):  # fmt: skip
        with pytest.raises(error):
            ddp(net()).register_comm_hook(None, hook)

    class Owner:
        """Its method is a hook, which DDP accepts."""

        def hook(self, state, bucket):
            return comm_hook(state, bucket)

    bound, plain = ddp(net()), ddp(net())
    bound.register_comm_hook(CommState(algo="dense"), Owner().hook)
    for model in (bound, plain):
        loss_of(model, rank, 0).backward()
    for p, q in zip(bound.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, atol=1e-6)
    wrapped = bf16_compress_wrapper(comm_hook)
    with pytest.raises((RuntimeError, TypeError, ValueError), match=r"(?i)bf16"):  # DDP checks the name only
        ddp(net()).register_comm_hook(CommState(), wrapped)
    work = dist.isend(torch.ones(1), (rank + 1) % world_size)
    with pytest.raises(RuntimeError):  # the hook must therefore create its own future
        work.get_future()
    dist.recv(torch.ones(1), (rank - 1) % world_size)
    work.wait()
    model = ddp(net())
    register(model)
    with pytest.raises(RuntimeError, match="only be called once"):
        register(model)
    assert comm_hook.__name__ not in ("bf16_compress_hook", "bf16_compress_wrapper_hook")


def nodes(rank: int, world_size: int, send) -> None:
    """With node_group, nodes average densely. With the dense method between nodes, the result equals DDP's."""
    node = dist.new_subgroups(2)[0]
    plain, exact, sparse = ddp(net()), ddp(net()), ddp(net())
    register(exact, "dense", node_group=node)
    state = register(sparse, density=0.1, node_group=node, dense_below=0)
    delivered, dense = 0, 0
    for step in range(3):
        for model in (plain, exact, sparse):
            model.zero_grad()
            loss_of(model, rank, step).backward()
        for p, q in zip(plain.parameters(), exact.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, atol=1e-6)
        delivered = delivered + torch.cat([p.grad.reshape(-1) for p in sparse.parameters()])
        dense = dense + torch.cat([p.grad.reshape(-1) for p in plain.parameters()])
    residual = torch.cat([residuals(state)[name].reshape(-1) for name, _ in sparse.module.named_parameters()])
    assert torch.allclose(delivered + total(residual) / world_size, dense, atol=1e-5)


def one_worker(rank: int, world_size: int, send) -> None:
    """A single worker trains as the bare optimizer does, to the bit, whatever bare DDP allows."""
    for kind in ("accumulation", "no sync", "twice", "join", "unused"):
        assert _trained_alone(kind, rank, wrapped=True) == _trained_alone(kind, rank, wrapped=False), kind


def _trained_alone(kind: str, rank: int, *, wrapped: bool) -> list[int]:
    model = net()
    if kind == "unused":
        model.register_parameter("extra", nn.Parameter(torch.ones(9)))
    hooked = ddp(model, find_unused_parameters=kind == "unused")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if wrapped:
        optimizer = tritoncomm.wrap(optimizer, model=hooked)
    with hooked.join() if kind == "join" else nullcontext():
        for step in range(4):
            optimizer.zero_grad()
            with hooked.no_sync() if kind == "no sync" else nullcontext():
                for micro in range(2 if kind in ("accumulation", "no sync") else 1):
                    loss_of(hooked, rank, 2 * step + micro).backward()
            for _ in range(2 if kind == "twice" else 1):
                optimizer.step()
    return flat(model)


def one_worker_unscales(rank: int, world_size: int, send) -> None:
    """A single worker divides gradients that no pass has averaged by the loss scale in every step."""

    def trained(*, wrapped: bool) -> list[int]:
        model = ddp(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        if wrapped:
            optimizer = tritoncomm.wrap(optimizer, model=model, scaler=scaler)
        for step in range(4):
            model.zero_grad()
            with model.no_sync():
                scaler.scale(loss_of(model, rank, step)).backward()
            scaler.step(optimizer)
            scaler.update()
        return flat(model)

    assert trained(wrapped=True) == trained(wrapped=False)


def one_worker_skips(rank: int, world_size: int, send) -> None:
    """A single worker skips a step with NaN, also if no pass has averaged the gradients, or the step is repeated."""
    model = ddp(net())
    optimizer = tritoncomm.wrap(torch.optim.AdamW(model.parameters(), lr=0.01), model=model)
    before = flat(model)
    for context in (nullcontext(), model.no_sync()):
        optimizer.zero_grad()
        with context:
            (loss_of(model, rank, 0) * math.nan).backward()
        for _ in range(2):
            optimizer.step()
    assert flat(model) == before
    optimizer.zero_grad()
    loss_of(model, rank, 0).backward()
    optimizer.step()
    assert flat(model) != before
