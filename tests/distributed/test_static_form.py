"""The static form of exchanges, on real gloo processes."""

from __future__ import annotations

import pytest
import static_workers
from helpers import run_situations


@pytest.mark.parametrize(
    "situations",
    [
        [static_workers.equals_exact_form],
        [static_workers.selection_by_update, static_workers.rejected, static_workers.resolved_for_gpus],
    ],
    ids=lambda situations: ",".join(situation.__name__ for situation in situations),
)
def test_static_form(situations: list) -> None:
    """Each situation passes with three workers."""
    run_situations(situations, 3)
