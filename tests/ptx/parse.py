"""PTX text to blocks of instructions. What is not known raises an error: nothing is skipped but debug information."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

EXIT = -1  # the block after the last
SKIPPED = (".loc", ".file", ".version", ".target", ".address_size", ".extern .shared .align 16 .b8 global_smem[];")
WIDTHS = {"pred": 1, "b16": 16, "b32": 32, "b64": 64}
ENTRY = re.compile(r"\.visible \.entry (\w+)\s*\((.*?)\)\s*\.reqntid (\d+)[^{]*\{", re.DOTALL)
PARAMETER = re.compile(r"\.param \.(\w+)(?: \.ptr \.global \.align \d+)? (\w+)")
REGISTERS = re.compile(r"\.reg \.(\w+)\s+(%\w+)<(\d+)>")
USED_BYTES = re.compile(r'\.pragma "used_bytes_mask (0x[0-9a-f]+)"')
STATEMENT = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
OPERANDS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")


class UnknownTextError(Exception):
    """The text holds something that this executor does not know."""


class Address(NamedTuple):
    """``[base + offset]``. The base is a register, ``global_smem`` or a parameter."""

    base: str
    offset: int


Operand = str | int | Address | tuple["Operand", ...]


@dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction. ``guard`` is a predicate and the value that it must have."""

    name: str
    operands: tuple[Operand, ...]
    guard: tuple[str, bool] | None
    line: int
    text: str
    used_bytes: int | None = None  # a bit for each byte of a load whose value matters

    @cached_property
    def parts(self) -> list[str]:
        """The opcode, its modifiers and types. A state space has no ``::cta``, which is the default."""
        return self.name.replace("::cta", "").split(".")

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


@dataclass(eq=False)
class Kernel:
    """A parsed entry. Only the last instruction of a block may be a branch or a return."""

    name: str
    parameters: list[str]
    threads: int
    blocks: list[list[Instruction]] = field(default_factory=lambda: [[]])
    labels: dict[str, int] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    joins: list[int] = field(default_factory=list)  # by block: where lanes that part at its end meet again

    def instructions(self) -> Iterator[Instruction]:
        """Yield all instructions, in the order of the text."""
        for block in self.blocks:
            yield from block


def parse(text: str) -> Kernel:
    """Parse a text with one entry."""
    text = re.sub(r"//[^\n]*", "", text)
    head = ENTRY.search(text)
    if head is None:
        raise UnknownTextError("no entry with .reqntid")
    for line in filter(None, map(str.strip, text[: head.start()].split("\n"))):
        if not line.startswith(SKIPPED):
            raise UnknownTextError(line)
    kernel = Kernel(head[1], [], int(head[3]))
    for piece in filter(None, map(str.strip, head[2].split(","))):
        found = PARAMETER.fullmatch(piece)
        if found is None:
            raise UnknownTextError(piece)
        kernel.parameters.append(found[2])
    used = None
    for number, statement in _statements(text, head.end()):
        used = _add(kernel, number, statement, used)
    kernel.joins = _joins(kernel)
    return kernel


def _statements(text: str, start: int) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each label and statement of the body."""
    first = text[:start].count("\n") + 1
    held, begun = "", first
    for number, line in enumerate(map(str.strip, text[start:].split("\n")), first):
        if not held and line == "}":
            return
        if not held and (not line or line.startswith(SKIPPED)):
            continue
        if not held and line.endswith(":"):
            yield number, line
            continue
        begun = begun if held else number
        *whole, held = f"{held} {line}".split(";")
        for statement in whole:
            yield begun, statement.strip()
        held = held.strip()
    raise UnknownTextError("the body has no end")


def _add(kernel: Kernel, line: int, text: str, used: int | None) -> int | None:
    """Add a label or statement. Return the bytes that the next load uses, if this is the pragma that says so."""
    if text.endswith(":"):
        if kernel.blocks[-1]:
            kernel.blocks.append([])
        kernel.labels[text[:-1]] = len(kernel.blocks) - 1
        return used
    if found := REGISTERS.fullmatch(text):
        if found[1] not in WIDTHS:
            raise UnknownTextError(f"line {line}: {text}")
        kernel.widths |= {f"{found[2]}{i}": WIDTHS[found[1]] for i in range(int(found[3]))}
        return None
    if found := USED_BYTES.fullmatch(text):
        return int(found[1], 16)
    found = STATEMENT.fullmatch(text)
    if found is None:
        raise UnknownTextError(f"line {line}: {text}")
    guard = (found[2], not found[1]) if found[2] else None
    operands = tuple(_operand(piece) for piece in OPERANDS.findall(found[4]))
    kernel.blocks[-1].append(Instruction(found[3], operands, guard, line, text, used))
    if found[3] == "ret" and guard:
        raise UnknownTextError(f"line {line}: {text}")
    if kernel.blocks[-1][-1].parts[0] in {"bra", "ret"}:
        kernel.blocks.append([])
    return None


def _operand(text: str) -> Operand:
    """Return a name, a number, an address, or a vector of operands. A float is the number of its bits."""
    text = text.strip()
    if text[0] == "{":
        return tuple(_operand(piece) for piece in text[1:-1].split(","))
    if text[0] == "[":
        base, _, offset = text[1:-1].partition("+")
        return Address(base.strip(), int(offset or "0", 0))
    if found := re.fullmatch(r"0[fd]([0-9A-F]+)", text):
        return int(found[1], 16)
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
        return int(text.rstrip("U"), 0)
    return text


def _joins(kernel: Kernel) -> list[int]:
    """Return the immediate post-dominator of each block: the first block that every path from its end passes."""
    count = len(kernel.blocks)
    after = [_followers(kernel, i) for i in range(count)]
    every = {*range(count), EXIT}
    found = dict.fromkeys(range(count), every) | {EXIT: {EXIT}}
    changed = True
    while changed:
        changed = False
        for i in reversed(range(count)):
            now = {i} | set.intersection(*(found[j] for j in after[i]))
            changed |= now != found[i]
            found[i] = now
    # Of the blocks that all paths pass, the first has all others behind it.
    return [next((j for j in found[i] - {i} if found[j] == found[i] - {i}), EXIT) for i in range(count)]


def _followers(kernel: Kernel, block: int) -> set[int]:
    following = {block + 1 if block + 1 < len(kernel.blocks) else EXIT}
    last = kernel.blocks[block][-1] if kernel.blocks[block] else None
    if last is None or last.parts[0] not in {"bra", "ret"}:
        return following
    target = EXIT if last.parts[0] == "ret" else kernel.labels[str(last.operands[0])]
    return {target} | (following if last.guard else set())
