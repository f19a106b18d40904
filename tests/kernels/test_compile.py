"""Kernels compile for every GPU without one: no spills, wide accesses, few instructions."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 replaces the compiler", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from compile_cases import find, launched_cases, reduced_cases, static_form
from compiled_kernels import TARGETS, compiled, compiled_for
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

import tritoncomm_kernels as kernels
from depth import DEEP
from ptx.launch import parsed
from ptx.steps import steps_of
from tritoncomm_kernels import (
    adam_triton,
    dense_bits,
    dense_bits_triton,
    devices,
    entries_triton,
    sections_triton,
    select_triton,
    top_k_triton,
)
from tritoncomm_kernels.select import TILE

EXPAND = next(case for case in launched_cases() if case.kernel is select_triton.expand_kernel)
# By case: the most instructions per element, and the elements of a program.
BUDGETS = {case.name: (22, TILE) for case in reduced_cases()} | {EXPAND.name: (5, 32 * EXPAND.constants["WORDS"])}
# Loads and stores of 128 bits in a full tile: a thread has so many of an fp32 array, and half of them of a 16-bit one.
QUADS = TILE // (32 * select_triton.WARPS) // 4
WIDE = {"mark fp32, whole": (2 * QUADS, QUADS), "mark bf16, whole": (QUADS + QUADS // 2, QUADS)}
WIDE |= {"mark fp16, whole": WIDE["mark bf16, whole"], "mark only, whole": (QUADS, 0)}
# Outside of a deep run, other GPUs than Hopper have the case with most accesses, and one of two bytes per element.
WIDE_ON = [(name, "sm_90") for name in WIDE]
WIDE_ON += [(name, target) for name in (WIDE if DEEP else ("mark bf16, whole",)) for target in ("sm_80", "sm_100")]
# Outside of a deep run, the first case of each kernel.
FIRST = {case.kernel.__name__: case.name for case in reversed(launched_cases())}
EXECUTED = [(name, target) for target in TARGETS if target != "gfx942" for name in compiled_for(target)]
EXECUTED = EXECUTED if DEEP else [(name, "sm_90") for name in FIRST.values()]


@pytest.mark.parametrize(("name", "target"), [(name, target) for target in TARGETS for name in compiled_for(target)])
def test_compiles_without_spills(name: str, target: str) -> None:
    """Every launched kernel compiles for every target without spills."""
    result = compiled(name, target)
    assert result.spilled == 0
    assert ".ftz" not in result.text, "denormals are ordered exactly"
    assert "ld.volatile" not in result.text, "nothing polls memory"
    assert not re.search(r"(atom|red)\S*\.f(16|32|64)", result.text), "float atomics have no order"


@pytest.mark.parametrize(("name", "target"), EXECUTED)
def test_executor_knows_every_opcode(name: str, target: str) -> None:
    """The text has no form of an opcode that the executor of ``tests/ptx`` does not know."""
    steps_of(parsed(compiled(name, target).text))


def test_tiles_have_an_element_per_thread() -> None:
    """Tiles have an element for every thread. Otherwise two threads could hold one element that is updated in place."""
    for tile in (64, 128, 256, 1024, 4096, 1 << 16):
        assert tile >= 32 * select_triton.warps(tile)
    for tile, warps in (
        (TILE, select_triton.WARPS),
        (32 * max(select_triton.WORDS, TILE // 32), select_triton.EXPAND_WARPS),
        (top_k_triton.BLOCK, top_k_triton.WARPS),
        (entries_triton.FLAT, entries_triton.FLAT_WARPS),
        (entries_triton.MOVE, entries_triton.WARPS),
        (sections_triton.BLOCK, sections_triton.WARPS),
        (dense_bits_triton.TILE * dense_bits.BLOCK, dense_bits_triton.WARPS),
        (adam_triton.BLOCK, adam_triton.WARPS),
    ):
        assert tile >= 32 * warps


def test_every_kernel_is_launched() -> None:
    """Every kernel of the package is among the launches that are compiled."""
    files = Path(kernels.__file__).parent.glob("*_triton.py")
    found = [vars(importlib.import_module(f"tritoncomm_kernels.{file.stem}")) for file in files]
    made = {each.__name__ for module in found for each in module.values() if isinstance(each, JITFunction)}
    assert {case.kernel.__name__ for case in launched_cases()} == {name for name in made if name.endswith("_kernel")}


def test_launches_do_not_depend_on_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists with padding take the same launches for 2 rows and for 64, of kernels and of torch's operators."""
    launched: list[str] = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            launched.append(str(func))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(JITFunction, "run", lambda self, *_, **__: launched.append(self.__name__))
    monkeypatch.setattr(devices, "runs_triton", lambda tensor: True)
    found = []
    for rows in (2, 2, 64):  # the first call also makes constants
        launched.clear()
        with Counted():
            static_form(rows)
        found.append(list(launched))
    assert len(found[1]) > 60
    assert found[1] == found[2]


@pytest.mark.parametrize("name", BUDGETS)
def test_instruction_budgets(name: str) -> None:
    """Instructions stay within a budget far below the 7 per byte that an H200 can issue at full memory speed."""
    most, elements = BUDGETS[name]
    assert len(compiled(name, "sm_90").sass) * 32 * find(name).warps / elements <= most


@pytest.mark.parametrize(("name", "target"), WIDE_ON)
def test_wide_accesses(name: str, target: str) -> None:
    """Aligned tensors of any length are read and written 16 bytes at a time."""
    sass = compiled(name, target).sass
    loads = sum(bool(re.search(r"LDG\.E\S*\.128", line)) for line in sass)
    stores = sum(bool(re.search(r"STG\.E\S*\.128", line)) for line in sass)
    assert (loads, stores) == WIDE[name]
