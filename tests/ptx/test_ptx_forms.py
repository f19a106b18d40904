"""Every form of an opcode in a compiled kernel is known to the executor, and is tested against a definition."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 replaces the compiler", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from compile_cases import launched_cases
from compiled_kernels import assembly
from test_ptx_memory import LOADS, PARAMETERS, REDUCTIONS, SHUFFLES, STORES, UPDATES
from test_ptx_opcodes import TABLE

from depth import DEEP
from ptx.launch import TARGETS, parsed
from ptx.parse import Instruction
from ptx.steps import steps_of

OTHERS = {"bra", "bra.uni", "ret", "bar.sync", "ldmatrix.sync.aligned.m8n8.x4.shared.b16"}
OTHERS |= {"createpolicy.fractional.L2::evict_first.b64"}  # a hint
TESTED = {*TABLE, *LOADS, *STORES, *UPDATES, *REDUCTIONS, *SHUFFLES, *PARAMETERS, *OTHERS}


def form_of(it: Instruction) -> str:
    """Return the opcode with its modifiers, and which form it is if there are two."""
    return f"{it.name} of 3" if it.parts[0] in {"min", "max"} and len(it.operands) == 4 else it.name


@pytest.mark.parametrize("target", TARGETS if DEEP else ["sm_90"])
def test_every_form_is_tested(target: str) -> None:
    """No case has another form. Outside of a deep run, these are the first cases of each kernel."""
    first = {case.kernel.__name__: case.name for case in reversed(launched_cases())}
    names = [case.name for case in launched_cases()] if DEEP else first.values()
    forms = set()
    for name in names:
        kernel = parsed(assembly(name, target).asm["ptx"])
        steps_of(kernel)
        forms |= {form_of(it) for it in kernel.instructions()}
    assert len(forms) > 100
    assert not forms - TESTED
