"""Methods that exist to be compared with. They have one form each, with messages of exact lengths.

Importing this package registers them, as a user's own method would be.
"""

from __future__ import annotations

import tritoncomm
from tritoncomm.planning import comparison

from baselines.dgc import DGC
from baselines.gtopk import GTopk
from baselines.random_k import RandomK
from baselines.threshold_allgather import GaussianK, HardThreshold, SIDCo
from baselines.topk_dsa import TopkDSA

__all__ = ["DGC", "GTopk", "GaussianK", "HardThreshold", "RandomK", "SIDCo", "TopkDSA"]

for kind in (DGC, GaussianK, GTopk, HardThreshold, RandomK, SIDCo, TopkDSA):
    tritoncomm.register(kind)

comparison.WHY.update(
    gaussiank="with heavy-tailed gradients, the threshold of the normal fit selects more than k entries, up to 1.5k",
    sidco="the fitted threshold selects more or fewer than k entries, or fewer than k are non-zero",
    hard_threshold="the threshold of the first step is kept while residuals grow",
    topk_dsa="fewer than k entries may be non-zero; the owner of a busy region receives more than its share",
)
