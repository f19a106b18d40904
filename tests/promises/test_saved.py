"""Checkpoints: a run that is loaded goes on to the bit, a damaged one changes nothing, and no residual is lost."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tritoncomm
from kit import (
    OPTIMIZERS,
    equal_on_all_ranks,
    everywhere,
    flat,
    gradient,
    log_lines,
    made,
    sgd,
    sparse,
    take,
    weight,
    write,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from tritoncomm import ConfigMismatchError, ConfigurationError, checkpoint

from ranks import ranks

ERRORS = (ConfigMismatchError, ConfigurationError)


@ranks(2)
@pytest.mark.parametrize(
    ("kind", "algo"),
    [("adamw", "topk_allgather"), ("momentum", "oktopk"), ("adamw", "exdyna"), ("momentum", "quantized")],
)
def test_run_that_is_loaded_goes_on_to_the_bit(rank, world_size, kind, algo):
    """Saved and loaded by state_dict(), parameters and metrics are those of a run that never stopped."""
    fields = {"algo": algo, "warmup_steps": 3} | ({} if algo == "quantized" else {"density": 0.25})
    if algo == "quantized":
        del fields["warmup_steps"]
    p, optimizer = made(kind, **fields)
    take(optimizer, [p], rank, range(5), world_size)
    values, state = p.detach().clone(), copy.deepcopy(optimizer.state_dict())
    take(optimizer, [p], rank, range(5, 15), world_size)
    q, again = made(kind, **fields)
    write(q, values)
    again.load_state_dict(state)
    take(again, [q], rank, range(5, 15), world_size)
    assert torch.equal(p, q)
    assert again.metrics()["steps"] == 15
    assert again.metrics()["residual_norm"] == optimizer.metrics()["residual_norm"]


@ranks(2)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_run_in_half_precision_goes_on_to_the_bit(rank, world_size, kind):
    """How long a coordinate has waited is not rounded to bf16, neither as the state is loaded nor later."""
    p, optimizer = made(kind, torch.bfloat16)
    take(optimizer, [p], rank, range(12), world_size)
    values, state = p.detach().clone(), copy.deepcopy(optimizer.state_dict())
    take(optimizer, [p], rank, range(12, 18), world_size)
    q, again = made(kind, torch.bfloat16)
    write(q, values)
    again.load_state_dict(state)
    take(again, [q], rank, range(12, 18), world_size)
    assert torch.equal(p, q)


@ranks(2)
def test_files_of_all_ranks_go_on_to_the_bit(rank, world_size, tmp_path):
    """checkpoint.save() and load() have the optimizer and the residual of each rank."""
    p, optimizer = made("adamw")
    take(optimizer, [p], rank, range(5), world_size)
    checkpoint.save(optimizer, tmp_path / "saved")
    values = p.detach().clone()
    take(optimizer, [p], rank, range(5, 10), world_size)
    q, again = made("adamw")
    write(q, values)
    checkpoint.load(again, tmp_path / "saved")
    take(again, [q], rank, range(5, 10), world_size)
    assert torch.equal(p, q)


@ranks(3)
@pytest.mark.parametrize("to", [[0, 1], [0]])
def test_files_of_more_ranks_keep_the_pending_update(rank, world_size, to, tmp_path):
    """Fewer ranks take over all residuals: flush() applies what the larger group would have applied."""
    p = weight(64)
    optimizer = sparse(sgd([p]), density=1 / 64)
    take(optimizer, [p], rank, range(3), world_size)
    checkpoint.save(optimizer, tmp_path / "saved")
    values = p.detach().clone()
    optimizer.flush()
    group = dist.new_group(to)
    if rank not in to:
        return
    q = weight(64)
    again = sparse(sgd([q]), density=1 / 64, process_group=group)
    write(q, values)
    checkpoint.load(again, tmp_path / "saved")
    if len(to) == 1:  # a single worker applies what it owes with its next step
        q.grad = torch.zeros(64)
        again.step()
    else:
        again.flush()
    assert torch.allclose(p, q)
    assert not torch.equal(values, q)


@ranks(2)
def test_state_of_another_rank_or_method_is_refused(rank, world_size):
    """With residuals="reset", a rank may load the state of any other one."""
    p, optimizer = made()
    take(optimizer, [p], rank, range(3), world_size)
    states = everywhere(optimizer.state_dict())
    _q, again = made()
    with pytest.raises(ERRORS, match="rank"):
        again.load_state_dict(copy.deepcopy(states[1]))
    assert again.metrics()["steps"] == 0
    again.load_state_dict(copy.deepcopy(states[1]), residuals="reset")
    assert again.metrics()["residual_norm"] == 0
    assert again.metrics()["steps"] == 3
    with pytest.raises(ConfigurationError, match="residuals"):
        again.load_state_dict(states[rank], residuals="drop")
    _, other = made(algo="oktopk", density=0.25)
    with pytest.raises(ERRORS, match="topk_allgather"):
        other.load_state_dict(copy.deepcopy(states[rank]))
    r = nn.Parameter(torch.ones(8))
    smaller = sparse(OPTIMIZERS["momentum"]([r]))
    with pytest.raises(ERRORS):
        smaller.load_state_dict(copy.deepcopy(states[rank]))


def damage(state: object) -> bool:
    """Change the first number in a tensor of floats, and return whether there was one."""
    if isinstance(state, torch.Tensor):
        if state.is_floating_point() and state.numel() > 1:
            state.view(-1)[0] += 1
            return True
        return False
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return any(damage(part) for part in parts)


@ranks(2)
def test_damaged_state_of_one_rank_is_loaded_by_none(rank, world_size):
    """The rank says what is wrong, the others who it is, and nothing changes on any."""
    p, optimizer = made()
    take(optimizer, [p], rank, range(3), world_size)
    state = copy.deepcopy(optimizer.state_dict())
    if rank == 1:
        assert damage(state["tritoncomm"])
    q, again = made()
    with pytest.raises(ConfigurationError if rank == 1 else ConfigMismatchError, match="corrupt"):
        again.load_state_dict(state)
    assert again.metrics()["steps"] == 0
    assert not again.state_dict()["state"]
    take(again, [q], rank, range(2), world_size)
    assert equal_on_all_ranks([q])


@ranks(2)
def test_state_without_residuals_is_loaded_everywhere(rank, world_size):
    """After flush(), one rank's state fits all. The original optimizer loads a state of the wrapped one."""
    p, optimizer = made("adamw")
    take(optimizer, [p], rank, range(3), world_size)
    optimizer.flush()
    state = everywhere(optimizer.state_dict())[0]
    q, again = made("adamw")
    write(q, p.detach())
    again.load_state_dict(copy.deepcopy(state))
    take(again, [q], rank, [3], world_size)
    take(optimizer, [p], rank, [3], world_size)
    assert torch.equal(p, q)
    r = weight(64, 1.0)
    bare = OPTIMIZERS["adamw"]([r])
    bare.load_state_dict({key: value for key, value in copy.deepcopy(state).items() if key != "tritoncomm"})
    r.grad = torch.ones(64)
    bare.step()
    assert float(bare.state[r]["step"]) == float(state["state"][0]["step"]) + 1


@ranks(2)
def test_lost_residual_is_a_warning(rank, world_size):
    """wrap() of an optimizer that has the state of a wrapped one, without its residual, says so on the first rank."""
    p, optimizer = made("adamw")
    take(optimizer, [p], rank, range(3), world_size)
    q = weight(64, 1.0)
    bare = OPTIMIZERS["adamw"]([q])
    bare.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with log_lines() as lines:
        sparse(bare)
    assert any("residuals" in line and "lost" in line for line in lines) == (rank == 0)


@ranks(2)
def test_replicas_that_have_drifted_are_not_saved(rank, world_size, tmp_path):
    """save() names what differs, and writes nothing that load() would take."""
    p, optimizer = made()
    take(optimizer, [p], rank, range(3), world_size)
    if rank == 1:
        with torch.no_grad():
            p[0] += 1
    with pytest.raises(ConfigMismatchError, match="differs between ranks"):
        checkpoint.save(optimizer, tmp_path / "saved")
    with pytest.raises(ERRORS):
        checkpoint.load(optimizer, tmp_path / "saved")


@ranks(2)
def test_rank_that_cannot_write_is_told_to_all(rank, world_size, tmp_path):
    """All ranks raise an error."""
    p, optimizer = made()
    take(optimizer, [p], rank, range(2), world_size)
    if rank == 1:
        (tmp_path / "file").write_text("")
    with pytest.raises(ERRORS, match="file"):
        checkpoint.save(optimizer, tmp_path / "file" if rank == 1 else tmp_path / "file-of-rank-0")


@ranks(4)
def test_folder_of_another_group_is_refused(rank, world_size, tmp_path):
    """Groups without a common rank must not mix their files."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    p = weight(64)
    optimizer = sparse(sgd([p]), process_group=group)
    take(optimizer, [p], rank, [0], 2)
    if rank < 2:
        checkpoint.save(optimizer, tmp_path / "saved")
    dist.barrier()
    if rank >= 2:
        with pytest.raises(ERRORS, match="folder"):
            checkpoint.save(optimizer, tmp_path / "saved")
    dist.barrier()
    if rank < 2:
        checkpoint.load(optimizer, tmp_path / "saved")


@ranks(2)
def test_optimizer_of_another_class_is_refused(rank, world_size, tmp_path):
    """load() names both."""
    p, optimizer = made("adamw")
    take(optimizer, [p], rank, range(2), world_size)
    checkpoint.save(optimizer, tmp_path / "saved")
    _, other = made("momentum")
    with pytest.raises(ERRORS, match=r"AdamW.*SGD"):
        checkpoint.load(other, tmp_path / "saved")
    with pytest.raises(ConfigurationError, match="wrap"):
        checkpoint.save(torch.optim.SGD([weight()], lr=0.1), tmp_path / "bare")


@ranks(2)
def test_local_steps_go_on_from_a_save_between_exchanges(rank, world_size, tmp_path):
    """What comes after a save and after the load are the same, to the bit."""

    def local():
        p = weight(64, 1.0)
        return p, tritoncomm.wrap(torch.optim.AdamW([p], lr=0.01), local_steps=4)

    p, optimizer = local()
    take(optimizer, [p], rank, range(6), world_size)
    checkpoint.save(optimizer, tmp_path / "saved")
    values = everywhere(p.detach().clone())[rank]
    take(optimizer, [p], rank, range(6, 12), world_size)
    q, again = local()
    write(q, values)  # a model is loaded by its own checkpoint
    checkpoint.load(again, tmp_path / "saved")
    take(again, [q], rank, range(6, 12), world_size)
    optimizer.merge()
    again.merge()
    assert torch.equal(p, q)
    assert equal_on_all_ranks([p])
    assert again.metrics()["inner_steps"] == 12


@ranks(2)
def test_state_between_exchanges_goes_on_to_the_bit(rank, world_size, tmp_path):
    """state_dict() holds what this rank alone has changed. checkpoint.save() exchanges it, and may come at any time."""

    def local():
        p = weight(64, 1.0)
        return p, tritoncomm.wrap(torch.optim.AdamW([p], lr=0.01), local_steps=4)

    p, optimizer = local()
    take(optimizer, [p], rank, range(6), world_size)
    state = copy.deepcopy(optimizer.state_dict())
    q, again = local()
    again.load_state_dict(state)
    for each, own in ((p, optimizer), (q, again)):
        take(own, [each], rank, range(6, 9), world_size)
    assert torch.equal(p, q)
    assert not equal_on_all_ranks([p])
    checkpoint.save(optimizer, tmp_path / "saved")
    assert equal_on_all_ranks([p])


@ranks(2)
def test_save_into_a_used_folder_removes_the_one_before(rank, world_size, tmp_path):
    """The last one is loaded, and the folder does not grow. What else is there stays, whatever its name begins with."""
    p, optimizer = made("adamw")
    counts, others = [], tmp_path / "saved" / "data-train"
    others.mkdir(parents=True, exist_ok=True)
    (others / "images").touch()
    for step in range(3):
        take(optimizer, [p], rank, [step], world_size)
        checkpoint.save(optimizer, tmp_path / "saved")
        counts.append(len(list((tmp_path / "saved").rglob("*"))))
        dist.barrier()
    assert counts[0] == counts[1] == counts[2]
    assert (others / "images").exists()
    _, again = made("adamw")
    checkpoint.load(again, tmp_path / "saved")
    assert again.metrics()["steps"] == 3


@ranks(2)
def test_damaged_file_is_loaded_by_none(rank, world_size, tmp_path):
    """All ranks name the file in which a bit has flipped."""
    p, optimizer = made("adamw")
    take(optimizer, [p], rank, range(3), world_size)
    checkpoint.save(optimizer, tmp_path / "saved")
    dist.barrier()
    if rank == 0:
        file = max((tmp_path / "saved").rglob("*.distcp"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    dist.barrier()
    _, again = made("adamw")
    with pytest.raises(ERRORS, match=r"\.distcp cannot be loaded"):
        checkpoint.load(again, tmp_path / "saved")
    assert again.metrics()["steps"] == 0


class Saved:
    """A model and its optimizer in a checkpoint of torch."""

    def __init__(self, world_size: int = 2, group=None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        self.group = group
        self.optimizer = sparse(
            torch.optim.AdamW(self.model.parameters(), lr=0.01), model=self.model, process_group=group
        )

    def train(self, rank: int, steps: range, world_size: int) -> None:
        """Take steps."""
        take(self.optimizer, list(self.model.parameters()), rank, steps, world_size)

    def state(self, folder=None) -> dict:
        """Return what is saved, or loaded from ``folder``."""
        residuals = checkpoint.ResidualState(self.optimizer, checkpoint_id=folder)
        inner = get_optimizer_state_dict(self.model, self.optimizer)
        inner.pop("tritoncomm", None)
        return {"model": self.model.state_dict(), "optimizer": inner, "residuals": residuals}

    def load(self, folder, group=None) -> None:
        """Load it."""
        state = self.state(folder)
        dcp.load(state, checkpoint_id=folder, process_group=group)
        self.model.load_state_dict(state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])


@ranks(2)
def test_checkpoint_of_torch_goes_on_to_the_bit(rank, world_size, tmp_path):
    """ResidualState has the residual of each rank beside the state of the optimizer."""
    run = Saved()
    run.train(rank, range(5), world_size)
    dcp.save(run.state(), checkpoint_id=tmp_path / "saved")
    run.train(rank, range(5, 10), world_size)
    again = Saved()
    again.load(tmp_path / "saved")
    again.train(rank, range(5, 10), world_size)
    assert torch.equal(flat(run.model.parameters()), flat(again.model.parameters()))
    assert again.optimizer.metrics()["residual_norm"] == run.optimizer.metrics()["residual_norm"]


@ranks(2)
@pytest.mark.parametrize("options", [{}, {"full_state_dict": True}, {"full_state_dict": True, "cpu_offload": True}])
@pytest.mark.parametrize("apart", [False, True])
def test_checkpoint_of_torch_keeps_the_state_of_each_worker(rank, world_size, options, apart, tmp_path):
    """Where updates are exchanged, torch may give all ranks the state of one, in the same load or in one after it."""
    options, parts = StateDictOptions(**options), []
    for folder in (None, tmp_path / "saved"):
        torch.manual_seed(0)
        model = nn.Linear(16, 16, bias=False)
        inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        optimizer = sparse(inner, model=model, local_steps=2)
        if folder is None:
            take(optimizer, [model.weight], rank, range(4), world_size)
        residuals = checkpoint.ResidualState(optimizer, checkpoint_id=folder)
        if apart and folder is not None:
            dcp.load({"residuals": residuals}, checkpoint_id=folder)
        states = get_state_dict(model, optimizer, options=options)
        content = {"model": states[0], "optimizer": states[1]}
        if not apart or folder is None:
            content["residuals"] = residuals
        if folder is None:
            dcp.save(content, checkpoint_id=tmp_path / "saved")
        else:
            dcp.load(content, checkpoint_id=folder)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=content["model"],
                optim_state_dict=content["optimizer"],
                options=options,
            )
        take(optimizer, [model.weight], rank, range(4, 8), world_size)
        parts.append(flat([model.weight]))
    assert torch.equal(*parts)


@ranks(3)
def test_checkpoint_of_torch_keeps_the_pending_update_on_fewer_ranks(rank, world_size, tmp_path):
    """Two ranks take over the residuals of three."""
    p = weight(64)
    optimizer = sparse(sgd([p]), density=1 / 64)
    take(optimizer, [p], rank, range(3), world_size)
    dcp.save({"residuals": checkpoint.ResidualState(optimizer)}, checkpoint_id=tmp_path / "saved")
    values = p.detach().clone()
    optimizer.flush()
    group = dist.new_group([0, 1])
    if rank == 2:
        return
    q = weight(64)
    again = sparse(sgd([q]), density=1 / 64, process_group=group)
    write(q, values)
    residuals = checkpoint.ResidualState(again, checkpoint_id=tmp_path / "saved")
    dcp.load({"residuals": residuals}, checkpoint_id=tmp_path / "saved", process_group=group)
    again.flush()
    assert torch.allclose(p, q)
    assert not torch.equal(values, q)


@ranks(2)
def test_bare_state_leaves_the_residual(rank, world_size):
    """The state of an optimizer that was not wrapped has none, and the present one stays."""
    p = weight(64)
    optimizer = sparse(sgd([p]), density=1 / 64)
    take(optimizer, [p], rank, range(3), world_size)
    norm = optimizer.metrics()["residual_norm"]
    optimizer.load_state_dict(sgd([weight(64)]).state_dict())
    assert optimizer.metrics()["residual_norm"] == norm > 0
    optimizer.flush()
    parts = [gradient(64, other, step, world_size) for other in range(world_size) for step in range(3)]
    assert torch.equal(flat([p]), -torch.stack(parts).sum(0) / world_size)


@ranks(2)
def test_what_was_frozen_otherwise_is_named_as_a_cause(rank, world_size, tmp_path):
    """A run that freezes a parameter after wrap() cannot be loaded by a script that freezes it before."""
    p, q = weight(16), weight(16)
    optimizer = sparse(sgd([p, q]))
    q.requires_grad_(False)
    checkpoint.save(optimizer, tmp_path)
    again = sparse(sgd([p, q]))
    with pytest.raises(ERRORS, match="frozen at wrap"):
        checkpoint.load(again, tmp_path)


def two_layers(first, *, frozen=None, named=True):
    """Return a model of two equal layers, and its wrapped optimizer, in which the layer ``first`` is the first one."""
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    if frozen is not None:
        model[frozen].requires_grad_(False)
    parts = [*model[first].parameters(), *model[1 - first].parameters()]
    fields = {"density": 1 / 16, "model": model if named else None, "broadcast_parameters": True}
    return model, sparse(OPTIMIZERS["adamw"](parts), **fields)


@ranks(2)
def test_parameters_in_another_order_are_refused(rank, world_size, tmp_path):
    """Residuals belong to parameters, which have names if the model is given."""
    model, optimizer = two_layers(0)
    take(optimizer, [*model.parameters()], rank, range(3), world_size)
    checkpoint.save(optimizer, tmp_path / "own")
    dcp.save({"residuals": checkpoint.ResidualState(optimizer)}, checkpoint_id=tmp_path / "part")
    _, again = two_layers(1)
    with pytest.raises(ERRORS, match=r"in another order.*: parameter 0 was 0\.weight, and is 1\.weight"):
        checkpoint.load(again, tmp_path / "own")
    content = {"residuals": checkpoint.ResidualState(again, checkpoint_id=tmp_path / "part")}
    with pytest.raises(Exception, match=r"parameter 0 was 0\.weight, and is 1\.weight"):
        dcp.load(content, checkpoint_id=tmp_path / "part")
    model, _ = two_layers(0)
    model[0] = torch.compile(model[0])  # which changes its name
    checkpoint.load(sparse(OPTIMIZERS["adamw"](model.parameters()), density=1 / 16, model=model), tmp_path / "own")


@ranks(2)
@pytest.mark.parametrize(("before", "now"), [(0, None), (None, 0)])
def test_state_of_one_rank_of_other_parameters_is_refused(rank, world_size, before, now):
    """So is one whose residuals are thrown away, if others were frozen: ages and means belong to parameters, too."""
    model, optimizer = two_layers(0, frozen=before, named=False)
    take(optimizer, [each for each in model.parameters() if each.requires_grad], rank, range(3), world_size)
    state = [copy.deepcopy(optimizer.state_dict())]
    dist.broadcast_object_list(state)
    _, again = two_layers(0, frozen=now, named=False)
    with pytest.raises(ERRORS, match="others were frozen"):
        again.load_state_dict(state[0], residuals="reset")


@ranks(2)
def test_state_of_gradients_is_not_one_of_updates(rank, world_size):
    """What the error says to change is what was changed, and not the method that belongs to it."""
    _, gradients = made()
    _, updates = made(local_steps=2)
    for one, other, said in ((gradients, updates, "gradients"), (updates, gradients, "updates")):
        with pytest.raises(ERRORS, match=f"written by an exchange of {said}"):
            other.load_state_dict(copy.deepcopy(one.state_dict()))


@ranks(2)
def test_totals_are_of_this_process(rank, world_size):
    """A run that is loaded goes on with the count of steps, and adds up what it has sent and skipped by itself."""
    p, optimizer = made()
    take(optimizer, [p], rank, range(5), world_size)
    p.grad = torch.full_like(p, torch.nan)
    optimizer.step()
    assert optimizer.metrics()["skipped_steps"] == 1
    q, again = made()
    write(q, p.detach())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take(again, [q], rank, range(5, 8), world_size)
    figures = again.metrics()
    assert figures["steps"] == optimizer.metrics()["steps"] + 3
    assert figures["skipped_steps"] == 0
    assert figures["bytes_sent_total"] == pytest.approx(3 * figures["bytes_sent"], rel=0.2)
