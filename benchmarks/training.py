"""Train with every method and with dense on two tasks, and compare. Four workers, equal steps, no download.

``gpt``: a byte-level GPT on the sources of Python's standard library, with AdamW. The score is the validation loss in
nats per byte. It is trained with the defaults of ``wrap``, with selection by gradient, and with unmodified AdamW.

``digits``: a small convolutional network on scikit-learn's handwritten digits, with SGD and momentum. The score is the
test accuracy in percent.

Workers are simulated. The exchange runs the same code as in real training. The gap is relative to the dense run of the
same seed. The score after nine tenths of the steps is also recorded. It shows whether the dense run has converged.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tritoncomm
from torch import Tensor, nn
from torch.nn import functional as F
from tritoncomm.algorithms import DenseTail, Preconditioned
from tritoncomm.demo.model import ByteGPT, Shape
from tritoncomm.demo.text import batch, standard_library, validation_batches
from tritoncomm.step.adam import StalenessAwareAdam
from tritoncomm.step.bucket import BucketLayout, split_by_size

from power_sgd import PowerSGD, PowerSGDWorld

WORKERS = 4
DENSE_BELOW = 1024
WARMUP_SHARE = 0.02
LR_WARMUP_SHARE = 0.1
RANDOM_BLOCK_DENSITY = 1 / 64
STEPS = DEFAULT, UNSCALED, UNAWARE = "aware", "unscaled", "plain"  # Adam: default, selection by gradient, unmodified


@dataclass(frozen=True)
class Task:
    """A training task: model, optimizer, loss of a rank in a step, and the score of the trained model."""

    steps: int
    model: Callable[[], nn.Module]
    optimizer: Callable[[list[nn.Parameter], float], torch.optim.Optimizer]
    lr: float
    loss: Callable[[nn.Module, int, int, int], Tensor]  # (model, seed, step, rank) -> loss
    score: Callable[[nn.Module], float]
    lower_is_better: bool


@dataclass
class Row:
    """One method at one density: a score per seed, and the kilobytes that the busiest worker sends per step."""

    task: str
    method: str
    density: float
    step: str
    scores: list[float]
    late_scores: list[float]  # after nine tenths of the steps
    kilobytes: float


@dataclass
class Outcome:
    """The result of one run: scores at the end and after nine tenths of the steps, and kilobytes as in :class:`Row`."""

    score: float
    late: float
    kilobytes: float


def gpt(steps: int | None) -> Task:
    """Return the language-model task. ``steps`` None is the default number of steps."""
    text = standard_library()
    shape = Shape(context=32, width=64, layers=2, heads=2)
    held_out = validation_batches(text.validation, 64, shape.context, 32)

    def loss(model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
        out: Tensor = model(batch(text.train, 16, shape.context, seed, step, rank))
        return out

    return Task(
        steps or 1600,
        lambda: ByteGPT(shape),
        lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1),
        5e-3,  # 1e-2 helps dense runs, but hardly sparse ones: docs/explanation/adamw.md
        loss,
        lambda model: statistics.fmean(float(model(rows)) for rows in held_out),
        lower_is_better=True,
    )


def digits(steps: int | None) -> Task:
    """Return the image-classification task. Every fifth image is held out."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).div(16).unsqueeze(1)
    labels = torch.tensor(data.target)
    test = torch.arange(len(labels)) % 5 == 0
    trained, truth = images[~test], labels[~test]

    def loss(model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(((seed * 100_003) + step) * WORKERS + rank)
        chosen = torch.randint(len(truth), (32,), generator=generator)
        return F.cross_entropy(model(trained[chosen]), truth[chosen])

    def accuracy(model: nn.Module) -> float:
        return 100 * float((model(images[test]).argmax(1) == labels[test]).float().mean())

    return Task(
        steps or 400,
        lambda: nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10),
        ),
        lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-4),
        0.05,
        loss,
        accuracy,
        lower_is_better=False,
    )  # fmt: skip


# A function that clips the averaged gradients of the parameters of a layout.
Clip = Callable[[BucketLayout, tritoncomm.SparseVector, torch.optim.Optimizer], None]
TASKS = {"gpt": gpt, "digits": digits}


def train(
    task: Task,
    recipe: tritoncomm.Recipe | PowerSGD,
    seed: int,
    step_rule: str = "",
    catch_up: float = StalenessAwareAdam.max_catch_up,
    max_relative_update: float = StalenessAwareAdam.max_relative_update,
    *,
    see_all: bool = False,
    warmup: int | None = None,
    clip: Clip | None = None,
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
    """
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(list(model.parameters()), task.lr)
    if isinstance(recipe, tritoncomm.DGC):  # DGC applies momentum itself
        for group in optimizer.param_groups:
            group["momentum"] = 0.0
    aware = step_rule in (DEFAULT, UNSCALED)
    adam = StalenessAwareAdam(optimizer, catch_up, max_relative_update=max_relative_update) if aware else None
    large, small = split_by_size(list(model.parameters()), DENSE_BELOW)
    layout = BucketLayout([*large, *small])
    warmup = int(task.steps * WARMUP_SHARE) if warmup is None else warmup
    world: tritoncomm.SimulatedWorld | PowerSGDWorld
    if isinstance(recipe, PowerSGD):
        world = PowerSGDWorld(recipe, WORKERS, [parameter.shape for parameter in layout.parameters], warmup)
    else:
        whole = around(recipe, warmup, large, small, by_update=step_rule == DEFAULT)
        world = tritoncomm.SimulatedWorld(whole, WORKERS, layout.numel)
    gradients = torch.empty(WORKERS, layout.numel)
    sent, late = 0, math.nan
    for step in range(task.steps):
        set_learning_rate(optimizer, task, step)
        backward(task, model, layout, seed, step, gradients)
        if see_all:
            gradients[:] = gradients.mean(0)
        if not gradients.isfinite().all():
            return Outcome(math.nan, math.nan, sent / (step + 1) / 1e3)
        mean = world.step(gradients)[0]
        sent += max(traffic.bytes for traffic in world.traffic)
        layout.scatter(mean.to_dense())
        if clip is not None:
            clip(layout, mean, optimizer)
        if adam is None:
            optimizer.step()
        else:
            everything = [None] * len(layout.parameters)
            adam.step(layout.parameters, everything if mean.is_full else layout.split(mean.indices))
        if step + 1 == task.steps * 9 // 10:
            with torch.no_grad():
                late = task.score(model)
    with torch.no_grad():
        return Outcome(task.score(model), late, sent / task.steps / 1e3)


def set_learning_rate(optimizer: torch.optim.Optimizer, task: Task, step: int) -> None:
    """Set the rate of ``step``: a linear warm-up, then half a cosine."""
    rate = min(1.0, (step + 1) / (task.steps * LR_WARMUP_SHARE))
    rate *= 0.5 * (1 + math.cos(math.pi * step / task.steps))
    for group in optimizer.param_groups:
        group["lr"] = task.lr * rate


def backward(task: Task, model: nn.Module, layout: BucketLayout, seed: int, step: int, gradients: Tensor) -> None:
    """Compute every worker's gradient into its row of ``gradients``."""
    for rank in range(WORKERS):
        model.zero_grad()
        task.loss(model, seed, step, rank).backward()
        layout.gather(gradients[rank])


def around(
    recipe: tritoncomm.Recipe, warmup: int, large: list[Tensor], small: list[Tensor], *, by_update: bool
) -> tritoncomm.Recipe:
    """Return ``recipe`` inside the recipes that ``wrap`` adds: warm-up, preconditioning and dense small tensors."""
    inner: tritoncomm.Recipe = tritoncomm.Warmup(recipe=recipe, steps=warmup)
    if by_update and recipe.compares_entries():
        inner = Preconditioned(recipe=inner, shapes=tuple(tuple(parameter.shape) for parameter in large))
    return DenseTail(recipe=inner, tail=sum(parameter.numel() for parameter in small))


def runs(name: str, options: argparse.Namespace) -> Iterator[tuple[tritoncomm.Recipe | PowerSGD, str]]:
    """Yield the recipes to train and the rule of :data:`STEPS` for each. Dense is the first."""
    default = DEFAULT if name == "gpt" else ""
    yield tritoncomm.Dense(), ""
    for rank in options.power_sgd:
        yield PowerSGD(rank), ""
    for density in options.density:
        for algo in options.algo:
            if algo == "dense" or (algo == "dgc" and name == "gpt"):  # DGC cannot be combined with Adam
                continue
            fields: dict[str, Any] = {"reduced_lr": True} if algo == "random_block" else {}
            recipe = tritoncomm.recipe(algo, density=density, **fields)
            yield recipe, default
            if name == "gpt" and density in options.unscaled:
                yield recipe, UNSCALED
            if name == "gpt" and density in options.unaware:
                yield recipe, UNAWARE
    if "random_block" in options.algo:
        yield tritoncomm.RandomBlock(density=RANDOM_BLOCK_DENSITY, reduced_lr=True), default


def gaps(scores: list[float], dense: list[float], *, relative: bool) -> list[float]:
    """Return how far ``scores`` are above ``dense`` for each seed: in percent if ``relative``, else as difference."""
    pairs = zip(scores, dense, strict=True)
    return [100 * (score / base - 1) if relative else score - base for score, base in pairs]


def show(row: Row, dense: Row, *, lower_is_better: bool) -> None:
    """Print one line of the table."""
    behind = gaps(row.scores, dense.scores, relative=lower_is_better)
    unit = "%" if lower_is_better else ""
    scores = "  ".join(f"{score:.3f} ({gap:+.1f}{unit})" for score, gap in zip(row.scores, behind, strict=True))
    density = "" if row.density == 1 else f"{row.density:.2%}"
    print(f"{row.task:7}{row.method:16}{density:>8} {row.step:9}{row.kilobytes:10.1f} kB   {scores}", flush=True)


def picture(rows: list[Row], path: Path) -> None:
    """Write a PNG of the gap to dense against bytes: mean and range over seeds. The range of dense is shaded."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, ScalarFormatter

    tasks = list(dict.fromkeys(row.task for row in rows))
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(6.5 * len(tasks), 4.4), layout="constrained")
        colors = mpl.colormaps["tab20"].colors
        methods = sorted({row.method for row in rows} - {"dense"})
        for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
            relative = task == "gpt"
            dense = next(row for row in rows if (row.task, row.method) == (task, "dense"))
            middle = [statistics.fmean(dense.scores)] * len(dense.scores)
            own = gaps(dense.scores, middle, relative=relative)
            axes.axhspan(min(own), max(own), color="0.85", label="range of dense")
            for number, method in enumerate(methods):
                shown = [r for r in rows if (r.task, r.method) == (task, method) and r.step in ("", DEFAULT)]
                if not shown:
                    continue
                behind = [gaps(row.scores, dense.scores, relative=relative) for row in shown]
                means = [statistics.fmean(values) for values in behind]
                spread = [
                    [mean - min(values) for mean, values in zip(means, behind, strict=True)],
                    [max(values) - mean for mean, values in zip(means, behind, strict=True)],
                ]
                axes.errorbar(
                    [row.kilobytes for row in shown], means, yerr=spread, fmt="o", markersize=4, capsize=2,
                    color=colors[number % len(colors)], label=method,
                )  # fmt: skip
            axes.axhline(0, color="0.4", linewidth=0.8)
            axes.axvline(dense.kilobytes, color="0.4", linewidth=0.8, linestyle=":", label="bytes of dense")
            axes.set(xscale="log", xlabel="kB per step and worker", title=task)
            axes.set_yscale("symlog", linthresh=5)  # linear near dense, logarithmic far away
            axes.yaxis.set_major_locator(FixedLocator([-80, -40, -20, -10, -5, -2, 0, 2, 5, 10, 20, 40, 80]))
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(ScalarFormatter())
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_ylabel("validation loss, % above dense" if relative else "test accuracy, points above dense")
            axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.savefig(path, dpi=120, format="png")


def main() -> None:
    """Train, print each row when it is done, and write the requested files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--task", nargs="+", default=list(TASKS), choices=list(TASKS))
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
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--plot", type=Path, help="write a PNG to this file")
    parser.add_argument("--smoke", action="store_true", help="a few steps: only checks that the script runs")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seeds, options.density = 2, [0], [0.01]
    rows: list[Row] = []
    started = time.perf_counter()
    for name in options.task:
        task, dense = TASKS[name](options.steps), None
        task = replace(task, lr=options.lr or task.lr)
        for recipe, step_rule in runs(name, options):
            limits = options.catch_up, options.max_relative_update
            results = [train(task, recipe, s, step_rule, *limits, see_all=options.see_all) for s in options.seeds]
            label, density = recipe.name, getattr(recipe, "density", 1.0)
            if isinstance(recipe, PowerSGD):
                label = f"powersgd, {recipe.rank}"
            scores, late = [result.score for result in results], [result.late for result in results]
            kilobytes = statistics.fmean(result.kilobytes for result in results)
            row = Row(name, label, density, step_rule, scores, late, kilobytes)
            dense = dense or row
            rows.append(row)
            show(row, dense, lower_is_better=task.lower_is_better)
            if options.json:
                settings = {k: v for k, v in vars(options).items() if k not in ("json", "plot", "smoke")}
                machine = f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}"
                content = {"settings": settings | {"workers": WORKERS}, "machine": machine}
                content["rows"] = [asdict(row) for row in rows]
                options.json.write_text(json.dumps(content, indent=1) + "\n")
    print(f"total time: {time.perf_counter() - started:.0f} s")
    if options.plot:
        picture(rows, options.plot)


if __name__ == "__main__":
    main()
