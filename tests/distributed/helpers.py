"""Worker processes for tests: nobody waits long for anybody, and none survives its test."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

from tritoncomm.scheduler import local_workers

run_workers = partial(local_workers.run_workers, timeout=timedelta(seconds=60), limit=timedelta(seconds=240))
