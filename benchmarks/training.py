"""Train with every method and with dense on two tasks, and compare. Four workers, equal steps, no download.

``gpt``: a byte-level GPT on the sources of Python's standard library, with AdamW. The score is the validation loss in
nats per byte. It is trained with the defaults of ``wrap``, with selection by gradient, and with unmodified AdamW.

``digits``: a small convolutional network on scikit-learn's handwritten digits, with SGD and momentum. The score is the
test accuracy in percent.

Workers are simulated. The exchange runs the same code as in real training. The gap is relative to the dense run of the
same seed. The score after nine tenths of the steps is also recorded. It shows whether the dense run has converged.
Bytes are counted on the wire, over the whole run and after the dense steps at its start.

Every finished run is added to the file of ``--json``, and is not repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tritoncomm
from torch import Tensor, nn
from tritoncomm.algorithms import at_density, field_names
from tritoncomm.primitives.quantized_mean import DENSE_FORMATS
from tritoncomm.scheduler import wire
from tritoncomm.step.adam import StalenessAwareAdam
from tritoncomm.step.chosen_recipe import start_values
from tritoncomm.step.flat import BucketLayout, split_by_size
from tritoncomm.step.stages import Staged

import training_results
from baselines import DGC
from demo_compressor import DeMo, DeMoWorld
from half_precision import HalfPrecision, HalfPrecisionWorld
from peers import SparseLoCoWorld
from power_sgd import PowerSGD, PowerSGDWorld
from tasks import BATCHES, TASKS, WORKERS, Task
from training_results import DEFAULT_STEP, Outcome, Run
from tritoncomm_kernels.section_layout import VALUE_BITS

DENSE_BELOW = 1024
WARMUP_SHARE = 0.02
LR_WARMUP_SHARE = 0.1
RANDOM_BLOCK_DENSITY = 1 / 64
STEPS = DEFAULT, UNSCALED, UNAWARE = (
    DEFAULT_STEP,
    "unscaled",
    "plain",
)  # Adam: default, selection by gradient, unmodified


Compressor = tritoncomm.Recipe | PowerSGD | DeMo | HalfPrecision
World = tritoncomm.SimulatedWorld | PowerSGDWorld | DeMoWorld | HalfPrecisionWorld | SparseLoCoWorld


# A function that clips the averaged gradients of the parameters of a layout.
Clip = Callable[[BucketLayout, tritoncomm.SparseVector, torch.optim.Optimizer], None]


def train(
    task: Task,
    recipe: Compressor,
    seed: int,
    step_rule: str = "",
    catch_up: float = StalenessAwareAdam.max_catch_up,
    max_relative_update: float = StalenessAwareAdam.max_relative_update,
    *,
    see_all: bool = False,
    warmup: int | None = None,
    clip: Clip | None = None,
    small: str = "fp32",
    node_size: int = 1,
    accumulate: int = 1,
    warmup_values: str | None = None,
) -> Outcome:
    """Train once and return the outcome.

    Args:
        task: Task to train.
        recipe: Method of exchange.
        seed: Seed of model and data.
        step_rule: One of :data:`STEPS`, or empty for the step of the optimizer itself.
        catch_up: ``max_catch_up`` of the staleness-aware step.
        max_relative_update: ``max_relative_update`` of the staleness-aware step.
        see_all: Replace every worker's gradient by the mean over workers. All workers then select by the same gradient.
        warmup: Number of dense steps at the start. None is a share of 0.02 of all steps.
        clip: Changes the averaged gradient before the step. None changes nothing.
        small: Format of small tensors, as in :func:`tritoncomm.wrap`.
        node_size: Workers of a node, within which gradients are summed, as in :class:`~tritoncomm.Hierarchical`.
        accumulate: Micro-batches of each worker in a step, whose gradients are averaged.
        warmup_values: Format of the dense steps at the start. None is that of ``wrap`` for this ``small``.
    """
    started = time.perf_counter()
    torch.manual_seed(seed)
    model = task.model()
    task, optimizer = adapted(task, recipe, model)
    aware = step_rule in (DEFAULT, UNSCALED)
    adam = StalenessAwareAdam(optimizer, catch_up, max_relative_update=max_relative_update) if aware else None
    parameters = split_by_size(list(model.parameters()), DENSE_BELOW)
    layout = BucketLayout([*parameters[0], *parameters[1]])
    warmup = int(task.steps * WARMUP_SHARE) if warmup is None else warmup
    world = build(
        recipe, layout, parameters, warmup, by_update=step_rule == DEFAULT, small=small, node_size=node_size,
        warmup_values=warmup_values or start_values(small),
    )  # fmt: skip
    gradients = torch.empty(WORKERS, layout.numel)
    sent, score, late = Sent(), math.nan, math.nan
    for step in range(task.steps):
        set_learning_rate(optimizer, task, step)
        backward(task, model, layout, seed, step, gradients, accumulate, see_all=see_all)
        if not gradients.isfinite().all():
            break
        with sent.counted(world, dense=step < warmup):
            mean = world.step(gradients)[0]
        update(layout, mean, optimizer, adam, clip)
        if step + 1 in (task.steps * 9 // 10, task.steps):
            late, score = score, scored(task, model)
    seconds = time.perf_counter() - started
    return Outcome(score, late, sent.kilobytes, sent.sparse_kilobytes, sent.bits_per_entry, seconds)


def update(
    layout: BucketLayout,
    mean: tritoncomm.SparseVector,
    optimizer: torch.optim.Optimizer,
    adam: StalenessAwareAdam | None,
    clip: Clip | None,
) -> None:
    """Take the step of ``adam``, or that of ``optimizer`` if it is None, with the delivered ``mean``."""
    delivered = layout.split(mean)
    layout.scatter(delivered)
    if clip is not None:
        clip(layout, mean, optimizer)
    if adam is None:
        optimizer.step()
    else:
        adam.step(layout.parameters, [entries.indices for entries in delivered])


def adapted(task: Task, recipe: Compressor, model: nn.Module) -> tuple[Task, torch.optim.Optimizer]:
    """Return the task and its optimizer, both as ``recipe`` needs them."""
    if isinstance(recipe, DeMo):
        task = replace(task, lr=recipe.lr)
    optimizer = task.optimizer(list(model.parameters()), task.lr)
    if isinstance(recipe, DGC | DeMo):  # they apply momentum themselves
        for group in optimizer.param_groups:  # Adam without averages steps by the sign, and still decays weights
            group.update({"betas": (0.0, 0.0)} if "betas" in group else {"momentum": 0.0})
    return task, optimizer


@dataclass
class Sent:
    """Counts what a run sends: bytes and messages of the busiest worker, and entries and words of packed sections.

    The figures named ``sparse``, and those of sections, leave out the dense steps at the start.
    """

    steps: int = 0
    size: int = 0
    messages: int = 0
    sparse_steps: int = 0
    sparse_size: int = 0
    entries: int = 0
    words: int = 0

    @property
    def kilobytes(self) -> float:
        """Kilobytes per step."""
        return self.size / max(self.steps, 1) / 1e3

    @property
    def sparse_kilobytes(self) -> float:
        """Kilobytes per step, without the dense steps at the start."""
        return self.sparse_size / max(self.sparse_steps, 1) / 1e3

    @property
    def bits_per_entry(self) -> float:
        """Bits of an entry: index, value and a share of the head of its section. 0 without packed sections."""
        return 32 * self.words / self.entries if self.entries else 0.0

    @contextlib.contextmanager
    def counted(self, world: World, *, dense: bool) -> Iterator[None]:
        """Count the step of ``world`` inside the context. Meters count messages, so sections are counted here."""
        encode = wire.Section.encode

        def counting(section: wire.Section, indices: Tensor, values: Tensor) -> Any:
            if section.is_packed and not dense:
                self.entries += indices.numel()
                self.words += section.words
            return encode(section, indices, values)

        wire.Section.encode = counting
        try:
            yield
        finally:
            wire.Section.encode = encode
        most = max(traffic.bytes for traffic in world.traffic)
        self.steps += 1
        self.size += most
        self.messages += max(traffic.messages for traffic in world.traffic)
        if not dense:
            self.sparse_steps += 1
            self.sparse_size += most


def build(
    recipe: Compressor,
    layout: BucketLayout,
    parameters: tuple[list[Tensor], list[Tensor]],
    warmup: int,
    *,
    by_update: bool,
    small: str,
    node_size: int,
    warmup_values: str,
) -> World:
    """Return the workers that exchange gradients of ``layout``. ``parameters`` are its large and its small tensors."""
    shapes = [parameter.shape for parameter in layout.parameters]
    if isinstance(recipe, PowerSGD):
        return PowerSGDWorld(recipe, WORKERS, shapes, warmup)
    if isinstance(recipe, DeMo):
        return DeMoWorld(recipe, WORKERS, shapes)
    if isinstance(recipe, HalfPrecision):
        return HalfPrecisionWorld(WORKERS, layout.numel)
    whole = around(
        recipe, warmup, *parameters, by_update=by_update, tail=small, node_size=node_size, warmup_values=warmup_values
    )
    return tritoncomm.SimulatedWorld(whole, WORKERS, layout.numel)


def set_learning_rate(optimizer: torch.optim.Optimizer, task: Task, step: int) -> None:
    """Set the rate of ``step``: a linear warm-up, then half a cosine."""
    rate = min(1.0, (step + 1) / (task.steps * LR_WARMUP_SHARE))
    rate *= 0.5 * (1 + math.cos(math.pi * step / task.steps))
    for group in optimizer.param_groups:
        group["lr"] = task.lr * rate


def backward(
    task: Task,
    model: nn.Module,
    layout: BucketLayout,
    seed: int,
    step: int,
    gradients: Tensor,
    accumulate: int,
    *,
    see_all: bool,
) -> None:
    """Compute every worker's gradient, the mean over ``accumulate`` micro-batches, into its row of ``gradients``.

    With ``see_all``, every row is the mean over workers.
    """
    for rank in range(WORKERS):
        model.zero_grad()
        for micro_batch in range(step * accumulate, (step + 1) * accumulate):
            (task.loss(model, seed, micro_batch, rank) / accumulate).backward()
        layout.read_gradients(gradients[rank])
    if see_all:
        gradients[:] = gradients.mean(0)


@torch.no_grad()
def scored(task: Task, model: nn.Module) -> float:
    """Return the task's score of ``model``."""
    return task.score(model)


def around(
    recipe: tritoncomm.Recipe,
    warmup: int,
    large: list[Tensor],
    small: list[Tensor],
    *,
    by_update: bool,
    tail: str,
    node_size: int,
    warmup_values: str,
) -> tritoncomm.Recipe:
    """Return ``recipe`` with what ``wrap`` adds: warm-up, selection by update and dense small tensors."""
    dense = warmup_values if recipe.averages_when_dense else "fp32"
    inner: tritoncomm.Recipe = tritoncomm.Warmup(recipe=recipe, steps=warmup, values=dense)
    if node_size > 1:
        inner = tritoncomm.Hierarchical(recipe=inner, node_size=node_size)
    by_update = by_update and recipe.compares_entries()
    shapes = tuple(tuple(parameter.shape) for parameter in large) if by_update else None
    return Staged(recipe=inner, tail=sum(parameter.numel() for parameter in small), small=tail, shapes=shapes)


def recipes(name: str, options: argparse.Namespace) -> Iterator[tuple[Compressor, str, str]]:
    """Yield what to train, the rule of :data:`STEPS` and the format of small tensors. Dense is the first."""
    yield tritoncomm.Dense(), "", "fp32"
    others: list[Compressor] = [HalfPrecision()] if options.fp16_dense else []
    others += [PowerSGD(rank) for rank in options.power_sgd]
    others += [DeMo(count, options.demo_lr) for count in options.demo]
    for other in others:
        yield other, "", "fp32"
    formats = list(itertools.product(options.values, options.small))
    left_out = {"dense"} if name == "digits" else {"dense", "dgc"}  # DGC is for SGD
    chosen = [algo for algo in options.algo if algo not in left_out]
    for density, algo, (values, small) in itertools.product(options.density, chosen, formats):
        recipe = configured(algo, density, values, packed=options.packed, teams=options.teams)
        for rule in rules(name, density, options):
            yield recipe, rule, small
    if "random_block" in options.algo:
        for values, small in formats:
            recipe = configured("random_block", RANDOM_BLOCK_DENSITY, values, packed=False)
            yield recipe, rules(name, 0.0, options)[0], small


def rules(name: str, density: float, options: argparse.Namespace) -> list[str]:
    """Return the rules of :data:`STEPS` to train a sparse method with."""
    if name == "digits":
        return [""]
    return [DEFAULT] + [UNSCALED] * (density in options.unscaled) + [UNAWARE] * (density in options.unaware)


def configured(algo: str, density: float, values: str, *, packed: bool, teams: int = 1) -> tritoncomm.Recipe:
    """Return the recipe ``algo``. Methods that do not round values, or do not send indices, leave the format out.

    ``teams`` are those of SparDL.
    """
    known = field_names(algo)
    fields: dict[str, Any] = {"reduced_lr": True} if algo == "random_block" else {}
    if "values" in known:
        fields["values"] = values
    if "teams" in known:
        fields["teams"] = teams
    if "packed" in known and (packed or values != "fp32"):
        fields["packed"] = True
    return at_density(algo, density, **fields)


def described(name: str, task: Task, recipe: Compressor, step: str, small: str, options: argparse.Namespace) -> Run:
    """Return the run with the first seed."""
    label = recipe.name
    if isinstance(recipe, PowerSGD):
        label = f"powersgd, {recipe.rank}"
    if isinstance(recipe, DeMo):
        label = f"demo, {recipe.coefficients}, lr {recipe.lr:g}"
    if getattr(recipe, "teams", 1) != 1:
        label = f"{label}, {options.teams} teams"
    if node_size(recipe, options) > 1:
        label = f"{label}, nodes of {options.node_size}"
    return Run(
        task=name, steps=task.steps, lr=task.lr, method=label, density=getattr(recipe, "density", 1.0),
        values=getattr(recipe, "values", "fp32"), packed=getattr(recipe, "packed", False) is True,
        small=small, step=step, catch_up=options.catch_up, max_relative_update=options.max_relative_update,
        see_all=options.see_all, seed=options.seeds[0],
    )  # fmt: skip


def node_size(recipe: Compressor, options: argparse.Namespace) -> int:
    """Return the workers of a node. Dense, and what is not a recipe of the library, have no nodes."""
    return options.node_size if isinstance(recipe, tritoncomm.Recipe) and recipe.name != "dense" else 1


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--task", nargs="+", default=["gpt", "digits"], choices=list(TASKS))
    parser.add_argument("--algo", nargs="+", default=tritoncomm.algorithms(), choices=tritoncomm.algorithms())
    parser.add_argument("--density", type=float, nargs="+", default=[0.05, 0.01, 0.001])
    parser.add_argument(
        "--unscaled", type=float, nargs="*", default=[0.01], help="densities to also train with selection by gradient"
    )
    parser.add_argument(
        "--unaware", type=float, nargs="*", default=[0.01], help="densities to also train with unmodified AdamW"
    )
    parser.add_argument(
        "--power-sgd", type=int, nargs="*", default=[1, 4], metavar="RANK", help="ranks of PowerSGD to compare with"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="steps, instead of the task's default")
    parser.add_argument("--lr", type=float, help="learning rate, instead of the task's default")
    limits = StalenessAwareAdam.max_catch_up, StalenessAwareAdam.max_relative_update
    parser.add_argument("--catch-up", type=float, default=limits[0], help="max_catch_up of the staleness-aware step")
    parser.add_argument(
        "--max-relative-update",
        type=float,
        default=limits[1],
        help="max_relative_update of the staleness-aware step; inf is no limit",
    )
    parser.add_argument(
        "--see-all", action="store_true", help="replace every worker's gradient by the mean over workers"
    )
    parser.add_argument("--values", nargs="+", default=["fp32"], choices=list(VALUE_BITS), help="formats of values")
    parser.add_argument("--packed", action="store_true", help="pack indices of values in fp32 too")
    parser.add_argument(
        "--small",
        nargs="+",
        default=["fp32"],
        choices=DENSE_FORMATS,
        help="formats of small tensors, and of the dense steps",
    )
    parser.add_argument("--teams", type=int, default=1, help="teams of SparDL")
    parser.add_argument("--node-size", type=int, default=1, help="workers of a node, within which gradients are summed")
    parser.add_argument("--fp16-dense", action="store_true", help="also train with dense gradients in fp16")
    parser.add_argument("--demo", type=int, nargs="*", default=[], metavar="K", help="coefficients per chunk of DeMo")
    parser.add_argument("--demo-lr", type=float, default=DeMo.lr, help="learning rate of DeMo")
    parser.add_argument("--json", type=Path, help="read finished runs from this file, and add new ones")
    parser.add_argument("--plot", type=Path, help="write a PNG for each task, its name this one with the task added")
    parser.add_argument("--smoke", action="store_true", help="a few steps: only checks that the script runs")
    return parser


def main() -> None:
    """Train, print each row when it is done, and write the requested files."""
    parser = arguments()
    options = parser.parse_args()
    if WORKERS % options.node_size:
        parser.error(f"--node-size {options.node_size}: must divide the {WORKERS} workers")
    if options.smoke:
        options.steps, options.seeds, options.density = 2, [0], [0.01]
        options.values, options.small, options.fp16_dense, options.demo = ["4bit"], ["8bit"], True, [32]
    results = training_results.read(options.json)
    started = time.perf_counter()
    for name in options.task:
        task = TASKS[name](options.steps, 1 if options.smoke else BATCHES)
        task = replace(task, lr=options.lr or task.lr)
        for recipe, step_rule, small in recipes(name, options):
            first = described(name, task, recipe, step_rule, small, options)
            for run in (replace(first, seed=seed) for seed in options.seeds):
                if run in results:
                    continue
                limits = options.catch_up, options.max_relative_update
                nodes = node_size(recipe, options)
                results[run] = train(
                    task, recipe, run.seed, step_rule, *limits, see_all=options.see_all, small=small, node_size=nodes
                )
                print(training_results.line(run, results), flush=True)
                if options.json:
                    training_results.write(results, options.json, WORKERS)
    print(training_results.table(results))
    print(f"total time: {time.perf_counter() - started:.0f} s")
    if options.plot:
        training_results.pictures(results, options.plot)


if __name__ == "__main__":
    main()
