"""Ranks that raise, die or hang in the middle of a step, and wrong headers, on emulated GPUs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor  # the first collective would import it, which takes longer than the time-outs here
import tritoncomm
from tritoncomm import ExchangeError, ExchangeTimeoutError, Hierarchical, SparDL
from tritoncomm.scheduler import failure_report, watcher, wire
from tritoncomm.step.tensors.shards import local

from emulated_cuda import device, doors, exchanges, ranks
from emulated_cuda.network import Network

VICTIM, WORLD_SIZE = 1, 3
SOON, LATE = timedelta(seconds=1.5), timedelta(seconds=15)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(watcher, "RELEASE_SECONDS", 0.5)
    monkeypatch.setattr(failure_report, "_SILENT_SECONDS", 0.8)


def raises(*_: Any, **__: Any) -> None:
    """Fail as a method or a copy does that has no memory."""
    raise MemoryError("no room for the lists")


def dies() -> None:
    """End the rank."""
    raise ranks.Died


class Training:
    """A rank that has taken a step with a plain module, or one that FSDP2 has sharded."""

    def __init__(self, rank: int, kind: str, timeout: timedelta, algo: str = "oktopk") -> None:
        self.rank, self.step = rank, 0
        self.model, given = doors.grouped("cuda") if kind == "fsdp" else (doors.model_on("cuda"), {})
        inner = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        recipe = tritoncomm.recipe(algo, density=0.1, static=False if algo == "spardl" else "auto")
        recipe = Hierarchical(recipe=recipe, node_size=2) if kind == "nodes" else recipe
        self.optimizer = tritoncomm.wrap(inner, recipe, warmup_steps=0, dense_below=5, timeout=timeout, **given)
        self.train()
        ranks.meet()

    def train(self) -> None:
        """Take a step."""
        self.optimizer.zero_grad()
        doors.loss_of(self.model, self.rank, self.step, "cuda").backward()
        self.step += 1
        self.optimizer.step()

    @property
    def vector(self) -> Any:
        """What is exchanged."""
        return self.optimizer._tritoncomm.setup.scope.vectors[0]

    def fail(self, fault: Callable[[], None], operation: int = 2) -> None:
        """Call ``fault`` before the operation with this number from now, also of a subgroup, if this is the victim."""
        left, scheduler = [operation], self.vector.scheduler
        for each in [scheduler, *scheduler._subgroups.values()] if self.rank == VICTIM else ():

            def faulty(op: Any, perform: Callable[[Any], Any] = each._perform) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    fault()
                return perform(op)

            each._perform = faulty

    def bits(self) -> list[Any]:
        """Return those of parameters and residuals."""
        parts = [local(parameter) for parameter in self.model.parameters()]
        return doors.bits([*parts, self.vector.feedback.residual])

    def check_failed_step(self, fault: Callable[..., None]) -> None:
        """Take a step. Its error names the victim in time, and it changes nothing."""
        before, started = self.bits(), time.monotonic()
        with pytest.raises(ExchangeError) as caught:
            self.train()
        assert caught.value.peers == (VICTIM,)
        seconds = time.monotonic() - started
        if fault is raises:
            assert type(caught.value) is ExchangeError
            assert "rank 1 failed, see its traceback: no room for the lists" in str(caught.value)
            assert seconds < LATE.total_seconds() / 2
        else:
            assert type(caught.value) is ExchangeTimeoutError
            assert 1.5 < seconds < 6
        assert self.bits() == before


def survivors(train: Callable[[int], Any], world_size: int = WORLD_SIZE, **fields: Any) -> list[Any]:
    """Return what the other ranks than the victim return, none of which may fail."""
    network = Network(world_size, **{"limit": 6.0, "garbage_after_abort": True} | fields)
    found = ranks.run(train, world_size, network=network, errors=True)
    left = [found[rank] for rank in range(world_size) if rank != VICTIM]
    assert not any(isinstance(each, BaseException) for each in left), left
    assert found[VICTIM] is None or isinstance(found[VICTIM], ranks.Died), found[VICTIM]
    return left


@pytest.mark.parametrize("fault", [raises, dies])
@pytest.mark.parametrize(
    ("kind", "algo", "operation", "garbage"),
    [
        ("plain", "oktopk", 1, False), ("plain", "oktopk", 2, True), ("plain", "topk_allgather", 2, True),
        ("plain", "spardl", 2, True), ("fsdp", "oktopk", 2, True), ("nodes", "oktopk", 2, True),
        ("nodes", "oktopk", 4, False),
    ],
)  # fmt: skip
def test_lost_rank(kind: str, algo: str, operation: int, garbage: bool, fault: Callable[[], None]) -> None:
    """Parameters and residuals are as before the step. The other ranks go on in a new group, and stay equal.

    Without it, the next step raises again. What they read after their wait was ended does not matter.
    """

    def train(rank: int) -> list[Any] | None:
        training = Training(rank, kind, LATE if fault is raises else SOON, algo)
        training.fail(fault, operation)
        training.check_failed_step(fault)
        if kind != "plain":
            with pytest.raises(ExchangeError, match="rank 1"):
                training.optimizer.step()
            return None
        if rank == VICTIM:
            return None
        left, before = [each for each in range(WORLD_SIZE) if each != VICTIM], training.bits()
        training.optimizer.reset_process_group(dist.new_group(left, timeout=LATE, use_local_synchronization=True))
        for _ in range(3):
            training.train()
        assert training.bits() != before
        return doors.bits(training.model.parameters())

    first, *others = survivors(train, 4 if kind == "nodes" else WORLD_SIZE, garbage_after_abort=garbage)
    assert others == [first] * len(others)


@pytest.mark.parametrize(("kind", "garbage"), [("plain", 0x00), ("plain", 0x55), ("fsdp", 0xFF)])
def test_lost_rank_where_the_host_reads(kind: str, garbage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host reads after an abort is not taken for a NaN, or for anything else."""
    monkeypatch.setattr(device, "GARBAGE", garbage)

    def train(rank: int) -> None:
        training = Training(rank, kind, SOON, "topk_allgather")
        dist.group.WORLD.network.patience = 0.2  # from now on: the host reads much in wrap()
        training.fail(dies, operation=1)
        training.check_failed_step(dies)
        figures = training.optimizer.metrics()
        assert (figures["steps"], figures["skipped_steps"]) == (1, 0)

    survivors(train, limit=15.0)


@pytest.mark.parametrize(("kind", "place"), [("plain", "read_gradients"), ("fsdp", "begin")])
def test_rank_that_raises_beside_an_exchange(kind: str, place: str) -> None:
    """The other ranks do not wait for it until the time-out, and are told why it failed."""

    def train(rank: int) -> None:
        training = Training(rank, kind, LATE)
        vector = training.vector
        if rank == VICTIM:
            setattr({"read_gradients": vector.layout, "begin": vector.feedback}[place], place, raises)
            with pytest.raises(MemoryError):
                training.train()
        else:
            training.check_failed_step(raises)
        with pytest.raises(ExchangeError, match="rank 1 failed"):
            training.optimizer.step()

    survivors(train)


@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_rank_that_hangs(kind: str) -> None:
    """A rank that is busy elsewhere is named, also by itself when it goes on."""
    released = threading.Event()
    waiting = threading.Barrier(WORLD_SIZE - 1, action=released.set)

    def train(rank: int) -> None:
        training = Training(rank, kind, SOON)
        training.fail(lambda: released.wait(10) and None)
        with pytest.raises(ExchangeTimeoutError) as caught:
            training.train()
        assert caught.value.peers == (VICTIM,)
        if rank != VICTIM:
            waiting.wait(10)

    survivors(train, garbage_after_abort=False)


class Interrupting(dict):
    """A parameter group that is interrupted as it is read."""

    def __getitem__(self, key: str) -> object:
        """Raise what Ctrl-C raises."""
        raise KeyboardInterrupt


def test_rank_that_is_interrupted_outside_of_a_step() -> None:
    """The others do not wait for the time-out in a comparison of settings, and learn which rank has stopped."""

    def change(rank: int) -> None:
        training, start = Training(rank, "plain", LATE), time.monotonic()
        group = (Interrupting if rank == VICTIM else dict)(params=[torch.nn.Parameter(torch.ones(3, device="cuda"))])
        with pytest.raises(KeyboardInterrupt if rank == VICTIM else ExchangeError) as caught:
            training.optimizer.add_param_group(group)
        assert rank == VICTIM or "rank 1 stopped: KeyboardInterrupt. To continue," in str(caught.value), caught.value
        assert time.monotonic() - start < 4

    survivors(change, garbage_after_abort=False)


@pytest.mark.parametrize("kind", ["plain", "fsdp", "nodes"])
def test_wrong_headers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted on the device. The confirmation reports them, also those of subgroups. Nothing is applied."""
    right, is_wrong = wire.framed_on_device, {kind == "nodes"}

    def framed(payload: torch.Tensor, frame: wire.Frame) -> torch.Tensor:
        message = right(payload, frame)
        if True in is_wrong:
            message[:1].add_(7)  # the number of another step
        return message

    def train(rank: int) -> None:
        training = Training(rank, kind, LATE, "spardl")
        is_wrong.add(True)
        training.train()
        raise AssertionError("the step was applied")

    def of_nodes() -> None:
        recipe = Hierarchical(recipe=SparDL(density=0.2), node_size=2)
        exchanges.emulated(recipe, exchanges.gradients(4, 60, 2))

    monkeypatch.setattr(wire, "framed_on_device", framed)
    with pytest.raises(ranks.RankError, match=r"ProtocolMismatchError.*message of another step"):
        of_nodes() if kind == "nodes" else ranks.run(train, 4, seed=None)
