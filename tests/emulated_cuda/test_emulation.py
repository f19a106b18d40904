"""The emulation behaves as CUDA and NCCL do, and leaves nothing behind."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tritoncomm.primitives import collectives
from tritoncomm.scheduler import process_group

from emulated_cuda import ranks
from emulated_cuda.device import CudaTensor, to_gpu, values_of
from emulated_cuda.nccl import EmulatedNCCL
from emulated_cuda.network import Hang, Network, WatchdogEnd
from emulated_cuda.streams import RaceError
from tritoncomm_kernels import Entries

# Their names since PyTorch 2.13, and before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _cuda(*content: float) -> torch.Tensor:
    return to_gpu(torch.tensor(content))


# What counts as a synchronization on a GPU, and what does not.
SYNCS: dict[str, tuple[Callable[[torch.Tensor], Any], int]] = {
    "item": (lambda x: x[0].item(), 1),
    "int": (lambda x: int(x[0]), 1),
    "bool": (lambda x: bool(x[0] > 0), 1),
    "tolist": (lambda x: x.tolist(), 1),
    "cpu": (lambda x: x.cpu(), 1),
    "to cpu": (lambda x: x.to("cpu"), 1),
    "to cpu without waiting": (lambda x: x.to("cpu", non_blocking=True), 0),
    "nonzero": (lambda x: x.nonzero(), 1),
    "boolean mask": (lambda x: x[x > 1], 1),
    "masked assignment of a tensor": (lambda x: x.__setitem__(x > 1, _cuda(7.0)), 1),
    "masked assignment of a number": (lambda x: x.__setitem__(x > 1, 7.0), 0),
    "masked_select": (lambda x: x.masked_select(x > 1), 1),
    "where": (lambda x: torch.where(x > 1, x, 0.0), 0),
    "unique": (lambda x: x.unique(), 1),
    "unique_consecutive": (torch.unique_consecutive, 1),
    "bincount": (lambda x: x.long().bincount(), 2),
    "repeat_interleave": (lambda x: torch.repeat_interleave(x, x.long()), 2),
    "repeat_interleave of a known length": (lambda x: torch.repeat_interleave(x, x.long(), output_size=6), 0),
    "repeat_interleave by a number": (lambda x: x.repeat_interleave(2), 0),
    "equal": (lambda x: torch.equal(x, x + 1), 1),
    "index by a list": (lambda x: x[[0, 2]], 1),
    "index by a CPU tensor": (lambda x: x[torch.tensor([0, 2])], 1),
    "index by a GPU tensor": (lambda x: x[torch.arange(2, device="cuda")], 0),
    "slice": (lambda x: x[1:], 0),
    "torch.tensor": (lambda x: torch.tensor([1.0], device="cuda"), 1),
    "new_tensor": (lambda x: x.new_tensor([1.0]), 1),
    "torch.full": (lambda x: torch.full((3,), 1.0, device="cuda"), 0),
    "upload": (lambda x: torch.ones(3).to("cuda"), 1),
    "pageable upload without blocking": (lambda x: torch.ones(3).to("cuda", non_blocking=True), 1),
    "pinned upload without blocking": (lambda x: torch.ones(3).pin_memory().to("cuda", non_blocking=True), 0),
    "pinned upload": (lambda x: torch.ones(3).pin_memory().to("cuda"), 1),
    "copy_ from the host": (lambda x: x.copy_(torch.ones(3)), 1),
    "copy_ on the device": (lambda x: x.copy_(x + 1), 0),
    "to another dtype": (lambda x: x.to(torch.int32), 0),
    "stream": (lambda x: torch.cuda.current_stream().synchronize(), 1),
    "device": (lambda x: torch.cuda.synchronize(), 1),
    "event": (lambda x: torch.cuda.current_stream().record_event().synchronize(), 1),
    "wait of a stream": (lambda x: torch.cuda.Stream().wait_stream(torch.cuda.current_stream()), 0),
}


@pytest.mark.parametrize("name", SYNCS)
def test_synchronizations(name: str) -> None:
    """Each call synchronizes as often as on a GPU."""
    call, count = SYNCS[name]
    with ranks.alone() as gpu:
        x = _cuda(3.0, 1.0, 2.0)
        gpu.reset()
        call(x)
        assert sum(gpu.syncs.values()) == count, gpu.syncs


def test_place_of_a_synchronization() -> None:
    """The log names file and line in the library."""
    with ranks.alone() as gpu:
        Entries(to_gpu(torch.tensor([1], dtype=torch.int32)), _cuda(1.0)).trimmed()
        ((_, where),) = gpu.syncs
        assert where.startswith("kernels/tritoncomm_kernels/lists.py:")
        _cuda(1.0).item()
        assert ("local_scalar_dense", "outside of tritoncomm") in gpu.syncs


def test_launches() -> None:
    """Operators that compute are launches. Views and allocations are none."""
    with ranks.alone() as gpu:
        x = torch.zeros(4, device="cuda")
        (x[1:].view(-1) + 1).add_(2)
        torch.empty(3, device="cuda").copy_(x[1:])
        assert dict(gpu.launches) == {"zeros": 1, "add": 1, "add_": 1, "copy_": 1}


def test_tensor_says_where_it_is() -> None:
    """A tensor, its views and results are on the GPU. Its values are not in reach of the host by accident."""
    with ranks.alone():
        x = torch.arange(4.0, device="cuda").requires_grad_()
        (x.view(2, 2) * 2).sum().backward()
        for tensor in (x, x.grad, x.detach()[1:], torch.nn.Parameter(x.detach())):
            assert isinstance(tensor, CudaTensor)
            assert tensor.is_cuda
            assert tensor.device == torch.device("cuda", 0)
        assert values_of(x.grad).tolist() == [2.0] * 4
        with pytest.raises(TypeError, match="can't convert cuda:0"):
            x.detach().numpy()
        for mixed in (lambda: x + torch.ones(4), lambda: torch.cat([x, torch.ones(1)])):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                mixed()
        assert values_of(x + torch.tensor(1.0)).tolist() == [1.0, 2.0, 3.0, 4.0]  # a CPU scalar may be mixed in


def test_several_gpus() -> None:
    """A new thread begins with GPU 0, as in CUDA. Tensors of two GPUs do not mix, nor those of two ranks."""
    with ranks.alone():
        with torch.cuda.device(1):
            x = torch.ones(2, device="cuda")
            found: list[int] = []
            thread = threading.Thread(target=lambda: found.append(torch.cuda.current_device()))
            thread.start()
            thread.join()
        assert (x.device.index, found, torch.cuda.current_device()) == (1, [0], 0)
        with pytest.raises(RuntimeError, match="cuda:0 of this thread', 'cuda:1 of this thread"):
            x + torch.ones(2, device="cuda")

    shared: list[torch.Tensor] = []

    def main(rank: int) -> None:
        if rank == 0:
            shared.append(torch.ones(2, device="cuda"))
        dist.barrier()
        torch.ones(2, device="cuda") + shared[0]

    with pytest.raises(ranks.RankError, match=r"rank 1: RuntimeError: .*cuda:0 of rank 0', 'cuda:0 of rank 1"):
        ranks.run(main, 2)


def test_kernel_refuses_tensors_on_two_devices() -> None:
    """A kernel of the table checks its arguments, too."""
    with ranks.alone():
        lists = [(torch.zeros(1, dtype=torch.int32), _cuda(1.0))]
        with pytest.raises(RuntimeError, match=r"merge, CPU tensors of shapes \[\(1,\)\]"):
            collectives.kernels.merge(lists, 3)


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
        x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
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


def test_memory_is_freed_after_its_last_use() -> None:
    """Memory that another stream uses must not be freed before its own stream waits, unless the use is recorded."""
    with ranks.alone():
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()

        def free(*, recorded: bool) -> None:
            x = torch.ones(4, device="cuda")
            side.wait_stream(main)
            with torch.cuda.stream(side):
                x.add_(1)
                if recorded:
                    x.record_stream(side)

        free(recorded=True)
        torch.ones(1, device="cuda")
        free(recorded=False)
        main.wait_stream(side)
        torch.ones(1, device="cuda")
        free(recorded=False)
        with pytest.raises(RaceError, match="freed while <stream 1 of GPU of this thread> uses it"):
            torch.ones(1, device="cuda")


def test_wait_of_the_host_orders_streams() -> None:
    """After the host has waited for a stream, what it enqueues anywhere comes later."""
    with ranks.alone():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x = torch.ones(2, device="cuda")
            y = x * 2
        side.synchronize()
        assert (x + y).tolist() == [3.0, 3.0]


def test_wait_for_the_device_orders_all_streams() -> None:
    """After the host has waited for the device, work on every stream has ended."""
    with ranks.alone():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x = torch.ones(2, device="cuda")
        with pytest.raises(RaceError):
            x + 1
        torch.cuda.synchronize()
        assert (x + 1).tolist() == [2.0, 2.0]


def test_events_measure_time_once_they_are_complete() -> None:
    """An event without timing, and one that the host has not waited for, have no time."""
    with ranks.alone():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        end.record()
        with pytest.raises(RuntimeError, match="device not ready"):
            start.elapsed_time(end)
        end.synchronize()
        assert start.query()
        assert start.elapsed_time(end) >= 0


def test_collectives() -> None:
    """All collectives return what they do with gloo, in rank order."""

    def main(rank: int) -> list[list[float]]:
        own = torch.arange(3.0, device="cuda") + 10 * rank
        total, largest = own.clone(), own.clone()
        dist.all_reduce(total)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        rows = [torch.empty(3, device="cuda") for _ in range(3)]
        dist.all_gather(rows, own)
        joined, turned = torch.empty(9, device="cuda"), torch.empty(3, device="cuda")
        all_gather(joined, own)
        dist.all_to_all_single(turned, own)
        uneven = torch.empty(3 * (rank + 1), device="cuda")
        dist.all_to_all_single(uneven, joined[:6], [rank + 1] * 3, [1, 2, 3])
        share = torch.empty(1, device="cuda")
        reduce_scatter(share, own)
        first = own.clone()
        dist.broadcast(first, src=2)
        gathered: list[Any] = [None] * 3
        dist.all_gather_object(gathered, {"rank": rank})
        assert gathered == [{"rank": other} for other in range(3)]
        return [values_of(each).tolist() for each in (total, largest, *rows, joined, turned, uneven, share, first)]

    found = ranks.run(main, 3)
    rows = [[10.0 * rank + i for i in range(3)] for rank in range(3)]
    joined = [each for row in rows for each in row]
    for rank in range(3):
        starts = slice(sum(range(rank + 1)), sum(range(rank + 2)))
        assert found[rank] == [
            [30.0, 33.0, 36.0], rows[2], *rows, joined, [row[rank] for row in rows], 3 * joined[:6][starts],
            [30.0 + 3 * rank], rows[2],
        ]  # fmt: skip


def test_messages_match_in_their_order() -> None:
    """The tag of a message means nothing, as with NCCL. One of another size is an error."""

    def main(rank: int, sizes: tuple[int, ...]) -> list[list[float]]:
        if rank == 0:
            messages = [torch.full((size,), 1.0 + i, device="cuda") for i, size in enumerate(sizes)]
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, each, 1, tag=i) for i, each in enumerate(messages)])
        else:
            messages = [torch.empty(2, device="cuda") for _ in sizes]
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.irecv, each, 0, tag=9 - i) for i, each in enumerate(messages)]
            )
        for work in works:
            work.wait()
        return [each.tolist() for each in messages]

    assert ranks.run(lambda rank: main(rank, (2, 2)), 2)[1] == [[1.0, 1.0], [2.0, 2.0]]
    with pytest.raises(ranks.RankError, match=r"expects 2 elements of torch\.float32 of rank 0, which sends 3"):
        ranks.run(lambda rank: main(rank, (2, 3)), 2)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "cpu": (lambda: dist.all_reduce(torch.ones(2)), "No backend type associated with device type cpu"),
    "strided": (lambda: dist.all_reduce(torch.ones(4, device="cuda")[::2]), "Tensors must be contiguous"),
    "size": (
        lambda: all_gather(torch.ones(3, device="cuda"), torch.ones(2, device="cuda")),
        r"tensors have \[3\] elements, expected \[4\]",
    ),
    "sizes of ranks": (
        lambda: dist.all_reduce(torch.ones(1 + dist.get_rank(), device="cuda")),
        "the ranks call .'all_reduce SUM of 1 x torch.float32', 'all_reduce SUM of 2 x",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nccl_refuses(name: str) -> None:
    """What NCCL refuses, or what makes it hang, is an error."""
    call, message = REFUSED[name]
    with pytest.raises(ranks.RankError, match=message):
        ranks.run(lambda rank: call(), 2)


def test_buffers_hold_garbage_until_the_wait() -> None:
    """A result is not there before the wait, nor on a stream that has not waited."""

    def main(rank: int) -> bool:
        x = torch.ones(2, device="cuda")
        work = dist.all_reduce(x, async_op=True)
        before = values_of(x)
        with pytest.raises(RaceError):
            x.sum()
        work.wait()
        return before.tolist() != [2.0, 2.0] and x.tolist() == [2.0, 2.0]

    assert ranks.run(main, 2) == [True, True]


def test_ranks_with_one_gpu_are_found() -> None:
    """Ranks that see all GPUs, and use the same one, are refused."""

    def main(rank: int, *, sets: bool) -> float:
        if sets:
            torch.cuda.set_device(rank)
        x = torch.ones(1, device="cuda")
        dist.all_reduce(x)
        return x.item()

    network = Network(2, several_gpus=True)
    assert ranks.run(lambda rank: main(rank, sets=True), 2, network=network) == [2.0, 2.0]
    with pytest.raises(ranks.RankError, match="Duplicate GPU detected"):
        ranks.run(lambda rank: main(rank, sets=False), 2, network=Network(2, several_gpus=True))


def test_subgroup_of_a_bound_group_needs_all_ranks() -> None:
    """A default group that is bound to a device is split, and all of its ranks must take part."""

    def main(rank: int, *, together: bool) -> int:
        if together or rank == 0:
            dist.new_group([0], use_local_synchronization=not together)
        return rank

    assert ranks.run(lambda rank: main(rank, together=True), 2, bind_device=True) == [0, 1]
    with pytest.raises(ranks.RankError, match="rank 0 waits for collective 0 of group 0, split"):
        ranks.run(lambda rank: main(rank, together=False), 2, bind_device=True, network=Network(2, limit=0.3))


@pytest.mark.parametrize("garbage", [False, True])
def test_abort(garbage: bool) -> None:
    """An abort ends the waits of its rank: with an error, or with garbage in the buffer. Later operations fail."""

    def main(rank: int) -> Any:
        if rank == 1:
            return None
        x = torch.ones(2, device="cuda")
        group = dist.group.WORLD
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


def test_waits_without_end() -> None:
    """A wait with a time-out raises, the watchdog ends a rank, and otherwise the test ends."""

    def main(rank: int, *, timeout: timedelta | None = None) -> None:
        if rank == 0:
            work = dist.all_reduce(torch.ones(1, device="cuda"), async_op=True)
            work.wait() if timeout is None else work.wait(timeout)

    short = timedelta(milliseconds=100)
    with pytest.raises(ranks.RankError, match=r"DistBackendError: .* before timing out"):
        ranks.run(lambda rank: main(rank, timeout=short), 2)
    ended, _ = ranks.run(main, 2, timeout=short, errors=True, network=Network(2, watchdog=True))
    assert isinstance(ended, WatchdogEnd)
    ended, _ = ranks.run(main, 2, errors=True, network=Network(2, limit=0.2))
    assert isinstance(ended, Hang)


def test_error_names_the_rank_and_stops_the_others() -> None:
    """The error of a rank is raised with its number, and ranks that wait for it end."""

    def main(rank: int) -> None:
        if rank == 1:
            raise ValueError("no")
        dist.barrier()

    with pytest.raises(ranks.RankError, match="rank 1: ValueError: no") as failed:
        ranks.run(main, 3)
    assert isinstance(failed.value.__cause__, ValueError)


def test_nothing_is_left_behind() -> None:
    """Everything that the emulation replaces is as before, also after an error."""

    def state() -> list[Any]:
        held = [torch.zeros, torch.tensor, torch.Tensor.to, torch.Tensor.is_pinned, torch.futures.Future]
        held += [torch.cuda.Stream, torch.cuda.stream, threading.Thread.start, sys.excepthook, dist.all_reduce]
        held += [dist.distributed_c10d._world, process_group._exchange_ids, collectives.kernels.top_k]
        return [*held, torch.cuda.is_available(), dist.is_initialized(), sorted(vars(torch.Tensor))]

    before = state()
    with pytest.raises(ranks.RankError):
        ranks.run(lambda rank: 1 / 0, 2)
    ranks.run(lambda rank: torch.ones(1, device="cuda").sum().item(), 2)
    assert all(a is b or a == b for a, b in zip(before, state(), strict=True))
    assert not any(thread.name.startswith("Thread") and thread.is_alive() for thread in threading.enumerate()[1:])
