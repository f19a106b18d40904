"""Ok-Topk with what users cannot choose: other triggers, and sparse messages at density 1."""

from __future__ import annotations

from dataclasses import dataclass

from tritoncomm import OkTopk
from tritoncomm.algorithms.base import Bounds
from tritoncomm.algorithms.ok_topk import OkTopkAlgorithm
from tritoncomm.algorithms.ok_topk_rules import Triggers


class _SparseOkTopk(OkTopkAlgorithm):
    @property
    def goes_dense(self) -> bool:
        return self.numel == 0


@dataclass(frozen=True, kw_only=True)
class OkTopkVariant(OkTopk):
    """Ok-Topk with these triggers, and with sparse messages at density 1 if ``force_sparse`` is set."""

    balance_trigger: float = 4.0
    skew_trigger: float = 2.0
    drift_low: float = 0.5
    drift_high: float = 2.0
    force_sparse: bool = False

    def build(self, numel: int, bounds: Bounds = ()) -> OkTopkAlgorithm:
        triggers = Triggers(self.balance_trigger, self.skew_trigger, self.drift_low, self.drift_high)
        kind = _SparseOkTopk if self.force_sparse else OkTopkAlgorithm
        return kind(self, numel, triggers)
