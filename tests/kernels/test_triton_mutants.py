"""Kernels with an injected bug. The other kernel tests must catch each bug."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import test_dense_bits_triton as dense_bits
import test_padded_triton as padded
import test_section_rows_triton as section_rows
import test_triton_adam_flat as adam
import test_triton_scatter as scatter
import test_triton_select as select
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
    """A bug: its module, the code that it replaces, the new code, and the test that must fail."""

    module: str
    old: str
    new: str
    check: Callable[..., None]
    options: dict[str, Any] = {}  # noqa: RUF012


SELECTING = {
    "off-by-one mask": Mutant("select", "else at < n", "else at <= n", select.test_mark),
    "tail taken for a whole tile": Mutant("select", "TILE <= n:", "TILE <= n + 1:", select.test_mark),
    "gradient forgotten": Mutant("select", "total + gradient.to(tl.float32)", "total", select.test_mark),
    "float comparison instead of keys": Mutant(
        "select",
        "chosen = keys >= threshold_key(threshold_ptr, IS_KEY)",
        "floats = threshold_key(threshold_ptr, IS_KEY).to(tl.float32, bitcast=True)\n"
        "    chosen = keys.to(tl.float32, bitcast=True) >= floats",
        select.test_mark_by_hand,
        {"ranged": False},
    ),
    "sums compared undivided": Mutant(
        "select", "key_of(divided(total, divisor_ptr, at, None))", "key_of(total)", select.test_mark
    ),
    "sums written undivided": Mutant("select", "divided(two, divisor_ptr, second, also)", "two", select.test_expand),
    "vector searched undivided": Mutant(
        "top_k", "divided(dense, divisor_ptr, at, whole)", "dense", select.test_top_k_padded
    ),
    "strictly above": Mutant("select", "keys >= threshold_key", "keys > threshold_key", select.test_mark),
    "span end included": Mutant("select", "(at < tl.load(span_ptr", "(at <= tl.load(span_ptr", select.test_mark),
    # Not at capacity 0, where there is no memory with guards.
    "beyond the capacity": Mutant(
        "select", "position < capacity", "position < capacity + (capacity > 0)", select.test_expand
    ),
    "count cut at the capacity": Mutant(
        "select",
        "(before + tl.sum(counts, axis=0)).to(found_ptr",
        "tl.minimum(before + tl.sum(counts, axis=0), capacity).to(found_ptr",
        select.test_expand,
    ),
    "one tie too few": Mutant("top_k", "(tied_before < ties)", "(tied_before < ties - 1)", select.test_top_k_ties),
    "ties from the end": Mutant(
        "top_k",
        "equal + tl.cumsum(tied_here, axis=0) - tied_here",
        "equal + tl.sum(tied_here, axis=0) - tl.cumsum(tied_here, axis=0)",
        select.test_top_k_padded,
    ),
    "larger digits forgotten": Mutant(
        "top_k",
        "remaining -= tl.sum(tl.where(lane > value, counts, 0), axis=0)",
        "remaining -= 0",
        select.test_top_k_ties,
    ),
    "too few candidates unnoticed": Mutant("top_k", "((short == 0) & (found", "((found", select.test_top_k_padded),
    "positions among the candidates": Mutant(
        "top_k",
        "tl.store(out_indices_ptr + slot, tl.load(indices_ptr + at, mask=take, other=0), mask=take)",
        "tl.store(out_indices_ptr + slot, at, mask=take)",
        select.test_top_k_padded,
    ),
    "second bit beyond the capacity": Mutant(
        "select", "position + 1 < capacity", "position + 1 <= capacity", select.test_expand
    ),
}
SCATTERING = {
    "sums in another order": Mutant(
        "entries", "tl.cast(row, tl.int64)", "tl.cast(rows - 1 - row, tl.int64)", scatter.test_merge
    ),
    "indices behind the end are inside": Mutant(
        "entries",
        "(index < n)\n    tl.atomic_or",
        "(index < n + 2)\n    tl.atomic_or",
        padded.test_bad_indices_never_write_outside,
        {"count": 1},
    ),
    "bits of earlier groups forgotten": Mutant(
        "entries", "counts.cumsum(0, dtype=torch.int32)", "counts", scatter.test_merge
    ),
    "rotation undone the wrong way": Mutant("rebalance", "lane - rot", "lane + rot", scatter.test_rebalance),
    "floor ignored": Mutant("rebalance", "left_over < least", "left_over < 0", scatter.test_rebalance),
    "delivery not remembered": Mutant(
        "adam", "tl.int32) + tl.load(control_ptr + CLOCK).to(tl.int32),", "tl.int32),", adam.test_adam_flat
    ),
    "no limit on catching up": Mutant("adam", "tl.minimum(waited, limit)", "waited", adam.test_adam_flat),
    "no limit on a tensor's change": Mutant("adam", "length > reach", "length > reach + 3.4e38", adam.test_adam_flat),
    "less than a dense step": Mutant(
        "adam", "tl.div_rn(reach, length), 1.0)", "tl.div_rn(reach, length), 0.0)", adam.test_adam_flat
    ),
    "no param_rms": Mutant("adam", " * param_rms", "", adam.test_adam_flat),
    "NaN is no limit": Mutant(
        "adam", "tl.where(reach > FINE, reach, FINE)", "tl.where(reach < FINE, FINE, reach)", adam.test_adam_flat
    ),
    "NaN left out of sums": Mutant(
        "adam", "LARGEST_SQUARE, square, LARGEST_SQUARE", "LARGEST_SQUARE, square, 0.0", adam.test_adam_flat
    ),
    "sums of tensors in one": Mutant(
        "adam", "total_ptr + SUMS * tensor, square", "total_ptr + 0 * tensor, square", adam.test_adam_flat
    ),
    "sum of one tensor in the first": Mutant(
        "adam", "total_ptr + SUMS * first, tl.sum", "total_ptr, tl.sum", adam.test_adam_flat
    ),
    "votes of one tensor in the first": Mutant(
        "adam", "total_ptr + SUMS * first + 1", "total_ptr + 1", adam.test_adam_flat
    ),
    "votes of tensors in one": Mutant(
        "adam", "total_ptr + SUMS * tensor + 1, _widened", "total_ptr + 1 + 0 * tensor, _widened", adam.test_adam_flat
    ),
    "values in another dtype than the parameter": Mutant(
        "adam", "mask=inside, other=0.0).to(DTYPE)", "mask=inside, other=0.0)", adam.test_adam_flat
    ),
    "every vote agrees": Mutant("adam", "tl.where(mean < 0, -1, 0)", "tl.where(mean < 0, 1, 0)", adam.test_adam_flat),
    "zero votes": Mutant("adam", "tl.where(before > 0, 1, tl", "tl.where(before >= 0, 1, tl", adam.test_adam_flat),
    "chance is steady": Mutant("adam", " - 3 * tl.sqrt_rn(count), count", ", count", adam.test_adam_flat),
    "no limit where steady": Mutant(
        "adam",
        "tl.minimum(tl.abs(waited), tl.load(control_ptr + STEADY).to(tl.float32))",
        "tl.abs(waited)",
        adam.test_adam_flat,
    ),
    "channels as positions": Mutant(
        "adam", "within % positions * channels + within // positions", "within", adam.test_adam_flat
    ),
    "no limit on walking": Mutant(
        "adam",
        "tl.minimum(tl.minimum(waited, limit), walk * tl.sqrt_rn(tl.abs(waited)))",
        "tl.minimum(waited, limit)",
        adam.test_adam_flat,
    ),
    "outliers catch up": Mutant("adam", "waited - 2 * waited, waited)", "waited, waited)", adam.test_adam_flat),
    "outliers by the moment as it is": Mutant(
        "adam", "square * (correction * weight) > held", "square > held", adam.test_adam_flat
    ),
    "growth is forgotten": Mutant(
        "adam",
        "tl.where((shorter < second) | (shorter != shorter), shorter, second)",
        "shorter",
        adam.test_adam_flat,
    ),
    "nothing is forgotten": Mutant(
        "adam", "(waited > 1) & (weight > limit)", "(waited > 1) & (weight > 1)", adam.test_adam_flat
    ),
    "a memory of the past alone": Mutant(
        "adam", "tl.maximum(steps - waited, MEMORY)", "steps - waited", adam.test_adam_flat
    ),
}
PACKING = {
    "bits of the next word": Mutant("sections", "(shift < 32)", "(shift < 33)", section_rows.test_one_section),
    "free places hold bits": Mutant(
        "sections",
        "tl.where(held, tl.load(indices_ptr + at, mask=held, other=0) - low, 0)",
        "tl.load(indices_ptr + at, mask=held, other=0) - low",
        section_rows.test_one_section,
    ),
    "planes of codes reversed": Mutant(
        "sections", "row_ptr + LOW_BITS + bit,", "row_ptr + LOW_BITS + BITS - 1 - bit,", section_rows.test_one_section
    ),
    "positions beyond the room": Mutant(
        "select", "position < capacity", "position < capacity + 4", section_rows.test_more_bits_than_room
    ),
    "equal indices ascend": Mutant(
        "sections",
        "(before < offset)",
        "(before <= offset)",
        section_rows.test_each_kind_of_malformed_row,
        {"fmt": FORMATS["fp32"]},
    ),
    "overflow unnoticed": Mutant(
        "sections",
        "(high >= 0) & (high <= ((span - 1) >> LOW_BITS)) & ",
        "(high >= 0) & ",
        section_rows.test_offsets_that_overflow,
    ),
    "sample of the first values": Mutant(
        "sections", "at.to(tl.int64) * stride_of_sample", "at.to(tl.int64)", section_rows.test_long_samples
    ),
    "extents ignored": Mutant(
        "sections",
        "tl.atomic_max(own_ptr + 1, tl.max(",
        "tl.atomic_max(own_ptr + 1, 0 * tl.max(",
        section_rows.test_one_section,
    ),
    "NaN hidden by a scale": Mutant(
        "sections", "largest >= INFINITY_KEY", "largest < 0", section_rows.test_one_section
    ),
}
ROWS = {
    "slots for ties that are not taken": Mutant(
        "top_k", "tl.minimum(tied_before, ties)", "tied_before", padded.test_top_k_rows
    ),
    "digits of the first segment": Mutant(
        "top_k",
        "tl.num_programs(1) + tl.program_id(1)) * 256 + lane",
        "tl.num_programs(1)) * 256 + lane",
        padded.test_top_k_rows,
    ),
    "no padding": Mutant("top_k", "while taken < room:", "while taken < 0:", padded.test_top_k_rows),
    "padding stays between entries": Mutant("entries", "total + at - rank", "at", padded.test_joined),
    "rows of a union in another order": Mutant(
        "entries", "tl.cast(row, tl.int64)", "tl.cast(rows - 1 - row, tl.int64)", padded.test_merge_rows
    ),
    "rows added in another order": Mutant(
        "entries", "tl.cast(row, tl.int64)", "tl.cast(rows - 1 - row, tl.int64)", padded.test_add_rows
    ),
    "scale of rows forgotten": Mutant("entries", "value * scale", "value", padded.test_add_rows),
    "padding before entries": Mutant(
        "entries", "earlier = (index >= 0) & (index < sought)", "earlier = index < sought", padded.test_merge_rows
    ),
    "values before the first": Mutant(
        "entries", "inside = (index >= 0) & (index < n)", "inside = index < n", padded.test_single_entries
    ),
    "scale of the first row": Mutant(
        "sections", "extents_ptr + EXTENT * tl.program_id(1).to(tl.int64)", "extents_ptr", section_rows.test_rows
    ),
    "entries that are left out counted": Mutant(
        "sections",
        "tl.sum(keep.to(tl.int32)",
        "tl.sum(used.to(tl.int32)",
        section_rows.test_values_that_would_become_0,
        {"fmt": FORMATS["4bit"]},
    ),
    "infinite scales accepted": Mutant(
        "sections",
        "(scale > 0) & (scale < 0x7F800000)",
        "(scale > 0)",
        section_rows.test_each_kind_of_malformed_row,
        {"fmt": FORMATS["4bit"]},
    ),
    "entries of malformed rows kept": Mutant(
        "sections",
        "    if wrong:",
        "    if wrong & (program > 0):",
        section_rows.test_each_kind_of_malformed_row,
        {"fmt": FORMATS["fp32"]},
    ),
}
AVERAGING = {
    "no code for a zero with a minus": Mutant(
        "dense_bits",
        "((values.to(tl.int32, bitcast=True) >> 31) & 1) << (BITS - 1)",
        "(values < 0).to(tl.int32) << (BITS - 1)",
        dense_bits.test_every_width,
        {"bits": 1},
    ),
    "scales rounded down": Mutant("dense_bits", "rounding = (1 << dropped) - 1", "rounding = 0", dense_bits.test_steps),
    "scales of a mean rounded towards zero": Mutant(
        "dense_bits", "rounding = 1 << (dropped - 1)", "rounding = 0", dense_bits.test_steps
    ),
    "values behind the last one counted": Mutant(
        "dense_bits", "total = tl.where(inside, total, 0.0)", "total = total + 0.0", dense_bits.test_steps
    ),
    "the own part rounded twice": Mutant(
        "dense_bits",
        "tl.where(row == part, own, (levels * scales[:, None]).to(tl.float64))",
        "(levels * scales[:, None]).to(tl.float64)",
        dense_bits.test_steps,
    ),
    "the own part sent": Mutant("dense_bits", "tl.where(row == part, 0, count)", "count", dense_bits.test_steps),
    "messages in another order": Mutant(
        "dense_bits",
        "tl.cast(row, tl.int64) * size",
        "tl.cast(parts - 1 - row, tl.int64) * size",
        dense_bits.test_steps,
    ),
    "rest of the mean in units of the mean": Mutant(
        "dense_bits", "total - ranks.to(tl.float64) * sent", "total - sent", dense_bits.test_steps
    ),
    "codes of a block that is not finite": Mutant(
        "dense_bits",
        "tl.where(ratio == ratio, ",
        "tl.where(inside, ",
        dense_bits.test_steps,
    ),
    "the sign of a code ignored": Mutant(
        "dense_bits", "(codes >> (BITS - 1)) != 0", "codes < 0", dense_bits.test_every_width, {"bits": 4}
    ),
    "any scale accepted": Mutant(
        "dense_bits", "(scales >= 0) & (scales <= 2 * LIMIT)", "scales == scales", dense_bits.test_steps
    ),
    "planes of codes in another order": Mutant(
        "dense_bits", "(flat >> bit) & 1", "(flat >> (BITS - 1 - bit)) & 1", dense_bits.test_every_width, {"bits": 2}
    ),
    "the half behind the last scale not written": Mutant(
        "dense_bits", "number < 2 * (size - held)", "number * WIDTH < length", dense_bits.test_steps
    ),
}
MUTANTS = SELECTING | SCATTERING | PACKING | ROWS | AVERAGING

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
    check, options = MUTANTS[name].check, MUTANTS[name].options
    if hasattr(check, "_hypothesis_internal_use_settings"):
        # Finding the bug is enough. Shrinking the example would take minutes.
        quick = settings(
            check._hypothesis_internal_use_settings,
            max_examples=1000,  # independent of KERNEL_CASES: the first failure ends the run
            phases=[Phase.explicit, Phase.generate],
            derandomize=True,
        )
        monkeypatch.setattr(check, "_hypothesis_internal_use_settings", quick)
    monkeypatch.setattr(EXECUTOR, "orders", ORDERS[:1])
    with pytest.raises((AssertionError, FlakyFailure)) as caught:
        check("cpu", **options)
    if EXECUTED:
        assert getattr(caught.value, "check", "result") == SEEN_BY.get(name, "result")
