"""The table of what each optimizer exchanges by default, on the page about updates."""

from __future__ import annotations

import re

import torch
from tritoncomm import ConfigurationError
from tritoncomm.step.model.optimizers import check_optimizer
from tritoncomm.step.rules.choose import RULES, exchanges_updates

from pages import ROOT


def exchanged(kind: type[torch.optim.Optimizer]) -> str:
    """Return what ``wrap`` exchanges by default for an optimizer of class ``kind``."""
    optimizer = kind([torch.nn.Parameter(torch.zeros(2, 2))])
    try:
        check_optimizer(optimizer, alone=False)
    except ConfigurationError:
        return "refused"
    return "updates" if exchanges_updates(optimizer) else "gradients"


def test_every_optimizer_of_torch_is_in_the_table() -> None:
    """The page names each optimizer of torch in the row of what it exchanges."""
    page = (ROOT / "docs/explanation/updates.md").read_text()
    rows = {row: set(re.findall(r"`(\w+)`", names)) for row, names in re.findall(r"\| (\w+)[^|]* \| ([^|]*) \|", page)}
    kinds = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    kinds = [each for each in kinds if issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer]
    for row in ("gradients", "updates", "refused"):
        others = {name for rule in RULES for name in rule.others} if row == "gradients" else set()
        assert rows[row] == {each.__name__ for each in kinds if exchanged(each) == row} | others
