"""Train four simulated workers, and compare optimizers, methods of exchange and their settings by loss and bytes.

A run has a task (``tasks.py``), an optimizer (``workers.py``) and an exchange:

* ``dense`` averages gradients.
* ``gradients`` exchanges them by ``--method``, Ok-Topk unless given, as :func:`tritoncomm.wrap` does.
* ``updates`` lets every worker take ``--local-steps`` steps of its own optimizer, and exchanges what they have changed
  by ``--method``, in one bit per value unless given.
* ``--peer`` trains with the methods of others instead (``peers.py``).

Learning rates follow a linear warm-up, and then half a cosine or nothing. Schedule-free AdamW has its own warm-up, and
nothing else. ``--device cuda`` trains the model of 10.9 million parameters in minutes instead of hours. Columns:

* ``score``: validation loss, for language models in nats per byte.
* ``kilobytes``: what the busiest worker sends per step, over the whole run. ``kilobytes_after_start`` leaves out the
  dense steps at the start. ``messages`` is the number of messages that it sends per step.
* ``curve``: the loss on a few batches at about 30 steps, the same batches for all runs of a task. With local steps,
  these steps are exchanges.

With ``--best``, the seeds are trained with the rate and the outer setting that were best in the runs of the file.
``best.py`` compares the runs of a file.

Every finished run is added to the file of ``--json``, and is not repeated. Several processes may share the file.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch
import tritoncomm
from tritoncomm.step.settings import DEFAULT_DENSITY, DEFAULT_START, DEFAULT_VALUES

import script
from exchanges import Sent, exchanges
from peers import PEERS
from runs import Outcome, Run, add, chosen, read
from tasks import BATCHES, TASKS, WORKERS
from tritoncomm_kernels.formats import FORMATS
from workers import LR_WARMUP_SHARE, OPTIMIZERS, Worker

DENSE_STEPS = 20  # those of wrap when rates were swept: it has 16 now, with the same losses
POWER_SGD_START = 0.1  # share of the steps that are dense, as its authors recommend
CURVE_POINTS = 30
CURVE_BATCHES = {"gpt": 4, "demo": 1, "gpt10m": 1, "cnn": 32, "mlp": 32}  # at most a twentieth of the time of a run


def train(run: Run, batches: int = BATCHES, device: str = "cpu") -> Outcome:
    """Train once. Return the columns of the results: the score, what was sent, the curve and the seconds."""
    started = time.perf_counter()
    torch.manual_seed(run.seed)
    task = TASKS[run.task](run.steps, batches)
    few = TASKS[run.task](run.steps, min(batches, CURVE_BATCHES[run.task]))
    model = task.model().to(device)
    model.register_forward_pre_hook(lambda _, inputs: tuple(each.to(device) for each in inputs))
    workers = [Worker(copy.deepcopy(model), run) for _ in range(WORKERS)]
    parts = list(exchanges(run, workers))
    sent, curve, at_start = [Sent() for _ in parts], [], 0
    for step in range(run.steps):
        for rank, worker in enumerate(workers):
            worker.set_rate(share_of_rate(run, step))
            worker.backward(task, run.seed, step, rank)
        with torch.no_grad():
            for part, count in zip(parts, sent, strict=True):
                part.step(count)
        if step < run.dense_steps:
            at_start = sum(each.bytes for each in sent)
        if is_recorded(run, step + 1):
            with workers[0].evaluated() as model, torch.no_grad():
                curve.append([step + 1, few.score(model)])
    with workers[0].evaluated() as model, torch.no_grad():
        score = task.score(model)
    size, ordinary = sum(each.bytes for each in sent), max(1, run.steps - run.dense_steps)
    return {
        "score": score,
        "kilobytes": size / run.steps / 1e3,
        "kilobytes_after_start": (size - at_start) / ordinary / 1e3,
        "messages": sum(each.messages for each in sent) / run.steps,
        "curve": curve,
        "seconds": time.perf_counter() - started,
    }


def share_of_rate(run: Run, step: int) -> float:
    """Return the learning rate of ``step`` as a share of the highest one."""
    rate = 1.0 if run.schedule == "falling" else min(1.0, (step + 1) / (run.steps * LR_WARMUP_SHARE))
    return rate if run.schedule == "constant" else rate * 0.5 * (1 + math.cos(math.pi * step / run.steps))


def is_recorded(run: Run, step: int) -> bool:
    """Whether ``curve`` has a point after ``step`` steps: the last one, or the first exchange of a thirtieth of all."""
    part, before = (max(0, each) * CURVE_POINTS // run.steps for each in (step, step - run.local_steps))
    return step == run.steps or (step % run.local_steps == 0 and part > before)


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line. Every combination of the lists is trained."""
    parser = script.parser(__doc__)
    parser.add_argument("--task", default="gpt", choices=list(CURVE_BATCHES))
    parser.add_argument("--steps", type=int, help="steps, instead of the task's default")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), help="muon, or that of the peer, unless given")
    parser.add_argument("--lr", type=float, nargs="+", default=[0.02], help="highest learning rates")
    parser.add_argument("--beta2", type=float, nargs="+", default=[0.95], help="second beta of AdamW")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="that of AdamW")
    parser.add_argument(
        "--schedule",
        default="cosine",
        choices=["cosine", "constant", "falling"],
        help="cosine and constant follow a warm-up",
    )
    parser.add_argument("--peer", nargs="+", choices=list(PEERS), help="train these, instead of what --exchange says")
    parser.add_argument(
        "--exchange", nargs="+", default=["dense", "updates"], choices=["dense", "gradients", "updates"]
    )
    methods = ["dense", *tritoncomm.algorithms()]
    parser.add_argument("--method", default="quantized", choices=methods, help="how updates or gradients travel")
    formats = f"formats of a value, 1bit of updates and {DEFAULT_VALUES} of gradients unless given"
    parser.add_argument("--values", nargs="+", choices=list(FORMATS), help=formats)
    parser.add_argument(
        "--density", type=float, nargs="+", default=[DEFAULT_DENSITY], help="densities of Ok-Topk, or of --method"
    )
    parser.add_argument("--select-by", default="update", choices=["update", "gradient"], help="as in tritoncomm.Late")
    parser.add_argument("--staleness", default="aware", choices=["aware", "off"], help="off is late=False of wrap")
    parser.add_argument("--local-steps", type=int, nargs="+", help="1, or those of the peer, unless given")
    parser.add_argument("--outer-lr", type=float, nargs="+", help="1, or that of the peer, unless given")
    parser.add_argument("--outer-momentum", type=float, nargs="+", help="0, or that of the peer, unless given")
    parser.add_argument("--dense-steps", type=int, help=f"dense steps at the start, instead of {DENSE_STEPS}")
    parser.add_argument("--dense-values", default=DEFAULT_START, help="their format")
    parser.add_argument("--match-length", action="store_true", help="restore the length of the mean")
    parser.add_argument("--device", default="cpu", help="where to train, such as cuda")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--best", action="store_true", help="train the best of each kind in the file of --json, by the seeds of --sweep"
    )
    parser.add_argument("--sweep", type=int, nargs="+", default=[10], help="seeds on which rates were swept")
    return parser


def runs(options: argparse.Namespace) -> Iterator[Run]:
    """Yield what to train."""
    steps = options.steps or TASKS[options.task](None, 1).steps
    if options.best:
        for best, *_ in chosen(read(options.json), options.sweep).values():
            if (best.task, best.steps) == (options.task, steps):
                yield from (replace(best, seed=seed) for seed in options.seeds)
        return
    plain = Run(
        options.task, steps, options.optimizer or "muon", 0.0, "dense",
        schedule=options.schedule, weight_decay=options.weight_decay,
    )  # fmt: skip
    kinds = list(peers(plain, options) if options.peer else ours(plain, options))
    for lr, beta2, kind, seed in itertools.product(options.lr, options.beta2, kinds, options.seeds):
        yield replace(kind, lr=lr, beta2=beta2, seed=seed)


def ours(plain: Run, options: argparse.Namespace) -> Iterator[Run]:
    """Yield the kinds of runs that ``--exchange`` describes, without their rates and seeds."""
    for exchange in options.exchange:
        first = replace(plain, exchange=exchange)
        if exchange == "dense":
            yield first
        elif exchange == "gradients":
            method = "oktopk" if options.method == "quantized" else options.method
            first = replace(first, method=method, select_by=options.select_by, staleness=options.staleness)
            for values, density in itertools.product(options.values or [DEFAULT_VALUES], options.density):
                yield with_start(replace(first, values=values, density=density), options)
        else:
            densities = [1.0] if options.method in ("dense", "quantized") else options.density
            for values, density in itertools.product(options.values or ["1bit"], densities):
                match = options.match_length
                kind = replace(first, method=options.method, values=values, density=density, match_length=match)
                yield from with_outer(kind, options)


def peers(plain: Run, options: argparse.Namespace) -> Iterator[Run]:
    """Yield the kinds of runs of the methods of ``--peer``, without their rates and seeds."""
    for name in options.peer:
        settings = PEERS[name] | ({"optimizer": options.optimizer} if options.optimizer else {})
        kind = replace(plain, **settings)
        yield from with_outer(kind, options) if kind.exchange == "updates" else [with_start(kind, options)]


def with_outer(kind: Run, options: argparse.Namespace) -> Iterator[Run]:
    """Yield ``kind`` with every combination of what the command line says of exchanges of updates."""
    names = "local_steps", "outer_lr", "outer_momentum"
    given = [getattr(options, name) or [getattr(kind, name)] for name in names]
    for settings in itertools.product(*given):
        yield with_start(replace(kind, **dict(zip(names, settings, strict=True))), options)


def with_start(kind: Run, options: argparse.Namespace) -> Run:
    """Return ``kind`` with the dense steps at the start: those of ``wrap``, those of PowerSGD, or none."""
    given = options.dense_steps
    if kind.method == "powersgd":
        return replace(kind, dense_steps=int(kind.steps * POWER_SGD_START) if given is None else given)
    if kind.exchange != "gradients" or kind.density == 1:
        return kind
    return replace(kind, dense_steps=DENSE_STEPS if given is None else given, dense_values=options.dense_values)


def main() -> None:
    """Train, print each row when it is done, and write the requested file."""
    parser = arguments()
    options = parser.parse_args()
    if options.peer and options.device != "cpu":
        parser.error(f"--device {options.device} with --peer: the methods of others train on a CPU")
    if options.smoke:
        options.steps, options.seeds = 3, [0]
    for run in runs(options):
        if run in read(options.json):
            continue
        outcome = train(run, 1 if options.smoke else BATCHES, options.device)
        print(asdict(run) | outcome, flush=True)
        if options.json:
            add(options.json, run, outcome, {"workers": WORKERS} | script.machine(options.device))


if __name__ == "__main__":
    main()
