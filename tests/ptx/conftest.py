"""Lets kernels run in the executor, if a variable says so."""

from __future__ import annotations

import os


def pytest_configure() -> None:
    """Take the place of Triton's launcher, before a kernel is launched."""
    if "TRITONCOMM_PTX" in os.environ and os.environ.get("TRITON_INTERPRET") != "1":
        from ptx.launch import install

        install()
