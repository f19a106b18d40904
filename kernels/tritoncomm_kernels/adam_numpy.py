"""Adam update of many fp32 tensors in CPU memory, with numpy: the reference of :class:`AdamMany` for these tensors.

Every delivered entry is in a cache line of its own, so most of the time goes to memory. An entry is therefore written
soon after it was read, while its line is in the cache. States are updated in chunks of entries, one state after the
other. Weight decay passes over a whole parameter, and the delivered entries of this parameter are updated next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tritoncomm_kernels.adam import FINE, LARGEST_SQUARE, AdamControl, beta_tables, decays
from tritoncomm_kernels.rms import consecutive

# Entries of a state that are read and written together. Smaller chunks cost more calls. With larger ones, the memory
# that they were read from has left the cache when they are written.
_CHUNK = 1 << 13
# Entries of whole tensors that are updated together. Their moves are computed before the parameters change, because
# the limit on the change of a tensor needs a sum over the tensor.
_PART = 1 << 16
_LOOKED_UP = 1 << 16  # shorter delays are looked up in a table of at most 1.3 MB
_SMALL = 1 << 14  # elements of a tensor up to which the list of all its places is kept between steps

_Array = npt.NDArray[Any]
_Indices = Sequence[_Array | None]


class AdamArrays:
    """Adam updates of the same contiguous fp32 CPU tensors, step after step.

    ``columns`` are the parameters, then the fields of :class:`AdamStates`. States that are parts of one buffer per
    field, at equal places in each, are updated faster.
    """

    def __init__(self, columns: list[list[torch.Tensor]]) -> None:
        self._tensors = columns[0]
        self._parameters, first, second, last, self._rms, *maximum = [list(map(_flat, column)) for column in columns]
        self._states = [last, first, second, *maximum]
        self.sizes = [array.size for array in self._parameters]
        every = np.arange(_SMALL)
        self._every = [every[:size] if size <= _SMALL else None for size in self.sizes]
        self._buffers = _buffers([columns[3], columns[1], columns[2], *columns[5:]])
        self._starts = np.array([tensor.storage_offset() for tensor in columns[1]])

    def update(
        self,
        gradients: Sequence[torch.Tensor],
        control: AdamControl,
        indices: _Indices,
        keep: float,
        values: Sequence[torch.Tensor] | None,
    ) -> None:
        """See :meth:`AdamMany.update`. The ``indices`` have been checked."""
        torch.autograd.graph.increment_version(self._tensors)
        counts = [size if at is None else at.size for at, size in zip(indices, self.sizes, strict=True)]
        bounds, step = [0, *accumulate(counts)], _Step.of(control)
        given = None if values is None else torch.cat(list(values)).numpy()
        with np.errstate(all="ignore"):
            for part in consecutive(counts, _PART):
                start, stop = bounds[part.start], bounds[part.stop]
                entries = self._entries(part, indices[part], [at - start for at in bounds[part.start : part.stop + 1]])
                delivered = entries.read(list(map(_flat, gradients[part]))) if given is None else given[start:stop]
                moves = self._moves(part, entries, delivered, step, keep) if delivered.size else delivered
                entries.subtract(moves, self._parameters[part], keep)

    def _entries(self, part: slice, indices: _Indices, bounds: list[int]) -> _Entries:
        """Return the entries of the tensors in ``part``."""
        starts, count = self._starts[part], bounds[-1]
        if all(at is None for at in indices) and (starts - starts[0] == bounds[:-1]).all():
            return _Entries(bounds, [None] * len(indices), slice(int(starts[0]), int(starts[0]) + count))
        lists = [
            at if at is not None else np.arange(size) if every is None else every
            for at, every, size in zip(indices, self._every[part], self.sizes[part], strict=True)
        ]
        places: _Array = np.concatenate(lists)
        where = [None if at is None else places[a:b] for at, (a, b) in zip(indices, pairwise(bounds), strict=True)]
        return _Entries(bounds, where, places + np.repeat(starts, np.diff(bounds)))

    def _moves(self, part: slice, entries: _Entries, delivered: _Array, step: _Step, keep: float) -> _Array:
        """Update the states, and return what is to be subtracted from the parameters."""
        values = None
        if step.control.coupled:
            values = entries.read(self._parameters[part])
            values *= np.float32(keep)
        if self._buffers is not None:
            found = step.advance(self._buffers, entries.at, delivered, values)
        else:
            columns = [column[part] for column in self._states]
            states = list(map(entries.read, columns))
            found = step.advance(states, slice(0, delivered.size), delivered, values)
            for column, state in zip(columns, states, strict=True):
                entries.write(column, state)
        if step.control.limited:
            step.limit(found, entries.bounds, self.sizes[part], np.concatenate(self._rms[part]))
        found.moves[:] *= step.rate
        return found.moves


def _flat(tensor: torch.Tensor) -> _Array:
    return tensor.numpy(force=True).reshape(-1)


def _buffers(columns: list[list[torch.Tensor]]) -> list[_Array] | None:
    """Return the memory of each of ``columns``, if its tensors are parts of one buffer, at equal places in each."""
    places = {tuple(tensor.storage_offset() for tensor in column) for column in columns}
    storages = [{tensor.untyped_storage().data_ptr() for tensor in column} for column in columns]
    if len(places) > 1 or any(len(found) > 1 for found in storages):
        return None
    return [torch.empty(0, dtype=column[0].dtype).set_(column[0].untyped_storage()).numpy() for column in columns]


@dataclass(frozen=True)
class _Entries:
    """The delivered entries of several tensors as one flat vector, in which ``bounds`` separate the tensors.

    ``where`` are their indices in each tensor, None means all. ``at`` are their places in the buffers of the states.
    """

    bounds: list[int]
    where: list[_Array | None]
    at: _Array | slice

    def read(self, arrays: list[_Array]) -> _Array:
        """Return the delivered entries of ``arrays``."""
        values = np.empty(self.bounds[-1], arrays[0].dtype)
        for array, at, (start, stop) in zip(arrays, self.where, pairwise(self.bounds), strict=True):
            if at is None:
                values[start:stop] = array
            else:
                _take(array, at, values[start:stop])
        return values

    def write(self, arrays: list[_Array], values: _Array) -> None:
        """Write ``values`` to the delivered entries of ``arrays``."""
        for array, at, (start, stop) in zip(arrays, self.where, pairwise(self.bounds), strict=True):
            array[... if at is None else at] = values[start:stop]

    def subtract(self, moves: _Array, parameters: list[_Array], keep: float) -> None:
        """Multiply the ``parameters`` by ``keep``, then subtract ``moves`` from the delivered entries."""
        factor = np.array(keep, np.float32)  # calls with an array are faster than with a number
        for array, at, (start, stop) in zip(parameters, self.where, pairwise(self.bounds), strict=True):
            if keep != 1:
                np.multiply(array, factor, array)
            if at is None:
                np.subtract(array, moves[start:stop], array)
            elif start < stop:
                values = _take(array, at)
                array[at] = np.subtract(values, moves[start:stop], values)


def _take(array: _Array, at: _Array, out: _Array | None = None) -> _Array:
    """Return ``array[at]``. The indices have been checked. "wrap" does not change them, and is the fastest mode."""
    return array.take(at, None, out, "wrap")


@dataclass(frozen=True)
class _Step:
    """The settings of one step, rounded to fp32. See :class:`AdamControl`."""

    control: AdamControl
    steps: np.int32
    rate: np.float32
    root: np.float32
    epsilon: np.float32
    catch_up: np.float32
    decay: np.float32
    walk: np.float32
    fine: np.float32
    change: np.float32

    @classmethod
    def of(cls, control: AdamControl) -> _Step:
        scalars = control.scalars.numpy()
        return cls(control, np.int32(scalars[0]), *scalars[1:].astype(np.float32))

    def advance(self, states: list[_Array], at: _Array | slice, delivered: _Array, values: _Array | None) -> _Moves:
        """Update the entries ``at`` of ``states``, which are last, first, second, and maximum if there is one.

        ``values`` are those of the parameters, if there is coupled weight decay.
        """
        found = _Moves(*(np.empty_like(delivered) for _ in range(3)))
        for start in range(0, delivered.size, _CHUNK):
            span = slice(start, min(start + _CHUNK, delivered.size))
            places = slice(at.start + span.start, at.start + span.stop) if isinstance(at, slice) else at[span]
            last, first, second, *maxima = states
            tau = self.steps - _read(last, places)
            last[places] = self.steps
            np.maximum(tau, 1, out=tau)
            mean = delivered[span] / tau.astype(np.float32)
            if self.control.maximize:
                np.negative(mean, out=mean)
            if values is not None:
                mean += self.decay * values[span]
            power1, complement1, power2, complement2, factor = self._of_delay(tau)
            moment = _read(first, places)
            moment *= power1
            moment += complement1 * mean
            first[places] = moment
            square = _read(second, places)
            square *= power2
            mean *= mean
            square += complement2 * mean
            second[places] = square
            for maximum in maxima:
                np.maximum(_read(maximum, places), square, out=square)
                maximum[places] = square
            root = np.sqrt(square, out=square)
            root /= self.root
            root += self.epsilon
            moves = np.divide(moment, root, out=found.of_one_step[span])
            found.factor[span] = factor
            np.multiply(moves, factor, out=found.moves[span])
        return found

    def limit(self, found: _Moves, bounds: list[int], sizes: list[int], rms: _Array) -> None:
        """Shorten the moves of tensors that would move further than allowed. See :meth:`AdamControl.of`."""
        some = [i for i, (start, stop) in enumerate(pairwise(bounds)) if start < stop]  # reduceat needs an entry
        distance = found.moves * self.fine
        distance *= distance
        np.fmin(distance, np.float32(LARGEST_SQUARE), out=distance)  # NaN counts as the largest
        totals = np.add.reduceat(distance.astype(np.int64), [bounds[i] for i in some])
        length = np.sqrt(totals.astype(np.float32) / np.array([sizes[i] for i in some], np.float32))
        reach = self.change * rms[some]
        reach = np.where(reach > FINE, reach, np.float32(FINE))  # at least one learning rate, also if it is NaN
        for i in np.flatnonzero(length > reach):
            span = slice(bounds[some[i]], bounds[some[i] + 1])
            factor = found.factor[span] * (reach[i] / length[i])
            np.multiply(found.of_one_step[span], np.maximum(factor, 1, out=factor), out=found.moves[span])

    def _of_delay(self, tau: _Array) -> Sequence[_Array]:
        """Return ``beta^tau`` and ``1 - beta^tau`` for both betas, and the factor of a delivery after ``tau`` steps."""
        longest = int(tau.max())
        if longest >= _LOOKED_UP:
            return _compute_of_delay(tau, self.control.betas, self.catch_up, self.walk)
        table = _table(longest.bit_length(), self.control.betas, self.catch_up, self.walk)
        if longest == 1:  # every entry is delivered in every step
            return [row[1] for row in table]
        at = tau.astype(np.int64)
        return [_take(row, at) for row in table]


@dataclass(frozen=True)
class _Moves:
    """The moves of delivered entries: those of one dense step, times the ``factor`` of the delay."""

    of_one_step: _Array
    factor: _Array
    moves: _Array


def _read(array: _Array, at: _Array | slice) -> _Array:
    return array[at].copy() if isinstance(at, slice) else _take(array, at)


@lru_cache(maxsize=64)
def _table(bits: int, betas: tuple[float, float], limit: np.float32, walk: np.float32) -> list[_Array]:
    return _compute_of_delay(np.arange(1 << bits, dtype=np.int32), betas, limit, walk)


def _compute_of_delay(tau: _Array, betas: tuple[float, float], limit: np.float32, walk: np.float32) -> list[_Array]:
    delays, waited = torch.from_numpy(tau), tau.astype(np.float32)
    tables = beta_tables(betas, torch.float32, delays.device)
    rows = *decays(delays, tables[0], tables[1]), *decays(delays, tables[2], tables[3])
    return [*(row.numpy() for row in rows), np.minimum(np.minimum(waited, limit), walk * np.sqrt(waited))]
