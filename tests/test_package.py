"""The public names of the package."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest
import tritoncomm

import tritoncomm_kernels
from depth import python
from pages import ROOT


def test_public_names() -> None:
    """The package exports exactly what the reference lists, these errors, and its version."""
    listed = re.findall(r"auto(?:class|function):: tritoncomm\.(\w+)\n", (ROOT / "docs/reference/api.md").read_text())
    errors = [
        "ConfigMismatchError", "ConfigurationError", "ExchangeError", "ExchangeTimeoutError", "NonFiniteError",
        "PeerLostError", "ProtocolMismatchError", "TritoncommError",
    ]  # fmt: skip
    assert sorted(tritoncomm.__all__) == sorted([*listed, *errors, "__version__"])
    assert all(hasattr(tritoncomm, name) for name in tritoncomm.__all__)
    assert all(hasattr(tritoncomm, name) for name in ("amp", "checkpoint"))
    assert importlib.metadata.version("tritoncomm") == tritoncomm.__version__


@pytest.mark.parametrize("package", [tritoncomm, tritoncomm_kernels], ids=lambda package: package.__name__)
def test_public_methods_have_docstrings(package) -> None:
    """Every public method has a docstring, of its own or of the method that it overrides."""
    names = [each.name for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    missing = []
    for name in names:
        if name.endswith(("_triton", "__main__")) or ".integrations." in name:
            continue  # they need what may not be installed, or run when imported
        for kind in vars(importlib.import_module(name)).values():
            if inspect.isclass(kind) and kind.__module__ == name and not kind.__name__.startswith("_"):
                missing += [
                    f"{name}.{kind.__name__}.{method}"
                    for method, value in vars(kind).items()
                    if not method.startswith("_")
                    and (inspect.isroutine(value) or isinstance(value, (property, staticmethod, classmethod)))
                    and not inspect.getdoc(getattr(kind, method))
                ]
    assert not missing


# What a program has configured, and what it writes.
CONFIGURED = {
    "": "tritoncomm: slow\n",
    "logging.basicConfig()": "WARNING:tritoncomm:slow\n",
    "logging.basicConfig(format='%(message)s')": "slow\n",
    "logging.getLogger('tritoncomm').addHandler(logging.NullHandler())": "",
    "logging.getLogger('tritoncomm').propagate = False": "tritoncomm: slow\n",
    "logging.getLogger('tritoncomm').setLevel(logging.ERROR)": "",
}
PROGRAM = """
import importlib, logging, os, sys, tritoncomm, warnings
warnings.simplefilter("ignore")
for configured in sys.argv[1:]:
    if os.fork():
        assert os.wait()[1] == 0
        print("--", file=sys.stderr, flush=True)
        continue
    importlib.reload(tritoncomm)
    exec(configured)
    logging.getLogger("tritoncomm").info("fast")
    logging.getLogger("tritoncomm").warning("%s", "slow")
    os._exit(0)
"""


def test_warnings_begin_with_the_name_of_the_library(tmp_path: Path) -> None:
    """If logging is not configured, a warning says who warns. Otherwise handlers decide. It is written once."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [*python(), str(tmp_path / "program.py"), *CONFIGURED]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - ours
    assert ended.stderr.split("--\n") == [*CONFIGURED.values(), ""]


def test_every_logger_is_that_of_the_library() -> None:
    """All modules log to one logger, whose name warnings begin with."""
    names = [each.name for each in pkgutil.walk_packages(tritoncomm.__path__, "tritoncomm.")]
    for name in names:
        if not name.endswith("__main__") and ".integrations." not in name:
            found = [each for each in vars(importlib.import_module(name)).values() if isinstance(each, logging.Logger)]
            assert all(each.name == "tritoncomm" for each in found), name
