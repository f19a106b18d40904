"""The wrapped optimizer in one process: the behavior that users of torch.optim rely on."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
import torch
import tritoncomm
from torch import nn
from tritoncomm import ConfigurationError, NonFiniteError
from tritoncomm.step.exchange.layout import BucketLayout

from small_model import backward, model, sgd, sparse_wrap


def test_wrapper_shares_groups_and_state() -> None:
    """The wrapper shares groups, state and defaults with the wrapped optimizer, also after a load replaces them."""
    inner = sgd(model())
    optimizer = sparse_wrap(inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    inner.load_state_dict(inner.state_dict())
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert "OkTopk" in repr(optimizer)
    assert "SGD" in repr(optimizer)


def test_density_one_equals_the_bare_optimizer() -> None:
    """With one worker and density 1, the wrapper gives the same bits as the bare optimizer."""
    plain, wrapped = model(), model()
    bare, optimizer = sgd(plain), sparse_wrap(sgd(wrapped), density=1.0)
    for step in range(5):
        for net, opt in ((plain, bare), (wrapped, optimizer)):
            opt.zero_grad()
            backward(net, step)
            opt.step()
    assert all(map(torch.equal, plain.parameters(), wrapped.parameters()))


def test_closure() -> None:
    """step(closure) evaluates the closure with gradients enabled and returns its loss."""
    net = model()
    optimizer = sparse_wrap(sgd(net))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return backward(net)

    with torch.no_grad():
        first = optimizer.step(closure)
    assert optimizer.step(closure) < first
    assert optimizer.metrics()["steps"] == 2


def test_schedulers_and_hooks() -> None:
    """A learning-rate scheduler drives the wrapped optimizer, and step hooks run."""
    net = model()
    optimizer = sparse_wrap(sgd(net))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    backward(net)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.025
    assert called == ["before", "after"]


def test_synchronize_exchanges_once() -> None:
    """After synchronize() the gradients are the mean, and step() uses their current values."""
    net = model()
    optimizer = sparse_wrap(torch.optim.SGD(net.parameters(), lr=1.0), density=0.3)
    backward(net)
    optimizer.synchronize()
    kept = torch.cat([p.grad.reshape(-1) for p in net.parameters()])
    assert int((kept != 0).sum()) <= 0.6 * kept.numel()
    with pytest.raises(RuntimeError, match="exchanged already"):
        optimizer.synchronize()
    before = [p.detach().clone() for p in net.parameters()]
    for p in net.parameters():
        p.grad *= 0.5
    optimizer.step()
    assert all(torch.equal(b - 0.5 * k, p) for b, k, p in zip(before, _parts(kept, net), net.parameters(), strict=True))
    optimizer.zero_grad()
    backward(net)
    optimizer.synchronize()
    optimizer.zero_grad()  # discards the mean, so another exchange is allowed
    backward(net)
    optimizer.synchronize()
    assert optimizer.metrics()["steps"] == 1
    assert optimizer.metrics()["skipped_steps"] == 1
    optimizer.step()
    assert optimizer.metrics()["steps"] == 2


def _parts(flat: torch.Tensor, net: nn.Module) -> list[torch.Tensor]:
    layout = BucketLayout(list(net.parameters()))
    return [part.view(p.shape) for part, p in zip(layout.parts(flat), net.parameters(), strict=True)]


def test_a_step_without_gradients() -> None:
    """Gradients of zero deliver entries of the residual. Where there are none, nothing changes."""
    net = model()
    optimizer = sparse_wrap(sgd(net), density=0.1)
    backward(net)
    optimizer.step()
    residual_norm = optimizer.metrics()["residual_norm"]
    before = [p.detach().clone() for p in net.parameters()]
    optimizer.zero_grad()
    optimizer.step()
    assert all(p.grad is None for p in net.parameters())
    assert optimizer.metrics()["residual_norm"] == residual_norm
    assert all(map(torch.equal, before, net.parameters()))
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):  # of what nobody had a gradient of, the residual waits for one step more
        optimizer.step()
    assert optimizer.metrics()["residual_norm"] < residual_norm


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_non_finite_gradients(policy: str) -> None:
    """A NaN skips the step or raises. Parameters and residuals stay unchanged, and training continues."""
    net = model()
    optimizer = sparse_wrap(sgd(net), density=0.2, on_nonfinite=policy)
    backward(net)
    optimizer.step()
    before, residual_norm = [p.detach().clone() for p in net.parameters()], optimizer.metrics()["residual_norm"]
    optimizer.zero_grad()
    backward(net)
    net[0].weight.grad[1, 1] = float("nan")
    if policy == "raise":
        with pytest.raises(NonFiniteError):
            optimizer.step()
    else:
        optimizer.step()
        assert optimizer.metrics()["skipped_steps"] == 1
    assert all(map(torch.equal, before, net.parameters()))
    assert optimizer.metrics()["residual_norm"] == residual_norm
    optimizer.zero_grad()
    backward(net)
    optimizer.step()
    assert not all(map(torch.equal, before, net.parameters()))


def test_add_param_group_keeps_residuals() -> None:
    """New parameters join the exchange, and the residuals of the old ones stay."""
    net = model()
    optimizer = sparse_wrap(sgd(net), density=0.1)
    backward(net)
    optimizer.step()
    residual_norm = optimizer.metrics()["residual_norm"]
    extra = nn.Parameter(torch.ones(6))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    assert optimizer.metrics()["residual_norm"] == residual_norm
    for _ in range(4):
        optimizer.zero_grad()
        backward(net)
        extra.grad = torch.full((6,), 100.0)
        optimizer.step()
    assert (extra < 1).all()


def test_metrics_are_flat_floats() -> None:
    """metrics() is a flat dict of floats, before and after the first step."""
    net = model()
    optimizer = sparse_wrap(sgd(net), density=0.1)
    assert all(isinstance(v, float) for v in optimizer.metrics().values())
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
        ({"timeout": timedelta(0)}, r"timeout=0:00:00: must be above 0"),
        ({"timeout": timedelta.max}, "at most 365 days"),
        ({"max_catch_up": 0.5}, "max_catch_up=0.5"),
        ({"max_relative_update": -0.1}, "max_relative_update=-0.1"),
        ({"max_relative_update": "a fifth"}, "max_relative_update='a fifth'"),
        ({"algo": ["oktopk"]}, "unknown algorithm"),
        ({"algo": "nope"}, "unknown algorithm 'nope'"),
        ({"density": 0}, "density=0"),
        ({"tau": 3}, "no argument 'tau'.*repartition_every"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"staleness": "maybe"}, "staleness='maybe': choose one of 'aware', 'off'"),
        ({"small": "4bit"}, "small='4bit': choose one of 'fp32', '8bit'"),
        ({"algo": "random_block", "values": "2bit"}, "values='2bit'"),
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


def test_step_that_was_replaced() -> None:
    """A ``step`` that the user has put into the place of Adam's would hide ours: it is refused, in a list, too."""
    net = model()
    base = torch.optim.AdamW(net[0].parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(base, 1)  # wraps it, too
    own = base.step
    base.step = lambda closure=None: own(closure)
    for given in (base, [base, sgd(net[1:])]):
        with pytest.raises(ConfigurationError, match=r"replaced step\(\) of this one AdamW.*write a subclass"):
            tritoncomm.wrap(given)
    assert type(base) is torch.optim.AdamW


def test_attributes_that_would_be_hidden() -> None:
    """An optimizer with a public method or attribute that a wrapped one has is refused by its name."""

    class Metered(torch.optim.SGD):
        def metrics(self) -> None:
            """Return nothing."""

    base = sgd(model())
    base.merge = True
    for given, name in ((Metered(model().parameters()), "metrics"), (base, "merge")):
        with pytest.raises(ConfigurationError, match=f"has an attribute '{name}'"):
            tritoncomm.wrap(given)


def test_residual_norm_of_large_values() -> None:
    """The norm of a residual is finite as long as the residual is, although its squares overflow."""
    net = model()
    optimizer = sparse_wrap(sgd(net), density=0.1)
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 1e30)
    optimizer.step()
    left = torch.cat(optimizer._tritoncomm.setup.vector.feedback.residual.double().split(7))
    assert optimizer.metrics()["residual_norm"] == pytest.approx(float(left.norm()))
    assert left.any()


def test_unsupported_optimizers_are_rejected() -> None:
    """wrap() rejects modules, wrapped optimizers, LBFGS, complex parameters and sparse gradients by name."""
    with pytest.raises(ConfigurationError, match=r"a Sequential: pass a torch\.optim\.Optimizer"):
        sparse_wrap(model())
    with pytest.raises(ConfigurationError, match=r"wrapped already.*release"):
        sparse_wrap(sparse_wrap(sgd(model())))
    with pytest.raises(ConfigurationError, match="LBFGS"):
        sparse_wrap(torch.optim.LBFGS(model().parameters()))
    with pytest.raises(ConfigurationError, match=r"shape \(2,\) is torch\.complex64"):
        sparse_wrap(torch.optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1))
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = sparse_wrap(torch.optim.SGD(table.parameters(), lr=0.1))
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigurationError, match="sparse=False"):
        optimizer.step()


def test_algo_accepts_a_recipe() -> None:
    """``algo`` may be a recipe with all its settings."""
    optimizer = sparse_wrap(sgd(model()), algo=tritoncomm.OkTopk(density=0.2, bucket_width=2))
    assert optimizer.recipe == tritoncomm.OkTopk(density=0.2, bucket_width=2)


def test_replaced_gradients_are_rejected() -> None:
    """step() rejects local gradients that replaced the averaged ones."""
    net = model()
    optimizer = sparse_wrap(sgd(net))
    backward(net)
    optimizer.synchronize()
    net.zero_grad()
    backward(net)
    with pytest.raises(RuntimeError, match="replaced after synchronize"):
        optimizer.step()
    optimizer.zero_grad()
    backward(net)
    optimizer.synchronize()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"changed since .* in a closure"):
            optimizer.step(lambda: backward(net))
    with pytest.raises(RuntimeError, match=r"changed since .* in a closure"):
        optimizer.step()
    optimizer.zero_grad()
    backward(net)
    optimizer.synchronize()
    assert optimizer.step(lambda: 1.0) == 1.0


def test_freezing_after_wrapping() -> None:
    """A parameter frozen after wrapping stays unchanged. Unfreezing one after wrapping raises an error."""
    net = model()
    net[2].bias.requires_grad_(requires_grad=False)
    optimizer = sparse_wrap(torch.optim.AdamW(net.parameters(), lr=0.1), density=0.5)
    backward(net)
    optimizer.step()
    net[0].bias.requires_grad_(requires_grad=False)
    frozen = net[0].bias.detach().clone()
    optimizer.zero_grad()
    backward(net)
    optimizer.step()
    assert torch.equal(net[0].bias, frozen)
    net[2].bias.requires_grad_(requires_grad=True)
    optimizer.zero_grad()
    backward(net)
    with pytest.raises(ConfigurationError, match=r"parameter 3 of shape \(1,\) was frozen at wrap"):
        optimizer.step()


def test_float16_overflow_skips_the_step() -> None:
    """A mean that overflows in the gradient's fp16 skips the step, and the residual is kept."""
    weight = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    optimizer = sparse_wrap(torch.optim.SGD([weight], lr=1.0), density=0.25)
    for step in range(4):
        weight.grad = torch.full((4,), 40000.0 + step, dtype=torch.float16)
        optimizer.step()
        optimizer.zero_grad()
    assert weight.isfinite().all()
    assert optimizer.metrics()["skipped_steps"] > 0


def test_expanded_gradients() -> None:
    """A gradient whose elements share memory is replaced instead of written in place."""
    weight = nn.Parameter(torch.zeros(6))
    optimizer = sparse_wrap(torch.optim.SGD([weight], lr=1.0), density=0.5)
    weight.grad = torch.ones(1).expand(6)
    optimizer.step()
    assert weight.tolist() == [-1, -1, -1, 0, 0, 0]


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


def test_scheduler_built_before_wrapping() -> None:
    """A scheduler of the inner optimizer drives the wrapped one, without a warning about the order of steps."""
    net = model()
    inner = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    optimizer = sparse_wrap(inner)
    backward(net)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
