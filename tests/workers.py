"""Worker processes for tests: nobody waits long for anybody, and none survives its test."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

from tritoncomm.demo import launch

run_workers = partial(launch.run_workers, timeout=timedelta(seconds=60), limit=timedelta(seconds=240))
