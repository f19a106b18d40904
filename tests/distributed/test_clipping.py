"""``max_grad_norm``, which limits the gradient of a step by default, on real gloo processes."""

from __future__ import annotations

import clipping_workers
from helpers import run_situations, run_workers


def test_situations() -> None:
    """Each situation passes with three ranks."""
    situations = [
        clipping_workers.limits_gradients, clipping_workers.limit_above_all_norms,
        clipping_workers.bad_gradient_is_named, clipping_workers.limits_unscaled_gradients,
        clipping_workers.changes_between_wraps,
    ]  # fmt: skip
    run_situations(situations, 3)


def test_shards() -> None:
    """With two replicas of two shards, the norm is that of the whole gradient."""
    run_situations([clipping_workers.limits_gradients_of_shards, clipping_workers.copies_count_once], 4)


def test_one_worker() -> None:
    """There is no residual, and clipping is torch's."""
    assert run_workers(clipping_workers.one_worker, 1) == [None]
