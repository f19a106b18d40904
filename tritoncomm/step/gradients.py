"""What an exchange reads from every ``.grad``, and the means that it writes there."""

from __future__ import annotations

from collections.abc import Container, Sequence

from tritoncomm.errors import ConfigurationError
from tritoncomm.step.flat import Delivered, is_sparse, sparse_error
from tritoncomm.step.vector import VectorExchange


def read(vector: VectorExchange, scale: float, resting: Container[int] = ()) -> ConfigurationError | None:
    """Copy every ``.grad``, divided by ``scale``, into ``vector.flat``. Return why that is impossible, or None.

    Gradients of parameters with an id in ``resting`` count as zero.
    """
    error, takes_sparse = None, vector.keeps_gradient()
    sparse = None if takes_sparse else next((each for each in vector.layout.parameters if is_sparse(each.grad)), None)
    if sparse is not None and sparse.grad is not None:
        error = ConfigurationError(sparse_error(vector.name_of(sparse), sparse.grad))
    else:
        try:
            vector.layout.read_gradients(vector.flat, sparse=takes_sparse)
        except ConfigurationError as reason:
            error = reason
    for parameter, part in zip(vector.layout.parameters, vector.layout.parts(vector.flat), strict=True):
        if id(parameter) in resting:
            part.zero_()
    if scale != 1.0:
        vector.flat.mul_(1.0 / scale)
    return error


def write(
    vectors: Sequence[VectorExchange],
    means: list[Delivered],
    kept: Sequence[bool],
    scale: float,
    left: Container[int],
) -> list[Delivered]:
    """Write the ``means`` into every ``.grad``, and return them. What is ``kept`` is the mean, except for ``scale``.

    The ``.grad`` of parameters with an id in ``left`` becomes None.
    """
    for vector, delivered, keeps in zip(vectors, means, kept, strict=True):
        if delivered.is_flat:  # only the GPU knows the number of entries of each parameter
            delivered.layout.scatter_flat(vector.write(delivered.mean), left)
        elif not keeps:
            delivered.layout.scatter(delivered.entries, left)
        elif scale != 1.0:
            delivered.layout.multiply(1.0 / scale)
    return means
