"""The layout of a bucket: a delivered mean back to gradients."""

from __future__ import annotations

import torch
from torch import nn
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.step.exchange.layout import BucketLayout

import tritoncomm_kernels as kernels


def test_layout_of_a_mean_with_padding() -> None:
    """Entries with padding are written to all gradients at once, and checked against the range of fp16 parameters."""
    a, b = nn.Parameter(torch.zeros(2, 3).t()), nn.Parameter(torch.zeros(4, dtype=torch.float16))
    layout = BucketLayout([a, b])
    for entries, fits in (([(1, 7.0), (6, 9.0)], True), ([(0, 1e5), (9, 2.0)], True), ([(2, 1.0), (7, 1e5)], False)):
        indices, values = (torch.tensor(part) for part in zip(*entries, strict=True))
        padded = kernels.Entries(indices.int(), values).padded(5)
        mean = SparseVector.padded(padded, 10)
        assert [bool(layout.overflow(each)) for each in (mean, mean.trimmed())] == [not fits] * 2
        layout.scatter_flat(mean.write_to(torch.empty(10)))
        found = [parameter.grad.clone() for parameter in (a, b)]
        layout.scatter(layout.split(mean.trimmed()))
        assert all(torch.equal(grad, parameter.grad) for grad, parameter in zip(found, (a, b), strict=True))
