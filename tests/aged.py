"""A rule for late gradients, and how late they are, which an exchange would keep for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.step.exchange.feedback import Ages, Ledger
from tritoncomm.step.exchange.layout import BucketLayout, Delivered
from tritoncomm.step.rules.aware import AwareStep
from tritoncomm.step.tensors.shards import local


class Aged:
    """Takes steps of ``rule``. Parameters that are given together have a ledger of their own."""

    def __init__(self, rule: AwareStep) -> None:
        self.rule = rule
        self._held: dict[tuple[int, ...], tuple[Ages, Ledger]] = {}

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The original optimizer."""
        return self.rule.optimizer

    def take_over(self, parameters: Sequence[torch.Tensor], other: Aged, its: Sequence[torch.Tensor]) -> None:
        """Let ``parameters`` go on from the ages of parameters of another one."""
        (before, ledger), bounds = other._held[tuple(map(id, its))], [0, *accumulate(map(torch.Tensor.numel, its))]
        ages = Ages(list(parameters), bounds)
        ages.steps = before.steps
        assert ledger.last is not None
        assert ledger.rms is not None
        copy = Ledger(ledger.residual.clone(), None, ledger.last.clone(), ledger.rms.clone())
        self._held[tuple(map(id, parameters))] = ages, copy

    def begin(self, parameters: Sequence[torch.Tensor]) -> Ages:
        """Begin a step of ``parameters``."""
        bounds = [0, *accumulate(local(parameter).numel() for parameter in parameters)]
        key = tuple(map(id, parameters))
        if key not in self._held:
            ledger = Ledger(torch.zeros(bounds[-1], device=parameters[0].device), None)
            self._held[key] = Ages(list(parameters), bounds), ledger
        ages, ledger = self._held[key]
        ages.open(ledger, ages.steps + 1)
        ages.begin()
        return ages

    def step(
        self,
        parameters: Sequence[torch.Tensor],
        delivered: Sequence[torch.Tensor | None],
        values: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Take a step over lists of entries."""
        self.rule.step(parameters, delivered, self.begin(parameters), values)

    def step_flat(self, mean: SparseVector, layout: BucketLayout, *, read_gradients: bool) -> None:
        """Take a step over one list with padding."""
        delivered = Delivered(mean, layout, self.begin(layout.parameters))
        self.rule.step_flat(delivered, read_gradients=read_gradients)

    def ages(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the step of the last delivery of each coordinate of ``parameter``, and its root mean square."""
        for key, (ages, _) in self._held.items():
            if id(parameter) in key:
                return ages.last[key.index(id(parameter))], ages.rms[key.index(id(parameter))]
        raise KeyError("it has taken no step")
