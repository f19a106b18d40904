"""The command line: ``python -m tritoncomm demo | simulate | plan | doctor | slow | optimizers``."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

import tritoncomm
from tritoncomm import Quantized, Recipe
from tritoncomm.demo import report
from tritoncomm.demo.train import REPLICAS, Run, Settings, compare
from tritoncomm.errors import ConfigurationError
from tritoncomm.planning import optimizers, planner
from tritoncomm.planning.comparison import Row, Source, compare_methods, picture, table
from tritoncomm.planning.doctor import diagnose
from tritoncomm.planning.synthetic_gradients import (
    AdversarialGradients,
    LayeredGradients,
    RecordedGradients,
    load_recording,
)
from tritoncomm.primitives.quantized_mean import DENSE_FORMATS
from tritoncomm.scheduler.cost import Link
from tritoncomm.scheduler.local_workers import WorkerError, run_workers
from tritoncomm.slow import command as slow
from tritoncomm.step.chosen_recipe import default_fields
from tritoncomm.step.options import DEFAULT_DENSITY, DEFAULT_VALUES
from tritoncomm_kernels import devices
from tritoncomm_kernels.section_layout import VALUE_BITS

LINK = "10gbit,30us"
_MOST_WORKERS = 1_000_000  # for which a plan takes some seconds


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code. Bad arguments give 2."""
    parser = argparse.ArgumentParser(prog="python -m tritoncomm", description=tritoncomm.__doc__)
    parser.add_argument("--version", action="version", version=tritoncomm.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (_add_demo, _add_simulate, _add_plan, _add_doctor, slow.add, _add_optimizers):
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


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults of options that have one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None or action.default is False else super()._get_help_string(action)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a small language model with dense and with sparse exchange, and compare",
        description="Train a small GPT on the source files of Python's standard library, with local worker processes "
        "over gloo. The first run exchanges dense gradients, the second uses the chosen method. Both start from the "
        "same weights and see the same data.",
        formatter_class=_Help,
    )
    defaults = Settings()
    demo.add_argument("--algo", default=defaults.algo, choices=tritoncomm.algorithms(), help="method of the sparse run")
    demo.add_argument("--density", type=_density, default=defaults.density, help="fraction of entries to deliver")
    _add_values(demo)
    demo.add_argument("--workers", type=_positive, default=defaults.workers, help="number of worker processes")
    demo.add_argument("--steps", type=_positive, default=defaults.steps, help="training steps per run")
    demo.add_argument("--seed", type=_seed, default=defaults.seed, help="seed of model and data")
    demo.add_argument(
        "--staleness",
        default=defaults.staleness,
        choices=("aware", "off"),
        help="aware: AdamW accounts for delayed deliveries; off: unmodified AdamW",
    )
    demo.add_argument(
        "--small",
        default=defaults.small,
        choices=DENSE_FORMATS,
        help="format of what is sent dense: small tensors (biases, norms), and the steps at the start",
    )
    demo.add_argument(
        "--door",
        default=defaults.door,
        choices=("wrap", "ddp", "fsdp"),
        help="wrap: a plain module; ddp: DistributedDataParallel; fsdp: FSDP2 with two replicas, whose bytes between "
        "the replicas are counted",
    )
    demo.add_argument(
        "--optimizer",
        default=defaults.optimizer,
        choices=("adamw", "muon"),
        help="of both runs; muon: Muon for matrices, whose updates are exchanged, and AdamW for other parameters",
    )
    demo.add_argument(
        "--local-steps",
        type=_positive,
        default=defaults.local_steps,
        help="steps of the second run between two exchanges of updates; the method is then the default one for updates",
    )
    demo.add_argument("--json", type=_writable, metavar="FILE", help="write the figures to this file")
    demo.add_argument("--plot", type=_writable, metavar="FILE", help="write a PNG to this file (requires matplotlib)")
    demo.add_argument(
        "--record", type=_writable, metavar="FILE", help="save all workers' gradients of the last steps, for simulate"
    )
    demo.set_defaults(run=_demo)


def _add_values(command: argparse.ArgumentParser, default: str = DEFAULT_VALUES) -> None:
    command.add_argument(
        "--values",
        help="format of values on the wire, for methods that send entries; what rounding cuts off stays in a residual. "
        f"Default: {default}",
        choices=tuple(VALUE_BITS),
    )


def _demo(options: argparse.Namespace) -> int:
    if options.values is not None:
        tritoncomm.recipe(options.algo, values=options.values)  # raises if the method has no such field
    by_default = {"values": Quantized().values} if options.algo == Quantized.name else default_fields(options.algo, {})
    given = {field.name: getattr(options, field.name) for field in fields(Settings)}
    settings = Settings(**given | {"values": options.values or by_default.get("values", "fp32")})
    if settings.record is not None and (settings.optimizer, settings.local_steps) != ("adamw", 1):
        print("--record needs gradients that are exchanged: choose --optimizer adamw --local-steps 1", file=sys.stderr)
        return 2
    if settings.door == "fsdp" and settings.workers % REPLICAS:
        print(f"--door fsdp needs an even number of workers, got {settings.workers}", file=sys.stderr)
        return 2
    if settings.door == "fsdp" and settings.record is not None:
        print("--record needs whole gradients, and --door fsdp shards them: choose wrap or ddp", file=sys.stderr)
        return 2
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


def _add_optimizers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    listed = commands.add_parser(
        "optimizers",
        help="list what each optimizer exchanges by default",
        description="List for each optimizer of torch, and for others, whether gradients or updates are exchanged.",
    )
    listed.set_defaults(run=_optimizers)


def _optimizers(_: argparse.Namespace) -> int:
    print(optimizers.table())
    return 0


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="compare words, messages and time of the methods on a simulated network",
        description="Run the methods with any number of workers on a simulated network, in this process. Training uses "
        "the same code. The table shows, for the last step and per rank, words and messages received, balance and "
        "virtual time, beside what was predicted. A word has 4 bytes.",
        formatter_class=_Help,
    )
    simulate.add_argument(
        "--import", type=importlib.import_module, metavar="MODULE",
        help="a module of yours that registers methods; give it before --algo",
    )  # fmt: skip
    simulate.add_argument(
        "--algo", nargs="+", type=_method, default=["all"], metavar="NAME[:FIELD=VALUE...]",
        help="methods, with optional recipe fields, for example spardl:teams=2:sag=bruck",
    )  # fmt: skip
    simulate.add_argument("--workers", type=_numbers, default="8,64", help="numbers of workers, separated by commas")
    simulate.add_argument("--numel", type=_count, default="25e6", help="length of the vector")
    simulate.add_argument("--density", type=_density, default=0.01, help="fraction of entries to deliver")
    _add_values(simulate, "fp32")
    simulate.add_argument("--link", type=_link, default=LINK, help="bandwidth and latency of every rank's interface")
    simulate.add_argument("--steps", type=_positive, default=4, help="steps to simulate; the table shows the last one")
    simulate.add_argument("--gradients", default="layered", help="layered, adversarial, or a file from demo --record")
    simulate.add_argument(
        "--memory",
        type=_count,
        default="1e9",
        help="bytes to use; figures of longer vectors are extrapolated from shorter ones",
    )
    simulate.add_argument("--json", type=_writable, metavar="FILE", help="write the figures to this file")
    simulate.add_argument(
        "--plot", type=_writable, metavar="FILE", help="write a PNG to this file (requires matplotlib)"
    )
    simulate.set_defaults(run=_simulate)


def _simulate(options: argparse.Namespace) -> int:
    methods = [(name, {}) for name in tritoncomm.algorithms()] if "all" in options.algo else options.algo
    recipes = [replace(_at(name, options.density, options.values, "fp32"), **fields) for name, fields in methods]
    rows: list[Row] = []
    for row in compare_methods(
        recipes, options.workers, options.numel, options.link, _source(options.gradients),
        steps=options.steps, memory=options.memory,
    ):  # fmt: skip
        rows.append(row)
        print(
            f"{row.workers} workers, {row.method}: {row.milliseconds:.2f} ms of virtual time",
            file=sys.stderr,
            flush=True,
        )
        if options.json:  # after every row, because a large comparison takes hours
            options.json.write_text(json.dumps([row.as_dict() for row in rows], indent=1) + "\n")
    print(table(rows, options.link))
    if options.plot:
        picture(rows, options.plot)
    return 0


def _at(name: str, density: float, values: str | None, otherwise: str) -> Recipe:
    """Return the recipe of the method ``name``. Without ``values``, entries have the format ``otherwise``."""
    found = planner.at(name, density, values or otherwise)
    return replace(found, values=values) if values and isinstance(found, Quantized) else found


def _method(text: str) -> str | tuple[str, dict[str, Any]]:
    """Return ``"all"``, or the name of a method and its recipe fields."""
    name, *assignments = text.split(":")
    if text == "all":
        return text
    fields = {field: _value(value) for field, _, value in (part.partition("=") for part in assignments)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tritoncomm.recipe(name, **fields)
    except tritoncomm.ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name, fields


def _value(text: str) -> Any:
    """Return a Python literal, such as a number or ``True``, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _source(kind: str) -> Source:
    if kind == "layered":
        return LayeredGradients
    if kind == "adversarial":
        return AdversarialGradients
    recording = load_recording(Path(kind))
    return lambda numel, rank: RecordedGradients(numel, rank, recording)


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser(
        "plan",
        help="predict whether sparse exchange is faster than dense on a network",
        description="Predict the time of a step from the bytes and messages of an exchange, on the given link. The "
        "answer comes first, then a table and the code to use.",
        formatter_class=_Help,
    )
    plan.add_argument("--numel", type=_count, required=True, help="parameters of the model")
    plan.add_argument("--workers", type=_workers, required=True, help="number of workers")
    plan.add_argument("--density", type=_density, default=DEFAULT_DENSITY, help="density to plan for")
    _add_values(plan)
    plan.add_argument("--link", type=_link, default=LINK, help="bandwidth and latency of every rank's interface")
    plan.add_argument("--step-ms", type=_milliseconds, default=0.0, help="computation per step, in milliseconds")
    plan.add_argument(
        "--work-ms",
        type=_milliseconds,
        help="time of selection and packing in a sparse step, in milliseconds, as doctor measures it",
    )
    plan.add_argument(
        "--overlap",
        type=float,
        default=planner.OVERLAP,
        help="fraction of the computation that hides a dense all-reduce; 0 if workers share CPU cores",
    )
    plan.add_argument(
        "--device",
        default=devices.available(),
        choices=devices.KINDS,
        help="device of the gradients, on which the form of the messages depends",
    )
    plan.add_argument("--all", action="store_true", help="print the other methods and other densities too")
    plan.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    setting = planner.Setting(
        numel=options.numel,
        workers=options.workers,
        link=options.link,
        step=options.step_ms / 1e3,
        work=None if options.work_ms is None else options.work_ms / 1e3,
        overlap=options.overlap,
        values=options.values or DEFAULT_VALUES,
        device=options.device,
    )
    print(planner.advice(setting, options.density, everything=options.all))
    return 0


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="measure whether sparse exchange is faster than dense on this machine and network",
        description="Under torchrun: measure the link, a dense all-reduce and the sparse exchange between the ranks. "
        "In a single process: measure the work, and predict the exchanges for --workers and --link. "
        "Exit code: 0 if compression pays, 1 if it does not, 2 if an argument is bad or the measurement fails. "
        "Under torchrun, which reports any code but 0 as a failed process: 0 if the measurement is complete, whether "
        "compression pays or not.",
        formatter_class=_Help,
    )
    doctor.add_argument("--algo", default="oktopk", choices=tritoncomm.algorithms(), help="method to measure")
    doctor.add_argument("--density", type=_density, default=DEFAULT_DENSITY, help="density to decide on")
    _add_values(doctor)
    doctor.add_argument("--numel", type=_count, default="5e6", help="parameters of the model")
    doctor.add_argument("--step-ms", type=_milliseconds, default=0.0, help="computation per step, in milliseconds")
    doctor.add_argument("--workers", type=_positive, default=8, help="single process: workers to predict for")
    doctor.add_argument("--link", type=_link, default=LINK, help="single process: link to predict for")
    doctor.add_argument("--json", type=_writable, metavar="FILE", help="write the figures and the result to this file")
    doctor.add_argument(
        "--exit-code", action="store_true", help="under torchrun too, exit with 1 if compression does not pay"
    )
    doctor.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    try:
        return _measure(options)
    except ConfigurationError:
        raise
    except Exception as error:
        # Not a traceback, with which Python exits with 1: that code says that compression does not pay.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        print(f"error: the measurement failed: {reason}", file=sys.stderr)
        return 2


def _measure(options: argparse.Namespace) -> int:
    if options.values is not None:
        tritoncomm.recipe(options.algo, values=options.values)  # raises if the method has no such field
    kind = devices.available()
    together = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if together:
        dist.init_process_group(devices.backend_of(kind))
    device = devices.chosen(kind, int(os.environ.get("LOCAL_RANK", "0")))
    try:
        diagnosis = diagnose(
            options.numel,
            lambda density: _at(options.algo, density, options.values, DEFAULT_VALUES),
            options.density,
            options.step_ms / 1e3,
            link=options.link,
            workers=options.workers,
            device=device,
        )
        if not together or dist.get_rank() == 0:
            print(diagnosis.report())
            if options.json:
                options.json.write_text(json.dumps(diagnosis.as_dict(), indent=1) + "\n")
        if together:
            dist.barrier()  # torchrun stops all ranks when one exits with a non-zero code, as rank 0 may
    finally:
        if together:
            dist.destroy_process_group()
    # torchrun prints a report of a crash for any code but 0. It sets TORCHELASTIC_RUN_ID, also for one process.
    launched = together or "TORCHELASTIC_RUN_ID" in os.environ
    report_by_code = options.exit_code or not launched
    is_first = int(os.environ.get("RANK", "0")) == 0
    return 1 if report_by_code and is_first and not diagnosis.pays else 0


def _positive(text: str) -> int:
    if (value := _not_negative(text)) == 0:
        raise argparse.ArgumentTypeError("must be at least 1, got 0")
    return value


def _workers(text: str) -> int:
    if (value := _positive(text)) > _MOST_WORKERS:
        raise argparse.ArgumentTypeError(f"must be at most {_MOST_WORKERS:,}, got {value:,}")
    return value


def _not_negative(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {value}")
    return value


def _count(text: str) -> int:
    """Parse a positive whole number. It may be written as 25e6."""
    value = _number(text)
    if value != int(value) or value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(value)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
    if not abs(value) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be finite, got {text!r}")
    return value


def _numbers(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _milliseconds(text: str) -> float:
    if (value := _number(text)) < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {value}")
    return value


def _link(text: str) -> Link:
    try:
        return Link.parse(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seed(text: str) -> int:
    if (value := _not_negative(text)) >= 2**63:
        raise argparse.ArgumentTypeError("must be less than 2^63")
    return value


def _density(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], got {value}")
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
