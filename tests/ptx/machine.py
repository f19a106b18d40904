"""Runs the programs of a launch: registers as arrays with an element per lane, and the order of warps and programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ptx import operations
from ptx.memory import EPOCH, PROGRAM, UPDATES, Lanes, Memory, ViolationError
from ptx.operations import UNSIGNED, dtype_of, width_of
from ptx.parse import EXIT, Address, Instruction, Kernel, Operand, UnknownTextError

WARP = 32
WHOLE_WARP = 0xFFFFFFFF
LANES = 4096  # that run at once, at most, but at least those of a program
STEPS, SECONDS = 3_000_000, 120.0  # of a launch: instructions, and time of the processor
MODIFIERS = {"v2", "v4", "L1::evict_first", "L2::cache_hint", "relaxed", "gpu", "sys"}
SPECIAL = ("%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z")

Mask = np.ndarray | None  # of lanes; None is all
Step = Callable[["Group", Mask], None]


class Order(NamedTuple):
    """The order in which lanes run. All of it is drawn from the seed; with seed 0, programs ascend.

    The warps of a program take ``turns``, from one barrier to the next. In one turn, they run in lock step.
    """

    seed: int = 0
    turns: int = 1


class Group:
    """Lanes that run in lock step, under a mask where they part. Warps are whole."""

    def __init__(self, machine: Machine, slots: np.ndarray, threads: np.ndarray) -> None:
        self.machine, self.slots, self.threads, self.count = machine, slots, threads, slots.size
        programs = machine.programs[slots]
        self.place = (programs + 1) << PROGRAM | threads
        self.turns = machine.random.permutation(self.count)
        self.alive = np.ones(self.count, bool)
        self.registers: dict[str, np.ndarray] = {"%tid.x": threads.astype(np.uint32)}
        across, down, _ = machine.grid
        places = programs % across, programs // across % down, programs // (across * down)
        for axis, place, size in zip("xyz", places, machine.grid, strict=True):
            self.registers[f"%ctaid.{axis}"] = place.astype(np.uint32)
            self.registers[f"%nctaid.{axis}"] = np.full(self.count, size, np.uint32)

    def lanes(self, at: Instruction, mask: Mask) -> tuple[np.ndarray, Lanes]:
        """Return the numbers of the lanes in a mask, and what memory must know of them."""
        which = np.arange(self.count) if mask is None else np.flatnonzero(mask)
        who = self.place[which] | self.machine.epochs[self.slots[which]] << EPOCH
        return which, Lanes(at, self.slots[which], who, self.turns[which])

    def put(self, name: str, values: Any, mask: Mask) -> None:
        """Write a register, never in place: others may hold the same array. ``_`` is none."""
        if name == "_":
            return
        width = self.machine.kernel.widths[name]
        values = np.asarray(values)
        if width > 1:
            if values.dtype.kind != "u":
                values = values.view(UNSIGNED[8 * values.dtype.itemsize])
            if values.dtype != UNSIGNED[width]:
                values = values.astype(UNSIGNED[width])
        if values.ndim == 0:
            values = np.full(self.count, values)
        if mask is not None:
            values = np.where(mask, values, self.registers.get(name, values))
        self.registers[name] = values

    def run(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Execute to the end. Yield at each barrier its line and the programs that are there."""
        stack: list[tuple[int, np.ndarray, int]] = [(0, self.alive, EXIT)]  # block, lanes, and where they meet others
        while stack:
            block, mask, meet = stack.pop()
            mask = mask & self.alive
            if block in {meet, EXIT, len(self.machine.steps)} or not mask.any():
                continue
            everyone = None if mask.all() else mask
            for at, step in self.machine.steps[block]:
                if step is None:
                    yield at.line, self._at_barrier(at, mask)
                else:
                    step(self, everyone)
            self.machine.count(len(self.machine.steps[block]))
            stack += self._after(block, mask, meet)

    def _after(self, block: int, mask: np.ndarray, meet: int) -> list[tuple[int, np.ndarray, int]]:
        """Return where the lanes of a block go on: the last of the list is first."""
        kernel = self.machine.kernel
        last = kernel.blocks[block][-1] if kernel.blocks[block] else None
        if last is None or last.parts[0] not in {"bra", "ret"}:
            return [(block + 1, mask, meet)]
        taken = mask if last.guard is None else mask & (self.registers[last.guard[0]] == last.guard[1])
        rest = mask & ~taken
        if last.parts[0] == "ret":
            self.alive = self.alive & ~taken
            return [(block + 1, rest, meet)]
        target = kernel.labels[str(last.operands[0])]
        if not (taken.any() and rest.any()):
            return [(target if taken.any() else block + 1, mask, meet)]
        join = kernel.joins[block]
        return [(join, mask, meet), (block + 1, rest, join), (target, taken, join)]

    def _at_barrier(self, at: Instruction, mask: np.ndarray) -> tuple[int, ...]:
        there = np.bincount(self.slots[mask], minlength=self.machine.programs.size)
        whole = np.bincount(self.slots, minlength=self.machine.programs.size)
        partial = (there > 0) & (there < whole)
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
        self.programs, self.epochs = programs, np.zeros(programs.size, np.int64)
        self.memory.begin(batch, programs.size)
        groups = [group.run() for group in self._groups()]
        while groups:
            order = self.random.permutation(len(groups))
            reached = [next(groups[i], None) for i in order]
            if len({*reached}) > 1:
                raise ViolationError("barrier", f"{self.kernel.name}: warps are at different barriers: {reached}")
            if reached[0] is None:
                return
            self.epochs[[*reached[0][1]]] += 1

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


@cache
def steps_of(kernel: Kernel) -> list[list[tuple[Instruction, Step | None]]]:
    """Return a function for each instruction but branches, and None for a barrier. What is not known is an error."""
    return [[(it, _step(kernel, it)) for it in block if it.parts[0] not in {"bra", "ret"}] for block in kernel.blocks]


def _step(kernel: Kernel, it: Instruction) -> Step | None:
    if it.name == "bar.sync" and it.operands == (0,) and it.guard is None:
        return None
    try:
        step = OTHERS.get(it.parts[0], operate)(kernel, it)
    except (AttributeError, KeyError, IndexError, ValueError, TypeError) as error:
        raise UnknownTextError(f"{it} ({error!r})") from error
    if it.guard is None:
        return step
    name, value = it.guard

    def guarded(group: Group, mask: Mask) -> None:
        chosen = group.registers[name] == value
        chosen = chosen if mask is None else chosen & mask
        if chosen.any():
            step(group, None if chosen.all() else chosen)

    return guarded


@dataclass
class Source:
    """An operand that is read as a type. Of a wider register the low bits are read."""

    kernel: Kernel
    operand: Operand
    kind: str

    def __post_init__(self) -> None:
        self.predicate = self.kind == "pred"
        if self.predicate:
            return
        self.bits, self.dtype = UNSIGNED[width_of(self.kind)], dtype_of(self.kind)
        self.constant = None
        number = 0 if self.operand == "global_smem" else self.operand  # where shared memory begins
        if isinstance(number, int):
            self.constant = np.array(number % (1 << width_of(self.kind)), self.bits).view(self.dtype)[()]
        elif number not in self.kernel.widths and number not in SPECIAL:
            raise ValueError(number)

    def of(self, group: Group) -> Any:
        """Return an element per lane, or one for all."""
        if self.predicate:
            return group.registers[self.operand]
        if self.constant is not None:
            return self.constant
        values = group.registers[self.operand]
        return (values if values.dtype == self.bits else values.astype(self.bits)).view(self.dtype)

    def all_of(self, group: Group) -> np.ndarray:
        """Return an element per lane."""
        return np.broadcast_to(self.of(group), group.count)


def operate(kernel: Kernel, it: Instruction) -> Step:
    """An operation on registers of a lane: ``d = a op b``."""
    kinds, function, check, third = operations.FAMILIES[it.parts[0]](it.parts)
    target, *operands = it.operands
    if third and len(operands) == 3:
        kinds += kinds[:1]
    sources = [Source(kernel, operand, kind) for operand, kind in zip(operands, kinds, strict=True)]

    def step(group: Group, mask: Mask) -> None:
        values = [source.of(group) for source in sources]
        if check is not None and (wrong := check[1](*values)).any():
            which, lanes = group.lanes(it, mask)
            lanes.fail(check[0], np.broadcast_to(wrong, group.count)[which], "sources of an operation")
        group.put(target, function(*values), mask)

    return step


def move(kernel: Kernel, it: Instruction) -> Step:
    """``mov``: a copy, or the parts of a vector packed into a register, or a register taken apart. The first is low."""
    (target, source), width = it.operands, width_of(it.parts[1])
    if isinstance(target, tuple):
        whole, part = Source(kernel, source, f"b{width}"), width // len(target)

        def unpack(group: Group, mask: Mask) -> None:
            values = whole.all_of(group)
            for i, name in enumerate(target):
                group.put(name, (values >> UNSIGNED[width](i * part)).astype(UNSIGNED[part]), mask)

        return unpack
    pieces = source if isinstance(source, tuple) else (source,)
    part = width // len(pieces)
    sources = [Source(kernel, piece, f"b{part}") for piece in pieces]

    def pack(group: Group, mask: Mask) -> None:
        values = [np.asarray(each.of(group)).astype(UNSIGNED[width]) for each in sources]
        group.put(target, sum(each << UNSIGNED[width](i * part) for i, each in enumerate(values)), mask)

    return pack


def policy(kernel: Kernel, it: Instruction) -> Step:
    """``createpolicy``: a hint for caches, which has no effect here."""
    return lambda group, mask: group.put(it.operands[0], np.zeros(group.count, np.uint64), mask)


def _addresses(kernel: Kernel, operand: Operand, where: str) -> Callable[[Group], np.ndarray]:
    if not isinstance(operand, Address):
        raise TypeError(operand)
    width = 32 if where == "shared" else 64
    base, offset = Source(kernel, operand.base, f"b{width}"), UNSIGNED[width](operand.offset % (1 << width))

    def addresses(group: Group) -> np.ndarray:
        found = base.of(group) + offset
        return found if found.ndim else np.full(group.count, found)

    return addresses


def _space(it: Instruction) -> str:
    """Return the state space of an access, whose modifiers change nothing here."""
    (found,) = {"global", "shared"} & {*it.parts}
    unknown = {*it.parts[1:-1]} - {found, *MODIFIERS, *UPDATES}
    if unknown:
        raise ValueError(unknown)
    return found


def load(kernel: Kernel, it: Instruction) -> Step:
    """``ld``: one to four elements that are next to each other. A signed type fills a wider register with its sign."""
    kind, target = it.parts[-1], it.operands[0]
    width = width_of(kind)

    def put(group: Group, name: str, values: np.ndarray, mask: Mask) -> None:
        if kind[0] == "s":
            values = values.view(dtype_of(kind)).astype(dtype_of(f"s{kernel.widths[name]}"))
        group.put(name, values, mask)

    if it.parts[1] == "param":
        name = it.operands[1].base

        def parameter(group: Group, mask: Mask) -> None:
            value = group.machine.parameters[name]
            if value.dtype.itemsize * 8 != width:
                raise UnknownTextError(f"{it}: the parameter has {value.dtype.itemsize} bytes")
            put(group, target, np.full(group.count, value), mask)

        return parameter
    where, targets = _space(it), target if isinstance(target, tuple) else (target,)
    address = _addresses(kernel, it.operands[1], where)

    def step(group: Group, mask: Mask) -> None:
        which, lanes = group.lanes(it, mask)
        found = group.machine.memory.load(lanes, address(group)[which], width // 8, len(targets), where)
        for i, name in enumerate(targets):
            values = np.zeros(group.count, found.dtype)
            values[which] = found[:, i]
            put(group, name, values, mask)

    return step


def store(kernel: Kernel, it: Instruction) -> Step:
    """``st``: one to four elements that are next to each other."""
    where, kind, pieces = _space(it), f"b{width_of(it.parts[-1])}", it.operands[1]
    sources = [Source(kernel, each, kind) for each in (pieces if isinstance(pieces, tuple) else (pieces,))]
    address = _addresses(kernel, it.operands[0], where)

    def step(group: Group, mask: Mask) -> None:
        which, lanes = group.lanes(it, mask)
        values = np.stack([source.all_of(group)[which] for source in sources], axis=1)
        group.machine.memory.store(lanes, address(group)[which], values, where)

    return step


def update(kernel: Kernel, it: Instruction) -> Step:
    """``atom`` and ``red``: an atomic operation, which returns what was there, or does not."""
    where, (operation, kind), returns = _space(it), it.parts[-2:], it.parts[0] == "atom"
    if "relaxed" not in it.parts:
        raise ValueError("order")
    target, place, value = it.operands if returns else (None, *it.operands)
    used = returns and sum(target in {*_names(each.operands)} for each in kernel.instructions()) > 1
    source, address = Source(kernel, value, kind), _addresses(kernel, place, where)

    def step(group: Group, mask: Mask) -> None:
        which, lanes = group.lanes(it, mask)
        memory, values = group.machine.memory, source.all_of(group)[which]
        found = np.zeros(group.count, values.dtype)
        found[which] = memory.update(lanes, address(group)[which], values, operation, where, returns=used)
        if used:
            group.put(target, found, mask)

    return step


def _names(operands: tuple[Operand, ...]) -> Iterator[str]:
    for each in operands:
        if isinstance(each, tuple):
            yield from _names(tuple(each))
        elif isinstance(each, str):
            yield each


def _whole_warps(group: Group, mask: Mask, it: Instruction, members: Any = WHOLE_WARP) -> None:
    """Check that every lane which an instruction of a warp names is at this instruction."""
    there = np.ones(group.count, bool) if mask is None else mask
    warps = there.reshape(-1, WARP)
    named = np.broadcast_to(members, group.count)[there]
    if (named != WHOLE_WARP).any() or (warps.any(axis=1) != warps.all(axis=1)).any():
        raise ViolationError("warp", f"{it}: not all lanes of a warp")


def shuffle(kernel: Kernel, it: Instruction) -> Step:
    """``shfl``: a value of another lane of the warp, or its own where that lane is outside the segment."""
    _, sync, mode, kind = it.parts
    if (sync, kind) != ("sync", "b32") or mode not in {"up", "bfly", "idx"}:
        raise ValueError(mode)
    target, *operands = it.operands
    source, distance, clamp, members = (Source(kernel, operand, "b32") for operand in operands)

    def step(group: Group, mask: Mask) -> None:
        _whole_warps(group, mask, it, members.of(group))
        own = np.arange(group.count) % WARP
        by, control = (each.all_of(group).astype(np.int64) for each in (distance, clamp))
        by, segment, limit = by & 31, control >> 8 & 31, control & 31
        first, last = own & segment, own & segment | limit & ~segment
        lane = {"up": own - by, "bfly": own ^ by, "idx": first | by & ~segment}[mode]
        lane = np.where(lane >= last if mode == "up" else lane <= last, lane, own)
        group.put(target, source.all_of(group)[np.arange(group.count) - own + lane], mask)

    return step


def reduce(kernel: Kernel, it: Instruction) -> Step:
    """``redux``: the sum, least or largest of a warp, in each of its lanes."""
    _, sync, name, kind = it.parts
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[name]
    target, value, named = it.operands
    source, members = Source(kernel, value, kind), Source(kernel, named, "b32")
    if sync != "sync":
        raise ValueError(sync)

    def step(group: Group, mask: Mask) -> None:
        _whole_warps(group, mask, it, members.of(group))
        values = source.all_of(group).reshape(-1, WARP)
        group.put(target, np.repeat(function.reduce(values, axis=1, dtype=values.dtype), WARP), mask)

    return step


def load_matrices(kernel: Kernel, it: Instruction) -> Step:
    """``ldmatrix``: 8 rows of 16 bytes per matrix. Lane 8 i + r has the address of row r of matrix i.

    Lane t gets bytes 4 (t mod 4) and on of row t / 4, of each matrix.
    """
    if it.name != "ldmatrix.sync.aligned.m8n8.x4.shared.b16":
        raise ValueError(it.name)
    address = _addresses(kernel, it.operands[1], "shared")

    def step(group: Group, mask: Mask) -> None:
        _whole_warps(group, mask, it)
        which, lanes = group.lanes(it, mask)
        thread, rows = which % WARP, address(group)
        lanes.fail("alignment", rows[which] % 16 != 0, "a row of 16 bytes")
        for i, name in enumerate(it.operands[0]):
            place = rows[which - thread + 8 * i + thread // 4] + (4 * (thread % 4)).astype(np.uint32)
            values = np.zeros(group.count, np.uint32)
            values[which] = group.machine.memory.load(lanes, place, 4, 1, "shared")[:, 0]
            group.put(name, values, mask)

    return step


OTHERS: dict[str, Callable[[Kernel, Instruction], Step]] = {
    "mov": move,
    "createpolicy": policy,
    "ld": load,
    "st": store,
    "atom": update,
    "red": update,
    "shfl": shuffle,
    "redux": reduce,
    "ldmatrix": load_matrices,
}
