"""Profiles of hypothesis, and groups of tests that share a worker of pytest-xdist.

``pytest --hypothesis-profile=deep`` runs ten times as many examples as the default profile. What imports torch is
imported where tests run, so that a process that only distributes them does not wait for it.
"""

from __future__ import annotations

import gc
import os
import re
from typing import Any

import pytest
from hypothesis import settings

from prepared_launcher import PreparedLauncher

settings.register_profile("ci", deadline=None, max_examples=100)
settings.register_profile("deep", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# With pytest-xdist each group runs on one worker, so that few tests that start processes run at the same time. A test
# belongs to the first group with a part of its name. Trainers are imported by the processes of one group alone.
GROUPS = {
    "scripts": (
        *("tests/test_benchmarks.py", "tests/test_race.py", "tests/slow/", "tests/test_prepared_launcher.py"),
        *("tests/demo/", "test_doctor_fails_under_torchrun", "test_subclass_is_found"),
    ),
    "pages": ("_page.py", "_pages.py", "test_pinned.py", "test_integration", "test_trainers.py"),
    "promises": (
        *("tests/promises/", "tests/test_ranks.py"),
        *("distributed/test_failures.py", "test_bad_network.py", "test_checkpoints.py"),
    ),
    "processes": ("tests/distributed/", "test_doctor_under_torchrun", "of_processes"),
}


@pytest.fixture(autouse=True)
def _sparse_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a single worker exchange sparsely, so that one process is enough to test a residual, and without warm-up.

    Values are not rounded unless a test asks for it, so that results are equal to the bit.
    """
    from tritoncomm.step import settings as options

    monkeypatch.setattr(options, "is_alone", lambda _: False)
    monkeypatch.setattr(options, "DEFAULT_WARMUP", 0)
    monkeypatch.setattr(options, "DEFAULT_VALUES", "fp32")
    monkeypatch.setattr(options, "DEFAULT_SMALL", "fp32")


@pytest.fixture(scope="session")
def launcher() -> PreparedLauncher:
    """Runs scripts, in processes that are forked from one: the tests that use it are the group ``scripts``."""
    import depth  # which reads the profile, so not before it is chosen

    return depth.launcher("matplotlib.pyplot")


def _groups(name: str) -> list[str]:
    return [group for group, parts in GROUPS.items() if any(part in name for part in parts)]


def _only_distributes(config: pytest.Config) -> bool:
    """Whether this process has workers of pytest-xdist, which collect and run all tests."""
    is_worker = hasattr(config, "workerinput")
    return not is_worker and not config.option.collectonly and config.getoption("dist", "no") != "no"


def pytest_configure(config: pytest.Config) -> None:
    """Import what all tests need, and let kernels run in the executor of PTX, if a variable says so."""
    if _only_distributes(config):
        return
    import tritoncomm.__main__  # noqa: F401 - it reads the defaults, which a fixture changes for each test
    from tritoncomm.demo import local_workers

    import baselines  # noqa: F401 - every test knows their names
    import ranks

    # Python has one server that forks. It imports what all tests need, whichever of them starts it.
    local_workers.set_forkserver_preload = lambda _: ranks.forking()

    if "TRITONCOMM_PTX" in os.environ and os.environ.get("TRITON_INTERPRET") != "1":
        from ptx import beside, launch

        (beside if os.environ[launch.VARIABLE] == beside.GPU else launch).install()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let the process that others are forked from import trainers, too, before the first test that may need them."""
    if hasattr(item.config, "workerinput") and "pages" in _groups(item.nodeid):
        import ranks

        ranks.PRELOADED = [*dict.fromkeys([*ranks.PRELOADED, *ranks.TRAINERS])]


def pytest_collection_finish() -> None:
    """Exempt what is imported from garbage collection, which takes a twentieth of the time otherwise."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def pytest_sessionfinish() -> None:
    """Let everything be collected again, or extensions report leaks at exit."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the workers of ``-n auto``, two more than cores, or of ``-n logical``, one per core.

    Tests with processes wait for much of their time, up to four groups of them at once. Those of kernels compute.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if config.option.numprocesses == "logical" else cores + 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute tests one by one, and each group as a whole.

    Groups are found by name, because ``--dist loadgroup`` of pytest-xdist 3.8 has no effect with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            found = _groups(nodeid)
            if "test_compile.py" in nodeid:  # a kernel is compiled once for all tests of it
                return re.sub(r"-(sm_\d+|gfx\d+)\]$", "]", nodeid).partition("[")[2]
            return found[0] if found else nodeid

    return ByGroup(config, log)
