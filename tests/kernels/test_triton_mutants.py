"""Kernels with an injected bug. The other kernel tests must catch each bug."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import test_adam_flat as adam
import test_dense_bits as dense_bits
import test_padded as padded
import test_scatter as scatter
import test_section_rows as section_rows
import test_selection as select
from hypothesis import Phase, settings
from hypothesis.errors import FlakyFailure
from kernel_cases import EXECUTED, INTERPRETED

from depth import trials
from ptx.launch import EXECUTOR, ORDERS
from tritoncomm_kernels import dispatch
from tritoncomm_kernels.formats import FORMATS

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not EXECUTED, reason="needs TRITON_INTERPRET=1 or TRITONCOMM_PTX=1: tox -e interpreter,ptx"
)


class Mutant(NamedTuple):
    """A bug: its module, the test that must fail, the code that it replaces, and the new code."""

    module: str
    check: Callable[..., None]
    old: str
    new: str


# By module and by the test that finds them: bugs by name, with the code and what replaces it.
BUGS: dict[str, dict[Callable[..., None], dict[str, tuple[str, str]]]] = {
    "select": {
        select.test_mark: {
            "off-by-one mask": ("else at < n", "else at <= n"),
            "tail taken for a whole tile": ("TILE <= n:", "TILE <= n + 1:"),
            "gradient forgotten": ("total + gradient.to(tl.float32)", "total"),
            "sums compared undivided": ("key_of(divided(total, divisor_ptr, at, None))", "key_of(total)"),
            "strictly above": ("keys >= tl.load(least", "keys > tl.load(least"),
            "span end included": ("(at < tl.load(span_ptr", "(at <= tl.load(span_ptr"),
            "float comparison instead of keys": (
                "keys >= tl.load(least_ptr)",
                "keys.to(tl.float32, bitcast=True) >= tl.load(least_ptr).to(tl.float32, bitcast=True)",
            ),
        },
        select.test_expand: {
            "sums written undivided": ("divided(two, divisor_ptr, second, also)", "two"),
            # Not at capacity 0, where there is no memory with guards.
            "beyond the capacity": ("position < capacity", "position < capacity + (capacity > 0)"),
            "count cut at the capacity": (
                "(before + tl.sum(counts, axis=0)).to(found_ptr",
                "tl.minimum(before + tl.sum(counts, axis=0), capacity).to(found_ptr",
            ),
            "second bit beyond the capacity": ("position + 1 < capacity", "position + 1 <= capacity"),
        },
        section_rows.test_more_bits_than_room: {
            "positions beyond the room": ("position < capacity", "position < capacity + 4")
        },
    },
    "top_k": {
        select.test_top_k_padded: {
            "vector searched undivided": ("divided(dense, divisor_ptr, at, whole)", "dense"),
            "one tie too few": ("(tied_before < ties)", "(tied_before < ties - 1)"),
            "ties from the end": (
                "equal + tl.cumsum(tied_here, axis=0) - tied_here",
                "equal + tl.sum(tied_here, axis=0) - tl.cumsum(tied_here, axis=0)",
            ),
            "larger digits forgotten": (
                "remaining -= tl.sum(tl.where(lane > value, counts, 0), axis=0)",
                "remaining -= 0",
            ),
            "too few candidates unnoticed": ("((short == 0) & (found", "((found"),
            "positions among the candidates": (
                "tl.store(out_indices_ptr + slot, tl.load(indices_ptr + at, mask=take, other=0), mask=take)",
                "tl.store(out_indices_ptr + slot, at, mask=take)",
            ),
        },
        padded.test_top_k_rows: {
            "slots for ties that are not taken": ("tl.minimum(tied_before, ties)", "tied_before"),
            "digits of the first segment": (
                "tl.num_programs(1) + tl.program_id(1)) * 256 + lane",
                "tl.num_programs(1)) * 256 + lane",
            ),
            "no padding": ("while taken < room:", "while taken < 0:"),
        },
    },
    "entries": {
        partial(padded.test_bad_indices_never_write_outside, count=1): {
            "indices behind the end are inside": ("(index < n)\n    tl.atomic_or", "(index < n + 2)\n    tl.atomic_or")
        },
        padded.test_joined: {"padding stays between entries": ("total + at - rank", "at")},
        padded.test_merge_rows: {
            "bits of earlier groups forgotten": ("counts.cumsum(0, dtype=torch.int32)", "counts"),
            "rows of a union in another order": ("tl.cast(row, tl.int64)", "tl.cast(rows - 1 - row, tl.int64)"),
            "padding before entries": ("earlier = (index >= 0) & (index < sought)", "earlier = index < sought"),
        },
        padded.test_add_rows: {
            "rows added in another order": ("tl.cast(row, tl.int64)", "tl.cast(rows - 1 - row, tl.int64)"),
            "scale of rows forgotten": ("value * scale", "value"),
        },
        padded.test_single_entries: {
            "values before the first": ("inside = (index >= 0) & (index < n)", "inside = index < n")
        },
    },
    "rebalance": {
        scatter.test_rebalance: {
            "rotation undone the wrong way": ("lane - rot", "lane + rot"),
            "floor ignored": ("left_over < least", "left_over < 0"),
        },
    },
    "adam": {
        adam.test_adam_flat: {
            "delivery not remembered": ("tl.int32) + tl.load(control_ptr + CLOCK).to(tl.int32),", "tl.int32),"),
            "no limit on catching up": ("tl.minimum(waited, limit)", "waited"),
            "no limit on a tensor's change": ("length > reach", "length > reach + 3.4e38"),
            "less than a dense step": ("tl.div_rn(reach, length), 1.0)", "tl.div_rn(reach, length), 0.0)"),
            "no param_rms": (" * param_rms", ""),
            "NaN is no limit": ("tl.where(reach > FINE, reach, FINE)", "tl.where(reach < FINE, FINE, reach)"),
            "NaN left out of sums": ("LARGEST_SQUARE, square, LARGEST_SQUARE", "LARGEST_SQUARE, square, 0.0"),
            "sums of tensors in one": ("total_ptr + SUMS * tensor, square", "total_ptr + 0 * tensor, square"),
            "sum of one tensor in the first": ("total_ptr + SUMS * first, tl.sum", "total_ptr, tl.sum"),
            "values in another dtype than the parameter": (
                "mask=inside, other=0.0).to(DTYPE)",
                "mask=inside, other=0.0)",
            ),
            "channels as positions": ("within % positions * channels + within // positions", "within"),
            "growth is forgotten": ("tl.where((shorter < second) | (shorter != shorter), shorter, second)", "shorter"),
            "nothing is forgotten": ("(waited > 1) & (weight > limit)", "(waited > 1) & (weight > 1)"),
            "a memory of the past alone": ("tl.maximum(steps - waited, MEMORY)", "steps - waited"),
        },
        adam.test_votes: {
            "outliers catch up": ("waited - 2 * waited, waited)", "waited, waited)"),
            "outliers by the moment as it is": ("square * (correction * weight) > held", "square > held"),
            "no limit on walking": (
                "tl.minimum(tl.minimum(waited, limit), walk * tl.sqrt_rn(tl.abs(waited)))",
                "tl.minimum(waited, limit)",
            ),
            "votes of one tensor in the first": ("total_ptr + SUMS * first + 1", "total_ptr + 1"),
            "votes of tensors in one": (
                "total_ptr + SUMS * tensor + 1, _widened",
                "total_ptr + 1 + 0 * tensor, _widened",
            ),
            "every vote agrees": ("tl.where(mean < 0, -1, 0)", "tl.where(mean < 0, 1, 0)"),
            "zero votes": ("tl.where(before > 0, 1, tl", "tl.where(before >= 0, 1, tl"),
            "chance is steady": (" - 3 * tl.sqrt_rn(count), count", ", count"),
            "no limit where steady": (
                "tl.minimum(tl.abs(waited), tl.load(control_ptr + STEADY).to(tl.float32))",
                "tl.abs(waited)",
            ),
        },
    },
    "sections": {
        section_rows.test_rows: {
            "scale of the first row": ("extents_ptr + EXTENT * tl.program_id(1).to(tl.int64)", "extents_ptr"),
            "bits of the next word": ("(shift < 32)", "(shift < 33)"),
            "free places hold bits": (
                "tl.where(held, tl.load(indices_ptr + at, mask=held, other=0) - low, 0)",
                "tl.load(indices_ptr + at, mask=held, other=0) - low",
            ),
            "planes of codes reversed": ("row_ptr + LOW_BITS + bit,", "row_ptr + LOW_BITS + BITS - 1 - bit,"),
            "extents ignored": ("tl.atomic_max(own_ptr + 1, tl.max(", "tl.atomic_max(own_ptr + 1, 0 * tl.max("),
            "NaN hidden by a scale": ("largest >= INFINITY_KEY", "largest < 0"),
        },
        partial(section_rows.test_each_kind_of_malformed_row, fmt=FORMATS["4bit"]): {
            "equal indices ascend": ("(before < offset)", "(before <= offset)"),
            "infinite scales accepted": ("(scale > 0) & (scale < 0x7F800000)", "(scale > 0)"),
            "entries of malformed rows kept": ("    if wrong:", "    if wrong & (program > 0):"),
        },
        section_rows.test_offsets_that_overflow: {
            "overflow unnoticed": ("(high >= 0) & (high <= ((span - 1) >> LOW_BITS)) & ", "(high >= 0) & ")
        },
        section_rows.test_long_samples: {
            "sample of the first values": ("at.to(tl.int64) * stride_of_sample", "at.to(tl.int64)")
        },
        partial(section_rows.test_values_that_would_become_0, fmt=FORMATS["4bit"]): {
            "entries that are left out counted": ("tl.sum(keep.to(tl.int32)", "tl.sum(used.to(tl.int32)")
        },
    },
    "dense_bits": {
        partial(dense_bits.test_every_format, name="2bit"): {
            "no code for a zero with a minus": (
                "((values.to(tl.int32, bitcast=True) >> 31) & 1) << (BITS - 1)",
                "(values < 0).to(tl.int32) << (BITS - 1)",
            ),
            "the sign of a code ignored": ("(codes >> (BITS - 1)) != 0", "codes < 0"),
            "planes of codes in another order": ("(flat >> bit) & 1", "(flat >> (BITS - 1 - bit)) & 1"),
        },
        dense_bits.test_steps: {
            "scales rounded down": ("rounding = (1 << dropped) - 1", "rounding = 0"),
            "scales of a mean rounded towards zero": ("rounding = 1 << (dropped - 1)", "rounding = 0"),
            "values behind the last one counted": ("total = tl.where(inside, total, 0.0)", "total = total + 0.0"),
            "the own part rounded twice": (
                "tl.where(row == part, own, (levels * scales[:, None]).to(tl.float64))",
                "(levels * scales[:, None]).to(tl.float64)",
            ),
            "the own part sent": ("tl.where(row == part, 0, count)", "count"),
            "messages in another order": ("tl.cast(row, tl.int64) * size", "tl.cast(parts - 1 - row, tl.int64) * size"),
            "rest of the mean in units of the mean": ("total - ranks.to(tl.float64) * sent", "total - sent"),
            "codes of a block that is not finite": ("tl.where(ratio == ratio, ", "tl.where(inside, "),
            "any scale accepted": ("(scales >= 0) & (scales <= 2 * LIMIT)", "scales == scales"),
            "the half behind the last scale not written": ("number < 2 * (size - held)", "number * WIDTH < length"),
        },
    },
}
MUTANTS = {
    name: Mutant(module, check, *bug)
    for module, checks in BUGS.items()
    for check, bugs in checks.items()
    for name, bug in bugs.items()
}

# What the executor sees before the result is compared.
SEEN_BY = {
    "off-by-one mask": "bounds",
    "tail taken for a whole tile": "bounds",
    "beyond the capacity": "bounds",
    "rotation undone the wrong way": "bounds",
    "positions beyond the room": "bounds",
    "padding stays between entries": "race",
    "bits of earlier groups forgotten": "race",
    "values before the first": "bounds",
}


# Kernels that other modules launch, too.
USERS = {
    "select": ["entries", "sections", "dense_bits"], "entries": ["sections", "dense_bits"], "sections": ["dense_bits"],
}  # fmt: skip


# Bugs that few examples show, and a seed of the examples that finds them in a second.
RARE, SEED = {"nothing is forgotten", "a memory of the past alone", "NaN left out of sums", "sums of tensors in one"}, 4


def mutate(mutant: Mutant, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the modules with kernels that the bug changes, in the order of their imports, in place of the originals."""
    for name in (mutant.module, *USERS.get(mutant.module, [])):
        source = Path(dispatch.__file__).with_name(f"{name}_triton.py").read_text()
        if name == mutant.module:
            assert mutant.old in source, "the mutant no longer applies: adapt it to the kernel"
            source = source.replace(mutant.old, mutant.new)
        copy = folder / f"{name}_mutant.py"
        copy.write_text(source)
        spec = importlib.util.spec_from_file_location(copy.stem, copy)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        monkeypatch.setitem(sys.modules, f"tritoncomm_kernels.{name}_triton", loaded)


@pytest.mark.parametrize("name", {**SEEN_BY, **dict.fromkeys([*MUTANTS][:: trials(19, 1)])} if EXECUTED else MUTANTS)
def test_mutant_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check fails on the kernel with the bug. It passes on the intact kernel in its own test.

    In the executor, a check of its own may see the bug before the result is compared: the one of the table.
    """
    mutate(MUTANTS[name], tmp_path, monkeypatch)
    check = MUTANTS[name].check
    if hasattr(check, "_hypothesis_internal_use_settings"):
        # Finding the bug is enough. Shrinking the example would take minutes.
        quick = settings(
            check._hypothesis_internal_use_settings,
            max_examples=1000,  # independent of KERNEL_CASES: the first failure ends the run
            phases=[Phase.explicit, Phase.generate],
            derandomize=name not in RARE,
            database=None,
        )
        monkeypatch.setattr(check, "_hypothesis_internal_use_settings", quick)
        if name in RARE:
            monkeypatch.setattr(check, "_hypothesis_internal_use_seed", SEED, raising=False)
    monkeypatch.setattr(EXECUTOR, "orders", ORDERS[:1])
    with pytest.raises((AssertionError, FlakyFailure)) as caught:
        check(device="cpu")
    if EXECUTED:
        assert getattr(caught.value, "check", "result") == SEEN_BY.get(name, "result")
