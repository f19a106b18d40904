"""Steps that stop on the way, on real gloo processes."""

from __future__ import annotations

import interrupted_workers
import pytest
from helpers import run_situations


@pytest.mark.parametrize(
    "situations",
    [
        [
            interrupted_workers.failing_hook,
            interrupted_workers.given_up_step,
            interrupted_workers.failing_after_the_step,
        ],
        [interrupted_workers.failing_update, interrupted_workers.failing_on_the_way],
        [interrupted_workers.raised_in_a_wait, interrupted_workers.raised_in_the_confirmation],
        [interrupted_workers.raised_in_a_check, interrupted_workers.raised_before_a_check],
    ],
    ids=lambda situations: ",".join(situation.__name__ for situation in situations),
)
def test_situations(situations: list) -> None:
    """Each situation passes. The same processes run several situations, because starting them is slow."""
    run_situations(situations, 2)
