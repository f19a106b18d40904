"""Adam update of the entries of one flat list, whose number and whose parameters only the device knows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import ClassVar

import torch

from tritoncomm_kernels.adam import AdamControl, adam_update, beta_tables
from tritoncomm_kernels.adam_layout import Row
from tritoncomm_kernels.adam_many import AdamStates, alike, decay
from tritoncomm_kernels.checks import channels_last
from tritoncomm_kernels.dispatch import kernel, triton_runs
from tritoncomm_kernels.entries import Padded
from tritoncomm_kernels.workspace import copied_to

logger = logging.getLogger("tritoncomm")


class AdamFlat:
    """Adam updates of the same ``parameters`` with the same ``states``, step after step, from flat lists of entries.

    Parameter i covers the indices from ``starts[i]`` on. ``starts`` ascend, and the ranges do not overlap. Entries
    outside all ranges are ignored. The bits are those of one :func:`tritoncomm_kernels.adam_update` per parameter. On a
    GPU the host does not wait, and the number of launches does not depend on the number of parameters. Parameters
    that are neither contiguous nor in ``torch.channels_last`` or ``torch.channels_last_3d`` are the exception: the host
    reads where the entries of each are. The first such parameter is logged.

    Raises ``ValueError`` if a state does not have the shape and device of its parameter.
    """

    _has_logged: ClassVar[bool] = False

    def __init__(self, parameters: Sequence[torch.Tensor], states: AdamStates, starts: Sequence[int]) -> None:
        self.parameters = list(parameters)
        self.states = states
        self.starts = list(starts)
        columns = [self.parameters, *states.columns()]
        self._addresses = [list(map(torch.Tensor.data_ptr, column)) for column in columns]
        self._strides = list(map(torch.Tensor.stride, self.parameters))
        self._tables: dict[torch.dtype, torch.Tensor] = {}
        self._images = [
            (1, 1) if parameter.is_contiguous() else channels_last(parameter) or (1, 1) for parameter in self.parameters
        ]
        self._together = alike(self.parameters, states, images=True)

    def holds(self, parameters: Sequence[torch.Tensor], states: AdamStates, starts: Sequence[int]) -> bool:
        """Return True if these are the tensors of this object, in the same memory, and parameters in the same order."""
        columns = [parameters, *states.columns()]
        addresses = [list(map(torch.Tensor.data_ptr, column)) for column in columns]
        same = self.starts == list(starts) and self._strides == list(map(torch.Tensor.stride, parameters))
        return same and self._addresses == addresses

    def update(
        self,
        entries: Padded,
        control: AdamControl,
        *,
        keep: float = 1.0,
        gradients: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Multiply the parameters by ``keep``, then apply one Adam step to ``entries`` (``[room]``), in place.

        The gradient of an entry is its value, rounded to the dtype of its parameter. If ``gradients`` are given, one
        per parameter, it is read from there instead.
        """
        decay(self.parameters, keep)
        left = set(range(len(self.parameters)))
        if entries.room and self.parameters and triton_runs(self.parameters[0]):
            for dtype, positions in self._together.items():
                own = None if gradients is None else [self._laid_out(gradients[i], i) for i in positions]
                if own is None or all(each.dtype == dtype for each in own):
                    self._launch(entries, control, dtype, positions, own)
                    left -= set(positions)
            self._log_strided(left)
        if left and entries.room:
            self._one_by_one(entries, control, sorted(left), gradients)

    def _laid_out(self, gradient: torch.Tensor, position: int) -> torch.Tensor:
        """Return ``gradient``, or a copy of it with its elements where those of its parameter are."""
        parameter = self.parameters[position]
        fits = gradient.is_contiguous() if parameter.is_contiguous() else channels_last(gradient) is not None
        return gradient if fits else torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)

    def _launch(
        self,
        entries: Padded,
        control: AdamControl,
        dtype: torch.dtype,
        positions: list[int],
        gradients: Sequence[torch.Tensor] | None,
    ) -> None:
        module, device = kernel("adam_flat_triton"), entries.indices.device
        torch.autograd.graph.increment_version([self.parameters[i] for i in positions])
        table = self._tables.get(dtype)
        if table is None or gradients is not None:
            table = copied_to(torch.tensor(self._rows(positions, gradients), dtype=torch.int64), device)
        if gradients is None:
            self._tables[dtype] = table
        module.update(
            entries.indices, entries.values.to(dtype) if gradients is None else None, table, control.scalars,
            beta_tables(control.betas, torch.float32, device), dtype, amsgrad=self.states.maximum is not None,
            maximize=control.maximize,
            images=any(self._images[i] != (1, 1) for i in positions),
        )  # fmt: skip

    def _log_strided(self, left: set[int]) -> None:
        """Log the first parameter at the positions ``left`` that is strided, or its state is, once per process."""
        columns = [self.parameters, self.states.first, self.states.second, self.states.last]
        strided = [self.parameters[i] for i in sorted(left) if not all(held[i].is_contiguous() for held in columns)]
        if not strided or AdamFlat._has_logged:
            return
        AdamFlat._has_logged = True
        logger.warning(
            "a parameter of shape %s or its state is not contiguous, so the host waits for the GPU to update it, in "
            "each step: set parameter.data = parameter.data.contiguous() before wrap(), and the same for its tensors "
            "in optimizer.state. Further parameters are not logged",
            tuple(strided[0].shape),
        )

    def _rows(self, positions: list[int], gradients: Sequence[torch.Tensor] | None) -> list[Row]:
        """Return the addresses, sizes and starts of the parameters at ``positions``."""
        parameters, first, second, last, param_rms, *maximum = self._addresses
        read = [0] * len(positions) if gradients is None else list(map(torch.Tensor.data_ptr, gradients))
        return [
            Row(
                parameter=parameters[i],
                gradient=gradient,
                first=first[i],
                second=second[i],
                last=last[i],
                param_rms=param_rms[i],
                maximum=maximum[0][i] if maximum else 0,
                numel=self.parameters[i].numel(),
                start=self.starts[i],
                channels=self._images[i][0],
                positions=self._images[i][1],
            )
            for i, gradient in zip(positions, read, strict=True)
        ]

    def _one_by_one(
        self,
        entries: Padded,
        control: AdamControl,
        positions: Sequence[int],
        gradients: Sequence[torch.Tensor] | None,
    ) -> None:
        """Update the parameters at ``positions``: the reference."""
        found = entries.trimmed()
        for position in positions:
            parameter, start = self.parameters[position], self.starts[position]
            bounds = found.indices.new_tensor([start, start + parameter.numel()])
            low, high = torch.searchsorted(found.indices, bounds).tolist()
            at = (found.indices[low:high] - start).long()
            if gradients is None:
                dense = torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
                dense[at] = found.values[low:high].to(parameter.dtype)
                gradient = dense.view(parameter.shape)
            else:
                gradient = gradients[position]
            adam_update(parameter, gradient, self.states.at(position), control, at)
