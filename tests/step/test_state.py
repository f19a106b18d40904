"""Saved states of an exchange."""

from __future__ import annotations

import pytest
import torch
import tritoncomm
from tritoncomm.step.saved import state as exchange_state

from small_model import model


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
        assert exchange_state.checksum(fields) == exchange_state.checksum({"tensor": values.clone()})
    other = {"tensor": torch.zeros(1)}
    assert exchange_state.checksum(other) != exchange_state.checksum({"tensor": torch.ones(1)})
