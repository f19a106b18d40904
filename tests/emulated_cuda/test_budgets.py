"""How often the host waits for an emulated GPU in a step of ``wrap``, and how its launches grow."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch
import tritoncomm
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tritoncomm.algorithms import algorithms, field_names, takes_density
from tritoncomm.algorithms.base import StaticRecipe
from tritoncomm.planning import planner
from tritoncomm.step.agree import replica
from tritoncomm.step.exchange import feedback

from depth import DEEP, trials
from emulated_cuda import doors, ranks
from emulated_cuda.device import current_gpu, to_gpu

# Those that have the static form. One that delivers every entry is counted below.
METHODS = [name for name in algorithms() if takes_density(name) and isinstance(planner.at(name, 0.05), StaticRecipe)]
ORDINARY = 2  # host synchronizations of an ordinary step: the verdict of the exchange, and its confirmation
OTHERS = 20  # those of a step that determines thresholds or partitions again, or is the first
# In their first steps, root mean squares of parameters are computed each time: here in three, otherwise in twenty.
SETTLED = 4
MOST, MATRICES = trials((4, 8), (8, 12))  # ranks, and matrices, beside 2 and 3


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare replicas in every 100th step only: ordinary steps are counted among the first."""
    monkeypatch.setattr(replica, "EARLY", ())


class Step(NamedTuple):
    """What the busiest rank's GPU logged in a step. In an ordinary one, no threshold or partition is determined."""

    syncs: int
    launches: int
    is_ordinary: bool
    places: tuple[str, ...]


@cache
def steps_of(
    method: str, values: str, world_size: int, steps: int = 6, matrices: int = 3, *, images: bool = False,
    limit: float | None = None, node_size: int = 1, warmup_steps: int = 0, static: bool | None = None,
) -> list[Step]:  # fmt: skip
    """Train ``matrices`` matrices and as many vectors with AdamW, and count in ``step()`` alone.

    With ``images``, the matrices are kernels of convolutions in ``torch.channels_last``. With ``limit``, gradients are
    clipped to this norm before the exchange. Between nodes of ``node_size`` workers, the exchange is hierarchical.
    """
    matrix = (24, 8, 2, 2) if images else (24, 32)
    shapes = [shape for _ in range(matrices) for shape in (matrix, (24,))]

    def drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        values = torch.randn(shape, generator=generator)
        return to_gpu(values.to(memory_format=torch.channels_last) if len(shape) == 4 else values)

    def main(rank: int) -> list[Step]:
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(drawn(shape, generator)) for shape in shapes]
        fields: dict[str, object] = {"values": values} if "values" in field_names(method) else {}
        fields |= {"density": 0.05} if takes_density(method) else {}
        fields |= {"reduced_lr": True} if method == "random_block" else {}
        fields |= {"static": static} if static is not None else {}
        recipe = tritoncomm.recipe(method, **fields)
        recipe = tritoncomm.Hierarchical(recipe=recipe, node_size=node_size) if node_size > 1 else recipe
        inner = torch.optim.AdamW(parameters, lr=1e-3)
        given = {"small": "8bit", "warmup_steps": warmup_steps, "dense_below": 100, "max_grad_norm": limit}
        optimizer = tritoncomm.wrap(inner, recipe, **given)
        generator, gpu, found = torch.Generator().manual_seed(1 + rank), current_gpu(), []
        for number in range(steps):
            estimates = innermost(optimizer).state_dict().get("threshold") == 0
            for parameter, shape in zip(parameters, shapes, strict=True):
                parameter.grad = drawn(shape, generator)
            gpu.reset()
            optimizer.step()
            syncs, launches = gpu.syncs.copy(), gpu.launches.total()
            figures = optimizer.metrics()
            assert limit is None or 0.1 < figures["grad_norm"] < 100
            again = estimates or figures.get("reevaluated", 0) or figures.get("repartitioned", 0)
            places = tuple(f"{count} {place} {kind}" for (kind, place), count in syncs.items())
            found.append(Step(syncs.total(), launches, not again and number > 0, places))
        return found

    by_rank = zip(*ranks.run(main, world_size, seed=world_size), strict=True)
    return [
        max(step)._replace(launches=max(each.launches for each in step), is_ordinary=all(e.is_ordinary for e in step))
        for step in by_rank
    ]


def check_waits(steps: list[Step], most: int) -> None:
    """Assert that the host waits at most ``most`` times in ordinary steps, of which there are some."""
    ordinary = [step for step in steps[1:] if step.is_ordinary]
    assert len(ordinary) >= 2
    assert [step.places for step in steps if step.syncs > OTHERS] == []
    assert [step.places for step in ordinary if step.syncs > most] == []


Training = tuple[tritoncomm.SparseOptimizer, Callable[[int], None]]


def waits(start: Callable[[int], Training], steps: int) -> list[list[int]]:
    """Return by rank how often the host waits in each step.

    ``start(rank)`` returns an optimizer, and what computes the gradients of a step.
    """

    def main(rank: int) -> list[int]:
        optimizer, backward = start(rank)
        found = []
        for step in range(steps):
            optimizer.zero_grad()
            current_gpu().reset()
            backward(step)
            optimizer.step()
            found.append(current_gpu().syncs.total())
        return found

    return ranks.run(main, 2)


def innermost(optimizer: tritoncomm.SparseOptimizer) -> object:
    """Return the algorithm inside of those that wrap it."""
    algorithm = optimizer._tritoncomm.setup.scope.vectors[0].feedback.algorithm
    while hasattr(algorithm, "inner"):
        algorithm = algorithm.inner
    return algorithm


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute root mean squares of parameters in three steps, and then in every third."""
    monkeypatch.setattr(feedback, "RENEW_RMS_EVERY", SETTLED - 1)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("values", ["4bit", *(["fp32"] if DEEP else [])])
@pytest.mark.parametrize("method", METHODS)
def test_budget(method: str, values: str) -> None:
    """An ordinary step waits at most twice for the GPU, and any step at most 20 times, whatever the world size.

    Launches do not grow with tensors, and with workers only slowly.
    """
    for world_size in trials((2, MOST), (1, 2, 3, 4, MOST)):
        check_waits(steps_of(method, values, world_size), ORDINARY)
    few, many, workers = (
        [step for step in steps_of(method, values, *case)[SETTLED : SETTLED + 2] if step.is_ordinary]
        for case in ((2,), (2, SETTLED + 2, MATRICES), (MOST,))
    )
    assert few
    assert many
    assert workers
    assert max(step.launches for step in many) <= max(step.launches for step in few) + 10
    doubled = math.log2(MOST) - 1
    assert max(step.launches for step in workers) <= (1 + 0.35 * doubled) * max(step.launches for step in few)
    assert max(step.syncs for step in many) <= ORDINARY
    # Steps that renew root mean squares, behind the first.
    few, many = (steps_of(method, values, *case)[1:SETTLED] for case in ((2,), (2, SETTLED + 2, MATRICES)))
    assert max(step.launches for step in many) <= max(step.launches for step in few) + 10


@pytest.mark.usefixtures("settled")
def test_channels_last() -> None:
    """Parameters in ``torch.channels_last`` add no wait, and each the launch that copies its gradient in order.

    This holds in steps that renew root mean squares, too.
    """
    plain, images = (steps_of("topk_allgather", "4bit", 2, SETTLED + 2, 8, images=each)[1:] for each in (False, True))
    assert {step.syncs for step in images} == {ORDINARY}
    assert all(one.launches <= other.launches + 10 + 8 for one, other in zip(images, plain, strict=True))


def test_clipped_gradients() -> None:
    """The norm of the gradient, before the exchange, adds no wait."""
    clipped, plain = (steps_of("oktopk", "4bit", 2, limit=limit) for limit in (1.0, None))
    assert [step.syncs for step in clipped[1:]] == [step.syncs for step in plain[1:]]
    assert clipped[0].syncs <= plain[0].syncs + 2  # the signs are copied once


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("method", METHODS if DEEP else ["oktopk", "spardl"])
def test_nodes(method: str) -> None:
    """With nodes, the host waits once more: the workers of a node tell each other whether a part was rejected."""
    for world_size in trials((4,), (4, 8)):
        check_waits(steps_of(method, "4bit", world_size, node_size=2), ORDINARY + 1)


@pytest.mark.parametrize("world_size", trials([4], [2, 8]))
@pytest.mark.parametrize(
    ("name", "static"),
    [("dense", None), ("random_k", None), ("random_block", False), ("quantized", False), ("quantized", True)],
)
def test_shared_coordinates(name: str, static: bool | None, world_size: int) -> None:
    """Methods whose coordinates all ranks know wait twice without a static form, too, in every step but the first."""
    first, *others = steps_of(name, "1bit" if name == "quantized" else "fp32", world_size, 4, static=static)
    assert first.syncs <= OTHERS, first.places
    assert all(step.syncs <= ORDINARY for step in others), others[-1].places


def test_comparison_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that compares gradients, parameters and the optimizer's state waits twice more."""
    monkeypatch.setattr(replica, "EVERY", 4)
    monkeypatch.setattr(replica, "EARLY", (2,))
    steps = steps_of.__wrapped__("topk_allgather", "4bit", 2, 6)
    assert [step.syncs for step in steps[1:]] == [ORDINARY, ORDINARY + 2, ORDINARY, ORDINARY + 2, ORDINARY]


RENEWED = 20  # the step that renews the scale of the selection
FIELDS = {"density": 0.1, "warmup_steps": 0, "static": True}


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp"])
def test_modules(kind: str) -> None:
    """A step of DDP or FSDP2 waits as often as that of a plain module: two more times if the scale is renewed.

    The tenth step reads the norms of local gradients, to tell those that were averaged.
    """

    def start(rank: int) -> Training:
        model, given = doors.grouped("cuda") if kind == "fsdp" else (doors.model_on("cuda"), {})
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def backward(step: int) -> None:
            doors.loss_of(model, rank, step, "cuda").backward()
            if kind == "ddp":
                doors.fill_buckets(model, 3)

        return tritoncomm.wrap(inner, "topk_allgather", **FIELDS, **given, dense_below=20), backward

    for rank, syncs in enumerate(waits(start, RENEWED + 1)):
        looks = ORDINARY + (kind != "fsdp" and rank == 0)
        assert syncs[1:] == [*[ORDINARY] * 8, looks, *[ORDINARY] * (RENEWED - 11), ORDINARY + 2, ORDINARY]


@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_half_precision(kind: str) -> None:
    """One wait more checks the range of gradients in fp16. FSDP2 gives fp32 to ``step()``, also if it reduces fp16."""
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def start(rank: int) -> Training:
        model = doors.moved(copy.deepcopy(layers).half() if kind == "plain" else copy.deepcopy(layers))
        given: dict[str, object] = {}
        if kind == "fsdp":
            mesh = init_device_mesh("cuda", (2, 1), mesh_dim_names=("replicate", "shard"))
            half = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
            for layer in model:
                fully_shard(layer, mesh=mesh["shard"], mp_policy=half)
            given = {"model": model, "process_group": mesh["replicate"].get_group()}
        inner = torch.optim.SGD(model.parameters(), lr=0.01)

        def backward(step: int) -> None:
            batch = torch.randn(4, 8)
            model(to_gpu(batch.half() if kind == "plain" else batch)).float().square().mean().backward()

        return tritoncomm.wrap(inner, "topk_allgather", **FIELDS, **given, dense_below=5), backward

    for syncs in waits(start, 4):
        assert syncs[1:] == [ORDINARY + (kind == "plain")] * 3


def test_unused_parameters() -> None:
    """What no rank uses adds no wait after the first step without it. If ranks differ, they wait more."""

    def start(rank: int) -> Training:
        parameters = [nn.Parameter(to_gpu(torch.ones(24, 32))) for _ in range(3)]

        def backward(step: int) -> None:
            for position, parameter in enumerate(parameters):
                unused = (position == 2 and 4 <= step < 8) or (step >= 8 and position == rank)
                parameter.grad = None if unused else torch.ones_like(parameter)

        inner = torch.optim.AdamW(parameters, lr=1e-3)
        return tritoncomm.wrap(inner, "topk_allgather", density=0.05, warmup_steps=0), backward

    for syncs in waits(start, 12):
        assert syncs[1:4] == syncs[5:8] == [ORDINARY] * 3
        assert max(syncs[8:]) <= ORDINARY + 3


@pytest.mark.parametrize("method", [method for method in METHODS if method != "random_block"])
def test_dense_warm_up(method: str) -> None:
    """Dense steps of a warm-up wait twice after the first."""
    first, *others = steps_of(method, "fp32", 2, 4, 1, warmup_steps=4)
    assert first.syncs <= OTHERS
    assert [step.syncs for step in others] == [ORDINARY] * 3
