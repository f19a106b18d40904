"""Train with several optimizers, and compare the exchange of gradients, the exchange of updates, and dense.

Four simulated workers train the byte-level GPT of ``training.py``, the model of the demo, or one of 10.9 million
parameters, for which ``--device cuda`` takes minutes instead of hours. The score is the validation loss in nats per
byte. Rates follow a linear warm-up, and then half a cosine or nothing. Bytes are those that the busiest worker sends
per step, over the whole run.

``dense`` averages gradients. ``gradients`` exchanges them by Ok-Topk, as :func:`tritoncomm.wrap` does for optimizers
with a rule. ``updates`` lets every worker take ``--local-steps`` steps of its own optimizer, and exchanges what they
have changed (:mod:`tritoncomm.step.updates`). With a single local step, the AdamW beside a Muon exchanges gradients.
``--peer`` trains with the methods of others, see ``peers.py``. Schedule-free AdamW has no schedule but its warm-up.

``curve`` is the loss on a few batches at about 30 steps, the same batches for all runs of a task. With local steps,
these steps are exchanges. ``kilobytes_after_start`` leaves out the dense steps at the start, and ``messages`` is the
number that the busiest worker sends per step.

With ``--best``, the seeds are trained with the rate and the outer setting that were best in the runs of the file.

Every finished run is added to the file of ``--json``, and is not repeated. Several processes may share the file.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
import tritoncomm
from torch import Tensor, nn
from tritoncomm.algorithms.base import StaticRecipe
from tritoncomm.primitives.mean_norm import random_signs, sketch
from tritoncomm.step.flat import BucketLayout, split_by_size
from tritoncomm.step.options import (
    DEFAULT_DENSITY,
    DEFAULT_SMALL,
    DEFAULT_START,
    DEFAULT_VALUES,
    WrapOptions,
)
from tritoncomm.step.rules import find_rule
from tritoncomm.step.update import coupled_decay

from demo_compressor import DeMo, DeMoWorld
from optimizer_runs import Outcome, Run, add, chosen, picture, read
from peers import PEERS, SparseLoCoWorld
from power_sgd import PowerSGD, PowerSGDWorld
from selection import machine
from tasks import BATCHES, TASKS, WORKERS, Task
from training import DENSE_BELOW, LR_WARMUP_SHARE, Sent, World, around, scored

ADAMW_SHARE = 0.25  # rate of the AdamW beside a Muon, as a share of Muon's
DENSE_STEPS = 20  # those of wrap when rates were swept: it has 16 now, with the same losses
POWER_SGD_START = 0.1  # share of the steps that are dense, as its authors recommend
CURVE_POINTS = 30
CURVE_BATCHES = {"gpt": 4, "demo": 1, "gpt10m": 1, "cnn": 32, "mlp": 32}  # at most a twentieth of the time of a run


Named = list[tuple[str, nn.Parameter]]


def _muon(named: Named, run: Run) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the blocks, and AdamW for all others."""
    hidden = [p for name, p in named if p.dim() > 1 and name.startswith("blocks.")]
    rest = [p for name, p in named if not (p.dim() > 1 and name.startswith("blocks."))]
    return [torch.optim.Muon(hidden, lr=run.lr, weight_decay=0.1), _adam(rest, run, ADAMW_SHARE)]


def _adamw(named: Named, run: Run) -> list[torch.optim.Optimizer]:
    """Return AdamW. DeMo has a momentum of its own, and steps by the sign: as AdamW does without averages."""
    return [_adam(_all(named), run)]


def _adam(parameters: Sequence[nn.Parameter], run: Run, share: float = 1.0) -> torch.optim.Optimizer:
    betas = (0.0, 0.0) if run.method == "demo" else (0.9, run.beta2)
    return torch.optim.AdamW(parameters, lr=run.lr * share, betas=betas, weight_decay=run.weight_decay)


def _all(named: Named) -> list[nn.Parameter]:
    return [parameter for _, parameter in named]


def _lion(named: Named, run: Run) -> list[torch.optim.Optimizer]:
    from lion import Lion

    return [Lion(_all(named), lr=run.lr, weight_decay=0.1)]


def _schedule_free(named: Named, run: Run) -> list[torch.optim.Optimizer]:
    from schedulefree import AdamWScheduleFree

    warmup = int(run.steps * LR_WARMUP_SHARE)
    optimizer = AdamWScheduleFree(_all(named), lr=run.lr, betas=(0.9, 0.95), weight_decay=0.1, warmup_steps=warmup)
    optimizer.train()
    return [optimizer]


OPTIMIZERS: dict[str, Callable[[Named, Run], list[torch.optim.Optimizer]]] = {
    "adamw": _adamw,
    "sgd": lambda named, run: [torch.optim.SGD(_all(named), lr=run.lr, momentum=0.9, weight_decay=1e-4)],
    "lion": _lion,
    "muon": _muon,
    "adafactor": lambda named, run: [torch.optim.Adafactor(_all(named), lr=run.lr)],
    "schedule-free": _schedule_free,
}


class Worker:
    """One simulated worker: a model, and the optimizers that train it together."""

    def __init__(self, model: nn.Module, run: Run) -> None:
        self.model = model
        self.optimizers = OPTIMIZERS[run.optimizer](list(model.named_parameters()), run)
        self.has_schedule = run.optimizer == "schedule-free"
        self.rates = [[group["lr"] for group in each.param_groups] for each in self.optimizers]

    def set_rate(self, share: float) -> None:
        """Set all learning rates to this share of the highest ones, unless the optimizer has a schedule of its own."""
        if self.has_schedule:
            return
        for optimizer, rates in zip(self.optimizers, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * share

    def backward(self, task: Task, seed: int, step: int, rank: int) -> None:
        """Compute the gradients of one batch."""
        self.model.zero_grad()
        task.loss(self.model, seed, step, rank).backward()

    @contextlib.contextmanager
    def evaluated(self) -> Iterator[nn.Module]:
        """Context in which the model is as the optimizer evaluates it. Training then continues to the bit."""
        if not self.has_schedule:
            yield self.model
            return
        saved = [parameter.detach().clone() for parameter in self.model.parameters()]
        for optimizer in self.optimizers:
            optimizer.eval()
        yield self.model
        for optimizer in self.optimizers:
            optimizer.train()
        with torch.no_grad():
            torch._foreach_copy_(list(self.model.parameters()), saved)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters of ``optimizer``."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Gradients:
    """Exchanges the gradients of one optimizer per worker. That of the first worker steps, and the others copy."""

    def __init__(self, run: Run, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizer = optimizers[0]
        self.layouts = [layout_of(parameters_of(each)) for each in optimizers]
        rule = find_rule(self.optimizer) if run.sends_gradients and run.method not in ("powersgd", "demo") else None
        self.rule = None if rule is None else rule.from_options(self.optimizer, WrapOptions())
        self.decays = {} if rule is None else coupled_decay(self.optimizer)
        self.world = world_of(run, self.layouts[0], by_update=self.rule is not None)
        self.rows = torch.empty(WORKERS, self.layouts[0].numel, device=_device(self.layouts[0]))

    def step(self, sent: Sent) -> None:
        """Exchange, and update all models."""
        for layout, row in zip(self.layouts, self.rows, strict=True):
            layout.read_gradients(row)
        first, *others = self.layouts
        with sent.counted(self.world, dense=False):
            mean = self.world.step(self.rows)[0].trimmed()
        if self.decays:
            mean = self._decayed(mean)
        delivered = first.split(mean)
        first.scatter(delivered)
        if self.rule is None:
            self.optimizer.step()
        else:
            self.rule.step(first.parameters, [entries.indices for entries in delivered])
        for other in others:
            torch._foreach_copy_(other.parameters, first.parameters)

    def _decayed(self, mean: tritoncomm.SparseVector) -> tritoncomm.SparseVector:
        """Return ``mean`` with weight decay that is a part of the gradient. As in ``wrap``, it is not sent."""
        decay = torch.cat([p.reshape(-1) * self.decays.get(id(p), 0.0) for p in self.layouts[0].parameters])
        if mean.is_full:
            return tritoncomm.SparseVector.full(mean.values + decay)
        delivered = mean.indices.long()
        values = mean.values + decay[delivered]
        for worker in self.world.workers:
            worker.residual.add_(decay.index_fill(0, delivered, 0.0))
        return tritoncomm.SparseVector(mean.indices, values, mean.numel)


def world_of(run: Run, layout: BucketLayout, *, by_update: bool) -> World:
    """Return the workers that exchange the gradients of ``layout``."""
    shapes = [parameter.shape for parameter in layout.parameters]
    if run.method == "powersgd":
        return PowerSGDWorld(PowerSGD(run.count), WORKERS, shapes, run.dense_steps)
    if run.method == "demo":
        return DeMoWorld(DeMo(run.count, run.lr), WORKERS, shapes)
    recipe: tritoncomm.Recipe = tritoncomm.Dense()
    if run.sends_gradients:
        if run.exchange == "updates":  # of an AdamW beside a Muon
            sparse: tritoncomm.Recipe = tritoncomm.OkTopk(density=DEFAULT_DENSITY, values=DEFAULT_VALUES)
        else:
            sparse = recipe_of(run)
        if _device(layout).type != "cpu" and isinstance(sparse, StaticRecipe):
            sparse = replace(sparse, static=True)  # as wrap does, so that the host need not wait
        recipe = around(
            sparse, run.dense_steps, *split_by_size(layout.parameters, DENSE_BELOW), by_update=by_update,
            tail=DEFAULT_SMALL, node_size=1, warmup_values=run.dense_values,
        )  # fmt: skip
    return tritoncomm.SimulatedWorld(recipe, WORKERS, layout.numel, device=_device(layout))


class Updates:
    """Lets every worker take steps of its own optimizers, and exchanges what they have changed."""

    def __init__(self, run: Run, optimizers: Sequence[Sequence[torch.optim.Optimizer]]) -> None:
        self.run = run
        self.optimizers = optimizers
        self.layouts = [BucketLayout([p for each in own for p in parameters_of(each)]) for own in optimizers]
        first = self.layouts[0]
        self.world: tritoncomm.SimulatedWorld | SparseLoCoWorld
        if run.method == "sparseloco":
            self.world = SparseLoCoWorld(WORKERS, [p.shape for p in first.parameters], run.count)
        else:
            self.world = tritoncomm.SimulatedWorld(recipe_of(run), WORKERS, first.numel, device=_device(first))
        self.anchor = torch.cat([p.detach().reshape(-1) for p in first.parameters])
        self.momentum = torch.zeros_like(self.anchor)
        self.signs = random_signs(first.numel, _device(first))
        self.rows = torch.empty(WORKERS, first.numel, device=_device(first))
        self.steps = 0

    def step(self, sent: Sent) -> None:
        """Let all workers step, and exchange if it is time."""
        for own in self.optimizers:
            for each in own:
                each.step()
        self.steps += 1
        if self.steps % self.run.local_steps == 0 or self.steps == self.run.steps:
            self.merge(sent)

    def merge(self, sent: Sent) -> None:
        """Exchange what the workers have changed."""
        run = self.run
        for layout, row in zip(self.layouts, self.rows, strict=True):
            row.copy_(torch.cat([p.reshape(-1) for p in layout.parameters]))
        torch.sub(self.anchor, self.rows, out=self.rows)
        if run.decay != 1:
            self._decay()
        with sent.counted(self.world, dense=False):
            mean = self.world.step(self.rows)[0].to_dense()
        mean *= self._gain() if run.match_length else 1.0
        self.momentum.mul_(run.outer_momentum).add_(mean)
        self.anchor.sub_(mean + run.outer_momentum * self.momentum, alpha=run.outer_lr)
        for layout in self.layouts:
            for parameter, part in zip(layout.parameters, layout.parts(self.anchor), strict=True):
                parameter.copy_(part.view(parameter.shape))

    def _decay(self) -> None:
        world = self.world
        kept = [world.residuals] if isinstance(world, SparseLoCoWorld) else [each.residual for each in world.workers]
        torch._foreach_mul_(kept, self.run.decay)

    def _gain(self) -> float:
        """Return the mean length of the workers' updates over the estimated length of their mean."""
        total = torch.stack([sketch(row, self.signs) for row in self.rows]).sum(0)
        length = float(total.double().norm()) / WORKERS
        mean = float(self.rows.double().norm(dim=1).mean())
        return min(max(mean / length, 1.0), math.sqrt(WORKERS)) if length else 1.0


def layout_of(parameters: Sequence[Tensor]) -> BucketLayout:
    """Return the layout of a vector of ``parameters``, in which small tensors come last."""
    large, small = split_by_size(parameters, DENSE_BELOW)
    return BucketLayout([*large, *small])


def _device(layout: BucketLayout) -> torch.device:
    return layout.parameters[0].device


def _is_adam(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.AdamW)


def recipe_of(run: Run) -> tritoncomm.Recipe:
    """Return the recipe that exchanges updates, or all gradients."""
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


def train(run: Run, batches: int = BATCHES, device: str = "cpu") -> Outcome:
    """Train once. Return the columns of the results: the score, what was sent, the curve and the seconds."""
    started = time.perf_counter()
    torch.manual_seed(run.seed)
    task = TASKS[run.task](run.steps, batches)
    few = TASKS[run.task](run.steps, min(batches, CURVE_BATCHES[run.task]))
    model = task.model().to(device)
    model.register_forward_pre_hook(lambda _, inputs: tuple(each.to(device) for each in inputs))
    workers = [Worker(copy.deepcopy(model), run) for _ in range(WORKERS)]
    parts, sent = list(exchanges(run, workers)), [Sent() for _ in workers[0].optimizers]
    curve, at_start = [], 0
    for step in range(run.steps):
        rate = min(1.0, (step + 1) / (run.steps * LR_WARMUP_SHARE))
        if run.schedule == "falling":
            rate = 1.0
        if run.schedule != "constant":
            rate = rate * 0.5 * (1 + math.cos(math.pi * step / run.steps))
        for rank, worker in enumerate(workers):
            worker.set_rate(rate)
            worker.backward(task, run.seed, step, rank)
        with torch.no_grad():
            for part, count in zip(parts, sent, strict=False):
                part.step(count)
        if step < run.dense_steps:
            at_start = sum(each.size for each in sent)
        if is_recorded(run, step + 1):
            with workers[0].evaluated() as model:
                curve.append([step + 1, scored(few, model)])
    with workers[0].evaluated() as model:
        score = scored(task, model)
    size, ordinary = sum(each.size for each in sent), max(1, run.steps - run.dense_steps)
    return {
        "score": score,
        "kilobytes": size / run.steps / 1e3,
        "kilobytes_after_start": (size - at_start) / ordinary / 1e3,
        "messages": sum(each.messages for each in sent) / run.steps,
        "curve": curve,
        "seconds": time.perf_counter() - started,
    }


def is_recorded(run: Run, step: int) -> bool:
    """Whether ``curve`` has a point after ``step`` steps: the last one, or the first exchange of a thirtieth of all."""
    part, before = (max(0, each) * CURVE_POINTS // run.steps for each in (step, step - run.local_steps))
    return step == run.steps or (step % run.local_steps == 0 and part > before)


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line. Every combination of the lists is trained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    parser.add_argument("--method", default="quantized", help="how updates are exchanged")
    parser.add_argument("--values", nargs="+", default=["1bit"], help="formats of a value of an update")
    parser.add_argument(
        "--density", type=float, nargs="+", default=[DEFAULT_DENSITY], help="densities of Ok-Topk, or of --method"
    )
    parser.add_argument("--local-steps", type=int, nargs="+", help="1, or those of the peer, unless given")
    parser.add_argument("--outer-lr", type=float, nargs="+", help="1, or that of the peer, unless given")
    parser.add_argument("--outer-momentum", type=float, nargs="+", help="0, or that of the peer, unless given")
    parser.add_argument("--dense-steps", type=int, help="dense steps at the start, instead of 20")
    parser.add_argument("--match-length", action="store_true", help="restore the length of the mean")
    parser.add_argument("--device", default="cpu", help="where to train, such as cuda")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--best", action="store_true", help="train the best of each kind in the file of --json, by the seeds of --sweep"
    )
    parser.add_argument("--sweep", type=int, nargs="+", default=[10], help="seeds on which rates were swept")
    parser.add_argument("--json", type=Path, help="read finished runs from this file, and add new ones")
    parser.add_argument("--plot", type=Path, help="write a PNG of loss against bytes of the runs in the file of --json")
    parser.add_argument("--smoke", action="store_true", help="a few steps: only checks that the script runs")
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
        options.task,
        steps,
        options.optimizer or "muon",
        0.0,
        "dense",
        schedule=options.schedule,
        weight_decay=options.weight_decay,
    )
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
            for density in options.density:
                yield with_start(replace(first, method=method, values=DEFAULT_VALUES, density=density), options)
        else:
            densities = [1.0] if options.method in ("dense", "quantized") else options.density
            for values, density in itertools.product(options.values, densities):
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
    starts = kind.sends_gradients and (kind.exchange == "updates" or kind.density < 1)
    if not starts:
        return kind
    return replace(kind, dense_steps=DENSE_STEPS if given is None else given, dense_values=DEFAULT_START)


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
            add(options.json, run, outcome, {"workers": WORKERS} | machine(options.device))
    if options.plot:
        picture(read(options.json), options.plot)


if __name__ == "__main__":
    main()
