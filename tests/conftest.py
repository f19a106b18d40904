"""How much is tried, and what may run beside what.

``pytest --hypothesis-profile=deep`` tries ten times as many cases as every commit does.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("ci", deadline=None, max_examples=100)
settings.register_profile("deep", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# With pytest-xdist each of these runs on one worker. Tests that start processes run beside tests that do not.
GROUPS = {
    "processes": ("tests/distributed/", "tests/demo/", "test_pinned.py", "test_doctor_under_torchrun", "of_processes"),
    "benchmarks": ("tests/test_benchmarks.py",),
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests one by one to whoever is free, and groups as a whole.

    By name, because ``--dist loadgroup`` of pytest-xdist 3.8 does nothing with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            found = [group for group, parts in GROUPS.items() if any(part in nodeid for part in parts)]
            if "test_compile.py" in nodeid:  # a kernel is compiled once for all tests of it
                return re.sub(r"-(sm_\d+|gfx\d+)\]$", "]", nodeid).partition("[")[2]
            return found[0] if found else nodeid

    return ByGroup(config, log)
