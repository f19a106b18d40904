"""The command line: ``python -m tritoncomm demo``."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import tritoncomm
from tritoncomm.demo import report
from tritoncomm.demo.launch import WorkerError, run_workers
from tritoncomm.demo.train import Run, Settings, compare


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit code, 2 for bad arguments."""
    parser = argparse.ArgumentParser(prog="python -m tritoncomm", description=tritoncomm.__doc__)
    parser.add_argument("--version", action="version", version=tritoncomm.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="train a small language model, dense and compressed side by side",
        description="Trains a small GPT on the standard library's source files with local workers over gloo, "
        "first with dense gradients, then with the chosen method, on the same data from the same start.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    defaults = Settings()
    demo.add_argument("--algo", default=defaults.algo, choices=tritoncomm.algorithms(), help="the method")
    demo.add_argument("--density", type=_density, default=defaults.density, help="share of entries to deliver")
    demo.add_argument("--workers", type=_positive, default=defaults.workers, help="worker processes")
    demo.add_argument("--steps", type=_positive, default=defaults.steps, help="training steps of each run")
    demo.add_argument("--seed", type=_seed, default=defaults.seed, help="of model and data")
    demo.add_argument(
        "--staleness",
        default=defaults.staleness,
        choices=("aware", "off"),
        help="whether AdamW knows how old a delivered gradient is",
    )
    demo.add_argument("--json", type=_writable, metavar="FILE", help="write the figures here")
    demo.add_argument("--plot", type=_writable, metavar="FILE", help="write a PNG here (needs matplotlib)")
    options = parser.parse_args(arguments)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        demo.error("--plot needs matplotlib: pip install 'tritoncomm[demo]'")
    return _demo(options)


def _demo(options: argparse.Namespace) -> int:
    settings = Settings(
        algo=options.algo,
        density=options.density,
        workers=options.workers,
        steps=options.steps,
        seed=options.seed,
        staleness=options.staleness,
    )
    try:
        with report.progress(settings) as show:
            runs: list[Run] = run_workers(compare, settings.workers, settings, listen=show)[0]
    except WorkerError as error:
        print(error, file=sys.stderr)
        return 1
    figures = report.summary(settings, *runs)
    print(f"\n{report.table(figures)}")
    if options.json:
        report.write_json(figures, options.json)
    if options.plot:
        report.plot(figures, runs, options.plot)
    return 0


def _positive(text: str) -> int:
    if (value := _not_negative(text)) == 0:
        raise argparse.ArgumentTypeError("choose at least 1")
    return value


def _not_negative(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def _seed(text: str) -> int:
    if (value := _not_negative(text)) >= 2**63:
        raise argparse.ArgumentTypeError("choose less than 2^63")
    return value


def _density(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{value} is not a share: choose above 0 and at most 1")
    return value


def _writable(text: str) -> Path:
    path = Path(text)
    try:
        with path.open("a"):
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write to {text!r}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
