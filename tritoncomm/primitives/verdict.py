"""What the ranks find wrong in a step that does not wait for a GPU: counted on each device, read at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import tritoncomm_kernels as kernels
from tritoncomm.errors import NonFiniteError, ProtocolMismatchError
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Flow, Forecast, both
from tritoncomm.scheduler.ranks import named, rank_text
from tritoncomm.scheduler.rounds import AllGather, Pattern, read

_PHASE = "verdict"
_GRADIENTS, _SUMS, _MESSAGES = range(3)
_KINDS = 3  # of counters
NAN_OR_INF = "a gradient is NaN or Inf"
REJECTED = "a gradient or a sum of gradients contains NaN or Inf; nothing was applied"
SUMS_OVERFLOW = "finite gradients overflow when summed; nothing was applied"


class Verdict:
    """Counters on the device of the exchanged vector. Nothing waits for the device until :meth:`settle`.

    Each rank tells the others its counters and its figures with the last message that all ranks gather (:meth:`words`,
    :meth:`hear`). What is counted later concerns that message alone, which is the same on all ranks. ``is_shared`` says
    that all ranks check the same values, by :meth:`check_result` or :meth:`check_sums` alone. They then agree without
    being told. After :meth:`settle`, ``figures`` holds the figures of all ranks on the device, int32
    ``[world_size, figures]``.
    """

    figures: torch.Tensor

    def __init__(self, device: torch.device, *, is_shared: bool = False) -> None:
        self._is_shared = is_shared
        self._counts = torch.zeros(_KINDS, dtype=torch.int32, device=device)
        self._heard: torch.Tensor | None = None
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
        assert not self.is_settled, "the method checks values after it has read what the ranks found wrong in its step"
        self._counts[kind : kind + 1] += count

    def words(self, figures: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """Return what this rank has to tell in its last message: its counters, and ``figures`` (int32 ``[1]`` each)."""
        assert not self._is_shared
        return torch.cat([self._counts, *figures])

    def hear(self, words: torch.Tensor) -> None:
        """Take the :meth:`words` of all ranks, int32 ``[world_size, m]``."""
        self._heard = words

    def settle(self, world_size: int, own: Sequence[torch.Tensor] = ()) -> Pattern[tuple[list[list[int]], list[int]]]:
        """Return the figures of all ranks, ``[world_size][figures]``, and ``own`` ones, int32 ``[1]`` each.

        Reading them is the only time that the host waits for the device. If nothing was heard, and all ranks do not
        check the same values, the counters are exchanged first. Raises the same error on all ranks:

        Raises:
            NonFiniteError: A gradient has a NaN or Inf, or a sum of gradients overflows.
            ProtocolMismatchError: A rank has received a malformed message.
        """
        self.is_settled = True
        heard = self._heard
        if heard is None:
            heard = self._counts[None]
            if world_size > 1 and not self._is_shared:
                heard = yield AllGather(_PHASE, self._counts)
        self.figures = heard[:, _KINDS:]
        found: list[int] = yield from read(_PHASE, torch.cat([heard.reshape(-1), self._counts, *own]))
        width = heard.shape[1]
        rows = [found[start : start + width] for start in range(0, width * len(heard), width)]
        last, values = found[width * len(rows) :][:_KINDS], found[width * len(rows) + _KINDS :]
        self._judge(rows, last)
        return [row[_KINDS:] for row in rows], values

    def _judge(self, rows: Sequence[Sequence[int]], last: Sequence[int]) -> None:
        """Raise what is wrong, given what the ranks have told, and the counters of this rank after the last message."""
        receivers = [rank for rank, row in enumerate(rows) if row[_MESSAGES]]
        bad = [rank for rank, row in enumerate(rows) if row[_GRADIENTS]]
        if bad:  # before the other errors, because a NaN may also make a message malformed
            raise non_finite(bad)
        if receivers or last[_MESSAGES]:
            who = rank_text(*named(receivers)) if receivers else "all ranks"
            raise ProtocolMismatchError(
                f"phase {_PHASE!r}: {who} received malformed messages: a sender has a different partition of the "
                "vector, or a message is corrupt"
            )
        if last[_SUMS] or any(row[_SUMS] for row in rows):
            raise NonFiniteError(SUMS_OVERFLOW if self._sums_only else REJECTED)


def non_finite(numbers: Sequence[int], reason: str = NAN_OR_INF) -> NonFiniteError:
    """Return the error for the ranks with these ``numbers`` in the group of the exchange, and the ``reason``."""
    ranks = named(numbers)
    return NonFiniteError(f"{reason} on {rank_text(*ranks)}; nothing was applied", ranks)


def check_same(values: torch.Tensor, verdict: Verdict | None, message: str = REJECTED) -> None:
    """Let all ranks, which hold the same ``values``, reject the step if one is NaN or Inf, whatever its origin.

    Without a ``verdict``, this raises :class:`~tritoncomm.NonFiniteError` with the ``message``.
    """
    if verdict is not None:
        verdict.check_result(values)
    elif kernels.has_non_finite(values):
        raise NonFiniteError(message)


def with_verdict(forecast: Forecast, world_size: int, figures: int = 0, *, phase: str = _PHASE) -> Forecast:
    """Return ``forecast`` with the words of a verdict, which travel in the all-gather of ``phase``."""
    if world_size == 1:
        return forecast
    told = cost.all_gather(_KINDS + figures, cost.WORD, world_size)
    sent = forecast.phases.get(phase, Flow()).sent.bytes
    return Forecast({**forecast.phases, phase: both(told._replace(bytes=told.bytes + sent))})


def _non_finite(values: torch.Tensor) -> torch.Tensor:
    """Return the number of NaN and Inf, int32 ``[1]``."""
    # The difference of a NaN or Inf with itself is NaN. This takes half as many launches as isfinite.
    return (values - values != 0).sum(dtype=torch.int32).reshape(1)
