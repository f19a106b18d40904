"""Adam update of many tensors at once, with the bits of one :func:`tritoncomm_kernels.adam_update` per tensor.

A model has many small tensors. Updating them one by one costs more in calls than in arithmetic. Here the delivered
entries of several tensors are read into one flat vector, updated, and written back. The bounds of the tensors in that
vector are kept, because the limit on a tensor's change needs a sum over each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import is_

import torch

from tritoncomm_kernels.adam import AdamControl, AdamState, adam_update, beta_tables
from tritoncomm_kernels.adam_numpy import AdamArrays
from tritoncomm_kernels.checks import GRADIENT_DTYPES, channels_last
from tritoncomm_kernels.dispatch import kernel, triton_runs

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
        self._strides = list(map(torch.Tensor.stride, parameters))
        self._shapes = [parameter.shape for parameter in parameters]
        self._sizes = [parameter.numel() for parameter in parameters]
        self._groups = [
            _Group(dtype, positions, [[column[i] for i in positions] for column in self._columns])
            for dtype, positions in alike(parameters, states).items()
        ]
        grouped = {position for group in self._groups for position in group.positions}
        self._others = [position for position in range(len(parameters)) if position not in grouped]

    def holds(self, parameters: Sequence[torch.Tensor], states: AdamStates) -> bool:
        """Return True if these are the tensors of this object, in the same memory, and parameters in the same order."""
        columns = [parameters, *states.columns()]
        if [len(column) for column in columns] != [len(column) for column in self._columns]:
            return False
        # Views of param_rms may be new objects. Memory that this object refers to is not used for anything else.
        views = states.param_rms
        same = all(now is views or all(map(is_, now, then)) for now, then in zip(columns, self._columns, strict=True))
        same = same and self._strides == list(map(torch.Tensor.stride, parameters))
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
        if values is not None:
            self._check(indices, values)
        elif [gradient.shape for gradient in gradients] != self._shapes:
            shapes = [gradient.shape for gradient in gradients]
            raise ValueError(f"gradients have shapes {shapes}, expected {self._shapes}, like the parameters")
        others = list(self._others)
        for group in self._groups:
            own = [gradients[i] for i in group.positions]
            where = [indices[i] for i in group.positions]
            given = None if values is None else [values[i] for i in group.positions]
            if {gradient.dtype for gradient in own} != {group.dtype}:
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

    def _check(self, indices: _Indices, values: Sequence[torch.Tensor]) -> None:
        """Raise ``ValueError`` unless there is one of ``values`` per delivered coordinate."""
        counts = [size if at is None else at.numel() for at, size in zip(indices, self._sizes, strict=True)]
        kinds = {(given.dtype, given.dim()) for given in values}
        if kinds <= {(torch.float32, 1)} and list(map(torch.Tensor.numel, values)) == counts:
            return
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
    def arrays(self) -> AdamArrays:
        """The update of fp32 tensors on the CPU."""
        return AdamArrays(self.columns)

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
            maximize=control.maximize, compact=values is not None,
        )  # fmt: skip

    def update(
        self, gradients: list[torch.Tensor], control: AdamControl, indices: _Indices, keep: float, values: _Values
    ) -> None:
        """Update with numpy: the reference for fp32 on the CPU. It reads ``values``, if there are any."""
        where = [None if at is None else at.numpy() for at in indices]
        for position, size, at in zip(self.positions, self.arrays.sizes, where, strict=True):
            if at is not None and at.size and (at[0] < 0 or at[-1] >= size):
                raise ValueError(f"indices[{position}] has an index outside [0, {size})")
        self.arrays.update(gradients, control, where, keep, values)
