"""Sparse gradient exchange for data-parallel training in PyTorch, without a parameter server."""

from tritoncomm import amp as amp
from tritoncomm import checkpoint as checkpoint
from tritoncomm import last_resort
from tritoncomm.algorithms import *  # noqa: F403 - methods are listed there alone
from tritoncomm.algorithms import __all__ as _methods
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
    "ExchangeError",
    "ExchangeTimeoutError",
    "Late",
    "LateRule",
    "NonFiniteError",
    "OptimizerList",
    "PeerLostError",
    "ProtocolMismatchError",
    "SimulatedWorld",
    "SparseOptimizer",
    "SparseVector",
    "TritoncommError",
    "Updates",
    "__version__",
    "add_rule",
    "wrap",
]
__all__ += _methods  # noqa: PLE0605 - a list
