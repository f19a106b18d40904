"""What :func:`tritoncomm.wrap` exchanges by default, for each optimizer of torch and for others."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tritoncomm.errors import ConfigurationError
from tritoncomm.step.options import DEFAULT_ALGO, DEFAULT_DENSITY, DEFAULT_UPDATES, WrapOptions, check_optimizer
from tritoncomm.step.rules import RULES, exchanges_updates, is_linear


class Row(NamedTuple):
    """What one optimizer exchanges, and why."""

    optimizer: str
    travels: str
    why: str


_GRADIENTS = f"gradients, {DEFAULT_ALGO} at {DEFAULT_DENSITY:.0%}"
_UPDATES = f"updates, {DEFAULT_UPDATES}"


def rows() -> list[Row]:
    """Return a row for each optimizer of torch, in the order of their names, and one for all others."""
    kinds = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    found = sorted({each for each in kinds if issubclass(each, torch.optim.Optimizer)}, key=lambda each: each.__name__)
    others = [name for rule in RULES for name in rule.others]
    return [
        *(_row(kind) for kind in found if kind is not torch.optim.Optimizer),
        *(Row(name, _GRADIENTS, _RULE) for name in others),
        Row("schedule-free ones", f"gradients, {DEFAULT_UPDATES}", _POINTS),
        Row("any other class", _UPDATES, _NO_RULE),
    ]


_RULE = "it has a rule for late gradients"
_LINEAR = "its step is linear in the gradient, and with momentum it has a rule for late ones"
_POINTS = "it keeps a copy of the parameters, which is no part of an update"
_NO_RULE = "it has no rule for late gradients"


def _row(kind: type[torch.optim.Optimizer]) -> Row:
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = kind([parameter])  # type: ignore[call-arg]
    try:
        check_optimizer(optimizer, alone=False)
    except ConfigurationError as error:
        return Row(kind.__name__, "refused", str(error))
    if exchanges_updates(optimizer, WrapOptions()):
        return Row(kind.__name__, _UPDATES, _NO_RULE)
    why = _LINEAR if is_linear(optimizer) else _RULE
    return Row(kind.__name__, _GRADIENTS, why)


def table() -> str:
    """Return :func:`rows` as text."""
    found = [Row("optimizer", "travels", "because"), *rows()]
    first, second = (max(len(row[column]) for row in found) for column in (0, 1))
    return "\n".join(f"{name:{first}}  {travels:{second}}  {why}" for name, travels, why in found)
