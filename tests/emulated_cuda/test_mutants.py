"""Mistakes that a CPU and gloo forgive, in the library. The emulation finds each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tritoncomm import OkTopk, Recipe, SparDL
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.scheduler import group_collectives, wire
from tritoncomm.scheduler.messages import Messages
from tritoncomm.scheduler.process_group import ProcessGroupScheduler
from tritoncomm.scheduler.rounds import AllGather, AllReduce
from tritoncomm.step.exchange.feedback import ErrorFeedback

from emulated_cuda import exchanges, ranks
from emulated_cuda.device import current_gpu, to_gpu, values_of

perform, framed, begin, subtract = (
    group_collectives.perform, wire.framed_on_device, ErrorFeedback.begin, Accumulator.subtract,
)  # fmt: skip


def _on_host(op: AllGather | AllReduce, *rest: Any) -> torch.Tensor:
    return perform(type(op)(op.phase, values_of(op.tensor)), *rest)


def _beside(self: ErrorFeedback, gradient: torch.Tensor, *rest: Any) -> Any:
    gradient = gradient * 2
    with torch.cuda.stream(torch.cuda.Stream()):
        next(begin(self, gradient, *rest))


def _reads(self: Accumulator, *given: Any, **options: Any) -> None:
    subtract(self, *given, **options)
    self.dense()[0].item()


# What is replaced, by what, and the error.
MUTANTS: dict[str, tuple[object, str, Any, str]] = {
    "a read before the wait": (Messages, "wait_for", lambda self, work: None, "RaceError: .*NCCL stream"),
    "a CPU tensor in a message": (
        wire, "framed_on_device", lambda *message: values_of(framed(*message)), "associated with device type cpu",
    ),
    "a CPU tensor in a collective": (group_collectives, "perform", _on_host, "associated with device type cpu"),
    "a stream that does not wait for the gradient": (ErrorFeedback, "begin", _beside, "RaceError: .*default stream"),
}  # fmt: skip


@pytest.mark.parametrize("static", [False, True], ids=["exact", "static"])
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_found(name: str, static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange in each form of the messages raises the error, and without the mutant none."""
    owner, attribute, replacement, error = MUTANTS[name]
    # Both forms of SparDL send messages, not only collectives.
    recipe: Recipe = (SparDL if "message" in name else OkTopk)(density=0.2, static=static)
    given = exchanges.gradients(2, 60, 2)
    exchanges.emulated(recipe, given)
    monkeypatch.setattr(owner, attribute, replacement)
    with pytest.raises(ranks.RankError) as failed:
        exchanges.emulated(recipe, given)
    assert failed.match(error)


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


@pytest.mark.parametrize("static", [False, True], ids=["exact", "static"])
def test_hidden_item_is_counted(static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further ``.item()`` on the way is one more synchronization."""
    recipe = OkTopk(density=0.2, static=static)
    before = _syncs(recipe)
    monkeypatch.setattr(Accumulator, "subtract", _reads)
    assert _syncs(recipe) == before + 1
