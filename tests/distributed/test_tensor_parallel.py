"""Parameters that tensor parallelism splits or replicates, on real gloo processes."""

from __future__ import annotations

import tensor_parallel_workers
from helpers import run_situations


def test_situations() -> None:
    """Each situation passes with two data ranks of two tensor ranks."""
    situations = [
        tensor_parallel_workers.tensor_parallel,
        tensor_parallel_workers.replicated_parameters,
        tensor_parallel_workers.states_of_replicated_parameters,
    ]
    run_situations(situations, 4)
