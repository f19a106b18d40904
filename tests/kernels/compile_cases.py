"""Every kernel in the configurations that are launched: the cases that compiled_kernels.py compiles."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import triton
import triton.language as tl

from tritoncomm_kernels import (
    accumulate_triton,
    adam_flat_triton,
    adam_triton,
    block_float,
    block_float_triton,
    expand_triton,
    mark_triton,
    midrise,
    midrise_triton,
    padded_triton,
    quantize_triton,
    rebalance_triton,
    rms_triton,
    scatter_triton,
    section_rows_triton,
    sections_triton,
    threshold_triton,
)
from tritoncomm_kernels.accumulate_triton import add_tile
from tritoncomm_kernels.adam import DISAGREES, FINE, LARGEST_SQUARE
from tritoncomm_kernels.bits_triton import key_of
from tritoncomm_kernels.mark_triton import write_marks

GRADIENTS = ("fp32", "bf16", "fp16")
TILE = accumulate_triton.TILE

# All other pointers are to int32, and all other numbers are int32.
FLOATS = ("scale", "slack", "divisor", "cover", "half", "limit")
FLOAT_POINTERS = (
    *("residual_ptr", "gradient_ptr", "out_ptr", "threshold_ptr", "values_ptr"),
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
    *("tables_ptr", "param_rms_ptr", "menu_ptr", "parts_ptr"),
)
TYPES = {
    **dict.fromkeys(FLOATS, "fp32"),
    **dict.fromkeys(FLOAT_POINTERS, "*fp32"),
    **dict.fromkeys(("found_ptr", "taken_ptr", "count_ptr", "total_ptr", "table_ptr", "places_ptr"), "*i64"),
    "control_ptr": "*fp64",
}

# Adam's step, and the sums that it needs, as the kernels are launched.
ADAM = {
    "AMSGRAD": False, "MAXIMIZE": False, "POWERS": 31, "DISAGREES": DISAGREES, "BLOCK": adam_triton.BLOCK,
    "COMPACT": False,
}  # fmt: skip
ADAM_OPTIONS = {"AMSGRAD": True, "MAXIMIZE": True}
STEP, SUMS = {"FINE": FINE}, {"LARGEST_SQUARE": LARGEST_SQUARE}


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
def whole_add(residual_ptr, gradient_ptr, out_ptr, n, TILE: tl.constexpr):
    """``accumulate`` without the code for a partial tile."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    add_tile(residual_ptr, gradient_ptr, out_ptr, at, n, ADD=True, WHOLE=True)


@triton.jit
def whole_mark(
    residual_ptr, gradient_ptr, out_ptr, threshold_ptr, span_ptr, bits_ptr, counts_ptr, flags_ptr, n,
    TILE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """``mark`` without the code for a partial tile."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    keys = key_of(add_tile(residual_ptr, gradient_ptr, out_ptr, at, n, ADD=ADD, WHOLE=True))
    write_marks(keys, at, threshold_ptr, span_ptr, bits_ptr, counts_ptr, flags_ptr, TILE, False, False)


def streaming(gradient: str) -> list[Case]:
    """Return the cases of passes over the whole vector."""
    size = {"warps": accumulate_triton.WARPS, "elements": TILE, "types": {"gradient_ptr": f"*{gradient}"}}
    choice = {"TILE": TILE, "ADD": True, "SPAN": False, "IS_KEY": False}
    keyed = size | {"types": size["types"] | {"threshold_ptr": "*i32"}}
    return [
        Case(f"accumulate {gradient}", accumulate_triton.accumulate_kernel, {"TILE": TILE}, **size),
        Case(f"accumulate {gradient}, whole", whole_add, {"TILE": TILE}, **size, budget=8),
        Case(f"mark {gradient}", mark_triton.mark_kernel, choice, **size),
        Case(f"mark {gradient}, whole", whole_mark, {"TILE": TILE, "ADD": True}, **size, budget=22),
        Case(f"mark {gradient}, key", mark_triton.mark_kernel, choice | {"IS_KEY": True}, **keyed),
    ]


def selecting() -> list[Case]:
    """Return the cases that mark an existing vector and compact it."""
    words = expand_triton.WORDS
    choice = {"TILE": TILE, "ADD": False, "SPAN": False, "IS_KEY": True}
    turn = {"TILES": words * 32 // TILE, "WORDS": words, "CHUNK": expand_triton.CHUNK, "OFFSETS": False}
    size = {"warps": expand_triton.WARPS, "elements": words * 32}
    size_of_tile = {"warps": accumulate_triton.WARPS, "elements": TILE}
    key = size_of_tile | {"types": {"threshold_ptr": "*i32"}}
    return [
        Case("mark only", mark_triton.mark_kernel, choice, **key),
        Case("mark only, in a span", mark_triton.mark_kernel, choice | {"SPAN": True, "IS_KEY": False}, **size_of_tile),
        Case("mark only, whole", whole_mark, {"TILE": TILE, "ADD": False}, accumulate_triton.WARPS, {}, TILE, 22),
        Case("expand", expand_triton.expand_kernel, turn, **size, budget=5),
        Case("expand, scanned", expand_triton.expand_kernel, turn | {"OFFSETS": True}, **size),
        Case("expand, unaligned", expand_triton.expand_kernel, turn, **size, aligned=False),
        Case("mark, unaligned", mark_triton.mark_kernel, choice | {"ADD": True}, **key, aligned=False),
        Case(
            "scan counts",
            expand_triton.scan_counts_kernel,
            {"CHUNK": expand_triton.SCAN_CHUNK},
            expand_triton.SCAN_WARPS,
        ),
    ]


def exact() -> list[Case]:
    """Return the cases of the radix select."""
    radix = threshold_triton
    block = {"BLOCK": radix.BLOCK}
    size = {"warps": radix.WARPS, "elements": radix.BLOCK}
    emit = block | {"PROGRAMS": radix.PROGRAMS}
    digits = [
        Case(f"top-k histogram {shift}", radix.histogram_kernel, block | {"SHIFT": shift, "BITS": bits}, **size)
        for shift, bits in radix.DIGITS
    ]
    guess = {"guess_ptr": "*i32"}
    return [
        Case("top-k begin", radix.begin_kernel, {"WHOLE_ONLY": False}, 1, guess),
        Case("top-k begin without candidates", radix.begin_kernel, {"WHOLE_ONLY": True}, 1, guess),
        *digits,
        Case("top-k pick 23", radix.pick_kernel, {"SHIFT": 23, "FIRST": True}, 1),
        *(Case(f"top-k pick {shift}", radix.pick_kernel, {"SHIFT": shift, "FIRST": False}, 1) for shift in (15, 7, 0)),
        Case("top-k count", radix.count_kernel, block, **size),
        Case("top-k emit", radix.emit_kernel, emit, **size, types=guess),
    ]


def scattering() -> list[Case]:
    """Return the cases of unions."""
    scatter = scatter_triton
    block = {"warps": 4, "elements": scatter.BLOCK}
    words = {"WORDS": scatter.WORDS}
    union = {"out_ptr": "*i32"}
    return [
        Case("mark indices", scatter.mark_indices_kernel, {"COUNT": True, "BLOCK": scatter.BLOCK}, **block),
        Case(
            "mark indices of rows",
            scatter.mark_indices_kernel,
            {"COUNT": False, "BLOCK": scatter.BLOCK, "invalid_ptr": None},
            **block,
        ),
        Case("count words", scatter.count_words_kernel, words, scatter.WARPS),
        Case("union", scatter.union_kernel, words, scatter.WARPS, union),
        Case("add list", scatter.add_list_kernel, {"BLOCK": scatter.BLOCK}, **block),
    ]


def quantized_mean() -> list[Case]:
    """Return the cases of a mean whose values travel in 8 or 4 bits."""
    mean, types = block_float_triton, {"bytes_ptr": "*i8", "messages_ptr": "*i8", "left_ptr": "*fp32"}
    size = {"warps": mean.WARPS, "types": types, "elements": block_float.BLOCK, "aligned": False}
    kernels = {
        "quantize parts": mean.quantize_parts_kernel,
        "quantize mean": mean.quantize_mean_kernel,
        "dequantize parts": mean.dequantize_parts_kernel,
    }
    return [Case(f"{name}, {bits} bits", it, {"BITS": bits}, **size) for name, it in kernels.items() for bits in (8, 4)]


def midrise_mean() -> list[Case]:
    """Return the cases of a mean whose values travel in 1 to 8 bits, without a level for zero."""
    mean, words = midrise_triton, {"words_ptr": "*i32", "messages_ptr": "*i32"}
    types = {**words, "halves_ptr": "*i16", "message_halves_ptr": "*i16"}
    size = {"warps": mean.WARPS, "types": types, "elements": mean.TILE * midrise.BLOCK, "aligned": False}
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


def padding() -> list[Case]:
    """Return the cases of lists with padding: top-k per segment, compaction, sums of rows, and single entries."""
    padded = padded_triton
    size = {"warps": padded.WARPS, "elements": padded.BLOCK}
    flat = {"warps": padded.FLAT_WARPS, "elements": padded.FLAT}
    block = {"BLOCK": padded.BLOCK}
    emit = block | {"PROGRAMS": padded.PROGRAMS}
    moved = {"warps": padded.WARPS, "elements": padded.MOVE, "aligned": False}
    dense = {"TILE": padded.DENSE_TILE, "UNION": False}
    union = {"TILE": padded.UNION_TILE, "UNION": True}
    none = {"bits_ptr": None, "ranks_ptr": None}
    place = {"ADD": False, "CLEAR": False, "BLOCK": padded.FLAT}
    return [
        Case("segment histogram", padded.segment_histogram_kernel, block, **size),
        Case("segment count", padded.segment_count_kernel, block, **size),
        Case("segment emit", padded.segment_emit_kernel, emit | {"NAMED": True}, **size),
        Case(
            "segment emit, positions",
            padded.segment_emit_kernel,
            emit | {"NAMED": False, "indices_ptr": None},
            **size,
        ),
        Case("count used", padded.count_used_kernel, {"BLOCK": padded.MOVE}, **moved),
        Case("join rows", padded.join_rows_kernel, {"BLOCK": padded.MOVE, "CHUNK": expand_triton.CHUNK}, **moved),
        Case("row borders", padded.row_borders_kernel, dense | {"BORDERS": padded.BORDERS, "union_ptr": None}, 1),
        Case("row borders, union", padded.row_borders_kernel, union | {"BORDERS": padded.BORDERS}, 1),
        Case("add rows", padded.add_rows_kernel, dense | none | {"ENTRIES": padded.ENTRIES}, padded.WARPS),
        Case("add rows, union", padded.add_rows_kernel, union | {"ENTRIES": padded.ENTRIES}, padded.WARPS),
        Case("place", padded.place_kernel, place, **flat),
        Case("place, add", padded.place_kernel, place | {"ADD": True}, **flat),
        Case("place, clear", padded.place_kernel, place | {"CLEAR": True, "values_ptr": None}, **flat),
        Case("pick values", padded.pick_values_kernel, {"BLOCK": padded.FLAT}, **flat),
    ]


def root_mean_squares() -> list[Case]:
    """Return the cases of root mean squares of many tensors."""
    size = {"warps": rms_triton.WARPS, "types": {"table_ptr": "*i64", "found_ptr": "*i64"}}
    types = (("", tl.float32), (", bf16", tl.bfloat16), (", fp16", tl.float16))
    kernels = {"largest of many": rms_triton.largest_kernel, "squares of many": rms_triton.squares_kernel}
    return [
        *(
            Case(f"{name}{suffix}", it, {"DTYPE": dtype, "BLOCK": rms_triton.BLOCK}, **size)
            for name, it in kernels.items()
            for suffix, dtype in types
        ),
        Case("roots", rms_triton.root_kernel, {"ENDS": rms_triton.ENDS}, **size),
    ]


def packing() -> list[Case]:
    """Return the cases of packed sections: fp32, bf16, and coded values with short, long and no low bits."""
    rows = section_rows_triton
    block, turn = {"BLOCK": rows.BLOCK}, {"BLOCK": rows.BLOCK, "CHUNK": expand_triton.CHUNK}
    size = {"warps": rows.WARPS, "elements": rows.BLOCK, "aligned": False}
    kept = {"KEPT": -65536}
    high = {"BLOCK": rows.HIGH_WORDS, "CHUNK": expand_triton.CHUNK}
    words = {"WORDS": rows.WORDS}
    both: list[Case] = []
    for low, bits in ((6, 32), (6, 16), (6, 8), (6, 4), (6, 1), (6, 0), (30, 32), (30, 8), (0, 4)):
        shape, without = _section(low, bits)
        name, joined = f"{low} + {bits} bits", shape | without | {"PLAIN": low == 0}
        both += [
            Case(f"planes of rows, {name}", rows.planes_rows_kernel, shape | without | turn, **size),
            Case(f"join sections, {name}", rows.join_sections_kernel, joined, **size),
        ]
    return [
        *both,
        Case("row extents", rows.row_extents_kernel, block, **size),
        Case("count rows", rows.count_rows_kernel, kept | block, **size),
        Case("keep rows", rows.keep_rows_kernel, kept | turn, **size),
        *(
            Case(
                f"choose rows, {bits} bits",
                rows.choose_rows_kernel,
                kept | {"HALVINGS": bits - 1} | turn,
                quantize_triton.CHOOSE_WARPS,
            )
            for bits in (1, 4, 8)
        ),
        *(
            Case(
                f"high of rows, {low}",
                rows.high_rows_kernel,
                high | {"LOW_BITS": low, "PLAIN": low == 0},
                rows.HIGH_WARPS,
                aligned=False,
            )
            for low in (0, 6)
        ),
        Case("count high", rows.count_high_kernel, words, rows.WARPS),
        Case("positions of rows", rows.position_rows_kernel, words | {"CHUNK": expand_triton.CHUNK}, rows.WARPS),
        Case("refuse rows", rows.refuse_rows_kernel, turn, **size),
    ]


def _section(low: int, bits: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the constants of a section, and what is left out without quantized values."""
    planes = low + (bits if bits < 16 else 0)
    shape = {"LOW_BITS": low, "BITS": bits, "PLANES": planes, "BLOCK": sections_triton.BLOCK}
    return shape, {} if 0 < bits < 16 else {"menu_ptr": None}


def rebalancing() -> list[Case]:
    """Return the cases of ExDyna's partitions."""
    return [
        Case(
            f"rebalance {rule} {partitions}",
            rebalance_triton.rebalance_kernel,
            {"PARTITIONS": partitions, "PREFIX": rule == "prefix", "RATIO": rule == "pair_ratio"},
            rebalance_triton.warps(partitions),
        )
        for partitions in (2, 64, 256, 1024)
        for rule in ("paper", "pair_ratio", "prefix")
    ]


def adam_of_many() -> list[Case]:
    """Return the cases of Adam's step of many tensors."""
    plain = ADAM
    options = plain | ADAM_OPTIONS
    return [
        Case(f"{name}{suffix}", kernel, chosen | own | {"DTYPE": dtype}, adam_triton.WARPS, {}, adam_triton.BLOCK)
        for name, kernel, own in (
            ("adam of many", adam_triton.adam_many_kernel, STEP),
            ("adam's sums of many", adam_triton.sums_many_kernel, SUMS),
        )
        for suffix, chosen, dtype in (
            ("", plain, tl.float32),
            (", all options", options, tl.float32),
            (", compact", plain | {"COMPACT": True}, tl.float32),
            (", compact, all options", options | {"COMPACT": True}, tl.float32),
            (", bf16", plain, tl.bfloat16),
            (", fp16", plain, tl.float16),
        )
    ]


def adam_of_a_list() -> list[Case]:
    """Return the cases of Adam's step of a flat list of entries."""
    plain = ADAM | {"BLOCK": adam_flat_triton.BLOCK}
    plain |= {"COMPACT": True, "IMAGES": False}
    options = plain | ADAM_OPTIONS
    return [
        Case(
            f"{name}{suffix}",
            kernel,
            chosen | own | {"DTYPE": dtype},
            adam_flat_triton.WARPS,
            {"delivered_ptr": f"*{kind}"},
            adam_flat_triton.BLOCK,
        )
        for name, kernel, own in (
            ("adam of a list", adam_flat_triton.adam_flat_kernel, STEP),
            ("adam's sums of a list", adam_flat_triton.sums_flat_kernel, SUMS),
        )
        for suffix, chosen, dtype, kind in (
            ("", plain, tl.float32, "fp32"),
            (", all options", options, tl.float32, "fp32"),
            (", gradients, all options", options | {"COMPACT": False}, tl.float32, "i32"),
            (", bf16", plain, tl.bfloat16, "bf16"),
            (", fp16", plain, tl.float16, "fp16"),
            (", gradients, bf16", plain | {"COMPACT": False}, tl.bfloat16, "i32"),
            (", gradients, fp16", plain | {"COMPACT": False}, tl.float16, "i32"),
            (", images, all options", options | {"IMAGES": True}, tl.float32, "fp32"),
            (", images, gradients", plain | {"IMAGES": True, "COMPACT": False}, tl.float32, "i32"),
        )
    ]


def cases() -> list[Case]:
    """Return all cases."""
    return [
        *(c for g in GRADIENTS for c in streaming(g)),
        *selecting(),
        *exact(),
        *scattering(),
        *padding(),
        *packing(),
        *quantized_mean(),
        *midrise_mean(),
        *root_mean_squares(),
        *rebalancing(),
        *adam_of_many(),
        *adam_of_a_list(),
    ]


def launched_cases() -> list[Case]:
    """Return the cases without those that end in "whole", which are reduced to count instructions."""
    return [case for case in cases() if not case.name.endswith(", whole")]


@cache
def find(name: str) -> Case:
    """Return the case of that name."""
    return next(case for case in cases() if case.name == name)
