"""Load balance by step: Ok-Topk's regions and ExDyna's partitions on gradients of unequal layers.

Imbalance is the load of the busiest worker divided by the mean load. The load is the number of entries received for a
region (Ok-Topk), or selected in a partition (ExDyna with each rule, MiCRO). 1 is perfect. Random placement of entries
gives a little more.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from tritoncomm import ExDyna, MiCRO, OkTopk, Recipe, SimulatedWorld
from tritoncomm.planning.comparison import Source
from tritoncomm.planning.synthetic_gradients import (
    AdversarialGradients,
    LayeredGradients,
    RecordedGradients,
    load_recording,
)

# Expected maximum of P standard normal values. It gives the imbalance that random placement of entries causes.
EXPECTED_LARGEST = {4: 1.03, 8: 1.42, 16: 1.77, 32: 2.07, 64: 2.35}


def methods(density: float) -> dict[str, Recipe]:
    """Return the recipes to compare, by label."""
    return {
        "oktopk": OkTopk(density=density),
        "oktopk, never again": OkTopk(density=density, repartition_every=10**9, skew_trigger=1e9),
        "exdyna, prefix": ExDyna(density=density),
        "exdyna, pair_ratio": ExDyna(density=density, rebalance="pair_ratio"),
        "exdyna, paper": ExDyna(density=density, mode="paper"),
        "micro": MiCRO(density=density),
    }


def imbalance(recipe: Recipe, world_size: int, numel: int, steps: int, source: Source) -> list[float]:
    """Return the imbalance of each step: the load of the busiest worker divided by the mean."""
    world = SimulatedWorld(recipe, world_size, numel)
    ranks = [source(numel, rank) for rank in range(world_size)]
    found = []
    for step in range(steps):
        world.step(torch.stack([gradients.at(step) for gradients in ranks]))
        report = world.workers[0].algorithm.report
        found.append(report["region_imbalance"] if "region_imbalance" in report else report["imbalance"])
    return found


def picture(series: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Write a PNG with one panel per kind of gradients. Points are means over ten steps."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(4.6 * len(series), 3.6), layout="constrained")
        for axes, (kind, lines) in zip(figure.subplots(1, len(series), squeeze=False)[0], series.items(), strict=True):
            for name, values in lines.items():
                means = [statistics.fmean(values[i : i + 10]) for i in range(0, len(values), 10)]
                axes.plot(range(0, len(values), 10), means, label=name, linewidth=1.2)
            axes.set(title=kind, xlabel="step", yscale="log")
            axes.set_ylabel("imbalance: busiest worker / mean")
            axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
        figure.savefig(path, dpi=120, format="png")


def main() -> None:
    """Measure, print the table, and write the requested files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--numel", type=float, default=2**18)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--recording", type=Path, help="file from demo --record, used as a third kind of gradients")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="write a PNG to this file")
    parser.add_argument("--smoke", action="store_true", help="small and quick: only checks that the script runs")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.numel, options.workers = 3, 4e3, 4
    numel, world_size = int(options.numel), options.workers
    sources: dict[str, Source] = {"layered": LayeredGradients, "adversarial": AdversarialGradients}
    if options.recording:
        recording = load_recording(options.recording)
        sources["recorded"] = lambda size, rank: RecordedGradients(size, rank, recording)
    series: dict[str, dict[str, list[float]]] = {}
    print(
        f"{numel} values, {world_size} workers, density {options.density:.2%}: "
        "imbalance (busiest worker / mean), averaged over steps"
    )
    tenth = max(1, options.steps // 10)
    print(f"{'gradients':14}{'method':22}{'first tenth':>12}{'second half':>12}{'its maximum':>15}")
    for kind, source in sources.items():
        series[kind] = {}
        for name, recipe in methods(options.density).items():
            values = series[kind][name] = imbalance(recipe, world_size, numel, options.steps, source)
            second_half = values[len(values) // 2 :]
            first, second = statistics.fmean(values[:tenth]), statistics.fmean(second_half)
            print(f"{kind:14}{name:22}{first:12.2f}{second:12.2f}{max(second_half):15.2f}", flush=True)
    if world_size in EXPECTED_LARGEST:
        floor = 1 + EXPECTED_LARGEST[world_size] * ((world_size - 1) / (numel * options.density)) ** 0.5
        print(f"imbalance of random placement: {floor:.2f}")
    if options.json:
        settings = {"workers": world_size, "numel": numel, "density": options.density, "steps": options.steps}
        options.json.write_text(json.dumps({"settings": settings, "imbalance": series}) + "\n")
    if options.plot:
        picture(series, options.plot)


if __name__ == "__main__":
    main()
