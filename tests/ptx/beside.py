"""Runs each launch on a GPU also in the executor, from the same text and the same memory, and compares all bits.

``TRITONCOMM_PTX=gpu`` installs it: tests of kernels on a GPU then are tests of the executor, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ptx.launch import EXECUTOR, Bound, asked, parsed, remember
from ptx.memory import ViolationError

GPU = "gpu"  # the value of the variable
THREADS = 1 << 16  # of a launch; a larger one would take the executor minutes

compared: Counter[str] = Counter()  # launches by kernel
left_out: Counter[str] = Counter()  # those that were too large, or must not wait


class Twins:
    """Copies on the CPU of the memory of tensors, made when a tensor is first asked for."""

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of a copy, with the place and strides of ``tensor``."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._pairs:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._pairs[storage.data_ptr()] = whole, whole.to("cpu", copy=True)
        copied = self._pairs[storage.data_ptr()][1].untyped_storage()
        found = torch.empty(0, dtype=tensor.dtype)
        return found.set_(copied, tensor.storage_offset(), tensor.size(), tensor.stride())

    def differences(self) -> list[str]:
        """Return where the memory of the tensors now differs from the copies."""
        found = []
        for number, (whole, copy) in enumerate(self._pairs.values()):
            other = (whole.cpu() != copy).nonzero().flatten().tolist()
            if other:
                found.append(f"{len(other)} bytes of storage {number} of {copy.numel()}, the first at {other[0]}")
        return found


def compare(launch: Callable[[], Any], grid: tuple[int, ...], arguments: dict[str, Any]) -> Any:
    """Call ``launch``, run the text of the kernel that it returns in the executor, and compare.

    Raise :class:`ViolationError` if a check of the executor fails, or if it leaves other bits in any tensor.
    """
    twins, values, reachable = Twins(), {}, {}
    for name, value in arguments.items():
        values[name] = twins.of(value) if isinstance(value, torch.Tensor) else value
        if isinstance(value, torch.Tensor) and value.dtype == torch.int64:  # maybe a table of addresses
            reachable |= {at: twins.of(asked[at]) for at in {*value.flatten().tolist()} & asked.keys()}
    launched = launch()
    kernel = parsed(launched.asm["ptx"])
    passed = [(values[name], kind) for name, kind in launched.src.signature.items() if kind != "constexpr"]
    EXECUTOR.launch_bound(Bound(kernel, launched.metadata.shared, (*grid, 1, 1)[:3], passed, reachable))
    if found := twins.differences():
        raise ViolationError("gpu", f"{kernel.name}: the GPU has left other bits: {'; '.join(found)}")
    compared[kernel.name] += 1
    return launched


@cache
def install() -> None:
    """Compare all launches of this process."""
    from triton.runtime.jit import JITFunction

    on_gpu = JITFunction.run

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        def launch() -> Any:
            return on_gpu(self, *arguments, grid=grid, warmup=warmup, **options)

        programs = torch.Size(grid).numel()
        too_large = programs * 32 * options.get("num_warps", 4) > THREADS
        must_not_wait = torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode()
        if warmup or too_large or must_not_wait:
            left_out[self.__name__] += 1
            return launch()
        return compare(launch, tuple(grid), dict(zip(self.arg_names, arguments, strict=False)) | options)

    JITFunction.run = run
    torch.Tensor.data_ptr = remember
