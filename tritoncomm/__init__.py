"""Sparse gradient exchange for data-parallel training in PyTorch, without a parameter server."""

from tritoncomm import amp as amp
from tritoncomm import checkpoint as checkpoint
from tritoncomm import last_resort
from tritoncomm.algorithms import (
    Dense,
    ExDyna,
    Hierarchical,
    MiCRO,
    OkTopk,
    Quantized,
    RandomBlock,
    Recipe,
    SparDL,
    TopkAllgather,
    Warmup,
    algorithms,
    recipe,
    register,
)
from tritoncomm.errors import (
    ConfigMismatchError,
    ConfigurationError,
    ExchangeError,
    ExchangeTimeoutError,
    NonFiniteError,
    PeerLostError,
    ProtocolMismatchError,
    TritoncommError,
)
from tritoncomm.optimizer import SparseOptimizer
from tritoncomm.primitives.sparse_vector import SparseVector
from tritoncomm.simulation import SimulatedWorld
from tritoncomm.step.optimizer_list import OptimizerList
from tritoncomm.step.rules.choose import add_rule
from tritoncomm.step.rules.late import LateRule
from tritoncomm.step.settings import Late, Updates
from tritoncomm.version import __version__
from tritoncomm.wrapping import wrap

last_resort.install()

__all__ = [
    "ConfigMismatchError",
    "ConfigurationError",
    "Dense",
    "ExDyna",
    "ExchangeError",
    "ExchangeTimeoutError",
    "Hierarchical",
    "Late",
    "LateRule",
    "MiCRO",
    "NonFiniteError",
    "OkTopk",
    "OptimizerList",
    "PeerLostError",
    "ProtocolMismatchError",
    "Quantized",
    "RandomBlock",
    "Recipe",
    "SimulatedWorld",
    "SparDL",
    "SparseOptimizer",
    "SparseVector",
    "TopkAllgather",
    "TritoncommError",
    "Updates",
    "Warmup",
    "__version__",
    "add_rule",
    "algorithms",
    "recipe",
    "register",
    "wrap",
]
