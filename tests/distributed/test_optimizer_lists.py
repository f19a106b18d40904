"""Several optimizers as one, which exchange updates: one norm, and nothing of what they change is lost."""

from __future__ import annotations

import pytest
import torch
import tritoncomm
from models import equal, exact, flat, loss_of, muon, net, same, total, train
from torch import nn
from tritoncomm import ConfigurationError, Updates

from ranks import ranks


class Plain(torch.optim.Optimizer):
    """Subtracts gradients, and has no rule for late ones."""

    def __init__(self, params, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Take a step."""
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                parameter.sub_(parameter.grad, alpha=group["lr"])


@ranks(1, 2)
@pytest.mark.parametrize("large", [0, 1])  # either of them has most of the norm
def test_one_norm_of_a_list(rank, world_size, large):
    """Where updates are exchanged, it limits the gradients of this worker: those of all optimizers together."""
    parameters = [nn.Parameter(torch.zeros(600)), nn.Parameter(torch.zeros(20, 30))]
    kinds = [Plain(parameters[:1]), torch.optim.SGD(parameters[1:], lr=1.0)]
    optimizer = exact(kinds, max_grad_norm=1.0, updates=Updates(algo="dense"))
    generator = torch.Generator().manual_seed(rank)
    grads = [torch.randn(p.shape, generator=generator) * 100.0 ** (i == large) for i, p in enumerate(parameters)]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    optimizer.step()
    own = float(nn.utils.get_total_norm(grads))
    (vector,) = optimizer._tritoncomm.setup.scope.vectors
    gain = 1.0 if vector.gain is None else vector.gain
    for parameter, grad in zip(parameters, grads, strict=True):
        torch.testing.assert_close(-parameter.detach(), total(grad / own) / world_size * gain, rtol=1e-4, atol=1e-6)
    assert optimizer.metrics()["grad_norm"] == pytest.approx(own)


@ranks(2)
def test_schedule_free_in_a_list(rank, world_size):
    """It cannot exchange updates, so by default the list exchanges gradients, of which none is late."""
    parameters = [nn.Parameter(torch.zeros(8)) for _ in range(2)]
    kinds = [PlainScheduleFree(parameters[:1]), Plain(parameters[1:])]
    with pytest.raises(ConfigurationError, match=r"the list exchanges updates, .*wrap\(\) for it alone"):
        tritoncomm.wrap(kinds, "oktopk")
    assert type(kinds[1]) is Plain
    for parameter in parameters:
        parameter.grad = torch.full((8,), float(rank))
    tritoncomm.wrap(kinds).step()
    torch.testing.assert_close(flat(parameters), torch.full((16,), -0.5), rtol=0.01, atol=0)  # of 8 bits
    assert equal(parameters)


class PlainScheduleFree(Plain):
    """Is taken for a schedule-free optimizer, because of its name."""


@ranks(2)
@pytest.mark.parametrize("local_steps", [1, 4])
def test_limit_is_one_of_gradients(rank, world_size, local_steps):
    """``max_grad_norm`` limits gradients, and not what several steps have changed."""
    parameters = [nn.Parameter(torch.zeros(100))]
    options = {"local_steps": local_steps, "updates": Updates(algo="dense", outer_lr=0.5)}
    optimizer = tritoncomm.wrap(Plain(parameters, lr=10.0), max_grad_norm=1.0, **options)
    for _ in range(local_steps):
        parameters[0].grad = torch.ones(100)
        optimizer.step()
    torch.testing.assert_close(parameters[0].detach(), torch.full((100,), -0.5 * local_steps))


@ranks(2)
@pytest.mark.parametrize("kind", ["no scaler", "torch", "ours"])
def test_nan_in_a_list(rank, world_size, kind):
    """A NaN in a gradient of one worker leaves out its step. The updates of the others are exchanged all the same."""
    model = net()
    optimizer = tritoncomm.wrap(muon(model), model=model)
    make = tritoncomm.amp.GradScaler if kind == "ours" else torch.amp.GradScaler
    scaler = make("cpu", init_scale=1000.0, enabled=kind != "no scaler")
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, step)).backward()
        matrices, bias = flat([model[0].weight, model[2].weight]), flat([model[0].bias])
        if step == 2 and rank == 1:
            model[0].bias.grad[0] = float("nan")
        scaler.step(optimizer)
        scaler.update()
        assert equal(model), step
        assert not torch.equal(flat([model[0].bias]), bias)
        assert not torch.equal(flat([model[0].weight, model[2].weight]), matrices)
    assert optimizer.metrics()["skipped_steps"] == 0


@ranks(2)
def test_parameter_that_one_of_a_list_gets_later(rank, world_size):
    """It is an error before any of them steps. What it says to do works."""
    model, extra = net(), nn.Parameter(torch.ones(4))
    parts = muon(model)
    optimizer = tritoncomm.wrap(parts, model=model)
    train(model, optimizer, rank, [0])
    before = flat(model)
    parts[1].add_param_group({"params": [extra]})
    extra.grad = torch.ones(4)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"for a list.*call flush\(\) and release\(\), and wrap again"):
            optimizer.step()
    assert torch.equal(flat(model), before)
    optimizer.flush()
    optimizer.release()
    again = tritoncomm.wrap(parts, model=model)
    extra.grad = torch.ones(4)
    again.step()
    assert extra.tolist() != [1.0] * 4
    assert equal([*model.parameters(), extra])


@ranks(2)
def test_local_steps_beside_exchanged_gradients(rank, world_size):
    """Of two optimizers of one model, one does not compare what the other one trains locally."""
    model = net()
    first = tritoncomm.wrap(torch.optim.AdamW(model[0].parameters()), model=model)
    second = tritoncomm.wrap(torch.optim.AdamW(model[2:].parameters()), model=model, local_steps=4)
    for step in range(11):  # the first one compares after 1 and 10 steps
        second.zero_grad()
        train(model, first, rank, [step])
        second.step()
    assert equal(model[0])
    assert not equal(model[2])
    second.merge()
    assert same(flat(model[2]).tolist())
