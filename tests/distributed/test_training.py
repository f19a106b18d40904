"""Features of real training around the exchange, on real gloo processes."""

from __future__ import annotations

from functools import partial

import pytest
import training_precision_workers as precision
import training_workers
from helpers import run_situations, run_workers


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "torch"])
def test_loss_scaling(ours: bool) -> None:
    """Both GradScalers work with and without unscale_() and clipping, before and after synchronize()."""
    routes = [partial(precision.loss_scaling, ours=ours, route=route) for route in precision.ROUTES]
    run_situations(routes, 3)


@pytest.mark.parametrize(
    "situations",
    [
        [precision.scaled_synchronize, precision.autocast, training_workers.accumulation, training_workers.clipping],
        [
            precision.non_finite,
            precision.names_in_messages,
            training_workers.double_reduction,
            training_workers.broadcast,
        ],
        [training_workers.changed_settings, training_workers.flushing, training_workers.weight_decay],
        [precision.no_gradients_under_a_scaler, training_workers.zero_learning_rate, precision.policies_under_a_scaler],
        [training_workers.logged_choice, training_workers.rejected_then_retried, training_workers.nothing_is_late],
    ],
    ids=lambda situations: ",".join(situation.__name__ for situation in situations),
)
def test_situations(situations: list) -> None:
    """Each situation passes. The same processes run several situations, because starting them is slow."""
    run_situations(situations, 3)


def test_nodes() -> None:
    """Two nodes of two ranks exchange sparsely between the nodes."""
    assert run_workers(training_workers.nodes, 4) == [None] * 4
