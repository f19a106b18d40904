"""Every kernel in the configurations that are launched: the cases that compiled_kernels.py compiles."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import triton
import triton.language as tl

from tritoncomm_kernels import (
    adam_triton,
    dense_bits,
    dense_bits_triton,
    entries_triton,
    rebalance_triton,
    sections_triton,
    select_triton,
    top_k_triton,
)
from tritoncomm_kernels.adam import DISAGREES, FINE, LARGEST_SQUARE
from tritoncomm_kernels.bits_triton import divided, key_of
from tritoncomm_kernels.select import TILE
from tritoncomm_kernels.select_triton import add_tile, write_marks

GRADIENTS = ("fp32", "bf16", "fp16")

# All other pointers are to int32, and all other numbers are int32.
FLOATS = ("scale", "slack", "divisor", "cover", "half", "limit")
FLOAT_POINTERS = (
    *("residual_ptr", "gradient_ptr", "divisor_ptr", "out_ptr", "threshold_ptr", "values_ptr"),
    *(
        "out_values_ptr",
        "candidates_ptr",
        "kept_values_ptr",
        "sums_ptr",
        "parameter_ptr",
        "first_ptr",
        "second_ptr",
        "maximum_ptr",
    ),
    *("tables_ptr", "param_rms_ptr", "menu_ptr", "levels_ptr", "parts_ptr"),
)
TYPES = {
    **dict.fromkeys(FLOATS, "fp32"),
    **dict.fromkeys(FLOAT_POINTERS, "*fp32"),
    **dict.fromkeys(("found_ptr", "taken_ptr", "total_ptr", "table_ptr", "places_ptr"), "*i64"),
    **dict.fromkeys(("extents_ptr", "kept_ptr"), "*i64"),
    "control_ptr": "*fp64",
}

# What both kernels of Adam's step are launched with.
ADAM = {
    "AMSGRAD": False, "MAXIMIZE": False, "POWERS": 31, "DISAGREES": DISAGREES, "BLOCK": adam_triton.BLOCK,
}  # fmt: skip
ADAM_OPTIONS = {"AMSGRAD": True, "MAXIMIZE": True}


@dataclass(frozen=True)
class Case:
    """One kernel as it is launched: its constants, warps, and types that differ from ``TYPES``.

    ``elements`` is how many elements a program handles; ``budget`` is the most instructions per element
    on sm_90, counted without the code for partial tiles.
    """

    name: str
    kernel: Any
    constants: dict[str, Any]
    warps: int
    types: dict[str, str] = field(default_factory=dict)
    elements: int = 0
    aligned: bool = True
    budget: float | None = None


@triton.jit
def whole_mark(
    residual_ptr, gradient_ptr, divisor_ptr, out_ptr, threshold_ptr, span_ptr, bits_ptr, counts_ptr, n,
    TILE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """``mark`` without the code for a partial tile."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    total = add_tile(residual_ptr, gradient_ptr, out_ptr, at, n, ADD=ADD, WHOLE=True)
    keys = key_of(divided(total, divisor_ptr, at, None))
    write_marks(keys, at, threshold_ptr, span_ptr, bits_ptr, counts_ptr, TILE, False, False)


def streaming(gradient: str) -> list[Case]:
    """Return the cases of passes over the whole vector."""
    size = {"warps": select_triton.WARPS, "elements": TILE, "types": {"gradient_ptr": f"*{gradient}"}}
    none = {"divisor_ptr": None}
    choice = {"TILE": TILE, "ADD": True, "SPAN": False, "IS_KEY": False}
    keyed = size | {"types": size["types"] | {"threshold_ptr": "*i32"}}
    return [
        Case(f"mark {gradient}", select_triton.mark_kernel, choice | none, **size),
        Case(f"mark {gradient}, whole", whole_mark, {"TILE": TILE, "ADD": True} | none, **size, budget=22),
        Case(f"mark {gradient}, key", select_triton.mark_kernel, choice | {"IS_KEY": True} | none, **keyed),
        Case(f"mark {gradient}, divided, key", select_triton.mark_kernel, choice | {"IS_KEY": True}, **keyed),
        Case(f"mark {gradient}, divided, whole", whole_mark, {"TILE": TILE, "ADD": True}, **size, budget=22),
    ]


def _without(constants: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in constants.items() if key != name}


def selecting() -> list[Case]:
    """Return the cases that mark an existing vector, and that count and expand bits: of marks, unions and sections."""
    own, words, group = select_triton, max(select_triton.WORDS, TILE // 32), select_triton.GROUP
    none = {"divisor_ptr": None}
    choice = {"TILE": TILE, "ADD": False, "SPAN": False, "IS_KEY": True} | none
    turn = {"TILES": words * 32 // TILE, "WORDS": words, "CHUNK": own.CHUNK, "SUMMED": False, "ROWS": False}
    turn |= {"ranks_ptr": None} | none
    size = {"warps": own.EXPAND_WARPS, "elements": words * 32}
    size_of_tile = {"warps": own.WARPS, "elements": TILE}
    key = size_of_tile | {"types": {"threshold_ptr": "*i32"}}
    groups = {"warps": own.GROUP_WARPS, "types": {"found_ptr": "*i32"}}
    union = turn | {"TILES": 1, "WORDS": group, "values_ptr": None, "out_values_ptr": None}
    rows = union | {"ROWS": True}
    del union["ranks_ptr"]
    return [
        Case("mark only", own.mark_kernel, choice, **key),
        Case("mark only, in a span", own.mark_kernel, choice | {"SPAN": True, "IS_KEY": False}, **size_of_tile),
        Case("mark only, divided", own.mark_kernel, _without(choice, "divisor_ptr"), **key),
        Case("mark only, whole", whole_mark, {"TILE": TILE, "ADD": False} | none, own.WARPS, {}, TILE, 22),
        Case("expand", own.expand_kernel, turn, **size, budget=5),
        Case("expand, divided", own.expand_kernel, _without(turn, "divisor_ptr"), **size),
        Case("expand, summed", own.expand_kernel, turn | {"SUMMED": True}, **size),
        Case("expand, unaligned", own.expand_kernel, turn, **size, aligned=False),
        Case("expand a union", own.expand_kernel, union | {"SUMMED": True}, **groups),
        Case("expand rows", own.expand_kernel, rows, **groups),
        Case("count bits", own.count_bits_kernel, {"WORDS": group}, own.GROUP_WARPS),
        Case("mark, unaligned", own.mark_kernel, choice | {"ADD": True}, **key, aligned=False),
    ]


def exact() -> list[Case]:
    """Return the cases of the radix select: of segments, of their named entries, and of candidates."""
    radix = top_k_triton
    size = {"warps": radix.WARPS, "elements": radix.BLOCK}
    block = {"BLOCK": radix.BLOCK}
    emit = block | {"PROGRAMS": radix.PROGRAMS}
    none = {"divisor_ptr": None}
    segments = dict.fromkeys(("candidates_ptr", "found_ptr", "guess_ptr")) | none
    whole = dict.fromkeys(("bounds_ptr", "budgets_ptr"))
    listed = emit | segments | dict.fromkeys(("taken_ptr", "next_ptr"))
    passed = {"types": {"guess_ptr": "*i32"}}
    return [
        Case("segment histogram", radix.histogram_kernel, block | segments, **size),
        Case("segment count", radix.count_kernel, block | segments, **size),
        Case("segment emit", radix.emit_kernel, listed, **size),
        Case("segment emit, positions", radix.emit_kernel, listed | {"indices_ptr": None}, **size),
        *(
            Case(f"{name} of {source}", kernel, own | given, **size, **types)
            for name, kernel, own in (
                ("histogram", radix.histogram_kernel, block),
                ("count", radix.count_kernel, block),
            )
            for source, given, types in (
                ("candidates", whole | none, passed),
                ("divided candidates", whole, passed),
                ("a vector", whole | segments, {}),
            )
        ),
        Case("emit of candidates", radix.emit_kernel, emit | whole | none, **size, **passed),
        Case("emit of divided candidates", radix.emit_kernel, emit | whole, **size, **passed),
        Case("emit of a vector", radix.emit_kernel, listed | whole | {"indices_ptr": None}, **size),
    ]


def rounded_mean() -> list[Case]:
    """Return the cases of a mean whose values travel in 1 to 8 bits."""
    mean, words = dense_bits_triton, {"words_ptr": "*i32", "messages_ptr": "*i32"}
    types = {**words, "halves_ptr": "*i16", "message_halves_ptr": "*i16"}
    size = {"warps": mean.WARPS, "types": types, "elements": mean.TILE * dense_bits.BLOCK, "aligned": False}
    kernels = {
        "round parts": mean.round_parts_kernel,
        "round mean": mean.round_mean_kernel,
        "read parts": mean.read_parts_kernel,
    }
    return [
        Case(f"{name}, {bits} bits", it, {"BITS": bits, "TILE": mean.TILE}, **size)
        for name, it in kernels.items()
        for bits in (1, 2, 4, 8)
    ]


def listing() -> list[Case]:
    """Return the cases of lists of entries: compaction, unions, sums of rows, and single entries."""
    own = entries_triton
    flat = {"warps": own.FLAT_WARPS, "elements": own.FLAT}
    moved = {"warps": own.WARPS, "elements": own.MOVE, "aligned": False}
    dense = {"TILE": own.DENSE_TILE, "UNION": False}
    union = {"TILE": own.UNION_TILE, "UNION": True}
    none = {"bits_ptr": None, "ranks_ptr": None}
    place = {"ADD": False, "CLEAR": False, "BLOCK": own.FLAT}
    return [
        Case("mark indices", own.mark_indices_kernel, {"BLOCK": own.FLAT}, **flat),
        Case("count used", own.count_used_kernel, {"BLOCK": own.MOVE}, **moved),
        Case("join rows", own.join_rows_kernel, {"BLOCK": own.MOVE, "CHUNK": select_triton.CHUNK}, **moved),
        Case("row borders", own.row_borders_kernel, dense | {"BORDERS": own.BORDERS, "union_ptr": None}, 1),
        Case("row borders, union", own.row_borders_kernel, union | {"BORDERS": own.BORDERS}, 1),
        Case("add rows", own.add_rows_kernel, dense | none | {"ENTRIES": own.ENTRIES}, own.WARPS),
        Case("add rows, union", own.add_rows_kernel, union | {"ENTRIES": own.ENTRIES}, own.WARPS),
        Case("place", own.place_kernel, place, **flat),
        Case("place, add", own.place_kernel, place | {"ADD": True}, **flat),
        Case("place, clear", own.place_kernel, place | {"CLEAR": True, "values_ptr": None}, **flat),
        Case("pick values", own.pick_values_kernel, {"BLOCK": own.FLAT}, **flat),
    ]


def packing() -> list[Case]:
    """Return the cases of packed sections: fp32, and coded values with short, long and no low bits."""
    own = sections_triton
    block, turn = {"BLOCK": own.BLOCK}, {"BLOCK": own.BLOCK, "CHUNK": select_triton.CHUNK}
    size = {"warps": own.WARPS, "elements": own.BLOCK, "aligned": False}
    kept = {"KEPT": -65536}
    high = {"BLOCK": own.HIGH_WORDS, "CHUNK": select_triton.CHUNK}
    both: list[Case] = []
    for low, bits in ((6, 32), (6, 8), (6, 4), (6, 1), (6, 0), (30, 32), (30, 8), (0, 4)):
        shape, without = _section(low, bits)
        name, joined = f"{low} + {bits} bits", shape | without | {"PLAIN": low == 0}
        both += [
            Case(f"planes of rows, {name}", own.planes_rows_kernel, shape | without | turn, **size),
            Case(f"join sections, {name}", own.join_sections_kernel, joined, **size),
        ]
    return [
        *both,
        Case("row extents", own.row_extents_kernel, block, **size),
        Case("drop rows", own.drop_rows_kernel, kept | block, **size),
        *(
            Case(
                f"choose rows, {bits} bits",
                own.choose_rows_kernel,
                kept | {"TABLES": 5, "HALVINGS": bits - 1} | turn,
                own.CHOOSE_WARPS,
            )
            for bits in (1, 4, 8)
        ),
        *(
            Case(
                f"high of rows, {low}",
                own.high_rows_kernel,
                high | {"LOW_BITS": low, "PLAIN": low == 0},
                own.HIGH_WARPS,
                aligned=False,
            )
            for low in (0, 6)
        ),
        *(
            Case(f"refuse rows, {tables} tables", own.refuse_rows_kernel, block | {"TABLES": tables}, **size)
            for tables in (5, 0)
        ),
    ]


def _section(low: int, bits: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the constants of a section, and what is left out without quantized values."""
    planes = low + (bits if bits < 32 else 0)
    coded = 0 < bits < 32
    shape = {"LOW_BITS": low, "BITS": bits, "PLANES": planes, "TABLES": 5 * coded, "BLOCK": sections_triton.BLOCK}
    return shape, {} if coded else {"menu_ptr": None}


def rebalancing() -> list[Case]:
    """Return the cases of ExDyna's partitions."""
    return [
        Case(
            f"rebalance {rule} {partitions}",
            rebalance_triton.rebalance_kernel,
            {"PARTITIONS": partitions, "PREFIX": rule == "prefix"},
            rebalance_triton.warps(partitions),
        )
        for partitions in (2, 64, 256, 1024)
        for rule in ("paper", "prefix")
    ]


def adam() -> list[Case]:
    """Return the cases of Adam's step: of a list, and of a whole vector."""
    plain = ADAM | {"IMAGES": False}
    options = plain | ADAM_OPTIONS
    images, whole = {"IMAGES": True}, {"indices_ptr": None}
    return [
        Case(f"{name}{suffix}", kernel, chosen | own | {"DTYPE": dtype}, adam_triton.WARPS, {}, adam_triton.BLOCK)
        for name, kernel, own in (
            ("adam", adam_triton.adam_kernel, {"FINE": FINE}),
            ("adam's sums", adam_triton.adam_sums_kernel, {"LARGEST_SQUARE": LARGEST_SQUARE}),
        )
        for suffix, chosen, dtype in (
            ("", plain, tl.float32),
            (", all options", options, tl.float32),
            (", bf16", plain, tl.bfloat16),
            (", fp16", plain, tl.float16),
            (", images, all options", options | images, tl.float32),
            (", images", plain | images, tl.float32),
            (", whole vector", plain | whole, tl.float32),
            (", whole vector, all options", options | whole, tl.float32),
            (", whole vector, bf16", plain | whole, tl.bfloat16),
            (", images, whole vector", options | images | whole, tl.float32),
        )
    ]


def cases() -> list[Case]:
    """Return all cases."""
    return [
        *(c for g in GRADIENTS for c in streaming(g)),
        *selecting(),
        *exact(),
        *listing(),
        *packing(),
        *rounded_mean(),
        *rebalancing(),
        *adam(),
    ]


def launched_cases() -> list[Case]:
    """Return the cases without those that end in "whole", which are reduced to count instructions."""
    return [case for case in cases() if not case.name.endswith(", whole")]


@cache
def find(name: str) -> Case:
    """Return the case of that name."""
    return next(case for case in cases() if case.name == name)
