"""Residuals beside the checkpoint of a trainer, which saves the optimizer of one rank only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tritoncomm.errors import ConfigMismatchError, ConfigurationError

# Name of the folder, inside the trainer's checkpoint or after its name, that holds a file of each rank.
FOLDER = "tritoncomm"


def name_of(number: int) -> str:
    """Return the name of the folder for the optimizer with this ``number``, counted from 0."""
    return f"{FOLDER}_{number}" if number else FOLDER


def folder_of(file: str | Path, number: int) -> Path:
    """Return the folder of an optimizer's residuals beside a checkpoint that is one ``file``, or a link to one.

    Optimizers are counted from 0.

    Raises:
        ConfigurationError: ``file`` is a URL.
    """
    if "://" in str(file):
        raise ConfigurationError(f"{file} is a URL, and residuals are saved to files: use a local or shared disk")
    return Path(f"{Path(file).resolve()}.{name_of(number)}")


def without_residual(state: dict[str, Any]) -> dict[str, Any]:
    """Return the ``state`` of an optimizer without its residual."""
    return {key: each for key, each in state.items() if key != "tritoncomm"}


@contextmanager
def name_the_fix(function: str) -> Iterator[None]:
    """Add to an error of the body how to continue without the residuals of the checkpoint."""
    try:
        yield
    except (ConfigurationError, ConfigMismatchError) as error:
        raise type(error)(
            f"{error}. If the residuals do not exist, because the checkpoint was saved without tritoncomm or a file is "
            f"lost, pass residuals='reset' to {function}: the optimizer is then restored by the trainer, and residuals "
            "start at zero"
        ) from error
