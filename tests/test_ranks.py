"""The decorator ``@ranks``: a failure is reported, a hang ends, and a process that was killed is replaced."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from ranks import ranks


def _run(test, world_size: int = 2, **arguments) -> str:
    """Return the message with which a decorated test fails."""
    with pytest.raises(pytest.fail.Exception) as caught:
        test(world_size=world_size, **arguments)
    return str(caught.value)


@ranks(1, 2, 3)
@pytest.mark.parametrize("factor", [1, 10])
def test_ranks_share_a_group(rank, world_size, factor, tmp_path):
    """Ranks have a group of the right size, parameters and fixtures."""
    assert tmp_path.exists()
    x = torch.tensor([factor * (rank + 1)])
    dist.all_reduce(x)
    assert x.item() == factor * world_size * (world_size + 1) // 2
    assert dist.get_rank() == rank


@ranks(2)
def _fails(rank, world_size):
    assert rank != 1, "a reason"


@ranks(2, limit=1.0)
def _hangs(rank, world_size):
    if rank == 1:
        time.sleep(60)  # here


@ranks(2, limit=20.0)
def _dies(rank, world_size):
    if rank == 1:
        os._exit(3)
    dist.barrier()


@ranks(2, lost=(1,))
def _loses_one(rank, world_size, folder):
    (folder / str(os.getpid())).touch()
    dist.barrier()
    if rank == 1:
        os._exit(0)


def test_rank_may_be_lost_on_purpose(tmp_path):
    """A rank that the test ends is no failure, and the next test has a new process in its place alone."""
    for _ in range(2):
        _loses_one(world_size=2, folder=tmp_path)
    assert len([*tmp_path.iterdir()]) == 3


@ranks(2, lost=(1,))
def _survives(rank, world_size):
    pass


def test_failure_is_reported_with_its_rank():
    """The message has the rank and the traceback."""
    text = _run(_fails)
    assert "rank 1 of 2 failed" in text
    assert "a reason" in text
    assert "assert rank != 1" in text


def test_hang_ends():
    """A rank that hangs fails the test soon, and the message says where it was."""
    began = time.monotonic()
    text = _run(_hangs)
    assert "rank 1" in text
    assert "in _hangs" in text
    assert time.monotonic() - began < 10


def test_killed_rank_is_reported_and_replaced():
    """A process that ends fails the test at once, and the next test runs again."""
    began = time.monotonic()
    assert "rank 1" in (text := _run(_dies))
    assert "exit code 3" in text
    assert time.monotonic() - began < 10
    test_ranks_share_a_group(world_size=2, factor=1, tmp_path=__import__("pathlib").Path("/"))


def test_rank_that_should_have_ended_fails():
    """``lost`` names ranks that must end."""
    assert "should have ended" in _run(_survives)
