"""Figures of several vectors together."""

from __future__ import annotations

from tritoncomm.scheduler.meter import Ratio, of_all


def test_amounts_add_up_and_ratios_do_not() -> None:
    """What a vector lacks does not count, and all are plain numbers."""
    joined = of_all([{"bytes": 3.0, "imbalance": Ratio(1.5)}, {"bytes": 4.0, "imbalance": Ratio(1.2), "passed": 2.0}])
    assert joined == {"bytes": 7.0, "imbalance": 1.5, "passed": 2.0}
    assert {type(figure) for figure in joined.values()} == {float}
