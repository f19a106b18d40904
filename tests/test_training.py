"""What happens around the exchange in real training, on real gloo processes."""

from __future__ import annotations

from functools import partial

import pytest

import gloo_training
from workers import run_workers


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "torch"])
def test_loss_scaling(ours: bool) -> None:
    """GradScaler: with and without unscale_ and clipping, before and after synchronize()."""
    routes = [partial(gloo_training.loss_scaling, ours=ours, route=route) for route in gloo_training.ROUTES]
    done: list[str] = []
    run_workers(gloo_training.several, 3, routes, listen=done.append)
    assert len(done) == len(routes)


@pytest.mark.parametrize(
    "situations",
    [
        [gloo_training.scaled_synchronize, gloo_training.autocast, gloo_training.accumulation, gloo_training.clipping],
        [gloo_training.non_finite, gloo_training.names_in_messages, gloo_training.double_reduction],
        [gloo_training.settings_in_between, gloo_training.flushing, gloo_training.weight_decay],
        [gloo_training.no_gradients_under_a_scaler, gloo_training.a_quiet_start, gloo_training.policies_under_a_scaler],
        [gloo_training.chosen_and_why, gloo_training.refused_then_right],
    ],
    ids=lambda situations: ",".join(situation.__name__ for situation in situations),
)
def test_situations(situations: list) -> None:
    """What the sentences of the situations say; processes are started once for several."""
    done: list[str] = []
    run_workers(gloo_training.several, 3, situations, listen=done.append)
    assert done == [situation.__name__ for situation in situations]


def test_nodes() -> None:
    """Two nodes of two ranks."""
    run_workers(gloo_training.nodes, 4)
