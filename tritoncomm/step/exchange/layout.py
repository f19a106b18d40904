"""Copies between the gradients of many parameters and one flat vector, and what an exchange delivers of it."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch

from tritoncomm.errors import ConfigurationError, NonFiniteError
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.step.exchange.feedback import Ages
from tritoncomm.step.tensors.names import label
from tritoncomm.step.tensors.shards import PLAIN, like_parameter, local, local_gradient, local_shards
from tritoncomm.step.torch_internals import gradient_dtype
from tritoncomm_kernels import constant
from tritoncomm_kernels.devices import is_asynchronous


def small_ids(parameters: Sequence[torch.Tensor], dense_below: int) -> set[int]:
    """Return the ids of those of ``parameters`` that are too small for a sparse exchange.

    They have fewer than ``dense_below`` elements, or at most one dimension, like a bias or the weight of a norm. If all
    are one-dimensional, like shards, the number of dimensions does not matter. 0 makes no parameter small.
    """
    flattened = all(parameter.dim() <= 1 for parameter in parameters)
    return {
        id(parameter)
        for parameter in parameters
        if local(parameter).numel() < dense_below or (dense_below > 0 and parameter.dim() <= 1 and not flattened)
    }


# The delivered entries of one parameter, of its local shard if it is a DTensor: ascending indices in the flattened
# parameter (int64 [k]), and the mean there (fp32 [k]). Indices of None mean all, with all values of the parameter.
ParameterEntries = tuple[torch.Tensor | None, torch.Tensor]


class BucketLayout:
    """The position of each parameter in one flat fp32 vector, in the given order, without padding.

    Of a DTensor, the vector holds the shard of this rank.

    Args:
        parameters: The parameters, in the order of the vector.
        labels: How errors call each of them. Default: by its position and shape.

    Attributes:
        parameters: See above.
        labels: See above.
        bounds: Start of each parameter in the vector, followed by the length of the vector.
        places: Position of each parameter in :attr:`parameters`, by its id.
        numel: Length of the flat vector.
        device: Device of the flat vector. The CPU if there are no parameters.

    Raises:
        ConfigurationError: A parameter is complex or listed twice, or the parameters are on several devices.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], labels: Sequence[str] = ()) -> None:
        self.parameters = list(parameters)
        self.labels = list(labels) or [label("", i, p) for i, p in enumerate(parameters)]
        self.bounds = [0, *accumulate(local(p).numel() for p in self.parameters)]
        self.numel = self.bounds[-1]
        self.device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self.places: dict[int, int] = {}
        self._with_gaps = {
            place for place, each in enumerate(self.parameters) if not (each.is_contiguous() or _alike(each, each))
        }
        devices: dict[torch.device, str] = {}
        for place, (parameter, name) in enumerate(zip(self.parameters, self.labels, strict=True)):
            devices.setdefault(parameter.device, name)
            if id(parameter) in self.places:
                raise ConfigurationError(f"{name} is listed twice: pass each parameter to the optimizer once")
            self.places[id(parameter)] = place
            if parameter.is_complex():
                raise ConfigurationError(f"{name} is {parameter.dtype}: convert it with torch.view_as_real first")
        if len(devices) > 1:
            places = " and ".join(f"{name} on {device}" for device, name in devices.items())
            raise ConfigurationError(f"parameters are on several devices, {places}: use one optimizer per device")

    @property
    def named(self) -> list[tuple[torch.Tensor, str]]:
        """The parameters, each with its label."""
        return [*zip(self.parameters, self.labels, strict=True)]

    def read_gradients(self, flat: torch.Tensor, *, sparse: bool = False) -> torch.Tensor:
        """Copy every ``.grad`` into ``flat`` (fp32 ``[numel]``) and return it. A missing gradient counts as zero.

        So does that of a parameter that was frozen. ``sparse``: accept sparse gradients.
        """
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter, name, part in zip(self.parameters, self.labels, self.parts(flat), strict=True):
            gradient = parameter.grad if parameter.requires_grad else None
            if gradient is None:
                part.zero_()
            elif gradient.layout is not torch.strided:
                if not sparse:
                    raise ConfigurationError(
                        f"{name} has a gradient of layout {gradient.layout}: only dense gradients are supported, use "
                        "Embedding(sparse=False)"
                    )
                part.zero_().view(parameter.shape).add_(gradient.detach())
            else:
                shard = gradient if type(gradient) in PLAIN else local_gradient(parameter)
                copied.append((part.view(shard.shape), shard.detach() if shard.requires_grad else shard))
        _copy_all(copied)
        return flat

    def multiply(self, factor: float) -> None:
        """Multiply every ``.grad`` by ``factor``, in place."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                is_strided = parameter.grad.layout is torch.strided
                (local_gradient(parameter).detach() if is_strided else parameter.grad).mul_(factor)

    def overflow(self, mean: SparseVector) -> torch.Tensor | None:
        """Return whether a value of ``mean`` overflows in the dtype of its parameter (bool, 0-d). None if none can."""
        half = [parameter.dtype == torch.float16 for parameter in self.parameters]
        if not any(half):
            return None
        too_large = ~(mean.values.abs() <= torch.finfo(torch.float16).max)  # no other dtype has a smaller range
        if all(half):
            return too_large.any()
        bounds = constant(self.bounds, mean.values.device)
        place = torch.searchsorted(bounds[1:], mean.indices.clamp(min=0), right=True)
        return (too_large & (constant(half, mean.values.device)[place] != 0)).any()

    def scatter(self, delivered: Sequence[ParameterEntries], left: Container[int] = ()) -> None:
        """Overwrite every ``.grad`` with its ``delivered`` entries, zero elsewhere, and create missing ones.

        The ``.grad`` of a parameter that was frozen, or whose id is in ``left``, becomes None.
        """
        held = self._writable_gradients(left)
        whole = [(to, delivered[place][1].view(to.shape)) for place, to in held if delivered[place][0] is None]
        _copy_all(whole)
        parts = [(delivered[place], to) for place, to in held if delivered[place][0] is not None]
        if parts:
            torch._foreach_zero_([to for _, to in parts])
        for entries, to in parts:
            _write(entries, to)

    def scatter_flat(self, flat: torch.Tensor, left: Container[int] = ()) -> None:
        """Do the same as :meth:`scatter` from the dense vector ``flat`` (fp32 ``[numel]``), in one call."""
        parts = self.parts(flat)
        _copy_all([(each, parts[place].view(each.shape)) for place, each in self._writable_gradients(left)])

    def _writable_gradients(self, left: Container[int]) -> list[tuple[int, torch.Tensor]]:
        """Return the places of the parameters whose ``.grad`` gets a mean, each with the shard of its ``.grad``.

        Missing ones are created. The ``.grad`` of a parameter that was frozen, or whose id is in ``left``, becomes
        None.
        """
        found: dict[int, torch.Tensor] = {}
        for (key, place), parameter in zip(self.places.items(), self.parameters, strict=True):
            if not parameter.requires_grad or key in left:
                parameter.grad = None
                continue
            gradient = parameter.grad
            # Nearly all gradients have the strides of their parameter.
            if (
                gradient is None
                or gradient.is_inference()
                or gradient.layout is not torch.strided
                or not (
                    (
                        type(gradient) in PLAIN
                        and gradient.stride() == parameter.stride()
                        and place not in self._with_gaps
                    )
                    or _alike(gradient, parameter)
                )
            ):
                parameter.grad = gradient = _zeros(parameter)
            held = gradient.detach() if gradient.requires_grad else gradient
            found[place] = held if type(held) in PLAIN else local(held)
        return [*found.items()]

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the view of ``flat`` that belongs to each parameter."""
        return [flat[a:b] for a, b in zip(self.bounds, self.bounds[1:], strict=False)]

    def split(self, mean: SparseVector) -> list[ParameterEntries]:
        """Split ``mean``, the mean of the flat vector, into the entries of each parameter. -0.0 may become 0.0."""
        if mean.is_full:
            return [(None, part) for part in self.parts(mean.values)]
        indices = mean.indices
        bounds = torch.tensor(self.bounds, dtype=indices.dtype, device=indices.device)
        cuts = torch.searchsorted(indices, bounds)
        starts = torch.repeat_interleave(bounds[:-1], cuts.diff(), output_size=len(mean))
        at, values = (indices - starts).long(), mean.values + 0.0
        found = zip(pairwise(cuts.tolist()), pairwise(self.bounds), strict=True)
        return [
            (None if end - start == high - low else at[start:end], values[start:end])
            for (start, end), (low, high) in found
        ]


def _copy_all(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair to the first. On a GPU, those with equal strides take one launch together."""
    others: list[tuple[torch.Tensor, torch.Tensor]] = []
    if pairs and is_asynchronous(pairs[0][0].device):
        # torch would copy all one by one if the strides of any of them differ.
        others = [(target, source) for target, source in pairs if target.stride() != source.stride()]
        pairs = [(target, source) for target, source in pairs if target.stride() == source.stride()]
    for target, source in others:
        target.copy_(source)
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _alike(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return False if ``gradient`` is a partial sum of a DTensor, or has other strides than what is like ``parameter``.

    So has a parameter with gaps in memory, such as some columns of a matrix. A step may give other bits for other
    strides, and on another rank, the gradient is missing.
    """
    if type(gradient) not in PLAIN and hasattr(gradient, "placements"):
        if gradient.placements != parameter.placements:  # type: ignore[attr-defined]
            return False
        gradient, parameter = local(gradient), local(parameter)
    # What is like a parameter has no gaps in memory, and without a second element, a stride has no meaning.
    return all(
        size == 1 or own == other
        for size, own, other in zip(
            gradient.shape, gradient.stride(), torch.empty_like(parameter, device="meta").stride(), strict=True
        )
    )


def _write(entries: ParameterEntries, out: torch.Tensor) -> None:
    """Write ``entries``, with their indices, to ``out``, which holds zeros and has any strides and dtype."""
    indices, values = entries
    assert indices is not None
    if out.is_contiguous():
        out.view(-1).index_copy_(0, indices, values if values.dtype is out.dtype else values.to(out.dtype))
    else:
        out.copy_(out.new_zeros(out.numel()).index_copy_(0, indices, values.to(out.dtype)).view(out.shape))


def separate(parameters: Sequence[Any]) -> None:
    """Give gradients that begin in the memory of another one, as ``torch.autograd.grad`` may return them, their own."""
    shards: list[Any] = local_shards([each.grad for each in parameters])  # with None for one without
    begins = sorted(
        [
            (own.data_ptr(), position, own.nbytes)
            for position, own in enumerate(shards)
            if own is not None and own.layout is torch.strided
        ]
    )
    ends = accumulate([begin + size for begin, _, size in begins], max)
    for (begin, position, _), end in zip(begins[1:], ends, strict=False):
        if begin < end:
            parameters[position].grad = parameters[position].grad.detach().clone()


def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    """Return zeros with the shape and sharding of ``parameter``, in the dtype of its gradients."""
    held = local(parameter)
    shard = torch.zeros_like(held, dtype=gradient_dtype(parameter) or held.dtype)
    return shard if held is parameter else like_parameter(parameter, shard)


@dataclass(frozen=True)
class Delivered:
    """The mean of one flat vector, the position of each parameter in this vector, and how late its entries are."""

    mean: SparseVector
    layout: BucketLayout
    ages: Ages

    @cached_property
    def entries(self) -> list[ParameterEntries]:
        """The delivered entries of each parameter, in the order of ``layout``.

        The host waits for the number of entries of a mean with padding.
        """
        return self.layout.split(self.mean.trimmed())

    def read_again(self) -> Delivered:
        """Return the same entries with what ``.grad`` holds there now: a script may have clipped it."""
        flat = torch.empty(self.mean.numel, dtype=torch.float32, device=self.mean.values.device)
        return replace(self, mean=self.mean.with_values(self.mean.read_from(self.layout.read_gradients(flat))))

    def without_zeros(self) -> Delivered:
        """Return the same mean without its entries of zero. The host waits for their number."""
        found = self.mean.values.nonzero().reshape(-1).to(torch.int32)
        return replace(self, mean=SparseVector(found, self.mean.values[found.long()], self.mean.numel))


def check_range(delivered: Sequence[Delivered]) -> None:
    """Raise :class:`~tritoncomm.NonFiniteError` if a mean overflows in the dtype of its parameter.

    All ranks have the same means, so all of them raise or none. The host waits for a GPU at most once.
    """
    flags = [flag for each in delivered if (flag := each.layout.overflow(each.mean)) is not None]
    if flags and bool(torch.stack(flags).any()):  # the mean includes residuals: it may exceed every gradient
        raise NonFiniteError(
            "the mean of gradients plus residuals overflows in torch.float16. Residuals are unchanged, so this may "
            "recur in every step: use bfloat16, or a GradScaler if gradients are still scaled; or discard the "
            "residuals with optimizer.load_state_dict(optimizer.state_dict(), residuals='reset')"
        )
