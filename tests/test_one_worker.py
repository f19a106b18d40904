"""What an optimizer accepts with one worker, and nothing to exchange."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from tritoncomm import ConfigurationError
from tritoncomm.step import settings as options

from small_model import model, sparse_wrap


def test_one_worker_accepts_what_its_optimizer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker exchanges nothing: sparse gradients and all options of Adam are as with the bare optimizer."""
    monkeypatch.setattr(options, "is_alone", lambda _: True)
    torch.sparse.check_sparse_tensor_invariants.disable()  # explicitly, otherwise torch logs a warning

    def trained(kind: type[torch.optim.Optimizer], *, wrapped: bool, **fields: object) -> list[torch.Tensor]:
        torch.manual_seed(0)
        table = nn.Embedding(8, 3, sparse=fields.pop("sparse", False))
        optimizer = kind(table.parameters(), lr=0.05, **fields)
        optimizer = sparse_wrap(optimizer) if wrapped else optimizer
        for step in range(4):
            optimizer.zero_grad()
            table(torch.tensor([step, 2, 2])).square().sum().backward()
            optimizer.step()
        return [parameter.detach() for parameter in table.parameters()]

    def differentiated(*, wrapped: bool) -> torch.Tensor:
        start = torch.linspace(1, 2, 6).requires_grad_()
        weight = start * 1.0
        optimizer = torch.optim.AdamW([weight], lr=0.05, differentiable=True)
        optimizer = sparse_wrap(optimizer) if wrapped else optimizer
        for _ in range(2):
            weight.grad = start.square()
            optimizer.step()
        weight.sum().backward()
        return start.grad

    assert torch.equal(differentiated(wrapped=True), differentiated(wrapped=False))
    for kind, fields in (
        (torch.optim.SGD, {"sparse": True}),
        (torch.optim.Adagrad, {"sparse": True}),
        (torch.optim.SparseAdam, {"sparse": True}),
    ):
        assert all(map(torch.equal, trained(kind, wrapped=False, **fields), trained(kind, wrapped=True, **fields)))
    adamw = sparse_wrap(torch.optim.AdamW(model().parameters(), capturable=True))  # its step needs a GPU
    adamw.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = sparse_wrap(torch.optim.SGD(table.parameters(), lr=0.1))
    before = table.weight.detach().clone()
    (table(torch.tensor([1])) * float("nan")).sum().backward()
    optimizer.step()
    assert torch.equal(table.weight, before)  # skipped
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.zero_grad()
    scaler.scale(table(torch.tensor([1])).sum()).backward()
    scaler.step(optimizer)
    assert torch.allclose(before[1] - table.weight[1], torch.full((2,), 0.1))


def test_one_worker_of_several_rejects(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer that works with one worker only is rejected when it becomes one of several."""
    monkeypatch.setattr(options, "is_alone", lambda _: True)
    adamw = sparse_wrap(torch.optim.AdamW(model().parameters(), capturable=True))
    sparse = sparse_wrap(torch.optim.SparseAdam(model().parameters()))
    monkeypatch.setattr(options, "is_alone", lambda _: False)  # as several workers
    with pytest.raises(ConfigurationError, match="capturable=True is not supported"):
        adamw.reset_process_group()
    with pytest.raises(ConfigurationError, match="SparseAdam needs sparse gradients"):
        sparse.reset_process_group()


KINDS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05, amsgrad=True, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "scaler"),
    [
        (torch.float32, ""),
        (torch.float64, ""),
        (torch.bfloat16, ""),
        (torch.float32, "scales"),
        (torch.float32, "unscales"),
    ],
)
def test_one_worker_is_the_bare_optimizer(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype, scaler: str
) -> None:
    """Parameters and state are those of the bare optimizer to the bit, whatever the density, and so is an overflow.

    What is unfrozen, or added to the original optimizer, is trained, and what has no gradient is left alone.
    """
    monkeypatch.setattr(options, "is_alone", lambda _: True)

    def trained(*, wrapped: bool) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
        net = model().to(dtype)
        net[0].weight.requires_grad_(False)
        unused, added = (nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))
        optimizer = inner = KINDS[kind]([*net.parameters(), unused])
        if wrapped:
            optimizer = sparse_wrap(inner, density=0.001)
        scaling = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=bool(scaler))
        for step in range(5):
            if step == 2:
                net[0].weight.requires_grad_(True)
            if step == 3:
                inner.add_param_group({"params": [added], "lr": 0.1})
            optimizer.zero_grad()
            x = torch.randn(4, net[0].in_features, generator=torch.Generator().manual_seed(step)).to(dtype)
            loss = net(x).square().mean() + added.square().sum()
            scaling.scale(loss * (torch.inf if scaler and step == 1 else 1.0)).backward()
            if scaler == "unscales":
                scaling.unscale_(optimizer)
            scaling.step(optimizer)
            scaling.update()
        return [*net.parameters(), unused, added], optimizer

    (bare, plain), (ours, optimizer) = trained(wrapped=False), trained(wrapped=True)
    assert not torch.equal(ours[-1], torch.ones(3))
    for p, q in zip(bare, ours, strict=True):
        assert torch.equal(p, q)
        assert (p.grad is None) == (q.grad is None)
        assert plain.state[p].keys() == optimizer.state[q].keys()
        for name, value in plain.state[p].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizer.state[q][name])), name
    assert optimizer.metrics()["density_delivered"] == 1
    assert optimizer.metrics()["residual_norm"] == 0


@pytest.mark.parametrize("ends", ["exchange", "flush"])
def test_one_worker_unfreezes_between_exchanges(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """What is unfrozen between two exchanges is trained from then on, also after a step that was refused."""
    monkeypatch.setattr(options, "is_alone", lambda _: True)

    def trained(*, wrapped: bool) -> list[torch.Tensor]:
        net = model()
        net[0].weight.requires_grad_(False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        if wrapped:
            optimizer = sparse_wrap(optimizer, local_steps=4)
        for step in range(8 if ends == "exchange" else 2):
            if step == 1:
                net[0].weight.requires_grad_(True)
            optimizer.zero_grad()
            x = torch.randn(4, net[0].in_features, generator=torch.Generator().manual_seed(step))
            net(x).square().mean().backward()
            if wrapped and step == 1:
                optimizer.param_groups[0]["dense"] = "no bool"
                with pytest.raises(ConfigurationError, match="a parameter group has dense='no bool'"):
                    optimizer.step()
                del optimizer.param_groups[0]["dense"]
            optimizer.step()
        if wrapped and ends == "flush":
            optimizer.flush()
        return [*net.parameters()]

    for p, q in zip(trained(wrapped=False), trained(wrapped=True), strict=True):
        assert torch.allclose(p, q) if ends == "flush" else torch.equal(p, q)
