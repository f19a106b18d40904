"""Runs the programs of a launch: lanes with their registers, where they part and meet, and the order of warps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ptx.memory import EPOCH, PROGRAM, Lanes, Memory, ViolationError, Which
from ptx.operations import UNSIGNED
from ptx.parse import EXIT, Instruction, Kernel
from ptx.steps import WARP, Mask, steps_of

LANES = 16384  # that run at once, at most, but at least those of a program
STEPS, SECONDS = 3_000_000, 120.0  # of a launch: instructions, and time of the processor


class Order(NamedTuple):
    """The order in which lanes run. All of it is drawn from the seed; with seed 0, programs ascend.

    The warps of a program take ``turns``, from one barrier to the next. In one turn, they run in lock step.
    """

    seed: int = 0
    turns: int = 1


class Registers(dict[str, np.ndarray]):
    """The registers of a group, by name, with an element per lane. Those that nobody wrote hold random bits."""

    def __init__(self, machine: Machine, count: int) -> None:
        super().__init__()
        self._machine, self._count = machine, count

    def __missing__(self, name: str) -> np.ndarray:
        width = self._machine.kernel.widths[name]
        bits = self._machine.random.integers(0, (1 << width) - 1, self._count, np.uint64, endpoint=True)
        self[name] = bits.astype(bool if width == 1 else UNSIGNED[width])
        return self[name]


class Group:
    """Lanes that run in lock step, under a mask where they part. Warps are whole.

    ``who`` is what memory must know of a lane.
    """

    def __init__(self, machine: Machine, slots: np.ndarray, threads: np.ndarray) -> None:
        self.machine, self.slots, self.threads, self.count = machine, slots, threads, slots.size
        programs = machine.programs[slots]
        self.who = (programs + 1) << PROGRAM | threads
        self.registers = Registers(machine, self.count)
        self.registers["%tid.x"] = threads.astype(np.uint32)
        across, down, _ = machine.grid
        places = programs % across, programs // across % down, programs // (across * down)
        for axis, place, size in zip("xyz", places, machine.grid, strict=True):
            self.registers[f"%ctaid.{axis}"] = place.astype(np.uint32)
            self.registers[f"%nctaid.{axis}"] = np.full(self.count, size, np.uint32)

    def lanes(self, at: Instruction, mask: Mask) -> tuple[Which, Lanes]:
        """Return the numbers of the lanes in a mask, and what memory must know of them."""
        lanes = Lanes(at, self.slots, self.who)
        if mask is None:
            return slice(None), lanes
        which = np.flatnonzero(mask)
        return which, lanes.some(which)

    def run(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Execute to the end. Yield at each barrier its line and the programs that are there."""
        steps = self.machine.steps
        # Blocks, their lanes, and where these meet others.
        stack: list[tuple[int, np.ndarray, int]] = [(0, np.ones(self.count, bool), EXIT)]
        while stack:
            block, mask, meet = stack.pop()
            number = np.count_nonzero(mask)
            if block in {meet, EXIT, len(steps)} or not number:
                continue
            everyone = None if number == self.count else mask
            for at, step in steps[block]:
                if step is None:
                    yield at.line, self._at_barrier(at, mask)
                    self.who = self.who + (mask.astype(np.int64) << EPOCH)
                else:
                    step(self, everyone)
            self.machine.count(len(steps[block]))
            stack += self._after(block, mask, meet)

    def _after(self, block: int, mask: np.ndarray, meet: int) -> list[tuple[int, np.ndarray, int]]:
        """Return where the lanes of a block go on: the last of the list is first."""
        kernel = self.machine.kernel
        last = kernel.blocks[block][-1] if kernel.blocks[block] else None
        if last is None or last.parts[0] not in {"bra", "ret"}:
            return [(block + 1, mask, meet)]
        if last.parts[0] == "ret":
            return []
        taken = mask if last.guard is None else mask & (self.registers[last.guard[0]] == last.guard[1])
        rest, target = mask & ~taken, kernel.labels[str(last.operands[0])]
        if not np.count_nonzero(rest):
            return [(target, mask, meet)]
        if not np.count_nonzero(taken):
            return [(block + 1, mask, meet)]
        join = kernel.joins[block]
        return [(join, mask, meet), (block + 1, rest, join), (target, taken, join)]

    def _at_barrier(self, at: Instruction, mask: np.ndarray) -> tuple[int, ...]:
        programs = mask.reshape(self.machine.programs.size, -1)
        there = programs.any(axis=1)
        partial = there & ~programs.all(axis=1)
        if partial.any():
            raise ViolationError("barrier", f"{at}: not all lanes of program {self.machine.programs[partial.argmax()]}")
        return tuple(np.flatnonzero(there).tolist())


class Machine:
    """One launch of a kernel. ``parameters`` are unsigned integers of their width."""

    def __init__(
        self, kernel: Kernel, grid: tuple[int, int, int], parameters: list[np.generic], memory: Memory, order: Order
    ) -> None:
        self.kernel, self.grid, self.memory, self.order = kernel, grid, memory, order
        self.parameters = dict(zip(kernel.parameters, parameters, strict=True))
        self.random = np.random.default_rng(order.seed)
        self.steps = steps_of(kernel)
        self._executed, self._start = 0, time.process_time()

    def run(self) -> None:
        """Execute all programs."""
        total = int(np.prod(self.grid))
        programs = self.random.permutation(total) if self.order.seed else np.arange(total)
        size = max(1, LANES // self.kernel.threads)
        with np.errstate(all="ignore"):
            for batch, first in enumerate(range(0, total, size)):
                self._run_batch(batch, programs[first : first + size])

    def count(self, executed: int) -> None:
        """Count instructions, and stop what does not end."""
        self._executed += executed
        if self._executed > STEPS or time.process_time() - self._start > SECONDS:
            raise ViolationError("time", f"{self.kernel.name} has not ended after {self._executed} instructions")

    def _run_batch(self, batch: int, programs: np.ndarray) -> None:
        self.programs = programs
        self.memory.begin(batch, programs.size)
        groups = [group.run() for group in self._groups()]
        reached: list[object] = []
        while reached != [None]:
            reached = [*{next(groups[i], None) for i in self.random.permutation(len(groups))}]
            if len(reached) > 1:
                raise ViolationError("barrier", f"{self.kernel.name}: warps are at different barriers: {reached}")

    def _groups(self) -> list[Group]:
        """Return the warps of each turn. Each program has its own order."""
        warps, count = self.kernel.threads // WARP, self.programs.size
        turns = min(self.order.turns, warps)
        order = np.argsort(self.random.random((count, warps)), axis=1) if turns > 1 else np.arange(warps)[None]
        order = np.broadcast_to(order, (count, warps))
        parts = [np.sort(part, axis=1) for part in np.array_split(order, turns, axis=1)]
        return [
            Group(
                self,
                np.repeat(np.arange(count), part.shape[1] * WARP),
                (part[:, :, None] * WARP + np.arange(WARP)).reshape(-1).astype(np.int64),
            )
            for part in parts
        ]
