"""What each instruction does to the lanes that run it: a function of a group of lanes and a mask.

The functions are made once for a kernel. What is not known raises an error that quotes the line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx import operations
from ptx.memory import UPDATES, ViolationError, Which
from ptx.operations import UNSIGNED, dtype_of, width_of
from ptx.parse import Address, Instruction, Kernel, Operand, UnknownTextError

if TYPE_CHECKING:
    from ptx.machine import Group

WARP = 32
WHOLE_WARP = 0xFFFFFFFF
MODIFIERS = {"v2", "v4", "L1::evict_first", "L2::cache_hint", "relaxed", "gpu", "sys"}
SPECIAL = ("%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z")

Mask = np.ndarray | None  # of lanes; None is all
Step = Callable[["Group", Mask], None]
Source = Callable[["Group"], Any]  # an element per lane, or one for all
Target = Callable[["Group", Any, Mask], None]


@cache
def steps_of(kernel: Kernel) -> list[list[tuple[Instruction, Step | None]]]:
    """Return a function for each instruction but branches, and None for a barrier."""
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
        if number := np.count_nonzero(chosen):
            step(group, None if number == group.count else chosen)

    return guarded


def source(kernel: Kernel, operand: Operand, kind: str) -> Source:
    """Return what reads an operand as a type. Of a wider register the low bits are read."""
    if kind == "pred":
        return lambda group: group.registers[operand]
    bits, dtype = UNSIGNED[width_of(kind)], dtype_of(kind)
    number = 0 if operand == "global_smem" else operand  # where shared memory begins
    if isinstance(number, int):
        constant = np.array(number % (1 << width_of(kind)), bits).view(dtype)[()]
        return lambda group: constant
    width = 32 if number in SPECIAL else kernel.widths[number]
    if width != width_of(kind):
        return lambda group: group.registers[number].astype(bits).view(dtype)
    if bits == dtype:
        return lambda group: group.registers[number]
    return lambda group: group.registers[number].view(dtype)


def every(values: Any, group: Group) -> np.ndarray:
    """Return an element per lane."""
    return values if np.ndim(values) else np.full(group.count, values)


def target(kernel: Kernel, name: Operand) -> Target:
    """Return what writes a register, never in place: others may hold the same array. ``_`` is none."""
    if name == "_":
        return lambda group, values, mask: None
    dtype = np.dtype(bool if kernel.widths[name] == 1 else UNSIGNED[kernel.widths[name]])

    def put(group: Group, values: Any, mask: Mask) -> None:
        if values.dtype != dtype:
            values = values.view(UNSIGNED[8 * values.dtype.itemsize]).astype(dtype, copy=False)
        if values.ndim == 0:
            values = np.full(group.count, values)
        if mask is not None:
            values = np.where(mask, values, group.registers.get(name, values))
        group.registers[name] = values

    return put


def operate(kernel: Kernel, it: Instruction) -> Step:
    """An operation on registers of a lane: ``d = a op b``."""
    kinds, function, check, third = operations.FAMILIES[it.parts[0]](it.parts)
    name, *operands = it.operands
    if third and len(operands) == 3:
        kinds += kinds[:1]
    sources = [source(kernel, operand, kind) for operand, kind in zip(operands, kinds, strict=True)]
    put = target(kernel, name)

    def step(group: Group, mask: Mask) -> None:
        values = [get(group) for get in sources]
        if check is not None and (wrong := check[1](*values)).any():
            which, lanes = group.lanes(it, mask)
            lanes.fail(check[0], np.broadcast_to(wrong, group.count)[which], "sources of an operation")
        put(group, function(*values), mask)

    return step


def move(kernel: Kernel, it: Instruction) -> Step:
    """``mov``: a copy, or the parts of a vector packed into a register, or a register taken apart. The first is low."""
    to, pieces = it.operands
    width = width_of(it.parts[1])
    if isinstance(to, tuple):
        whole, part = source(kernel, pieces, f"b{width}"), width // len(to)
        puts = [target(kernel, name) for name in to]

        def unpack(group: Group, mask: Mask) -> None:
            for i, put in enumerate(puts):
                put(group, (whole(group) >> UNSIGNED[width](i * part)).astype(UNSIGNED[part]), mask)

        return unpack
    pieces = pieces if isinstance(pieces, tuple) else (pieces,)
    part, put = width // len(pieces), target(kernel, to)
    sources = [source(kernel, piece, f"b{part}") for piece in pieces]

    def pack(group: Group, mask: Mask) -> None:
        total = sources[0](group).astype(UNSIGNED[width], copy=False)
        for i, get in enumerate(sources[1:], 1):
            total = total | get(group).astype(UNSIGNED[width]) << UNSIGNED[width](i * part)
        put(group, total, mask)

    return pack


def policy(kernel: Kernel, it: Instruction) -> Step:
    """``createpolicy``: a hint for caches, which has no effect here."""
    put = target(kernel, it.operands[0])
    return lambda group, mask: put(group, np.uint64(0), mask)


def _addresses(kernel: Kernel, operand: Operand, where: str) -> Source:
    if not isinstance(operand, Address):
        raise TypeError(operand)
    width = 32 if where == "shared" else 64
    base, offset = source(kernel, operand.base, f"b{width}"), UNSIGNED[width](operand.offset % (1 << width))
    return lambda group: every(base(group) + offset, group)


def _space(it: Instruction) -> str:
    """Return the state space of an access, whose modifiers change nothing here."""
    (found,) = {"global", "shared"} & {*it.parts}
    unknown = {*it.parts[1:-1]} - {found, *MODIFIERS, *UPDATES}
    if unknown:
        raise ValueError(unknown)
    return found


def load(kernel: Kernel, it: Instruction) -> Step:
    """``ld``: one to four elements that are next to each other. A signed type fills a wider register with its sign."""
    kind, names = it.parts[-1], it.operands[0] if isinstance(it.operands[0], tuple) else it.operands[:1]
    width, puts = width_of(kind), [target(kernel, name) for name in names]

    def signed(values: np.ndarray) -> np.ndarray:
        return values.view(dtype_of(kind)).astype(dtype_of(f"s{kernel.widths[names[0]]}")) if kind[0] == "s" else values

    if it.parts[1] == "param":
        name = it.operands[1].base

        def parameter(group: Group, mask: Mask) -> None:
            value = group.machine.parameters[name]
            if value.dtype.itemsize * 8 != width:
                raise UnknownTextError(f"{it}: the parameter has {value.dtype.itemsize} bytes")
            puts[0](group, signed(np.asarray(value)), mask)

        return parameter
    where = _space(it)
    address = _addresses(kernel, it.operands[1], where)

    def step(group: Group, mask: Mask) -> None:
        which, lanes = group.lanes(it, mask)
        found = group.machine.memory.load(lanes, address(group)[which], width // 8, len(puts), where)
        for i, put in enumerate(puts):
            put(group, spread(signed(found[:, i]), which, group), mask)

    return step


def spread(values: np.ndarray, which: Which, group: Group) -> np.ndarray:
    """Return an element per lane, of the values of some lanes. The others get 0."""
    if isinstance(which, slice):
        return values
    found = np.zeros(group.count, values.dtype)
    found[which] = values
    return found


def store(kernel: Kernel, it: Instruction) -> Step:
    """``st``: one to four elements that are next to each other."""
    where, kind, pieces = _space(it), f"b{width_of(it.parts[-1])}", it.operands[1]
    sources = [source(kernel, each, kind) for each in (pieces if isinstance(pieces, tuple) else (pieces,))]
    address = _addresses(kernel, it.operands[0], where)

    def step(group: Group, mask: Mask) -> None:
        which, lanes = group.lanes(it, mask)
        values = np.array([every(get(group), group)[which] for get in sources]).T
        group.machine.memory.store(lanes, address(group)[which], values, where)

    return step


def update(kernel: Kernel, it: Instruction) -> Step:
    """``atom`` and ``red``: an atomic operation, relaxed by default. What was there before must not be used."""
    where, (operation, kind) = _space(it), it.parts[-2:]
    *names, place, value = it.operands
    if any(name in _names(each.operands) for name in names for each in kernel.instructions() if each is not it):
        raise ValueError(names)
    get, address = source(kernel, value, kind), _addresses(kernel, place, where)

    def step(group: Group, mask: Mask) -> None:
        which, lanes = group.lanes(it, mask)
        values = every(get(group), group)[which]
        group.machine.memory.update(lanes, address(group)[which], values, operation, where)

    return step


def _names(operands: tuple[Operand, ...]) -> Iterator[str]:
    for each in operands:
        if isinstance(each, tuple):
            yield from _names(tuple(each))
        elif isinstance(each, str):
            yield each


def _whole_warps(group: Group, mask: Mask, it: Instruction, members: Any = WHOLE_WARP) -> None:
    """Check that an instruction of a warp names all lanes, and that all are at this instruction."""
    if mask is None and np.ndim(members) == 0 and members == WHOLE_WARP:
        return
    there = np.ones(group.count, bool) if mask is None else mask
    warps = there.reshape(-1, WARP)
    named = np.broadcast_to(members, group.count)[there]
    if (named != WHOLE_WARP).any() or (warps.any(axis=1) != warps.all(axis=1)).any():
        raise ViolationError("warp", f"{it}: not all lanes of a warp")


def shuffle(kernel: Kernel, it: Instruction) -> Step:
    """``shfl``: a value of another lane of the warp, or its own where there is no such lane."""
    _, sync, mode, kind = it.parts
    name, *operands, clamp, members = it.operands
    if (sync, kind) != ("sync", "b32") or clamp != {"up": 0, "bfly": 31, "idx": 31}[mode]:
        raise ValueError(mode)
    get, distance, named = (source(kernel, operand, "b32") for operand in (*operands, members))
    put = target(kernel, name)

    def step(group: Group, mask: Mask) -> None:
        _whole_warps(group, mask, it, named(group))
        numbers = np.arange(group.count)
        own, by = numbers & 31, distance(group) & 31
        lane = {"up": np.where(own >= by, own - by, own), "bfly": own ^ by, "idx": by}[mode]
        put(group, every(get(group), group)[numbers - own + lane], mask)

    return step


def reduce(kernel: Kernel, it: Instruction) -> Step:
    """``redux``: the sum, least or largest of a warp, in each of its lanes."""
    _, sync, operation, kind = it.parts
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[operation]
    name, value, named = it.operands
    get, members, put = source(kernel, value, kind), source(kernel, named, "b32"), target(kernel, name)
    if sync != "sync":
        raise ValueError(sync)

    def step(group: Group, mask: Mask) -> None:
        _whole_warps(group, mask, it, members(group))
        values = every(get(group), group).reshape(-1, WARP)
        put(group, np.repeat(function.reduce(values, axis=1, dtype=values.dtype), WARP), mask)

    return step


def load_matrices(kernel: Kernel, it: Instruction) -> Step:
    """``ldmatrix``: 8 rows of 16 bytes per matrix. Lane 8 i + r has the address of row r of matrix i.

    Lane t gets bytes 4 (t mod 4) and on of row t / 4, of each matrix.
    """
    if it.name != "ldmatrix.sync.aligned.m8n8.x4.shared.b16":
        raise ValueError(it.name)
    address, puts = _addresses(kernel, it.operands[1], "shared"), [target(kernel, name) for name in it.operands[0]]

    def step(group: Group, mask: Mask) -> None:
        _whole_warps(group, mask, it)
        which, lanes = group.lanes(it, mask)
        numbers, rows = np.arange(group.count)[which], address(group)
        thread = numbers % WARP
        lanes.fail("alignment", rows[which] % 16 != 0, "a row of 16 bytes")
        for i, put in enumerate(puts):
            place = rows[numbers - thread + 8 * i + thread // 4] + (4 * (thread % 4)).astype(np.uint32)
            found = group.machine.memory.load(lanes, place, 4, 1, "shared")[:, 0]
            put(group, spread(found, which, group), mask)

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
