"""What travels and what is returned: frames, packed lists, sparse vectors, recipes by name."""

from __future__ import annotations

import dataclasses
import importlib.metadata

import numpy as np
import pytest
import torch
import tritoncomm
from hypothesis import given
from hypothesis import strategies as st
from tritoncomm import ConfigurationError, OkTopk, ProtocolMismatchError, SimulatedWorld, SparseVector, Warmup
from tritoncomm.scheduler import wire
from tritoncomm.scheduler.cost import HEADER_WORDS


@given(st.sets(st.integers(0, 2**31 - 2)))
def test_pack_and_unpack(chosen: set[int]) -> None:
    """Indices and values survive bit for bit, NaN and -0.0 included."""
    indices = torch.tensor(sorted(chosen), dtype=torch.int32)
    values = torch.tensor([float("nan"), -0.0, 1e-45, 3.0]).repeat(len(chosen))[: len(chosen)]
    got, floats = wire.unpack(wire.pack(indices, values))
    wire.check_indices(got, 0, 2**31 - 1)
    assert torch.equal(got, indices)
    assert torch.equal(floats.view(torch.int32), values.view(torch.int32))


@given(st.lists(st.sets(st.integers(0, 99), max_size=8), min_size=1, max_size=6), st.integers(0, 3))
def test_packed_parts(parts: list[set[int]], free: int) -> None:
    """Many messages written and read at once are what one at a time would be; padded ones keep their length."""
    lists = [torch.tensor(sorted(part), dtype=torch.int32) for part in parts]
    values = [torch.randn(len(indices)) for indices in lists]
    messages = wire.pack_parts(torch.cat(lists), torch.cat(values), [len(part) for part in parts])
    for message, indices, floats in zip(messages, lists, values, strict=True):
        assert torch.equal(message, wire.pack(indices, floats))
        padded = wire.pack_padded(indices, floats, 2 * (len(indices) + free))
        assert padded.numel() == 2 * (len(indices) + free)
        assert all(map(torch.equal, wire.unpack_padded(padded), (indices, floats)))
    indices, floats = wire.unpack_parts(messages)
    assert torch.equal(indices, torch.cat(lists))
    assert torch.equal(floats, torch.cat(values))
    wire.check_indices(indices, 0, 100, [len(part) for part in parts])


@pytest.mark.parametrize("indices", [[1, 5, 2, 2], [1, 5, 4, 10], [5, 1, 2, 3], [-1, 5, 2, 3]])
def test_malformed_parts_are_refused(indices: list[int]) -> None:
    """Each part of two must ascend by itself, inside the range."""
    wire.check_indices(torch.tensor([1, 5, 2, 3], dtype=torch.int32), 0, 10, [2, 2])
    with pytest.raises(ProtocolMismatchError, match="do not ascend"):
        wire.check_indices(torch.tensor(indices, dtype=torch.int32), 0, 10, [2, 2])


def test_every_bit_of_a_message_counts() -> None:
    """One bit flipped anywhere, signs included, in header or payload: the message is refused."""
    frame = wire.Frame(7, 3, "reduce", wire.stamp("somebody"))
    payload = wire.pack(torch.tensor([3, 8], dtype=torch.int32), torch.tensor([2.0, -1e-30]))
    message = wire.framed(payload, frame)

    def check(arrived: torch.Tensor) -> None:
        wire.check_payload(arrived[HEADER_WORDS:], wire.check_frame(arrived[:HEADER_WORDS], frame, len(payload)))

    check(message)
    for word in range(len(message)):
        for bit in range(32):
            struck = message.clone()
            struck[word] ^= int(np.uint32(1 << bit).view(np.int32))
            with pytest.raises(ProtocolMismatchError):
                check(struck)


@pytest.mark.parametrize("indices", [[-1, 2], [2, 2], [3, 1], [4, 10]])
def test_malformed_indices_are_refused(indices: list[int]) -> None:
    """Indices that do not ascend inside the receiver's range never reach a scatter."""
    message = wire.pack(torch.tensor(indices, dtype=torch.int32), torch.ones(2))
    with pytest.raises(ProtocolMismatchError, match="do not ascend"):
        wire.check_indices(wire.unpack(message)[0], 0, 10)


def test_frame() -> None:
    """A header tells step, round, phase, method and length apart, and damage."""
    payload = torch.arange(5, dtype=torch.int32)
    frame = wire.Frame(7, 3, "gather", wire.stamp("oktopk of 100"))
    message = wire.framed(payload, frame)
    header = message[:HEADER_WORDS]
    assert torch.equal(message[HEADER_WORDS:], payload)
    total = wire.check_frame(header, frame, 5)
    wire.check_payload(payload, total)
    with pytest.raises(ProtocolMismatchError, match="corrupt"):
        wire.check_payload(payload ^ torch.tensor([0, 0, 1 << 30, 0, 0], dtype=torch.int32), total)
    for other, words, named in (
        (frame._replace(step=8), 5, "expected step 8, .* the message says step 7, .* the same method"),
        (frame._replace(number=4), 5, "round 4, .* says step 7, round 3"),
        (frame._replace(phase="balance"), 5, "phase 'balance', .* phase 'gather'"),
        (frame._replace(phase="gather of something long"), 5, "phase 'gather of something long', .* phase 'gather'"),
        (frame._replace(stamp=wire.stamp("spardl of 100")), 5, "another method and settings"),
        (frame, 4, "4 words; .* 5 words"),
    ):
        with pytest.raises(ProtocolMismatchError, match=named):
            wire.check_frame(header, other, words)
    damaged = header.clone()
    damaged[-1] += 1
    with pytest.raises(ProtocolMismatchError):
        wire.check_frame(damaged, frame, 5)
    for wrong in (payload.float(), payload.view(1, 5)):
        with pytest.raises(ProtocolMismatchError, match="one-dimensional int32"):
            wire.framed(wrong, frame)


def test_sparse_vector() -> None:
    """Dense form, density, and a full vector that makes indices only when asked."""
    vector = SparseVector(torch.tensor([1, 3], dtype=torch.int32), torch.tensor([2.0, -1.0]), 5)
    assert vector.to_dense().tolist() == [0, 2, 0, -1, 0]
    assert (len(vector), vector.density, vector.is_full) == (2, 0.4, False)
    full = SparseVector.full(torch.arange(3.0))
    assert full.is_full
    assert full.indices.tolist() == [0, 1, 2]
    assert full.to_dense().tolist() == [0, 1, 2]
    assert repr(vector) == "SparseVector(2 of 5)"


@pytest.mark.parametrize(
    ("indices", "values", "named"),
    [
        (torch.tensor([1]), torch.ones(1), "int64"),
        (torch.tensor([1], dtype=torch.int32), torch.ones(1).double(), "float64"),
        (torch.tensor([1], dtype=torch.int32), torch.ones(2), r"\(1,\) and values \(2,\)"),
    ],
)
def test_sparse_vector_refuses(indices: torch.Tensor, values: torch.Tensor, named: str) -> None:
    """Wrong dtypes and lengths are named."""
    with pytest.raises(ConfigurationError, match=named):
        SparseVector(indices, values, 9)


def test_recipes_by_name() -> None:
    """Names are listed, looked up, and unknown names and fields list the known ones."""
    assert tritoncomm.algorithms() == [
        "dense", "dgc", "exdyna", "gaussiank", "gtopk", "hard_threshold", "micro", "oktopk", "random_block", "random_k",
        "sidco", "spardl", "topk_allgather", "topk_dsa",
    ]  # fmt: skip
    assert tritoncomm.recipe("oktopk", density=0.02) == OkTopk(density=0.02)
    with pytest.raises(ConfigurationError, match=r"unknown algorithm 'okaytopk'.*dense, dgc.*topk_allgather"):
        tritoncomm.recipe("okaytopk")
    with pytest.raises(ConfigurationError, match=r"no field 'tau'.*repartition_every"):
        tritoncomm.recipe("oktopk", tau=3)
    with pytest.raises(ConfigurationError, match=r"TopkAllgather\(density=2\)"):
        tritoncomm.recipe("topk_allgather", density=2)


def test_recipes_are_frozen() -> None:
    """A recipe cannot change under an algorithm that was built from it."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        OkTopk().density = 0.5


def test_warmup() -> None:
    """Dense first; the inner method starts counting afterwards; the density is the inner one's."""
    recipe = Warmup(recipe=OkTopk(density=0.25), steps=2)
    assert recipe.density == 0.25
    world = SimulatedWorld(recipe, 2, 8)
    full = [world.step(torch.randn(2, 8))[0].is_full for _ in range(4)]
    assert full == [True, True, False, False]
    assert world.workers[0].algorithm.state_dict()["inner"]["step"] == 2
    with pytest.raises(ConfigurationError, match="steps=-1"):
        Warmup(recipe=OkTopk(), steps=-1)
    with pytest.raises(ConfigurationError, match="not a state of a warm-up"):
        world.workers[0].algorithm.load_state_dict({"step": 1})


def test_exponential_warmup() -> None:
    """Five stages down to 0.1 %; each of equal length, momentum goes on, and the recipe itself comes last."""
    recipe = Warmup(recipe=tritoncomm.DGC(density=0.001), steps=10, schedule="exponential")
    assert recipe.densities() == pytest.approx([0.2512, 0.0631, 0.01585, 0.00398, 0.001], rel=0.01)
    assert [recipe.stage(step) for step in range(12)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4]
    world = SimulatedWorld(recipe, 1, 1000)
    generator = torch.Generator().manual_seed(0)
    delivered = [len(world.step(torch.randn(1, 1000, generator=generator))[0]) for _ in range(11)]
    assert delivered == [251, 251, 63, 63, 15, 15, 3, 3, 1, 1, 1]
    velocity = world.workers[0].algorithm.inner.state.velocity
    assert float(velocity.abs().mean()) > 1.2  # of many steps; one alone has 0.8
    assert Warmup(recipe=OkTopk(), steps=0, schedule="exponential").stage(0) == 4


def test_foreign_state_is_refused() -> None:
    """States and residuals that do not fit are refused by name and change nothing."""
    world = SimulatedWorld(OkTopk(density=0.1), 2, 20)
    world.step(torch.randn(2, 20))
    before = world.residuals
    with pytest.raises(ConfigurationError, match="saved by 3 workers"):
        world.load_state_dict(SimulatedWorld(OkTopk(), 3, 20).state_dict())
    with pytest.raises(ConfigurationError, match=r"residual has shape \(21,\)"):
        world.load_state_dict(SimulatedWorld(OkTopk(), 2, 21).state_dict())
    with pytest.raises(ConfigurationError, match="not a state of OkTopkAlgorithm"):
        world.load_state_dict(SimulatedWorld(tritoncomm.Dense(), 2, 20).state_dict())
    half_good = world.state_dict()
    half_good["workers"][0]["residual"] += 1
    half_good["workers"][1]["algorithm"] = {}
    with pytest.raises(ConfigurationError, match="not a state"):
        world.load_state_dict(half_good)
    assert torch.equal(world.residuals, before)


@pytest.mark.parametrize(("arguments", "named"), [((0, 5), "world_size=0"), ((2, -1), "numel=-1")])
def test_simulated_world_refuses(arguments: tuple[int, int], named: str) -> None:
    """Impossible worlds are named."""
    with pytest.raises(ConfigurationError, match=named):
        SimulatedWorld(OkTopk(), *arguments)


def test_empty_vector() -> None:
    """A vector without coordinates is legal everywhere."""
    for name in tritoncomm.algorithms():
        world = SimulatedWorld(tritoncomm.recipe(name, density=0.1), 3, 0)
        assert world.step(torch.empty(3, 0))[0].to_dense().numel() == 0


def test_public_names() -> None:
    """The public surface, pinned."""
    assert sorted(tritoncomm.__all__) == [
        "ConfigMismatchError", "ConfigurationError", "DGC", "Dense", "ExDyna", "ExchangeError",
        "ExchangeTimeoutError", "GTopk", "GaussianK",
        "HardThreshold", "Hierarchical", "MiCRO", "NonFiniteError", "OkTopk",
        "PeerLostError", "ProtocolMismatchError", "RandomBlock", "RandomK",
        "Recipe", "SIDCo", "SimulatedWorld", "SparDL", "SparseOptimizer", "SparseVector", "TopkAllgather", "TopkDSA",
        "TritoncommError", "Warmup", "__version__", "algorithms", "recipe", "trace", "wrap",
    ]  # fmt: skip
    assert all(hasattr(tritoncomm, name) for name in tritoncomm.__all__)
    assert importlib.metadata.version("tritoncomm") == tritoncomm.__version__
