"""Sparse gradient exchange for data-parallel training in PyTorch, without a parameter server."""

from tritoncomm.algorithms import (
    Dense,
    ExDyna,
    MiCRO,
    OkTopk,
    Recipe,
    SparDL,
    TopkAllgather,
    Warmup,
    algorithms,
    recipe,
)
from tritoncomm.errors import (
    ConfigMismatchError,
    ConfigurationError,
    ExchangeError,
    NonFiniteError,
    ProtocolMismatchError,
    TritoncommError,
)
from tritoncomm.optim import SparseOptimizer, wrap
from tritoncomm.simulation import SimulatedWorld
from tritoncomm.sparse import SparseVector
from tritoncomm.version import __version__

__all__ = [
    "ConfigMismatchError",
    "ConfigurationError",
    "Dense",
    "ExDyna",
    "ExchangeError",
    "MiCRO",
    "NonFiniteError",
    "OkTopk",
    "ProtocolMismatchError",
    "Recipe",
    "SimulatedWorld",
    "SparDL",
    "SparseOptimizer",
    "SparseVector",
    "TopkAllgather",
    "TritoncommError",
    "Warmup",
    "__version__",
    "algorithms",
    "recipe",
    "wrap",
]
