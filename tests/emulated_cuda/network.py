"""What the ranks of one run share: what they bring to collectives, their messages, and how they wait for each other."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from emulated_cuda.device import site
from emulated_cuda.streams import current_gpu


class Hang(BaseException):
    """A rank waits for something that never comes. Not an ``Exception``: on a real machine nothing is raised."""


class Turn:
    """Lets ranks compute one at a time. Many threads that compute at once spend half of their time on the GIL.

    This is for speed alone: a rank that has waited for its turn for some time goes on without it, because the one that
    has it may wait for this rank in a way that is not known here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holds = threading.local()

    def take(self) -> None:
        """Wait for the turn."""
        self._holds.turn = self._lock.acquire(timeout=0.05)

    def leave(self) -> bool:
        """Give the turn away. Return whether this thread takes turns."""
        holds = getattr(self._holds, "turn", None)
        if holds:
            self._lock.release()
            self._holds.turn = False
        return holds is not None


class Member(Protocol):
    """What a wait must know of the process group of a rank."""

    global_rank: int
    aborted: bool


@dataclass
class Network:
    """What the ranks of one run share.

    Attributes:
        world_size: Number of ranks.
        seed: Seed of the random delays. None is without delays.
        limit: Seconds after which a wait is a :class:`Hang`.
        several_gpus: Whether each rank sees the GPUs of all ranks. If False, each has one, and sees it as ``cuda:0``.
        garbage_after_abort: Whether a wait that is released by an abort returns with garbage in the buffer, as work on
            a stream does, instead of raising.
        patience: Seconds after which ``work.wait()`` returns though a rank is missing, with garbage in the buffer.
            NCCL's returns at once, and the host waits where it reads something: here until an abort. None is without
            end.
        waits: What each rank waits for now.
    """

    world_size: int
    seed: int | None = 0
    limit: float = 20.0
    several_gpus: bool = False
    garbage_after_abort: bool = False
    patience: float | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)
    changes: dict[Hashable, threading.Condition] = field(default_factory=dict)
    cells: dict[Hashable, dict[int, Any]] = field(default_factory=dict)
    taken: dict[Hashable, int] = field(default_factory=lambda: defaultdict(int))
    mail: dict[Hashable, deque[Any]] = field(default_factory=lambda: defaultdict(deque))
    waits: dict[int, str] = field(default_factory=dict)
    turn: Turn = field(default_factory=Turn)
    stopped: BaseException | None = None

    def stop(self, error: BaseException) -> None:
        """Release all waits with a :class:`Hang`, because a rank has failed."""
        self.stopped = self.stopped or error
        self.wake_all()

    def wake_all(self) -> None:
        """Let all waits look again."""
        with self.lock:
            for change in self.changes.values():
                change.notify_all()

    def wake(self, key: Hashable) -> None:
        """Let waits for ``key`` look again. Call with the lock held."""
        if key in self.changes:
            self.changes[key].notify_all()

    def wait_for(self, key: Hashable, ready: Callable[[], bool], group: Member, what: str, timeout: timedelta) -> bool:
        """Wait until ``ready()``. Return False if the group was aborted on this rank. Call with the lock held.

        Also return False after :attr:`patience`.
        """
        if ready() and not group.aborted and self.stopped is None:
            return True
        rank, started = group.global_rank, time.monotonic()
        change = self.changes.setdefault(key, threading.Condition(self.lock))
        self.waits[rank] = f"{what} ({site()})"
        takes_turns = self.turn.leave()
        try:
            while not ready():
                waited = time.monotonic() - started
                if group.aborted:
                    return False
                if self.patience is not None and waited > self.patience:
                    current_gpu().unfinished.append(lambda: self.wait_for_abort(group, what))
                    return False
                if self.stopped is not None:
                    raise Hang(f"rank {rank} waited for {what} when another rank failed: {self.stopped!r}")
                if timeout and waited > timeout.total_seconds():
                    raise dist.DistBackendError(f"{what} ran for {1e3 * waited:.0f} milliseconds before timing out")
                if waited > self.limit:
                    others = "; ".join(f"rank {r} waits for {text}" for r, text in sorted(self.waits.items()))
                    raise Hang(f"no progress: {others}; ranks that are not named here wait for nothing")
                change.wait(0.05)
        finally:
            self.waits.pop(rank, None)
            if takes_turns:
                self.lock.release()  # whoever has the turn may need it
                self.turn.take()
                self.lock.acquire()
        return True

    def wait_for_abort(self, group: Member, what: str) -> None:
        """Wait until ``group`` was aborted on this rank."""
        end = time.monotonic() + self.limit
        while not group.aborted:
            if time.monotonic() > end:
                raise Hang(f"rank {group.global_rank} waits for {what}")
            time.sleep(0.01)

    def delay(self, generator: random.Random) -> None:
        """Sleep at random, so that ranks reach their operations in another order each time."""
        if self.seed is not None and generator.random() < 0.15:
            takes_turns = self.turn.leave()
            time.sleep(generator.random() * 5e-4)
            if takes_turns:
                self.turn.take()
