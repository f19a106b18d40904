"""Worker processes of tests/distributed/test_door_edges.py: what a hook does in unusual situations."""

from __future__ import annotations

import pytest
import torch.distributed as dist
import tritoncomm
from ddp_workers import ddp, net
from door_workers import adamw
from tritoncomm import ConfigurationError
from tritoncomm.ddp import register


def settings_of_a_hook(rank: int, world_size: int, send) -> None:
    """Every setting that is given to ``wrap`` must be that of the hook, also if it is the default of ``wrap``."""
    model = ddp(net())
    state = register(model, "spardl", density=0.1, warmup_steps=3, dense_below=0, teams=1)
    node = dist.new_subgroups(1)[0]
    for given, named in (
        ({"algo": "oktopk"}, r"algo='oktopk': the model was registered with Warmup\(.*SparDL"),
        ({"algo": tritoncomm.OkTopk(density=0.1)}, r"algo=OkTopk\("),
        ({"density": 0.01}, r"density=0\.01: the model was registered with .*leave out density"),
        ({"warmup_steps": 20}, r"warmup_steps=20: "),
        ({"warmup_steps": 0}, r"warmup_steps=0: "),
        ({"teams": 3}, r"teams=3: "),
        ({"dense_below": 1024}, r"dense_below=1024: the model was registered with dense_below=0"),
        ({"node_group": node}, r"node_group=1 ranks: "),
    ):
        with pytest.raises(ConfigurationError, match=named):
            tritoncomm.wrap(adamw(model), model=model, **given)
    with pytest.raises(ConfigurationError, match=r"has no argument 'bucket_width'"):
        tritoncomm.wrap(adamw(model), model=model, bucket_width=2)
    method = state.recipe.recipe
    for given in (
        {},
        {"algo": "spardl"},
        {"algo": method},
        {"algo": state.recipe},
        {"density": 0.1, "warmup_steps": 3, "teams": 1, "dense_below": 0},
    ):
        optimizer = tritoncomm.wrap(adamw(model), model=model, **given)
        assert optimizer.recipe == state.recipe
        assert state.exchange.options.dense_below == 0
        del optimizer
