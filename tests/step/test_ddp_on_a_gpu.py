"""The hook of DDP on a GPU, which is emulated. A stand-in for DDP's reducer passes buckets in a backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tritoncomm.ddp import CommState, comm_hook
from tritoncomm.step.vector_exchange import VectorExchange

from emulated_cuda import ranks
from emulated_cuda.device import to_gpu, values_of

SIZES = ((6, 7), (40,), (5, 8))


def in_backward(work: Callable[[], None]) -> None:
    """Run ``work`` in a backward pass of this thread."""
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: work())
    x.sum().backward()


def gradient(rank: int, step: int) -> list[torch.Tensor]:
    """Return the gradients of a rank, on the CPU."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(size, generator=generator) for size in SIZES]


def passes(rank: int, state: CommState, parameters: list[torch.Tensor], step: int, heard: list[object]) -> list:
    """Pass one bucket per parameter to the hook, as DDP does, and return the averaged buffers.

    Buckets are filled on streams of the backward pass, and read on the stream on which DDP finishes. Between two
    buckets, the backward pass runs a collective of its own, like SyncBatchNorm.
    """
    futures, averaged = [], []

    def reduce() -> None:
        for index, (parameter, values) in enumerate(zip(parameters, gradient(rank, step), strict=True)):
            backward, buffer = torch.cuda.Stream(), torch.empty(values.numel(), device="cuda")
            backward.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(backward):
                buffer.copy_(to_gpu(values.reshape(-1)))
                bucket = SimpleNamespace(
                    buffer=lambda buffer=buffer: buffer,
                    parameters=lambda parameter=parameter: [parameter],
                    index=lambda index=index: index,
                    is_last=lambda index=index: index == len(parameters) - 1,
                )
                if index:
                    statistics = torch.ones(3, device="cuda")
                    dist.all_reduce(statistics)
                heard.append(("bucket", index))
                futures.append(comm_hook(state, bucket))
        averaged.extend(future.wait() * 1.0 for future in futures)

    in_backward(reduce)
    return [values_of(buffer) for buffer in averaged]


@pytest.mark.parametrize("algo", ["dense", "topk_allgather", "oktopk"])
def test_all_ranks_get_the_same_mean(algo: str) -> None:
    """Passes work from the first one on, and streams wait for each other. Dense is the average."""

    def main(rank: int) -> list[list[torch.Tensor]]:
        parameters = [to_gpu(torch.zeros(size)) for size in SIZES]
        options = {} if algo == "dense" else {"density": 0.25, "warmup_steps": 0}
        state = CommState(None, algo, dense_below=0, **options)
        return [passes(rank, state, parameters, step, []) for step in range(3)]

    found = ranks.run(main, 2)
    for step in range(3):
        for one, other in zip(found[0][step], found[1][step], strict=True):
            assert torch.equal(one, other)
        if algo == "dense":
            for mean, a, b in zip(found[0][step], gradient(0, step), gradient(1, step), strict=True):
                torch.testing.assert_close(mean, ((a + b) / 2).reshape(-1))


def test_exchanges_do_not_overlap_with_collectives_of_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """All operations of a rank are on one thread, those of the exchange after the last bucket."""
    lists: dict[str, list[object]] = {}
    begin = VectorExchange.beginning

    def spied(vector: VectorExchange, **options: bool) -> object:
        heard, thread = lists[threading.current_thread().emulated_gpu.name]
        heard.append(("exchange", threading.current_thread() is thread))
        return begin(vector, **options)

    monkeypatch.setattr(VectorExchange, "beginning", spied)

    def main(rank: int) -> list[object]:
        heard: list[object] = []
        lists[f"rank {rank}"] = heard, threading.current_thread()
        parameters = [to_gpu(torch.zeros(size)) for size in SIZES]
        passes(rank, CommState(None, "topk_allgather", density=0.25, dense_below=0), parameters, 0, heard)
        return heard

    expected = [("bucket", 0), ("bucket", 1), ("bucket", 2), *[("exchange", True)] * 3]
    assert ranks.run(main, 2) == [expected, expected]


def test_a_pass_without_its_last_bucket_is_discarded() -> None:
    """Buckets of a pass that did not finish are not exchanged in the next one."""

    def main(rank: int) -> list[torch.Tensor]:
        parameters = [to_gpu(torch.zeros(size)) for size in SIZES]
        state = CommState(None, "dense", dense_below=0)
        first = SimpleNamespace(
            buffer=lambda: to_gpu(torch.full((42,), 100.0)),
            parameters=lambda: parameters[:1],
            index=lambda: 0,
            is_last=lambda: False,
        )
        in_backward(lambda: comm_hook(state, first) and None)
        return passes(rank, state, parameters, 0, [])

    for mean, a, b in zip(ranks.run(main, 2)[0], gradient(0, 0), gradient(1, 0), strict=True):
        torch.testing.assert_close(mean, ((a + b) / 2).reshape(-1))
