"""Selection of large entries: how many to keep, and what is left of them."""

from __future__ import annotations

import math

import numpy as np
import torch

import tritoncomm_kernels as kernels
from tritoncomm.scheduler.meter import Ratio
from tritoncomm_kernels import Entries

NO_KEY = 0x7FFFFFFF  # above the key of every finite magnitude


def entries_to_keep(numel: int, density: float) -> int:
    """Return k = floor(numel x density), at least 1 and at most ``numel``. It is 0 only for an empty vector."""
    return min(numel, max(1, int(numel * density)))


def smallest_key(entries: Entries, k: int) -> torch.Tensor:
    """Return the key of the smallest magnitude of the ``k`` largest of ``entries``, int32 ``[1]``.

    Without any entry it is :data:`NO_KEY`.
    """
    if not entries.room:
        return torch.full((1,), NO_KEY, dtype=torch.int32, device=entries.indices.device)
    if entries.room > k:
        entries = kernels.largest_padded(entries, k)
    keys = kernels.magnitude_keys(entries.values)
    return torch.where(entries.indices < 0, NO_KEY, keys).amin().reshape(1)


def magnitude_of(key: int) -> float:
    """Return the magnitude that has this ``key``, and infinity for :data:`NO_KEY`."""
    return math.inf if key == NO_KEY else float(np.array(key, np.int32).view(np.float32))


def ascending(indices: torch.Tensor, numel: int) -> torch.Tensor:
    """Return ``indices`` (int32 ``[m]``, padding at the end) with ``numel`` in place of padding, for a search."""
    return torch.where(indices < 0, numel, indices)


def among(kept: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return which of ``indices`` (int32, any shape) are in ``kept``, the result of :func:`ascending`. Bool."""
    if not kept.numel():
        return torch.zeros_like(indices, dtype=torch.bool)
    places = torch.searchsorted(kept, indices).clamp_(max=kept.numel() - 1)
    return kept[places] == indices


def before_rounding(entries: Entries, sent: Entries) -> torch.Tensor:
    """Return the values (fp32 ``[m]``) that the ``sent`` entries have in ``entries``."""
    if sent.indices is entries.indices:  # all of them were sent
        return entries.values
    return entries.values[kernels.common_positions(entries.indices, sent.indices)]


class RoundingError:
    """How much rounding has cut off from the entries that a rank has sent in a step."""

    def __init__(self) -> None:
        self._rest = self._whole = 0.0
        self._unsent = 0

    def add(self, entries: Entries, sent: Entries) -> None:
        """Count a message. ``sent`` are those of its ``entries`` that could be sent, with rounded values."""
        exact = before_rounding(entries, sent)
        self._rest += float((exact - sent.values).double().square().sum())
        self._whole += float(exact.double().square().sum())
        self._unsent += entries.indices.shape[0] - sent.indices.shape[0]

    def figures(self) -> dict[str, float]:
        """Return the relative error of values (root of the ratio of squares), and the number of unsendable entries."""
        error = math.sqrt(self._rest / self._whole) if self._whole else 0.0
        return {"quantisation_error": Ratio(error), "unsendable": float(self._unsent)}


def rounding_figures(entries: Entries, sent: Entries) -> dict[str, float]:
    """Return :meth:`RoundingError.figures` of a step that sends one message."""
    error = RoundingError()
    error.add(entries, sent)
    return error.figures()
