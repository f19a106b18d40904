"""Train with several optimizers, and compare the exchange of gradients, the exchange of updates, and dense.

Four simulated workers train the byte-level GPT of ``training.py``, or the model of the demo. The score is the
validation loss in nats per byte. Rates follow a linear warm-up and half a cosine. Bytes are those that the busiest
worker sends per step, over the whole run.

``dense`` averages gradients. ``gradients`` exchanges them by Ok-Topk, as :func:`tritoncomm.wrap` does for optimizers
with a rule. ``updates`` lets every worker take ``--local-steps`` steps of its own optimizer, and exchanges what they
have changed (:mod:`tritoncomm.step.updates`). With a single local step, the AdamW beside a Muon exchanges gradients.

Every finished run is added to the file of ``--json``, and is not repeated.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import tritoncomm
from torch import Tensor, nn
from tritoncomm.primitives.mean_norm import random_signs, sketch
from tritoncomm.step.flat import BucketLayout, split_by_size
from tritoncomm.step.options import WrapOptions
from tritoncomm.step.rules import find_rule

from tasks import BATCHES, TASKS, WORKERS, Task
from training import DENSE_BELOW, WARMUP_SHARE, Sent, around, scored

LR_WARMUP_SHARE = 0.1
_TICKS = 1, 2, 5, 10, 20, 50, 100  # kilobytes
ADAMW_SHARE = 0.25  # rate of the AdamW beside a Muon, as a share of Muon's


@dataclass(frozen=True)
class Run:
    """One run. ``local_steps`` and what follows say how updates are exchanged."""

    task: str
    steps: int
    optimizer: str
    lr: float
    exchange: str  # "dense", "gradients" or "updates"
    method: str = "dense"
    values: str = "fp32"
    density: float = 1.0
    local_steps: int = 1
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    match_length: bool = False
    seed: int = 0


Named = list[tuple[str, nn.Parameter]]


def muon(named: Named, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the blocks, and AdamW for all others."""
    hidden = [p for name, p in named if p.dim() > 1 and name.startswith("blocks.")]
    rest = [p for name, p in named if not (p.dim() > 1 and name.startswith("blocks."))]
    return [torch.optim.Muon(hidden, lr=lr, weight_decay=0.1), _adamw(rest, lr * ADAMW_SHARE)]


def _adamw(parameters: Sequence[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def _lion(named: Named, lr: float) -> list[torch.optim.Optimizer]:
    from lion import Lion

    return [Lion([p for _, p in named], lr=lr, weight_decay=0.1)]


OPTIMIZERS: dict[str, Callable[[Named, float], list[torch.optim.Optimizer]]] = {
    "adamw": lambda named, lr: [_adamw([p for _, p in named], lr)],
    "sgd": lambda named, lr: [torch.optim.SGD([p for _, p in named], lr=lr, momentum=0.9, weight_decay=1e-4)],
    "lion": _lion,
    "muon": muon,
    "adafactor": lambda named, lr: [torch.optim.Adafactor([p for _, p in named], lr=lr)],
}


class Worker:
    """One simulated worker: a model, and the optimizers that train it together."""

    def __init__(self, model: nn.Module, run: Run) -> None:
        self.model = model
        self.optimizers = OPTIMIZERS[run.optimizer](list(model.named_parameters()), run.lr)
        self.rates = [[group["lr"] for group in each.param_groups] for each in self.optimizers]

    def set_rate(self, share: float) -> None:
        """Set all learning rates to this share of the highest ones."""
        for optimizer, rates in zip(self.optimizers, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * share

    def backward(self, task: Task, seed: int, step: int, rank: int) -> None:
        """Compute the gradients of one batch."""
        self.model.zero_grad()
        task.loss(self.model, seed, step, rank).backward()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters of ``optimizer``."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Gradients:
    """Exchanges the gradients of one optimizer per worker. That of the first worker steps, and the others copy."""

    def __init__(self, run: Run, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizer = optimizers[0]
        self.layouts = [_layout(parameters_of(each)) for each in optimizers]
        dense = run.exchange == "dense"
        parts = split_by_size(self.layouts[0].parameters, DENSE_BELOW)
        rule = None if dense else find_rule(self.optimizer)
        self.rule = None if rule is None else rule.from_options(self.optimizer, WrapOptions())
        recipe: tritoncomm.Recipe = tritoncomm.Dense()
        if not dense:
            sparse = tritoncomm.OkTopk(density=0.03, values="4bit")
            recipe = around(
                sparse, int(run.steps * WARMUP_SHARE), *parts, by_update=self.rule is not None, tail="8bit",
                node_size=1, warmup_values="8bit",
            )  # fmt: skip
        self.world = tritoncomm.SimulatedWorld(recipe, WORKERS, self.layouts[0].numel)
        self.rows = torch.empty(WORKERS, self.layouts[0].numel)

    def step(self, sent: Sent) -> None:
        """Exchange, and update all models."""
        for layout, row in zip(self.layouts, self.rows, strict=True):
            layout.read_gradients(row)
        with sent.counted(self.world, dense=False):
            mean = self.world.step(self.rows)[0]
        first, *others = self.layouts
        delivered = first.split(mean)
        first.scatter(delivered)
        if self.rule is None:
            self.optimizer.step()
        else:
            self.rule.step(first.parameters, [entries.indices for entries in delivered])
        for other in others:
            torch._foreach_copy_(other.parameters, first.parameters)


class Updates:
    """Lets every worker take steps of its own optimizers, and exchanges what they have changed."""

    def __init__(self, run: Run, optimizers: Sequence[Sequence[torch.optim.Optimizer]]) -> None:
        self.run = run
        self.optimizers = optimizers
        self.layouts = [BucketLayout([p for each in own for p in parameters_of(each)]) for own in optimizers]
        first = self.layouts[0]
        self.world = tritoncomm.SimulatedWorld(recipe_of(run), WORKERS, first.numel)
        self.anchor = torch.cat([p.detach().reshape(-1) for p in first.parameters])
        self.momentum = torch.zeros_like(self.anchor)
        self.signs = random_signs(first.numel, "cpu")
        self.rows = torch.empty(WORKERS, first.numel)
        self.steps = 0

    def step(self, sent: Sent) -> None:
        """Let all workers step, and exchange if it is time."""
        for own in self.optimizers:
            for each in own:
                each.step()
        self.steps += 1
        if self.steps % self.run.local_steps == 0:
            self.merge(sent)

    def merge(self, sent: Sent) -> None:
        """Exchange what the workers have changed."""
        run = self.run
        for layout, row in zip(self.layouts, self.rows, strict=True):
            row.copy_(torch.cat([p.reshape(-1) for p in layout.parameters]))
        torch.sub(self.anchor, self.rows, out=self.rows)
        with sent.counted(self.world, dense=False):
            mean = self.world.step(self.rows)[0].to_dense()
        mean *= self._gain() if run.match_length else 1.0
        self.momentum.mul_(run.outer_momentum).add_(mean)
        self.anchor.sub_(mean + run.outer_momentum * self.momentum, alpha=run.outer_lr)
        for layout in self.layouts:
            for parameter, part in zip(layout.parameters, layout.parts(self.anchor), strict=True):
                parameter.copy_(part.view(parameter.shape))

    def _gain(self) -> float:
        """Return the mean length of the workers' updates over the estimated length of their mean."""
        total = torch.stack([sketch(row, self.signs) for row in self.rows]).sum(0)
        length = float(total.double().norm()) / WORKERS
        mean = float(self.rows.double().norm(dim=1).mean())
        return min(max(mean / length, 1.0), math.sqrt(WORKERS)) if length else 1.0


def _layout(parameters: Sequence[Tensor]) -> BucketLayout:
    large, small = split_by_size(parameters, DENSE_BELOW)
    return BucketLayout([*large, *small])


def _is_adam(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.AdamW)


def recipe_of(run: Run) -> tritoncomm.Recipe:
    """Return the recipe that exchanges updates."""
    if run.method == "dense":
        return tritoncomm.Dense()
    if run.method == "quantized":
        return tritoncomm.recipe("quantized", values=run.values)
    return tritoncomm.recipe(run.method, density=run.density, values=run.values)


def exchanges(run: Run, workers: Sequence[Worker]) -> Iterator[Gradients | Updates]:
    """Yield what exchanges the parameters of each optimizer."""
    by_place = list(zip(*[worker.optimizers for worker in workers], strict=True))
    if run.exchange != "updates":
        yield from (Gradients(run, each) for each in by_place)
        return
    by_gradients = [each for each in by_place if run.local_steps == 1 and run.optimizer == "muon" and _is_adam(each[0])]
    yield from (Gradients(run, each) for each in by_gradients)
    rest = [each for each in by_place if each not in by_gradients]
    yield Updates(run, list(zip(*rest, strict=True)))


def train(run: Run, batches: int = BATCHES) -> dict[str, float]:
    """Train once. Return the score, kilobytes per step and seconds."""
    started = time.perf_counter()
    torch.manual_seed(run.seed)
    task = TASKS[run.task](run.steps, batches)
    model = task.model()
    workers = [Worker(copy.deepcopy(model), run) for _ in range(WORKERS)]
    parts, sent = list(exchanges(run, workers)), [Sent() for _ in workers[0].optimizers]
    for step in range(run.steps):
        rate = min(1.0, (step + 1) / (run.steps * LR_WARMUP_SHARE)) * 0.5 * (1 + math.cos(math.pi * step / run.steps))
        for rank, worker in enumerate(workers):
            worker.set_rate(rate)
            worker.backward(task, run.seed, step, rank)
        with torch.no_grad():
            for part, count in zip(parts, sent, strict=False):
                part.step(count)
    score = scored(task, workers[0].model)
    kilobytes = sum(each.size for each in sent) / run.steps / 1e3
    return {"score": score, "kilobytes": kilobytes, "seconds": time.perf_counter() - started}


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line. Every combination of the lists is trained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="gpt", choices=["gpt", "demo"])
    parser.add_argument("--steps", type=int, help="steps, instead of the task's default")
    parser.add_argument("--optimizer", default="muon", choices=list(OPTIMIZERS))
    parser.add_argument("--lr", type=float, nargs="+", default=[0.02], help="highest learning rates")
    parser.add_argument(
        "--exchange", nargs="+", default=["dense", "updates"], choices=["dense", "gradients", "updates"]
    )
    parser.add_argument("--method", default="quantized", help="how updates are exchanged")
    parser.add_argument("--values", nargs="+", default=["1bit"], help="formats of a value of an update")
    parser.add_argument("--density", type=float, default=1.0, help="density of a sparse method for updates")
    parser.add_argument("--local-steps", type=int, nargs="+", default=[1])
    parser.add_argument("--outer-lr", type=float, default=1.0)
    parser.add_argument("--outer-momentum", type=float, default=0.0)
    parser.add_argument("--match-length", action="store_true", help="restore the length of the mean")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="read finished runs from this file, and add new ones")
    parser.add_argument("--plot", type=Path, help="write a PNG of loss against bytes of the runs in the file of --json")
    parser.add_argument("--smoke", action="store_true", help="a few steps: only checks that the script runs")
    return parser


def runs(options: argparse.Namespace) -> Iterator[Run]:
    """Yield what to train."""
    steps = options.steps or TASKS[options.task](None, 1).steps
    plain = Run(options.task, steps, options.optimizer, 0.0, "dense")
    for lr, exchange, seed in itertools.product(options.lr, options.exchange, options.seeds):
        first = replace(plain, lr=lr, exchange=exchange, seed=seed)
        if exchange == "dense":
            yield first
        elif exchange == "gradients":
            yield replace(first, method="oktopk", values="4bit", density=0.03)
        else:
            for values, local_steps in itertools.product(options.values, options.local_steps):
                yield replace(
                    first, method=options.method, values=values, density=options.density, local_steps=local_steps,
                    outer_lr=options.outer_lr, outer_momentum=options.outer_momentum,
                    match_length=options.match_length,
                )  # fmt: skip


def read(path: Path | None) -> dict[Run, dict[str, float]]:
    """Return the finished runs in ``path``."""
    if path is None or not path.exists():
        return {}
    names = [field.name for field in fields(Run)]
    return {
        Run(**{name: row[name] for name in names}): {key: value for key, value in row.items() if key not in names}
        for row in json.loads(path.read_text())["rows"]
    }


def label(run: Run) -> str:
    """Return the name of the group of runs that differ from ``run`` in their seeds alone."""
    if run.exchange == "dense":
        return f"{run.optimizer}, dense"
    if run.exchange == "gradients":
        return f"{run.optimizer}, gradients, {run.method} at {run.density:.0%}"
    steps = "" if run.local_steps == 1 else f", {run.local_steps} local steps"
    outer = "" if run.outer_momentum == 0 else f", outer {run.outer_lr:g} and {run.outer_momentum:g}"
    how = run.values if run.method == "quantized" else run.method
    return f"{run.optimizer}, updates, {how}{steps}{outer}"


def picture(results: dict[Run, dict[str, float]], path: Path) -> None:
    """Write a PNG of the mean loss of each group of runs against the bytes that a worker sends per step."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    groups: dict[str, list[dict[str, float]]] = {}
    for run, outcome in results.items():
        groups.setdefault(label(run), []).append(outcome)
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8, 4.6), layout="constrained")
        axes = figure.subplots()
        for name, outcomes in sorted(groups.items(), key=lambda pair: -pair[1][0]["kilobytes"]):
            scores = [outcome["score"] for outcome in outcomes]
            mean, kilobytes = statistics.fmean(scores), statistics.fmean(each["kilobytes"] for each in outcomes)
            if name.endswith(", dense"):
                axes.axhline(mean, color="0.6", linewidth=0.8, linestyle="--")
                text, place = f"{name} ({kilobytes:.0f} kB)", (0.01, mean)
                axes.annotate(text, place, xycoords=("axes fraction", "data"), fontsize=8, va="bottom")
                continue
            spread = [[mean - min(scores)], [max(scores) - mean]]
            axes.errorbar(kilobytes, mean, yerr=spread, fmt="o", markersize=5, label=name)
        axes.set(xscale="log", xlabel="kB per step and worker", ylabel="validation loss (nats per byte)")
        axes.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.25)
        figure.savefig(path, dpi=130, format="png")


def main() -> None:
    """Train, print each row when it is done, and write the requested file."""
    options = arguments().parse_args()
    if options.smoke:
        options.steps, options.seeds = 3, [0]
    for run in runs(options):
        results = read(options.json)
        if run in results:
            continue
        outcome = train(run, 1 if options.smoke else BATCHES)
        print(asdict(run) | outcome, flush=True)
        if options.json:
            rows: list[Any] = [asdict(each) | found for each, found in (read(options.json) | {run: outcome}).items()]
            held = json.loads(options.json.read_text()) if options.json.exists() else {"workers": WORKERS}
            options.json.write_text(json.dumps(held | {"rows": rows}, indent=1) + "\n")
    if options.plot:
        picture(read(options.json), options.plot)


if __name__ == "__main__":
    main()
