"""A module in DDP trains as the plain module, to the bit, on real gloo processes."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import ddp_edge_workers as edges
import ddp_workers
import ignored_workers as ignored
import pytest
from helpers import run_situations, run_workers
from tritoncomm.demo.local_workers import WorkerError


@pytest.mark.parametrize(
    "situations",
    [
        [
            *(ddp_workers.methods, ddp_workers.unused_parameters, ddp_workers.several_optimizers),
            *(ddp_workers.buffers, ddp_workers.nested_passes, ddp_workers.other_strides),
        ],
        [
            *(ddp_workers.accumulation, ddp_workers.options_of_ddp, ddp_workers.wrapped_gradients),
            *(ddp_workers.loss_scaling, ddp_workers.non_finite, ddp_workers.synchronized_statistics),
        ],
        [
            *(edges.unwrapped_optimizer, edges.other_hooks, edges.copied_model, edges.parameters_of_others),
            *(edges.groups_are_used_again, edges.nodes, edges.early_termination, edges.new_module),
        ],
        [
            *(edges.averaged_before, edges.containers, edges.inner_optimizers, edges.released),
            *(edges.built_again, edges.averaged_later, edges.not_assigned),
        ],
        [
            *(ignored.experts, ignored.as_dense, ignored.experts_in_lists, ignored.clipped_experts),
            *(ignored.scaled_experts, ignored.broken_experts, ignored.saved_experts, ignored.differing_others),
            *(ignored.sparse_tables, ignored.experts_that_catch_up),
        ],
    ],
    ids=lambda situations: f"{situations[0].__name__} and others",
)
def test_situations(situations: list) -> None:
    """Each situation passes. The same processes run several situations, because starting them is slow."""
    run_situations(situations, 3)


def test_compiled() -> None:
    """So does a compiled module, with two workers, because each has to import the compiler."""
    assert run_workers(ddp_workers.compiled, 2) == [None] * 2


def test_one_worker() -> None:
    """A single worker is the bare optimizer behind bare DDP."""
    assert run_workers(ddp_workers.one_worker, 1) == [None]
    assert run_workers(ignored.alone, 1) == [None]


def heard_of(worker) -> list[tuple[int, str]]:
    """Return what three workers send, of which some do not end by themselves."""
    heard: list[tuple[int, str]] = []
    with suppress(WorkerError):
        run_workers(worker, 3, listen=heard.append, grace=timedelta(seconds=30))
    return sorted(heard)


def test_killed_rank() -> None:
    """``step()`` of the survivors names the killed rank, and they continue in a new group."""
    assert heard_of(edges.killed) == [(0, "continued"), (0, "named"), (2, "continued"), (2, "named")]
