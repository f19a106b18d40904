"""The command line: ``python -m tritoncomm demo | simulate | plan | doctor | slow``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Callable

import tritoncomm
from tritoncomm.demo import command as demo
from tritoncomm.errors import ConfigurationError
from tritoncomm.planning.commands import add_doctor, add_plan, add_simulate
from tritoncomm.slow import command as slow


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code. Bad arguments give 2."""
    parser = argparse.ArgumentParser(prog="python -m tritoncomm", description=tritoncomm.__doc__)
    parser.add_argument("--version", action="version", version=tritoncomm.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (demo.add, add_simulate, add_plan, add_doctor, slow.add):
        add(commands)
    options = parser.parse_args(arguments)
    if getattr(options, "plot", None) and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot requires matplotlib: pip install 'tritoncomm[demo]'")
    try:
        run: Callable[[argparse.Namespace], int] = options.run
        code = run(options)
        sys.stdout.flush()
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # nobody reads the output any more, as with "| head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left when it exits
        return 128 + signal.SIGPIPE
    else:
        return code


if __name__ == "__main__":
    sys.exit(main())
