"""Tensors that say they are on a GPU and compute on the CPU, and the log of what would cost time on a real one."""

from __future__ import annotations

import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tritoncomm

import tritoncomm_kernels
from emulated_cuda.streams import Memory, Stream, current_device, current_gpu, current_stream

aten = torch.ops.aten
# Where the packages are installed, and how a place in them is named.
_CODE = {
    f"{Path(tritoncomm.__file__).parent}/": "tritoncomm/",
    f"{Path(tritoncomm_kernels.__file__).parent}/": "kernels/tritoncomm_kernels/",
}
OUTSIDE = "outside of tritoncomm"
GARBAGE = 0x55  # the byte in memory whose content is not there yet


class Gpu:
    """The GPU of one rank, with the log of this rank.

    Attributes:
        syncs: Number of host synchronizations by kind, and by the file and line in ``tritoncomm/`` or ``kernels/`` that
            caused it.
        launches: Number of kernel launches by name: one for each operator that computes, and those of the table in
            ``kernel_costs.py`` for the kernels of ``tritoncomm_kernels``.
        devices: Number of calls of ``torch.cuda.current_stream`` and ``torch.cuda.synchronize`` by the index of their
            device. A call that names none means the current device. All devices have the same streams here.
        streams: All streams that are alive.
        unfinished: Functions that wait until an operation of a process group has ended, called when the host waits.
    """

    def __init__(self, name: str = "rank 0") -> None:
        self.name = name
        self.syncs: Counter[tuple[str, str]] = Counter()
        self.launches: Counter[str] = Counter()
        self.devices: Counter[int] = Counter()
        self.unfinished: list[Callable[[], object]] = []
        self.pinned: dict[int, torch.UntypedStorage] = {}
        self.host_seen: dict[Stream, int] = {}
        self.host_version = 0
        self.busy_until = 0.0  # by time.perf_counter()
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._streams = 0
        self._arriving: list[tuple[Stream, int, torch.Tensor, torch.Tensor]] = []
        self.default_stream = Stream(gpu=self, name="default stream")

    def __repr__(self) -> str:
        return f"GPU of {self.name}"

    def reset(self) -> None:
        """Forget the log."""
        self.syncs.clear()
        self.launches.clear()
        self.devices.clear()

    def keep_busy(self, seconds: float) -> None:
        """Enqueue work that takes ``seconds``. A wait of the host, and an event without timing, last until its end."""
        self.busy_until = max(self.busy_until, time.perf_counter()) + seconds

    def next_number(self) -> int:
        """Return the number of a new stream."""
        self._streams += 1
        return self._streams

    def launched(self, name: str, count: int = 1) -> None:
        """Count kernel launches."""
        if count:
            self.launches[name] += count

    def synchronized(self, kind: str, stream: Stream | None = None, seen: dict[Stream, int] | None = None) -> None:
        """Count a synchronization: the host waits for the work on ``stream``, or only for that in ``seen``."""
        self.syncs[kind, site()] += 1
        while self.unfinished:
            self.unfinished.pop()()
        if self.busy_until:
            time.sleep(max(0.0, self.busy_until - time.perf_counter()))
        stream = stream or current_stream()
        known = {**stream.seen, stream: stream.enqueue()} if seen is None else seen
        for other, at in known.items():
            if self.host_seen.get(other, 0) < at:
                self.host_seen[other] = at
        self.host_version += 1
        waiting, self._arriving = self._arriving, []
        for entry in waiting:
            source, at, target, values = entry
            if self.host_seen.get(source, 0) >= at:
                target.copy_(values)
            else:
                self._arriving.append(entry)

    def arrive_later(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Copy ``values`` to the pinned ``target`` when the host has waited for the current stream."""
        stream = current_stream()
        self._arriving.append((stream, stream.clock, target, values.clone()))
        spoil(target)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mark the memory of a CPU tensor as pinned."""
        storage = tensor.untyped_storage()
        self.pinned[storage.data_ptr()] = storage
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return True if the memory of a CPU tensor is pinned."""
        return tensor.untyped_storage().data_ptr() in self.pinned


def site() -> str:
    """Return file and line of the innermost frame in ``tritoncomm/`` or ``kernels/``, but for ``devices.py``.

    What that file calls, it calls for another one.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        for folder, shown in _CODE.items():
            if name.startswith(folder) and not name.endswith("devices.py"):
                return f"{shown}{name[len(folder) :]}:{frame.f_lineno}"
        frame = frame.f_back
    return OUTSIDE


def spoil(tensor: torch.Tensor) -> None:
    """Fill a CPU tensor with garbage."""
    if tensor.numel():
        tensor.view(-1).view(torch.uint8).fill_(GARBAGE) if tensor.is_contiguous() else tensor.fill_(GARBAGE)


class CudaTensor(torch.Tensor):
    """A tensor on an emulated GPU. ``inner`` holds its values, in CPU memory. Views share ``memory``."""

    inner: torch.Tensor
    gpu: Gpu
    memory: Memory
    index: int
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor, gpu: Gpu | None = None, memory: Memory | None = None, index: int = -1):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="cpu",
        )
        made.inner = inner
        made.gpu = gpu or current_gpu()
        made.memory = memory or Memory()
        made.index = current_device() if index < 0 else index
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    device = property(lambda self: torch.device("cuda", self.index))
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def is_pinned(self, *_: Any) -> bool:
        return False

    def record_stream(self, stream: Stream) -> None:
        """Keep the memory from being allocated again before the work that is on ``stream`` when it is freed."""
        self.memory.recorded.add(stream)

    def _read(self, kind: str) -> torch.Tensor:
        _touch(self, False, kind)
        self.gpu.synchronized(kind)
        return self.inner

    def tolist(self) -> Any:
        return self._read("tolist").tolist()

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.to("cpu")

    def numpy(self, **_: Any) -> np.ndarray:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        device, dtype, non_blocking, copy, rest = parse_to(*args, **kwargs)
        if device is None or device.type == "cuda":
            return super().to(dtype or self.dtype, copy=copy, **rest)
        if non_blocking:  # torch copies to pinned memory then
            _touch(self, False, "copy to the host")
            values = self.inner.to(dtype or self.dtype)
            pinned = self.gpu.pin(torch.empty_like(values, memory_format=torch.contiguous_format))
            self.gpu.arrive_later(pinned, values)
            return pinned
        return self._read("copy to the host").to(dtype or self.dtype, copy=True)

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False):
        made = upload(torch.tensor(data, dtype=dtype or self.dtype), "new_tensor", self.gpu, index=self.index)
        return made.requires_grad_(requires_grad)

    def resize_(self, *sizes: Any, **_: Any) -> CudaTensor:
        self.inner.resize_(*sizes)
        with torch._C._DisableTorchDispatch():
            super().set_(torch.empty(self.inner.shape, dtype=self.dtype))  # its own memory is none, and cannot grow
        return self

    def __reduce_ex__(self, protocol: int) -> Any:
        # As a file of a real tensor that is loaded with map_location="cpu".
        return self._read("pickle").detach().clone().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"CudaTensor({self.inner}, device='cuda:{self.index}')"


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU copy of a tensor, for a test: nothing is logged, and nothing is ordered."""
    return (tensor.inner if isinstance(tensor, CudaTensor) else tensor).detach().clone()


def to_gpu(tensor: torch.Tensor) -> CudaTensor:
    """Return a tensor with the same values on the GPU of this thread's rank, for a test: nothing is logged."""
    made = CudaTensor(tensor.detach().clone())
    return made.requires_grad_(tensor.requires_grad)


def written(tensor: CudaTensor, what: str) -> CudaTensor:
    """Note that the current stream has written a new ``tensor``, and return it."""
    _touch(tensor, True, what)
    return tensor


def upload(values: torch.Tensor, kind: str, gpu: Gpu, *, non_blocking: bool = False, index: int = -1) -> CudaTensor:
    """Copy a CPU tensor to the GPU. From pageable memory, or blocking, this is a synchronization."""
    made = written(CudaTensor(values.detach().clone(), gpu, index=index), kind)
    if values.numel() and not (non_blocking and gpu.is_pinned(values)):
        gpu.synchronized(f"{kind} to the device")
    return made


def parse_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, bool, bool, dict[str, Any]]:
    """Return device, dtype, non_blocking, copy and further keywords of a call of ``Tensor.to``."""
    names = ["non_blocking", "copy"]
    device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
    given = list(args)
    if given and isinstance(given[0], torch.dtype):
        dtype = given.pop(0)
    elif given:
        device = given.pop(0)
        if given and (given[0] is None or isinstance(given[0], torch.dtype)):
            dtype = given.pop(0)
    rest = {**dict(zip(names, given, strict=False)), **kwargs}
    device = torch.device("cuda", device) if isinstance(device, int) else device and torch.device(device)
    return device, dtype, bool(rest.pop("non_blocking", False)), bool(rest.pop("copy", False)), rest


@dataclass(frozen=True)
class Operator:
    """What an operator does: the positions and names of arguments that it writes, and whether it computes."""

    name: str
    writes: frozenset[int | str]
    computes: bool
    is_view: bool
    sync: tuple[str, int] | None
    indexes: bool
    copies: bool


_READS = {"_local_scalar_dense": 1, "equal": 1}
_DATA_DEPENDENT = {"nonzero": 1, "masked_select": 1, "unique_consecutive": 1, "_unique2": 1, "unique_dim": 1}
# The range of the values is read first. It is one synchronization for each of its ends.
_DATA_DEPENDENT |= {"bincount": 2}
# The length of the result, and whether a count is negative. Not with output_size.
_DATA_DEPENDENT |= {"repeat_interleave": 2}
_INDEXES = ("index", "index_put", "index_put_", "_index_put_impl_")
_NO_LAUNCH = ("detach", "alias", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")


@cache
def operator_of(func: Any) -> Operator:
    """Return what an operator of aten does."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    writes = frozenset([*written, *(schema.arguments[i].name for i in written)])
    views = bool(schema.returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    count = _READS.get(name) or _DATA_DEPENDENT.get(name)
    return Operator(
        name=name,
        writes=writes,
        is_view=views and not written,
        computes=not views and name not in (*_NO_LAUNCH, *_READS),
        sync=(name.strip("_"), count) if count else None,
        indexes=name in _INDEXES,
        copies=name in ("copy_", "_to_copy"),
    )


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte in its memory that a CPU tensor uses, and the end."""
    size = tensor.element_size()
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    low = tensor.storage_offset() * size
    return low, low + (span * size if tensor.numel() else 0)


def _touch(tensor: CudaTensor, write: bool, what: str) -> None:
    stream = current_stream()
    tensor.memory.touch(stream, stream.enqueue(), lambda: extent(tensor.inner), what, write=write)


def _taken(key: int | str, each: Any, on_gpu: list[tuple[int | str, CudaTensor]], on_host: list[torch.Tensor]) -> Any:
    """Return an argument with CPU tensors in place of those on a GPU, and collect its tensors."""
    if isinstance(each, torch.Tensor):
        if isinstance(each, CudaTensor):
            on_gpu.append((key, each))
            return each.inner
        on_host.append(each)
    elif isinstance(each, (list, tuple)):
        return type(each)([_taken(key, part, on_gpu, on_host) for part in each])
    return each


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the values, after everything that a GPU would complain about."""
    plan = operator_of(func)
    on_gpu: list[tuple[int | str, CudaTensor]] = []
    on_host: list[torch.Tensor] = []
    inner = [_taken(key, each, on_gpu, on_host) for key, each in enumerate(args)]
    named = {key: _taken(key, each, on_gpu, on_host) for key, each in kwargs.items()}
    first = on_gpu[0][1]
    if plan.is_view and len(on_gpu) == 1:
        return _views(func(*inner, **named), first)
    if on_host or len(on_gpu) > 1:
        tensors = [*(tensor for _, tensor in on_gpu), *on_host]
        check_devices(plan.name, tensors, may_copy=plan.copies or plan.indexes)
    stream = current_stream()
    at = stream.enqueue()
    if plan.computes or plan.sync:
        for key, tensor in on_gpu:
            tensor.memory.touch(stream, at, partial(extent, tensor.inner), plan.name, write=key in plan.writes)
    _count_syncs(plan, args, kwargs, first)
    if plan.copies and on_host:
        return _copy(func, args, kwargs, first.gpu)
    if "device" in named:
        named["device"] = None if named["device"] is None else torch.device("cpu")
    out = _REPLACED.get(func, func)(*inner, **named)
    if plan.computes:
        first.gpu.launches[plan.name] += 1
    return wrapped(out, [tensor for _, tensor in on_gpu], first, stream, at)


def _views(out: Any, first: CudaTensor) -> Any:
    if isinstance(out, torch.Tensor):
        return CudaTensor(out, first.gpu, first.memory, first.index)
    return type(out)([CudaTensor(each, first.gpu, first.memory, first.index) for each in out])


def wrapped(out: Any, inputs: Sequence[CudaTensor], first: CudaTensor, stream: Stream, at: int) -> Any:
    """Return the results of an operator on the GPU of ``first``: an input itself, a view of one, or a new tensor."""
    if isinstance(out, torch.Tensor):
        for tensor in inputs:
            if tensor.inner is out:
                return tensor
        where = out.untyped_storage()._cdata
        for tensor in inputs:
            if tensor.inner.untyped_storage()._cdata == where:
                return CudaTensor(out, tensor.gpu, tensor.memory, tensor.index)
        made = CudaTensor(out, first.gpu, None, first.index)
        made.memory.touch(stream, at, lambda: extent(out), "", write=True)
        return made
    if isinstance(out, tuple) and hasattr(out, "_fields"):
        return type(out)(*(wrapped(each, inputs, first, stream, at) for each in out))
    if isinstance(out, (list, tuple)):
        return type(out)(wrapped(each, inputs, first, stream, at) for each in out)
    return out


def check_devices(name: str, tensors: Sequence[torch.Tensor], *, may_copy: bool = False) -> None:
    """Raise as torch does if an operator gets tensors on several devices. A CPU scalar may be among them."""
    on_gpu = [tensor for tensor in tensors if isinstance(tensor, CudaTensor)]
    if len({(id(tensor.gpu), tensor.index) for tensor in on_gpu}) > 1:
        places = sorted({f"cuda:{tensor.index} of {tensor.gpu.name}" for tensor in on_gpu})
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {places} ({name}, {site()})")
    mixed = [tuple(tensor.shape) for tensor in tensors if not isinstance(tensor, CudaTensor) and tensor.dim()]
    if mixed and not may_copy:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"({name}, CPU tensors of shapes {mixed}, {site()})"
        )


def _count_syncs(plan: Operator, args: Sequence[Any], kwargs: dict[str, Any], first: CudaTensor) -> None:
    known = kwargs.get("output_size") is not None  # of repeat_interleave
    if plan.sync is not None and not known and (first.numel() or plan.name == "_local_scalar_dense"):
        for _ in range(plan.sync[1]):
            first.gpu.synchronized(plan.sync[0])
    if plan.indexes:
        _count_index(plan, args, first.gpu)


def _count_index(plan: Operator, args: Sequence[Any], gpu: Gpu) -> None:
    """Count the synchronizations of indexing: with a boolean mask, and with indices that are not on the device."""
    fills = plan.name != "index" and args[2].numel() == 1 and not isinstance(args[2], CudaTensor)
    if plan.name != "index" and not isinstance(args[2], CudaTensor) and args[2].dim():
        raise RuntimeError(f"Expected all tensors to be on the same device, but the values are on cpu ({site()})")
    for index in args[1]:
        if index is None or not index.numel():
            continue
        if not isinstance(index, CudaTensor):
            gpu.synchronized("index copied to the device")
        if index.dtype in (torch.bool, torch.uint8) and not fills:
            gpu.synchronized("boolean mask index")


def _copy(func: Any, args: Sequence[Any], kwargs: dict[str, Any], gpu: Gpu) -> Any:
    """Copy between host and device."""
    target, source, *rest = args
    non_blocking = bool(kwargs.get("non_blocking", rest[0] if rest else False))
    if isinstance(target, CudaTensor):
        target.inner.copy_(source)
        if target.numel() and not (non_blocking and gpu.is_pinned(source)):
            gpu.synchronized("copy to the device")
        return target
    if non_blocking and gpu.is_pinned(target):
        gpu.arrive_later(target, source.inner)
        return target
    gpu.synchronized("copy to the host")
    target.copy_(source.inner)
    return target


def _square_root(values: torch.Tensor) -> torch.Tensor:
    """Return correctly rounded roots, as a GPU does. torch's on the CPU are off by one unit in places."""
    if values.dtype not in (torch.float32, torch.float64):
        return values.sqrt()
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.asarray(np.sqrt(values.numpy())))


_REPLACED: dict[Any, Callable[..., Any]] = {
    aten.sqrt.default: _square_root,
    aten.sqrt_.default: lambda values: values.copy_(_square_root(values)),
}
