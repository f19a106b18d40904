"""The all-gather of k entries per rank in the static form: messages of a fixed length, and no wait for a GPU."""

from __future__ import annotations

import torch

import tritoncomm_kernels as kernels
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.primitives.verdict import Verdict, with_verdict
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Forecast, both
from tritoncomm.scheduler.rounds import AllGather, Pattern
from tritoncomm.scheduler.wire import PLAIN, Encoding, Rows
from tritoncomm_kernels import Padded


def rows_of(encoding: Encoding, numel: int, k: int, world_size: int, device: torch.device) -> Rows:
    """Return the format of the messages of the static form: one section with room for ``k`` entries from each rank."""
    encoding = encoding if world_size > 1 else PLAIN
    lows = kernels.constant((0,) * world_size, device)
    return Rows(encoding, lows, numel, k, divisor=world_size if encoding.rounds else 1)


def all_gather_mean_static(
    own: Padded, rows: Rows, acc: Accumulator, verdict: Verdict, world_size: int
) -> Pattern[tuple[SparseVector, Padded]]:
    """Return the mean over ranks of all ranks' entries, and ``own`` with the values sent. Nothing waits for a GPU.

    It is the static form of :func:`~tritoncomm.primitives.collectives.all_gather_mean`. Errors are in ``verdict``.
    """
    verdict.check_gradient(own.values)
    message, sent = rows.pack(Padded(own.indices[None], own.values[None]), workspace=acc.workspace)
    gathered = (yield AllGather("all-gather", message[0])) if world_size > 1 else message
    lists, malformed = rows.unpack(gathered, workspace=acc.workspace)
    verdict.check_messages(malformed)
    union = kernels.merge_rows(lists, acc.numel, workspace=acc.workspace)
    verdict.check_sums(union.values)
    mean = union.values if rows.rounds else union.values / world_size
    return SparseVector.padded(union._replace(values=mean), acc.numel), sent


def static_traffic(encoding: Encoding, numel: int, k: int, world_size: int, *, figures: int = 0) -> Forecast:
    """Return the traffic of :func:`all_gather_mean_static`, and of the verdict with ``figures``. It is exact."""
    words = rows_of(encoding, numel, k, world_size, torch.device("cpu")).words
    gathered = both(cost.all_gather(words, cost.WORD, world_size))
    return with_verdict(Forecast({"all-gather": gathered}), world_size, figures)
