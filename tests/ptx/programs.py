"""Small PTX programs for the tests of the executor."""

from __future__ import annotations

from typing import Any

import torch

from ptx.launch import Bound
from ptx.machine import Order
from ptx.memory import Memory
from ptx.parse import Kernel, parse

REGISTERS = {"pred": "%p", "8": "%rs", "16": "%rs", "32": "%r", "64": "%rd"}
POINTERS = {torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.uint8: "*i8", torch.float32: "*fp32"}


def kernel_of(body: str, arguments: int, *, threads: int = 32) -> Kernel:
    """Return a kernel of that body, with ``%rd1`` and on as its pointers, and ``%r1`` as the thread of the grid."""
    parameters = ", ".join(f".param .u64 .ptr .global .align 1 p{i}" for i in range(1, arguments + 1))
    loads = "\n".join(f"ld.param.b64 %rd{i}, [p{i}];" for i in range(1, arguments + 1))
    return parse(f"""
        .visible .entry kernel({parameters})
        .reqntid {threads}
        {{
        .reg .pred %p<40>;
        .reg .b16 %rs<40>;
        .reg .b32 %r<40>;
        .reg .b64 %rd<40>;
        {loads}
        mov.u32 %r1, %ctaid.x;
        mov.u32 %r2, %tid.x;
        mad.lo.s32 %r1, %r1, {threads}, %r2;
        {body}
        ret;
        }}
    """)


def run(
    body: str, *tensors: torch.Tensor, programs: int = 1, threads: int = 32, shared: int = 0, order: Order | None = None
) -> Memory:
    """Run a body on tensors, in place."""
    arguments: list[tuple[Any, str]] = [(tensor, POINTERS[tensor.dtype]) for tensor in tensors]
    kernel = kernel_of(body, len(tensors), threads=threads)
    return Bound(kernel, shared, (programs, 1, 1), arguments).run(order or Order())
