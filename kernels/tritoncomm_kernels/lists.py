"""Lists of entries of a vector: with exact lengths, and with a fixed length for a number that only the device knows.

A list with padding has room for a fixed number of entries. Its entries come first, ascending by index. Padding follows,
with the index -1 and the value 0. The host therefore never needs to know how many entries there are. On a GPU no
operation on such lists waits for the host, and the number of kernel launches does not depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from tritoncomm_kernels.dispatch import triton_runs

PADDING = -1


class Entries(NamedTuple):
    """Entries of a vector: ``indices`` (int32, ascending) and ``values`` (fp32), ``[room]`` or ``[rows, room]``.

    Padding may follow them. A list of exact length has none, and may be without values.
    """

    indices: torch.Tensor
    values: torch.Tensor

    @property
    def room(self) -> int:
        """Largest number of entries of a row. In a list of exact length, it is the number of entries."""
        return self.indices.shape[-1]

    @classmethod
    def empty(cls, shape: tuple[int, ...], like: torch.Tensor) -> Entries:
        """Return entries in new memory on the device of ``like``, which hold anything."""
        return cls(like.new_empty(shape, dtype=torch.int32), like.new_empty(shape, dtype=torch.float32))

    @classmethod
    def join(cls, parts: Sequence[Entries]) -> Entries:
        """Return the entries of ``parts`` (at least one list of exact length), concatenated."""
        return cls(torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts]))

    @classmethod
    def stacked(cls, rows: Sequence[Entries]) -> Entries:
        """Return ``rows``, each ``[room]``, as one list of rows."""
        return cls(torch.stack([row.indices for row in rows]), torch.stack([row.values for row in rows]))

    @classmethod
    def of_arrays(cls, indices: npt.NDArray[np.int32], values: npt.NDArray[np.float32], room: int) -> Entries:
        """Return these entries (at most ``room``) on the CPU, with padding. Calls of numpy cost less than torch's."""
        padded = np.full(room, PADDING, np.int32), np.zeros(room, np.float32)
        padded[0][: indices.size], padded[1][: values.size] = indices, values
        return cls(torch.from_numpy(padded[0]), torch.from_numpy(padded[1]))

    def slice(self, start: int, stop: int) -> Entries:
        """Return the entries from ``start`` up to ``stop``, as views."""
        return Entries(self.indices[start:stop], self.values[start:stop])

    def row(self, number: int) -> Entries:
        """Return one row, ``[room]``, as views."""
        return Entries(self.indices[number], self.values[number])

    def only(self, keep: torch.Tensor) -> Entries:
        """Return the entries with padding in place of those that are not in ``keep`` (bool)."""
        return Entries(torch.where(keep, self.indices, PADDING), torch.where(keep, self.values, 0.0))

    def padded(self, room: int) -> Entries:
        """Return the entries of a list of exact length (at most ``room``) with padding, ``[room]``."""
        if self.indices.device.type == "cpu":
            return Entries.of_arrays(self.indices.numpy(), self.values.numpy(), room)
        indices = pad(self.indices, (0, room - self.room), value=PADDING)
        return Entries(indices, pad(self.values, (0, room - self.values.numel())))

    def trimmed(self) -> Entries:
        """Return the entries of a single row without padding. On a GPU the host waits for their number."""
        if triton_runs(self.indices):
            used = int(torch.count_nonzero(self.indices != PADDING))
        else:
            used = int(np.count_nonzero(self.indices.numpy() != PADDING))
        return self.slice(0, used)


def inside(lists: Sequence[tuple[torch.Tensor, torch.Tensor]], start: int, stop: int) -> list[Entries]:
    """Return the entries of lists of exact length from ``start`` up to ``stop``, counted from ``start``.

    Lists without entries there are left out.
    """
    parts = []
    for indices, values in lists:
        low, high = torch.searchsorted(indices, indices.new_tensor([start, stop])).tolist()
        if low < high:
            parts.append(Entries(indices[low:high] - start, values[low:high]))
    return parts
