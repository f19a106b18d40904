"""The quantized mean of a dense vector: traffic, conservation, refusals and hostile messages."""

from __future__ import annotations

import pytest
import torch
from tritoncomm.primitives.quantized_mean import QuantizedMean
from tritoncomm.scheduler.simulated import SimulatedScheduler

import laws
from tritoncomm_kernels.formats import FORMATS

EIGHT = FORMATS["8bit"]


def run(values: torch.Tensor, bits: int = 8):
    """Return the means, the residuals and the scheduler of one exchange of ``values`` (``[world_size, m]``)."""
    size = len(values)
    scheduler = SimulatedScheduler(size)
    patterns = [QuantizedMean(FORMATS[f"{bits}bit"], "small").of(part, rank, size) for rank, part in enumerate(values)]
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
    expected = QuantizedMean(FORMATS[f"{bits}bit"], "small").traffic(length, world_size)
    for meter in scheduler.meters:
        assert dict(meter.sent_by_phase) == {phase: flow.sent for phase, flow in expected.items()}
        assert dict(meter.received_by_phase) == {phase: flow.received for phase, flow in expected.items()}


def test_large_values_leave_no_inf_behind() -> None:
    """Values just below the limit of 255 * 2**104 have a finite mean and finite residuals, and nothing is lost."""
    values = torch.full((6, 9), 254.5 * 2.0**104)
    means, residuals, _ = run(values)
    assert means[0].isfinite().all()
    assert residuals.isfinite().all()
    assert torch.equal(6 * means[0].double() + residuals.double().sum(0), values.double().sum(0))
