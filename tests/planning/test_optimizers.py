"""The list of what each optimizer exchanges by default."""

from __future__ import annotations

import pytest
import torch
from tritoncomm.__main__ import main
from tritoncomm.planning.optimizers import rows


def test_every_optimizer_of_torch_is_listed() -> None:
    """Those with a rule, and SGD, exchange gradients, others updates. Two are refused, with the reason."""
    found = {row.optimizer: row for row in rows()}
    kinds = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    assert {each.__name__ for each in kinds if issubclass(each, torch.optim.Optimizer)} - {"Optimizer"} <= set(found)
    gradients = {name for name, row in found.items() if row.travels.startswith("gradients")}
    assert gradients == {"Adam", "AdamW", "SGD", "Lion", "schedule-free ones"}
    assert found["schedule-free ones"].travels == "gradients, quantized"
    assert {name for name, row in found.items() if row.travels == "refused"} == {"LBFGS", "SparseAdam"}
    assert found["Muon"].travels == found["any other class"].travels == "updates, quantized"


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints a line for each."""
    assert main(["optimizers"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(rows()) + 1
    assert printed[0].split() == ["optimizer", "travels", "because"]
