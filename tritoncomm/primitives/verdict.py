"""What the ranks find wrong in a step that does not wait for a GPU: counted on each device, read at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tritoncomm.errors import NonFiniteError, ProtocolMismatchError
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, both
from tritoncomm.scheduler.ranks import named
from tritoncomm.scheduler.rounds import AllGather, Pattern, read

_PHASE = "verdict"
_GRADIENTS, _SUMS, _MESSAGES = range(3)
REJECTED = "a gradient or a sum of gradients contains NaN or Inf; nothing was applied"
SUMS_OVERFLOW = "finite gradients overflow when summed; nothing was applied"


class Verdict:
    """Counters on the device of the exchanged vector. Nothing waits for the device until :meth:`settle`.

    ``is_shared`` says that all ranks check the same values, by :meth:`check_result` or :meth:`check_sums` alone. They
    then agree without a message. After :meth:`settle`, ``figures`` holds the figures of all ranks on the device, int32
    ``[world_size, figures]``.
    """

    figures: torch.Tensor

    def __init__(self, device: torch.device, *, is_shared: bool = False) -> None:
        self._is_shared = is_shared
        self._counts = torch.zeros(3, dtype=torch.int32, device=device)
        self.is_settled = False
        self._sums_only = True  # False if the counter of sums may also hold the NaN and Inf of gradients

    def check_gradient(self, values: torch.Tensor) -> None:
        """Count the NaN and Inf of ``values``, which this rank has selected. A selection includes every NaN and Inf."""
        assert not self._is_shared
        self._add(_GRADIENTS, _non_finite(values))

    def check_sums(self, values: torch.Tensor) -> None:
        """Count the NaN and Inf of ``values``, sums over ranks."""
        self._add(_SUMS, _non_finite(values))

    def check_result(self, values: torch.Tensor) -> None:
        """Count the NaN and Inf of ``values`` that hold sums, and the NaN and Inf of any rank's gradient.

        The error names no ranks.
        """
        self._sums_only = False
        self.check_sums(values)

    def check_messages(self, malformed: torch.Tensor) -> None:
        """Count received messages that are ``malformed`` (int32 ``[1]``)."""
        assert not self._is_shared
        self._add(_MESSAGES, malformed)

    def _add(self, kind: int, count: torch.Tensor) -> None:
        self._counts[kind : kind + 1] += count

    def settle(self, world_size: int, figures: Sequence[torch.Tensor] = ()) -> Pattern[list[list[int]]]:
        """Exchange the counters, and return the ``figures`` of all ranks, ``[world_size][figures]``.

        The ``figures`` are int32 ``[1]`` each, and part of the same message. Reading them is the only time that the
        host waits for the device. Raises the same error on all ranks:

        Raises:
            NonFiniteError: A gradient has a NaN or Inf, or a sum of gradients overflows.
            ProtocolMismatchError: A rank has received a malformed message.
        """
        assert not (self._is_shared and figures)
        self.is_settled = True
        words = torch.cat([self._counts, *figures])
        silent = world_size == 1 or self._is_shared
        everybody = words[None] if silent else (yield AllGather(_PHASE, words))
        self.figures = everybody[:, len(self._counts) :]
        rows: list[list[int]] = yield from read(_PHASE, everybody)
        receivers = [rank for rank, row in enumerate(rows) if row[_MESSAGES]]
        bad = [rank for rank, row in enumerate(rows) if row[_GRADIENTS]]
        if bad:  # before the other errors, because a NaN may also make a message malformed
            raise non_finite(bad)
        if receivers:
            raise ProtocolMismatchError(
                f"phase {_PHASE!r}: ranks {named(receivers)} received malformed messages: a sender has a different "
                "partition of the vector, or a message is corrupt"
            )
        if any(row[_SUMS] for row in rows):
            raise NonFiniteError(SUMS_OVERFLOW if self._sums_only else REJECTED)
        return [row[len(self._counts) :] for row in rows]


def non_finite(numbers: Sequence[int], reason: str = "hold a NaN or Inf gradient") -> NonFiniteError:
    """Return the error for the ranks with these ``numbers`` in the group of the exchange."""
    ranks = named(numbers)
    return NonFiniteError(f"ranks {ranks} {reason}; nothing was applied", ranks)


def with_verdict(forecast: Forecast, world_size: int, figures: int = 0) -> Forecast:
    """Return ``forecast`` with the message of :meth:`Verdict.settle` for that number of ``figures``."""
    if world_size == 1:
        return forecast
    return Forecast({**forecast.phases, _PHASE: both(cost.all_gather(3 + figures, cost.WORD, world_size))})


def _non_finite(values: torch.Tensor) -> torch.Tensor:
    """Return the number of NaN and Inf, int32 ``[1]``."""
    # The difference of a NaN or Inf with itself is NaN. This takes half as many launches as isfinite.
    return (values - values != 0).sum(dtype=torch.int32).reshape(1)
