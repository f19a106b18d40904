"""What ranks must have in common, and how a difference is worded."""

from tritoncomm.step.agree.compare import (
    LOADED,
    UPDATES,
    UPDATES_ADVICE,
    all_gather,
    compare,
    differences,
    naming,
    propagate_error,
    propagate_errors,
    worded,
)
from tritoncomm.step.agree.setup import (
    broadcast,
    compare_setup,
    device_of,
    named_parameters,
    option_numbers,
    parameter_ids,
    state_outline,
)

__all__ = [
    "LOADED",
    "UPDATES",
    "UPDATES_ADVICE",
    "all_gather",
    "broadcast",
    "compare",
    "compare_setup",
    "device_of",
    "differences",
    "named_parameters",
    "naming",
    "option_numbers",
    "parameter_ids",
    "propagate_error",
    "propagate_errors",
    "state_outline",
    "worded",
]
