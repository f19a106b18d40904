"""What runs on one device: accumulate, select, compact, scatter. Knows nothing of workers."""

from tritoncomm_kernels.accumulate import accumulate
from tritoncomm_kernels.compact import (
    Selection,
    accumulate_and_select,
    has_non_finite,
    select,
    threshold_key,
)
from tritoncomm_kernels.scatter import common_positions, decompress, merge, scatter_add
from tritoncomm_kernels.threshold import (
    accumulate_top_k,
    kth_magnitude,
    largest,
    magnitude_keys,
    smallest_magnitude,
    top_k,
)

__all__ = [
    "Selection",
    "accumulate",
    "accumulate_and_select",
    "accumulate_top_k",
    "common_positions",
    "decompress",
    "has_non_finite",
    "kth_magnitude",
    "largest",
    "magnitude_keys",
    "merge",
    "scatter_add",
    "select",
    "smallest_magnitude",
    "threshold_key",
    "top_k",
]
