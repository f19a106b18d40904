"""Operations on one device: accumulate, select, compact, scatter, rebalance, Adam update. Nothing communicates."""

from tritoncomm_kernels.accumulate import accumulate
from tritoncomm_kernels.adam import AdamControl, AdamState, adam_update
from tritoncomm_kernels.adam_flat import AdamFlat
from tritoncomm_kernels.adam_many import AdamMany, AdamStates
from tritoncomm_kernels.block_float import dequantize_parts, quantize_mean, quantize_parts
from tritoncomm_kernels.compact import (
    Selection,
    accumulate_and_select,
    has_non_finite,
    select,
    threshold_key,
)
from tritoncomm_kernels.expand import expand
from tritoncomm_kernels.mark import Marks, mark
from tritoncomm_kernels.midrise import read_parts, round_mean, round_parts
from tritoncomm_kernels.padded import (
    Padded,
    add_rows,
    constant,
    count_entries,
    count_inside,
    count_reaching,
    decompress_padded,
    joined,
    largest_padded,
    merge_rows,
    reaching,
    set_at,
    top_k_padded,
    top_k_rows,
    values_at,
)
from tritoncomm_kernels.rebalance import rebalance
from tritoncomm_kernels.rms import root_mean_square, root_mean_squares
from tritoncomm_kernels.scatter import (
    common_positions,
    decompress,
    find,
    merge,
    scatter_add,
    scatter_add_lists,
)
from tritoncomm_kernels.threshold import (
    accumulate_top_k,
    accumulate_top_k_segments,
    kth_magnitude,
    largest,
    magnitude_keys,
    smallest_magnitude,
    top_k,
    top_k_into,
    top_k_segments,
)
from tritoncomm_kernels.workspace import Workspace, copied_to

__all__ = [
    "AdamControl",
    "AdamFlat",
    "AdamMany",
    "AdamState",
    "AdamStates",
    "Marks",
    "Padded",
    "Selection",
    "Workspace",
    "accumulate",
    "accumulate_and_select",
    "accumulate_top_k",
    "accumulate_top_k_segments",
    "adam_update",
    "add_rows",
    "common_positions",
    "constant",
    "copied_to",
    "count_entries",
    "count_inside",
    "count_reaching",
    "decompress",
    "decompress_padded",
    "dequantize_parts",
    "expand",
    "find",
    "has_non_finite",
    "joined",
    "kth_magnitude",
    "largest",
    "largest_padded",
    "magnitude_keys",
    "mark",
    "merge",
    "merge_rows",
    "quantize_mean",
    "quantize_parts",
    "reaching",
    "read_parts",
    "rebalance",
    "root_mean_square",
    "root_mean_squares",
    "round_mean",
    "round_parts",
    "scatter_add",
    "scatter_add_lists",
    "select",
    "set_at",
    "smallest_magnitude",
    "threshold_key",
    "top_k",
    "top_k_into",
    "top_k_padded",
    "top_k_rows",
    "top_k_segments",
    "values_at",
]
