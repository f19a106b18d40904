"""What the kernels of ``tritoncomm_kernels`` cost on a GPU: launches and host synchronizations of the Triton route.

On the emulated GPU a kernel computes with its reference, on CPU values, and is charged by this table. Its internals are
not counted. Guesses are taken to be those of a call before.
``tests/kernels/test_triton_costs.py`` compares the table with what the Triton route does in Triton's interpreter.

Operations of the package that are not in the table consist of torch operators, which are counted one by one. A new
kernel needs a row.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

import tritoncomm_kernels
from emulated_cuda.device import CudaTensor, Gpu, check_devices, extent, wrapped
from emulated_cuda.streams import current_stream
from tritoncomm_kernels import sections
from tritoncomm_kernels.formats import Format
from tritoncomm_kernels.select import TILE, TILES_SUMMED_IN_PLACE

# Elements from which on the counts of the tiles are summed by a kernel of their own.
SCANNED_FROM = TILES_SUMMED_IN_PLACE * TILE
_RADIX = 1 + 4 + 2  # the histograms are cleared; a histogram for each of 4 digits, count, emit


class Cost(NamedTuple):
    """Kernel launches and host synchronizations of one call."""

    launches: int
    syncs: int = 0


FREE = Cost(0)


def _mark_and_expand(numel: int) -> int:
    """Mark, a scan of many counts, expand."""
    return 3 if numel > SCANNED_FROM else 2


def _select(out: torch.Tensor, found: int) -> Cost:
    """The key, mark, the sum of the counts, expand. The host reads the sum to allocate the entries."""
    return Cost(2 + _mark_and_expand(out.numel()), 1) if out.numel() else FREE


def _top_k(numel: int, k: int, *, adds: bool) -> Cost:
    """Mark and expand the candidates, radix select, a new guess. The host reads the number of entries."""
    if not numel:
        return FREE
    return Cost(_mark_and_expand(numel) + _RADIX + 1, 1) if k else Cost(int(adds))


def _new_top_k(numel: int, k: int) -> Cost:
    """The same with a new guess, which is filled in."""
    known = _top_k(numel, k, adds=False)
    return known._replace(launches=known.launches + 1) if known.syncs else known


def _largest(selected: Any, k: int) -> Cost:
    """Radix select over the entries, a count that the host reads, then two index operations and a conversion."""
    return Cost(_RADIX + 2 + 3, 1) if len(selected.values) > k > 0 else FREE


def _merge(lists: Sequence[Any], numel: int) -> Cost:
    """Padding for each list, two stacks, a merge of rows, the check of indices. The host reads the union's size."""
    if not numel:
        return FREE
    return Cost(2 * len(lists) + 2 + (8 if any(at.numel() for at, _ in lists) else 0) + 8, 1)


def _kth(values: torch.Tensor, k: int) -> Cost:
    """A top-k with a new guess, then the smallest key of its values. The host reads both."""
    if not values.numel() or not k:
        return FREE
    return Cost(_new_top_k(values.numel(), k).launches + 2, 2)


def _add_rows(out: torch.Tensor, indices: torch.Tensor) -> Cost:
    """One row is placed. Of several, the borders of the tiles are found, then they are added."""
    if not out.numel() or not indices.numel():
        return FREE
    return Cost(2 if indices.dim() > 1 and indices.shape[0] > 1 else 1)


def _write_rows(layout: Any, values: torch.Tensor) -> Cost:
    """The counts, or of rounded values extents (cleared first), what is kept, compaction; header, high part, planes."""
    if not values.numel() or not layout.room:
        return Cost(1)
    return Cost((5 if layout.quantized else 1) + 2)


# By operation: the cost of a call from its arguments (positional) and its result, and the names of tensors it writes.
# The arguments are CPU tensors here.
_N = tritoncomm_kernels
_TABLE: dict[Callable[..., Any], tuple[Callable[..., Cost], tuple[str, ...]]] = {
    # One kernel.
    _N.rebalance: (lambda result, a: Cost(1), ("blocks", "bounds")),
    # Selection.
    _N.select: (lambda result, a: _select(a["values"], result.room), ("values",)),
    _N.accumulate_and_select: (lambda result, a: _select(a["out"], result.room), ("out",)),
    _N.top_k: (lambda result, a: _new_top_k(a["values"].numel(), a["k"]), ()),
    _N.accumulate_top_k: (lambda result, a: _top_k(a["out"].numel(), a["k"], adds=True), ("out",)),
    _N.kth_magnitude: (lambda result, a: _kth(a["values"], a["k"]), ()),
    _N.largest: (lambda result, a: _largest(a["selected"], a["k"]), ()),
    _N.count_inside: (lambda result, a: Cost(3), ()),  # the key, mark, the sum of the counts
    # Lists.
    _N.merge: (lambda result, a: _merge(a["lists"], a["numel"]), ()),
    # Lists and messages of a fixed length. The host reads nothing.
    _N.top_k_padded: (lambda result, a: Cost(_top_k(a["out"].numel(), a["k"], adds=True).launches or 2), ("out",)),
    _N.top_k_rows: (
        # The histograms are cleared; a histogram for each of 4 digits, count, emit.
        lambda result, a: Cost(7 if result.indices.numel() else 0),
        (),
    ),
    _N.joined: (lambda result, a: Cost(2 if result.indices.numel() else 0), ()),  # count, join
    _N.merge_rows: (
        # The mask is cleared, padding, mark, count, scan, union, borders, sums.
        lambda result, a: Cost(8 if result.indices.numel() else 0),
        (),
    ),
    _N.add_rows: (lambda result, a: _add_rows(a["out"], a["rows"].indices), ("out",)),
    _N.set_at: (lambda result, a: Cost(int(a["out"].numel() > 0)), ("out",)),
    _N.values_at: (lambda result, a: Cost(1), ()),
    # A quantized mean: one kernel each.
    _N.round_parts: (lambda result, a: Cost(1), ("values",)),
    _N.round_mean: (lambda result, a: Cost(1), ("values",)),
    _N.read_parts: (lambda result, a: Cost(1), ()),
    sections.write_rows: (lambda result, a: _write_rows(a["layout"], a["entries"].values), ()),
    sections.read_rows: (
        # The verdicts are cleared; counts, positions, join, refusal.
        lambda result, a: Cost(5 if a["messages"].numel() and a["layout"].room else 1),
        (),
    ),
}


@functools.cache
def declared() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return what replaces each operation of the table while ranks have emulated GPUs."""
    return {kernel: _charged(kernel, cost, writes) for kernel, (cost, writes) in _TABLE.items()}


def cost_of(kernel: Callable[..., Any], result: Any, arguments: dict[str, Any]) -> Cost:
    """Return the cost of a call by the table. ``arguments`` are all of its arguments, by name."""
    return _TABLE[kernel][0](result, arguments)


def _charged(
    kernel: Callable[..., Any], cost: Callable[[Any, dict[str, Any]], Cost], writes: tuple[str, ...]
) -> Callable[..., Any]:
    signature = inspect.signature(kernel)

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        tensors = [*_tensors([*given.arguments.values()], CudaTensor)]
        if not tensors:
            return kernel(*args, **kwargs)
        given.apply_defaults()
        enter(kernel.__name__, given.arguments, writes)
        inner = inspect.BoundArguments(
            signature, collections.OrderedDict((name, inner_of(value)) for name, value in given.arguments.items())
        )
        out = kernel(*inner.args, **inner.kwargs)
        _charge(kernel.__name__, tensors[0].gpu, cost(out, inner.arguments))
        stream = current_stream()
        return wrapped(out, tensors, tensors[0], stream, stream.clock)

    return run


def enter(name: str, arguments: Mapping[str, Any], writes: Sequence[str]) -> None:
    """Check that all tensors are on one GPU, and order the kernel on the current stream."""
    tensors = [tensor for value in arguments.values() for tensor in _tensors(value, torch.Tensor)]
    check_devices(name, tensors)
    stream = current_stream()
    at = stream.enqueue()
    for key, value in arguments.items():
        for tensor in _tensors(value, CudaTensor):
            tensor.memory.touch(stream, at, functools.partial(extent, tensor.inner), name, write=key in writes)


def _charge(name: str, gpu: Gpu, cost: Cost) -> None:
    gpu.launched(name, cost.launches)
    for _ in range(cost.syncs):
        gpu.synchronized(f"kernel {name}")


def _tensors(value: Any, kind: type) -> Iterator[Any]:
    """Return the tensors of a type in an argument: a tensor, a sequence, or a dataclass. Formats have none."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each, kind)
    elif dataclasses.is_dataclass(value) and not isinstance(value, Format):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name), kind)


def inner_of(value: Any) -> Any:
    """Return an argument with CPU tensors in place of those on a GPU."""
    if isinstance(value, CudaTensor):
        return value.inner
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(inner_of, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(inner_of, value))
    if next(_tensors(value, CudaTensor), None) is not None:  # formats, which are compared by identity, stay themselves
        changed = {field.name: inner_of(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **changed)
    return value


class AdamFlat(tritoncomm_kernels.AdamFlat):
    """Stands for the original, whose Triton route has two launches per dtype."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], states: tritoncomm_kernels.AdamStates, starts: Sequence[int]
    ) -> None:
        self._arguments = {"parameters": parameters, "states": states}
        super().__init__(inner_of(list(parameters)), inner_of(states), starts)

    def holds(
        self, parameters: Sequence[torch.Tensor], states: tritoncomm_kernels.AdamStates, starts: Sequence[int]
    ) -> bool:
        return super().holds(inner_of(list(parameters)), inner_of(states), starts)

    def update(self, indices: Any, control: Any, *, values: Any, keep: float = 1.0) -> None:
        given = {"indices": indices, "control": control, "values": values}
        on_gpu = [*_tensors([self._arguments["parameters"]], CudaTensor)]
        if on_gpu:
            enter("AdamFlat.update", {**self._arguments, **given}, ("parameters", "states"))
        super().update(**{name: inner_of(value) for name, value in given.items()}, keep=keep)
        for cost in self.costs(indices, keep) if on_gpu else ():
            _charge("AdamFlat.update", on_gpu[0].gpu, cost)

    def costs(self, indices: Any, keep: float) -> Iterator[Cost]:
        """Return the cost of each group of tensors of one dtype, and of each other tensor.

        Of a group: the decay; the sums, which are cleared and then computed, the update. The table of addresses is
        copied from pinned memory. The others are copied to the CPU, and back after their update.
        """
        for kind, positions in self._kinds.items():
            if kind.fits:
                decays = 0 if keep == 1 else len(positions) if kind.dtypes[0] == torch.float16 else 1
                yield Cost(decays + (3 if indices is None or indices.numel() else 0))
            else:
                copied = len(positions) * (len(kind.dtypes) + 1)
                yield Cost(copied, copied + 3)
