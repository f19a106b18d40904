"""Run several patterns of one rank at once, so that the host waits for a GPU once where each of them would wait."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from tritoncomm.scheduler.rounds import Result

# A pattern that a scheduler runs. It yields what the pattern reads on the host, and receives the content.
Running = Generator[torch.Tensor, Any, Result]


def run_together(runs: Sequence[Running[Result]]) -> list[Result]:
    """Run all ``runs`` to their ends, and return their results.

    Each in turn runs until it reads something. All are then read at once. All ranks pass the same runs in the same
    order. If one raises, the others are closed. See
    :meth:`tritoncomm.scheduler.process_group.ProcessGroupScheduler.running`.
    """
    results: dict[int, Result] = {}
    contents: dict[int, Any] = dict.fromkeys(range(len(runs)))
    try:
        while contents:
            waiting: dict[int, torch.Tensor] = {}
            for number, content in contents.items():
                try:
                    waiting[number] = runs[number].send(content)
                except StopIteration as stop:
                    results[number] = stop.value
            try:
                found = _contents(list(waiting.values()))
            except Exception as error:  # the GPU has failed, or a lost rank was noticed: one run reports it
                runs[next(iter(waiting))].throw(error)
                raise
            contents = dict(zip(waiting, found, strict=True))
    except BaseException:
        with ExitStack() as stack:
            for run in reversed(runs):  # closes each, also if the end of another one raises
                stack.callback(run.close)
            raise
    return [results[number] for number in range(len(runs))]


def _contents(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the contents of ``tensors`` as nested lists. The host waits once."""
    if len(tensors) <= 1:
        return [tensor.tolist() for tensor in tensors]
    pieces = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    parts = torch.split(torch.cat(pieces).cpu(), [piece.numel() for piece in pieces])
    return [
        part.clone().view(tensor.dtype).view(tensor.shape).tolist()  # a clone, because a view must be aligned
        for part, tensor in zip(parts, tensors, strict=True)
    ]
