"""The commands ``plan``, ``doctor`` and ``simulate``."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import sys
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist

from tritoncomm.algorithms import Quantized, Recipe, algorithms, field_names, recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.planning import arguments, planner
from tritoncomm.planning.comparison import STEPS, Row, compare_methods, picture, table
from tritoncomm.planning.doctor import diagnose
from tritoncomm.planning.synthetic_gradients import SOURCES
from tritoncomm.scheduler.ranks import own_rank
from tritoncomm.step.settings import DEFAULT_DENSITY, DEFAULT_VALUES
from tritoncomm_kernels import devices

_MOST_WORKERS = 1_000_000  # for which a plan takes some seconds


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``plan`` to the command line."""
    plan = commands.add_parser(
        "plan",
        help="predict whether sparse exchange is faster than dense on a network",
        description="Predict the time of a step from the bytes and messages of an exchange, on the given link. The "
        "answer comes first, then a table and the code to use.",
        formatter_class=arguments.Help,
    )
    plan.add_argument("--numel", type=arguments.count, required=True, help="parameters of the model")
    plan.add_argument(
        "--workers", type=partial(arguments.count, most=_MOST_WORKERS), required=True, help="number of workers"
    )
    plan.add_argument("--density", type=arguments.density, default=DEFAULT_DENSITY, help="density to plan for")
    arguments.add_values(plan)
    plan.add_argument(
        "--link", type=arguments.link, default=arguments.LINK, help="bandwidth and latency of every rank's interface"
    )
    plan.add_argument(
        "--step-ms", type=arguments.milliseconds, default=0.0, dest="step", help="computation per step, in milliseconds"
    )
    plan.add_argument(
        "--work-ms",
        type=arguments.milliseconds,
        dest="work",
        help="time of selection and packing in a sparse step, in milliseconds, as doctor measures it",
    )
    plan.add_argument(
        "--overlap",
        type=arguments.share,
        default=planner.OVERLAP,
        help="fraction of the computation that hides a dense all-reduce; 0 if workers share CPU cores",
    )
    plan.add_argument(
        "--device",
        default=devices.available(),
        choices=devices.KINDS,
        help="device of the gradients, on which the form of the messages depends",
    )
    plan.add_argument(
        "--local-steps",
        type=arguments.count,
        help="plan for an optimizer whose updates are exchanged, such as Muon, once for so many of its steps; without "
        "it, gradients are exchanged in every step",
    )
    plan.add_argument("--all", action="store_true", help="print the other methods and other densities too")
    plan.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    setting = planner.Setting(
        numel=options.numel,
        workers=options.workers,
        link=options.link,
        step=options.step,
        work=options.work,
        overlap=options.overlap,
        values=options.values or (DEFAULT_VALUES if options.local_steps is None else Quantized().values),
        device=options.device,
    )
    given = {"--density": options.density != DEFAULT_DENSITY, "--all": options.all}
    for name in (name for name, is_given in given.items() if is_given and options.local_steps is not None):
        raise ConfigurationError(f"{name} is for gradients, and --local-steps plans for updates: leave out one of both")
    if options.local_steps is None:
        print(planner.advice(setting, options.density, everything=options.all))
    else:
        print(planner.advice_on_updates(setting, options.local_steps))
    return 0


def add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``doctor`` to the command line."""
    doctor = commands.add_parser(
        "doctor",
        help="measure whether sparse exchange is faster than dense on this machine and network",
        description="Under torchrun: measure the link, a dense all-reduce and the sparse exchange between the ranks. "
        "In a single process: measure the work, and predict the exchanges for --workers and --link. "
        "Exit code: 0 if compression pays, 1 if it does not, 2 if an argument is bad or the measurement fails. "
        "Under torchrun, which reports any code but 0 as a failed process: 0 if the measurement is complete, whether "
        "compression pays or not.",
        formatter_class=arguments.Help,
    )
    doctor.add_argument("--algo", default="oktopk", choices=algorithms(), help="method to measure")
    doctor.add_argument("--density", type=arguments.density, default=DEFAULT_DENSITY, help="density to decide on")
    arguments.add_values(doctor)
    doctor.add_argument("--numel", type=arguments.count, default="5e6", help="parameters of the model")
    doctor.add_argument(
        "--step-ms", type=arguments.milliseconds, default=0.0, dest="step", help="computation per step, in milliseconds"
    )
    doctor.add_argument("--workers", type=arguments.count, default=8, help="single process: workers to predict for")
    doctor.add_argument(
        "--link", type=arguments.link, default=arguments.LINK, help="single process: link to predict for"
    )
    doctor.add_argument(
        "--json", type=arguments.writable, metavar="FILE", help="write the figures and the result to this file"
    )
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
    arguments.check_values(options)
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
            options.step,
            link=options.link,
            workers=options.workers,
            device=device,
        )
        if not together or own_rank() == 0:
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


def add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``simulate`` to the command line."""
    simulate = commands.add_parser(
        "simulate",
        help="compare words, messages and time of the methods on a simulated network",
        description="Run the methods with any number of workers on a simulated network, in this process. Training uses "
        "the same code. The table shows, for the last step and per rank, words and messages received, balance and "
        "virtual time, beside what was predicted. A word has 4 bytes.",
        formatter_class=arguments.Help,
    )
    simulate.add_argument(
        "--import", type=_imported, metavar="MODULE",
        help="a module of yours that registers methods; give it before --algo",
    )  # fmt: skip
    simulate.add_argument(
        "--algo", nargs="+", type=_method, default=["all"], metavar="NAME[:FIELD=VALUE...]",
        help="methods, with optional recipe fields, for example spardl:teams=2:sag=bruck",
    )  # fmt: skip
    simulate.add_argument("--workers", type=_numbers, default="8,64", help="numbers of workers, separated by commas")
    simulate.add_argument("--numel", type=arguments.count, default="25e6", help="length of the vector")
    simulate.add_argument("--density", type=arguments.density, default=0.01, help="fraction of entries to deliver")
    arguments.add_values(simulate, "fp32")
    simulate.add_argument(
        "--link", type=arguments.link, default=arguments.LINK, help="bandwidth and latency of every rank's interface"
    )
    simulate.add_argument(
        "--steps", type=arguments.count, default=STEPS, help="steps to simulate; the table shows the last one"
    )
    simulate.add_argument(
        "--gradients", choices=tuple(SOURCES), default="layered",
        help="layered: heavy-tailed, with a scale for each layer; adversarial: non-zero in one narrow range",
    )  # fmt: skip
    simulate.add_argument(
        "--memory",
        type=arguments.count,
        default="1e9",
        help="bytes to use; figures of longer vectors are extrapolated from shorter ones",
    )
    arguments.add_files(simulate)
    simulate.set_defaults(run=_simulate)


def _simulate(options: argparse.Namespace) -> int:
    every = [(name, dict[str, Any]()) for name in algorithms()]
    methods = [method for each in options.algo for method in (every if each == "all" else [each])]
    recipes = [replace(_at(name, options.density, options.values, "fp32"), **fields) for name, fields in methods]
    rows: list[Row] = []
    for row in compare_methods(
        recipes, options.workers, options.numel, options.link, SOURCES[options.gradients],
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


def _numbers(text: str) -> list[int]:
    return [arguments.count(part) for part in text.split(",")]


def _at(name: str, density: float, values: str | None, otherwise: str) -> Recipe:
    """Return the recipe of the method ``name``. Without ``values``, entries have the format ``otherwise``."""
    found = planner.at(name, density, values or otherwise)
    chosen: dict[str, Any] = {"values": values} if values and "values" in field_names(name) else {}
    return replace(found, **chosen)


def _imported(name: str) -> None:
    """Import the module ``name``, for ``--import``."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _method(text: str) -> str | tuple[str, dict[str, Any]]:
    """Return ``"all"``, or the name of a method and its recipe fields."""
    name, *assignments = text.split(":")
    if text == "all":
        return text
    fields = {field: _value(value) for field, _, value in (part.partition("=") for part in assignments)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recipe(name, **fields)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name, fields


def _value(text: str) -> Any:
    """Return a Python literal, such as a number or ``True``, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
