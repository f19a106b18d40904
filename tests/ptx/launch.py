"""Takes the place of Triton's launcher: kernels are specialized and compiled as for a GPU, and run on CPU tensors.

Call :func:`install` before the first launch. Triton's interpreter must be off.
"""

from __future__ import annotations

import os
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ptx.machine import Machine, Order
from ptx.memory import DISTURBANCES, POISON, Contested, Memory, Range, Space, ViolationError
from ptx.operations import UNSIGNED, width_of
from ptx.parse import Kernel, parse

VARIABLE = "TRITONCOMM_PTX"
TARGETS = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
# The first is lock step, and with 8 turns one warp runs after the other. A deep run has all.
ORDERS = tuple(Order(seed, turns) for seed, turns in enumerate((1, 2, 3, 8, 1, 2, 4, 8)))
APART = 1 << 48  # between the addresses of two arguments; real addresses are below
REMEMBERED = 4096  # tensors whose address was asked for

parsed = cache(parse)
asked: OrderedDict[int, torch.Tensor] = OrderedDict()  # by address: only these can be in a table of addresses
address_of = torch.Tensor.data_ptr


@dataclass
class Executor:
    """How kernels are run, and what was found. ``change`` may replace the text of a kernel, given its name."""

    target: str = "sm_90"
    orders: tuple[Order, ...] = ORDERS[:3]
    change: Callable[[str, str], str] = lambda name, text: text
    launched: Counter[str] = field(default_factory=Counter)

    def launch(self, text: str, shared: int, grid: tuple[int, int, int], arguments: list[tuple[Any, str]]) -> None:
        """Run a launch in every order. ``arguments`` are values and Triton's types, without constants.

        Raises :class:`ViolationError` if a check fails, or if an order gives other bits than the first.
        """
        name = re.search(r"\.entry (\w+)", text)[1]
        self.launch_bound(Bound(parsed(self.change(name, text)), shared, grid, arguments))

    def launch_bound(self, bound: Bound) -> None:
        """Do as :meth:`launch` with a kernel that has its arguments."""
        kernel = bound.kernel
        self.launched[kernel.name] += 1
        found = [self._run(bound, order) for order in self.orders]
        for order, result in zip(self.orders, found, strict=True):
            if result != found[0]:
                raise ViolationError("order", f"{kernel.name}: {order} gives other bits than {self.orders[0]}")

    def _run(self, bound: Bound, order: Order) -> list[bytes]:
        memory = bound.run(order)
        result = bound.contents()
        if memory.contested:
            self._check_unused(bound, order, memory.contested, result)
        return result

    def _check_unused(self, bound: Bound, order: Order, contested: Contested, result: list[bytes]) -> None:
        """Check that what lanes read while others wrote is not used: with other bits there, nothing changes."""
        (space, unit), *_ = contested
        race = f"{bound.kernel.name}: lanes read unit {unit} of {space} while another stores, and what they read"
        for disturbance in DISTURBANCES:
            try:
                bound.run(order, contested, disturbance)
            except ViolationError as error:
                raise ViolationError("race", f"{race} leads to: {error}") from error
            if bound.contents() != result:
                raise ViolationError("race", f"{race} changes the result")


class Bound:
    """A kernel with its arguments: parameters, and the tensors that it can reach, in the state before the launch.

    ``reachable`` are tensors by their addresses. An argument that is a table of addresses may point to some of them.
    """

    def __init__(
        self,
        kernel: Kernel,
        shared: int,
        grid: tuple[int, int, int],
        arguments: list[tuple[Any, str]],
        reachable: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self.kernel, self.grid, self._shared = kernel, grid, shared
        self._reachable = asked if reachable is None else reachable
        self._ranges: list[tuple[int, torch.Tensor, str]] = []
        self._parameters = [self._parameter(number, *argument) for number, argument in enumerate(arguments, 1)]
        # The last parameters are scratch memory of Triton, which these kernels do not use.
        self._parameters += [np.uint64(0)] * (len(kernel.parameters) - len(arguments))
        storages = {it.untyped_storage().data_ptr(): it.untyped_storage() for _, it, _ in self._ranges}
        self._data = {at: torch.empty(0, dtype=torch.uint8).set_(storage).numpy() for at, storage in storages.items()}
        self._before = {at: data.copy() for at, data in self._data.items()}

    def _parameter(self, number: int, value: Any, kind: str) -> np.generic:
        if not kind.startswith("*"):
            dtype = {"fp32": np.float32, "i32": np.int32, "i64": np.int64}[kind]
            return dtype(value).view(UNSIGNED[8 * np.dtype(dtype).itemsize])
        first = APART * number + address_of(value) % 4096
        self._ranges.append((first, value, f"argument {number} ({value.dtype}, {list(value.shape)})"))
        if value.dtype == torch.int64:  # maybe a table of addresses
            for address in {*value.flatten().tolist()} & self._reachable.keys():
                self._ranges.append((address, self._reachable[address], f"a tensor in the table of argument {number}"))
        return np.uint64(first)

    def run(
        self, order: Order, disturbed: Contested | None = None, disturbance: Callable[..., np.ndarray] = np.invert
    ) -> Memory:
        """Run the launch from the state before it. Return its memory, which has the findings."""
        units = {where: _narrowest(self.kernel, where) for where in ("global", "shared")}
        spaces = {}
        self.restore()
        for number, (at, data) in enumerate(self._data.items()):
            spaces[at] = Space(f"storage {number}", data, _written(data, units["global"]), units["global"])
        ranges = {}
        for first, tensor, name in self._ranges:
            held = spaces[tensor.untyped_storage().data_ptr()]
            offset = tensor.storage_offset() * tensor.element_size()
            ranges[first] = Range(first, _extent(tensor), held, offset, name)
        memory = Memory([*ranges.values()], self._shared, units)
        if disturbed:
            memory.disturbed, memory.disturbance = disturbed, disturbance
        Machine(self.kernel, self.grid, self._parameters, memory, order).run()
        return memory

    def restore(self) -> None:
        """Give all tensors what they held before the launch."""
        for at, data in self._data.items():
            data[:] = self._before[at]

    def contents(self) -> list[bytes]:
        """Return the bytes of all tensors, after a run."""
        return [data.tobytes() for data in self._data.values()]


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to the last element."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _written(data: np.ndarray, unit: int) -> np.ndarray:
    """Return which units of a tensor hold something: a word of the pattern of new memory is not written yet."""
    words = data[: data.size // 4 * 4].view(np.uint32) != POISON * 0x01010101
    rest = data[data.size // 4 * 4 :: unit] != POISON
    return np.concatenate([np.repeat(words, 4 // unit), rest])


@cache
def _narrowest(kernel: Kernel, where: str) -> int:
    widths = [it.parts[-1] for it in kernel.instructions() if where in it.parts and it.parts[0] != "ldmatrix"]
    return min([4, *(width_of(kind) // 8 for kind in widths)])


class Poisoned(TorchFunctionMode):
    """Fills memory that torch allocates without content with a pattern, which kernels must not read."""

    ALLOCATES = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in self.ALLOCATES and found.numel():
            torch.empty(0, dtype=torch.uint8).set_(found.untyped_storage()).fill_(POISON)
        return found


class Compiler:
    """Triton's compiler for one target, without the assembler, whose output is not needed."""

    def __init__(self, target: str) -> None:
        from triton import knobs
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.compiler import CUDABackend
        from triton.compiler import make_backend

        knobs.cache.dir = str(Path(knobs.cache.dir) / "without-assembler")  # other processes need its output
        CUDABackend.make_cubin = lambda *_: b""
        self._target = GPUTarget("cuda", TARGETS[target], 32)
        self._backend, self._binders, self._texts = make_backend(self._target), {}, {}

    def specialized(self, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[str, int, list]:
        """Return the PTX text for these arguments, the bytes of shared memory, and the arguments with their types."""
        import triton
        from triton.compiler import ASTSource
        from triton.runtime.jit import create_function_from_signature

        if function not in self._binders:  # each is compiled from a text
            self._binders[function] = create_function_from_signature(function.signature, function.params, self._backend)
        bound, kinds, chosen = self._binders[function](*arguments, **options, debug=False)
        key = function.cache_key, str(kinds), str(chosen)
        if key not in self._texts:
            chosen, signature, constants, attributes = function._pack_args(self._backend, chosen, bound, kinds, chosen)
            source = ASTSource(function, signature, constants, attributes)
            found = triton.compile(source, target=self._target, options=chosen.__dict__)
            self._texts[key] = found.asm["ptx"], found.metadata.shared
        passed = [(it, kind[0]) for it, kind in zip(bound.values(), kinds, strict=True) if kind[0] != "constexpr"]
        return *self._texts[key], passed


def remember(tensor: torch.Tensor) -> int:
    """Return the address of a tensor, and remember whose it is."""
    address = address_of(tensor)
    asked[address] = tensor.detach()
    asked.move_to_end(address)
    if len(asked) > REMEMBERED:
        asked.popitem(last=False)
    return address


@cache
def install() -> None:
    """Let all launches of this process run here, for the target that the variable names. 1 is the usual one."""
    from triton.runtime.jit import JITFunction

    from tritoncomm_kernels import dispatch

    name = os.environ[VARIABLE]
    EXECUTOR.target = name if name in TARGETS else EXECUTOR.target
    compiler = Compiler(EXECUTOR.target)

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        text, shared, passed = compiler.specialized(self, arguments, options)
        EXECUTOR.launch(text, shared, (*grid, 1, 1)[:3], passed)

    JITFunction.run = run
    torch.Tensor.data_ptr = remember
    dispatch.interpreted = lambda: True  # kernels run on CPU tensors


EXECUTOR = Executor()
