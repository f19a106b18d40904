"""Adam update of many parameters from one flat list of entries, or from a whole flat vector."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch

from tritoncomm_kernels.adam import AdamControl, AdamStates, decay
from tritoncomm_kernels.adam_numpy import AdamArrays
from tritoncomm_kernels.checks import GRADIENT_DTYPES, INDEX_LIMIT, channels_last, check_vector
from tritoncomm_kernels.dispatch import kernel, triton_runs

logger = logging.getLogger("tritoncomm")


class AdamFlat:
    """Adam updates of the same ``parameters`` with the same ``states``, step after step, from one flat gradient.

    Parameter i covers the indices from ``starts[i]`` on. ``starts`` ascend, and the ranges do not overlap. Entries
    outside all ranges are ignored. Half precision is computed in fp32.

    On a GPU, each dtype takes two launches, and the host does not wait. Parameters that a kernel cannot update are the
    exception: those in fp64, with states of another dtype, or neither contiguous nor in ``torch.channels_last`` or
    ``torch.channels_last_3d``. They are copied to the CPU and back in every step. The first one is logged.

    Attributes:
        parameters: See above.

    Raises ``ValueError`` if a state does not have the shape and device of its parameter, or ``last`` is not int32.
    """

    _has_logged: ClassVar[bool] = False

    def __init__(self, parameters: Sequence[torch.Tensor], states: AdamStates, starts: Sequence[int]) -> None:
        self.parameters = list(parameters)
        self._columns = [self.parameters, *map(list, states.columns())]
        self._starts, self._sizes = list(starts), list(map(torch.Tensor.numel, parameters))
        self._amsgrad = states.maximum is not None
        self._kinds = _kinds(self._columns)
        self._addresses = [list(map(torch.Tensor.data_ptr, column)) for column in self._columns]
        self._strides = list(map(torch.Tensor.stride, parameters))
        self._tables: dict[_Kind, torch.Tensor] = {}
        self._arrays: dict[_Kind, AdamArrays] = {}

    def holds(self, parameters: Sequence[torch.Tensor], states: AdamStates, starts: Sequence[int]) -> bool:
        """Return True if these are the tensors of this object, in the same memory, and parameters in the same order."""
        columns = [parameters, *states.columns()]
        same = self._starts == list(starts) and self._strides == list(map(torch.Tensor.stride, parameters))
        return same and self._addresses == [list(map(torch.Tensor.data_ptr, column)) for column in columns]

    def update(
        self,
        indices: torch.Tensor | None,
        control: AdamControl,
        *,
        values: torch.Tensor,
        keep: float = 1.0,
    ) -> None:
        """Multiply the parameters by ``keep``, then apply one Adam step to the delivered coordinates, in place.

        Args:
            indices: Delivered coordinates of the flat vector, int32 ``[k]``, ascending, with padding of -1 at the end.
                None means all.
            control: The settings of this step.
            values: The gradient at ``indices``, fp32 ``[k]``, or the whole flat vector without ``indices``. A value is
                rounded to the dtype of its parameter.
            keep: The factor of decoupled weight decay.

        Raises ``ValueError`` naming the invalid argument, before anything changes.
        """
        self._check(indices, values)
        if not self.parameters:
            return
        torch.autograd.graph.increment_version(self.parameters)
        runs_kernels = triton_runs(self.parameters[0])
        for kind, positions in self._kinds.items():
            if runs_kernels and kind.fits:
                self._launch(kind, indices, values, control, keep)
                continue
            if runs_kernels:
                self._log(self.parameters[positions[0]])
            if kind not in self._arrays:
                columns = [[column[i] for i in positions] for column in self._columns]
                self._arrays[kind] = AdamArrays(columns, [self._starts[i] for i in positions])
            self._arrays[kind].update(indices, values, control, keep)

    def _check(self, indices: torch.Tensor | None, values: torch.Tensor) -> None:
        """Raise ``ValueError`` unless ``values`` has a gradient for each delivered coordinate."""
        if indices is not None:
            check_vector(
                "indices", indices, dtypes=(torch.int32,), like=self.parameters[0] if self.parameters else None
            )
        end = self._starts[-1] + self._sizes[-1] if self._sizes else 0
        check_vector("values", values, numel=None if indices is None else indices.shape[0])
        if indices is None and values.shape[0] < end:
            raise ValueError(f"values has {values.shape[0]} elements: without indices, pass all {end}")

    def _launch(
        self,
        kind: _Kind,
        indices: torch.Tensor | None,
        values: torch.Tensor,
        control: AdamControl,
        keep: float,
    ) -> None:
        positions = self._kinds[kind]
        own = [self.parameters[i] for i in positions]
        decay(own, keep)
        lanes = self._starts[positions[-1]] + self._sizes[positions[-1]] if indices is None else indices.numel()
        if not lanes:
            return
        if kind not in self._tables:
            addresses = [[column[i] for i in positions] for column in self._addresses]
            self._tables[kind] = kernel("adam_triton").table_of(own, addresses, [self._starts[i] for i in positions])
        kernel("adam_triton").update(
            indices, values, self._tables[kind], control, lanes, dtype=kind.dtypes[0],
            amsgrad=self._amsgrad, images=any(not parameter.is_contiguous() for parameter in own),
        )  # fmt: skip

    def _log(self, parameter: torch.Tensor) -> None:
        """Log a parameter that no kernel can update, once per process."""
        if AdamFlat._has_logged:
            return
        AdamFlat._has_logged = True
        logger.warning(
            "no kernel can update a parameter of shape %s: it is in fp64, or it or its state is not contiguous or of "
            "another dtype, so it is copied to the CPU and back in each step: set parameter.data = "
            "parameter.data.contiguous() before wrap(), and the same for its tensors in optimizer.state. Further "
            "parameters are not logged",
            tuple(parameter.shape),
        )


class _Kind(NamedTuple):
    """What parameters have in common that are updated together: dtypes, and whether a kernel can update them.

    ``dtypes`` are those of the parameter, its moments, and its maximum.
    """

    dtypes: tuple[torch.dtype, ...]
    fits: bool


def _kinds(columns: Sequence[Sequence[torch.Tensor]]) -> dict[_Kind, list[int]]:
    """Return the positions of the parameters of each kind. ``columns`` are parameters, then the fields of states."""
    if any(len(column) != len(columns[0]) for column in columns):
        raise ValueError(f"states must have one tensor in each field for each of {len(columns[0])} parameters")
    found: dict[_Kind, list[int]] = {}
    for position, (parameter, first, second, last, rms, *maximum) in enumerate(zip(*columns, strict=True)):
        floats = (parameter, first, second, *maximum)
        for tensor in (*floats, last):
            if tensor.shape != parameter.shape or tensor.device != columns[0][0].device:
                raise ValueError(
                    f"a state has shape {tuple(tensor.shape)} on {tensor.device}: "
                    f"expected {tuple(parameter.shape)} on {columns[0][0].device}, like the parameter"
                )
        check_vector("param_rms", rms.reshape(-1), numel=1, like=parameter)
        if last.dtype != torch.int32:
            raise ValueError(f"last has dtype {last.dtype}: convert it to torch.int32")
        if parameter.numel() > INDEX_LIMIT:
            raise ValueError(f"a parameter has {parameter.numel()} elements: split it into parts of {INDEX_LIMIT}")
        ordered = all(tensor.is_contiguous() for tensor in (*floats, last))
        ordered = ordered or all(channels_last(tensor) is not None for tensor in (*floats, last))
        dtypes = tuple(tensor.dtype for tensor in floats)
        fits = ordered and len({*dtypes}) == 1 and parameter.dtype in GRADIENT_DTYPES
        found.setdefault(_Kind(dtypes, fits), []).append(position)
    return found
