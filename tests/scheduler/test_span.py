"""The time of work on a GPU, which is read one step later, in metrics and in measurements of the link."""

from __future__ import annotations

import time

import pytest
import torch
import tritoncomm
from tritoncomm.planning.link import measure_link
from tritoncomm.scheduler.meter import Meter
from tritoncomm.scheduler.span import Span
from tritoncomm.step import setup

from emulated_cuda import ranks, streams
from emulated_cuda.device import current_gpu, to_gpu

GPU = torch.device("cuda", 0)
WAITS = ("stream synchronize", "event synchronize", "device synchronize")


def test_a_gpu_is_not_waited_for() -> None:
    """Until the host has waited for other reasons, the time is unknown and counts as 0."""
    with ranks.alone() as gpu:
        span, meter = Span(GPU), Meter()
        time.sleep(0.01)
        meter.time("gather", span.end())
        assert not span.is_known
        meter.settle()
        assert meter.waited == 0.0
        assert not gpu.syncs
        torch.cuda.synchronize()
        meter.settle()
        assert meter.seconds == {"gather": span.seconds}
        assert 0.01 <= meter.waited < 5.0
        meter.settle()
        assert meter.waited == span.seconds  # each time counts once


def test_a_span_is_of_its_stream() -> None:
    """Waiting for another stream does not make the time known."""
    with ranks.alone():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            span = Span(GPU).end()
        torch.ones(1, device="cuda").item()
        assert not span.is_known
        side.synchronize()
        assert span.is_known


def wrapped(parameters: list[torch.Tensor], **fields: object) -> tritoncomm.SparseOptimizer:
    """Return an optimizer that exchanges sparsely from the first step on."""
    inner = torch.optim.SGD(parameters, lr=0.1)
    return tritoncomm.wrap(inner, "topk_allgather", warmup_steps=0, dense_below=0, **fields)


def test_times_are_of_the_device_of_the_exchange() -> None:
    """It need not be the current one, on whose stream nothing of the exchange runs."""
    with ranks.alone() as gpu:
        span = Span(torch.device("cuda", 1)).end()
        assert gpu.devices == {1: 2}
        torch.cuda.synchronize(1)
        gpu.reset()
        assert span.is_known
        assert gpu.devices[1] == 1  # a query


def test_metrics_are_those_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of a step appear in the metrics of the next one. Reading them adds no synchronization."""
    monkeypatch.setattr(streams.Event, "elapsed_time", lambda start, end: 2.0)

    def main(rank: int) -> list[dict[str, float]]:
        parameter = torch.nn.Parameter(to_gpu(torch.zeros(40)))
        optimizer = wrapped([parameter], density=0.25, static=False)
        found = []
        for step in range(3):
            parameter.grad = to_gpu(torch.randn(40, generator=torch.Generator().manual_seed(10 * step + rank)))
            current_gpu().reset()
            optimizer.step()
            figures = optimizer.metrics()
            waits = sum(count for (kind, _), count in current_gpu().syncs.items() if kind in WAITS)
            found.append(figures | {"waits": waits})
        return found

    for first, second, third in ranks.run(main, 2):
        assert first["seconds_exchange"] == first["seconds_select"] == 0.0
        assert second["seconds_exchange"] >= 0.004  # at least two operations of 2 ms each
        assert second["seconds_select"] >= 0.002
        assert second["seconds_confirm"] == 0.002
        assert third["seconds_exchange"] == pytest.approx(second["seconds_exchange"])
        assert [each["waits"] for each in (first, second, third)] == [0, 0, 0]
        assert first["bytes_sent"] == third["bytes_sent"] > 0  # of the step itself


def test_the_link_is_measured_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor's link has the latency of the GPU's work, not that of its enqueueing."""
    monkeypatch.setattr(streams.Event, "elapsed_time", lambda start, end: 3.0)
    for link in ranks.run(lambda rank: measure_link(None, "cuda"), 2):
        assert link.latency == pytest.approx(0.003)


def test_parts_of_an_exchange_of_several_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of the time of vectors that are exchanged together add up to no more than the time that passed."""
    monkeypatch.setattr(setup, "by_split", lambda parameters: [[at] for at in range(len(parameters))])
    parameters = [torch.zeros(300_000, requires_grad=True) for _ in range(3)]
    optimizer = wrapped(parameters, density=0.01)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn(300_000, generator=torch.Generator().manual_seed(0))
        began = time.perf_counter()
        optimizer.step()
        passed, found = time.perf_counter() - began, optimizer.metrics()
        parts = [found[f"seconds_{part}"] for part in ("select", "exchange", "apply")]
        assert all(part >= 0.0 for part in parts)
        assert 0.0 < sum(parts) <= passed
