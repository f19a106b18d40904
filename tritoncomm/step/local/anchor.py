"""Anchors: copies of parameters in fp32, from which changes are told; and what somebody else has changed.

Weights that are loaded, for example, are written outside of the steps of the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tritoncomm.step.tensors.shards import like_parameter, local
from tritoncomm.step.torch_internals import version_of

_LARGE = 1e-3  # relative change of a parameter above which it was loaded
_SAMPLED = 64  # about as many values of a parameter are compared


def anchor_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``parameter`` that requires gradients, with the same sharding, in fp32 or a wider dtype."""
    own = local(parameter.detach())
    dtype = torch.promote_types(own.dtype, torch.float32)
    return like_parameter(parameter, own.to(dtype, copy=True).reshape(-1)).requires_grad_()


def delta_of(anchor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return what was changed of ``parameter`` since it was the ``anchor``, in the dtype of the anchor.

    The anchor counts with the precision of the parameter.
    """
    return anchor.to(parameter.dtype).to(anchor.dtype, copy=True).sub_(parameter)


def write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrite ``tensor`` with ``values`` of the same shape. Of DTensors, this rank writes its shard."""
    local(tensor.detach()).copy_(local(values.detach()))


class Watch:
    """What parameters were, to detect that somebody else has written to them.

    Writes to ``.data`` have no version, so a sample of the values is compared, too.
    """

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._places: list[int] = []  # where the parameters are in memory
        self._samples: list[torch.Tensor] = []  # views of some values of each
        self._values = torch.empty(0, device="cpu")  # what these were

    def note_versions(self, parameters: Sequence[torch.Tensor]) -> None:
        """Note the versions of ``parameters`` after a step that is not exchanged yet."""
        self._versions = [*map(version_of, parameters)]

    def note(self, parameters: Sequence[torch.Tensor]) -> None:
        """Note what ``parameters`` are after an exchange."""
        self.note_versions(parameters)
        places = _places(parameters)
        if places != self._places:
            self._samples, self._places = [*map(_sample, parameters)], places
        if self._samples:
            self._values = torch.cat(self._samples)

    def were_written(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return True if the versions of ``parameters`` are not those that were noted."""
        return self._versions != [*map(version_of, parameters)]

    def were_loaded(self, parameters: Sequence[torch.Tensor], anchors: Sequence[torch.Tensor]) -> bool:
        """Return True if one of ``parameters`` has changed by more than a little since the last exchange.

        ``anchors`` are what they were then. The host waits for a GPU once, if nothing has changed.
        """
        if self._places == _places(parameters) and not self.were_written(parameters) and self._sample_is_equal:
            return False
        return _are_far(parameters, anchors)

    @property
    def _sample_is_equal(self) -> bool:
        return not self._samples or torch.equal(torch.cat(self._samples), self._values)


def _are_far(parameters: Sequence[torch.Tensor], anchors: Sequence[torch.Tensor]) -> bool:
    """Return True if one of ``parameters`` is far from its anchor."""
    pairs = zip(anchors, parameters, strict=True)
    held = [(local(anchor.detach()), local(parameter.detach())) for anchor, parameter in pairs]
    changes = torch.stack([delta_of(anchor, own).double().square().sum() for anchor, own in held])
    sizes = torch.stack([anchor.double().square().sum() for anchor, _ in held])
    counts = sizes.new_tensor([anchor.numel() for anchor, _ in held])
    # A tensor may be zero at the start. Beside values of usual size, some change of it is small, too.
    usual = sizes.sum() / counts.sum().clamp(min=1)
    sizes = torch.maximum(sizes, _LARGE**2 * usual * counts)
    limits = sizes.new_tensor([max(_LARGE, 2 * torch.finfo(own.dtype).eps) for _, own in held])
    return bool((changes > limits**2 * sizes).any())


def _places(parameters: Sequence[torch.Tensor]) -> list[int]:
    return [local(parameter).data_ptr() for parameter in parameters]


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    """Return a view of some values of ``parameter``, or of this rank's shard, in one dimension."""
    own = local(parameter.detach())
    if own.numel() and own.stride() != torch.empty_like(own, device="meta").stride():  # its memory has gaps
        while own.dim() > 1:
            own = own[..., 0]
        return own
    step = own.numel() // _SAMPLED | 1  # odd, because the lengths of rows are often powers of two
    return own.as_strided((-(-own.numel() // step),), (step,), own.storage_offset())
