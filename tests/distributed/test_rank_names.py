"""A world of 4, of which ranks 2 and 3 exchange: they are called that in their group, where their numbers are 0 and 1.

Rank 3 is at fault in every situation.
"""

from __future__ import annotations

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from kit import log_lines
from models import adamw, exact, loss_of, tiny, train
from tritoncomm import (
    ConfigurationError,
    ExchangeError,
    ExchangeTimeoutError,
    NonFiniteError,
    ProtocolMismatchError,
    algorithms,
    checkpoint,
)
from tritoncomm.primitives import collectives, exchange
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.packing import Encoding
from tritoncomm.primitives.verdict import Verdict
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.scheduler.rounds import AllReduce, InSubgroup, Round
from tritoncomm.step.exchange.feedback import ErrorFeedback

from baselines import TopkDSA
from ranks import ranks
from tritoncomm_kernels import Entries

MEMBERS, AT_FAULT = [2, 3], 3
CPU = torch.device("cpu")
# Numbers of ranks in a text. There is none of the ranks 0 and 1 in any.
_NAMED = re.compile(r"ranks? (\[[\d, ]*\]|\d+)")


def named(text: object) -> set[int]:
    """Return the numbers of all ranks that ``text`` names."""
    return {int(number) for found in _NAMED.findall(str(text)) for number in re.findall(r"\d+", found)}


def pair() -> dist.ProcessGroup:
    """Return a new group of ranks 2 and 3. A group in which an exchange has failed is not used again."""
    return dist.new_group(MEMBERS, timeout=timedelta(seconds=20), use_local_synchronization=True)


def scheduler(seconds: float = 20, **fields) -> ProcessGroupScheduler:
    """Return a scheduler of ranks 2 and 3."""
    return ProcessGroupScheduler(pair(), timedelta(seconds=seconds), stamp="test", **fields)


def wrapped(model, **fields) -> tritoncomm.SparseOptimizer:
    """Return a wrapped AdamW of ranks 2 and 3."""
    return exact(adamw(model), process_group=pair(), **fields)


def inf_residual(rank, tmp_path):
    """An Inf that no gradient has. Most methods find its rank. Others find a sum that overflows."""
    naming = set()
    for algo in algorithms():
        for fields in ({}, {"static": True}):
            model = tiny()
            try:
                optimizer = wrapped(model, algo=algo, on_nonfinite="raise", **fields)
            except ConfigurationError:  # the method has no such form, or no residual
                continue
            train(model, optimizer, rank, range(1))
            if rank == AT_FAULT:
                optimizer._tritoncomm.setup.scope.vectors[0].feedback.residual[10] = torch.inf
            raised = []
            try:
                train(model, optimizer, rank, range(1, 2))
            except NonFiniteError as error:
                raised.append(error)
            assert all(named(error) == set(error.ranks) <= {AT_FAULT} for error in raised), raised
            naming |= {(algo, *fields) for error in raised if error.ranks}
    assert {("oktopk",), ("oktopk", "static"), ("topk_allgather",), ("topk_dsa",)} <= naming, naming


def lonely_gradient(rank, tmp_path):
    """A NaN that a group of one worker finds."""
    alone = ProcessGroupScheduler(dist.new_group([rank], use_local_synchronization=True))
    for recipe in (tritoncomm.OkTopk(density=0.2), TopkDSA(density=0.2)):
        feedback = ErrorFeedback(recipe.build(20))
        with pytest.raises(NonFiniteError) as caught:
            alone.run(feedback.begin(torch.full((20,), torch.nan), 0, 1))
        assert caught.value.ranks == (rank,)
        assert named(caught.value) == {rank}


def scale(rank, tmp_path):
    """A step that the scaler of one rank did not want to skip."""
    model = tiny()
    optimizer = wrapped(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model, rank, 0)).backward()
    if rank == AT_FAULT:
        model[0].weight.grad[0, 0] = torch.inf
    with log_lines() as lines:
        scaler.step(optimizer)
    assert [named(line) for line in lines if "did not find" in line] == ([] if rank == AT_FAULT else [{2}])


def numbers_received(rank, tmp_path):
    """Numbers and messages that a method rejects."""
    number, odd = MEMBERS.index(rank), rank == AT_FAULT
    found = Verdict(CPU)
    found.check_messages(torch.tensor([int(odd)], dtype=torch.int32))
    patterns = {
        "received counts [9] from rank 3": collectives.share_counts([9 if odd else 1] * 2, True, CPU, limit=5),
        "rank 3 received malformed messages": found.settle(2),
        "rank 3 has 4 entries to send": _gathering(number),
        "rank 3 has 4 entries, but received 3": _gathering_all(number),
    }
    overflow = collectives.share_rows([1], not odd, 2, CPU, phase="sizes", limit=5, reason=collectives.OVERFLOW)
    with pytest.raises(NonFiniteError, match="a sum of finite gradients overflows on rank 3") as caught:
        scheduler().run(overflow)
    assert caught.value.ranks == (AT_FAULT,)
    for said, pattern in patterns.items():
        with pytest.raises(ProtocolMismatchError) as caught:
            scheduler().run(pattern)
        assert said in str(caught.value)
        assert named(caught.value) <= {2, 3}, caught.value


FOUR = Entries(torch.arange(4, dtype=torch.int32), torch.ones(4))
CUTS, PACKED = (0, 50, 100), Encoding("fp32", "always")


def _gathering(number: int):
    """Announce another number of entries than there is, on the second rank."""
    yield AllReduce("begin", torch.ones(1))
    if number == 1:
        regions = collectives.Regions(CUTS, [4, 3], PACKED)
        yield from collectives.gather_regions(FOUR, regions, 1, 2, trigger=9.0, width=1, phase="all-gather")
    yield AllReduce("end", torch.ones(1))


def _gathering_all(number: int):
    """As :func:`_gathering`, for a list of all entries."""
    yield AllReduce("begin", torch.ones(1))
    if number == 1:
        accumulator = Accumulator(*torch.zeros(3, 100))
        yield from exchange.all_gather_mean(FOUR, [4, 3], PACKED, accumulator, 1, 2)
    yield AllReduce("end", torch.ones(1))


def messages(rank, tmp_path):
    """A message of another phase, in a group and in a subgroup of it. All texts of the error are of both ranks."""
    number, odd = MEMBERS.index(rank), rank == AT_FAULT

    def crossing():
        yield Round("gather" if odd else "balance", {1 - number: torch.zeros(4, dtype=torch.int32)}, {1 - number: 4})

    for is_subgroup in (False, True):

        def within():
            yield InSubgroup("team", (0, 1), crossing())

        with pytest.raises(ProtocolMismatchError) as caught:
            scheduler(subgroups=[(0, 1)]).run(within() if is_subgroup else crossing())
        text = str(caught.value)
        assert f"exchange failed on rank {rank}, step 1" in text
        assert "message to rank 2 from rank 3: " in text or "message to rank 3 from rank 2: " in text
        peers = f"(sends to rank {5 - rank}, expects from rank {5 - rank})"
        assert ("among ranks [2, 3]" if is_subgroup else peers) in text
        assert named(text) == {2, 3}


def failed(rank, tmp_path):
    """A method that fails on one rank, and a rank that comes too late."""

    def pattern(error: Exception | None, delay: float):
        yield AllReduce("before", torch.ones(1))
        if rank == AT_FAULT and error is not None:
            raise error
        if rank == AT_FAULT:
            time.sleep(delay)
        yield Round("sums", {}, {0: 4} if rank == AT_FAULT else {1: 4})

    for error, limit, kind, said in (
        (MemoryError("no room"), 20, ExchangeError, "rank 3 failed, see its traceback: no room"),
        (None, 1, ExchangeTimeoutError, "no answer from rank 3 within the time-out (rank 2 waited for rank 3)"),
    ):
        with pytest.raises(kind) as caught:
            scheduler(limit).run(pattern(error, 5.0))
        assert caught.value.peers == (AT_FAULT,)
        assert f"failed on rank {rank}, " in str(caught.value)
        assert rank == AT_FAULT or said in str(caught.value), caught.value
        assert named(caught.value) <= {2, 3}


def places(rank, tmp_path):
    """A node that is none, and the folder of another group."""
    group, alone = pair(), dist.new_group([rank], use_local_synchronization=True)
    with pytest.raises(ConfigurationError, match=r"node_group has ranks \[2, 3\] of rank [23]"):
        exact(adamw(tiny()), process_group=alone, node_group=group)
    optimizer = exact(adamw(tiny()), process_group=alone)
    if rank != AT_FAULT:
        checkpoint.save(optimizer, tmp_path)
    dist.barrier(group)
    if rank == AT_FAULT:
        with pytest.raises(ConfigurationError, match="the state of rank 2, and this group has rank 3"):
            checkpoint.save(optimizer, tmp_path)


def full_disk(rank, tmp_path):
    """A rank that cannot write its part of a checkpoint."""
    model = tiny()
    optimizer = wrapped(model)
    train(model, optimizer, rank, range(1))

    def write(*_: object) -> None:
        message = "no space left"
        raise OSError(message)

    with pytest.MonkeyPatch.context() as patch:
        if rank == AT_FAULT:
            patch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", write)
        with pytest.raises(ConfigurationError, match=r"cannot be written: rank 3: .*no space left") as caught:
            checkpoint.save(optimizer, tmp_path)
    assert named(caught.value) == {AT_FAULT}


def warnings(rank, tmp_path):
    """What the first rank says for all is said where rank 0 is not one of them."""
    model = tiny()
    optimizer = wrapped(model)
    with log_lines() as lines:
        for step in range(10):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
        bare = adamw(tiny())
        bare.load_state_dict({name: part for name, part in optimizer.state_dict().items() if name != "tritoncomm"})
        exact(bare, process_group=pair())
        tritoncomm.wrap(adamw(tiny()), density=0.5, local_steps=2, process_group=pair())
    told = ["this looks like clip_grad_norm_", "without its residuals, which are lost", "without effect: density=0.5"]
    assert len(lines) == (len(told) if rank == MEMBERS[0] else 0), lines
    assert all(part in line for part, line in zip(told, lines, strict=rank == MEMBERS[0]))


SITUATIONS = {
    each.__name__: each
    for each in (
        inf_residual, lonely_gradient, scale, numbers_received, messages, failed, places, full_disk, warnings,
    )
}  # fmt: skip


@ranks(4)
@pytest.mark.parametrize("name", SITUATIONS)
def test_names(rank, world_size, name, tmp_path):
    """Ranks have their global numbers in every text, and in every error."""
    if rank in MEMBERS:
        SITUATIONS[name](rank, tmp_path)
