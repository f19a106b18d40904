"""Worker processes of tests/distributed/test_failures.py: what a lost rank must not prevent."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from helpers import flat, loss_of, same_everywhere, tiny_model
from tritoncomm import ConfigMismatchError, PeerLostError
from tritoncomm.scheduler import failure_report
from tritoncomm.step.exchange.machine import GradientExchange

TIMEOUT = timedelta(seconds=5)
LOST, BEHIND = 2, 1
failure_report._CLOSED_SECONDS, failure_report._SILENT_SECONDS = 1.0, 2.5


def not_confirmed(exchange: GradientExchange) -> None:
    """Let this rank lose another one at the end of the next confirmation, which all the others complete.

    It closes its connections, as a rank does that loses another one.
    """
    confirm = exchange._confirm

    def interrupted() -> None:
        confirm()
        exchange._confirm = confirm
        failure_report.cut_connections(None)
        raise PeerLostError("lost rank 2", [LOST])

    exchange._confirm = interrupted


class Run:
    """A run with a schedule, of which ``situation`` says how it clips."""

    def __init__(self, rank: int, situation: str) -> None:
        self.rank, self.situation, self.model = rank, situation, tiny_model()
        clips = {"max_grad_norm": 1e-3} if "clipped" in situation else {}
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.optimizer = tritoncomm.wrap(optimizer, density=0.2, dense_below=0, timeout=TIMEOUT, **clips)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def update(self, step: int) -> None:
        """Take a step of the optimizer alone."""
        self.optimizer.zero_grad()
        loss_of(self.model, self.rank, step).backward()
        if self.situation == "own clipping":
            self.optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
        self.optimizer.step()

    def steps(self, steps: range) -> None:
        """Train."""
        for step in steps:
            self.update(step)
            self.schedule.step()

    def last_step(self) -> bool:
        """Take the step or the flush in which a rank is lost. Return whether this rank has confirmed it."""
        try:
            if "flush" in self.situation:
                self.optimizer.flush()
            else:
                self.steps(range(3, 4))
        except PeerLostError:
            return False
        return True


def lost_in_confirmation(rank: int, world_size: int, send, situation: str) -> None:
    """One of two survivors has not confirmed a step that the other one has taken. Both go on with equal parameters."""
    run = Run(rank, situation)
    run.steps(range(3))
    if rank == BEHIND:
        not_confirmed(run.optimizer._exchange)
    stepped = run.last_step()
    assert stepped == (rank != BEHIND)
    if rank == LOST:
        os._exit(0)
    if stepped:
        with pytest.raises(PeerLostError):
            run.update(4)
    group = dist.new_group([0, 1], timeout=TIMEOUT, use_local_synchronization=True)
    if situation == "own clipping":
        with pytest.raises(ConfigMismatchError, match="its result differs: load a checkpoint"):
            run.optimizer.reset_process_group(group)
        send((rank, "refused"))
        os._exit(0)
    caught_up = run.optimizer.reset_process_group(group)
    assert caught_up == (rank == BEHIND)
    if caught_up and "flush" not in situation:
        run.schedule.step()
    run.steps(range(5, 8))
    assert same_everywhere(flat(run.model), group)
    send((rank, "trained to the end"))
    os._exit(0)


def lost_with_scaler(rank: int, world_size: int, send) -> None:
    """The scaler whose ranks agree names a lost rank, and then agrees among the others."""
    model = tiny_model()
    optimizer = tritoncomm.wrap(torch.optim.AdamW(model.parameters(), lr=0.01), density=0.2, timeout=TIMEOUT)
    scaler = tritoncomm.amp.GradScaler("cpu", init_scale=1024.0)

    def update(step: int) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()

    for step in range(3):
        update(step)
    if rank == LOST:
        os._exit(0)
    time.sleep(0.5)
    with pytest.raises(PeerLostError) as caught:
        update(3)
    assert caught.value.peers == (LOST,)
    group = dist.new_group([0, 1], timeout=TIMEOUT, use_local_synchronization=True)
    assert not optimizer.reset_process_group(group)
    scaler.update()  # what the step that failed has begun
    for step in range(4, 7):
        update(step)
    assert optimizer.metrics()["steps"] == 6
    assert same_everywhere(flat(model), group)
    send((rank, "trained to the end"))
    os._exit(0)
