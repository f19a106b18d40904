"""The last import of the process that others are forked from (see ``ranks.forking``).

What has been imported is exempt from garbage collection, so that none of them looks at it, and copies its pages.
"""

from __future__ import annotations

import gc
import os

gc.collect()
gc.freeze()
os.environ.pop("PYTHONSAFEPATH", None)  # a script that one of them starts finds what is beside it
