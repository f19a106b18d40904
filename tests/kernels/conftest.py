"""Prints what was compared after the tests, and makes Triton's interpreter faster."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def _faster_interpreter() -> None:
    """Make the interpreter faster.

    Three kinds of its work change no result, and take most of the time of these tests. It replaces the functions of
    Triton's modules at each call of a kernel or of a function in one, computes what follows from a type for each
    tensor, and checks every sum of integers for overflow, although what it finds is reported only in debug mode.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)

    replace, done, nothing = interpreter._patch_lang, set(), interpreter._LangPatchScope()

    def replace_once(function: Callable[..., Any]) -> Any:
        if function.__module__ not in done:  # what is replaced depends on the names in a module alone
            replace(function)
            done.add(function.__module__)
        return nothing  # to restore after a launch: nothing in this process calls the functions outside of kernels

    interpreter._patch_lang = replace_once
    _share_what_follows_from_types()


def _share_what_follows_from_types() -> None:
    """Let tensors of one type, and types of one name, have what was computed for the first of them."""
    from triton.language.core import block_type, tensor
    from triton.runtime import interpreter

    make, make_type, numpy_type = tensor.__init__, block_type.__init__, interpreter._get_np_dtype
    known: dict[object, dict[str, Any]] = {}

    def init(self: Any, handle: Any, kind: Any) -> None:
        if kind.name not in known:
            make(self, handle, kind)
            known[kind.name] = vars(self).copy()
        vars(self).update(known[kind.name], handle=handle)

    def init_type(self: Any, element: Any, shape: Any) -> None:
        key = element.name, *getattr(shape, "values", shape)
        if key not in known:
            make_type(self, element, shape)
            known[key] = vars(self).copy()
        vars(self).update(known[key])

    tensor.__init__, block_type.__init__ = init, init_type
    numpy_types: dict[str, Any] = {}

    def numpy_type_of(kind: Any) -> Any:
        if kind.name not in numpy_types:
            numpy_types[kind.name] = numpy_type(kind)
        return numpy_types[kind.name]

    interpreter._get_np_dtype = numpy_type_of


@pytest.fixture(autouse=True)
def _compared(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Record the launches of a test that were compared with the executor, and those that were left out."""
    beside = importlib.import_module("ptx.beside")
    before = [Counter(each) for each in (beside.compared, beside.left_out)]
    yield
    for name, now, then in zip(("compared", "left out"), (beside.compared, beside.left_out), before, strict=True):
        for kernel, number in (now - then).items():
            record_property(name, [kernel, number])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the launches that were compared, and those that were left out."""
    # What fixtures record when a test is over is in the report of its end, whose outcome is "".
    reports = terminalreporter.stats.get("", [])
    recorded: list[tuple[str, Any]] = [each for report in reports for each in getattr(report, "user_properties", [])]
    counts: dict[str, Counter[str]] = {"compared": Counter(), "left out": Counter()}
    for name, row in recorded:
        if name in counts:
            counts[name][row[0]] += row[1]
    for name, found in counts.items():
        if found:
            terminalreporter.section(f"{name}: {found.total()} launches of {len(found)} kernels")
            terminalreporter.line(", ".join(f"{kernel} {number}" for kernel, number in sorted(found.items())))
