"""What users do by mistake, on real gloo processes."""

from __future__ import annotations

from functools import partial

import misuse_workers
import pytest
from helpers import run_situations, run_workers


@pytest.mark.parametrize(
    "situations",
    [
        [
            misuse_workers.original_stepped,
            misuse_workers.parameters_added_to_original,
            misuse_workers.rejected_group,
            misuse_workers.other_state,
            misuse_workers.settings_of_some_ranks,
        ],
        [misuse_workers.groups_that_are_none, misuse_workers.other_schedule],
        [misuse_workers.usual_scripts, misuse_workers.replaced_steps, misuse_workers.other_default_dtype],
    ],
    ids=lambda situations: ",".join(situation.__name__ for situation in situations),
)
def test_situations(situations: list) -> None:
    """Each situation passes. The same processes run several situations, because starting them is slow."""
    run_situations(situations, 2)


def test_one_folder_for_two(tmp_path) -> None:
    """Checkpoints of two optimizers, or of two groups, do not mix."""
    assert run_workers(partial(misuse_workers.one_folder_for_two, folder=str(tmp_path)), 4) == [None] * 4
