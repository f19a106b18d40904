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


def test_one_worker_trains_what_is_unfrozen_or_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter that is unfrozen, or added to the original optimizer, is trained as by the bare optimizer."""
    monkeypatch.setattr(options, "is_alone", lambda _: True)

    def trained(*, wrapped: bool, scaled: bool) -> list[torch.Tensor]:
        net = model()
        net[0].weight.requires_grad_(False)
        inner = torch.optim.AdamW(net.parameters(), lr=0.05)
        optimizer = sparse_wrap(inner) if wrapped else inner
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
        added = nn.Parameter(torch.ones(3))
        for step in range(4):
            if step == 2:
                net[0].weight.requires_grad_(True)
            if step == 3:
                inner.add_param_group({"params": [added], "lr": 0.1})
            optimizer.zero_grad()
            x = torch.randn(4, net[0].in_features, generator=torch.Generator().manual_seed(step))
            scaler.scale(net(x).square().mean() + added.square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return [*net.parameters(), added]

    for scaled in (False, True):
        bare, ours = trained(wrapped=False, scaled=scaled), trained(wrapped=True, scaled=scaled)
        assert all(map(torch.equal, bare, ours))
        assert not torch.equal(ours[-1], torch.ones(3))
