"""The output of the demo: progress, a table, a plot and a JSON file."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tritoncomm.demo.local_workers import Send
from tritoncomm.demo.train import Progress, Run, Settings

PLAIN_LINES = 10  # progress lines per run when the output is not a terminal
SMOOTH = 10  # the reported training loss is the mean of this many last steps


def summary(settings: Settings, dense: Run, chosen: Run) -> dict[str, Any]:
    """Return the settings and results of both runs. Bytes are per step and worker, averaged over all steps."""
    sparse = chosen.densities[settings.warmup :] or chosen.densities
    after = chosen.bytes_sent[-1] - (chosen.bytes_sent[settings.warmup - 1] if settings.warmup else 0)
    figures = asdict(settings) | {
        "label": settings.label,
        "described": settings.described,
        "warmup_steps": settings.warmup,
        "numel": dense.numel,
        "bytes_per_step_after_warmup": after / max(1, settings.steps - settings.warmup),
        "achieved_density": statistics.fmean(sparse),
    }
    for of, run in (("", chosen), ("dense_", dense)):
        figures |= {
            f"{of}loss": statistics.fmean(run.losses[-SMOOTH:]),
            f"{of}val_loss": run.validations[-1][1],
            f"{of}best_val_loss": min(loss for _, loss in run.validations),
            f"{of}bytes_per_step": run.bytes_sent[-1] / settings.steps,
            f"{of}seconds": run.seconds,
            f"{of}seconds_exchange": run.seconds_exchange,
        }
    return figures


@contextmanager
def progress(settings: Settings) -> Iterator[Send]:
    """Yield a function that displays a :class:`Progress`: as a bar on a terminal, as plain lines elsewhere."""
    bar = _bar() if sys.stdout.isatty() else None
    if bar is None:
        yield lambda state: _line(state, settings)
        return
    tasks: dict[str, Any] = {}

    def show(state: Progress) -> None:
        if state.method not in tasks:
            tasks[state.method] = bar.add_task(state.method, total=settings.steps, loss="", sent="")
        bar.update(
            tasks[state.method],
            completed=state.step,
            loss=f"loss {state.loss:.3f}",
            sent=f"{state.bytes_sent / 1e6:.1f} MB sent",
        )

    with bar:
        yield show


def table(figures: dict[str, Any]) -> str:
    """Return a text table of both runs, side by side."""
    ratio = figures["dense_bytes_per_step"] / (figures["bytes_per_step"] or 1.0)
    rows = [
        ("", "dense", figures["label"]),
        ("validation loss, final", _loss(figures, "dense_val_loss"), _loss(figures, "val_loss")),
        ("validation loss, best", _loss(figures, "dense_best_val_loss"), _loss(figures, "best_val_loss")),
        ("training loss, final", _loss(figures, "dense_loss"), _loss(figures, "loss")),
        ("kB per step and worker", *_kilobytes(figures, "dense_bytes_per_step", "bytes_per_step")),
        ("  after warm-up", *_kilobytes(figures, "dense_bytes_per_step", "bytes_per_step_after_warmup")),
        ("fewer bytes", "", f"{ratio:.1f}x" if figures["bytes_per_step"] else "none sent"),
        ("density delivered", "100 %", f"{figures['achieved_density']:.2%}"),
        ("seconds in exchange", f"{figures['dense_seconds_exchange']:.1f}", f"{figures['seconds_exchange']:.1f}"),
        ("seconds in total", f"{figures['dense_seconds']:.1f}", f"{figures['seconds']:.1f}"),
    ]
    gap = figures["val_loss"] / figures["dense_val_loss"] - 1
    lines = [f"{label:26}{dense:>14}{chosen:>18}" for label, dense, chosen in rows]
    lines += ["", f"{figures['described']}: validation loss {gap:+.1%} relative to dense"]
    return "\n".join(lines)


def plot(figures: dict[str, Any], runs: list[Run], path: Path) -> None:
    """Write a PNG of the validation loss against steps and against bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        by_step, by_bytes = figure.subplots(1, 2, sharey=True)
        for run, color in zip(runs, ("0.45", "tab:red"), strict=True):
            steps = [step for step, _ in run.validations]
            losses = [loss for _, loss in run.validations]
            megabytes = [run.bytes_sent[step - 1] / 1e6 for step in steps]
            label = run.method if run is runs[0] else figures["described"]
            by_step.plot(steps, losses, "o-", color=color, label=label, markersize=4)
            by_bytes.plot(megabytes, losses, "o-", color=color, label=label, markersize=4)
        by_step.set(xlabel="step", ylabel="validation loss (nats per byte)")
        scale = "log" if figures["bytes_per_step"] else "linear"
        by_bytes.set(xlabel="MB sent per worker", xscale=scale)
        by_step.legend(frameon=False)
        for axes in (by_step, by_bytes):
            axes.grid(alpha=0.25)
        title = f"{figures['workers']} workers, {figures['numel'] / 1e6:.2f} million parameters"
        figure.suptitle(title, fontsize=11)
        figure.savefig(path, dpi=120, format="png")


def _bar() -> Any:
    try:
        from rich import progress as rich_progress
    except ImportError:  # progress() falls back to plain lines
        return None
    return rich_progress.Progress(
        rich_progress.TextColumn("{task.description:16}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TextColumn("{task.fields[loss]}  {task.fields[sent]}"),
        rich_progress.TimeRemainingColumn(),
    )


def _line(state: Progress, settings: Settings) -> None:
    if state.step % max(1, settings.steps // PLAIN_LINES) == 0 or state.step == settings.steps:
        print(
            f"{state.method:16} step {state.step:5d}/{settings.steps}  loss {state.loss:.3f}  "
            f"{state.bytes_sent / 1e6:8.1f} MB sent",
            flush=True,
        )


def _loss(figures: dict[str, Any], key: str) -> str:
    return f"{figures[key]:.3f}"


def _kilobytes(figures: dict[str, Any], *keys: str) -> list[str]:
    return [f"{figures[key] / 1e3:.1f}" for key in keys]
