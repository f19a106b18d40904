"""Methods of others in one process, for comparison: their settings for ``train.py``, and SparseLoCo's exchange.

``powersgd-4`` and ``powersgd-8`` (Vogels et al., 2019), ``demo`` (Peng et al., 2024), and ``1bit`` and ``2bit``, which
round every gradient with error feedback, exchange gradients. ``diloco`` (Douillard et al., 2023), ``muloco`` (Therien
et al., 2025) and ``sparseloco`` (Sarfi et al., 2025) exchange what local steps have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tritoncomm import SparseVector
from tritoncomm.scheduler import cost

import demo_compressor

CHUNK, KEPT = 4096, 64  # SparseLoCo keeps 64 entries of 4096
_INDEX_BITS, _VALUE_BITS, _MAGNITUDES_BITS = 12, 2, 2 * 16  # of an entry, of an entry, and of a chunk

_ADAMW: dict[str, Any] = {"optimizer": "adamw"}
_GRADIENTS = _ADAMW | {"exchange": "gradients"}
_UPDATES = _ADAMW | {"exchange": "updates", "local_steps": 30}
PEERS: dict[str, dict[str, Any]] = {
    "powersgd-4": _GRADIENTS | {"method": "powersgd", "count": 4},
    "powersgd-8": _GRADIENTS | {"method": "powersgd", "count": 8},
    "demo": _GRADIENTS | {"method": "demo", "count": demo_compressor.COUNT},
    "1bit": _GRADIENTS | {"method": "quantized", "values": "1bit"},
    "2bit": _GRADIENTS | {"method": "quantized", "values": "2bit"},
    "diloco": _UPDATES | {"method": "dense", "outer_lr": 0.7, "outer_momentum": 0.9},
    "muloco": _UPDATES
    | {"optimizer": "muon", "method": "quantized", "values": "2bit", "decay": 0.9}
    | {"outer_lr": 0.8, "outer_momentum": 0.9},
    "sparseloco": _UPDATES
    | {"method": "sparseloco", "values": "2bit", "decay": 0.95, "local_steps": 16}
    | {"count": KEPT, "density": KEPT / CHUNK},
}


class SparseLoCoWorld:
    """``world_size`` workers that exchange the largest entries of each chunk of tensors of ``shapes``.

    Each tensor is cut into chunks of 4096 entries, of which the last one may be shorter. A worker sends ``count``
    entries of each, by magnitude, to all others. A value is sent as its sign and a bit that chooses one of two
    magnitudes: the means of those entries below and above the middle of the smallest and the largest. The two are bf16
    numbers. The update is the mean over all workers. What is not sent, and what rounding cuts off, stays in
    ``residuals`` (``[world_size, numel]``).
    """

    def __init__(self, world_size: int, shapes: Sequence[torch.Size], count: int = KEPT) -> None:
        self.world_size = world_size
        self.residuals = torch.zeros(world_size, sum(shape.numel() for shape in shapes))
        self._count = count
        self._sizes = [min(CHUNK, left) for shape in shapes for left in range(shape.numel(), 0, -CHUNK)]
        kept = sum(min(count, size) for size in self._sizes)
        bits = kept * (_INDEX_BITS + _VALUE_BITS) + len(self._sizes) * _MAGNITUDES_BITS
        self.traffic = [cost.all_gather(-(-bits // 8), 1, world_size)] * world_size

    def step(self, updates: torch.Tensor) -> list[SparseVector]:
        """Return the mean of what is sent of ``updates`` (``[world_size, numel]``), the same for every worker."""
        self.residuals += updates
        sent = torch.cat([self._sent(chunk) for chunk in torch.split(self.residuals, self._sizes, dim=1)], dim=1)
        self.residuals -= sent
        return [SparseVector.full(sent.mean(0))] * self.world_size

    def _sent(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return what each worker sends of ``chunk`` (``[world_size, size]``), with zeros elsewhere."""
        places = chunk.abs().topk(min(self._count, chunk.shape[1]), dim=1).indices
        values = chunk.gather(1, places)
        return torch.zeros_like(chunk).scatter_(1, places, _rounded(values))


def _rounded(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` (``[world_size, count]``), in each row with two magnitudes."""
    sizes = values.abs()
    upper = sizes > (sizes.amax(1, keepdim=True) + sizes.amin(1, keepdim=True)) / 2
    levels = torch.zeros_like(sizes)
    for chosen in (upper, ~upper):
        mean = (sizes * chosen).sum(1, keepdim=True) / chosen.sum(1, keepdim=True).clamp(min=1)
        levels += chosen * mean.bfloat16().float()
    return levels * values.sign()
