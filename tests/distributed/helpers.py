"""Worker processes for tests, with short time-outs."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

from tritoncomm.scheduler import local_workers

# Imported once, in the process that workers are forked from.
local_workers.PRELOADED += ["hypothesis", "pytest", "torch.distributed.checkpoint", "torch.distributed.fsdp"]
run_workers = partial(local_workers.run_workers, timeout=timedelta(seconds=60), limit=timedelta(seconds=240))
