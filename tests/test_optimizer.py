"""The wrapped optimizer in one process: the behavior that users of torch.optim rely on."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
import torch
import tritoncomm
from torch import nn
from tritoncomm import ConfigurationError

from small_model import backward, model, sgd, sparse_wrap


def test_metrics_are_flat_floats() -> None:
    """metrics() is a flat dict of floats, before and after the first step."""
    net = model()
    optimizer = sparse_wrap(sgd(net), density=0.1)
    assert all(isinstance(v, float) for v in optimizer.metrics().values())
    optimizer.step()
    assert optimizer.metrics()["residual_norm"] == 0  # nobody had a gradient
    backward(net)
    optimizer.step()
    metrics = optimizer.metrics()
    assert all(isinstance(v, float) for v in metrics.values())
    assert metrics["density"] == 0.1
    assert metrics["density_delivered"] == pytest.approx(0.1, abs=0.02)
    assert metrics["bytes_sent_total"] == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"density": "0.1"}, "density='0.1'"),
        ({"repartition_every": 2.5}, r"repartition_every=2\.5.*whole number"),
        ({"warmup_steps": 2.5}, r"warmup_steps=2\.5.*whole number"),
        ({"timeout": 5}, "timeout=5: give a datetime.timedelta"),
        ({"timeout": timedelta(microseconds=500)}, r"timeout=0:00:00.000500: must be at least 1 ms"),
        ({"timeout": timedelta.max}, "at most 365 days"),
        ({"algo": "nope"}, "unknown algorithm 'nope'"),
        ({"density": 0}, "density=0"),
        ({"tau": 3}, "no argument 'tau'.*repartition_every"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"late": "maybe"}, r"late='maybe': give True, False, None, or a tritoncomm\.Late"),
        (
            {"updates": {"outer_lr": 0.5}},
            r"updates=\{'outer_lr': 0.5\}: give True, False, None, or a tritoncomm\.Updates",
        ),
        ({"small": "4bit"}, "small='4bit': choose one of 'fp32', '8bit'"),
        ({"algo": "random_block", "values": "9bit"}, "values='9bit'"),
        ({"on_nonfinite": "pray"}, "on_nonfinite='pray': choose one of 'skip', 'raise'"),
        ({"algo": tritoncomm.OkTopk(), "bucket_width": 2}, "carries its own bucket_width"),
        ({"algo": tritoncomm.OkTopk(density=0.1), "density": 0.2}, "carries its own density"),
        ({"dense_below": True}, "dense_below=True"),
        ({"broadcast_parameters": "no"}, "broadcast_parameters='no': must be True or False"),
        ({"model": [nn.Linear(1, 1)]}, r"model is a list: pass the torch\.nn\.Module"),
        ({"process_group": [0, 1]}, "process_group was given, but torch.distributed is not initialized"),
        ({"node_group": "node"}, "node_group was given, but torch.distributed is not initialized"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], named: str) -> None:
    """A wrong argument raises an error with its name and its value."""
    with pytest.raises(ConfigurationError, match=named):
        sparse_wrap(sgd(model()), **arguments)


def test_a_module_is_no_optimizer() -> None:
    """The error says what to pass."""
    with pytest.raises(ConfigurationError, match=r"a Sequential: pass a torch\.optim\.Optimizer"):
        sparse_wrap(model())


def test_residual_norm_of_large_values() -> None:
    """The norm of a residual is finite as long as the residual is, although its squares overflow."""
    net = model()
    optimizer = sparse_wrap(sgd(net), density=0.1)
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 1e30)
    optimizer.step()
    left = torch.cat(optimizer._tritoncomm.setup.scope.vectors[0].feedback.residual.double().split(7))
    assert optimizer.metrics()["residual_norm"] == pytest.approx(float(left.norm()))
    assert left.any()


def test_add_param_group_keeps_the_warm_up() -> None:
    """Adding a group does not repeat the warm-up, and a group with unsupported options is rejected."""
    net = model()
    optimizer = sparse_wrap(torch.optim.AdamW(net.parameters(), lr=0.01), density=0.1, warmup_steps=1)
    backward(net)
    optimizer.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(6))]})
    backward(net)
    optimizer.step()
    assert optimizer.metrics()["density_delivered"] < 0.5
    with pytest.raises(ConfigurationError, match="capturable"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(6))], "capturable": True})
    assert len(optimizer.param_groups) == 2
    backward(net)
    optimizer.step()


def test_missing_process_group_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Under a launcher without a process group, a warning says that nothing will be exchanged."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    with caplog.at_level(logging.WARNING, logger="tritoncomm"):
        sparse_wrap(sgd(model()))
    assert "not initialized" in caplog.text


def test_closure_after_synchronize() -> None:
    """It must not compute other gradients."""
    net = model()
    optimizer = sparse_wrap(sgd(net))
    backward(net)
    optimizer.synchronize()
    for closure in (lambda: backward(net), lambda: backward(net), None):
        with pytest.raises(RuntimeError, match=r"changed since .* in a closure"):
            optimizer.step(closure)
    optimizer.zero_grad()
    backward(net)
    optimizer.synchronize()
    assert optimizer.step(lambda: 1.0) == 1.0
