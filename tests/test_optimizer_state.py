"""What the state of a wrapped optimizer holds: resuming from it, and rejecting another one's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from tritoncomm import ConfigurationError

from small_model import backward, model, sgd, sparse_wrap
from tritoncomm_kernels import root_mean_square


def test_foreign_checkpoints_are_rejected() -> None:
    """A checkpoint of another rank, world size or model is rejected and changes nothing."""
    net = model()
    optimizer = sparse_wrap(sgd(net))
    backward(net)
    optimizer.step()
    residual_norm = optimizer.metrics()["residual_norm"]
    for field, value in (("rank", 3), ("world_size", 4), ("schema", 99), ("recipe", "dense")):
        saved = optimizer.state_dict()
        saved["tritoncomm"][field] = value
        with pytest.raises(ConfigurationError, match=f"{field}={value!r}"):
            optimizer.load_state_dict(saved)
    saved = optimizer.state_dict()
    saved["tritoncomm"]["residuals"][0] += 1
    with pytest.raises(ConfigurationError, match="corrupt"):
        optimizer.load_state_dict(saved)
    del saved["tritoncomm"]["algorithm"]
    with pytest.raises(ConfigurationError, match="truncated: it has no algorithm"):
        optimizer.load_state_dict(saved)
    other = sparse_wrap(sgd(nn.Linear(3, 2)))
    with pytest.raises(ConfigurationError, match=r"groups of \[2\] parameters, .* the optimizer have \[4\]"):
        optimizer.load_state_dict(other.state_dict())
    foreign = optimizer.state_dict() | {"tritoncomm": other.state_dict()["tritoncomm"]}
    with pytest.raises(ConfigurationError, match="other parameters"):
        optimizer.load_state_dict(foreign)
    with pytest.raises(ConfigurationError, match=r"expected keys 'state', 'param_groups', got \['epoch'\]"):
        optimizer.load_state_dict({"epoch": 3})
    assert optimizer.metrics()["residual_norm"] == residual_norm


def test_unmodified_steps_reset_staleness() -> None:
    """After steps of unmodified AdamW, a loaded checkpoint counts every coordinate as recently delivered."""
    net = model()
    aware = sparse_wrap(torch.optim.AdamW(net.parameters(), lr=0.01), density=0.2)
    backward(net)
    aware.step()
    bare = torch.optim.AdamW(net.parameters(), lr=0.01)
    bare.load_state_dict(aware.state_dict())
    for _ in range(5):
        bare.step()
    again = sparse_wrap(torch.optim.AdamW(net.parameters(), lr=0.01), density=1.0)
    again.load_state_dict(bare.state_dict())
    net[0].weight.data.mul_(3)
    again.step()
    assert again.state[net[0].weight]["last_delivered"].unique().tolist() == [7]
    late = root_mean_square(net[0].weight)
    assert float(again.state[net[0].weight]["param_rms"]) == pytest.approx(float(late), rel=0.1)


def test_param_rms_is_resumed() -> None:
    """A checkpoint restores ``param_rms``, which only some steps compute, also for bf16 parameters."""
    net = model().bfloat16()
    optimizer = sparse_wrap(torch.optim.AdamW(net.parameters(), lr=0.01), density=0.2)
    for _ in range(21):  # the first steps all compute it
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    before = optimizer.state[net[0].weight]["param_rms"]
    net[0].weight.data.mul_(3)
    again = sparse_wrap(torch.optim.AdamW(net.parameters(), lr=0.01), density=0.2)
    again.load_state_dict(optimizer.state_dict())
    again.step()
    after = again.state[net[0].weight]["param_rms"]
    assert after.dtype == torch.float32
    assert torch.equal(before, after)


@pytest.mark.parametrize(("dtype", "steps"), [(torch.float32, 9), (torch.bfloat16, 259)])  # bf16 cannot represent 259
def test_wrapping_a_loaded_optimizer(dtype: torch.dtype, steps: int) -> None:
    """The bare optimizer casts a loaded state to the parameter's dtype. Exact delivery steps are kept, others reset."""
    net = model().to(dtype)
    weight = net[0].weight
    first = sparse_wrap(torch.optim.AdamW(net.parameters(), lr=0.01), density=0.2)
    for step in range(steps):
        for parameter in net.parameters():
            parameter.grad = torch.linspace(-step, 1, parameter.numel()).view_as(parameter).to(dtype)
        first.step()
    delivered_at = first.state[weight]["last_delivered"]
    assert delivered_at.unique().numel() > 1
    bare = torch.optim.AdamW(net.parameters(), lr=0.01)
    bare.load_state_dict(first.state_dict())
    again = sparse_wrap(bare, density=1 / weight.numel())  # one coordinate
    again.step()
    after = again.state[weight]["last_delivered"]
    assert after.dtype == torch.int32
    late = after != steps + 1
    expected = delivered_at if dtype == torch.float32 else torch.full_like(delivered_at, steps)
    assert torch.equal(after[late], expected[late])
    assert late.any()
    assert again.state[weight]["param_rms"].dtype == torch.float32
