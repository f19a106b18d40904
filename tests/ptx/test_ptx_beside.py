"""A launch that leaves other bits than the executor is told from one that leaves the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ptx.beside import compare
from ptx.launch import remember
from ptx.memory import ViolationError

# Adds 1 to the first tensor, and to the one whose address is in the second.
TEXT = """
.visible .entry add_one(.param .u64 .ptr .global .align 1 p1, .param .u64 .ptr .global .align 1 p2)
.reqntid 32
{
.reg .pred %p<2>;
.reg .b32 %r<9>;
.reg .b64 %rd<9>;
ld.param.b64 %rd1, [p1];
ld.param.b64 %rd2, [p2];
mov.u32 %r1, %tid.x;
mad.wide.u32 %rd3, %r1, 4, %rd1;
ld.global.b32 %r2, [%rd3];
add.s32 %r2, %r2, 1;
st.global.b32 [%rd3], %r2;
ld.global.b64 %rd4, [%rd2];
mad.wide.u32 %rd5, %r1, 4, %rd4;
ld.global.b32 %r3, [%rd5];
add.s32 %r3, %r3, 1;
st.global.b32 [%rd5], %r3;
ret;
}
"""


def launched(first: torch.Tensor, other: torch.Tensor, add: int) -> None:
    """Launch the text on views of two tensors, beside a device which adds ``add``."""
    table = torch.tensor([remember(other)])

    def launch() -> Any:
        first.add_(add)
        other.add_(1)
        signature = {"x_ptr": "*i32", "N": "constexpr", "table_ptr": "*i64"}
        return SimpleNamespace(
            asm={"ptx": TEXT}, src=SimpleNamespace(signature=signature), metadata=SimpleNamespace(shared=0)
        )

    compare(launch, (1,), {"x_ptr": first, "N": 3, "table_ptr": table})


def test_bits() -> None:
    """Both have the memory from before the launch, and tensors may be parts of others. An error says what differs."""
    whole, other = torch.arange(40, dtype=torch.int32), torch.arange(32, dtype=torch.int32)
    launched(whole[4:36], other, 1)
    assert whole[4:36].tolist() == [*range(5, 37)]
    assert other.tolist() == [*range(1, 33)]
    with pytest.raises(ViolationError, match="add_one: the GPU has left other bits: 32 bytes of storage 0 of 160"):
        launched(whole[4:36], other, 2)
