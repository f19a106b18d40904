"""Several patterns of one rank, whose reads of a GPU are one."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from tritoncomm.scheduler import together
from tritoncomm.scheduler.together import run_together

CONTENTS = (
    torch.tensor([[3, -1], [2, 7]], dtype=torch.int32),
    torch.tensor([2**62 + 1]),
    torch.tensor([], dtype=torch.int64),
    torch.tensor([0.1, 2.0**-1040], dtype=torch.float64),
    torch.tensor(True),
)


def running(tensors: list[torch.Tensor], log: list[Any], name: str = "") -> Generator[torch.Tensor, Any, list[Any]]:
    """Read ``tensors`` one after the other, and return what was read."""
    found = []
    try:
        for tensor in tensors:
            log.append((name, len(found)))
            found.append((yield tensor))
    finally:
        log.append((name, "closed"))
    return found


def test_reads_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run gets what it reads, whatever the dtypes. The first reads of all are one, and so are the second ones."""
    reads = []
    read = together._contents
    monkeypatch.setattr(together, "_contents", lambda tensors: reads.append(len(tensors)) or read(tensors))
    log: list[Any] = []
    runs = [running(list(CONTENTS[:number]), log, str(number)) for number in range(len(CONTENTS), 0, -1)]
    results = run_together(runs)
    assert results == [[tensor.tolist() for tensor in CONTENTS[:number]] for number in range(len(CONTENTS), 0, -1)]
    assert reads == [5, 4, 3, 2, 1, 0]
    assert log[:5] == [(str(number), 0) for number in range(5, 0, -1)]
    mixed = [running([tensor], []) for tensor in CONTENTS]
    assert run_together(mixed) == [[tensor.tolist()] for tensor in CONTENTS]


def test_error_closes_the_others() -> None:
    """If a run raises, the others are closed: those that wait, and those that have not begun."""

    def failing() -> Generator[torch.Tensor, Any, list[Any]]:
        yield torch.ones(1)
        raise ArithmeticError("NaN")

    def failing_at_once() -> Generator[torch.Tensor, Any, list[Any]]:
        raise ArithmeticError("NaN")
        yield

    log: list[Any] = []
    first, last = running(list(CONTENTS), log, "first"), running(list(CONTENTS), log, "last")
    with pytest.raises(ArithmeticError, match="NaN"):
        run_together([first, failing(), last])
    assert log == [("first", 0), ("last", 0), ("first", 1), ("first", "closed"), ("last", "closed")]
    assert first.gi_frame is last.gi_frame is None
    log.clear()
    first, last = running(list(CONTENTS), log, "first"), running(list(CONTENTS), log, "last")
    with pytest.raises(ArithmeticError, match="NaN"):
        run_together([first, failing_at_once(), last])
    assert log == [("first", 0), ("first", "closed")]
    assert first.gi_frame is last.gi_frame is None


def test_error_of_an_end_closes_the_others() -> None:
    """A run that raises when it is closed does not keep the next ones open."""

    def unwilling() -> Generator[torch.Tensor, Any, list[Any]]:
        try:
            yield torch.ones(1)
        finally:
            raise ArithmeticError("not now")

    def failing() -> Generator[torch.Tensor, Any, list[Any]]:
        yield torch.ones(1)
        raise ConnectionError("lost")

    log: list[Any] = []
    last = running(list(CONTENTS), log)
    with pytest.raises(ArithmeticError, match="not now"):
        run_together([failing(), unwilling(), last])
    assert log[-1] == ("", "closed")
    assert last.gi_frame is None


def test_failed_read_is_raised_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the GPU is raised where the first run reads, so that its scheduler reports it to the other ranks."""

    def broken(tensors: list[torch.Tensor]) -> list[Any]:
        raise RuntimeError("CUDA error: unspecified launch failure")

    def reporting() -> Generator[torch.Tensor, Any, list[Any]]:
        try:
            yield torch.ones(1)
        except RuntimeError as error:
            raise ConnectionError("reported") from error
        return []

    monkeypatch.setattr(together, "_contents", broken)
    log: list[Any] = []
    with pytest.raises(ConnectionError, match="reported"):
        run_together([reporting(), running([torch.ones(1)], log)])
    assert log == [("", 0), ("", "closed")]
