"""Compiled kernels with one barrier less: a check fails, or this page says why none does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
from kernel_cases import EXECUTED, agree

from depth import trials
from ptx.calls import CALLS
from ptx.launch import EXECUTOR, ORDERS, Bound, Executor
from ptx.memory import ViolationError
from ptx.parse import parse

pytestmark = [
    pytest.mark.skipif(not EXECUTED, reason="needs TRITONCOMM_PTX=1: tox -e ptx"),
    pytest.mark.skipif(
        not version("triton").startswith("3.9.") or EXECUTOR.target != "sm_90", reason="other texts, other numbers"
    ),
]
BARRIER = re.compile(r"bar\.sync\s+0;")

# The call that is examined, of several which launch a kernel. The others do less.
EXAMINED = {
    "expand_kernel": "expand", "mark_kernel": "select", "mark_indices_kernel": "merge",
    "histogram_kernel": "segments", "count_kernel": "segments", "emit_kernel": "segments",
}  # fmt: skip

FIRST = "shared memory has not been used before: the loop runs once, or this is the first use of all"
SAME = "what is stored is there already: a scan and a sum store equal totals of warps at one place"
OWN = "each thread stores only what it alone has loaded"
UNUSED = "more threads than partitions: what the others load leads to nothing"
INPUT = "what is read is not used: the loop ends here, or the values of other warps change nothing for these inputs"
UNREACHED = "a loop that these inputs do not enter"
# By kernel, as Triton 3.9 compiles it for sm_90: the barriers which are not missed, of how many, and why. Only those of
# Adam's kernels, of rebalance_kernel and the last one of planes_rows_kernel are in the source. The others are the
# compiler's, which cannot know the values.
UNMISSED = {
    "adam_kernel 2": {1: OWN},
    "adam_sums_kernel 9": dict.fromkeys((2, 3, 5), INPUT),
    "choose_rows_kernel 4": {0: FIRST},
    "expand_kernel 24": {4: SAME},
    "high_rows_kernel 2": {0: FIRST},
    "join_rows_kernel 6": {0: UNREACHED, 1: UNREACHED, 2: FIRST},
    "planes_rows_kernel 15": {0: FIRST, 14: OWN},
    "rebalance_kernel 1": {0: UNUSED},
    "count_kernel 36": {
        0: FIRST, **dict.fromkeys((2, 10, 18, 26), SAME), **dict.fromkeys((15, 23, 25, 31, 32), INPUT),
    },
    "emit_kernel 66": {
        0: FIRST, **dict.fromkeys((2, 10, 18, 26), SAME), **dict.fromkeys((15, 23, 38, 39, 40, 41), INPUT),
    },
    "histogram_kernel 11": {2: SAME, 9: OWN},
}  # fmt: skip


def without_each(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number of each barrier and the text without it."""
    for number, found in enumerate(BARRIER.finditer(text)):
        yield number, text[: found.start()] + text[found.end() :]


@pytest.mark.parametrize("call", trials(["expand", "rounded", "rebalance", "adam"], [*CALLS]))
def test_barriers_are_missed(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch with one barrier less violates a check, in lock step, unless the table has a reason why it need not."""
    unmissed: dict[str, set[int]] = {}
    launch = EXECUTOR.launch

    def launch_without_each(
        text: str, shared: int, grid: tuple[int, int, int], arguments: list[tuple[Any, str]]
    ) -> None:
        kernel, changed = parse(text), dict(without_each(text))
        if EXAMINED.get(kernel.name, call) == call and changed:
            bound = Bound(kernel, shared, grid, arguments)
            left = unmissed.setdefault(f"{kernel.name} {len(changed)}", {*changed})
            for number in [*left]:
                try:
                    Executor(orders=ORDERS[:1]).launch(changed[number], shared, grid, arguments)
                except ViolationError:
                    left.remove(number)
                bound.restore()
        launch(text, shared, grid, arguments)

    monkeypatch.setattr(EXECUTOR, "orders", ORDERS[:1])
    monkeypatch.setattr(EXECUTOR, "launch", launch_without_each)
    agree(CALLS[call], "cpu")
    assert unmissed == {name: {*UNMISSED.get(name, ())} for name in unmissed}
