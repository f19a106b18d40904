"""The command ``demo``."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from functools import partial

from tritoncomm.algorithms import Quantized, algorithms, takes_density
from tritoncomm.demo import report
from tritoncomm.demo.local_workers import WorkerError, run_workers
from tritoncomm.demo.train import Run, Settings, compare
from tritoncomm.errors import ConfigurationError
from tritoncomm.planning import arguments
from tritoncomm.step.recipes import default_fields
from tritoncomm_kernels.formats import SMALL_FORMATS


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    demo = commands.add_parser(
        "demo",
        help="train a small language model with dense and with sparse exchange, and compare",
        description="Train a small GPT on the source files of Python's standard library, with local worker processes "
        "over gloo. The first run exchanges dense gradients, the second uses the chosen method. Both start from the "
        "same weights and see the same data.",
        formatter_class=arguments.Help,
    )
    defaults = Settings()
    demo.add_argument("--algo", default=defaults.algo, choices=algorithms(), help="method of the sparse run")
    demo.add_argument(
        "--density", type=arguments.density, default=defaults.density, help="fraction of entries to deliver"
    )
    arguments.add_values(demo)
    demo.add_argument("--workers", type=arguments.count, default=defaults.workers, help="number of worker processes")
    demo.add_argument("--steps", type=arguments.count, default=defaults.steps, help="training steps per run")
    seed = partial(arguments.count, least=0, most=2**63 - 1)
    demo.add_argument("--seed", type=seed, default=defaults.seed, help="seed of model and data")
    demo.add_argument(
        "--small",
        default=defaults.small,
        choices=SMALL_FORMATS,
        help="format of what is sent dense: small tensors (biases, norms), and the steps at the start",
    )
    demo.add_argument(
        "--optimizer",
        default=defaults.optimizer,
        choices=("adamw", "muon"),
        help="of both runs; muon: Muon for matrices and AdamW for other parameters, and updates are exchanged",
    )
    demo.add_argument(
        "--local-steps",
        type=arguments.count,
        default=defaults.local_steps,
        help="steps of the second run between two exchanges of updates; the method is then the default one for updates",
    )
    arguments.add_files(demo)
    demo.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train twice and print a table. Return 1 if a worker failed, and otherwise 0."""
    arguments.check_values(options)
    by_default = {"values": Quantized().values} if options.algo == Quantized.name else default_fields(options.algo, {})
    given = {field.name: getattr(options, field.name) for field in fields(Settings)}
    settings = Settings(**given | {"values": options.values or by_default.get("values", "fp32")})
    if settings.density != Settings.density and not takes_density(settings.algo):
        raise ConfigurationError(f"--density: {settings.algo} delivers every entry, in few bits: leave it out")
    if settings.exchanges_updates:
        unused = [name for name in ("algo", "density", "small") if given[name] != getattr(Settings, name)]
        unused += ["values"] if options.values is not None else []
        for name in unused:
            raise ConfigurationError(
                f"--{name} is for gradients, and the second run exchanges updates: leave it out, or --local-steps and "
                "--optimizer muon"
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
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    if options.plot:
        report.plot(figures, runs, options.plot)
    return 0
