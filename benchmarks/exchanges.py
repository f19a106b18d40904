"""What simulated workers exchange in a step of ``train.py``: gradients, or what their own steps have changed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import tritoncomm
from torch import Tensor
from tritoncomm.algorithms import at_density, field_names
from tritoncomm.algorithms.base import StaticRecipe
from tritoncomm.algorithms.staged import Staged
from tritoncomm.primitives.mean_norm import random_signs, sketch
from tritoncomm.step.exchange.feedback import Ages
from tritoncomm.step.exchange.layout import BucketLayout, Delivered, small_ids
from tritoncomm.step.rules.choose import find_rule
from tritoncomm.step.rules.step import coupled_decay
from tritoncomm.step.settings import DEFAULT_SMALL, DENSE_BELOW

import baselines  # noqa: F401 - registers them
from demo_compressor import DeMoWorld
from peers import SparseLoCoWorld
from power_sgd import PowerSGDWorld
from runs import Run
from tasks import WORKERS
from workers import Worker

World = tritoncomm.SimulatedWorld | PowerSGDWorld | DeMoWorld | SparseLoCoWorld


@dataclass
class Sent:
    """Bytes and messages that the busiest worker has sent."""

    bytes: int = 0
    messages: int = 0

    def add(self, world: World) -> None:
        """Add the last step of ``world``."""
        self.bytes += max(traffic.bytes for traffic in world.traffic)
        self.messages += max(traffic.messages for traffic in world.traffic)


class Gradients:
    """Exchanges the gradients of one optimizer per worker. That of the first worker steps, and the others copy."""

    def __init__(self, run: Run, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizer = optimizers[0]
        self.layouts = [_layout(_parameters(each)) for each in optimizers]
        aware = run.exchange == "gradients" and run.method not in ("powersgd", "demo") and run.staleness == "aware"
        rule = find_rule(self.optimizer) if aware else None
        self.rule = None if rule is None else rule(self.optimizer, tritoncomm.Late())
        self.decays = {} if rule is None else coupled_decay(self.optimizer)
        by_update = self.rule is not None and run.select_by == "update"
        self.world = _world(run, self.layouts[0], by_update=by_update)
        self.ages = Ages(self.layouts[0].parameters, self.layouts[0].bounds)
        self.rows = torch.empty(WORKERS, self.layouts[0].numel, device=_device(self.layouts[0]))

    def step(self, sent: Sent) -> None:
        """Exchange, and update all models."""
        for layout, row in zip(self.layouts, self.rows, strict=True):
            layout.read_gradients(row)
        first, *others = self.layouts
        mean = self.world.step(self.rows)[0].trimmed()
        sent.add(self.world)
        if self.decays:
            mean = self._decayed(mean)
        delivered = first.split(mean)
        first.scatter(delivered)
        if self.rule is None:
            self.optimizer.step()
        else:
            self.ages.steps += 1
            self.ages.begin()
            self.rule.begin()
            self.rule.step(Delivered(mean, first, self.ages).read_again())
        for other in others:
            torch._foreach_copy_(other.parameters, first.parameters)

    def _decayed(self, mean: tritoncomm.SparseVector) -> tritoncomm.SparseVector:
        """Return ``mean`` with weight decay that is a part of the gradient. As in ``wrap``, it is not sent."""
        decay = torch.cat([p.reshape(-1) * self.decays.get(id(p), 0.0) for p in self.layouts[0].parameters])
        if mean.is_full:
            return tritoncomm.SparseVector.full(mean.values + decay)
        delivered = mean.indices.long()
        values = mean.values + decay[delivered]
        for worker in self.world.workers:
            worker.residual.add_(decay.index_fill(0, delivered, 0.0))
        return tritoncomm.SparseVector(mean.indices, values, mean.numel)


def _world(run: Run, layout: BucketLayout, *, by_update: bool) -> World:
    """Return the workers that exchange the gradients of ``layout``."""
    shapes = [parameter.shape for parameter in layout.parameters]
    if run.method == "powersgd":
        return PowerSGDWorld(WORKERS, shapes, run.count, run.dense_steps)
    if run.method == "demo":
        return DeMoWorld(WORKERS, shapes, run.count)
    recipe: tritoncomm.Recipe = tritoncomm.Dense()
    if run.exchange == "gradients":
        recipe = _as_in_wrap(recipe_of(run), run, layout, by_update=by_update)
    return tritoncomm.SimulatedWorld(recipe, WORKERS, layout.numel, device=_device(layout))


def _as_in_wrap(recipe: tritoncomm.Recipe, run: Run, layout: BucketLayout, *, by_update: bool) -> tritoncomm.Recipe:
    """Return ``recipe`` with what ``wrap`` adds: the start, selection by update, small tensors and the static form."""
    if _device(layout).type != "cpu" and isinstance(recipe, StaticRecipe):
        recipe = replace(recipe, static=True)
    small = small_ids(layout.parameters, DENSE_BELOW)
    large = [tuple(parameter.shape) for parameter in layout.parameters if id(parameter) not in small]
    shapes = tuple(large) if by_update and recipe.compares_entries() else None
    values = run.dense_values if recipe.averages_when_dense else "fp32"
    started = tritoncomm.Warmup(recipe=recipe, steps=run.dense_steps, values=values)
    return Staged(
        recipe=started,
        tail=sum(p.numel() for p in layout.parameters if id(p) in small),
        small=DEFAULT_SMALL,
        shapes=shapes,
    )


class Updates:
    """Lets every worker take steps of its own optimizers, and exchanges what they have changed."""

    def __init__(self, run: Run, optimizers: Sequence[Sequence[torch.optim.Optimizer]]) -> None:
        self.run = run
        self.optimizers = optimizers
        self.layouts = [BucketLayout([p for each in own for p in _parameters(each)]) for own in optimizers]
        first = self.layouts[0]
        self.world: tritoncomm.SimulatedWorld | SparseLoCoWorld
        if run.method == "sparseloco":
            self.world = SparseLoCoWorld(WORKERS, [p.shape for p in first.parameters], run.count)
        else:
            self.world = tritoncomm.SimulatedWorld(recipe_of(run), WORKERS, first.numel, device=_device(first))
        self.anchor = torch.cat([p.detach().reshape(-1) for p in first.parameters])
        self.momentum = torch.zeros_like(self.anchor)
        self.signs = random_signs(first.numel, _device(first))
        self.rows = torch.empty(WORKERS, first.numel, device=_device(first))
        self.steps = 0

    def step(self, sent: Sent) -> None:
        """Let all workers step, and exchange if it is time."""
        for own in self.optimizers:
            for each in own:
                each.step()
        self.steps += 1
        if self.steps % self.run.local_steps == 0 or self.steps == self.run.steps:
            self.merge(sent)

    def merge(self, sent: Sent) -> None:
        """Exchange what the workers have changed."""
        run = self.run
        for layout, row in zip(self.layouts, self.rows, strict=True):
            row.copy_(torch.cat([p.reshape(-1) for p in layout.parameters]))
        torch.sub(self.anchor, self.rows, out=self.rows)
        if run.decay != 1:
            self._decay()
        mean = self.world.step(self.rows)[0].to_dense()
        sent.add(self.world)
        mean *= self._gain() if run.match_length else 1.0
        self.momentum.mul_(run.outer_momentum).add_(mean)
        self.anchor.sub_(mean + run.outer_momentum * self.momentum, alpha=run.outer_lr)
        for layout in self.layouts:
            for parameter, part in zip(layout.parameters, layout.parts(self.anchor), strict=True):
                parameter.copy_(part.view(parameter.shape))

    def _decay(self) -> None:
        world = self.world
        kept = [world.residuals] if isinstance(world, SparseLoCoWorld) else [each.residual for each in world.workers]
        torch._foreach_mul_(kept, self.run.decay)

    def _gain(self) -> float:
        """Return the mean length of the workers' updates over the estimated length of their mean."""
        total = torch.stack([sketch(row, self.signs) for row in self.rows]).sum(0)
        length = float(total.double().norm()) / WORKERS
        mean = float(self.rows.double().norm(dim=1).mean())
        return min(max(mean / length, 1.0), math.sqrt(WORKERS)) if length else 1.0


def recipe_of(run: Run) -> tritoncomm.Recipe:
    """Return the recipe that exchanges updates, or all gradients."""
    if run.method == "dense":
        return tritoncomm.Dense()
    known = field_names(run.method)
    fields: dict[str, Any] = {"values": run.values} if "values" in known else {}
    if "packed" in known and "values" not in known:
        fields["packed"] = True
    if run.method == "random_block":
        fields["reduced_lr"] = True  # what the method asks of AdamW
    return at_density(run.method, run.density, **fields)


def exchanges(run: Run, workers: Sequence[Worker]) -> Iterator[Gradients | Updates]:
    """Yield what exchanges the parameters of all optimizers, or of each of them."""
    if run.exchange == "updates":
        yield Updates(run, [worker.optimizers for worker in workers])
        return
    yield from (Gradients(run, each) for each in zip(*[worker.optimizers for worker in workers], strict=True))


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _layout(parameters: Sequence[Tensor]) -> BucketLayout:
    """Return the layout of a vector of ``parameters``, in which small tensors come last."""
    small = small_ids(parameters, DENSE_BELOW)
    return BucketLayout(sorted(parameters, key=lambda parameter: id(parameter) in small))


def _device(layout: BucketLayout) -> torch.device:
    return layout.parameters[0].device
