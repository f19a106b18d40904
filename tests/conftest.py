"""How much is tried, and what may run beside what.

``pytest --hypothesis-profile=deep`` tries ten times as many cases as every commit does.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

settings.register_profile("ci", deadline=None, max_examples=100)
settings.register_profile("deep", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# With pytest-xdist, tests that start processes of their own run one after the other, beside those that do not.
START_PROCESSES = ("tests/distributed/", "tests/demo/", "test_pinned.py", "test_doctor_under_torchrun", "of_processes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests into groups for ``pytest --dist loadgroup``."""
    for item in items:
        if any(part in item.nodeid for part in START_PROCESSES):
            item.add_marker(pytest.mark.xdist_group("processes"))
        elif "test_compile.py" in item.nodeid:  # what is compiled once serves several tests
            item.add_marker(pytest.mark.xdist_group("compiler"))
