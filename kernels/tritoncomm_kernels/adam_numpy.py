"""Adam update of many fp32 tensors in CPU memory, with numpy: the reference of :class:`AdamMany` for these tensors.

Every delivered entry is in a cache line of its own, so most of the time goes to memory. An entry is therefore written
soon after it was read, while its line is in the cache. States are updated in chunks of entries, one state after the
other. Weight decay passes over a whole parameter, and the delivered entries of this parameter are updated next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tritoncomm_kernels.adam import (
    DISAGREES,
    FINE,
    LARGEST_SQUARE,
    AdamControl,
    beta_tables,
    decays,
    forgetting,
    is_outlier,
    steadiness,
)
from tritoncomm_kernels.adam_layout import Scalars
from tritoncomm_kernels.rms import consecutive

# Entries of a state that are read and written together, more or less. Smaller chunks cost more calls. With larger ones,
# the memory that they were read from has left the cache when they are written.
_CHUNK = 1 << 13
# Entries of whole tensors that are updated together. Their moves are computed before the parameters change, because
# the limit on the change of a tensor needs a sum over the tensor.
_PART = 1 << 16
_LOOKED_UP = 1 << 16  # shorter delays are looked up in a table of at most 1.3 MB

_Array = npt.NDArray[Any]
_Values = Sequence[torch.Tensor]


class AdamArrays:
    """Adam updates of the same contiguous fp32 CPU tensors, step after step.

    ``columns`` are the parameters, then the fields of :class:`AdamStates`. States that are parts of one buffer per
    field, at equal places in each, are updated faster.

    Attributes:
        sizes: Number of elements of each parameter.
    """

    def __init__(self, columns: list[list[torch.Tensor]]) -> None:
        self._tensors, first, second, last, rms, *maximum = columns
        states = [last, first, second, *maximum]
        self._parameters, self._rms = list(map(_flat, self._tensors)), list(map(_flat, rms))
        self._states = [list(map(_flat, column)) for column in states]
        self._buffers = _buffers(states)
        self._starts = [int(tensor.storage_offset()) for tensor in first]
        self.sizes = [array.size for array in self._parameters]
        self._whole: list[_Part] = []
        self._whole_positions: list[int] = []

    def update(
        self,
        gradients: Sequence[torch.Tensor],
        control: AdamControl,
        indices: Sequence[_Array | None],
        keep: float,
        values: _Values | None,
    ) -> None:
        """See :meth:`AdamMany.update`. The ``indices`` have been checked."""
        torch.autograd.graph.increment_version(self._tensors)
        step = _Step.of(control, keep)
        whole = [i for i, at in enumerate(indices) if at is None]
        if whole != self._whole_positions:
            self._whole, self._whole_positions = list(self._parts_of_whole(whole)), whole
        listed = {i: at for i, at in enumerate(indices) if at is not None}
        with np.errstate(all="ignore"):
            for part in (*self._whole, *self._parts_of_listed(listed)):
                if values is None:
                    delivered = part.read([_flat(gradients[i]) for i in part.positions])
                else:
                    delivered = torch.cat([values[i] for i in part.positions]).numpy()
                self._update_part(part, delivered, step)

    def _parts_of_listed(self, listed: dict[int, _Array]) -> Iterator[_Part]:
        """Return the parts of tensors with the delivered indices ``listed``, by their position."""
        positions = list(listed)
        for span in consecutive(list(map(len, listed.values())), _PART):
            where = [listed[i] for i in positions[span]]
            counts = list(map(len, where))
            places = np.concatenate(where)
            places += np.repeat([self._starts[i] for i in positions[span]], counts)
            yield _Part(positions[span], [0, *accumulate(counts)], where, places)

    def _parts_of_whole(self, positions: list[int]) -> Iterator[_Part]:
        """Return the parts of tensors of which all entries are delivered."""
        for span in consecutive([self.sizes[i] for i in positions], _PART):
            own = positions[span]
            starts, bounds = [self._starts[i] for i in own], [0, *accumulate(self.sizes[i] for i in own)]
            if all(start - starts[0] == bound for start, bound in zip(starts, bounds, strict=False)):
                yield _Part(own, bounds, [None] * len(own), slice(starts[0], starts[0] + bounds[-1]))
            elif bounds[-1] <= 2 * _PART:
                each = [np.arange(start, start + self.sizes[i]) for i, start in zip(own, starts, strict=True)]
                yield _Part(own, bounds, [None] * len(own), np.concatenate(each))
            else:  # a list of places would take much memory
                for i, start in zip(own, starts, strict=True):
                    yield _Part([i], [0, self.sizes[i]], [None], slice(start, start + self.sizes[i]))

    def _update_part(self, part: _Part, delivered: _Array, step: _Step) -> None:
        """Update the states, then the parameters."""
        parameters, moves = [self._parameters[i] for i in part.positions], delivered
        if delivered.size:
            states, places = self._buffers, part.places
            if states is None:
                columns = [[column[i] for i in part.positions] for column in self._states]
                states, places = [part.read(column) for column in columns], slice(0, delivered.size)
            moves, waited, votes = step.advance(states, places, delivered)
            if self._buffers is None:
                for column, state in zip(columns, states, strict=True):
                    part.write(column, state)
            if (waited != 1).any():  # otherwise every entry is delivered in every step
                sizes, rms = [self.sizes[i] for i in part.positions], [self._rms[i] for i in part.positions]
                moves = step.catch_up_moves(moves, waited, votes, part.bounds, sizes, np.concatenate(rms))
            moves *= step.scalars.rate
        part.subtract(moves, parameters, step.keep)


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
class _Part:
    """The delivered entries of several tensors as one flat vector, in which ``bounds`` separate the tensors.

    The tensors are those at ``positions``. ``where`` are the indices in each of them, None means all. ``places`` are
    those in the buffers of the states.
    """

    positions: list[int]
    bounds: list[int]
    where: Sequence[_Array | None]
    places: _Array | slice

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

    def subtract(self, moves: _Array, parameters: list[_Array], keep: _Array) -> None:
        """Multiply the ``parameters`` by ``keep``, then subtract ``moves`` from the delivered entries."""
        decays = bool(keep != 1)
        for array, at, (start, stop) in zip(parameters, self.where, pairwise(self.bounds), strict=True):
            if decays:
                np.multiply(array, keep, array)
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
    """The settings of one step, rounded to fp32. See :class:`AdamControl`.

    ``keep`` is an array of one element: calls with an array are faster than with a number. ``tables`` has the factors
    of all delays with at most so many bits.
    """

    control: AdamControl
    keep: _Array
    scalars: Scalars
    tables: dict[int, list[_Array]] = field(default_factory=dict)

    @cached_property
    def numbers(self) -> Scalars:
        """The settings as tensors."""
        return Scalars(*self.control.scalars.float().unbind())

    @classmethod
    def of(cls, control: AdamControl, keep: float) -> _Step:
        exact = Scalars(*control.scalars.numpy())
        rounded = Scalars(*map(np.float32, exact))._replace(clock=np.int32(exact.clock))
        return cls(control, np.array(keep, np.float32), rounded)

    def advance(self, states: list[_Array], places: _Array | slice, delivered: _Array) -> tuple[_Array, _Array, _Array]:
        """Update the entries at ``places`` of ``states``: last, first, second, and maximum if there is one.

        Returns the moves of one dense step, in learning rates, the number of steps since each previous delivery (fp32),
        negative for outliers, and the votes of the entries (int64), which tell whether gradients are steady.
        """
        moves, waited = np.empty_like(delivered), np.empty_like(delivered)
        votes = np.empty(delivered.size, np.int64)
        chunks = max(1, round(delivered.size / _CHUNK))
        for number in range(chunks):
            span = slice(delivered.size * number // chunks, delivered.size * (number + 1) // chunks)
            if isinstance(places, slice):
                at: _Array | slice = slice(places.start + span.start, places.start + span.stop)
            else:
                at = places[span]
            moves[span], waited[span], votes[span] = self._advance_chunk(states, at, delivered[span])
        return moves, waited, votes

    def _advance_chunk(
        self, states: list[_Array], at: _Array | slice, delivered: _Array
    ) -> tuple[_Array, _Array, _Array | int]:
        last, first, second, *maxima = states
        tau = np.maximum(self.scalars.clock - _read(last, at), 1)
        last[at] = self.scalars.clock
        waited = tau.astype(np.float32)
        mean = delivered / waited
        if self.control.maximize:
            np.negative(mean, out=mean)
        power1, complement1, power2, complement2, *shorter = self._of_delay(tau)
        moment = _read(first, at)
        votes = _votes(moment, mean)
        moment *= power1
        moment += complement1 * mean
        first[at] = moment
        old = _read(second, at)
        square = old * power2
        mean *= mean
        if shorter:
            waited[self._are_outliers(square, mean, shorter[2])] *= -1
        square += complement2 * mean
        if shorter:
            np.minimum(square, shorter[0] * old + shorter[1] * mean, out=square)
        second[at] = square
        for maximum in maxima:
            square = np.maximum(_read(maximum, at), square)
            maximum[at] = square
        move = np.sqrt(square, out=square)  # the next three lines make it the move of one dense step
        move /= self.scalars.root
        move += self.scalars.epsilon
        return np.divide(moment, move, out=move), waited, votes

    def _of_delay(self, tau: _Array) -> list[Any]:
        """Return the factors of the first moment and of the mean, then of the second moment and of the squared mean.

        Unless every delivery is of one step, the results of :func:`forgetting` follow.
        """
        longest = int(tau.max())
        if longest >= _LOOKED_UP:
            return self._forgetting(tau, _compute_of_delay(tau, self.control.betas))
        bits = longest.bit_length()
        if longest == 1:
            return [row[1] for row in _table(bits, self.control.betas)]
        if bits not in self.tables:
            self.tables[bits] = self._forgetting(np.arange(1 << bits), _table(bits, self.control.betas))
        at = tau.astype(np.int64)
        return [_take(row, at) for row in self.tables[bits]]

    def _forgetting(self, tau: _Array, rows: list[_Array]) -> list[_Array]:
        waited, power, complement = (torch.from_numpy(each) for each in (tau.astype(np.float32), *rows[2:]))
        return [*rows, *(each.numpy() for each in forgetting(waited, power, complement, self.numbers))]

    def _are_outliers(self, held: _Array, square: _Array, weight: _Array) -> _Array:
        of_torch = [torch.from_numpy(each) for each in (held, square, weight)]
        found: _Array = is_outlier(of_torch[0], of_torch[1], of_torch[2], self.numbers).numpy()
        return found

    def catch_up_moves(
        self, moves: _Array, waited: _Array, votes: _Array, bounds: list[int], sizes: list[int], rms: _Array
    ) -> _Array:
        """Return ``moves`` times the number of dense steps that each delivery counts for, see :meth:`AdamControl.of`.

        ``waited`` and ``votes`` are those of :meth:`advance`, ``sizes`` and ``rms`` those of the parameters.
        """
        tau = np.abs(waited)
        factors = np.minimum(np.minimum(tau, self.scalars.catch_up), self.scalars.walk * np.sqrt(tau))
        factors[waited < 0] = 1
        distance = factors * moves
        distance *= self.scalars.distance
        distance *= distance
        np.fmin(distance, np.float32(LARGEST_SQUARE), out=distance)  # NaN counts as the largest
        some = [i for i, (start, stop) in enumerate(pairwise(bounds)) if start < stop]  # reduceat needs an entry
        starts = [bounds[i] for i in some]
        totals = np.add.reduceat(distance.astype(np.int64), starts)
        length = np.sqrt(totals.astype(np.float32) / np.array([sizes[i] for i in some], np.float32))
        reach = np.full_like(length, np.inf)
        if self.scalars.change != np.inf:
            reach = self.scalars.change * rms[some]
            reach = np.where(reach > FINE, reach, np.float32(FINE))  # at least one learning rate, also if it is NaN
        for i in np.flatnonzero(length > reach):
            own = factors[bounds[some[i]] : bounds[some[i] + 1]]
            own *= reach[i] / length[i]
            np.maximum(own, 1, out=own)
        steady = steadiness(torch.from_numpy(np.add.reduceat(votes, starts)), torch.float32).numpy()
        far = np.minimum(tau, self.scalars.steady, out=tau)
        factors += np.repeat(steady, np.diff([*starts, moves.size])) * np.subtract(far, factors, out=far)
        product: _Array = np.multiply(factors, moves, out=factors)
        return product


def _votes(before: _Array, mean: _Array) -> _Array:
    """Return 1 for an entry whose two arguments agree in sign, :data:`DISAGREES` if they do not, 0 if one of them is 0.

    Signs are compared, because products may underflow.
    """
    signs = np.sign(before) * np.sign(mean)
    votes: _Array = (signs > 0) + (signs < 0) * np.int64(DISAGREES)
    return votes


def _read(array: _Array, at: _Array | slice) -> _Array:
    return array[at].copy() if isinstance(at, slice) else _take(array, at)


@lru_cache(maxsize=64)
def _table(bits: int, betas: tuple[float, float]) -> list[_Array]:
    return _compute_of_delay(np.arange(1 << bits, dtype=np.int32), betas)


def _compute_of_delay(tau: _Array, betas: tuple[float, float]) -> list[_Array]:
    delays = torch.from_numpy(tau)
    tables = beta_tables(betas, torch.float32, delays.device)
    rows = *decays(delays, tables[0], tables[1]), *decays(delays, tables[2], tables[3])
    return [row.numpy() for row in rows]
