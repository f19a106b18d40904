"""What all ranks must have in common: a difference is an error on all of them, which says what differs and where."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from kit import equal_on_all_ranks, everywhere, flat, log_lines, sgd, sparse, take, weight
from torch import nn
from tritoncomm import ConfigMismatchError, ConfigurationError, ProtocolMismatchError

from ranks import ranks


@ranks(2, 3)
def test_parameters_that_differ_are_refused_by_name(rank, world_size):
    """wrap() names the parameter, and the ranks of each value."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if rank == world_size - 1:
        with torch.no_grad():
            model[1].weight[0, 0] += 1
    with pytest.raises(ConfigMismatchError, match=rf"1\.weight.*rank {world_size - 1} has"):
        sparse(sgd(model.parameters()), model=model)


@ranks(2)
@pytest.mark.parametrize("field", ["values", "small"])
def test_format_that_differs_is_no_matter_of_parameters(rank, world_size, field):
    """The error names it, and does not advise to make parameters equal."""
    with pytest.raises(ConfigMismatchError, match=r"configure them identically: .*fp32") as caught:
        tritoncomm.wrap(sgd([weight(4096)]), **({field: "fp32"} if rank else {}))
    assert "broadcast_parameters" not in str(caught.value)


@ranks(2)
def test_broadcast_makes_parameters_and_buffers_equal(rank, world_size):
    """``broadcast_parameters`` takes those of the first rank, also of what the optimizer does not hold."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model(torch.randn(8, 4))
    first = everywhere(flat([*model.parameters(), *model.buffers()]))[0]
    sparse(sgd(model[2].parameters()), model=model, broadcast_parameters=True)
    assert torch.equal(flat([*model.parameters(), *model.buffers()]), first)


@ranks(2)
def test_parameters_that_the_optimizer_does_not_hold_must_be_equal(rank, world_size):
    """The whole model is compared."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight[0, 0] += rank
    with pytest.raises(ConfigMismatchError, match=r"0\.weight"):
        sparse(sgd(model[1].parameters()), model=model)


@ranks(2)
def test_buffers_that_differ_are_a_warning(rank, world_size):
    """It names the first of them, on the first rank."""
    model = nn.BatchNorm1d(4)
    model.running_mean += rank
    with log_lines() as lines:
        sparse(sgd(model.parameters()), model=model)
    assert any("running_mean" in line and "broadcast_parameters" in line for line in lines) == (rank == 0)


@ranks(2)
def test_argument_that_is_invalid_on_one_rank_is_an_error_on_all(rank, world_size):
    """The others do not wait. They learn the reason, and who it was."""
    kind = ConfigurationError if rank == 1 else ConfigMismatchError
    with pytest.raises(kind, match="dense_below=-1" if rank == 1 else "rank 1.*dense_below=-1"):
        sparse(sgd([weight()]), dense_below=-1 if rank == 1 else 0)
    sparse(sgd([weight()]))  # nothing is left of it


@ranks(2)
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("density", (0.25, 0.5)),
        ("repartition_every", (32, 64)),
        ("dense_below", (0, 8)),
        ("max_grad_norm", (1.0, 2.0)),
        ("lr", (0.1, 0.2)),
        ("optimizer", (torch.optim.SGD, torch.optim.Adagrad)),
        ("algo", ("oktopk", "spardl")),
        ("on_nonfinite", ("skip", "raise")),
    ],
)
def test_settings_that_differ_are_named(rank, world_size, field, values):
    """wrap() compares methods, their fields, arguments, the optimizer and its options."""
    own = {"algo": "oktopk", "density": 0.25, "repartition_every": 64, "dense_below": 0, "lr": 0.1}
    own |= {"optimizer": torch.optim.SGD, "updates": False, field: values[rank]}
    if own["algo"] == "spardl":
        del own["repartition_every"]
    optimizer = own.pop("optimizer")([weight()], lr=own.pop("lr"))
    with pytest.raises(ConfigMismatchError, match=field if field != "algo" else "spardl"):
        tritoncomm.wrap(optimizer, **own)


@ranks(2)
def test_states_of_optimizers_that_differ_are_refused(rank, world_size):
    """A rank that has loaded another state of the optimizer is found at wrap()."""
    p = weight()
    bare = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    p.grad = torch.full((16,), float(rank))
    bare.step()
    with torch.no_grad():
        p.zero_()
    with pytest.raises(ConfigMismatchError, match="state"):
        sparse(bare)


@ranks(2)
@pytest.mark.parametrize(("after", "what"), [(1, "weight"), (1, "state"), (20, "weight")])
def test_replicas_that_drift_are_found(rank, world_size, after, what):
    """A value that changes on one rank outside of step() is named soon: early in the first steps, then every 100."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = sparse(torch.optim.AdamW(model.parameters(), lr=0.01), model=model)
    take(optimizer, [model.weight], rank, range(after), world_size)
    if rank == 1:
        changed = model.weight.detach() if what == "weight" else optimizer.state[model.weight]["exp_avg"]
        changed[0, 0] += 1
    with pytest.raises(
        ProtocolMismatchError, match=r"exp_avg.*differs" if what == "state" else "weight differs between ranks"
    ):
        take(optimizer, [model.weight], rank, range(after, 11 if after == 1 else 101), world_size)


@ranks(3)
def test_differences_name_global_ranks(rank, world_size):
    """In a group of ranks 1 and 2, the second is rank 2."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    with pytest.raises(ConfigMismatchError, match=r"rank 1 has.*rank 2 has"):
        sparse(sgd([weight(value=float(rank))]), process_group=group)
    p = weight()
    optimizer = sparse(sgd([p]), process_group=group)
    if rank == 2:
        optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ProtocolMismatchError, match=r"rank 1 has.*rank 2 has"):
        take(optimizer, [p], rank, [0], 2)


@ranks(2)
def test_another_order_of_optimizers_is_refused(rank, world_size):
    """Ranks that step two optimizers in different orders raise an error, and nothing has changed."""
    p, q = weight(), weight(32)
    both = [sparse(sgd([p])), sparse(sgd([q]))]
    p.grad, q.grad = torch.ones(16), torch.ones(32)
    with pytest.raises((ProtocolMismatchError, tritoncomm.ExchangeError)):
        both[rank].step()
    assert not p.detach().any()
    assert not q.detach().any()


@ranks(2)
def test_rank_with_other_updates_is_refused(rank, world_size):
    """A rank that loads an earlier state alone cannot step on with the others."""
    p = weight()
    optimizer = sparse(sgd([p]))
    take(optimizer, [p], rank, range(2), world_size)
    state = optimizer.state_dict()
    take(optimizer, [p], rank, [2], world_size)
    other = optimizer.state_dict()
    with pytest.raises(ConfigMismatchError, match="steps"):
        optimizer.load_state_dict(state if rank == 1 else other)
    take(optimizer, [p], rank, [3], world_size)
    assert equal_on_all_ranks([p])


@ranks(2)
def test_ranks_at_different_calls_say_so(rank, world_size, tmp_path):
    """A save on one rank beside a load on another is told on both, and both go on."""
    optimizer = sparse(sgd([weight()]))
    state = optimizer.state_dict()
    calls = partial(tritoncomm.checkpoint.save, optimizer, tmp_path), partial(optimizer.load_state_dict, state)
    with pytest.raises(ConfigMismatchError, match=r"different calls.*rank 0 tells .*rank 1 tells"):
        calls[rank]()
    optimizer.load_state_dict(state)
