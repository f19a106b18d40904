"""What commands have in common: types of arguments that name what is wrong, and the option ``--values``."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

from tritoncomm.algorithms import recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.scheduler.cost import Link
from tritoncomm.step.settings import DEFAULT_VALUES
from tritoncomm_kernels.formats import ENTRY_FORMATS, FORMATS

LINK = "10gbit,30us"


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults of options that have one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None or action.default is False else super()._get_help_string(action)


def add_values(command: argparse.ArgumentParser, default: str = DEFAULT_VALUES) -> None:
    """Add the option ``--values``, which is None if it is not given."""
    command.add_argument(
        "--values",
        help="format of values on the wire; what rounding cuts off stays in a residual. Methods that send entries take "
        f"{', '.join(ENTRY_FORMATS)}. Default: {default}",
        choices=tuple(FORMATS),
    )


def number(text: str) -> float:
    """Parse a finite number."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
    if not abs(value) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be finite, got {text!r}")
    return value


def check_values(options: argparse.Namespace) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if the method has no ``--values``, or not these."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the density, which is not the chosen one
        if options.values is not None:
            recipe(options.algo, values=options.values)


def count(text: str, least: int = 1, most: float = float("inf")) -> int:
    """Parse a whole number from ``least`` to ``most``. It may be written as 25e6."""
    value = int(text) if text.isdecimal() else number(text)  # a float does not hold all digits of a long number
    if value != int(value) or not least <= value <= most:
        limits = f"of at least {least}" if most == float("inf") else f"from {least} to {most:,}"
        raise argparse.ArgumentTypeError(f"must be a whole number {limits}, got {text!r}")
    return int(value)


def milliseconds(text: str) -> float:
    """Parse a time in milliseconds, and return it in seconds."""
    if (value := number(text)) < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {value}")
    return value / 1e3


def density(text: str) -> float:
    """Parse a density."""
    value = number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], got {value}")
    return value


def share(text: str) -> float:
    """Parse a share of a whole."""
    value = number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, got {text}")
    return value


def link(text: str) -> Link:
    """Parse a link, for example ``10gbit,30us``."""
    try:
        return Link.parse(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_files(parser: argparse.ArgumentParser) -> None:
    """Add the files that a command writes its figures and its picture to."""
    parser.add_argument("--json", type=writable, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--plot", type=writable, metavar="FILE", help="write a PNG to this file (requires matplotlib)")


def writable(text: str) -> Path:
    """Parse the path of a file that can be written to."""
    path = Path(text)
    try:
        with path.open("a"):
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write to {text!r}: {error.strerror}") from None
