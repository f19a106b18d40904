"""Inputs of kernel tests, and a helper that runs the same call on kernel and reference."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import TypeVar
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st

from depth import DEEP
from ptx.beside import GPU
from ptx.launch import EXECUTOR, ORDERS, VARIABLE, Poisoned
from tritoncomm_kernels import Entries, dispatch, memory

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COMPARED = os.environ.get(VARIABLE) == GPU  # launches on a GPU with the executor
EXECUTED = VARIABLE in os.environ and not INTERPRETED and not COMPARED
EXECUTOR.orders = ORDERS if DEEP else (ORDERS[0], ORDERS[2])  # in lock step, and in three parts
ROUNDS_TWICE = INTERPRETED and tuple(map(int, version("triton").split(".")[:2])) < (3, 9)
# Levels of dense values per sign, in units of the scale, literally: tests know a new format by its list.
DENSE_LEVELS = {"8bit": [*range(0, 256, 2)]} | {f"{bits}bit": [*range(1, 2**bits, 2)] for bits in range(1, 8)}
DEVICES = [
    pytest.param(
        "cpu",
        id="triton-executed" if EXECUTED else "triton-interpreted",
        marks=pytest.mark.skipif(
            not INTERPRETED and not EXECUTED,
            reason="needs TRITON_INTERPRET=1 or TRITONCOMM_PTX=1: tox -e interpreter,ptx",
        ),
    ),
    pytest.param(
        "cuda",
        id="triton-gpu",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")],
    ),
]
kernels_only = pytest.mark.parametrize("device", DEVICES)
gpu_only = pytest.mark.parametrize("device", DEVICES[1:])
# The reference alone, against an oracle, and beside it the kernel. ``-k triton`` chooses the kernels.
both = pytest.mark.parametrize("device", ["reference", *DEVICES])

SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-40, math.inf, -math.inf, math.nan, 3.4e38, -2.5, 2.5]
FAMILIES = ("special", "normal", "heavy", "ties", "equal", "zero", "clustered")
THRESHOLDS = [0.0, -1.0, -0.0, math.nan, math.inf, 1.0, 1e-45, 1e-40, 2.5, 0.7]
SIZES = [0, 1, 2, 31, 32, 33, 63, 64, 65, 255, 256, 257, 700, 1023, 1024, 1025, 2049]
GUARD = 64  # elements before and after a tensor that must keep what they hold
Result = TypeVar("Result")


def cases(number: int) -> settings:
    """Return settings with ``number`` examples, scaled by ``KERNEL_CASES``, but three: the first is the simplest."""
    scaled = max(3, round(number * float(os.environ.get("KERNEL_CASES", "1"))))
    # To shrink an example takes the executor minutes.
    phases = [Phase.explicit, Phase.generate] if EXECUTED or COMPARED else [*Phase]
    return settings(deadline=None, max_examples=scaled, report_multiple_bugs=False, phases=phases)


seeds = st.integers(0, 2**31 - 1)
sizes = st.sampled_from(SIZES)
families = st.sampled_from(FAMILIES)
thresholds = st.sampled_from(THRESHOLDS)
tiles = st.sampled_from([64, 256, 1024, 4096])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def drawn(family: str, n: int, seed: int) -> torch.Tensor:
    """Return ``n`` fp32 values of one family, on the CPU. Those of "bits" may be NaNs of any payload."""
    rng = np.random.default_rng(seed)
    if family == "bits":
        return torch.from_numpy(rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32))
    values = rng.standard_normal(n)
    if family == "special":
        values = rng.choice(SPECIAL, n)
    elif family == "heavy":
        values = values * np.exp(3 * rng.standard_normal(n))
    elif family == "ties":
        values = np.round(values * 2) / 2
    elif family == "equal":
        values = np.full(n, -1.5)
    elif family == "zero":
        values = np.zeros(n)
    elif family == "clustered":
        values = values * (np.arange(n) % 256 < 16)
    return torch.from_numpy(values.astype(np.float32))


def gradient(family: str, n: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the same values as a gradient of ``dtype``."""
    values = drawn(family, n, seed).to(dtype)
    if INTERPRETED and (dtype == torch.bfloat16 or ROUNDS_TWICE):
        # The interpreter reads bf16 denormals as 0, and before 3.9 it rounds the product of a multiply-add, which
        # only shows on denormals when the factor is a power of two. A GPU does neither.
        values[values.abs() < torch.finfo(torch.bfloat16).tiny] = 0.0
    return values


def powers(n: int, seed: int) -> torch.Tensor:
    """Return ``n`` powers of two, some of them the least and the largest that a divisor may have."""
    exponents = np.random.default_rng(seed).integers(-9, 10, n)
    exponents[::50], exponents[7::50] = -126, 126
    return torch.from_numpy(np.ldexp(np.float32(1), exponents).astype(np.float32))


class Guarded:
    """Creates tensors between two guards. A guard is memory that holds a pattern and must not change."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._owners: list[tuple[torch.Tensor, int]] = []

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return a guarded copy of ``values``, contiguous and of the same shape."""
        size = values.numel()
        owner = torch.empty(size + 2 * GUARD, dtype=values.dtype, device=self.device)
        _bytes(owner).fill_(0xA5)
        held = owner[GUARD : GUARD + size].view(values.shape)
        held.copy_(values)
        self._owners.append((owner, size))
        return held

    def poison(self, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a guarded tensor that holds the pattern itself."""
        held = self.of(torch.zeros(size, dtype=dtype))
        _bytes(held).fill_(0xA5)
        return held

    def check(self) -> None:
        """Assert that every guard is intact."""
        for owner, size in self._owners:
            for guard in (owner[:GUARD], owner[GUARD + size :]):
                assert bool((_bytes(guard) == 0xA5).all()), "memory around a tensor was written"


@contextmanager
def new_memory_filled() -> Iterator[None]:
    """Fill memory that torch allocates without content: NaN, or the largest integer; for the executor its pattern."""
    if EXECUTED:
        with Poisoned():
            yield
        return
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # torch fills memory only in this mode
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def sparse(n: int, share: float, seed: int, family: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return some of ``n`` positions, ascending, with values."""
    generator = torch.Generator().manual_seed(seed)
    at = (torch.rand(n, generator=generator) < share**4).nonzero().squeeze(1).to(torch.int32)
    return at, drawn(family, at.numel(), seed)


def padded_rows(n: int, drawn_rows: list[tuple[float, int]], family: str, spare: int = 0) -> Entries:
    """Return rows with ``(share, seed)`` each, on the CPU. All have ``spare`` more slots than the longest needs."""
    rows = [sparse(n, share, seed, family) for share, seed in drawn_rows]
    room = spare + max((at.numel() for at, _ in rows), default=0)
    indices = torch.full((len(rows), room), -1, dtype=torch.int32)
    values = torch.zeros(len(rows), room)
    for row, (at, content) in enumerate(rows):
        indices[row, : at.numel()] = at
        values[row, : at.numel()] = content
    return Entries(indices, values)


def bits(tensor: torch.Tensor) -> list[int]:
    """Return the elements as integers, so -0.0 differs from 0.0. All NaN are equal: payloads depend on the device."""
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), math.nan, tensor)
    whole = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()]
    return tensor.detach().cpu().contiguous().view(whole).reshape(-1).tolist()


def key_of(value: float) -> int:
    """Return the integer key of one fp32 value, computed by hand."""
    return struct.unpack("<i", struct.pack("<f", value))[0] & 0x7FFFFFFF


def key_to_reach(limit: float) -> int:
    """Return the key of a threshold, computed by hand."""
    if math.isnan(limit):
        return 0x7F800001  # of the first NaN
    return max(1, key_of(limit)) if limit > 0 else 1


def best(values: torch.Tensor, k: int) -> list[int]:
    """Return the ascending positions of the ``k`` largest magnitudes, ties to the lower index, by sorting."""
    keys = [bit & 0x7FFFFFFF for bit in bits(values)]
    found = (at for at, key in enumerate(keys) if key)
    return sorted(sorted(found, key=lambda at: (-keys[at], at))[: max(0, k)])


def reaching(values: torch.Tensor, limit: float) -> list[int]:
    """Return the positions of the elements that reach a threshold, one by one."""
    return [at for at, bit in enumerate(bits(values)) if bit & 0x7FFFFFFF >= key_to_reach(limit)]


@contextmanager
def kernels_from(choice: str, guarded: Guarded | None = None) -> Iterator[None]:
    """Let tensors on a CPU take the reference (``auto``) or the kernel (``triton``). New memory is filled.

    What kernels pass on is between guards if they are given, and holds a pattern, as if an earlier step had left it.
    """
    scratch = memory.scratch if guarded is None else lambda size, dtype, like: guarded.poison(size, dtype)
    with (
        patch.object(dispatch, "choice", choice),
        patch.object(memory, "scratch", scratch),
        new_memory_filled(),
        np.errstate(all="ignore"),  # the interpreter computes with numpy, which warns of overflow
    ):
        yield


def routes(device: str) -> list[tuple[str, str]]:
    """Return how both implementations are chosen, and where they run: first the reference, then the kernel.

    For the device "reference", there is no kernel.
    """
    return [("auto", "cpu"), ("triton", device)][: 1 if device == "reference" else 2]


def agree(call: Callable[[Guarded], Result], device: str) -> Result:
    """Run ``call`` on kernel and reference; assert equal results and intact guards; return the result.

    The reference runs on a CPU. It runs alone for the device "reference".
    """
    results = []
    for choice, where in routes(device):
        guarded = Guarded(where)
        with kernels_from(choice, guarded):
            results.append(call(guarded))
        guarded.check()
    assert results[-1] == results[0]
    return results[-1]


def launched(call: Callable[[Guarded], Result], device: str) -> Result:
    """Run ``call``, which launches kernels itself; assert intact guards; return the result."""
    guarded = Guarded(device)
    with kernels_from("triton", guarded):
        result = call(guarded)
    guarded.check()
    return result


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
