"""The command ``slow``: a script on hosts with a slow network, and its bytes and seconds per step."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from tritoncomm.errors import ConfigurationError
from tritoncomm.scheduler.cost import Link
from tritoncomm.scheduler.ranks import rank_text
from tritoncomm.slow import launcher
from tritoncomm.slow.figures import table
from tritoncomm.slow.launcher import Launch
from tritoncomm.slow.namespaces import Network, NetworkError

MOST_WORKERS = 254  # addresses of a network


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    slow = commands.add_parser(
        "slow",
        help="run a training script on hosts with a slow network, and show its bytes and seconds per step",
        description="Run a script as torchrun does, with one worker on each of several hosts. The hosts are network "
        "namespaces of this machine, whose interfaces have the given rate. The process group must be gloo. A step is "
        "one of the script's optimizer. Output is that of rank 0, and of a rank that fails. The exit code is that of "
        "the script. Needs Linux, iproute2, and root or 'unshare --map-root-user'.",
    )
    slow.add_argument("--workers", type=int, default=4, help="number of hosts, with a worker each (default: 4)")
    slow.add_argument(
        "--link",
        required=True,
        metavar="RATE[,DELAY]",
        help="rate of every interface in each direction, for example 100mbit, and the delay of every packet, for "
        "example 100mbit,20ms",
    )
    slow.add_argument("--steps", type=int, metavar="N", help="end the script after N steps of its optimizer")
    slow.add_argument("script", help="file of the training script")
    slow.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    slow.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the script and print its figures. Return the exit code of the worker that failed first, or 0."""
    rate, delay = _checked(options)
    launch = Launch(Network(options.workers, rate, delay), [options.script, *options.arguments], options.steps)
    try:
        with launch:
            failure = launch.wait()
    except NetworkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # the script may run for days, and its first steps are enough
        _report(launch, options)
        raise
    if failure is None:
        _report(launch, options)
        return 0
    for line in failure.last_lines:
        print(f"{rank_text(failure.rank)}: {line}", file=sys.stderr)
    by_signal = failure.code < 0
    how = f"was killed by {signal.Signals(-failure.code).name}" if by_signal else f"ended with code {failure.code}"
    print(f"error: {rank_text(failure.rank)} {how}", file=sys.stderr)
    return 128 - failure.code if by_signal else failure.code


def _checked(options: argparse.Namespace) -> tuple[str, str]:
    """Return rate and delay. Raises :class:`~tritoncomm.ConfigurationError` if an argument is bad."""
    if not 1 <= options.workers <= MOST_WORKERS:
        raise ConfigurationError(f"--workers {options.workers}: give 1 to {MOST_WORKERS}")
    if options.steps is not None and options.steps < 1:
        raise ConfigurationError(f"--steps {options.steps}: give at least 1, or leave it out to run the whole script")
    if not Path(options.script).is_file():
        raise ConfigurationError(f"script {options.script!r} is not a file: give the path of a Python script")
    rate, _, delay = options.link.partition(",")
    try:
        Link.parse(f"{rate},{delay or '0s'}")
    except ConfigurationError:
        raise ConfigurationError(
            f"--link {options.link!r}: give a rate, or a rate and a delay, for example '100mbit' or '100mbit,20ms'"
        ) from None
    return rate, delay or "0s"


def _report(launch: Launch, options: argparse.Namespace) -> None:
    link = Link.parse(f"{options.link.partition(',')[0]},0s")
    print(f"\n{options.workers} workers, {options.link}: {table([worker.steps for worker in launch.workers], link)}")
    if (cores := launcher.cores()) < options.workers:
        print(f"The workers share {cores} CPU cores: on hosts of their own, computation takes less time.")
