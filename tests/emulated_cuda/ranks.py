"""Ranks as threads of one process, each with an emulated GPU and process groups of :mod:`emulated_cuda.nccl`."""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import tritoncomm  # noqa: F401 - its modules are patched
from tritoncomm.scheduler import failure_report, process_group, watcher
from tritoncomm.step.agree import private_group

from emulated_cuda import kernel_costs, nccl, streams
from emulated_cuda.device import CudaTensor, Gpu, current_gpu, parse_to, upload, written
from emulated_cuda.network import Network, Turn
from tritoncomm_kernels import AdamFlat, entries

# Factories that take ``device=``. The last ones copy from the host.
_FACTORIES = (
    "empty", "empty_strided", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "randperm", "eye",
    "linspace", "scalar_tensor",
)  # fmt: skip
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
_UPLOADS = ("tensor", "as_tensor", "asarray")
# Module state of the library that belongs to a process, and here to a rank: each rank has its own.
_STATE = (
    (process_group, "_exchange_ids"),
    (failure_report, "_broken"),
    (process_group, "_subgroups"),
    (private_group, "_free"),
    (watcher, "_last"),
    (entries, "_constants"),
)
TIMEOUT = timedelta(seconds=20)  # of process groups
_installing = threading.RLock()


class Died(BaseException):
    """A function of a rank raises it to end without a word, like SIGKILL."""


class RankError(RuntimeError):
    """A rank raised an exception, which is the cause. The message names the rank."""


def run(
    function: Callable[[int], Any],
    world_size: int,
    *,
    seed: int | None = 0,
    bind_device: bool = False,
    errors: bool = False,
    backend: str = nccl.BACKEND,
    network: Network | None = None,
) -> list[Any]:
    """Run ``function(rank)`` on ``world_size`` ranks, and return the results by rank.

    Each rank is a thread with a :class:`~emulated_cuda.device.Gpu` (:func:`current_gpu`). Its default process group is
    an emulated NCCL. Threads that a rank starts belong to it.

    Args:
        function: Function of the rank.
        world_size: Number of ranks.
        seed: Seed of random delays. None is without delays.
        bind_device: Whether the default group is bound to its device, as by ``init_process_group(device_id=...)``.
        errors: Whether to return exceptions as results, and to let the other ranks go on. If False, the others are
            stopped, and :class:`RankError` is raised.
        backend: Backend of the default group. "gloo" runs the same function on CPU tensors, for comparison.
        network: Further settings. Default: None, those of ``seed``.
    """
    network = network or Network(world_size, seed)
    store = dist.HashStore()
    results: list[Any] = [None] * world_size
    raised: list[tuple[int, BaseException]] = []

    def main(rank: int) -> None:
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
            if bind_device:
                dist.group.WORLD.bound_device_id = torch.device("cuda", streams.current_device())
            if backend == nccl.BACKEND:  # others wait in C++, where a turn is not given away
                network.turn.take()
            results[rank] = function(rank)
        except BaseException as error:
            results[rank] = error
            raised.append((rank, error))
            if not errors:
                network.stop(error)
        finally:
            network.turn.leave()

    _run_threads(main, world_size, network)
    if raised and not errors:
        rank, error = raised[0]
        raise RankError(f"rank {rank}: {type(error).__name__}: {error}") from error
    return results


def _run_threads(main: Callable[[int], None], world_size: int, network: Network) -> None:
    """Run ``main(rank)`` in a thread for each rank, and wait until all have ended."""
    barrier = threading.Barrier(world_size, timeout=network.limit)
    with installed(network):
        threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(world_size)]
        for rank, thread in enumerate(threads):
            thread.emulated_gpu = Gpu(f"rank {rank}")
            thread.emulated_rank = rank
            thread.emulated_barrier = functools.partial(_wait, barrier, network.turn)
            thread.start()
        for thread in threads:
            thread.join(4 * network.limit)
        stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if stuck:
        raise RankError(f"ranks {stuck} did not end")


def meet() -> None:
    """Wait for all ranks, outside of what is tested.

    A rank that fails in a step ends the step before on a rank that has not left it yet, if that one is slow.
    """
    threading.current_thread().emulated_barrier()


def _wait(barrier: threading.Barrier, turn: Turn) -> None:
    turn.leave()
    barrier.wait()
    turn.take()


@contextmanager
def alone() -> Iterator[Gpu]:
    """Give this thread an emulated GPU, without process groups."""
    thread = threading.current_thread()
    with installed(Network(1)):
        thread.emulated_gpu, thread.emulated_rank = Gpu("this thread"), 0
        try:
            yield current_gpu()
        finally:
            del thread.emulated_gpu, thread.emulated_rank


@contextmanager
def installed(network: Network) -> Iterator[None]:
    """Patch torch and the library for the ranks of ``network``, and restore everything afterwards."""
    plugins = dist.Backend._plugins
    with _installing, ExitStack() as stack:
        patch = stack.enter_context
        if nccl.BACKEND.upper() not in plugins:
            dist.Backend.register_backend(nccl.BACKEND, _refuse, extended_api=True, devices=["cuda"])
        maker = dist.Backend._BackendPlugin(lambda options, _: nccl.create(network, options), True)
        patch(mock.patch.dict(plugins, {nccl.BACKEND.upper(): maker}))
        patch(mock.patch.object(dist.distributed_c10d, "_world", _PerRank(_World)))
        for module, name in _STATE:
            patch(mock.patch.object(module, name, _PerRank(type(getattr(module, name)))))
        patch(mock.patch.object(threading.Thread, "start", _start))
        patch(mock.patch.object(process_group.ProcessGroupScheduler, "_failed", _failed))
        patch(mock.patch.object(sys, "excepthook", sys.excepthook))  # init_process_group replaces it
        for name, value in _cuda().items():
            patch(mock.patch.object(torch.cuda, name, value))
        for name in _FACTORIES + _LIKE + _UPLOADS:
            patch(mock.patch.object(torch, name, _factory(getattr(torch, name), copies=name in _UPLOADS)))
        for name, value in _methods().items():
            patch(mock.patch.object(torch.Tensor, name, value))
        if "torch.distributed.tensor" in sys.modules:  # a DTensor asks C++ for the device of its shard
            sharded = sys.modules["torch.distributed.tensor"].DTensor
            patch(mock.patch.object(sharded, "device", property(lambda self: self._local_tensor.device)))
            patch(mock.patch.object(sharded, "is_cuda", property(lambda self: self._local_tensor.is_cuda)))
        for module, name, value in _uses(kernel_costs.declared() | {AdamFlat: kernel_costs.AdamFlat}):
            patch(mock.patch.object(module, name, value))
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        try:
            yield
        finally:
            torch._C._distributed_c10d._set_thread_isolation_mode(False)


def _refuse(*_: Any) -> None:
    raise RuntimeError("the emulated NCCL is used outside of emulated_cuda.ranks")


def _uses(replacements: dict[Any, Any]) -> list[tuple[Any, str, Any]]:
    """Return where the operations are used: module, name and replacement."""
    known = {id(operation): replacement for operation, replacement in replacements.items()}
    modules = [module for name, module in sys.modules.items() if name.startswith("tritoncomm")]
    return [
        (module, key, known[id(value)])
        for module in modules
        for key, value in vars(module).items()
        if id(value) in known
    ]


def _start(self: threading.Thread) -> None:
    """Start a thread. It belongs to the rank of the thread that starts it."""
    parent = threading.current_thread()
    if hasattr(parent, "emulated_gpu") and not hasattr(self, "emulated_gpu"):
        self.emulated_gpu, self.emulated_rank = parent.emulated_gpu, parent.emulated_rank
    _THREAD_START(self)


def _failed(self: process_group.ProcessGroupScheduler, op: Any, error: BaseException) -> Exception:
    """Report a failure, but not of a rank that dies."""
    if isinstance(error, Died):
        raise error
    return _FAILED(self, op, error)


_FAILED = process_group.ProcessGroupScheduler._failed
_THREAD_START = threading.Thread.start


class _World(types.SimpleNamespace):
    """The process groups of a rank: torch's own class stores them in variables of its module."""

    def __init__(self) -> None:
        names = "pg_map pg_names pg_group_ranks pg_backend_config tags_to_pg pg_to_tag pg_coalesce_state"
        super().__init__(default_pg=None, group_count=0, comms=[], **{name: {} for name in names.split()})


class _PerRank:
    """Stands for an object of which each rank has its own. It is made at its first use in a rank."""

    def __init__(self, make: Callable[[], Any]) -> None:
        vars(self).update(_make=make, _made={}, _lock=threading.Lock())

    def _own(self) -> Any:
        rank = getattr(threading.current_thread(), "emulated_rank", -1)
        with self._lock:
            if rank not in self._made:
                self._made[rank] = self._make()
        return self._made[rank]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own(), name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._own()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own()[key] = value

    def __contains__(self, key: Any) -> bool:
        return key in self._own()

    def __len__(self) -> int:
        return len(self._own())


def _is_cuda(device: Any) -> bool:
    return device is not None and (isinstance(device, int) or torch.device(device).type == "cuda")


def _factory(make: Callable[..., torch.Tensor], *, copies: bool) -> Callable[..., torch.Tensor]:
    """Return a factory that makes tensors on the emulated GPU, and pinned ones."""

    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        device, pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
        if not _is_cuda(device):
            made = make(*args, **kwargs)
            return current_gpu().pin(made) if pinned else made
        kwargs["device"] = torch.device("cpu")
        gradient = kwargs.pop("requires_grad", False)
        made = make(*args, **kwargs)
        if isinstance(made, CudaTensor):
            return made
        gpu = current_gpu()
        if copies:
            return upload(made, make.__name__, gpu, index=streams.index_of(device)).requires_grad_(gradient)
        if not make.__name__.startswith("empty"):
            gpu.launched(make.__name__)
        return written(CudaTensor(made, gpu, index=streams.index_of(device)), make.__name__).requires_grad_(gradient)

    return create


def _methods() -> dict[str, Any]:
    """Return replacements for methods of CPU tensors."""
    original_to, original_pinned = torch.Tensor.to, torch.Tensor.is_pinned

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device, dtype, non_blocking, _, _ = parse_to(*args, **kwargs)
        if not _is_cuda(device):
            return original_to(self, *args, **kwargs)
        converted = self if dtype is None else original_to(self, dtype)
        gpu = current_gpu()
        if non_blocking and gpu.is_pinned(self):
            gpu.pin(converted)
        made = upload(converted, "to", gpu, non_blocking=non_blocking, index=streams.index_of(device))
        return made.requires_grad_(self.requires_grad)

    def pin_memory(self: torch.Tensor, *_: Any) -> torch.Tensor:
        return current_gpu().pin(self.clone())

    def is_pinned(self: torch.Tensor, *_: Any) -> bool:
        gpu = getattr(threading.current_thread(), "emulated_gpu", None)
        return original_pinned(self) if gpu is None else gpu.is_pinned(self)

    return {"to": to, "pin_memory": pin_memory, "is_pinned": is_pinned}


def _cuda() -> dict[str, Any]:
    """Return replacements for functions of ``torch.cuda``."""
    return {
        "Stream": streams.Stream,
        "Event": streams.Event,
        "StreamContext": streams.StreamContext,
        "stream": streams.StreamContext,
        "current_stream": streams.current_stream,
        "set_stream": streams.set_stream,
        "default_stream": lambda device=None: current_gpu().default_stream,
        "device": streams.OnDevice,
        "get_device_capability": lambda device=None: (8, 0),
        "current_device": streams.current_device,
        "set_device": streams.set_device,
        "synchronize": streams.synchronize,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
    }
