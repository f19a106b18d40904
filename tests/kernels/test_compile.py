"""Kernels compile for every GPU without one: no spills, wide accesses, few instructions."""

from __future__ import annotations

import os
import re
from contextlib import suppress

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 replaces the compiler", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

import triton
from compile_cases import cases, find, launched_cases
from compiled_kernels import TARGETS, compiled, compiled_for
from torch.utils._python_dispatch import TorchDispatchMode

import tritoncomm_kernels as kernels
from depth import DEEP
from tritoncomm_kernels import devices, select_triton
from tritoncomm_kernels.formats import FORMATS
from tritoncomm_kernels.section_layout import Layout
from tritoncomm_kernels.sections import read_rows, write_rows
from tritoncomm_kernels.select import TILE, TILES_SUMMED_IN_PLACE

NAMES = [case.name for case in launched_cases()]
# Loads and stores of 128 bits in a full tile: a thread has so many of an fp32 array, and half of them of a 16-bit one.
QUADS = TILE // (32 * select_triton.WARPS) // 4
WIDE = {"mark fp32, whole": (2 * QUADS, QUADS), "mark bf16, whole": (QUADS + QUADS // 2, QUADS)}
WIDE |= {"mark fp16, whole": WIDE["mark bf16, whole"], "mark only, whole": (QUADS, 0)}
# Outside of a deep run, other GPUs than Hopper have the case with most accesses, and one of two bytes per element.
WIDE_ON = [(name, "sm_90") for name in WIDE]
WIDE_ON += [(name, target) for name in (WIDE if DEEP else ("mark bf16, whole",)) for target in ("sm_80", "sm_100")]


@pytest.mark.parametrize(("name", "target"), [(name, target) for target in TARGETS for name in compiled_for(target)])
def test_compiles_without_spills(name: str, target: str) -> None:
    """Every launched kernel compiles for every target without spills."""
    result = compiled(name, target)
    assert result.spilled == 0
    assert ".ftz" not in result.text, "denormals are ordered exactly"
    assert "ld.volatile" not in result.text, "nothing polls memory"
    assert not re.search(r"(atom|red)\S*\.f(16|32|64)", result.text), "float atomics have no order"


def test_tiles_have_an_element_per_thread() -> None:
    """Tiles have an element for every thread. Otherwise two threads could hold one element that is updated in place."""
    for tile in (64, 128, 256, 1024, 4096, 1 << 16):
        assert tile >= 32 * select_triton.warps(tile)
    for case in cases():
        if case.elements:
            assert case.elements >= 32 * case.warps


# AMSGrad and maximize are compiled together.
FREE = ("AMSGRAD", "MAXIMIZE")


def test_launches_have_compiled_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch has a compiled case with its warps and constants, Python's numbers, and no automatic fusion."""
    launched: list[tuple[str, dict[str, object]]] = []

    def run(self: object, *arguments: object, grid: object, warmup: bool, **options: object) -> None:
        scalars = [type(value) for value in arguments if not isinstance(value, torch.Tensor)]
        assert {*scalars} <= {int, float, type(None)}, f"{self.__name__}: Triton rejects numbers of numpy"
        launched.append((self.__name__, options))

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", run)
    monkeypatch.setattr(devices, "runs_triton", lambda tensor: True)
    everything()
    assert {name for name, _ in launched} == {find(name).kernel.__name__ for name in NAMES}
    known: dict[str, list[tuple[int, dict[str, object]]]] = {}
    for name in NAMES:
        known.setdefault(find(name).kernel.__name__, []).append((find(name).warps, find(name).constants))
    for name, options in launched:
        warps, fusion = options.pop("num_warps"), options.pop("enable_fp_fusion")
        constants = {key: value for key, value in options.items() if key not in FREE}
        cased = [warps == other and constants.items() <= theirs.items() for other, theirs in known[name]]
        assert any(cased), f"{name} is launched with {warps} warps and {options}, which is never compiled"
        assert not fusion, name


def everything() -> None:
    """Call each operation once, as training calls it."""
    n, tiles = TILE, TILES_SUMMED_IN_PLACE + 1
    x, g, out = torch.ones(n), torch.ones(n), torch.ones(n)
    indices, count = torch.zeros(n, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    for divisor in (None, torch.ones(n)):
        kernels.accumulate_and_select(x, g, out, 1.0, divisor=divisor)
        kernels.select(x, 1.0, divisor=divisor)
        kernels.top_k_padded(x, g, out, 9, divisor=divisor, workspace=kernels.Workspace())
    for select in (
        lambda: kernels.accumulate_top_k(x, g, out, 5),
        lambda: kernels.largest(kernels.Entries(indices, x), 5),
    ):
        with suppress(IndexError):  # no kernel runs, so places are what the memory held before
            select()
    marks = kernels.Marks.empty(n, x.device)
    kernels.expand(x, marks, indices, out, count)
    # With this many tiles, a separate scan sums their counts.
    kernels.expand(torch.zeros(tiles * n), kernels.Marks.empty(tiles * n, x.device), indices, out, count)
    kernels.merge([(indices, x)], n)
    for values in ("fp32", "4bit"):
        layout = Layout.of(1000, 64_000, FORMATS[values])
        entries, held = kernels.Entries(indices[None, :900], x[None, :900]), kernels.Workspace()
        words, _ = write_rows(layout, count.int(), entries, workspace=held)
        read_rows(layout, count.int(), words, workspace=held)
    static_form(2)
    topology = [torch.ones(size, dtype=torch.int32) for size in (64, 65, 64)]
    kernels.rebalance(*topology, iteration=1, block=64, numel=n, min_blocks=1)
    control = kernels.AdamControl.of(
        steps=1, learning_rate=0.1, betas=(0.9, 0.99), epsilon=1e-8, max_catch_up=20, device=x.device
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        floats = [[torch.ones(n, dtype=dtype)] for _ in range(3)]
        states = kernels.AdamStates(floats[0], floats[1], [indices], [torch.ones(())])
        flat = kernels.AdamFlat(floats[2], states, [0])
        for listed in (indices, None):
            flat.update(listed, control, values=x)
    image = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    images = [[image.clone()] for _ in range(3)]
    states = kernels.AdamStates(images[0], images[1], [image.int()], [torch.ones(())])
    flat = kernels.AdamFlat(images[2], states, [0])
    flat.update(indices, control, values=x)


def static_form(rows: int) -> None:
    """Call each operation on lists with padding once."""
    out, held = torch.ones(4096), kernels.Workspace()
    entries = kernels.Entries(torch.zeros((rows, 900), dtype=torch.int32), torch.ones((rows, 900)))
    bounds = torch.zeros(rows + 1, dtype=torch.int32)
    kernels.top_k_rows(out, bounds, bounds[1:], 9, workspace=held)
    kernels.top_k_padded(out, None, out, 9, workspace=held)
    kernels.largest_padded(entries.row(0), 9, workspace=held)
    kernels.count_inside(out, out[:1], bounds[:2], workspace=held)
    kernels.joined(entries, workspace=held)
    kernels.merge_rows(entries, 4096, workspace=held)
    kernels.add_rows(out, entries, workspace=held)
    kernels.add_rows(out, entries.row(0), workspace=held)
    kernels.set_at(out, entries)
    kernels.set_at(out, entries.indices)
    kernels.values_at(out, entries.indices)
    for values in ("1bit", "2bit", "4bit", "8bit"):
        messages = kernels.round_parts(out, rows, 1, FORMATS[values])
        kernels.round_mean(messages, out, 1, FORMATS[values])
        kernels.read_parts(messages, out.numel(), FORMATS[values])
    for values in ("fp32", "4bit"):
        layout = Layout.of(1000, 64_000, FORMATS[values])
        words, _ = write_rows(layout, bounds[1:], entries, workspace=held)
        read_rows(layout, bounds[1:], words, workspace=held)


def test_launches_do_not_depend_on_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists with padding take the same launches for 2 rows and for 64, of kernels and of torch's operators."""
    launched: list[str] = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            launched.append(str(func))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", lambda self, *_, **__: launched.append(self.__name__))
    monkeypatch.setattr(devices, "runs_triton", lambda tensor: True)
    found = []
    for rows in (2, 2, 64):  # the first call also makes constants
        launched.clear()
        with Counted():
            static_form(rows)
        found.append(list(launched))
    assert len(found[1]) > 60
    assert found[1] == found[2]


@pytest.mark.parametrize("name", [case.name for case in cases() if case.budget is not None])
def test_instruction_budgets(name: str) -> None:
    """Instructions stay within a budget far below the 7 per byte that an H200 can issue at full memory speed."""
    case = find(name)
    instructions = len(compiled(name, "sm_90").sass)
    assert instructions * 32 * case.warps / case.elements <= case.budget


@pytest.mark.parametrize(("name", "target"), WIDE_ON)
def test_wide_accesses(name: str, target: str) -> None:
    """Aligned tensors of any length are read and written 16 bytes at a time."""
    sass = compiled(name, target).sass
    loads = sum(bool(re.search(r"LDG\.E\S*\.128", line)) for line in sass)
    stores = sum(bool(re.search(r"STG\.E\S*\.128", line)) for line in sass)
    assert (loads, stores) == WIDE[name]
