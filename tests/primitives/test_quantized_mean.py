"""The quantized mean of a dense vector: traffic, conservation, refusals and hostile messages."""

from __future__ import annotations

import math

import pytest
import torch
from tritoncomm import NonFiniteError, ProtocolMismatchError
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.quantized_mean import deliver_quantized, quantized_mean, traffic
from tritoncomm.scheduler.simulated import SimulatedScheduler

import laws
from tritoncomm_kernels.formats import FORMATS

EIGHT = FORMATS["8bit"]


def run(values: torch.Tensor, bits: int = 8):
    """Return the means, the residuals and the scheduler of one exchange of ``values`` (``[world_size, m]``)."""
    size = len(values)
    scheduler = SimulatedScheduler(size)
    patterns = [
        quantized_mean(part, rank, size, fmt=FORMATS[f"{bits}bit"], phase="small") for rank, part in enumerate(values)
    ]
    means, residuals = zip(*scheduler.run(patterns), strict=True)
    return means, torch.stack(residuals), scheduler


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("world_size", range(1, 18))
@pytest.mark.parametrize("length", [1, 5, 700])
def test_nothing_is_lost_and_ranks_agree(world_size: int, length: int, bits: int) -> None:
    """World size times mean plus all residuals is the sum of all values, to the bit, and all ranks have one mean."""
    generator = torch.Generator().manual_seed(length)
    values = torch.randint(-5000, 5000, (world_size, length), generator=generator).float()
    means, residuals, scheduler = run(values, bits)
    assert all(laws.same_bits(mean, means[0]) for mean in means)
    kept = world_size * means[0].double() + residuals.double().sum(0)
    assert torch.equal(kept, values.double().sum(0))
    if world_size == 1:
        assert torch.equal(means[0], values[0])
        assert not residuals.any()
    step = values.abs().max() / 2 ** (bits - 2)
    assert (means[0] - values.mean(0)).abs().max() <= 2 * step
    expected = traffic(length, world_size, fmt=FORMATS[f"{bits}bit"], phase="small")
    for meter in scheduler.meters:
        assert dict(meter.sent_by_phase) == {phase: flow.sent for phase, flow in expected.items()}
        assert dict(meter.received_by_phase) == {phase: flow.received for phase, flow in expected.items()}


def test_errors_do_not_add_up() -> None:
    """With error feedback, the mean of many steps tends to the mean of the values."""
    values = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    held, delivered = torch.zeros_like(values), torch.zeros(50)
    for _ in range(64):
        means, held, _ = run(values + held, 4)
        delivered += means[0]
    assert (delivered / 64 - values.mean(0)).abs().max() < 0.02


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_a_value_that_is_not_finite_is_refused_everywhere(world_size: int, bad: float) -> None:
    """All ranks raise for a bad value on any rank in any part, also the rank's own part."""
    for rank in range(world_size):
        for place in range(7):
            values = torch.ones(world_size, 7)
            values[rank, place] = bad
            if world_size == 1 and math.isfinite(bad):
                continue  # nothing is quantized
            scheduler = SimulatedScheduler(world_size)
            patterns = [quantized_mean(v, r, world_size, fmt=EIGHT, phase="small") for r, v in enumerate(values)]
            with pytest.raises(NonFiniteError):
                scheduler.run(patterns)
            assert sorted(scheduler.raised) == list(range(world_size))


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("size", [1, 3])
def test_a_rank_that_is_not_finite_elsewhere_is_refused(size: int, place: int) -> None:
    """All ranks raise if one of them holds a NaN, also at a coordinate that is not delivered."""
    gradients, zeros = torch.ones(size, 6), torch.zeros(6)
    gradients[-1, place] = math.nan
    accumulators = [Accumulator(zeros, gradient, zeros.clone()) for gradient in gradients]
    where, scheduler = torch.tensor([1, 4], dtype=torch.int32), SimulatedScheduler(size)
    with pytest.raises(NonFiniteError):
        scheduler.run(
            [deliver_quantized(acc, where, r, size, fmt=EIGHT, phase="small") for r, acc in enumerate(accumulators)]
        )
    assert sorted(scheduler.raised) == list(range(size))


def test_large_values_leave_no_inf_behind() -> None:
    """Values just below the limit of 255 * 2**104 have a finite mean and finite residuals, and nothing is lost."""
    values = torch.full((6, 9), 254.5 * 2.0**104)
    means, residuals, _ = run(values)
    assert means[0].isfinite().all()
    assert residuals.isfinite().all()
    assert torch.equal(6 * means[0].double() + residuals.double().sum(0), values.double().sum(0))


@pytest.mark.parametrize("phase", ["small-scatter", "small-gather"])
@pytest.mark.parametrize("seed", range(15))
def test_hostile_words_are_harmless(seed: int, phase: str) -> None:
    """A rank that sends random words gets finite means or a refusal, and no other error.

    Words to the owner of a part give the same on all ranks, because the owner passes on what it makes of them. An owner
    that tells two ranks different means cannot be found out.
    """
    size, generator = 3, torch.Generator().manual_seed(seed)

    def hostile(pattern):
        reply = None
        try:
            while True:
                operation = pattern.send(reply)
                sends = getattr(getattr(operation, "round", operation), "sends", None)
                for message in (sends or {}).values() if operation.phase == phase else ():
                    message.copy_(torch.randint(-(2**31), 2**31 - 1, message.shape, generator=generator))
                    message[-1] = -1 if seed % 3 == 0 else message[-1]  # the code of blocks that are not finite
                reply = yield operation
        except StopIteration as stop:
            return stop.value

    values, scheduler = torch.ones(size, 600), SimulatedScheduler(size)
    patterns = [quantized_mean(part, rank, size, fmt=EIGHT, phase="small") for rank, part in enumerate(values)]
    try:
        means, residuals = zip(*scheduler.run([hostile(patterns[0]), *patterns[1:]]), strict=True)
    except (NonFiniteError, ProtocolMismatchError):
        if phase == "small-scatter":
            assert sorted(scheduler.raised) == list(range(size))
        return
    assert all(mean.isfinite().all() for mean in means)
    assert all(residual.isfinite().all() for residual in residuals)
    if phase == "small-scatter":
        assert all(laws.same_bits(mean, means[0]) for mean in means)
