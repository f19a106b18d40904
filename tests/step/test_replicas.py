"""What replicas compare: every bit of parameters and of the optimizer's state, each by its name."""

from __future__ import annotations

import torch
from torch import nn
from tritoncomm.step.agree.replica import Replica


def replica(state: dict[str, object]) -> Replica:
    """Return a replica with one parameter and this ``state``."""
    parameter = nn.Parameter(torch.ones(3, 5))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = state
    return Replica(optimizer, lambda: [(parameter, "weight")])


def test_what_is_compared() -> None:
    """Parameters come first. States may be nested. What has no bits is left out, and nothing is added to a state."""
    state = {
        "step": torch.tensor(3.0),
        "count": 7,
        "rate": 0.5,
        "history": [torch.ones(2), {"inner": torch.ones(1)}],
        "nothing": None,
        "name": "text",
        "sparse": torch.eye(3).to_sparse(),
        "elsewhere": torch.ones(3, device="meta"),
        "complex": torch.ones(3, dtype=torch.complex64).conj(),
        "empty": torch.ones(0),
    }
    other = nn.Parameter(torch.ones(2))
    found = replica(state)
    assert list(found.figures()) == [
        "weight",
        "complex of weight",
        "count of weight",
        "empty of weight",
        "0 history of weight",
        "inner 1 history of weight",
        "name of weight",
        "rate of weight",
        "step of weight",
    ]
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3, 1))
    optimizer = torch.optim.SGD([first, second], lr=0.1)
    figures = Replica(optimizer, lambda: [(first, "first"), (second, "")], [(other, "other")]).figures()
    assert list(figures) == ["first", "parameter 1 of shape (3, 1)", "other"]
    assert figures["first"] == figures["other"] != figures["parameter 1 of shape (3, 1)"]
    assert not optimizer.state


def test_numbers_count() -> None:
    """So do numbers in a state, and a state that is missing."""
    assert len({replica(state).digest() for state in ({}, {"step": 1}, {"step": 2}, {"count": 1})}) == 4


def test_names_that_are_equal() -> None:
    """Every parameter counts, also if an optimizer of two modules calls two of them the same."""
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.1)
    named = Replica(optimizer, lambda: [(first, "weight"), (second, "weight")])
    assert list(named.figures()) == ["weight (parameter 0)", "weight (parameter 1)"]
    before = named.digest()
    for parameter in (first, second):
        with torch.no_grad():
            parameter[0] += 1
        assert named.digest() != before
        before = named.digest()
