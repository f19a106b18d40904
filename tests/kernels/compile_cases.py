"""The launches of every kernel, as training makes them: compiled_kernels.py compiles each for GPUs that are not there.

They are recorded, not run: results hold what the memory held before.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl

import tritoncomm_kernels as kernels
from tritoncomm_kernels import devices, memory, select_triton
from tritoncomm_kernels.bits_triton import divided, key_of
from tritoncomm_kernels.formats import FORMATS, INDICES
from tritoncomm_kernels.section_layout import Layout
from tritoncomm_kernels.sections import read_rows, write_rows
from tritoncomm_kernels.select import TILE, TILES_SUMMED_IN_PLACE, Sum
from tritoncomm_kernels.select_triton import add_tile, write_marks

TYPES = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}
TYPES |= {torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """One kernel as it is launched: its constants, warps, the types of its arguments, and the pointers to 16 bytes."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    warps: int
    types: dict[str, str]
    aligned: tuple[str, ...]


@triton.jit
def whole_mark(
    residual_ptr, gradient_ptr, divisor_ptr, out_ptr, least_ptr, span_ptr, bits_ptr, counts_ptr, n,
    TILE: tl.constexpr,
):  # fmt: skip
    """``mark`` without the code for a partial tile, to count instructions."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    total = add_tile(residual_ptr, gradient_ptr, out_ptr, at, n, WHOLE=True)
    keys = key_of(divided(total, divisor_ptr, at, None))
    write_marks(keys, at, least_ptr, span_ptr, bits_ptr, counts_ptr, TILE)


def recorded(work: Callable[[], object]) -> list[Case]:
    """Return the launches of ``work``, each once. Numbers are Python's, and nothing is fused automatically."""
    found: dict[str, Case] = {}

    def run(self: Any, *arguments: Any, grid: object, warmup: bool, **options: Any) -> None:
        passed = dict(zip(self.arg_names, arguments, strict=False))
        numbers = {type(value) for value in passed.values() if not isinstance(value, torch.Tensor)}
        assert numbers <= {int, float, type(None)}, f"{self.__name__}: Triton rejects numbers of numpy"
        assert not options.pop("enable_fp_fusion"), self.__name__
        warps = options.pop("num_warps")
        constants = options | {name: None for name, value in passed.items() if value is None}
        types = {name: _type(value) for name, value in passed.items() if value is not None}
        free = {each.name for each in self.params if each.do_not_specialize_on_alignment}
        aligned = tuple(
            name
            for name, value in passed.items()
            if isinstance(value, torch.Tensor) and name not in free and value.data_ptr() % 16 == 0
        )
        case = Case("", self, constants, warps, types, aligned)
        found.setdefault(str(case), case)

    with (
        mock.patch.object(triton.runtime.jit.JITFunction, "run", run),
        mock.patch.object(devices, "runs_triton", return_value=True),
        # No kernel has written what the host reads of it.
        mock.patch.object(memory, "scratch", lambda size, dtype, like: torch.zeros(size, dtype=dtype)),
    ):
        work()
    return list(found.values())


def _type(value: torch.Tensor | float) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"


def _named(found: list[Case]) -> list[Case]:
    """Return the cases by the name of the kernel, and what not all of its cases have in common."""
    named = {}
    for case in found:
        rows = [_row(other) for other in found if other.kernel is case.kernel]
        label, without = [case.kernel.__name__.removesuffix("_kernel")], []
        for key in {key: None for row in rows for key in row}:
            own, others = _row(case).get(key), {row.get(key) for row in rows}
            if len(others) == 1 or own is False:
                continue
            if own is None:
                without.append(key)
            elif len(others - {None}) > 1:
                label.append(key if own is True else f"{key}={own}")
        name = " ".join([*label, *(["without", *without] if without else [])]).replace("_ptr", "")
        named[name] = replace(case, name=name)
    assert len(named) == len(found)
    return list(named.values())


def _row(case: Case) -> dict[str, Any]:
    types = {name: kind.lstrip("*") for name, kind in case.types.items()}
    return case.constants | types | {"warps": case.warps, "aligned": len(case.aligned)}


def everything() -> None:
    """Call each operation in each of its forms, as training calls it."""
    selection()
    static_form(2)
    packing()
    rebalance()
    adam()


def selection() -> None:
    """Call what selects from vectors, sums and lists of exact length."""
    n, tiles = TILE, TILES_SUMMED_IN_PLACE + 1
    x, added, out = torch.ones(n), torch.ones(n), torch.ones(n)
    indices, count = torch.zeros(n, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    for divisor in (None, torch.ones(n)):
        for dtype in GRADIENTS:
            kernels.accumulate_and_select(x, added.to(dtype), out, 1.0, divisor=divisor)
        kernels.select(x, 1.0, divisor=divisor)
        kernels.top_k_padded(x, added, out, 9, divisor=divisor)
    apart = torch.ones(n + 1)[1:]  # at an address that is no multiple of 16 bytes
    kernels.accumulate_and_select(apart, torch.ones(n + 1)[1:], torch.ones(n + 1)[1:], 1.0)
    for select in (
        lambda: kernels.accumulate_top_k(x, added, out, 5),
        lambda: kernels.largest(kernels.Entries(indices, x), 5),
    ):
        with suppress(IndexError):  # no kernel runs, so places are what the memory held before
            select()
    # With this many tiles, a separate scan sums their counts.
    long = torch.zeros(tiles * n)
    select_triton.expand(Sum(long, None, long), select_triton.empty_marks(long), indices, out, count)
    kernels.merge([(indices, x)], n)


def static_form(rows: int, device: str = "cpu") -> None:
    """Call each operation on lists with padding, and those on dense values in few bits."""
    out, places = torch.ones(4096, device=device), torch.arange(4096, dtype=torch.int32)
    places = places.to(device)
    entries = kernels.Entries(places[:900].repeat(rows, 1), torch.ones((rows, 900), device=device))
    bounds, each = places[: rows + 1].clone(), places[:rows].clone()
    kernels.top_k_rows(out, bounds, each, 9)
    kernels.top_k_rows(out, bounds, each, 9, indices=places)
    kernels.top_k_padded(out, None, out, 9)
    kernels.largest_padded(entries.row(0), 9)
    kernels.reaching(entries.row(0), 1.0)
    kernels.count_inside(out, 1.0, bounds[:2])
    kernels.joined(entries)
    kernels.merge_rows(entries, 4096)
    kernels.add_rows(out, entries)
    kernels.add_rows(out, entries.row(0))
    kernels.set_at(out, entries)
    kernels.set_at(out, entries.indices)
    kernels.values_at(out, entries.indices)
    for values in ("1bit", "2bit", "4bit", "8bit"):
        messages = kernels.round_parts(out, rows, 1, FORMATS[values])
        kernels.round_mean(messages, out, 1, FORMATS[values])
        kernels.read_parts(messages, out.numel(), FORMATS[values])
    for values in ("fp32", "4bit"):
        layout = Layout.of(1000, 64_000, FORMATS[values])
        words, _ = write_rows(layout, each, entries)
        read_rows(layout, each, words)


def packing() -> None:
    """Call what writes and reads packed sections, whose indices have short, long and no low bits."""
    formats = {name: FORMATS[name] for name in ("fp32", "8bit", "4bit", "1bit")} | {"indices": INDICES}
    short = [(1000, 64_000, name) for name in formats]
    for room, span, name in (*short, (1, 2**31 - 1, "fp32"), (1, 2**31 - 1, "8bit"), (1000, 4000, "4bit")):
        layout = Layout.of(room, span, formats[name])
        lows = torch.zeros(2, dtype=torch.int32)
        entries = kernels.Entries(torch.zeros((2, room), dtype=torch.int32), torch.ones((2, room)))
        words, _ = write_rows(layout, lows, entries)
        read_rows(layout, lows, words)


def rebalance(sizes: tuple[int, ...] = (2, 64, 256, 1024)) -> None:
    """Move borders of few partitions and of many, by both rules."""
    for partitions, rule in product(sizes, ("paper", "prefix")):
        topology = [torch.ones(size, dtype=torch.int32) for size in (partitions, partitions + 1, partitions)]
        kernels.rebalance(*topology, iteration=1, block=64, numel=TILE, min_blocks=1, rule=rule)


def adam() -> None:
    """Call Adam's step, of a list and of whole vectors, with and without all options and images."""
    images = [torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)]
    plain, listed = [torch.ones(TILE)], torch.arange(9, dtype=torch.int32)
    for given, dtype, options, indices in product((plain, images), GRADIENTS, (False, True), (listed, None)):
        if dtype != torch.float32 and (options or given is images):
            continue
        parameters, *moments = ([tensor.to(dtype) for tensor in given] for _ in range(4))
        states = kernels.AdamStates(
            *moments[:2], [each.int() for each in given], [torch.ones(())], moments[2] if options else None
        )
        control = kernels.AdamControl.of(
            steps=1, learning_rate=0.1, betas=(0.9, 0.99), epsilon=1e-8, max_catch_up=20, device=torch.device("cpu"),
            maximize=options,
        )  # fmt: skip
        values = torch.ones(9 if indices is not None else given[0].numel())
        kernels.AdamFlat(parameters, states, [0]).update(indices, control, values=values)


@cache
def launched_cases() -> list[Case]:
    """Return all launches."""
    return _named(recorded(everything))


def reduced_cases() -> list[Case]:
    """Return passes over a whole vector without the code for partial tiles, whose instructions are counted."""
    pointers = ("residual_ptr", "gradient_ptr", "divisor_ptr", "out_ptr", "least_ptr", "bits_ptr", "counts_ptr")
    ints = {"least_ptr": "*i32", "bits_ptr": "*i32", "counts_ptr": "*i32", "n": "i32"}
    cases = []
    for gradient, divides in (*product(("fp32", "bf16", "fp16"), (False, True)), ("", False)):
        none = ["span_ptr", *([] if divides else ["divisor_ptr"]), *([] if gradient else ["gradient_ptr"])]
        constants = {"TILE": TILE} | dict.fromkeys(none)
        types = dict.fromkeys(pointers[:4], "*fp32") | ints | {"gradient_ptr": f"*{gradient}"}
        types = {name: kind for name, kind in types.items() if name not in constants}
        name = f"mark {gradient or 'only'}{', divided' if divides else ''}, whole"
        aligned = tuple(each for each in pointers if each in types)
        cases.append(Case(name, whole_mark, constants, select_triton.WARPS, types, aligned))
    return cases


@cache
def find(name: str) -> Case:
    """Return the case of that name."""
    return next(case for case in (*launched_cases(), *reduced_cases()) if case.name == name)
