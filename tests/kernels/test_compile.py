"""Kernels compile for every GPU without one: no spills, few registers, wide accesses, few instructions."""

from __future__ import annotations

import os
import re

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 replaces the compiler", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

import triton

from compiled_kernels import TARGETS, cases, compiled, find

# The "whole" cases are cut down to count instructions; nobody launches them.
NAMES = [case.name for case in cases() if not case.name.endswith(", whole")]
NVIDIA = [target for target in TARGETS if target.startswith("sm_")]
# In a full tile of 16 elements per thread: 4 accesses of 128 bits per fp32 array.
WIDE = {"accumulate fp32, whole": (8, 4), "mark fp32, whole": (8, 4), "mark bf16, whole": (6, 4)}
WIDE |= {"mark fp16, whole": (6, 4), "momentum fp32, whole": (12, 8), "mark only, whole": (4, 0)}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_compiles_without_spills(name: str, target: str) -> None:
    """Every kernel as it is launched, on every target."""
    result = compiled(name, target)
    assert result.spilled == 0
    assert ".ftz" not in result.text, "denormals are ordered exactly"
    assert "ld.volatile" not in result.text, "nothing polls memory"
    assert not re.search(r"(atom|red)\S*\.f(16|32|64)", result.text), "float atomics have no order"


@pytest.mark.parametrize("name", NAMES)
def test_registers(name: str) -> None:
    """The ceilings are what was measured when a kernel was written, plus 8."""
    assert compiled(name, "sm_90").registers <= find(name).registers


@pytest.mark.parametrize("name", [case.name for case in cases() if case.budget is not None])
def test_instructions(name: str) -> None:
    """Far below the 7 instructions per byte that an H200 can issue at full memory speed."""
    assert compiled(name, "sm_90").per_element(find(name)) <= find(name).budget


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("name", WIDE)
def test_wide_accesses(name: str, target: str) -> None:
    """Aligned tensors of any length are read and written 16 bytes at a time."""
    sass = compiled(name, target).sass
    loads = sum(bool(re.search(r"LDG\.E\S*\.128", line)) for line in sass)
    stores = sum(bool(re.search(r"STG\.E\S*\.128", line)) for line in sass)
    assert (loads, stores) == WIDE[name]


@pytest.mark.parametrize("name", ["accumulate fp32", "mark bf16", "momentum fp16"])
def test_one_rounding_is_written_not_inferred(name: str) -> None:
    """The fused multiply-add is there, and as often, when the compiler may not fuse on its own."""
    plain, fused = (compiled(name, "sm_90", fusion=fusion).text.count("fma.rn.f32") for fusion in (False, True))
    assert plain == fused > 0


@pytest.mark.parametrize("name", ["sum lists", "add list", "adam"])
def test_no_inferred_fusion(name: str) -> None:
    """Products and sums that the reference rounds one by one stay apart."""
    assert "fma.rn.f32" not in _without_division(compiled(name, "sm_90").text)


def _without_division(text: str) -> str:
    # Correctly rounded division and square root are expanded later, by ptxas.
    return re.sub(r"(div|sqrt)\.rn\.f32", "", text)


def test_report(record_property: pytest.RecordProperty) -> None:
    """The table that the run prints at its end."""
    record_property("table", _table())


def _table() -> list[str]:
    rows = [f"Triton {triton.__version__}: registers on {', '.join(TARGETS)}; shared memory, instructions on sm_90"]
    for case in cases():
        results = [compiled(case.name, target) for target in TARGETS]
        registers = " ".join(f"{result.registers:4}" for result in results)
        hopper = results[list(TARGETS).index("sm_90")]
        each = f"{hopper.per_element(case):6.1f} per element" if case.elements else ""
        rows.append(f"{case.name:26}{registers}  {hopper.shared:6} B {len(hopper.sass):5} {each}")
    return rows
