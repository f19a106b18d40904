"""One backward pass of ``DistributedDataParallel``: which buckets it has, what has arrived, and which futures wait."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from tritoncomm.errors import ConfigurationError, ExchangeError, ExchangeTimeoutError
from tritoncomm.step.bucket import copy_pairs
from tritoncomm.step.torch_internals import current_backward
from tritoncomm.step.vector_exchange import VectorExchange

UNUSED = (
    "a parameter that received no gradient on a rank keeps DDP from finishing the pass there: use every parameter in "
    "each pass, and call the DDP module, not its inner module; or call tritoncomm.wrap() on the optimizer of the plain "
    "module, where a missing gradient counts as zero; or use DDP with find_unused_parameters=True, without tritoncomm"
)


@dataclass
class BackwardPass:
    """The buckets of one backward pass, whose buffers DDP copies to the gradients when their futures are set.

    Attributes:
        scale: The loss scale.
        arrived: Each parameter's part of DDP's buffers, in its shape, by id of the parameter.
        ready: Vectors that have arrived, each with the dtype of its bucket, and are not exchanged yet.
        exchanged: The other vectors that have arrived.
        written: Ids of parameters whose part holds the mean.
        waiting: Parameters (ids), buffer and future of each bucket whose future is not set.
    """

    scale: float
    arrived: dict[int, torch.Tensor] = field(default_factory=dict)
    ready: list[tuple[VectorExchange, torch.dtype]] = field(default_factory=list)
    exchanged: list[VectorExchange] = field(default_factory=list)
    written: set[int] = field(default_factory=set)
    waiting: list[tuple[set[int], torch.Tensor, torch.futures.Future[torch.Tensor]]] = field(default_factory=list)

    def add(self, parameters: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        """Note that the ``buffer`` of a bucket (one-dimensional) holds the gradients of ``parameters``."""
        parts = torch.split(buffer, [parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            self.arrived[id(parameter)] = _in_shape_of(parameter, part)

    def whole(self, vectors: Sequence[VectorExchange]) -> list[VectorExchange]:
        """Return those of ``vectors`` that have arrived with all parameters, and are neither ready nor exchanged."""
        noted = [*self.exchanged, *(vector for vector, _ in self.ready)]
        return [
            v for v in vectors if v not in noted and all(id(parameter) in self.arrived for parameter in v.parameters)
        ]

    def take_ready(self, vectors: Sequence[VectorExchange]) -> list[tuple[VectorExchange, torch.dtype]]:
        """Return those of ``vectors`` that are ready, in the same order. They are about to be exchanged."""
        order = {vector: number for number, vector in enumerate(vectors)}  # a resumed run may have other buckets
        ready, self.ready = sorted(self.ready, key=lambda each: order[each[0]]), []
        self.exchanged += [vector for vector, _ in ready]
        return ready

    def read(self, vectors: Sequence[VectorExchange]) -> None:
        """Copy the gradients of ``vectors`` from DDP's buffers into ``vector.flat``."""
        copy_pairs([pair for vector in vectors for pair in self._pairs(vector, vector.flat)])

    def write(self, vectors: Sequence[VectorExchange]) -> None:
        """Copy ``vector.flat`` of each of ``vectors``, times the loss scale, to DDP's buffers."""
        means = [vector.flat if self.scale == 1.0 else vector.flat * self.scale for vector in vectors]
        pairs = [pair for vector, mean in zip(vectors, means, strict=True) for pair in self._pairs(vector, mean)]
        copy_pairs([(arrived, part) for part, arrived in pairs])

    def _pairs(self, vector: VectorExchange, values: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each parameter's part of ``values`` (``[numel]`` of ``vector``), and its view of DDP's buffer."""
        arrived = [self.arrived[id(parameter)] for parameter in vector.layout.parameters]
        parts = vector.layout.parts(values)
        return [(part.view(view.shape), view) for part, view in zip(parts, arrived, strict=True)]

    def release(self, *, last: bool, failed: bool) -> None:
        """Set the futures of the buckets that hold the mean, and of all buckets after the ``last`` one.

        A bucket without a mean gets NaN, and so do those that still wait if the pass has ``failed``. DDP would report
        an exception without its type.
        """
        waiting = []
        for parameters, buffer, future in self.waiting:
            averaged = parameters <= self.written
            if not (averaged or last):
                waiting.append((parameters, buffer, future))
                continue
            if buffer.layout == torch.strided and (not averaged or (last and failed)):
                buffer.fill_(math.nan)
            future.set_result(buffer)
        self.waiting = waiting


class HasParameters(Protocol):
    """Knows the parameters of a model."""

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters by name."""


class BucketOrder:
    """Tells which call of the hook is the first of a backward pass, and which is the last."""

    def __init__(self) -> None:
        self._task, self._seen, self._ended = -1, set[int](), True

    def place(self, bucket: dist.GradBucket, model: HasParameters | None) -> tuple[bool, bool]:  # type: ignore[name-defined]
        """Return whether ``bucket`` is the first and whether it is the last one of this backward pass.

        In the first pass of a static graph, DDP gives all buckets the number 0. There are several if parameters have
        several dtypes. The last one completes the parameters of the model.

        Args:
            bucket: The bucket.
            model: Has the parameters of all buckets. None if they are not known.

        Raises:
            ConfigurationError: The parameters would be needed.
        """
        numbered_first, task = bucket.index() == 0, current_backward()
        first = numbered_first and (self._ended or task != self._task)
        if first:
            self._task, self._seen = task, set()
        elif numbered_first and model is None:
            raise ConfigurationError(
                "the model has static_graph=True and parameters of several dtypes, and the hook does not know them: "
                "call tritoncomm.ddp.register() instead of register_comm_hook()"
            )
        last: bool = bucket.is_last()
        if numbered_first and not last and model is not None:
            self._seen.update(map(id, bucket.parameters()))
            last = self._seen.issuperset(map(id, model.parameters.values()))
        self._ended = last
        return first, last


def with_cause(error: ExchangeError) -> ExchangeError:
    """Return ``error`` with the likely cause, if a rank did not answer in a backward pass and has not said why."""
    unanswered = isinstance(error, ExchangeTimeoutError) or not error.peers
    return type(error)(f"{error}. In DDP, {UNUSED}", error.peers) if unanswered and UNUSED not in str(error) else error


def _in_shape_of(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return the view of ``part`` of DDP's buffer that DDP copies to ``parameter.grad``.

    A parameter without gaps in its memory has its gradient in the same order, for example in ``torch.channels_last``.
    The gradients of others are in row-major order. ``GradBucket.gradients()`` does not tell them apart.
    """
    if parameter.is_contiguous():
        return part.view(parameter.shape)
    by_stride = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    if not parameter.permute(by_stride).is_contiguous():
        return part.view(parameter.shape)
    return part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
