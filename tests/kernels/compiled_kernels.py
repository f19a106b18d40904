"""The launches of compile_cases.py, compiled for GPUs that need not be present.

All cases are compiled for sm_90. Each other target has the first case of every kernel, and every ninth of the others: a
third of these are compiled for a second target. A deep run compiles all cases for all targets.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import triton
from compile_cases import find, launched_cases
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from depth import DEEP
from ptx import launch

TARGETS = {name: ("cuda", number, 32) for name, number in launch.TARGETS.items()} | {"gfx942": ("hip", "gfx942", 64)}


@dataclass(frozen=True)
class Compiled:
    """The result of compiling a case. ``spilled`` counts bytes of stack and spilled registers."""

    text: str
    spilled: int
    cubin: bytes = b""

    @cached_property
    def sass(self) -> tuple[str, ...]:
        """The instructions for an NVIDIA GPU, disassembled when a test first reads them."""
        found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(\S.*?)\s*;", _cuobjdump(self.cubin, "--dump-sass"))
        return tuple(line for line in found if not line.startswith("NOP"))


@cache
def compiled_for(target: str) -> list[str]:
    """Return the names of the launched cases that are compiled for ``target``.

    With fewer cases of all kernels than usual, those for sm_90 are as few as those for another target.
    """
    names = [case.name for case in launched_cases()]
    if DEEP or (target == "sm_90" and float(os.environ.get("KERNEL_CASES", "1")) >= 1):
        return names
    first: dict[str, str] = {}
    for case in launched_cases():
        first.setdefault(case.kernel.__name__, case.name)
    others = [name for name in names if name not in first.values()]
    turn = 0 if target == "sm_90" else [each for each in TARGETS if each != "sm_90"].index(target)
    # Cases often follow each other in threes, of which no target should have the same one each time.
    return [*first.values(), *(name for i, name in enumerate(others) if (i + i // 3 - turn) % 9 == 0)]


@cache
def compiled(name: str, target: str) -> Compiled:
    """Compile one case for one target."""
    case = find(name)
    arguments = case.kernel.arg_names
    signature = {name: "constexpr" if name in case.constants else case.types[name] for name in arguments}
    attributes = {(arguments.index(name),): [["tt.divisibility", 16]] for name in case.aligned}
    source = ASTSource(case.kernel, signature=signature, constexprs=case.constants, attrs=attributes)
    options = {"num_warps": case.warps, "enable_fp_fusion": False}
    result = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    if target.startswith("gfx"):
        text = result.asm["amdgcn"]
        spilled = sum(_number(text, key) for key in ("private_segment_fixed_size", "vgpr_spill_count"))
        return Compiled(text, spilled)
    cubin = result.asm["cubin"]
    usage = _cuobjdump(cubin, "--dump-resource-usage")
    found = re.search(r"STACK:(\d+)", usage)
    assert found, usage
    return Compiled(result.asm["ptx"], int(found[1]), cubin)


def _cuobjdump(cubin: bytes, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def _number(text: str, key: str) -> int:
    found = re.search(rf"\.{key}:\s*(\d+)", text)
    assert found, key
    return int(found[1])
