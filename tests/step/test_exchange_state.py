"""Saved states of an exchange."""

from __future__ import annotations

import pytest
import torch
import tritoncomm
from torch import nn
from tritoncomm.algorithms import Preconditioned
from tritoncomm.step import checkpoint_format, setup_checks

from small_model import model


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_explicit_preconditioning_is_resumed(kind: type[torch.optim.Optimizer]) -> None:
    """A ``Preconditioned`` recipe keeps its second moment: save, load and continue equals never stopped, to the bit."""
    shapes = tuple(tuple(parameter.shape) for parameter in model().parameters())
    recipe = Preconditioned(recipe=tritoncomm.TopkAllgather(density=0.2), shapes=shapes, renew_every=3)
    straight, stopped = model(), model()
    first = tritoncomm.wrap(kind(straight.parameters(), lr=0.05), algo=recipe, dense_below=0)
    second = tritoncomm.wrap(kind(stopped.parameters(), lr=0.05), algo=recipe, dense_below=0)

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, begin: int, end: int) -> None:
        for step in range(begin, end):
            optimizer.zero_grad()
            net(torch.full((3, 4), 0.1 * step)).square().mean().backward()
            optimizer.step()

    train(straight, first, 0, 14)
    train(stopped, second, 0, 7)
    third = tritoncomm.wrap(kind(stopped.parameters(), lr=0.05), algo=recipe, dense_below=0)
    third.load_state_dict(second.state_dict())
    assert third.state_dict()["tritoncomm"]["checksum"] == second.state_dict()["tritoncomm"]["checksum"]
    train(stopped, third, 7, 14)
    assert all(map(torch.equal, straight.parameters(), stopped.parameters()))
    assert first.state_dict()["tritoncomm"]["checksum"] == third.state_dict()["tritoncomm"]["checksum"]


def test_another_format_keeps_the_state(caplog: pytest.LogCaptureFixture) -> None:
    """A state that was saved with rounded values continues in fp32, thresholds included, and nothing is said."""
    net = model()
    rounded = tritoncomm.wrap(torch.optim.AdamW(net.parameters()), density=0.2, values="4bit", dense_below=0)
    for step in range(3):
        rounded.zero_grad()
        net(torch.full((3, 4), 0.1 * step + 1)).square().mean().backward()
        rounded.step()
    exact = tritoncomm.wrap(torch.optim.AdamW(net.parameters()), density=0.2, values="fp32", dense_below=0)
    other = tritoncomm.wrap(torch.optim.AdamW(net.parameters()), density=0.3, values="4bit", dense_below=0)
    exact.load_state_dict(rounded.state_dict())
    assert not caplog.records
    assert exact.state_dict()["tritoncomm"]["algorithm"] == rounded.state_dict()["tritoncomm"]["algorithm"]
    other.load_state_dict(rounded.state_dict())
    assert "written with other settings" in caplog.text


def test_checksum_of_unusual_strides() -> None:
    """The checksum is of the values, whatever the strides: a tensor of one element may have the stride 0."""
    for values in (torch.ones(1).expand(1), torch.as_strided(torch.ones(3), (1,), (0,), 1), torch.ones(4, 2).t()):
        fields = {"tensor": values}
        assert checkpoint_format.checksum(fields) == checkpoint_format.checksum({"tensor": values.clone()})
        assert setup_checks.digest(values) == setup_checks.digest(values.clone())
    other = {"tensor": torch.zeros(1)}
    assert checkpoint_format.checksum(other) != checkpoint_format.checksum({"tensor": torch.ones(1)})
