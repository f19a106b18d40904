"""Mistakes that a CPU and gloo forgive. The emulation finds each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tritoncomm import OkTopk, Recipe, SparDL, TopkAllgather
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.scheduler import group_collectives, wire
from tritoncomm.scheduler.messages import Messages
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.scheduler.rounds import AllGather, AllReduce
from tritoncomm.step.exchange.feedback import ErrorFeedback

from emulated_cuda import exchanges, ranks
from emulated_cuda.device import current_gpu, to_gpu, values_of
from emulated_cuda.network import Network
from emulated_cuda.streams import RaceError


@pytest.fixture(params=[False, True], ids=["exact", "static"])
def recipe(request: pytest.FixtureRequest) -> OkTopk:
    """A recipe in each form of the messages."""
    return OkTopk(density=0.2, static=request.param)


def _exchange(recipe: Recipe) -> None:
    exchanges.emulated(recipe, exchanges.gradients(2, 60, 2))


def _cause(work: Callable[[], object]) -> BaseException:
    with pytest.raises(ranks.RankError) as failed:
        work()
    error: BaseException = failed.value
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def test_without_a_mutant_nothing_is_found(recipe: OkTopk) -> None:
    """The exchange of the following tests runs."""
    _exchange(recipe)


def test_read_before_the_wait_is_found(recipe: OkTopk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that does not wait for its operations reads memory that NCCL writes."""
    monkeypatch.setattr(Messages, "wait_for", lambda self, work: None)
    error = _cause(lambda: _exchange(recipe))
    assert isinstance(error, RaceError)
    assert "NCCL stream" in str(error)


@pytest.mark.parametrize("static", [False, True])
def test_cpu_tensor_in_a_message_is_found(static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that is in host memory is refused."""
    sends = SparDL(density=0.2, static=static)  # both of its forms send messages, not only collectives
    framed = wire.framed_on_device
    monkeypatch.setattr(wire, "framed_on_device", lambda *message: values_of(framed(*message)))
    assert "No backend type associated with device type cpu" in str(_cause(lambda: _exchange(sends)))


def test_cpu_tensor_in_a_collective_is_found(recipe: OkTopk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective on host memory is refused."""
    perform = group_collectives.perform

    def on_host(op: AllGather | AllReduce, *rest: Any) -> torch.Tensor:
        return perform(type(op)(op.phase, values_of(op.tensor)), *rest)

    monkeypatch.setattr(group_collectives, "perform", on_host)
    assert "No backend type associated with device type cpu" in str(_cause(lambda: _exchange(recipe)))


def test_swapped_order_of_collectives_is_found() -> None:
    """Two collectives that one rank issues in the other order are found, though both have the same size."""

    def main(rank: int) -> None:
        work = [dist.all_reduce, lambda values: dist.all_reduce(values, dist.ReduceOp.MAX)]
        for each in work if rank == 0 else reversed(work):
            each(torch.ones(3, device="cuda"))

    assert "the ranks call ['all_reduce SUM of 3 x" in str(_cause(lambda: ranks.run(main, 2)))


def test_collective_that_one_rank_leaves_out_is_found() -> None:
    """A rank that waits for a collective which another rank never calls is named, with what it waits for."""

    def main(rank: int) -> None:
        if rank == 0:
            dist.all_reduce(torch.ones(3, device="cuda"))

    network = Network(2, limit=0.3)
    with pytest.raises(ranks.RankError, match="rank 0 waits for collective 0 of group 0, all_reduce"):
        ranks.run(main, 2, network=network)


def _syncs(recipe: OkTopk) -> int:
    def main(rank: int) -> int:
        feedback = ErrorFeedback(recipe.build(60), "cuda:0")
        scheduler = ProcessGroupScheduler(None, device="cuda:0", stamp=repr(recipe))
        for given in exchanges.gradients(2, 60, 2):
            current_gpu().reset()
            scheduler.run(feedback.begin(to_gpu(given[rank]), rank, 2))
            feedback.commit()
        return sum(current_gpu().syncs.values())

    return ranks.run(main, 2)[0]


def test_hidden_item_is_counted(recipe: OkTopk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further ``.item()`` on the way is one more synchronization."""
    before = _syncs(recipe)
    method = Accumulator.subtract

    def reads(self: Accumulator, *given: Any, **options: Any) -> None:
        method(self, *given, **options)
        self.dense()[0].item()

    monkeypatch.setattr(Accumulator, "subtract", reads)
    assert _syncs(recipe) == before + 1


def test_result_on_the_wrong_stream_is_found() -> None:
    """A mean that was computed on a side stream cannot be read on the default stream before it waits."""

    def main(rank: int, *, waits: bool) -> float:
        recipe = TopkAllgather(density=0.2)
        scheduler = ProcessGroupScheduler(None, device="cuda:0", stamp=repr(recipe))
        feedback, given = ErrorFeedback(recipe.build(60), "cuda:0"), to_gpu(torch.arange(60.0) + rank)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            mean = scheduler.run(feedback.begin(given, rank, 2))
            scaled = mean.values * 2  # enqueued after the last wait of the host
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        return float(scaled.sum())

    assert ranks.run(lambda rank: main(rank, waits=True), 2)[0] > 0
    error = _cause(lambda: ranks.run(lambda rank: main(rank, waits=False), 2))
    assert isinstance(error, RaceError)
    assert "stream 1" in str(error)


def test_gradient_on_the_wrong_stream_is_found(recipe: OkTopk) -> None:
    """An exchange on a side stream must wait for the gradient that the default stream computes."""

    def main(rank: int) -> None:
        feedback = ErrorFeedback(recipe.build(60), "cuda:0")
        gradient = torch.ones(60, device="cuda") * 2
        with torch.cuda.stream(torch.cuda.Stream()):
            feedback_of_rank = feedback.begin(gradient, rank, 1)
            next(feedback_of_rank)

    assert isinstance(_cause(lambda: ranks.run(main, 1)), RaceError)
