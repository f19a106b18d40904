"""The choice of the implementation, and the checks of arguments before a launch."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import tritoncomm

import tritoncomm_kernels as kernels
from tritoncomm_kernels import checks, dispatch

X = torch.ones(8)
I8 = torch.zeros(8, dtype=torch.int32)


def test_kernels_are_reached_through_dispatch_alone() -> None:
    """Only files of kernels import Triton, and each other. So everything else can be imported without Triton."""
    roots = [Path(package.__file__).parent for package in (tritoncomm, kernels)]
    sources = [file for root in roots for file in root.rglob("*.py")]
    pattern = r"^\s*(?:import|from) (?:triton\b|tritoncomm_kernels(?:\.| import .*)\w+_triton\b)"
    importing = [file for file in sources if re.search(pattern, file.read_text(), re.MULTILINE)]
    assert importing == [file for file in sources if file.name.endswith("_triton.py")]


def test_cpu_tensors_take_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, CPU tensors use the reference."""
    assert dispatch.choice == os.environ.get("TRITONCOMM_KERNELS", "auto")
    monkeypatch.setattr(dispatch, "choice", "auto")
    assert not dispatch.triton_runs(X)


def test_force_needs_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names both fixes."""
    monkeypatch.setattr(dispatch, "choice", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match=r"tensor is on cpu: move it to a GPU, set TRITON_INTERPRET=1"):
        kernels.select(X, 1.0)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.triton_runs(X)


@pytest.mark.parametrize(("found", "said"), [(None, "is not installed"), ("3.5.1", "is version 3.5.1")])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_kernels_need_triton(monkeypatch: pytest.MonkeyPatch, found: str | None, said: str, on_gpu: bool) -> None:
    """A missing or too old Triton is an error where a kernel is needed: on a GPU, or if the variable says so."""
    module = SimpleNamespace(__version__=found) if found else None  # None makes the import fail
    monkeypatch.setitem(sys.modules, "triton", module)
    monkeypatch.setattr(dispatch, "_installed", dispatch._installed.__wrapped__)
    monkeypatch.setattr(dispatch, "choice", "auto" if on_gpu else "triton")
    tensor = SimpleNamespace(device=torch.device("cuda", 0), is_cuda=True) if on_gpu else X
    with pytest.raises(RuntimeError, match=rf"Triton {said}.* need Triton 3\.6 or newer, which comes with torch 2\.11"):
        dispatch.triton_runs(tensor)
    monkeypatch.setattr(dispatch, "choice", "auto")
    assert not dispatch.triton_runs(X)


def test_unknown_choice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error lists the valid choices."""
    monkeypatch.setattr(dispatch, "choice", "cuda")
    with pytest.raises(ValueError, match=r"TRITONCOMM_KERNELS='cuda': set it to one of auto, triton"):
        kernels.select(X, 1.0)


def added(residual: torch.Tensor, gradient: torch.Tensor | None, out: torch.Tensor) -> None:
    """Call accumulate_and_select() with valid arguments, except for these."""
    kernels.accumulate_and_select(residual, gradient, out, 1.0)


def rebalanced(**changes: object) -> None:
    """Call rebalance() with valid arguments, except for ``changes``."""
    arguments = {"blocks": I8.clone(), "bounds": torch.zeros(9, dtype=torch.int32), "counts": I8} | changes
    kernels.rebalance(**{"iteration": 0, "block": 4, "numel": 32, "min_blocks": 1} | arguments)


def stepped(*, indices: torch.Tensor = I8, **changes: torch.Tensor) -> None:
    """Take a step of Adam with valid arguments, except for ``changes``."""
    tensors = {"first": X.clone(), "second": X.clone(), "last": I8, "param_rms": ONE} | changes
    states = kernels.AdamStates(**{name: [tensor] for name, tensor in tensors.items()})
    kernels.AdamFlat([X.clone()], states, [0]).update(indices, None, values=X)


ONE = torch.ones(1)
REJECTED: dict[str, Callable[[], object]] = {
    "gradient has dtype torch.float64": lambda: added(X, X.double(), X.clone()),
    "gradient has 4 elements, expected 8": lambda: added(X, X[:4], X.clone()),
    "gradient is on meta: move it to cpu": lambda: added(X, X.to("meta"), X.clone()),
    "out is on meta: move it to cpu": lambda: added(X, X, X.to("meta")),
    "gradient shares memory with out": lambda: added(X, X, X),
    "residual shares memory with out": lambda: added(X[:6], X[:6].clone(), X[2:]),
    "values starts at an address": lambda: kernels.select(
        torch.frombuffer(bytearray(33), dtype=torch.float32, offset=1, count=8), 1.0
    ),
    "divisor has 1 elements, expected 8": lambda: kernels.select(X, 1.0, divisor=ONE),
    "span has dtype torch.int64": lambda: kernels.count_inside(X, 1.0, torch.tensor([0, 3])),
    "residual and out are different tensors: without a gradient": lambda: added(X, None, X.clone()),
    "residual and out are different tensors: without a gradient, pass": lambda: kernels.top_k_padded(
        X, None, X.clone(), 3
    ),
    "k=-1 is negative": lambda: kernels.top_k(X, -1),
    "k=0: must be at least 1": lambda: kernels.top_k_padded(X, None, X, 0),
    r"lists\[0\].indices has 8 elements, expected 4": lambda: kernels.merge([(I8, X[:4])], 8),
    r"lists\[1\].values has dtype torch.bfloat16": lambda: kernels.merge([(I8, X), (I8, X.bfloat16())], 8),
    r"lists\[0\].indices is not contiguous": lambda: kernels.merge([(I8[::2], X[:4])], 8),
    r"lists\[0\].indices has dtype torch.int64": lambda: kernels.merge([(I8.long(), X)], 8),
    "numel=-1 is not in": lambda: kernels.merge([(I8, X)], -1),
    "residual has dtype torch.float64": lambda: kernels.accumulate_and_select(X.double(), X, X.clone(), 1.0),
    "gradient is not contiguous": lambda: kernels.accumulate_and_select(X, torch.ones(16)[::2], X.clone(), 1.0),
    "out has shape": lambda: kernels.accumulate_and_select(X, X.clone(), torch.ones(1, 8), 1.0),
    r"bounds=\[1, 8\]": lambda: kernels.accumulate_top_k_segments(X, X, X.clone(), [1, 8], [1]),
    r"bounds=\[0, 7\]": lambda: kernels.accumulate_top_k_segments(X, X, X.clone(), [0, 7], [1]),
    r"bounds=\[3, 1\]": lambda: kernels.accumulate_top_k_segments(X, None, X, [3, 1], [1]),
    r"bounds=\[0, 4\]": lambda: kernels.accumulate_top_k_segments(X, None, X, [0, 4], [1, 1]),
    "param_rms has 8 elements, expected 1": lambda: stepped(param_rms=X),
    "indices is not contiguous": lambda: stepped(indices=torch.arange(8, dtype=torch.int32)[::2]),
    "counts shares memory with blocks": lambda: rebalanced(blocks=I8),
    "lists is empty": lambda: kernels.merge([], 8),
    r"index outside \[0, 8\)": lambda: kernels.merge([(I8 + 8, X)], 8),
    "rule='best' is unknown": lambda: rebalanced(rule="best"),
    "numel=0 is not in": lambda: rebalanced(numel=0),
    "block=0 for numel=32": lambda: rebalanced(block=0),
    "min_blocks=-1 must be": lambda: rebalanced(min_blocks=-1),
    "bounds has 8 elements, expected 9": lambda: rebalanced(bounds=I8.clone()),
}


@pytest.mark.parametrize("message", REJECTED)
def test_bad_arguments_are_named(message: str) -> None:
    """The error names the argument and its value."""
    with pytest.raises(ValueError, match=message):
        REJECTED[message]()


def test_too_long_vectors_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector that int32 indices cannot address is rejected. A lower limit stands for 8 GiB of memory."""
    assert checks.INDEX_LIMIT < 2**31
    monkeypatch.setattr(checks, "INDEX_LIMIT", 7)
    with pytest.raises(ValueError, match="8 elements, too many for int32 indices: split it into parts of at most 7"):
        kernels.select(X, 1.0)
