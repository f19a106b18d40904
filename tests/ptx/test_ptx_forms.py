"""Every form of an opcode in a compiled kernel is known to the executor."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 replaces the compiler", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from compile_cases import launched_cases
from compiled_kernels import assembly

from depth import DEEP
from ptx.launch import TARGETS, parsed
from ptx.steps import steps_of


@pytest.mark.parametrize("target", TARGETS if DEEP else ["sm_90"])
def test_every_form_is_known(target: str) -> None:
    """No case has another form. Outside of a deep run, these are the first cases of each kernel."""
    first = {case.kernel.__name__: case.name for case in reversed(launched_cases())}
    for name in [case.name for case in launched_cases()] if DEEP else first.values():
        steps_of(parsed(assembly(name, target).asm["ptx"]))
