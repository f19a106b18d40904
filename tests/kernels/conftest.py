"""Prints a table of the compiled kernels after the tests."""

from __future__ import annotations

import pytest


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
