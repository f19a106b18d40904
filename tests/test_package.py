"""The public names of the package."""

from __future__ import annotations

import importlib.metadata

import tritoncomm


def test_public_names() -> None:
    """The package exports exactly these names."""
    assert sorted(tritoncomm.__all__) == [
        "ConfigMismatchError", "ConfigurationError", "DGC", "Dense", "ExDyna", "ExchangeError",
        "ExchangeTimeoutError", "GTopk", "GaussianK",
        "HardThreshold", "Hierarchical", "MiCRO", "NonFiniteError", "OkTopk",
        "PeerLostError", "ProtocolMismatchError", "RandomBlock", "RandomK",
        "Recipe", "SIDCo", "SimulatedWorld", "SparDL", "SparseOptimizer", "SparseVector", "TopkAllgather", "TopkDSA",
        "TritoncommError", "Warmup", "__version__", "algorithms", "recipe", "trace", "wrap",
    ]  # fmt: skip
    assert all(hasattr(tritoncomm, name) for name in tritoncomm.__all__)
    assert all(hasattr(tritoncomm, name) for name in ("amp", "checkpoint"))
    assert importlib.metadata.version("tritoncomm") == tritoncomm.__version__
