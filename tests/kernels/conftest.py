"""Prints a table of the compiled kernels after the tests, and makes Triton's interpreter faster."""

from __future__ import annotations

import dataclasses
import inspect
import os
import types
from functools import cache

import pytest


def pytest_configure() -> None:
    """Make the interpreter faster.

    Two kinds of its work change no result, and take most of the time of these tests. It searches Triton's
    modules for built-in functions at each launch, and checks every sum of integers for overflow, although what it finds
    is reported only in debug mode.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)

    @cache
    def built_in(owner: object) -> list[str]:
        return [name for name, member in inspect.getmembers(owner) if is_builtin(member)]

    def members(owner: object) -> list[tuple[str, object]]:
        return [(name, getattr(owner, name)) for name in built_in(owner)]

    interpreter.inspect = types.SimpleNamespace(**(vars(inspect) | {"getmembers": members}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table that a passed test recorded."""
    passed = terminalreporter.stats.get("passed", [])
    rows = [row for report in passed for name, row in getattr(report, "user_properties", []) if name == "compiled"]
    if not rows:
        return
    import triton
    from compiled_kernels import TARGETS

    terminalreporter.section("compiled kernels")
    terminalreporter.line(f"Triton {triton.__version__}: registers on {', '.join(TARGETS)}; the rest on sm_90")
    for row in sorted(rows):
        terminalreporter.line(row)
