"""Memory of a launch: tensors with bounds, and the shared memory of programs, with the checks of a sanitizer.

Each tensor has a range of addresses far from all others. For every unit of memory is known who read, wrote and updated
it last, so a race is found in whatever order lanes were run: two accesses of different threads, of which at least one
writes and not both are atomic, race unless a barrier of their program lies between them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np

from ptx.operations import UNSIGNED
from ptx.parse import Instruction

POISON = 0xA5  # the byte of memory that nobody wrote
KINDS = ("read", "write", "atomic")
READ, WRITE, ATOMIC = range(3)
AGAINST = {READ: (WRITE, ATOMIC), WRITE: (READ, WRITE, ATOMIC), ATOMIC: (READ, WRITE)}
# Who accessed a unit, as an integer: program + 1, barriers passed, and thread. 0 is nobody.
PROGRAM, EPOCH = 36, 12
THREADS = (1 << EPOCH) - 1  # as a thread: several
EVERYONE = (1 << 63) - 1  # several programs
# What a racing read gives instead: all bits flipped, and the largest signed integer, which is a NaN as a float. One of
# them alone may change nothing, for example in a maximum.
DISTURBANCES = (np.invert, lambda values: (values | ~values) >> values.dtype.type(1))
UPDATES = {"add": np.add, "or": np.bitwise_or, "max": np.maximum}


class ViolationError(AssertionError):
    """A check failed. ``check`` is its name."""

    def __init__(self, check: str, message: str) -> None:
        super().__init__(f"{check}: {message}")
        self.check = check


class Lanes(NamedTuple):
    """The lanes of one access: the place of their program in its batch, and who they are."""

    at: Instruction
    slots: np.ndarray
    who: np.ndarray

    def some(self, which: Which) -> Lanes:
        """Return a part of the lanes."""
        return Lanes(self.at, self.slots[which], self.who[which])

    def fail(self, check: str, bad: np.ndarray, detail: str) -> None:
        """Raise an error for the first lane of ``bad``, if there is one."""
        if np.count_nonzero(bad):
            bad = bad != 0
            who = int(self.who[bad.argmax()])
            place = f"program {(who >> PROGRAM) - 1}, thread {who & THREADS}"
            raise ViolationError(check, f"{self.at}: {detail}: {int(bad.sum())} lanes, the first is {place}")


Which = np.ndarray | slice  # the numbers of some lanes; a slice is all of them
Contested = defaultdict[tuple[str, int], set[int]]  # (space, unit) -> who wrote while others read


class Space:
    """Bytes that are accessed together: the memory that tensors share, or the shared memory of a batch of programs.

    ``written`` says which units have been written, and ``last``, by kind of access, who accessed them last.
    """

    def __init__(self, name: str, data: np.ndarray, written: np.ndarray, unit: int) -> None:
        self.name, self.data, self.written, self.unit = name, data, written, unit
        self.complete = bool(written.all())  # nothing is unwritten, so nobody has to look
        self.last: dict[int, np.ndarray] = {}  # without the kinds that nobody used yet

    def unwritten(self, units: np.ndarray) -> np.ndarray | None:
        """Return which lanes access a unit that nobody wrote, or None if there is no such unit."""
        if self.complete or (written := self.written[units]).all():
            return None
        return ~written.all(axis=1)

    def view(self, width: int) -> np.ndarray:
        """Return the bytes as integers of ``width`` bytes."""
        return self.data[: self.data.size // width * width].view(UNSIGNED[8 * width])

    def units(self, at: np.ndarray, width: int) -> np.ndarray:
        """Return the units of accesses that begin ``at`` bytes, ``[lanes, units]``."""
        return (at // self.unit)[:, None] + np.arange(max(1, width // self.unit))

    def record(self, kind: int, units: np.ndarray, who: np.ndarray) -> dict[int, np.ndarray]:
        """Record that lanes access ``units`` (``[lanes, units]``).

        Return which of the units others accessed before without a barrier between, by kind of that access.
        """
        mine, found = who[:, None], {}
        now = np.broadcast_to(mine, units.shape)
        for other, accesses in self.last.items():
            earlier = accesses[units]
            if earlier.any() and (racing := _unordered(earlier, mine)).any():
                found[other] = racing
                if other == kind:
                    now = np.where(racing, _both(earlier, now), now)
        if kind not in self.last:
            self.last = {**self.last, kind: np.zeros(self.written.size, np.int64)}
        last = self.last[kind]
        last[units] = now
        while np.count_nonzero(met := (seen := last[units]) != now):  # other lanes at the same unit
            now = _both(seen, now)
            last[units[met]] = now[met]
        return {other: found[other] for other in AGAINST[kind] if other in found}


def _unordered(earlier: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """Return whether an earlier access is by another thread, without a barrier of their program between."""
    program, now = mine >> PROGRAM << PROGRAM, mine & ~THREADS
    return (earlier != 0) & (earlier != mine) & ((earlier < program) | (earlier >= now))


def _both(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return who accessed a unit, of two who did without a barrier between."""
    different = one ^ other
    several = np.where(different >> PROGRAM == 0, one | THREADS, EVERYONE)
    return np.where(different == 0, one, several)


@cache
def _used_units(at: Instruction, width: int, count: int, unit: int) -> np.ndarray:
    """Return which units of a vector load are used: the text names the bytes, or has no register for a part."""
    targets = at.operands[0] if isinstance(at.operands[0], tuple) else at.operands[:1]
    names = [name != "_" for name in targets] if len(targets) == count else [True] * count
    used = at.used_bytes if at.used_bytes is not None else -1
    whole = (1 << width) - 1
    parts = [named and used >> (i * width) & whole > 0 for i, named in enumerate(names)]
    return np.array([i for i in range(max(1, width * count // unit)) if count == 1 or parts[i * unit // width]])


@dataclass
class Range:
    """The addresses of one tensor, which starts at a byte of a space."""

    first: int
    size: int
    space: Space
    offset: int
    name: str


@dataclass
class Memory:
    """All memory that a launch can reach.

    Lanes may write the value that is there. ``contested`` collects units that are read while another lane writes. Such
    a race is harmless if the value that is read is not used. To find out, a launch is run again with these units as
    ``disturbed``: racing reads then give other bits, by ``disturbance``.
    """

    ranges: list[Range]
    shared_bytes: int  # of one program
    units: dict[str, int]  # by state space: the narrowest access of the kernel, in bytes
    disturbed: Contested = field(default_factory=lambda: defaultdict(set))
    disturbance: Callable[[np.ndarray], np.ndarray] = np.invert
    contested: Contested = field(default_factory=lambda: defaultdict(set))

    def __post_init__(self) -> None:
        self.ranges.sort(key=lambda it: it.first)
        self._starts = [it.first for it in self.ranges]
        self._firsts = np.array(self._starts, np.int64)
        self._sizes = np.array([it.size for it in self.ranges], np.int64)
        self._sorted: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def begin(self, batch: int, programs: int) -> None:
        """Give the next programs shared memory that nobody wrote."""
        size = self.shared_bytes * programs
        data, unit = np.full(size, POISON, np.uint8), self.units["shared"]
        self._shared = Space(f"shared memory of batch {batch}", data, np.zeros(size // unit, bool), unit)

    def load(self, lanes: Lanes, address: np.ndarray, width: int, count: int, where: str) -> np.ndarray:
        """Return ``[lanes, count]`` integers of ``width`` bytes that are next to each other."""
        found = np.empty((address.size, count), UNSIGNED[8 * width])
        for space, which, at in self._places(lanes, address, width * count, where):
            mine, values = lanes.some(which), space.view(width)[(at // width)[:, None] + np.arange(count)]
            units = (at // space.unit)[:, None] + _used_units(lanes.at, width, count, space.unit)
            if (bad := space.unwritten(units)) is not None:
                mine.fail("unwritten", bad, f"read of {space.name} that nobody wrote")
            for kind, racing in space.record(READ, units, mine.who).items():
                for unit in np.unique(units[racing]):
                    self.contested[space.name, int(unit)].add(int(space.last[kind][unit]))
            if self.disturbed:
                values = np.where(self._disturbs(space, units, mine.who)[:, None], self.disturbance(values), values)
            found[which] = values
        return found

    def store(self, lanes: Lanes, address: np.ndarray, values: np.ndarray, where: str) -> None:
        """Store ``[lanes, count]`` integers."""
        width, count = values.dtype.itemsize, values.shape[1]
        for space, which, at in self._places(lanes, address, width * count, where):
            mine, new, view = lanes.some(which), values[which], space.view(width)
            places = (at // width)[:, None] + np.arange(count)
            before = view[places]
            view[places] = new
            if (other := view[places] != new).any():
                mine.fail("race", other.any(axis=1), f"lanes store different values in {space.name}")
            units = space.units(at, width * count)
            space.written[units] = True
            for kind, racing in space.record(WRITE, units, mine.who).items():
                silent = (before == new).all(axis=1)
                if kind == READ:
                    self._contest(space, units, racing & ~silent[:, None], mine.who)
                else:
                    changes = racing.any(axis=1) & ~silent
                    mine.fail("race", changes, f"store to {space.name} after a {KINDS[kind]} of another lane")

    def update(self, lanes: Lanes, address: np.ndarray, values: np.ndarray, operation: str, where: str) -> None:
        """Apply one value per lane, atomically."""
        width = values.dtype.itemsize
        for space, which, at in self._places(lanes, address, width, where):
            mine, units = lanes.some(which), space.units(at, width)
            if (bad := space.unwritten(units)) is not None:
                mine.fail("unwritten", bad, f"update of {space.name} that nobody wrote")
            UPDATES[operation].at(space.view(width).view(values.dtype), at // width, values[which])
            for kind, racing in space.record(ATOMIC, units, mine.who).items():
                if kind == READ:
                    self._contest(space, units, racing, mine.who)
                else:
                    detail = f"update of {space.name} after a {KINDS[kind]} of another lane"
                    mine.fail("race", racing.any(axis=1), detail)

    def _places(
        self, lanes: Lanes, address: np.ndarray, width: int, where: str
    ) -> Iterator[tuple[Space, Which, np.ndarray]]:
        """Yield the spaces that are accessed, the numbers of their lanes, and the bytes where these begin."""
        lanes.fail("alignment", address & address.dtype.type(width - 1), f"an access of {width} bytes")
        address = address.astype(np.int64)
        if where == "shared":
            lanes.fail("bounds", address + width > self.shared_bytes, f"{self.shared_bytes} bytes of shared memory")
            yield self._shared, slice(None), address + lanes.slots * self.shared_bytes
            return
        # Nearly always, all lanes are in one tensor.
        held = self.ranges[max(0, bisect_right(self._starts, address.min()) - 1)]
        if held.first <= address.min() and address.max() + width <= held.first + held.size:
            yield held.space, slice(None), address + (held.offset - held.first)
            return
        found = np.searchsorted(self._firsts, address, side="right") - 1
        lanes.fail("bounds", found < 0, "an address below all tensors")
        inside = address - self._firsts[found]
        outside = inside + width > self._sizes[found]
        worst = outside.argmax()
        near = self.ranges[found[worst]]
        lanes.fail("bounds", outside, f"byte {inside[worst]} of {near.name}, which has {near.size}")
        for number in np.unique(found):
            which, held = np.flatnonzero(found == number), self.ranges[number]
            yield held.space, which, inside[which] + held.offset

    def _contest(self, space: Space, units: np.ndarray, which: np.ndarray, who: np.ndarray) -> None:
        for unit, writer in zip(units[which], np.broadcast_to(who[:, None], units.shape)[which], strict=True):
            self.contested[space.name, int(unit)].add(int(writer))

    def _disturbs(self, space: Space, units: np.ndarray, who: np.ndarray) -> np.ndarray:
        """Return which lanes read what races with a write of the first run."""
        known, writers = self._writers(space.name)
        found = np.zeros(who.size, bool)
        first, mine = np.searchsorted(known, units), who[:, None]
        while (there := np.append(known, -1)[np.minimum(first, known.size)] == units).any():
            writer = np.append(writers, 0)[np.minimum(first, known.size)]
            # A barrier may also lie between this read and a later write.
            found |= (there & _unordered(writer, mine) & _unordered(mine, writer)).any(axis=1)
            first = first + 1
        return found

    def _writers(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the disturbed units of a space, ascending, and who writes each. A unit may be there several times."""
        if name not in self._sorted:
            pairs = [(unit, who) for (of, unit), writers in self.disturbed.items() if of == name for who in writers]
            both = np.array(sorted(pairs), np.int64).reshape(-1, 2)
            self._sorted[name] = both[:, 0], both[:, 1]
        return self._sorted[name]
