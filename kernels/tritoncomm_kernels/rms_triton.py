"""Kernels of :mod:`tritoncomm_kernels.rms`: the largest magnitude of each tensor, its sum of squares, and the result.

Maxima and sums are of integers, so that neither the order of atomics nor the size of a tile changes a bit. Tensors are
found through a table of addresses, and each has the same number of programs, however long it is.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tritoncomm_kernels import rms
from tritoncomm_kernels.bits_triton import key_of
from tritoncomm_kernels.dispatch import on_device_of
from tritoncomm_kernels.workspace import copied_to

BLOCK, WARPS = 1024, 4
PROGRAMS = 64  # per tensor at most
ENDS = 128  # tensors per program of the last kernel
UNIT = tl.constexpr(rms.UNIT)
INFINITY_KEY = tl.constexpr(0x7F800000)
LEAST_KEY = tl.constexpr(0x00800000)  # of the least normal number


@triton.jit
def largest_kernel(table_ptr, found_ptr, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Raise the first number of each tensor in ``found_ptr`` to the largest key of its magnitudes."""
    tensor = tl.program_id(1)
    values_ptr = tl.load(table_ptr + 2 * tensor).to(tl.pointer_type(DTYPE))
    count = tl.load(table_ptr + 2 * tensor + 1)
    largest = tl.zeros([BLOCK], tl.int32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < count:
        at = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, key_of(tl.load(values_ptr + at, mask=at < count, other=0.0).to(tl.float32)))
        start += tl.num_programs(0) * BLOCK
    tl.atomic_max(found_ptr + 2 * tensor, tl.max(largest, axis=0).to(tl.int64), sem="relaxed")


@triton.jit
def top_of(key):
    """Return the magnitude of ``key`` (int64), at least the least normal number."""
    return tl.maximum(key.to(tl.int32), LEAST_KEY).to(tl.float32, bitcast=True)


@triton.jit
def squares_kernel(table_ptr, found_ptr, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Add the squares of each tensor, as shares of the largest one, to its second number in ``found_ptr``."""
    tensor = tl.program_id(1)
    values_ptr = tl.load(table_ptr + 2 * tensor).to(tl.pointer_type(DTYPE))
    count = tl.load(table_ptr + 2 * tensor + 1)
    key = tl.load(found_ptr + 2 * tensor)
    top = top_of(key)
    total = tl.zeros([BLOCK], tl.int64)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < count:
        at = start + tl.arange(0, BLOCK)
        value = tl.load(values_ptr + at, mask=at < count, other=0.0).to(tl.float32)
        share = tl.div_rn(value, top)
        square = tl.where(key < INFINITY_KEY, share * share * UNIT, 0.0)
        total += square.to(tl.int32).to(tl.int64)
        start += tl.num_programs(0) * BLOCK
    tl.atomic_add(found_ptr + 2 * tensor + 1, tl.sum(total, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["tensors"])
def root_kernel(table_ptr, found_ptr, out_ptr, tensors, ENDS: tl.constexpr):
    """Write the root mean square of each tensor: NaN if an element is not finite."""
    tensor = tl.program_id(0) * ENDS + tl.arange(0, ENDS)
    inside = tensor < tensors
    count = tl.load(table_ptr + 2 * tensor + 1, mask=inside, other=1)
    key = tl.load(found_ptr + 2 * tensor, mask=inside, other=0)
    total = tl.load(found_ptr + 2 * tensor + 1, mask=inside, other=0)
    # count * UNIT is exact in fp64, and rounded once to fp32.
    mean = tl.div_rn(total.to(tl.float32), (count.to(tl.float64) * UNIT).to(tl.float32))
    # Inf and NaN have no squares: both times 0 are NaN.
    tl.store(out_ptr + tensor, top_of(key) * tl.sqrt_rn(mean), mask=inside)


def root_mean_squares(tensors: Sequence[torch.Tensor], *, block: int = BLOCK, programs: int = PROGRAMS) -> torch.Tensor:
    """Launch the kernels on contiguous tensors of one dtype (fp32, bf16 or fp16). Return fp32 ``[tensors]``."""
    device = tensors[0].device
    rows = [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]
    table = copied_to(torch.tensor(rows, dtype=torch.int64), device)
    found = torch.zeros((len(tensors), 2), dtype=torch.int64, device=device)
    out = torch.empty(len(tensors), dtype=torch.float32, device=device)
    dtype = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[tensors[0].dtype]
    grid = min(programs, triton.cdiv(max(count for _, count in rows), block)), len(tensors)
    with on_device_of(out):
        for each in (largest_kernel, squares_kernel):
            each[grid](table, found, DTYPE=dtype, BLOCK=block, num_warps=WARPS, enable_fp_fusion=False)
        root_kernel[(triton.cdiv(len(tensors), ENDS),)](
            table, found, out, len(tensors), ENDS=ENDS, num_warps=WARPS, enable_fp_fusion=False
        )
    return out
