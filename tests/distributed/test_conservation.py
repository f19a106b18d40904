"""Gradients that are used are applied once, and others never, with every kind of module, on real gloo processes."""

from __future__ import annotations

import conservation_workers as workers
from helpers import run_situations


def test_situations() -> None:
    """Each situation passes."""
    run_situations(
        [
            workers.parts_of_a_pass,
            workers.optimizers_in_turns,
            workers.failing_flush,
            workers.synchronized_and_loaded,
            workers.changed_settings,
        ],
        2,
    )
