"""Runs PTX text on a GPU, through the driver, so that what an instruction does can be compared with the executor."""

from __future__ import annotations

import ctypes
import re
from functools import cache

import torch

# What a text must begin with, and where shared memory begins in it. The version is one that knows all forms of sm_90.
HEADER = """.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
"""


NEEDS_SM_100 = re.compile(r"\b(add|sub|mul)\.rn\.f32(x2|\.b?f16)|\b(min|max)\.f32( \S+,){3} ")


def knows(text: str) -> bool:
    """Return whether this GPU has all instructions of ``text``."""
    return torch.cuda.get_device_capability() >= (10, 0) or not NEEDS_SM_100.search(text)


@cache
def _driver() -> ctypes.CDLL:
    torch.cuda.init()
    torch.zeros(1, device="cuda")  # makes the context
    return ctypes.CDLL("libcuda.so.1")


def run(text: str, tensors: list[torch.Tensor], programs: int, threads: int, shared: int) -> list[torch.Tensor]:
    """Launch ``text`` on copies of ``tensors`` on the GPU, and return the copies, on the CPU.

    ``text`` is that of a kernel called ``kernel``, without a header, whose parameters are pointers to the tensors.
    Raises ``RuntimeError`` if the text cannot be loaded, or the launch fails.
    """
    driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    if code := driver.cuModuleLoadData(ctypes.byref(module), (HEADER + text).encode()):
        raise RuntimeError(f"error {code} of the driver, which was to load {text}")
    copies = [tensor.cuda() for tensor in tensors]
    pointers = [ctypes.c_uint64(copy.data_ptr()) for copy in copies]
    parameters = (ctypes.c_void_p * len(pointers))(*(ctypes.addressof(pointer) for pointer in pointers))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    try:
        for code in (
            driver.cuModuleGetFunction(ctypes.byref(function), module, b"kernel"),
            driver.cuLaunchKernel(function, programs, 1, 1, threads, 1, 1, shared, stream, parameters, None),
        ):
            if code:
                raise RuntimeError(f"error {code} of the driver")
        return [copy.cpu() for copy in copies]
    finally:
        torch.cuda.synchronize()
        driver.cuModuleUnload(module)
