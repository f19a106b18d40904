"""Operations on one device: accumulate, select, compact, scatter, rebalance, Adam update. Nothing communicates."""

from tritoncomm_kernels.adam import AdamControl, AdamStates
from tritoncomm_kernels.adam_flat import AdamFlat
from tritoncomm_kernels.dense_bits import read_parts, round_mean, round_parts
from tritoncomm_kernels.entries import (
    add_rows,
    common_positions,
    constant,
    count_entries,
    count_inside,
    count_reaching,
    joined,
    merge,
    merge_rows,
    reaching,
    scatter_add,
    set_at,
    values_at,
)
from tritoncomm_kernels.lists import Entries
from tritoncomm_kernels.memory import Guess, copied_to
from tritoncomm_kernels.rebalance import rebalance
from tritoncomm_kernels.rms import root_mean_square, root_mean_squares
from tritoncomm_kernels.select import accumulate_and_select, has_non_finite, magnitude_keys, select, threshold_key
from tritoncomm_kernels.top_k import (
    accumulate_top_k,
    accumulate_top_k_segments,
    kth_magnitude,
    largest,
    largest_padded,
    smallest_magnitude,
    top_k,
    top_k_padded,
    top_k_rows,
)

__all__ = [
    "AdamControl",
    "AdamFlat",
    "AdamStates",
    "Entries",
    "Guess",
    "accumulate_and_select",
    "accumulate_top_k",
    "accumulate_top_k_segments",
    "add_rows",
    "common_positions",
    "constant",
    "copied_to",
    "count_entries",
    "count_inside",
    "count_reaching",
    "has_non_finite",
    "joined",
    "kth_magnitude",
    "largest",
    "largest_padded",
    "magnitude_keys",
    "merge",
    "merge_rows",
    "reaching",
    "read_parts",
    "rebalance",
    "root_mean_square",
    "root_mean_squares",
    "round_mean",
    "round_parts",
    "scatter_add",
    "select",
    "set_at",
    "smallest_magnitude",
    "threshold_key",
    "top_k",
    "top_k_padded",
    "top_k_rows",
    "values_at",
]
