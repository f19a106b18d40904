"""Gradients and parameters that share memory, cannot be written to, or were never finite; options that are objects."""

from __future__ import annotations

import pytest
import torch
import tritoncomm
from models import adamw
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ranks import ranks


def batch(rank, step):
    """Return the factors of the gradients of a rank."""
    return torch.randn(60, 50, generator=torch.Generator().manual_seed(10 * step + rank))


def of_sum(a, b, x):
    """Return one tensor as both gradients."""
    return torch.autograd.grad(((a + b) * x).sum(), [a, b])


def of_views(a, b, x):
    """Return gradients of which the second one begins within the first one."""
    whole = torch.cat([x, x.neg()])
    return whole[:60], whole[30:90]


def in_inference(a, b, x):
    """Return gradients that cannot be written to."""
    with torch.inference_mode():
        return x.clone(), x.neg()


GRADIENTS = {"one tensor": of_sum, "views of one": of_views, "of inference": in_inference}


@ranks(2)
@pytest.mark.parametrize("gradients", GRADIENTS)
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "a list"])
def test_gradients_that_share_memory(rank, world_size, gradients, kind):
    """Means do not overwrite each other: training is that with a copy of each gradient, to the bit."""
    models = [nn.ParameterList(nn.Parameter(torch.zeros(60, 50)) for _ in range(2)) for _ in range(2)]
    if kind == "a list":
        made = [[torch.optim.SGD([a], lr=0.1), torch.optim.AdamW([b], lr=0.1)] for a, b in models]
    else:
        made = [getattr(torch.optim, kind)(model.parameters(), lr=0.1) for model in models]
    optimizers = [tritoncomm.wrap(each, density=0.03, warmup_steps=1) for each in made]
    for step in range(4):
        for model, optimizer, copies in zip(models, optimizers, (False, True), strict=True):
            given = GRADIENTS[gradients](*model, batch(rank, step))
            for parameter, gradient in zip(model, given, strict=True):
                parameter.grad = gradient.clone() if copies else gradient
            if kind == "AdamW":  # whose step reads .grad in this case alone
                optimizer.synchronize()
            optimizer.step()
        assert all(torch.equal(own, other) for own, other in zip(*models, strict=True)), step
    assert bool(models[0][1].any())


@ranks(2)
def test_gradients_with_gaps(rank, world_size):
    """Parameters are columns of one matrix, and so are their gradients, of which columns overlap."""
    whole = [torch.zeros(60, 100) for _ in range(2)]
    models = [nn.ParameterList([nn.Parameter(each[:, :50]), nn.Parameter(each[:, 50:])]) for each in whole]
    made = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    optimizers = [tritoncomm.wrap(each, density=0.03, warmup_steps=1) for each in made]
    for step in range(3):
        x = batch(rank, step).repeat(2, 2)
        for model, optimizer, copies in zip(models, optimizers, (False, True), strict=True):
            for parameter, gradient in zip(model, (x[:60, :50], x[35:95, :50]), strict=True):
                parameter.grad = gradient.clone() if copies else gradient
            optimizer.step()
        assert torch.equal(*whole), step
    assert bool(whole[0].any())


def overlapping():
    """Return pairs of parameters that have entries in common, and what is said of the second one."""
    memory = torch.zeros(40, 60)
    yield memory, memory[20:], "b shares memory with a,"
    yield memory[:, :40], memory[:, 20:], "b shares memory with a,"
    yield torch.zeros(30, 50), torch.zeros(200).as_strided((50, 60), (2, 1)), "b shares memory with itself,"


@ranks(1, 2)
def test_parameters_that_share_memory(rank, world_size):
    """What would lose an update is refused by name, but not what lies next to another one, or is added alone."""
    for first, second, said in overlapping():
        model = nn.ParameterDict({"a": nn.Parameter(first), "b": nn.Parameter(second)})
        if world_size > 1:
            with pytest.raises(tritoncomm.ConfigurationError, match=f"^{said} .*: use one Parameter"):
                tritoncomm.wrap(adamw(model), model=model)
        tritoncomm.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model=model)
    for memory in (torch.zeros(40, 60), torch.zeros(60, 40).t()):
        for cut in ((slice(20), slice(20, None)), ((..., slice(30)), (..., slice(30, None)))):
            neighbours = nn.ParameterList(nn.Parameter(memory[own]) for own in cut)
            tritoncomm.wrap(adamw(neighbours), model=neighbours)


@ranks(2)
def test_values_that_were_never_finite(rank, world_size):
    """What a parameter has of NaN and Inf from the start is no change: the rest of it trains by updates."""
    values = torch.ones(40, 50)
    values[0, :2] = torch.tensor([-torch.inf, torch.nan])
    model = nn.ParameterList([nn.Parameter(values)])
    optimizer = tritoncomm.wrap(adamw(model), model=model, local_steps=2)
    for step in range(5):
        model[0].grad = torch.full((40, 50), 1.0 + rank)
        model[0].grad[0, :2] = 0
        optimizer.step()
        if step == 4:
            optimizer.flush()
    assert bool((model[0][1:] < 0.97).all())
    assert optimizer.metrics()["dropped_deltas"] == 0


@ranks(2)
def test_options_that_are_objects(rank, world_size):
    """Functions, objects and sets of a parameter group are compared without addresses and order."""
    others = [object() for _ in range(1 + 1000 * rank)]  # so that addresses differ
    model = nn.Linear(4, 4)

    def schedule(step):
        return step

    ordered = set[int]()
    for each in (8, 0) if rank else (0, 8):
        ordered.add(each)
    own = {"schedule": schedule, "owner": object(), "tags": ordered, "all": [others[-1], {"f": schedule}, [ordered]]}
    tritoncomm.wrap(torch.optim.SGD([{"params": model.parameters(), **own}], lr=0.1), broadcast_parameters=True)
    own["tags"] = {0, 8 + rank}
    with pytest.raises(
        tritoncomm.ConfigMismatchError, match=r"tags of parameter group 0: rank 0 has .*8.*rank 1 has .*9"
    ):
        tritoncomm.wrap(torch.optim.SGD([{"params": model.parameters(), **own}], lr=0.1))


@ranks(2)
def test_empty_parameter(rank, world_size):
    """It has a state, as with the bare optimizer, which torch.distributed.checkpoint looks for in a new run."""
    model = nn.ParameterDict({"full": nn.Parameter(torch.ones(40, 50)), "empty": nn.Parameter(torch.empty(0, 8))})
    optimizer = tritoncomm.wrap(adamw(model), model=model, warmup_steps=1)
    for _ in range(3):
        optimizer.zero_grad()
        sum((rank + 1) * each.square().sum() for each in model.values()).backward()
        optimizer.step()
    state = get_optimizer_state_dict(model, optimizer)["state"]
    optimizer.zero_grad()  # torch makes no state where there are gradients
    fresh = get_optimizer_state_dict(model, tritoncomm.wrap(adamw(model), model=model))["state"]
    assert {name: set(each) for name, each in state.items()} == {name: set(each) for name, each in fresh.items()}
    assert int(state["empty"]["step"]) == 3
