"""Parameters that DDP was told to ignore, such as the experts of each rank, although a wrapped optimizer holds them.

They are this rank's own: nobody exchanges, compares or broadcasts them. The original step takes them by this rank's
gradients, whenever it takes a step. It is left out if any step is: a NaN, an Inf or an overflow in such a gradient is
treated as one in any other. ``max_grad_norm`` limits the norm of such gradients of one rank by itself, so that the
other parameters change alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from tritoncomm.step.tensors.names import named_parameters
from tritoncomm.step.tensors.shards import all_finite, local, stored


def ignored_of(optimizers: Iterable[torch.optim.Optimizer], ignored: Collection[int]) -> list[torch.Tensor]:
    """Return the parameters of ``optimizers`` whose ids are ``ignored``."""
    every = (parameter for each in optimizers for parameter, _ in named_parameters(each))
    return [parameter for parameter in every if id(parameter) in ignored]


def non_finite(parameters: Iterable[torch.Tensor], names: Mapping[int, str]) -> dict[str, int]:
    """Return the number of NaN and Inf values in the gradients of ``parameters``, by name, where there are some.

    ``names`` are given by id. The host waits for a GPU once.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    if all_finite(present(trained)):
        return {}
    counts = {
        names.get(id(each)) or f"a parameter of shape {tuple(each.shape)}": int((~stored(grad).isfinite()).sum())
        for each, grad in zip(trained, present(trained), strict=True)
    }
    return {name: count for name, count in counts.items() if count}


def present(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of ``parameters`` that are not None, of a DTensor those of its shard."""
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def prepare(parameters: Iterable[torch.Tensor], scale: torch.Tensor | None) -> None:
    """Divide the gradients of ``parameters`` by the loss ``scale``, if any."""
    if scale is None:
        return
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is None:
                continue
            if parameter.grad.layout is not torch.strided:
                parameter.grad = parameter.grad.coalesce()  # only then can values be changed in place
            values = stored(local(parameter.grad))
            values.div_(scale.to(values.device))


@contextmanager
def hidden(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let ``parameters`` have no gradient in the body, so that a step leaves them alone."""
    gradients = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
