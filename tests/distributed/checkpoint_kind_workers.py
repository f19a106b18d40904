"""Worker processes of tests/distributed/test_checkpoint_kinds.py: a checkpoint is the same whatever it was saved by."""

from __future__ import annotations

from copy import deepcopy
from itertools import product
from pathlib import Path

import torch.distributed.checkpoint as dcp
import tritoncomm
from ddp_models import net
from helpers import train
from model_kinds import adamw, bits, wrapped
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from tritoncomm import checkpoint
from tritoncomm.checkpoint import ResidualState

KINDS = ("plain", "ddp")
CLIPPED = {"max_grad_norm": 0.3}


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


def saved_together(rank: int, world_size: int, send, folder: str) -> None:
    """The same with ``torch.distributed.checkpoint`` and ``ResidualState``."""
    for kind in KINDS:
        model, optimizer = wrapped(kind, net(), adamw)
        train(model, optimizer, rank, range(4))
        path = f"{folder}/{kind}-together"
        dcp.save(_content(model, optimizer), checkpoint_id=path)
        train(model, optimizer, rank, range(4, 8))
        for other, fields in product(KINDS, ({}, {"checkpoint_id": path})):
            again, resumed = wrapped(other, net(seed=0), adamw)
            _load(again, resumed, path, **fields)
            train(again, resumed, rank, range(4, 8))
            assert bits(again) == bits(model), (kind, other)
            checksums = [each.state_dict()["tritoncomm"]["checksum"] for each in (optimizer, resumed)]
            assert checksums[0] == checksums[1]


def _content(model: nn.Module, optimizer: tritoncomm.SparseOptimizer, **fields) -> dict:
    parts, states = get_state_dict(model, optimizer)
    return {"model": parts, "optimizer": states, "residuals": ResidualState(optimizer, **fields)}


def _load(model: nn.Module, optimizer: tritoncomm.SparseOptimizer, path: str, **fields) -> None:
    content = _content(model, optimizer, **fields)
    dcp.load(content, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
