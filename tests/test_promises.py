"""The promises ask for nothing but public names, and each broken line has a place and a test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import broken_lines

FOLDER = Path(__file__).parent / "promises"
ALLOWED = ("_exit", "_set_params_and_buffers_to_ignore_for_model")  # of os, and of DDP, which has no other way
PUBLIC = ("tritoncomm", "tritoncomm.checkpoint", "tritoncomm.amp")


def _is_public(module: str) -> bool:
    return module in PUBLIC or module.startswith("tritoncomm.integrations.") or not module.startswith("tritoncomm")


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_promises_use_public_names(file):
    """No module of the library's inside is imported, and no private attribute is read."""
    for node in ast.walk(ast.parse(file.read_text())):
        modules = [node.module] if isinstance(node, ast.ImportFrom) else []
        modules += [each.name for each in node.names] if isinstance(node, ast.Import) else []
        assert all(map(_is_public, modules)), f"{file.name}:{node.lineno} imports {modules}"
        if isinstance(node, ast.Attribute):
            is_private = node.attr.startswith("_") and not node.attr.startswith("__") and node.attr not in ALLOWED
            assert not is_private, f"{file.name}:{node.lineno} reads {node.attr}"


def test_broken_lines_are_there_once_and_have_tests():
    """Code that moves takes its broken lines with it."""
    assert not broken_lines.problems(), "\n".join(broken_lines.problems())
