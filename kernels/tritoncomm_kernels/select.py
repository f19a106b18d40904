"""Threshold selection and compaction: add, compare and gather.

:func:`mark` adds, compares, and writes a bit mask with one count per tile. :func:`expand` turns the mask into ascending
indices and values. Neither waits for the host. :func:`select` does both, and waits once to allocate what it returns.

On the CPU the pass works in chunks. Intermediate results stay in cache, and no temporary is as long as the vector.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tritoncomm_kernels.checks import GRADIENT_DTYPES, check_apart, check_in_place, check_same, check_vector
from tritoncomm_kernels.dispatch import kernel, triton_runs
from tritoncomm_kernels.lists import Entries
from tritoncomm_kernels.workspace import Workspace

MAGNITUDE_MASK = 0x7FFFFFFF
TILE = 4096  # elements with one count, which one program marks
MIN_TILE, MAX_TILE = 64, 1 << 16
# Up to this many tiles, every program of a kernel sums the counts of the tiles before its own, which are in the L2
# cache. That work grows with the square of the number of tiles, so the counts of larger vectors are summed before.
TILES_SUMMED_IN_PLACE = 8192

# 2^17 elements: a chunk of the sum and its flags fits into 1 MiB of second-level cache. 2^15, 2^16 and 2^18 measured
# 1.15x, 1.1x and 1.04x slower.
HOST_CHUNK = 1 << 17
# numpy's nonzero() is faster if fewer than one flag in so many is true. At 3 % the whole pass would take 1.1 times as
# long with it, and at 5 % 1.2 times.
_FEW_IN = 64
# Keys of the smallest normal magnitude, and of infinity.
_SMALLEST_NORMAL, _INFINITY = 0x00800000, 0x7F800000
NAN_KEY = _INFINITY + 1  # the smallest key of a NaN
_FLOAT = struct.Struct("<f")
SparseList = tuple[torch.Tensor, torch.Tensor]
Floats = npt.NDArray[np.float32]
Places = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]


class Marks(NamedTuple):
    """A selection as a bit mask, on the device of its vector.

    * ``bits`` (int32 ``[tiles * tile / 32]``): bit j of word w is set if element 32 w + j is marked.
    * ``counts`` (int32 ``[tiles]``): number of marked elements per tile.
    """

    bits: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def empty(
        cls,
        numel: int,
        device: torch.device,
        workspace: Workspace | None = None,
        *,
        tile: int = TILE,
        name: str = "mark",
    ) -> Marks:
        """Allocate marks for ``numel`` elements, from ``workspace`` if it is given.

        Marks from one workspace with the same ``name`` share memory.
        """
        held = workspace if workspace is not None else Workspace()
        tiles = max(1, -(-numel // tile))
        bits = held.buffer(f"{name} bits", tiles * tile // 32, torch.int32, device)
        counts = held.buffer(f"{name} counts", tiles, torch.int32, device)
        return cls(bits, counts)


def magnitude_keys(values: torch.Tensor) -> torch.Tensor:
    """Return integer keys (int32, same shape) that order ``values`` (fp32) by magnitude, with NaN largest."""
    return values.view(torch.int32) & MAGNITUDE_MASK


def threshold_key(threshold: float) -> int:
    """Return the integer key that a magnitude must reach to be selected by ``threshold`` (fp32).

    The key of a positive threshold is its bits. The key of any other number is 1, because zeros are never selected.
    A NaN threshold selects only NaNs.
    """
    if not threshold > 0:
        return NAN_KEY if math.isnan(threshold) else 1
    try:
        return int.from_bytes(_FLOAT.pack(threshold), "little") or 1
    except OverflowError:  # rounded to fp32, it is infinity
        return _INFINITY


def mark(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    out: torch.Tensor,
    threshold: torch.Tensor,
    marks: Marks,
    *,
    span: torch.Tensor | None = None,
    divisor: torch.Tensor | None = None,
) -> None:
    """Compute ``out = residual + gradient`` and mark its elements with magnitude at least ``threshold``.

    ``threshold`` is ``[1]`` on the device: fp32, or int32 for an integer key. A threshold or key of 0 or below marks
    every non-zero. A NaN threshold marks only NaNs. Zeros are never marked. NaNs reach every threshold, and every key
    up to 0x7F800001. ``span`` (int32 ``[2]``, on the device) restricts marking to positions ``span[0] <= i < span[1]``.
    The sum is computed everywhere. With a ``divisor`` (see :func:`select`), quotients are compared, and ``out`` is
    not divided. Without ``gradient``, ``residual`` and ``out`` must be the same tensor, which is only read.
    ``residual`` and ``out`` are contiguous fp32 ``[n]`` and may be the same tensor. ``gradient`` is contiguous fp32,
    bf16 or fp16 ``[n]`` and shares no memory with ``out``. Raises ``ValueError`` naming the invalid argument.
    """
    check_addends(residual, gradient, out, divisor)
    check_vector("threshold", threshold, dtypes=(torch.float32, torch.int32), numel=1, like=out)
    if span is not None:
        check_vector("span", span, dtypes=(torch.int32,), numel=2, like=out)
    _check_marks(out, marks)
    if not out.shape[0]:
        marks.bits.zero_()
        marks.counts.zero_()
    elif triton_runs(out):
        kernel("select_triton").mark(residual, gradient, divisor, out, threshold, span, *marks)
    else:
        if gradient is not None:
            torch.add(residual, gradient, out=out)
        _mark_on_host(out if divisor is None else out / divisor, threshold, marks, span)


def expand(
    values: torch.Tensor,
    marks: Marks,
    indices: torch.Tensor,
    out: torch.Tensor,
    found: torch.Tensor,
    *,
    divisor: torch.Tensor | None = None,
) -> None:
    """Write the marked elements of ``values`` (fp32 ``[n]``) to ``indices`` and ``out``, in ascending order.

    With a ``divisor`` (see :func:`select`), quotients are written.
    ``indices`` (int32) and ``out`` (fp32) are ``[capacity]``. Slots after the last entry keep their content.
    ``found`` (int64 ``[1]``) is set to the number of marked elements, which may exceed the capacity. Raises
    ``ValueError`` naming the invalid argument.
    """
    check_vector("values", values)
    _check_marks(values, marks)
    _check_divisor(values, divisor)
    check_vector("indices", indices, dtypes=(torch.int32,), like=values)
    check_vector("out", out, numel=indices.numel(), like=values)
    check_vector("found", found, dtypes=(torch.int64,), numel=1, like=values)
    check_apart("out", out, "values", values)
    check_apart("indices", indices, "values", values)
    check_apart("indices", indices, "out", out)
    if values.numel() == 0:
        found.zero_()
    elif triton_runs(values):
        kernel("select_triton").expand(values, divisor, *marks, indices, out, found)
    else:
        _expand_on_host(values, divisor, marks, indices, out, found)


def select(
    values: torch.Tensor,
    threshold: float,
    *,
    divisor: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> Entries:
    """Return the entries of ``values`` (fp32 ``[n]``, contiguous) with ``|x| >= threshold``, in ascending order.

    Zeros are never selected. NaN is always selected. With a ``divisor`` (fp32 ``[n]``, powers of two from 2^-126 to
    2^126), quotients are compared and returned. ``workspace`` keeps GPU scratch memory between calls. Raises
    ``ValueError`` for a wrong dtype or shape.
    """
    return accumulate_and_select(values, None, values, threshold, divisor=divisor, workspace=workspace)


def accumulate_and_select(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    out: torch.Tensor,
    threshold: float,
    *,
    divisor: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> Entries:
    """Compute ``out = residual + gradient`` and :func:`select` from ``out``, in one fused pass.

    ``residual`` and ``out`` are fp32 ``[n]`` and may be the same tensor. ``gradient`` is fp32, bf16 or fp16 ``[n]``.
    Without ``gradient``, ``residual`` and ``out`` must be the same tensor, and nothing is added. Raises ``ValueError``
    naming the invalid argument.
    """
    check_addends(residual, gradient, out, divisor)
    return select_keys(residual, gradient, out, threshold_key(threshold), divisor=divisor, workspace=workspace)


def select_keys(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    out: torch.Tensor,
    key: int,
    *,
    divisor: torch.Tensor | None = None,
    terms: Sequence[SparseList] = (),
    workspace: Workspace | None = None,
) -> Entries:
    """Run :func:`accumulate_and_select` with the ``key`` of a threshold, on checked arguments.

    On a CPU, sparse lists of ``terms`` can be added to what is compared and returned, list by list. Their indices are
    ascending and unique. The vector itself stays as it is. With terms there is no ``divisor``.
    """
    if not out.shape[0]:
        return Entries.empty((0,), out)
    if not terms and triton_runs(out):
        return _scan_triton(residual, gradient, out, key, divisor, workspace if workspace is not None else Workspace())
    return _scan_host(residual, gradient, out, key, divisor, terms)


def has_non_finite(values: torch.Tensor) -> bool:
    """Return True if any entry of ``values`` (fp32) is Inf or NaN."""
    if values.device.type != "cpu":
        return values.numel() > 0 and not bool(torch.isfinite(values).all())
    # numpy is ten times faster than torch on the CPU. Parts stay in the cache.
    array = values.numpy(force=True).reshape(-1)
    for start in range(0, array.size, HOST_CHUNK):
        if not np.logical_and.reduce(np.isfinite(array[start : start + HOST_CHUNK])):
            return True
    return False


def _scan_triton(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    out: torch.Tensor,
    key: int,
    divisor: torch.Tensor | None,
    workspace: Workspace,
) -> Entries:
    """Mark and expand. The only host synchronization is between the two, to allocate exactly what is needed."""
    marks = Marks.empty(out.numel(), out.device, workspace, name="select")
    limit = workspace.buffer("select key", 1, torch.int32, out.device).fill_(key)
    mark(residual, gradient, out, limit, marks, divisor=divisor)
    entries = Entries.empty((int(marks.counts.sum()),), out)
    found = workspace.buffer("select found", 1, torch.int64, out.device)
    expand(out, marks, *entries, found, divisor=divisor)
    return entries


def _scan_host(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    out: torch.Tensor,
    key: int,
    divisor: torch.Tensor | None,
    terms: Sequence[SparseList],
) -> Entries:
    """Chunk loop in numpy, whose calls, comparisons and nonzero() measured faster than torch's."""
    floats = out.numpy()
    add_chunk = _host_addition(floats, residual, gradient) if gradient is not None else None
    divisors = None if divisor is None else divisor.numpy()
    in_chunks = [_chunks_of(*listed, floats.size) for listed in terms]
    indices, values, few = [], [], True
    with np.errstate(over="ignore", invalid="ignore"):  # the caller checks the sums
        for start in range(0, floats.size, HOST_CHUNK):
            if add_chunk is not None:
                add_chunk(slice(start, start + HOST_CHUNK))
            part = floats[start : start + HOST_CHUNK]
            if divisors is not None:
                part = part / divisors[start : start + HOST_CHUNK]
            overwritten = [_add_terms(part, *next(chunks)) for chunks in in_chunks]
            found = true_positions(_reaching(part, key), few=few)
            few = _FEW_IN * found.size < part.size  # in the next chunk
            values.append(part.take(found))
            indices.append(np.add(found, start, dtype=np.int32, casting="unsafe"))
            for places, before in reversed(overwritten):
                part[places] = before
    return Entries(torch.from_numpy(np.concatenate(indices)), torch.from_numpy(np.concatenate(values)))


def _chunks_of(indices: torch.Tensor, values: torch.Tensor, numel: int) -> Iterator[tuple[Places, Floats]]:
    """Yield the entries of a sparse list in each chunk of a vector of ``numel`` elements, with places in the chunk."""
    places, terms = indices.numpy(), values.numpy()
    starts = np.arange(0, numel, HOST_CHUNK, dtype=np.int32)
    cuts = np.append(places.searchsorted(starts), places.size)
    places = places - np.repeat(starts.astype(np.intp), np.diff(cuts))
    for first, last in itertools.pairwise(cuts.tolist()):
        yield places[first:last], terms[first:last]


def _add_terms(part: Floats, places: Places, terms: Floats) -> tuple[Places, Floats]:
    """Add ``terms`` to ``part`` at ``places`` (unique). Return these, and what was there before."""
    before = part.take(places)
    part[places] = before + terms
    return places, before


def true_positions(flags: Flags, *, few: bool) -> npt.NDArray[np.intp]:
    """Return the ascending positions of the true ``flags``. ``few`` says which of two ways is expected to be faster."""
    if few or flags.size % 8:
        return flags.nonzero()[0]
    words = flags.view(np.uint64)  # most are zero, and eight flags are looked at together
    at = (words != 0).nonzero()[0]
    within = words[at].view(np.bool_).nonzero()[0]
    found: npt.NDArray[np.intp] = (at[within >> 3] << 3) + (within & 7)
    return found


def _host_addition(floats: Floats, residual: torch.Tensor, gradient: torch.Tensor) -> Callable[[slice], object]:
    """Return a function that adds a slice of both into ``floats``. numpy adds fp32, with the same bits."""
    if gradient.dtype != torch.float32:
        out = torch.from_numpy(floats)
        return lambda part: torch.add(residual[part], gradient[part], out=out[part])
    terms = residual.numpy(), gradient.numpy()
    return lambda part: np.add(terms[0][part], terms[1][part], out=floats[part])


def _reaching(part: Floats, key: int) -> Flags:
    """Return which magnitudes of ``part`` have at least ``key``. NaN has, up to :data:`NAN_KEY`."""
    if _SMALLEST_NORMAL <= key <= _INFINITY:  # two comparisons cost less than masking out the sign
        threshold = np.int32(key).view(np.float32)
        # Both are true for large negative numbers, and both are false for large positive ones and for NaN.
        return (part < threshold) == (part <= -threshold)  # type: ignore[no-any-return]
    # Denormals may count as zeros in comparisons of floats (torch.set_flush_denormal).
    return (part.view(np.int32) & MAGNITUDE_MASK) >= key


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Return the ascending int64 positions of the true entries of a boolean ``mask`` (``[n]``)."""
    if mask.device.type == "cpu":  # on the CPU, numpy is three times faster than nonzero()
        return torch.from_numpy(mask.numpy().nonzero()[0])
    return mask.nonzero().squeeze(1)


def _mark_on_host(values: torch.Tensor, threshold: torch.Tensor, marks: Marks, span: torch.Tensor | None) -> None:
    """Write the marks of ``values``, the finished sums. An int32 ``threshold`` already is a key."""
    limit = threshold.item()
    key = max(int(limit), 1) if threshold.dtype == torch.int32 else threshold_key(limit)
    own = slice(None) if span is None else slice(*span.clamp(min=0).tolist())
    chosen = np.zeros(marks.bits.numel() * 32, np.bool_)
    chosen[: values.numel()][own] = _reaching(values.numpy()[own], key)
    marks.bits.copy_(torch.from_numpy(np.packbits(chosen, bitorder="little").view(np.int32)))
    marks.counts.copy_(torch.from_numpy(chosen.reshape(marks.counts.numel(), -1).sum(1, dtype=np.int32)))


def _check_divisor(values: torch.Tensor, divisor: torch.Tensor | None) -> None:
    if divisor is not None:
        check_vector("divisor", divisor, numel=values.shape[0], like=values)


def _check_marks(values: torch.Tensor, marks: Marks) -> None:
    """Raise ``ValueError`` unless ``marks`` were allocated for the number of elements of ``values``."""
    tiles = marks.counts.numel()
    check_vector("marks.counts", marks.counts, dtypes=(torch.int32,), like=values)
    check_vector("marks.bits", marks.bits, dtypes=(torch.int32,), like=values)
    check_apart("marks.bits", marks.bits, "values", values)
    tile = marks.bits.numel() * 32 // max(tiles, 1)
    fits = MIN_TILE <= tile <= MAX_TILE and tile & (tile - 1) == 0 and tile * tiles == marks.bits.numel() * 32
    if not fits or tiles != max(1, -(-values.numel() // tile)):
        raise ValueError(
            f"marks have {marks.bits.numel()} words in {tiles} tiles, which do not fit {values.numel()} elements: "
            f"create them with Marks.empty({values.numel()}, ...)"
        )


def _expand_on_host(
    values: torch.Tensor,
    divisor: torch.Tensor | None,
    marks: Marks,
    indices: torch.Tensor,
    out: torch.Tensor,
    found: torch.Tensor,
) -> None:
    """Reference of :func:`expand`."""
    marked = torch.from_numpy(np.unpackbits(marks.bits.numpy().view(np.uint8), bitorder="little").nonzero()[0])
    found.fill_(marked.numel())
    written = marked[: indices.numel()]
    indices[: written.numel()] = written.to(torch.int32)
    out[: written.numel()] = values[written] if divisor is None else values[written] / divisor[written]


def check_addends(
    residual: torch.Tensor, gradient: torch.Tensor | None, out: torch.Tensor, divisor: torch.Tensor | None = None
) -> None:
    """Raise ``ValueError`` unless dtypes, sizes, devices and aliasing are valid.

    Without ``gradient``, nothing is added: the other two must be the same tensor.
    """
    if gradient is not None:
        check_vector("residual", residual)
        check_vector("gradient", gradient, dtypes=GRADIENT_DTYPES, numel=residual.shape[0], like=residual)
        check_vector("out", out, numel=residual.shape[0], like=residual)
        check_apart("gradient", gradient, "out", out)
        check_in_place("residual", residual, "out", out)
    elif residual is out:
        check_vector("values", out)
    else:
        check_vector("out", out)
        check_same("residual", residual, "out", out)
    _check_divisor(out, divisor)
