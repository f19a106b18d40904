"""The table of what kernels cost on a GPU (``emulated_cuda/kernel_costs.py``) is what the Triton route does.

The route runs in Triton's interpreter. Counted are the launches of kernels, the torch operators that would be launches,
and the reads of values by the host.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from kernel_cases import INTERPRETED, kernels_from
from test_adam_flat import control_of, states_of
from torch.utils._python_dispatch import TorchDispatchMode
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.verdict import Verdict

import tritoncomm_kernels as kernels
from emulated_cuda import kernel_costs
from emulated_cuda.device import operator_of
from tritoncomm_kernels.dispatch import kernel as module_of
from tritoncomm_kernels.formats import FORMATS, INDICES, Format
from tritoncomm_kernels.section_layout import Layout
from tritoncomm_kernels.sections import read_rows, write_rows

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1: tox -e interpreter")
N = 4500  # two tiles


class _Count(TorchDispatchMode):
    """Counts launches and reads, and notes operators of torch that pass over a vector of ``numel`` elements."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.passes = numel, []
        self.launches = self.syncs = 0
        self.muted = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not self.muted:
            plan = operator_of(func)
            self.launches += plan.computes
            self.syncs += plan.sync[1] if plan.sync else 0
            given = [each for each in (*args, *(kwargs or {}).values(), out) if isinstance(each, torch.Tensor)]
            if plan.computes and not str(func).startswith("aten.index_"):  # these touch some elements only
                self.passes += [str(func)] if any(each.numel() >= self.numel for each in given) else []
        return out


@contextmanager
def counting(numel: int = N) -> Iterator[_Count]:
    """Count what the body does."""
    from triton.runtime.interpreter import InterpretedFunction  # noqa: PLC0415 - Triton is optional

    run, tolist = InterpretedFunction.run, torch.Tensor.tolist

    with _Count(numel) as count:

        def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
            count.launches += 1
            count.muted = True
            try:
                return run(self, *args, **kwargs)
            finally:
                count.muted = False

        def read(self: torch.Tensor) -> Any:
            count.syncs += 1
            return tolist(self)

        with mock.patch.object(InterpretedFunction, "run", launch), mock.patch.object(torch.Tensor, "tolist", read):
            yield count


def vector(n: int = N, seed: int = 0) -> torch.Tensor:
    """Return ``n`` values."""
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def entries(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``count`` ascending indices and their values."""
    chosen = torch.randperm(N, generator=torch.Generator().manual_seed(seed))[:count]
    return chosen.sort().values.to(torch.int32), vector(count, seed)


def _rows() -> kernels.Entries:
    found = [kernels.Entries(*entries(count, count)).padded(60) for count in (60, 20)]
    return kernels.Entries(torch.stack([each.indices for each in found]), torch.stack([each.values for each in found]))


def _ints(*content: int) -> torch.Tensor:
    return torch.tensor(content, dtype=torch.int32)


def _sum(**more: float) -> dict[str, Any]:
    return {"residual": vector(), "gradient": vector(), "out": vector()} | more


def _rounded() -> dict[str, Any]:
    return {"messages": kernels.round_parts(vector(), 3, 1, FORMATS["1bit"]), "fmt": FORMATS["1bit"]}


def _sections(fmt: Format) -> dict[str, Any]:
    return {"layout": Layout.of(60, N, fmt), "lows": _ints(0, 0), "entries": _rows()}


LISTS = [entries(200, 1), entries(0, 2), entries(300, 3)]
CASES: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "rebalance": (
        kernels.rebalance,
        lambda: {
            **{name: torch.full((4,), 5, dtype=torch.int32) for name in ("blocks", "counts")},
            "bounds": torch.zeros(5, dtype=torch.int32),
            "iteration": 0, "block": 4, "numel": 80, "min_blocks": 1,
        },
    ),
    "select": (kernels.select, lambda: {"values": vector(), "threshold": 1.0}),
    "select nothing": (kernels.select, lambda: {"values": vector(), "threshold": 100.0}),
    "accumulate_and_select": (kernels.accumulate_and_select, lambda: _sum(threshold=1.0)),
    "top_k": (kernels.top_k, lambda: {"values": vector(), "k": 90}),
    "accumulate_top_k": (kernels.accumulate_top_k, lambda: _sum(k=90)),
    "kth_magnitude": (kernels.kth_magnitude, lambda: {"values": vector(), "k": 90}),
    "largest": (kernels.largest, lambda: {"selected": kernels.Entries(*entries(500)), "k": 90}),
    "largest of few": (kernels.largest, lambda: {"selected": kernels.Entries(*entries(50)), "k": 90}),
    "count_inside": (kernels.count_inside, lambda: {"values": vector(), "threshold": 1.0, "span": _ints(7, 4200)}),
    "merge": (kernels.merge, lambda: {"lists": LISTS, "numel": N}),
    "top_k_padded": (kernels.top_k_padded, lambda: _sum(k=90)),
    "top_k_rows": (
        kernels.top_k_rows,
        lambda: {"values": vector(), "bounds": _ints(0, 4000, N), "budgets": _ints(9, 9), "room": 9},
    ),
    "joined": (kernels.joined, lambda: {"rows": _rows()}),
    "merge_rows": (kernels.merge_rows, lambda: {"rows": _rows(), "numel": N}),
    "add_rows": (kernels.add_rows, lambda: {"out": vector(), "rows": _rows()}),
    "add_rows of one": (kernels.add_rows, lambda: {"out": vector(), "rows": _rows().row(0)}),
    "set_at": (kernels.set_at, lambda: {"out": vector(), "entries": _rows().row(1)}),
    "values_at": (kernels.values_at, lambda: {"values": vector(), "indices": _rows().indices}),
    "round_parts": (kernels.round_parts, lambda: {"values": vector(), "parts": 3, "part": 1, "fmt": FORMATS["2bit"]}),
    "round_mean": (kernels.round_mean, lambda: {**_rounded(), "values": vector(), "part": 1}),
    "read_parts": (kernels.read_parts, lambda: {**_rounded(), "numel": N}),
    **{
        f"write_rows of {fmt.bits} bits": (write_rows, lambda fmt=fmt: _sections(fmt))
        for fmt in (INDICES, FORMATS["4bit"], FORMATS["fp32"])
    },
    "read_rows": (
        read_rows,
        lambda: {
            "layout": (given := _sections(FORMATS["4bit"]))["layout"],
            "lows": given["lows"],
            "messages": write_rows(**given)[0],
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_triton_route_costs_what_the_table_says(name: str) -> None:
    """Launches and synchronizations are equal, with the guess of a call before if the kernel takes one."""
    kernel, make = CASES[name]
    takes = "guess" in inspect.signature(kernel).parameters
    extra = {"guess": kernels.Guess()} if takes else {}
    with kernels_from("triton"):
        kernel(**make() | extra)  # makes a guess, and fills caches
        given = inspect.signature(kernel).bind(**make() | extra)
        given.apply_defaults()
        with counting() as count:
            result = kernel(*given.args, **given.kwargs)
    assert (count.launches, count.syncs) == kernel_costs.cost_of(kernel, result, given.arguments)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(("select", "padded"), [("at_least", False), ("top_k", False), ("top_k", True)])
def test_a_selection_by_update_takes_one_pass(
    select: str, padded: bool, rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Residual, gradient and divisor are read, and the sum is written, once. No operator of torch sees a whole vector.

    The selection is then cleared, or rounded values are subtracted. What remains is in units of the gradient.
    """
    numel, marked, select_triton = 9000, [], module_of("select_triton")
    run = select_triton.mark

    def mark(total: Any, *rest: Any) -> None:
        marked.append([total.gradient is not None, total.divisor is not None])
        run(total, *rest)

    monkeypatch.setattr(select_triton, "mark", mark)
    residual, gradient, scratch = vector(numel, 1), vector(numel, 2), torch.empty(numel)
    divisor = torch.ldexp(torch.ones(numel), (vector(numel, 3) * 3).round().int())
    expected, guesses = residual + gradient, defaultdict(kernels.Guess)
    for step in range(2):  # the first step allocates
        acc = Accumulator(residual, gradient, scratch, guesses, Verdict(residual.device) if padded else None)
        marked.clear()
        with kernels_from("triton"), counting(numel) as seen:
            scaled = acc.scaled(divisor)
            found = getattr(scaled, select)(2.5 if select == "at_least" else 400)
            sent = found._replace(values=found.values * 0.5) if rounded else found
            scaled.subtract(sent, rounded=rounded)
            acc.unscale_from(scaled, divisor)
        assert marked == [[True, True]]
        assert seen.passes == [] or step == 0
    at = found.indices.long()
    assert torch.equal(found.values, (expected / divisor)[at])
    expected[at] = expected[at] * 0.5 if rounded else 0.0
    assert torch.equal(scratch, expected)


def test_every_row_has_a_case() -> None:
    """No row of the table is without a case here."""
    assert {kernel for kernel, _ in CASES.values()} == set(kernel_costs.declared())


@pytest.mark.parametrize("indices", [None, _ints(3, 41, 50, -1)])
@pytest.mark.parametrize(("keep", "half"), [(1.0, False), (0.9, False), (0.9, True)])
def test_adam_costs_what_the_table_says(keep: float, half: bool, indices: torch.Tensor | None) -> None:
    """Launches are equal, and the host reads nothing."""
    dtype = torch.bfloat16 if half else torch.float32
    parameters = [vector(n).to(dtype) for n in (40, 700)]
    flat = kernel_costs.AdamFlat(parameters, states_of(parameters), [0, 40])
    arguments = {"indices": indices, "control": control_of(), "values": vector(740 if indices is None else 4)}
    with kernels_from("triton"):
        flat.update(**arguments, keep=keep)
        with counting() as count:
            flat.update(**arguments, keep=keep)
    costs = [*flat.costs(indices, keep)]
    assert (count.launches, count.syncs) == (sum(cost.launches for cost in costs), sum(cost.syncs for cost in costs))
