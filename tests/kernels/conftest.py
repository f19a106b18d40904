"""Prints what the compiler made of the kernels, after the tests."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table that a passed test recorded."""
    for report in terminalreporter.stats.get("passed", []):
        for name, rows in getattr(report, "user_properties", []):
            if name == "table":
                terminalreporter.section("compiled kernels")
                for row in rows:
                    terminalreporter.line(row)
