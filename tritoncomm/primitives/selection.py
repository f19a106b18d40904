"""Selection of large entries: how many to keep, and what is left of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

import tritoncomm_kernels as kernels
from tritoncomm_kernels import Selection, Workspace


def entries_to_keep(numel: int, density: float) -> int:
    """Return k = floor(numel x density), at least 1 and at most ``numel``. It is 0 only for an empty vector."""
    return min(numel, max(1, int(numel * density)))


def largest_parts(
    entries: Selection, starts: Sequence[int], limits: Sequence[int], *, workspace: Workspace
) -> Selection:
    """Return the ``limits[p]`` largest entries of each part ``starts[p]`` to ``starts[p + 1]`` of ``entries``."""
    parts = [entries.slice(start, stop) for start, stop in itertools.pairwise(starts)]
    return Selection.join(
        [kernels.largest(part, limit, workspace=workspace) for part, limit in zip(parts, limits, strict=True)]
    )


def left_out(union: Selection, kept: Selection) -> Selection:
    """Return the entries of ``union`` that are not in ``kept``.

    ``kept`` is a subset of ``union``. Both are ascending.
    """
    cut = torch.ones(union.found, dtype=torch.bool, device=union.values.device)
    cut[kernels.common_positions(union.indices, kept.indices)] = False
    return Selection.of(union.indices[cut], union.values[cut])


def before_rounding(entries: Selection, sent: Selection) -> torch.Tensor:
    """Return the values (fp32 ``[m]``) that the ``sent`` entries have in ``entries``."""
    return entries.values[kernels.common_positions(entries.indices, sent.indices)]


class RoundingError:
    """How much rounding has cut off from the entries that a rank has sent in a step."""

    def __init__(self) -> None:
        self._rest = self._whole = 0.0
        self._unsent = 0

    def add(self, entries: Selection, sent: Selection) -> None:
        """Count a message. ``sent`` are those of its ``entries`` that could be sent, with rounded values."""
        exact = before_rounding(entries, sent)
        self._rest += float((exact - sent.values).double().square().sum())
        self._whole += float(exact.double().square().sum())
        self._unsent += entries.found - sent.found

    def figures(self) -> dict[str, float]:
        """Return the relative error of values (root of the ratio of squares), and the number of unsendable entries."""
        error = math.sqrt(self._rest / self._whole) if self._whole else 0.0
        return {"quantisation_error": error, "unsendable": float(self._unsent)}


def rounding_figures(entries: Selection, sent: Selection) -> dict[str, float]:
    """Return :meth:`RoundingError.figures` of a step that sends one message."""
    error = RoundingError()
    error.add(entries, sent)
    return error.figures()


def rest_of(entries: Selection, sent: Selection) -> Selection:
    """Return what is left of ``entries`` after a part of them was ``sent``, perhaps with rounded values. No zeros."""
    values = entries.values.clone()
    values[kernels.common_positions(entries.indices, sent.indices)] -= sent.values
    left = values != 0
    return Selection.of(entries.indices[left], values[left])
