"""Worker processes of tests/distributed/test_checkpoint_kinds.py: a checkpoint is the same whatever it was saved by."""

from __future__ import annotations

from copy import deepcopy
from itertools import product
from pathlib import Path

from ddp_models import net
from helpers import train
from model_kinds import adamw, bits, wrapped
from tritoncomm import checkpoint

KINDS = ("plain", "ddp")
CLIPPED = {"max_grad_norm": 0.3, "clip_by": "gradient"}


def saved_by_rank(rank: int, world_size: int, send, folder: str) -> None:
    """``tritoncomm.checkpoint`` and ``state_dict()``: what any kind has saved continues to the bit with any other."""
    for fields, saved_at in (({}, 4), (CLIPPED, 1)):
        straight = {}
        for kind in KINDS:
            model, optimizer = wrapped(kind, net(), adamw, **fields)
            train(model, optimizer, rank, range(saved_at))
            checkpoint.save(optimizer, Path(folder) / f"{kind}-{saved_at}-{len(fields)}")
            state = deepcopy(optimizer.state_dict())
            weights = deepcopy(getattr(model, "module", model).state_dict())
            train(model, optimizer, rank, range(saved_at, 8))
            straight[kind] = bits(model), optimizer.state_dict()["tritoncomm"]["checksum"]
            for other, way in product(KINDS, ("folder", "state")):
                inner = net(seed=1)
                inner.load_state_dict(weights)
                again, resumed = wrapped(other, inner, adamw, **fields)
                if way == "folder":
                    checkpoint.load(resumed, Path(folder) / f"{kind}-{saved_at}-{len(fields)}")
                else:
                    resumed.load_state_dict(deepcopy(state))
                train(again, resumed, rank, range(saved_at, 8))
                found = bits(again), resumed.state_dict()["tritoncomm"]["checksum"]
                assert found == straight[kind], (kind, other, way, saved_at)
        assert straight["plain"] == straight["ddp"]
