"""Parameters of which some ranks, or all, have no gradient, on real gloo processes."""

from __future__ import annotations

import presence_workers as workers
from helpers import run_situations


def test_situations() -> None:
    """Each situation passes."""
    run_situations(
        [
            workers.conservation,
            workers.trained_like_dense,
            workers.replicas_stay_equal,
            workers.traffic,
            workers.lost_before_it_knew,
        ],
        4,
    )
