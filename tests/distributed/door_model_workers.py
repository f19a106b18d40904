"""Worker processes of tests/distributed/test_door_edges.py: models and parameters that a hook of DDP tells apart."""

from __future__ import annotations

import pytest
import torch
import tritoncomm
from ddp_models import ddp, net
from helpers import adamw, flat, loss_of, same_everywhere
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from tritoncomm import ConfigurationError
from tritoncomm.ddp import CommState, comm_hook


def other_strides(rank: int, world_size: int, send) -> None:
    """Parameters in other memory formats train as a plain module does, to the bit, and ``.grad`` has its values."""

    def images(kind: str) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.Flatten(), nn.Linear(256, 7, bias=False))
        if kind == "channels_last":
            return model.to(memory_format=torch.channels_last)
        weight = model[2].weight.detach()
        # Dense with swapped strides, and with gaps: DDP lays out the second row by row.
        strided = weight.t().contiguous().t() if kind == "transposed" else weight.repeat(1, 2)[:, :256]
        model[2].weight = nn.Parameter(strided)
        return model

    for kind in ("channels_last", "transposed", "gaps"):
        plain, model = images(kind), DistributedDataParallel(images(kind))  # one bucket
        settings = {"algo": "topk_allgather", "density": 0.1, "dense_below": 0}
        optimizers = tritoncomm.wrap(adamw(plain), **settings), tritoncomm.wrap(adamw(model), model=model, **settings)
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + rank)
            x, y = torch.randn(4, 3, 6, 6, generator=generator), torch.randint(0, 7, (4,), generator=generator)
            for each, optimizer in zip((plain, model), optimizers, strict=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(each(x), y).backward()
                optimizer.step()
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad), (kind, step)
                assert torch.equal(p, q), (kind, step)


def unfrozen_later(rank: int, world_size: int, send) -> None:
    """A parameter that the hook does not know, because it was frozen, is not stepped by one rank's gradient."""
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        model = net()
        next(model.parameters()).requires_grad_(requires_grad=False)
        model = ddp(model)
        optimizer = tritoncomm.wrap(kind(model.parameters(), lr=0.05), model=model, density=0.1, dense_below=0)
        loss_of(model, rank, 0).backward()
        optimizer.step()
        next(model.parameters()).requires_grad_(requires_grad=True)
        optimizer.zero_grad()
        before = flat(model)
        loss_of(model, rank, 1).backward()
        with pytest.raises(ConfigurationError, match=r"does not average 1 parameters .* frozen when the hook"):
            optimizer.step()
        assert flat(model) == before
        next(model.parameters()).requires_grad_(requires_grad=False)
        next(model.parameters()).grad = None
        optimizer.step()
        assert flat(model) != before
        assert same_everywhere(flat(model))


def gradients_of_others(rank: int, world_size: int, send) -> None:
    """``torch.autograd.grad`` adds to no gradient, so it is no second backward pass, whenever it is called."""
    models = ddp(net()), ddp(net())
    optimizers = [tritoncomm.wrap(adamw(model), model=model, density=0.1, dense_below=0) for model in models]
    probes = list(models[0].module.parameters())
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            if model is models[0]:
                torch.autograd.grad(loss_of(model.module, rank, step), probes)
            optimizer.step()
            if model is models[0]:
                torch.autograd.grad(loss_of(model.module, rank, step), probes[:2])
    assert flat(models[0]) == flat(models[1])
    with pytest.raises(RuntimeError, match="were not reset"):
        loss_of(models[0], rank, 3).backward()


def unsuitable_models(rank: int, world_size: int, send) -> None:
    """A parameter that DDP ignores is not taken for exchanged. Other models are refused by name."""
    model = net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    model = ddp(model)
    with pytest.raises(ConfigurationError, match=r"does not average 1 parameters .*\(40, 6\).* ignored by DDP"):
        tritoncomm.wrap(adamw(model), model=model, density=0.1)
    ignored, *others = model.parameters()
    model = ddp(model.module)
    optimizer = tritoncomm.wrap(torch.optim.AdamW(others), model=model, density=0.1)
    for step in range(3):  # the gradient that nobody resets is no averaged one
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    assert ignored.grad is not None
    other = nn.Linear(6, 3)
    other.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    other = DistributedDataParallel(other)
    with pytest.raises(ConfigurationError, match=r"turn is torch\.complex64: convert it with torch\.view_as_real"):
        tritoncomm.wrap(adamw(other), model=other)
    halved = DistributedDataParallel(nn.Linear(6, 3), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    with pytest.raises(ConfigurationError, match="mixed_precision=, which has a communication hook of its own"):
        tritoncomm.wrap(adamw(halved), model=halved)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.empty(4, 5, device="meta"))])
    with pytest.raises(ConfigurationError, match=r"shape \(4, 5\) is on the meta device"):
        tritoncomm.wrap(optimizer)


class TwoTypes(nn.Module):
    """A model with parameters of two dtypes, which DDP never puts into one bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(6, 40), nn.Linear(40, 40).bfloat16(), nn.Linear(40, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        return self.third(self.second(self.first(x).tanh().bfloat16()).tanh().float())


def static_graph_of_two_types(rank: int, world_size: int, send) -> None:
    """In the first pass of a static graph, DDP gives every bucket the number 0, and calls none of them the last."""
    finals = []
    situations = {"density": 1.0}, {"max_grad_norm": 1.0, "clip_by": "gradient"}, {"algo": "spardl"}
    for static in (False, True):
        for fields in situations:
            model = DistributedDataParallel(TwoTypes(), static_graph=static)
            optimizer = tritoncomm.wrap(adamw(model), model=model, **{"density": 0.1, "dense_below": 0} | fields)
            for step in range(6):
                optimizer.zero_grad()
                loss = loss_of(model, rank, step)
                (loss * float("nan") if step in (0, 3) and rank == 1 else loss).backward()
                optimizer.step()
            assert optimizer.metrics()["steps"] == 4
            assert optimizer.metrics()["skipped_steps"] == 2
            finals.append([p.detach().clone() for p in model.parameters()])
            assert same_everywhere([p.tolist() for p in finals[-1]])
    for p, q in zip(finals[0], finals[3], strict=True):
        assert torch.allclose(p, q, atol=1e-3)  # buckets have their parameters in another order, and so have sums
    model = DistributedDataParallel(TwoTypes(), static_graph=True)
    model.register_comm_hook(CommState(model.process_group, density=0.1), comm_hook)
    with pytest.raises(ConfigurationError, match=r"static_graph=True .* call tritoncomm\.ddp\.register\(\)"):
        loss_of(model, rank, 0).backward()
