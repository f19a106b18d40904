"""The emulation behaves as CUDA and NCCL do, and leaves nothing behind."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tritoncomm.primitives import accumulator
from tritoncomm.scheduler import process_group

from emulated_cuda import ranks
from emulated_cuda.device import CudaTensor, to_gpu, values_of
from emulated_cuda.nccl import EmulatedNCCL
from emulated_cuda.network import Network
from emulated_cuda.streams import RaceError
from tritoncomm_kernels import Entries

# Its name since PyTorch 2.13, and before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _cuda(*content: float) -> torch.Tensor:
    return to_gpu(torch.tensor(content))


def _ones(count: int = 2) -> torch.Tensor:
    return torch.ones(count, device="cuda")


# What counts as a synchronization on a GPU, and what does not.
SYNCS: dict[str, tuple[Callable[[torch.Tensor], Any], int]] = {
    "item": (lambda x: x[0].item(), 1),
    "tolist": (lambda x: x.tolist(), 1),
    "cpu": (lambda x: x.cpu(), 1),
    "to cpu without waiting": (lambda x: x.to("cpu", non_blocking=True), 0),
    "nonzero": (lambda x: x.nonzero(), 1),
    "boolean mask": (lambda x: x[x > 1], 1),
    "masked assignment of a tensor": (lambda x: x.__setitem__(x > 1, _cuda(7.0)), 1),
    "masked assignment of a number": (lambda x: x.__setitem__(x > 1, 7.0), 0),
    "masked_select": (lambda x: x.masked_select(x > 1), 1),
    "unique": (lambda x: x.unique(), 1),
    "unique_consecutive": (torch.unique_consecutive, 1),
    "bincount": (lambda x: x.long().bincount(), 2),
    "repeat_interleave": (lambda x: torch.repeat_interleave(x, x.long()), 2),
    "repeat_interleave of a known length": (lambda x: torch.repeat_interleave(x, x.long(), output_size=6), 0),
    "equal": (lambda x: torch.equal(x, x + 1), 1),
    "index by a list": (lambda x: x[[0, 2]], 1),
    "index by a GPU tensor": (lambda x: x[torch.arange(2, device="cuda")], 0),
    "torch.tensor": (lambda x: torch.tensor([1.0], device="cuda"), 1),
    "new_tensor": (lambda x: x.new_tensor([1.0]), 1),
    "upload": (lambda x: torch.ones(3).to("cuda"), 1),
    "pageable upload without blocking": (lambda x: torch.ones(3).to("cuda", non_blocking=True), 1),
    "pinned upload without blocking": (lambda x: torch.ones(3).pin_memory().to("cuda", non_blocking=True), 0),
    "pinned upload": (lambda x: torch.ones(3).pin_memory().to("cuda"), 1),
    "copy_ from the host": (lambda x: x.copy_(torch.ones(3)), 1),
    "copy_ on the device": (lambda x: x.copy_(x + 1), 0),
    "stream": (lambda x: torch.cuda.current_stream().synchronize(), 1),
    "device": (lambda x: torch.cuda.synchronize(), 1),
    "event": (lambda x: torch.cuda.current_stream().record_event().synchronize(), 1),
    "wait of a stream": (lambda x: torch.cuda.Stream().wait_stream(torch.cuda.current_stream()), 0),
}


def test_synchronizations() -> None:
    """Each call synchronizes as often as on a GPU."""
    with ranks.alone() as gpu:
        for name, (call, count) in SYNCS.items():
            x = _cuda(3.0, 1.0, 2.0)
            gpu.reset()
            call(x)
            assert sum(gpu.syncs.values()) == count, (name, gpu.syncs)


def test_log() -> None:
    """The log names file and line in the library. Operators that compute are launches, views and allocations none."""
    with ranks.alone() as gpu:
        Entries(to_gpu(torch.tensor([1], dtype=torch.int32)), _cuda(1.0)).trimmed()
        ((_, where),) = gpu.syncs
        assert where.startswith("kernels/tritoncomm_kernels/lists.py:")
        _cuda(1.0).item()
        assert ("local_scalar_dense", "outside of tritoncomm") in gpu.syncs
        gpu.reset()
        x = torch.zeros(4, device="cuda")
        (x[1:].view(-1) + 1).add_(2)
        torch.empty(3, device="cuda").copy_(x[1:])
        assert dict(gpu.launches) == {"zeros": 1, "add": 1, "add_": 1, "copy_": 1}


def test_devices() -> None:
    """A tensor, its views and results are on the GPU, and do not mix with tensors elsewhere, in a kernel neither."""
    with ranks.alone():
        x = torch.arange(4.0, device="cuda").requires_grad_()
        (x.view(2, 2) * 2).sum().backward()
        for tensor in (x, x.grad, x.detach()[1:], torch.nn.Parameter(x.detach())):
            assert isinstance(tensor, CudaTensor)
            assert tensor.is_cuda
            assert tensor.device == torch.device("cuda", 0)
        assert values_of(x.grad).tolist() == [2.0] * 4
        assert values_of(x + torch.tensor(1.0)).tolist() == [1.0, 2.0, 3.0, 4.0]  # a CPU scalar may be mixed in
        with pytest.raises(TypeError, match="can't convert cuda:0"):
            x.detach().numpy()
        for mixed in (lambda: x + torch.ones(4), lambda: torch.cat([x, torch.ones(1)])):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                mixed()
        with pytest.raises(RuntimeError, match=r"merge, CPU tensors of shapes \[\(1,\)\]"):
            accumulator.kernels.merge([(torch.zeros(1, dtype=torch.int32), _cuda(1.0))], 3)
        with torch.cuda.device(1):
            other, found = _ones(4), []
            thread = threading.Thread(target=lambda: found.append(torch.cuda.current_device()))
            thread.start()
            thread.join()
        assert (other.device.index, found, torch.cuda.current_device()) == (1, [0], 0)  # a thread begins with GPU 0
        with pytest.raises(RuntimeError, match="cuda:0 of this thread', 'cuda:1 of this thread"):
            x + other


def test_pinned_memory_holds_garbage_before_the_event() -> None:
    """A copy to pinned memory arrives when the host has waited for it, and not before."""
    with ranks.alone() as gpu:
        pinned = torch.empty(2, pin_memory=True)
        pinned.copy_(_cuda(1.0, 2.0), non_blocking=True)
        done = torch.cuda.current_stream().record_event()
        assert pinned.is_pinned()
        assert pinned.tolist() != [1.0, 2.0]
        done.synchronize()
        assert pinned.tolist() == [1.0, 2.0]
        assert [kind for kind, _ in gpu.syncs] == ["event synchronize"]


def test_streams_order_work() -> None:
    """Work on two streams races without an event between them, in both directions, unless the bytes are others."""
    with ranks.alone():
        x, side = _ones(4), torch.cuda.Stream()
        with torch.cuda.stream(side) as entered, pytest.raises(RaceError, match="add on <stream 1"):
            x + 1  # written on the default stream
        assert entered is None
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1
            done = torch.cuda.current_stream().record_event()
        with pytest.raises(RaceError, match="that <stream 1 of GPU of this thread> reads"):
            x.add_(1)
        with pytest.raises(RaceError):
            y.sum()
        torch.cuda.current_stream().wait_event(done)
        x.add_(1)
        assert y.sum().item() == 8.0


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_is_freed_after_its_last_use(recorded: bool) -> None:
    """Memory that another stream uses must not be freed before its own stream waits, unless the use is recorded."""
    with ranks.alone():
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()

        def free() -> None:
            x = _ones()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                x.add_(1)
                if recorded:
                    x.record_stream(side)

        free()
        if not recorded:
            with pytest.raises(RaceError, match="freed while <stream 1 of GPU of this thread> uses it"):
                _ones()
            free()
            main.wait_stream(side)
        _ones()


@pytest.mark.parametrize("all_streams", [True, False])
def test_wait_of_the_host_orders_streams(all_streams: bool) -> None:
    """After the host has waited for a stream, or for all of them, what it enqueues anywhere comes later."""
    with ranks.alone():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x = _ones()
        with pytest.raises(RaceError):
            x + 1
        torch.cuda.synchronize() if all_streams else side.synchronize()
        assert (x + 1).tolist() == [2.0, 2.0]


def test_events_measure_time_once_they_are_complete() -> None:
    """An event that the host has not waited for has no time."""
    with ranks.alone():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        end.record()
        with pytest.raises(RuntimeError, match="device not ready"):
            start.elapsed_time(end)
        end.synchronize()
        assert start.query()
        assert start.elapsed_time(end) >= 0


def _messages(sizes: tuple[int, ...]) -> list[list[float]]:
    if dist.get_rank() == 0:
        messages = [torch.full((size,), 1.0 + i, device="cuda") for i, size in enumerate(sizes)]
        posts = [dist.P2POp(dist.isend, each, 1, tag=i) for i, each in enumerate(messages)]
    else:
        messages = [torch.empty(2, device="cuda") for _ in sizes]
        posts = [dist.P2POp(dist.irecv, each, 0, tag=9 - i) for i, each in enumerate(messages)]
    for work in dist.batch_isend_irecv(posts):
        work.wait()
    return [each.tolist() for each in messages]


def test_messages_match_in_their_order() -> None:
    """The tag of a message means nothing, as with NCCL."""
    assert ranks.run(lambda rank: _messages((2, 2)), 2)[1] == [[1.0, 1.0], [2.0, 2.0]]


def _in_two_orders() -> None:
    work = [dist.all_reduce, lambda values: dist.all_reduce(values, dist.ReduceOp.MAX)]
    for each in work if dist.get_rank() == 0 else reversed(work):
        each(_ones(3))


_SHARED: list[torch.Tensor] = []


def _of_another_rank() -> None:
    if dist.get_rank() == 0:
        _SHARED[:] = [_ones()]
    dist.barrier()
    _ones() + _SHARED[0]


# What two ranks do, and the error. A wait without end is one after 0.3 seconds.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "cpu": (lambda: dist.all_reduce(torch.ones(2)), "No backend type associated with device type cpu"),
    "strided": (lambda: dist.all_reduce(_ones(4)[::2]), "Tensors must be contiguous"),
    "size": (lambda: all_gather(_ones(3), _ones(2)), r"tensors have \[3\] elements, expected \[4\]"),
    "sizes of ranks": (
        lambda: dist.all_reduce(_ones(1 + dist.get_rank())),
        "the ranks call .'all_reduce SUM of 1 x torch.float32', 'all_reduce SUM of 2 x",
    ),
    "size of a message": (
        lambda: _messages((2, 3)), r"expects 2 elements of torch\.float32 of rank 0, which sends 3",
    ),
    "order": (_in_two_orders, "the ranks call .'all_reduce SUM of 3 x"),
    "tensor of another rank": (_of_another_rank, "rank 1: RuntimeError: .*cuda:0 of rank 0', 'cuda:0 of rank 1"),
    "left out": (
        lambda: dist.get_rank() or dist.all_reduce(_ones()), "rank 0 waits for collective 0 of group 0, all_reduce",
    ),
    "group of a rank alone": (
        lambda: dist.get_rank() or dist.new_group([0], use_local_synchronization=True),
        "rank 0 waits for collective 0 of group 0, split",
    ),
    "one GPU": (lambda: dist.all_reduce(_ones()), "Duplicate GPU detected"),
    "error of one rank": (lambda: 1 / 0 if dist.get_rank() else dist.barrier(), "rank 1: ZeroDivisionError"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_nccl_refuses(name: str) -> None:
    """What NCCL refuses, or what makes it hang, is an error that names the rank. The others are stopped."""
    call, message = REFUSED[name]
    network = Network(2, limit=0.3 if "waits" in message else 20.0, several_gpus=name == "one GPU")
    with pytest.raises(ranks.RankError, match=message):
        ranks.run(lambda rank: call(), 2, network=network, bind_device="split" in message)


@pytest.mark.parametrize("garbage", [False, True])
def test_abort(garbage: bool) -> None:
    """An abort ends the waits of its rank: with an error, or with garbage in the buffer. Later operations fail."""

    def main(rank: int) -> Any:
        if rank == 1:
            return None
        x, group = _ones(), dist.group.WORLD
        assert isinstance(group, EmulatedNCCL)
        threading.Timer(0.05, group.abort).start()
        if garbage:
            dist.all_reduce(x)
            assert x.tolist() not in ([1.0, 1.0], [2.0, 2.0])
        else:
            with pytest.raises(dist.DistBackendError, match="aborted"):
                dist.all_reduce(x)
        with pytest.raises(dist.DistBackendError, match="aborted"):
            dist.all_reduce(x)
        return "released"

    assert ranks.run(main, 2, network=Network(2, garbage_after_abort=garbage))[0] == "released"


def test_nothing_is_left_behind() -> None:
    """Everything that the emulation replaces is as before, also after an error."""

    def state() -> list[Any]:
        held = [torch.zeros, torch.tensor, torch.Tensor.to, torch.Tensor.is_pinned]
        held += [torch.cuda.Stream, torch.cuda.stream, threading.Thread.start, sys.excepthook, dist.all_reduce]
        held += [dist.distributed_c10d._world, process_group._exchange_ids, accumulator.kernels.top_k]
        return [*held, torch.cuda.is_available(), dist.is_initialized(), sorted(vars(torch.Tensor))]

    before = state()
    with pytest.raises(ranks.RankError):
        ranks.run(lambda rank: 1 / 0, 2)
    ranks.run(lambda rank: _ones().sum().item(), 2)
    assert all(a is b or a == b for a, b in zip(before, state(), strict=True))
    assert not any(thread.name.startswith("Thread") and thread.is_alive() for thread in threading.enumerate()[1:])
