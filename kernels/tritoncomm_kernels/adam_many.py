"""Adam update of many tensors at once, with the bits of one :func:`tritoncomm_kernels.adam_update` per tensor.

A model has many small tensors. Updating them one by one costs more in calls than in arithmetic. Here the delivered
entries of several tensors are read into one flat vector, updated, and written back. The bounds of the tensors in that
vector are kept, because the limit on a tensor's change needs a sum over each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise, starmap
from operator import is_
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tritoncomm_kernels.adam import (
    FINE,
    LARGEST_SQUARE,
    AdamControl,
    AdamState,
    adam_update,
    beta_tables,
    decays,
)
from tritoncomm_kernels.checks import GRADIENT_DTYPES, channels_last
from tritoncomm_kernels.dispatch import kernel, triton_runs
from tritoncomm_kernels.rms import consecutive

# Entries that are updated together. Smaller parts cost more calls. In larger ones, the memory that the entries were
# read from has left the cache when they are written.
_PART = 1 << 14
_LOOKED_UP = 1 << 16  # shorter delays are looked up in a table of at most 1.3 MB
_LARGE = 1 << 14  # elements from which on a tensor that is delivered as a whole is copied without places

_Array = npt.NDArray[Any]
_Indices = Sequence[torch.Tensor | None]
_Values = Sequence[torch.Tensor] | None


@dataclass(frozen=True)
class AdamStates:
    """States of many parameters: the fields of :class:`AdamState`, each with one tensor per parameter."""

    first: Sequence[torch.Tensor]
    second: Sequence[torch.Tensor]
    last: Sequence[torch.Tensor]
    param_rms: Sequence[torch.Tensor]
    maximum: Sequence[torch.Tensor] | None = None

    def at(self, position: int) -> AdamState:
        """Return the state of one parameter."""
        maximum = None if self.maximum is None else self.maximum[position]
        first, second, last, rms = (held[position] for held in (self.first, self.second, self.last, self.param_rms))
        return AdamState(first, second, last, rms, maximum)

    def columns(self) -> list[Sequence[torch.Tensor]]:
        """Return the fields that there are, ``maximum`` last."""
        return [self.first, self.second, self.last, self.param_rms, *([] if self.maximum is None else [self.maximum])]


class AdamMany:
    """Adam updates of the same ``parameters`` with the same ``states``, step after step.

    The tensors are checked and prepared once. If a tensor is replaced or its memory moves, :meth:`holds` returns False,
    and a new object is needed. All tensors must be on one device, and ``param_rms`` must be of shape ``[]``.

    On the CPU, states that are parts of one buffer per field, at equal places in each, are read and written faster.
    Contiguous fp32 tensors are updated together, with the Triton kernel those of any supported dtype. Others are
    updated one by one. Raises ``ValueError`` if a state does not have the shape and device of its parameter.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], states: AdamStates) -> None:
        self._columns = [list(parameters), *map(list, states.columns())]
        self._states = states
        self._addresses = [list(map(torch.Tensor.data_ptr, column)) for column in self._columns]
        self._shapes = [parameter.shape for parameter in parameters]
        self._groups = [
            _Group(dtype, positions, [[column[i] for i in positions] for column in self._columns])
            for dtype, positions in alike(parameters, states).items()
        ]
        grouped = {position for group in self._groups for position in group.positions}
        self._others = [position for position in range(len(parameters)) if position not in grouped]

    def holds(self, parameters: Sequence[torch.Tensor], states: AdamStates) -> bool:
        """Return True if these are the tensors of this object, in the same memory."""
        columns = [parameters, *states.columns()]
        if [len(column) for column in columns] != [len(column) for column in self._columns]:
            return False
        # Views of param_rms may be new objects. Memory that this object refers to is not used for anything else.
        views = states.param_rms
        same = all(now is views or all(map(is_, now, then)) for now, then in zip(columns, self._columns, strict=True))
        return same and self._addresses == [list(map(torch.Tensor.data_ptr, column)) for column in columns]

    def update(
        self,
        gradients: Sequence[torch.Tensor],
        control: AdamControl,
        indices: _Indices,
        *,
        keep: float = 1.0,
        values: _Values = None,
    ) -> None:
        """Multiply the parameters by ``keep``, then apply one Adam step to the delivered coordinates, in place.

        ``gradients`` and ``indices`` have one item per parameter. ``keep`` is the factor of decoupled weight decay.
        ``indices`` are those of :func:`adam_update`, and None means all coordinates. Here they must ascend. On the CPU,
        an index outside its parameter raises ``ValueError`` before any value changes. The Triton kernel ignores it.

        ``values`` (fp32 ``[k]`` beside ``[k]`` indices, ``[numel]`` without indices) are the gradients at the delivered
        coordinates, before they were rounded to the dtype of ``gradients``. They are read instead of ``gradients``,
        except where parameters are updated one by one. Default: None.
        """
        shapes = [gradient.shape for gradient in gradients]
        if shapes != self._shapes:
            raise ValueError(f"gradients have shapes {shapes}, expected {self._shapes}, like the parameters")
        self._check(indices, values)
        others = list(self._others)
        for group in self._groups:
            own = [gradients[i] for i in group.positions]
            where = [indices[i] for i in group.positions]
            given = None if values is None else [values[i] for i in group.positions]
            if any(gradient.dtype != group.dtype for gradient in own):
                others += group.positions
            elif triton_runs(own[0]):
                group.launch(own, control, where, keep, given)
            elif group.dtype == torch.float32 and own[0].device.type == "cpu":
                group.update(own, control, where, keep, given)
            else:
                others += group.positions
        for position in others:
            parameter = self._columns[0][position]
            if keep != 1:
                parameter.mul_(keep)
            adam_update(parameter, gradients[position], self._states.at(position), control, indices[position])

    def _check(self, indices: _Indices, values: _Values) -> None:
        """Raise ``ValueError`` unless there is one of ``values``, if there are any, per delivered coordinate."""
        if values is None:
            return
        sizes = map(torch.Size.numel, self._shapes)
        counts = [size if at is None else at.numel() for at, size in zip(indices, sizes, strict=True)]
        for position, (given, count) in enumerate(zip(values, counts, strict=True)):
            if given.dtype != torch.float32 or given.shape != (count,):
                raise ValueError(
                    f"values[{position}] is {given.dtype} of shape {tuple(given.shape)}: expected float32 of shape "
                    f"({count},), one value per delivered coordinate"
                )


def alike(
    parameters: Sequence[torch.Tensor], states: AdamStates, *, images: bool = False
) -> dict[torch.dtype, list[int]]:
    """Return the positions of the parameters that a kernel can update together, by dtype.

    They and their states are contiguous, and their floats are of one supported dtype. With ``images``, they may also be
    in ``torch.channels_last`` or ``torch.channels_last_3d``. Raises ``ValueError`` if a state does not have the shape
    and device of its parameter.
    """
    columns = [parameters, *states.columns()]
    if any(len(column) != len(parameters) for column in columns):
        raise ValueError(f"states must have one tensor in each field for each of {len(parameters)} parameters")
    found: dict[torch.dtype, list[int]] = {}
    for position, (parameter, first, second, last, _, *maximum) in enumerate(zip(*columns, strict=True)):
        for tensor in (first, second, last, *maximum):
            if tensor.shape != parameter.shape or tensor.device != parameters[0].device:
                raise ValueError(
                    f"a state has shape {tuple(tensor.shape)} on {tensor.device}: "
                    f"expected {tuple(parameter.shape)} on {parameters[0].device}, like the parameter"
                )
        floats = (parameter, first, second, *maximum)
        one_dtype = len({tensor.dtype for tensor in floats}) == 1 and parameter.dtype in GRADIENT_DTYPES
        ordered = all(tensor.is_contiguous() for tensor in (*floats, last))
        ordered = ordered or (images and all(channels_last(tensor) is not None for tensor in (*floats, last)))
        if one_dtype and last.dtype == torch.int32 and ordered:
            found.setdefault(parameter.dtype, []).append(position)
    return found


def decay(parameters: list[torch.Tensor], keep: float) -> None:
    """Multiply all ``parameters`` by ``keep``, in place."""
    if keep == 1:
        return
    if any(parameter.dtype == torch.float16 for parameter in parameters):
        for parameter in parameters:  # _foreach_mul_ would round the factor to fp16, too, on the CPU
            parameter.mul_(keep)
    else:
        torch._foreach_mul_(parameters, keep)


@dataclass(frozen=True)
class _Group:
    """Contiguous parameters of one dtype, and their states. ``columns`` are those of :class:`AdamMany`."""

    dtype: torch.dtype
    positions: list[int]
    columns: list[list[torch.Tensor]]

    @cached_property
    def arrays(self) -> list[list[_Array]]:
        """The memory of ``columns`` as flat numpy arrays."""
        return [[tensor.numpy(force=True).reshape(-1) for tensor in column] for column in self.columns]

    @cached_property
    def buffers(self) -> _Buffers | None:
        """The memory of the states, if all tensors of each column are parts of one buffer, at equal places in each."""
        _, first, second, last, _, *maximum = self.columns
        columns = first, second, last, *maximum
        places = {tuple(tensor.storage_offset() for tensor in column) for column in columns}
        storages = [{tensor.untyped_storage().data_ptr() for tensor in column} for column in columns]
        if len(places) > 1 or any(len(found) > 1 for found in storages):
            return None
        wholes = [torch.empty(0, dtype=column[0].dtype).set_(column[0].untyped_storage()) for column in columns]
        return _Buffers([whole.numpy() for whole in wholes], np.array(places.pop()), [t.numel() for t in first])

    def launch(
        self, gradients: list[torch.Tensor], control: AdamControl, indices: _Indices, keep: float, values: _Values
    ) -> None:
        """Update with the Triton kernel. It reads ``values``, if there are any, rounded as the gradients are."""
        parameters, first, second, last, param_rms, *maximum = self.columns
        decay(parameters, keep)
        torch.autograd.graph.increment_version(parameters)
        read = gradients if values is None else [each.to(self.dtype) for each in values]
        kernel("adam_triton").update_many(
            parameters, [gradient.contiguous() for gradient in read], first, second, last, param_rms,
            maximum[0] if maximum else None, indices, control.scalars,
            beta_tables(control.betas, torch.float32, parameters[0].device),
            maximize=control.maximize, coupled=control.coupled, limited=control.limited,
            compact=values is not None,
        )  # fmt: skip

    def update(
        self, gradients: list[torch.Tensor], control: AdamControl, indices: _Indices, keep: float, values: _Values
    ) -> None:
        """Update with numpy: the reference for fp32 on the CPU. It reads ``values``, if there are any."""
        parameters = self.arrays[0]
        where = [None if at is None else at.numpy() for at in indices]
        for position, array, at in zip(self.positions, parameters, where, strict=True):
            if at is not None and at.size and (at[0] < 0 or at[-1] >= array.size):
                raise ValueError(f"indices[{position}] has an index outside [0, {array.size})")
        torch.autograd.graph.increment_version(self.columns[0])
        dense = [gradient.numpy(force=True).reshape(-1) for gradient in gradients] if values is None else []
        given = None if values is None else torch.cat(list(values)).numpy()
        counts = [array.size if at is None else at.size for array, at in zip(parameters, where, strict=True)]
        bounds = [0, *accumulate(counts)]
        with np.errstate(all="ignore"):
            for part in consecutive(counts, _PART):
                columns = [column[part] for column in self.arrays]
                at = None if self.buffers is None else self.buffers.places(part, where[part], counts[part])
                if self.buffers is not None and at is not None:
                    first, second, last, *maximum = [[buffer] for buffer in self.buffers.arrays]
                    columns[1:4], columns[5:] = [first, second, last], maximum
                start, stop = bounds[part.start], bounds[part.stop]
                own = _Part(where[part], [bound - start for bound in bounds[part.start : part.stop + 1]], control, at)
                own.update(columns, own.read(dense[part]) if given is None else given[start:stop], keep)


@dataclass(frozen=True)
class _Buffers:
    """One buffer per state. It holds the states of all tensors, of ``sizes`` elements, from ``starts`` on."""

    arrays: list[_Array]
    starts: _Array
    sizes: list[int]

    def places(self, part: slice, where: list[_Array | None], counts: list[int]) -> _Array | None:
        """Return the places of the delivered coordinates of several tensors in each buffer.

        Return None if a large tensor is delivered as a whole. It is copied faster without places.
        """
        if any(at is None and count >= _LARGE for at, count in zip(where, counts, strict=True)):
            return None
        every = np.arange(max(counts, default=0))
        lists = [every[:count] if at is None else at for at, count in zip(where, counts, strict=True)]
        found: _Array = np.concatenate(lists)
        found += np.repeat(self.starts[part], counts)
        return found


@dataclass(frozen=True)
class _Part:
    """The delivered coordinates of several tensors as one flat vector, in which ``bounds`` separate the tensors.

    With ``at``, each state is one buffer, and ``at`` are the places of the coordinates in it.
    """

    where: list[_Array | None]
    bounds: list[int]
    control: AdamControl
    at: _Array | None = None

    @cached_property
    def spans(self) -> list[slice]:
        """The range of each tensor in the vector."""
        return list(starmap(slice, pairwise(self.bounds)))

    def update(self, arrays: list[list[_Array]], delivered: _Array, keep: float) -> None:
        """Update the ``arrays``: parameters, first, second, last, param_rms, and maximum if there is one.

        With ``at``, the lists of first, second, last and maximum hold one buffer each. ``delivered`` are the gradients
        of the delivered coordinates.
        """
        parameters, firsts, seconds, lasts, param_rms, *maxima = arrays
        scalars = self.control.scalars.numpy()
        steps = np.int32(scalars[0])
        rate, root, epsilon, limit, decay, walk, fine, change = scalars[1:].astype(np.float32)
        values = self.read(parameters, None if keep == 1 else np.float32(keep))
        if not values.size:
            return
        tau = np.maximum(steps - self._read_state(lasts), 1)
        mean = delivered / tau.astype(np.float32)
        if self.control.maximize:
            np.negative(mean, out=mean)
        if self.control.coupled:
            mean += decay * values
        power1, complement1, power2, complement2, factor = _of_delay(tau, self.control.betas, limit, walk)
        first = self._read_state(firsts)
        first *= power1
        first += complement1 * mean
        self._write_state(firsts, first)
        second = self._read_state(seconds)
        second *= power2
        mean *= mean
        second += complement2 * mean
        self._write_state(seconds, second)
        self._write_state(lasts, np.full(values.size, steps))
        for maximum in maxima:
            second = np.maximum(self._read_state(maximum), second)
            self._write_state(maximum, second)
        move = np.sqrt(second)  # the next three lines make it the move of one dense step
        move /= root
        move += epsilon
        np.divide(first, move, out=move)
        if self.control.limited:
            self._limit(factor, factor * move * fine, change * np.concatenate(param_rms), parameters)
        move *= factor
        move *= rate
        values -= move
        self._write(parameters, values)

    def _read_state(self, arrays: list[_Array]) -> _Array:
        """Return the delivered entries of a state."""
        if self.at is None:
            return self.read(arrays)
        return arrays[0].take(self.at, None, np.empty(self.bounds[-1], arrays[0].dtype), "wrap")

    def _write_state(self, arrays: list[_Array], values: _Array) -> None:
        if self.at is None:
            self._write(arrays, values)
        else:
            arrays[0][self.at] = values

    def read(self, arrays: list[_Array], keep: np.float32 | None = None) -> _Array:
        """Return the delivered entries of ``arrays``, after all entries have been multiplied by ``keep``."""
        values = np.empty(self.bounds[-1], arrays[0].dtype)
        for array, at, span in zip(arrays, self.where, self.spans, strict=True):
            if at is None:  # the array itself is written with the updated entries
                np.copyto(values[span], array) if keep is None else np.multiply(array, keep, out=values[span])
                continue
            if keep is not None:
                np.multiply(array, keep, out=array)  # here, because it brings the entries into the cache
            # The indices have been checked. "wrap" does not change them, and is the fastest mode.
            array.take(at, None, values[span], "wrap")
        return values

    def _write(self, arrays: list[_Array], values: _Array) -> None:
        for array, at, span in zip(arrays, self.where, self.spans, strict=True):
            array[... if at is None else at] = values[span]

    def _limit(self, factor: _Array, moves: _Array, reach: _Array, parameters: list[_Array]) -> None:
        """Shrink the ``factor`` of tensors that would move further than ``reach``. See :meth:`AdamControl.of`."""
        moves *= moves
        np.fmin(moves, np.float32(LARGEST_SQUARE), out=moves)  # NaN counts as the largest
        some = [i for i, (start, stop) in enumerate(pairwise(self.bounds)) if start < stop]  # reduceat needs an entry
        totals = np.add.reduceat(moves.astype(np.int64), [self.bounds[i] for i in some])
        sizes = np.array([parameters[i].size for i in some], np.float32)
        length = np.sqrt(totals.astype(np.float32) / sizes)
        reach = np.where(reach > FINE, reach, np.float32(FINE))[some]  # at least one learning rate, also if it is NaN
        for i in np.flatnonzero(length > reach):
            own = factor[self.bounds[some[i]] : self.bounds[some[i] + 1]]
            own *= reach[i] / length[i]
            np.maximum(own, 1, out=own)


def _of_delay(tau: _Array, betas: tuple[float, float], limit: np.float32, walk: np.float32) -> list[_Array]:
    """Return ``beta^tau`` and ``1 - beta^tau`` for both betas, and the factor of a delivery after ``tau`` steps."""
    longest = int(tau.max())
    if longest >= _LOOKED_UP:
        return _compute_of_delay(tau, betas, limit, walk)
    table, at = _table(longest.bit_length(), betas, limit, walk), tau.astype(np.int64)
    return [row.take(at, None, np.empty(tau.size, np.float32), "wrap") for row in table]


@lru_cache(maxsize=64)
def _table(bits: int, betas: tuple[float, float], limit: np.float32, walk: np.float32) -> list[_Array]:
    return _compute_of_delay(np.arange(1 << bits, dtype=np.int32), betas, limit, walk)


def _compute_of_delay(tau: _Array, betas: tuple[float, float], limit: np.float32, walk: np.float32) -> list[_Array]:
    delays, waited = torch.from_numpy(tau), tau.astype(np.float32)
    tables = beta_tables(betas, torch.float32, delays.device)
    rows = *decays(delays, tables[0], tables[1]), *decays(delays, tables[2], tables[3])
    return [*(row.numpy() for row in rows), np.minimum(np.minimum(waited, limit), walk * np.sqrt(waited))]
