"""The layout of a bucket: gradients to one flat vector, and a delivered mean back to them."""

from __future__ import annotations

import torch
from torch import nn
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.step.exchange.layout import BucketLayout

import tritoncomm_kernels as kernels


def test_bucket_layout() -> None:
    """Gather and scatter are inverse for all dtypes, shapes and strides, and split maps flat indices to parameters."""
    a = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    b = nn.Parameter(torch.zeros(0))
    c = nn.Parameter(torch.tensor(5.0, dtype=torch.bfloat16))
    layout = BucketLayout([a, b, c])
    a.grad, c.grad = a.detach() * 2, c.detach() * 2
    flat = layout.read_gradients(torch.full((7,), float("nan")))
    assert flat.tolist() == [0, 6, 2, 8, 4, 10, 10]
    layout.scatter(layout.split(SparseVector.full(flat + 1)))
    assert torch.equal(a.grad, a.detach() * 2 + 1)
    assert (c.grad.dtype, float(c.grad)) == (torch.bfloat16, 11.0)
    sparse = SparseVector(torch.tensor([1, 5, 6], dtype=torch.int32), torch.tensor([7.0, -0.0, 9.0]), 7)
    entries = layout.split(sparse)
    assert [at if at is None else at.tolist() for at, _ in entries] == [[1, 5], None, None]
    assert [values.tolist() for _, values in entries] == [[7, 0], [], [9]]
    b.grad = torch.full((0,), 1.0)
    c.grad = None
    layout.scatter(entries)
    assert a.grad.stride() == (1, 3), "memory that is not contiguous is kept"
    assert (a.grad.reshape(-1).tolist(), float(c.grad), c.grad.dtype) == ([0, 7, 0, 0, 0, 0], 9, torch.bfloat16)


def test_layout_of_a_mean_with_padding() -> None:
    """Entries with padding are written to all gradients at once, and checked against the range of fp16 parameters."""
    a, b = nn.Parameter(torch.zeros(2, 3).t()), nn.Parameter(torch.zeros(4, dtype=torch.float16))
    layout, workspace = BucketLayout([a, b]), kernels.Workspace()
    for entries, fits in (([(1, 7.0), (6, 9.0)], True), ([(0, 1e5), (9, 2.0)], True), ([(2, 1.0), (7, 1e5)], False)):
        indices, values = (torch.tensor(part) for part in zip(*entries, strict=True))
        padded = kernels.Entries(indices.int(), values).padded(5)
        mean = SparseVector.padded(padded, 10)
        assert [bool(layout.overflow(each)) for each in (mean, mean.trimmed())] == [not fits] * 2
        layout.scatter_flat(mean.write_to(torch.empty(10), workspace=workspace))
        found = [parameter.grad.clone() for parameter in (a, b)]
        layout.scatter(layout.split(mean.trimmed()))
        assert all(torch.equal(grad, parameter.grad) for grad, parameter in zip(found, (a, b), strict=True))
