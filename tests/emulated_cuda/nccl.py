"""A process group that behaves as NCCL's on the tensors of :mod:`emulated_cuda.device`, between ranks that are threads.

What NCCL refuses is refused. What it leaves undefined (a buffer that is read before ``wait()``, sizes that differ) is
made visible. Sums are in rank order, as in the simulation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PythonCallbackWork

from emulated_cuda.device import CudaTensor, extent, site, spoil
from emulated_cuda.network import Network
from emulated_cuda.streams import Stream, current_stream

BACKEND = "emulated_nccl"
ABORTED = "NCCL communicator was aborted on rank {}"


class EmulatedNCCL(dist.ProcessGroup):
    """The process group. See the module.

    Attributes:
        aborted: Whether :meth:`abort` was called on this rank.
    """

    supports_splitting = True

    def __init__(self, network: Network, rank: int, size: int, ranks: Sequence[int], timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.network, self.timeout = network, timeout
        self.ranks = list(ranks) or list(range(size))
        self.global_rank = self.ranks[rank]
        self.aborted = False
        self.stream: Stream | None = None
        self._rank, self._size, self._number = rank, size, 0
        self._random = random.Random(f"{network.seed} {self.global_rank} {self.ranks}")  # noqa: S311 - delays
        self._bound: torch.device | None = None

    _device_types = property(lambda self: [torch.device("cuda")])
    pg_name = property(lambda self: dist.distributed_c10d._world.pg_names.get(self, "not registered yet"))
    group_name = pg_name
    bound_device_id = property(lambda self: self._bound, lambda self, device: setattr(self, "_bound", device))

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _get_backend(self, device: torch.device) -> EmulatedNCCL:
        if torch.device(device).type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Nothing: there are no connections."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Take part in the split of this group by which other ranks make a new one."""
        self.split()

    def split(self) -> None:
        """Meet all ranks of this group, as ``ncclCommSplit`` does."""
        self._meet("split", None)(timedelta(0))

    def abort(self) -> None:
        """End all operations of this rank in this group. Other ranks notice nothing, as with NCCL."""
        self.aborted = True
        self.network.wake_all()

    def shutdown(self) -> None:
        """Nothing: there are no connections."""

    # Collectives

    def allreduce(self, tensors: list[Any], opts: Any = None) -> Any:
        kind = _operator(opts)
        return self._collective(
            f"all_reduce {kind}", tensors, tensors, lambda found: [_combined(kind, each) for each in _columns(found)]
        )

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Any], opts: Any = None) -> Any:
        root = opts.rootRank
        return self._collective(f"broadcast from {root}", tensors, tensors, lambda found: found[root])

    def allgather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any = None) -> Any:
        _demand_sizes(outputs[0], [inputs[0].numel()] * self._size)
        return self._collective("all_gather", inputs, outputs[0], lambda found: [each[0] for each in found])

    def gather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any = None) -> Any:
        root, received = opts.rootRank, outputs[0] if outputs else []
        return self._collective(
            f"gather to {root}", inputs, received, lambda found: [each[0] for each in found][: len(received)]
        )

    def scatter(self, outputs: list[Any], inputs: list[list[Any]], opts: Any = None) -> Any:
        root, sent = opts.rootRank, inputs[0] if inputs else []
        return self._collective(
            f"scatter from {root}", sent, outputs, lambda found: [found[root][self._rank]], equal_shapes=False
        )

    def all_gather_single(self, output: Any, source: Any, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [source])

    def all_gather_single_coalesced(self, outputs: list[Any], inputs: list[Any], opts: Any = None) -> Any:
        _demand_sizes(outputs, [each.numel() * self._size for each in inputs])
        return self._collective(
            "all_gather", inputs, outputs, lambda found: [torch.cat([*map(_flat, each)]) for each in _columns(found)]
        )

    def reduce_scatter_single(self, output: Any, source: Any, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Any], inputs: list[Any], opts: Any = None) -> Any:
        kind = _operator(opts)
        _demand_sizes(inputs, [each.numel() * self._size for each in outputs])

        def share(each: Sequence[torch.Tensor]) -> torch.Tensor:
            return _combined(kind, [values.reshape(self._size, -1)[self._rank] for values in each])

        return self._collective(
            f"reduce_scatter {kind}", inputs, outputs, lambda found: [share(each) for each in _columns(found)]
        )

    def all_to_all_single(
        self, output: Any, source: Any, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        sent = list(input_splits) or [source.shape[0] // self._size] * self._size
        expected = list(output_splits) or [output.shape[0] // self._size] * self._size

        def arrived(found: list[list[Any]]) -> list[torch.Tensor]:
            parts = [values.split(splits)[self._rank] for values, splits in found]
            sizes = [part.shape[0] for part in parts]
            if sizes != expected:
                raise RuntimeError(
                    f"all_to_all_single: rank {self._rank} is sent {sizes}, expects {expected}. {_SIZES}"
                )
            return [torch.cat(parts)]

        return self._collective("all_to_all", [source], [output], arrived, sent, equal_shapes=False)

    def barrier(self, opts: Any = None) -> Any:
        work = self._collective("barrier", [], [], lambda found: [])
        return PythonCallbackWork(lambda timeout: work.wait() and _waited("barrier"))

    # torch before 2.13 calls these names.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Point to point

    def send(self, tensors: list[Any], destination: int, tag: int) -> Any:
        """Send. The tag is ignored: messages of a pair of ranks match in their order."""
        values, at = self._enqueue("send", tensors, [])
        key = self.group_name, self._rank, destination
        with self.network.lock:
            self.network.mail[key].append(values[0])
            self.network.wake(key)
        return self._deliver(tensors, [], at, lambda timeout: [])

    def recv(self, tensors: list[Any], source: int, tag: int) -> Any:
        """Receive the next message of ``source``. See :meth:`send`."""
        _, at = self._enqueue("recv", [], tensors)
        (tensor,) = tensors
        key = self.group_name, source, self._rank
        number = self.network.taken[key]
        self.network.taken[key] += 1
        box = self.network.mail[key]

        def take(timeout: timedelta) -> list[torch.Tensor]:
            what = f"message {number} of rank {source}"
            with self.network.lock:
                if not self.network.wait_for(key, lambda: len(box) > number, self, what, timeout):
                    return self._after_abort()
                message, box[number] = box[number], None
            if message.numel() != tensor.numel() or message.dtype != tensor.dtype:
                raise RuntimeError(
                    f"rank {self._rank} expects {tensor.numel()} elements of {tensor.dtype} of rank {source}, which "
                    f"sends {message.numel()} of {message.dtype}. {_SIZES}"
                )
            return [message]

        return self._deliver([], tensors, at, take)

    # How an operation works

    def _collective(
        self,
        kind: str,
        inputs: list[Any],
        outputs: list[Any],
        compute: Callable[[Any], Sequence[torch.Tensor]],
        *further: Any,
        equal_shapes: bool = True,
    ) -> Any:
        """Return the work of a collective: ``compute`` returns ``outputs`` from the ``inputs`` of all ranks."""
        values, at = self._enqueue(kind, inputs, outputs)
        shapes = "; ".join(f"{each.numel()} x {each.dtype}" for each in values) if equal_shapes else "any size"
        indices = {tensor.index for tensor in [*inputs, *outputs]}
        finish = self._meet(f"{kind} of {shapes}", [*values, *further], indices)

        def arrived(timeout: timedelta) -> Sequence[torch.Tensor]:
            found = finish(timeout)
            return compute(found) if found else []

        return self._deliver(inputs, outputs, at, arrived)

    def _enqueue(self, kind: str, inputs: list[Any], outputs: list[Any]) -> tuple[list[torch.Tensor], int]:
        """Check the tensors, and enqueue on NCCL's stream, after the current one. Return the inputs' values, and when.

        Outputs hold garbage from now on.
        """
        if self.aborted:
            raise dist.DistBackendError(ABORTED.format(self._rank))
        for tensor in [*inputs, *outputs]:
            if not isinstance(tensor, CudaTensor):
                raise RuntimeError(  # noqa: TRY004 - as torch
                    f"No backend type associated with device type {tensor.device.type} ({site()})"
                )
            if not tensor.inner.is_contiguous():
                raise ValueError(f"Tensors must be contiguous ({site()})")
        self.network.delay(self._random)
        current = current_stream()
        if self.stream is None:
            self.stream = Stream(gpu=current.gpu, name=f"NCCL stream of group {self.group_name}")
        self.stream.wait_stream(current)
        at = self.stream.enqueue()
        for tensors, write in ((inputs, False), (outputs, True)):
            for tensor in tensors:
                bounds = extent(tensor.inner)
                tensor.memory.touch(self.stream, at, lambda bounds=bounds: bounds, kind, write=write)
        values = [tensor.inner.clone() for tensor in inputs]
        for tensor in outputs:
            spoil(tensor.inner)
        return values, at

    def _meet(self, kind: str, own: Any, devices: set[int] = frozenset()) -> Callable[[timedelta], list[Any]]:
        """Bring ``own`` to the next collective of this group. Return a function that waits for that of all ranks."""
        network, number = self.network, self._number
        key = self.group_name, "collective", number
        self._number += 1
        with network.lock:
            cell = network.cells.setdefault(key, {})
            cell[self._rank] = kind, own, devices
            if len(cell) == self._size:
                network.wake(key)

        def finish(timeout: timedelta) -> list[Any]:
            what = f"collective {number} of group {self.group_name}, {kind}"
            with network.lock:
                if not network.wait_for(key, lambda: len(cell) == self._size, self, what, timeout):
                    return self._after_abort()
                network.taken[key] += 1
                if network.taken[key] == self._size:
                    del network.cells[key], network.taken[key]
                    network.changes.pop(key, None)
            kinds = [cell[rank][0] for rank in range(self._size)]
            if len(set(kinds)) > 1:
                raise RuntimeError(f"{what}: the ranks call {kinds}. NCCL would hang, or mix their data")
            used = [index for _, _, indices in cell.values() for index in indices]
            if network.several_gpus and len(used) != len(set(used)):
                raise dist.DistBackendError(f"{what}: Duplicate GPU detected: the ranks use {sorted(used)}")
            return [cell[rank][1] for rank in range(self._size)]

        return finish

    def _after_abort(self) -> list[Any]:
        if self.network.garbage_after_abort:
            return []
        raise dist.DistBackendError(ABORTED.format(self._rank))

    def _deliver(
        self,
        inputs: list[Any],
        outputs: list[Any],
        at: int,
        arrived: Callable[[timedelta], Sequence[torch.Tensor]],
    ) -> PythonCallbackWork:
        """Return the work that was enqueued at the time ``at``. Its ``wait()`` fills ``outputs``.

        Until then, it keeps all tensors, as NCCL's does.
        """
        assert self.stream is not None
        stream, seen, done, kept = self.stream, {**self.stream.seen, self.stream: at}, [], [*inputs, *outputs]

        def wait(timeout: timedelta) -> bool:
            self.network.delay(self._random)
            if not done:
                for tensor, values in zip(outputs, arrived(timeout), strict=False):
                    tensor.inner.view(-1).copy_(values.reshape(-1))
                done.append(True)
            current_stream().wait_for(seen)
            kept.clear()
            if timeout:  # it polls until the work is complete
                stream.gpu.synchronized("wait with a time-out", stream, seen)
            return True

        return PythonCallbackWork(wait)


_COMBINE = {"SUM": torch.add, "AVG": torch.add, "MAX": torch.maximum}
_SIZES = "NCCL would hang, or write outside of the buffer"


def _flat(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1)


def _columns(found: list[list[torch.Tensor]]) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*found, strict=True))


def _waited(kind: str) -> bool:
    current_stream().gpu.synchronized(kind)
    return True


def _demand_sizes(tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> None:
    found = [tensor.numel() for tensor in tensors]
    if found != list(sizes):
        raise ValueError(f"tensors have {found} elements, expected {list(sizes)}")


def _operator(opts: Any) -> str:
    """Return the name of the reduction."""
    return next(name for name in _COMBINE if opts.reduceOp == getattr(dist.ReduceOp, name))


def _combined(kind: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Combine the values of all ranks, in rank order."""
    combine = _COMBINE[kind]
    total = values[0].clone()
    for each in values[1:]:
        total = combine(total, each)
    return total / len(values) if kind == "AVG" else total


def create(network: Network, options: Any) -> EmulatedNCCL:
    """Return the process group for ``Backend.register_backend(..., extended_api=True)``."""
    ranks = list(options.global_ranks_in_group)
    group = EmulatedNCCL(network, options.group_rank, options.group_size, ranks, options.timeout)
    if ranks and dist.is_initialized():
        parent = dist.group.WORLD
        group.bound_device_id = parent.bound_device_id
        # torch makes the group by a split, in which all ranks take part.
        if parent.bound_device_id is not None and parent.supports_splitting:
            parent.split()
    return group
