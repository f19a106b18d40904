"""The metrics of an exchange."""

from __future__ import annotations

import math

import torch

from tritoncomm.scheduler.meter import of_all
from tritoncomm.step.exchange.machine import GradientExchange


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
    ledgers = [vector.feedback.ledger for vector in exchange.vectors]
    found = [each.last.min() for each in ledgers if each.last is not None and each.last.numel()]
    return float(exchange.steps - torch.stack(found).min()) if found else 0.0
