"""The metrics of an exchange."""

from __future__ import annotations

import math

import torch

from tritoncomm.scheduler.meter import of_all
from tritoncomm.step.exchange.machine import GradientExchange
from tritoncomm.step.tensors.shards import local


def figures_of(exchange: GradientExchange) -> dict[str, float]:
    """Return metrics of the last step and totals. Amounts are sums over the vectors, and ratios are maxima."""
    vectors = exchange.vectors
    numel = sum(vector.layout.numel for vector in vectors)
    delivered = sum(vector.density_delivered() * vector.layout.numel for vector in vectors)
    last = of_all([vector.last for vector in vectors])
    return last | {
        "seconds_apply": max(0.0, last.get("seconds_apply", 0.0)),
        "density": exchange.options.recipe.density,
        "density_delivered": delivered / max(numel, 1),
        "steps": float(exchange.steps),
        "skipped_steps": float(exchange.skipped),
        "bytes_sent_total": float(exchange.total.sent.bytes),
        "bytes_received_total": float(exchange.total.received.bytes),
        "longest_wait": _longest_wait(exchange),
        "residual_norm": math.hypot(*(vector.residual_norm for vector in vectors)),
    }


def _longest_wait(exchange: GradientExchange) -> float:
    """Return the steps since the oldest last delivery of an entry, 0.0 if no optimizer knows it."""
    found = []
    for parameter in exchange.parameters:
        state = exchange.optimizer.state.get(parameter, {})
        last = state.get("last_delivered")
        steps = state.get("late_steps")  # Adam counts its steps itself
        if steps is None and last is not None and float(state["last_aware"]) == float(state["step"]):
            steps = int(state["step"])
        if steps is not None and local(last).numel():
            found.append(steps - local(last).min())
    return float(torch.stack([each.long() for each in found]).max()) if found else 0.0
