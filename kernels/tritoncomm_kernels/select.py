"""Threshold selection and compaction: add, compare and gather.

On a GPU, one kernel adds, compares, and writes a bit mask with one count per tile, and another one turns the mask into
ascending indices and values. The host waits once between the two, to allocate what is returned.

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

MAGNITUDE_MASK = 0x7FFFFFFF
TILE = 4096  # elements with one count, which one program marks
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


class Sum(NamedTuple):
    """A vector to select from: ``out = residual + gradient``, or ``out`` as it is if ``gradient`` is None.

    With a ``divisor``, quotients are compared and returned. The tensors are those of :func:`accumulate_and_select`.
    """

    residual: torch.Tensor
    gradient: torch.Tensor | None
    out: torch.Tensor
    divisor: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        residual: torch.Tensor,
        gradient: torch.Tensor | None,
        out: torch.Tensor,
        divisor: torch.Tensor | None = None,
    ) -> Sum:
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
        if divisor is not None:
            check_vector("divisor", divisor, numel=out.shape[0], like=out)
        return cls(residual, gradient, out, divisor)

    @property
    def added(self) -> Sum:
        """The same, after the addition."""
        return self._replace(residual=self.out, gradient=None)

    def part(self, start: int, stop: int) -> Sum:
        """Return the sum of the coordinates from ``start`` up to ``stop``."""
        parts = (None if each is None else each[start:stop] for each in self)
        return Sum._make(parts)


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


def select(values: torch.Tensor, threshold: float, *, divisor: torch.Tensor | None = None) -> Entries:
    """Return the entries of ``values`` (fp32 ``[n]``, contiguous) with ``|x| >= threshold``, in ascending order.

    Zeros are never selected. NaN is always selected. With a ``divisor`` (fp32 ``[n]``, powers of two from 2^-126 to
    2^126), quotients are compared and returned. Raises ``ValueError`` for a wrong dtype or shape.
    """
    return accumulate_and_select(values, None, values, threshold, divisor=divisor)


def accumulate_and_select(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    out: torch.Tensor,
    threshold: float,
    *,
    divisor: torch.Tensor | None = None,
) -> Entries:
    """Compute ``out = residual + gradient`` and :func:`select` from ``out``, in one fused pass.

    ``residual`` and ``out`` are fp32 ``[n]`` and may be the same tensor. ``gradient`` is fp32, bf16 or fp16 ``[n]``.
    Without ``gradient``, ``residual`` and ``out`` must be the same tensor, and nothing is added. Raises ``ValueError``
    naming the invalid argument.
    """
    return select_keys(Sum.of(residual, gradient, out, divisor), threshold_key(threshold))


def select_keys(total: Sum, key: int, terms: Sequence[SparseList] = ()) -> Entries:
    """Run :func:`accumulate_and_select` with the ``key`` of a threshold.

    On a CPU, sparse lists of ``terms`` can be added to what is compared and returned, list by list. Their indices are
    ascending and unique. The vector itself stays as it is. With terms there is no ``divisor``.
    """
    if not total.out.shape[0]:
        return Entries.empty((0,), total.out)
    if not terms and triton_runs(total.out):
        selected: Entries = kernel("select_triton").select_keys(total, key)
        return selected
    return _scan_host(total, key, terms)


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


def _scan_host(total: Sum, key: int, terms: Sequence[SparseList]) -> Entries:
    """Chunk loop in numpy, whose calls, comparisons and nonzero() measured faster than torch's."""
    residual, gradient, out, divisor = total
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
