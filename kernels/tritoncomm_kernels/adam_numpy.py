"""Adam update of tensors in CPU memory with NumPy: the reference of :class:`~tritoncomm_kernels.AdamFlat`.

Every delivered entry is in a cache line of its own, so most of the time goes to memory. An entry is therefore written
soon after it was read, while its line is in the cache. States are updated in chunks of entries, one state after the
other. Weight decay passes over a whole parameter, and the delivered entries of this parameter are updated next.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tritoncomm_kernels.adam import (
    DISAGREES,
    FINE,
    LARGEST_SQUARE,
    LEAST_WEIGHT,
    MEMORY,
    OUTLIER,
    AdamControl,
    Scalars,
    beta_tables,
    decay,
    decays,
)
from tritoncomm_kernels.rms import consecutive

# Entries of a state that are read and written together. Smaller chunks cost more calls. With larger ones, the memory
# that they were read from has left the cache when they are written.
_CHUNK = 1 << 13
# Entries of whole tensors that are updated together. Their moves are computed before the parameters change, because
# the limit on the change of a tensor needs a sum over the tensor.
_PART = 1 << 16
_LOOKED_UP = 1 << 16  # shorter delays are looked up in a table of at most 1.3 MB

_HALF = (torch.bfloat16, torch.float16)

_Array = npt.NDArray[Any]
_Type = Any  # of the numbers in an array
# A tensor by its number, a part of a chunk of entries, and their places in the tensor, an array or a slice.
_Piece = tuple[int, slice, Any]


class _Column:
    """Tensors of one dtype as flat arrays in CPU memory. Of strided tensors, and those on a GPU, they are copies."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self.flats = list(map(_flat, tensors))
        self._arrays = list(map(_raw, self.flats))
        self.copied = [i for i, flat in enumerate(self.flats) if flat.data_ptr() != tensors[i].data_ptr()]
        self._is_half = bool(tensors) and tensors[0].dtype in _HALF

    def load(self) -> None:
        """Read what is copied."""
        for i in self.copied:
            self.flats[i] = _flat(self._tensors[i])
            self._arrays[i] = _raw(self.flats[i])

    def store(self) -> None:
        """Write it back."""
        for i in self.copied:
            self._tensors[i].copy_(self.flats[i].view(self._tensors[i].shape))

    def read(self, pieces: list[_Piece], dtype: _Type) -> _Array:
        """Return a chunk of entries in ``dtype``."""
        values = np.empty(pieces[-1][1].stop, self._arrays[0].dtype)
        if type(pieces[0][2]) is slice:  # and so are all others
            for number, span, where in pieces:
                values[span] = self._arrays[number][where]
        else:  # the indices are inside: "wrap" does not change them, and is the fastest mode
            for number, span, where in pieces:
                self._arrays[number].take(where, None, values[span], "wrap")
        if self._is_half:
            values = torch.from_numpy(values).view(self._tensors[0].dtype).float().numpy()
        return values.astype(dtype, copy=False)

    def write(self, pieces: list[_Piece], values: _Array) -> None:
        """Write a chunk of entries."""
        if self._is_half:
            values = torch.from_numpy(values).to(self._tensors[0].dtype).view(torch.int16).numpy()
        for number, span, where in pieces:
            self._arrays[number][where] = values[span]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(-1)


def _raw(flat: torch.Tensor) -> _Array:
    """Return the memory of ``flat``. numpy has no bf16."""
    return (flat.view(torch.int16) if flat.dtype in _HALF else flat).numpy()


@dataclass(frozen=True)
class _Part:
    """The delivered entries of consecutive tensors as one vector, in which ``bounds`` separate the tensors.

    The tensors are those with the ``numbers``. ``delivered`` are the gradients. ``at`` are the places in each tensor,
    None means all.
    """

    numbers: range
    bounds: list[int]
    delivered: _Array
    at: _Array | None

    @property
    def chunks(self) -> list[tuple[slice, list[_Piece]]]:
        """Consecutive ranges of the vector, with the pieces of each."""
        size = self.bounds[-1]
        count = max(1, round(size / _CHUNK))
        cuts = [size * number // count for number in range(count + 1)] if size else []
        return [(slice(start, stop), self._pieces(start, stop)) for start, stop in pairwise(cuts)]

    def _pieces(self, start: int, stop: int) -> list[_Piece]:
        first, last = bisect_right(self.bounds, start) - 1, bisect_left(self.bounds, stop)
        cuts = pairwise([start, *self.bounds[first + 1 : last], stop])
        return [
            (
                number,
                slice(low - start, high - start),
                slice(low - begin, high - begin) if self.at is None else self.at[low:high],
            )
            for number, begin, (low, high) in zip(self.numbers[first:last], self.bounds[first:last], cuts, strict=True)
            if low < high
        ]


class AdamArrays:
    """The update of parameters of one kind, with NumPy. ``columns`` are parameters, then the fields of states."""

    def __init__(self, columns: list[list[torch.Tensor]], starts: list[int]) -> None:
        parameters, first, second, last, self._rms, *maximum = columns
        self._parameters, *self._states = (_Column(held) for held in (parameters, last, first, second, *maximum))
        self._copied = [column for column in (self._parameters, *self._states) if column.copied]
        self._sizes, self._dtype = list(map(torch.Tensor.numel, parameters)), parameters[0].dtype
        self._starts = np.array(starts, np.int32)
        self._ends = self._starts + np.array(self._sizes, np.int32)

    def update(
        self,
        indices: torch.Tensor | None,
        values: torch.Tensor,
        control: AdamControl,
        keep: float,
    ) -> None:
        """See :meth:`AdamFlat.update`."""
        step = _Step(control, np.float64 if self._dtype == torch.float64 else np.float32)
        for column in self._copied:
            column.load()
        given = _rounded(values.cpu(), self._dtype).numpy()
        with np.errstate(all="ignore"):
            for part in self._parts(None if indices is None else indices.cpu().numpy(), given):
                self._update_part(part, step, keep)
        for column in self._copied:
            column.store()

    def _parts(self, listed: _Array | None, given: _Array) -> Iterator[_Part]:
        """Return the parts of the list, or of the whole vector."""
        lows: _Array = self._starts
        highs: _Array = self._ends
        if listed is not None:
            entries = listed[listed >= 0]  # without padding
            lows, highs = entries.searchsorted(lows), entries.searchsorted(highs)
        counts = (highs - lows).tolist()
        for span in consecutive(counts, _PART):
            numbers, bounds = range(span.start, span.stop), [0, *accumulate(counts[span])]
            spans = [slice(lows[i], highs[i]) for i in numbers]
            delivered = np.concatenate([given[own] for own in spans])
            at = None
            if listed is not None:
                at = np.empty(bounds[-1], np.int64)
                for i, own, (start, stop) in zip(numbers, spans, pairwise(bounds), strict=True):
                    np.subtract(listed[own], self._starts[i], at[start:stop])
            yield _Part(numbers, bounds, delivered, at)

    def _update_part(self, part: _Part, step: _Step, keep: float) -> None:
        """Update the states, then the parameters."""
        chunks, size = part.chunks, part.bounds[-1]
        moves, waited, votes = np.empty(size, step.wide), np.empty(size, step.wide), np.empty(size, np.int64)
        for span, pieces in chunks:
            moves[span], waited[span], votes[span] = step.advance(self._states, pieces, part.delivered[span])
        if np.logical_or.reduce(waited != 1):  # otherwise every entry is delivered in every step
            own = slice(part.numbers.start, part.numbers.stop)
            rms = np.array([float(held) for held in self._rms[own]], step.wide)
            moves = step.catch_up_moves(moves, waited, votes, part.bounds, self._sizes[own], rms)
        moves *= step.scalars.rate
        decay(self._parameters.flats[part.numbers.start : part.numbers.stop], keep)
        for span, pieces in chunks:
            held = self._parameters.read(pieces, step.wide)
            self._parameters.write(pieces, np.subtract(held, moves[span], held))


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return fp32 ``values`` as fp32 or fp64 numbers that ``dtype`` can hold."""
    return values.to(dtype).to(torch.promote_types(dtype, torch.float32))


class _Step:
    """The settings of one step, rounded to the type ``wide``, and the factors of each delay."""

    def __init__(self, control: AdamControl, wide: _Type) -> None:
        self.wide = wide
        self._control = control
        exact = Scalars(*control.scalars.cpu().numpy())
        self.scalars = Scalars(*map(wide, exact))
        self._clock = np.int32(exact.clock)
        self._of_bits: dict[int, _Array] = {}

    def advance(self, states: list[_Column], pieces: list[_Piece], delivered: _Array) -> tuple[_Array, _Array, _Array]:
        """Update the entries of ``states``: last, first, second, and maximum if there is one.

        Returns the moves of one dense step, in learning rates, the number of steps since each previous delivery,
        negative for outliers, and the votes of the entries (int64), which tell whether gradients are steady.
        """
        last, first, second, *maxima = states
        tau = np.maximum(self._clock - last.read(pieces, np.int32), 1)
        last.write(pieces, np.array([self._clock]).repeat(tau.size))
        waited = tau.astype(self.wide)
        mean = delivered / waited
        if self._control.maximize:
            np.negative(mean, out=mean)
        power1, complement1, power2, complement2, *shorter = self._of_delay(tau)
        moment = first.read(pieces, self.wide)
        votes = _votes(moment, mean)
        moment *= power1
        moment += complement1 * mean
        first.write(pieces, moment)
        old = second.read(pieces, self.wide)
        square = old * power2
        mean *= mean
        if shorter:
            waited[self._are_outliers(square, mean, shorter[2])] *= -1
        square += complement2 * mean
        if shorter:
            np.minimum(square, shorter[0] * old + shorter[1] * mean, out=square)
        second.write(pieces, square)
        for maximum in maxima:
            square = np.maximum(maximum.read(pieces, self.wide), square)
            maximum.write(pieces, square)
        move = np.sqrt(square, out=square)  # the next three lines make it the move of one dense step
        move /= self.scalars.root
        move += self.scalars.epsilon
        return np.divide(moment, move, out=move), waited, votes

    def _of_delay(self, tau: _Array) -> list[Any]:
        """Return the factors of the first moment and of the mean, then of the second moment and of the squared mean.

        Unless every delivery is of one step, the results of :meth:`_forgetting` follow.
        """
        longest, betas = int(np.maximum.reduce(tau)), self._control.betas
        if longest >= _LOOKED_UP:
            return self._forgetting(tau, _compute_of_delay(tau, betas, self.wide))
        bits = longest.bit_length()
        if longest == 1:
            return [row[1] for row in _table(bits, betas, self.wide)]
        if bits not in self._of_bits:
            self._of_bits[bits] = np.array(self._forgetting(np.arange(1 << bits), _table(bits, betas, self.wide)))
        return list(self._of_bits[bits].take(tau.astype(np.int64), axis=1, mode="wrap"))

    def _forgetting(self, tau: _Array, rows: list[_Array]) -> list[_Array]:
        """Return ``rows``, other factors of the second moment and of the squared mean, and the moment's weight.

        With these, the moment weighs at most (b / (b + tau))^4 in the bias-corrected average, where
        b = max(t - tau, 78), see :meth:`AdamControl.of`. The last result is its weight without this limit.
        """
        waited, power, complement = tau.astype(self.wide), *rows[2:]
        before = np.maximum(self.scalars.steps - waited, MEMORY)
        left = before / (before + waited)
        limit = (left * left) * (left * left)
        weight = 1 - complement * self.scalars.per_correction
        above = (waited > 1) & (weight > limit)
        power = np.where(above, power * (limit / weight), power)
        return [*rows, power, np.where(above, self.scalars.correction * (1 - limit), complement), weight]

    def _are_outliers(self, held: _Array, square: _Array, weight: _Array) -> _Array:
        """Return which means are more than :data:`OUTLIER` times the root of the bias-corrected moment before.

        ``held`` is what is left of that moment, with this ``weight``, and ``square`` the squared mean.
        """
        known = (held > 0) & (weight > LEAST_WEIGHT)
        above: _Array = square * (self.scalars.correction * weight) > held * (OUTLIER * OUTLIER)
        return known & above

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
        np.fmin(distance, self.wide(LARGEST_SQUARE), out=distance)  # NaN counts as the largest
        some = [i for i, (start, stop) in enumerate(pairwise(bounds)) if start < stop]  # reduceat needs an entry
        starts = [bounds[i] for i in some]
        totals = np.add.reduceat(distance.astype(np.int64), starts)
        length = np.sqrt(totals.astype(self.wide) / np.array([sizes[i] for i in some], self.wide))
        if self.scalars.change != np.inf:
            reach = self.scalars.change * rms[some]
            reach = np.where(reach > FINE, reach, self.wide(FINE))  # at least one learning rate, also if it is NaN
            for i in (length > reach).nonzero()[0]:
                own = factors[bounds[some[i]] : bounds[some[i] + 1]]
                own *= reach[i] / length[i]
                np.maximum(own, 1, out=own)
        steady = _steadiness(np.add.reduceat(votes, starts), self.wide)
        far = np.minimum(tau, self.scalars.steady, out=tau)
        counts = [bounds[i + 1] - bounds[i] for i in some]
        factors += steady.repeat(counts) * np.subtract(far, factors, out=far)
        product: _Array = np.multiply(factors, moves, out=factors)
        return product


def _votes(before: _Array, mean: _Array) -> _Array:
    """Return 1 for an entry whose two arguments agree in sign, :data:`DISAGREES` if they do not, 0 if one of them is 0.

    Signs are compared, because products may underflow.
    """
    signs = np.sign(before) * np.sign(mean)
    votes: _Array = (signs > 0) + (signs < 0) * np.int64(DISAGREES)
    return votes


def _steadiness(votes: _Array, wide: _Type) -> _Array:
    """Return the weight of a full catch-up, from 0 to 1, for the ``votes`` of tensors. See :meth:`AdamControl.of`."""
    agree, disagree = votes & (DISAGREES - 1), votes >> 32
    count = np.maximum(agree + disagree, 1).astype(wide)
    weight: _Array = 4 * (((agree - disagree).astype(wide) - 3 * np.sqrt(count)) / count) - 1
    return weight.clip(0, 1)


@lru_cache(maxsize=64)
def _table(bits: int, betas: tuple[float, float], wide: _Type) -> list[_Array]:
    return _compute_of_delay(np.arange(1 << bits, dtype=np.int32), betas, wide)


def _compute_of_delay(tau: _Array, betas: tuple[float, float], wide: _Type) -> list[_Array]:
    delays, dtype = torch.from_numpy(tau), torch.float64 if wide is np.float64 else torch.float32
    tables = beta_tables(betas, dtype, delays.device)
    rows = *decays(delays, tables[0], tables[1]), *decays(delays, tables[2], tables[3])
    return [row.numpy() for row in rows]
