"""Recommend a method and a density for a given network, or dense, from the papers' cost formulas.

The formula of a method is its ``Recipe.formula`` in :mod:`tritoncomm.algorithms`. :mod:`tritoncomm.scheduler.cost`
turns it into seconds on a network. :mod:`tritoncomm.step.cpu_cost` and :mod:`tritoncomm.step.gpu_cost` add what an
exchange costs on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from tritoncomm.algorithms import Dense, RandomBlock, Recipe, algorithms, recipe
from tritoncomm.algorithms.base import EntryRecipe, StaticRecipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.primitives.quantized_mean import BITS, traffic
from tritoncomm.scheduler.cost import Link
from tritoncomm.step import cpu_cost, gpu_cost
from tritoncomm.step.gpu_cost import Counts
from tritoncomm.step.options import DEFAULT_ALGO, DEFAULT_DENSITY, DEFAULT_WARMUP
from tritoncomm.step.packing import Packing, resolve

DENSITIES = (0.001, 0.01, 0.05)
# The methods that are recommended, and their loss in the training benchmark
# (benchmarks/results/training.json).
TRUSTED = ("oktopk", "spardl")
TRUSTED_LOSS = (
    "with 4-bit values 2.9 to 3.8% below dense at density 5%, 0.2 to 1.8% above at 1%, 4.9 to 7.1% above at 0.5%, and "
    "oktopk 2.0 to 3.1% below at 3%. In fp32, 2.7 to 4.1% below at 5%, 23 to 28% above at 0.1%"
)
# A sparse step must be predicted to take less than this fraction of a dense step: a margin for what is not counted.
WORTH_IT = 0.95
# The backward pass is about two thirds of a step's computation. Most of it follows the first bucket.
OVERLAP = 0.5
_REST_MS, _REST_NS = f"{1e3 * cpu_cost.REST:g}", f"{1e9 * cpu_cost.REST_VALUE:g}"
_NOTES_CPU = (
    "Exchange and step times include the work of a core: selection, messages, packing, as measured on an AMD EPYC.",
    f"Links count as {8e-9 * cpu_cost.GLOO_BANDWIDTH:.1f} Gbit/s at most: gloo sends no faster with a core.",
    f"A sparse step takes {_REST_MS} ms and {_REST_NS} ns per parameter more than its exchange, for AdamW.",
    "The work was measured with 2 and 4 workers. Predictions of single exchanges were off by up to a half.",
    "The work of DDP's hook (--buckets) was fitted to a model of 0.9 million parameters with 4 workers.",
    "Not counted: the exchange of small tensors.",
)
_SYNC, _LAUNCH = f"{1e6 * gpu_cost.SYNCHRONIZATION:g} us", f"{1e6 * gpu_cost.LAUNCH:g} us"
_NOTES_GPU = (
    f"Exchange and step times include {_SYNC} per host synchronization and {_LAUNCH} per launch.",
    "Their numbers were counted on an emulated GPU. Their times are assumptions.",
    f"The step of a sparse method has {gpu_cost.REST_OF_STEP.launches:.0f} launches more, for AdamW and small tensors.",
    "Not counted: the time of kernels, the work of DDP's hook, and the exchange of small tensors.",
    "form: exact messages are as long as their entries need, static ones have a fixed length. ?: not counted.",
)


class Estimate(NamedTuple):
    """The predicted cost of one recipe, in seconds.

    ``low`` and ``high`` are the lower and upper end of the exchange time. Both include the work on a CPU, and the time
    of the ``counts`` on a GPU. ``step`` is the time of a whole training step with ``high``. ``counts`` is None on a
    CPU, and where the counts of a method are not known. In ``recipe``, ``packed="auto"`` is resolved, and on a GPU
    ``static="auto"`` is the faster form.
    """

    recipe: Recipe
    low: float
    high: float
    step: float
    counts: Counts | None = None

    @property
    def is_dense(self) -> bool:
        """Whether the recipe is a plain all-reduce."""
        return isinstance(self.recipe, Dense)


def estimates(
    numel: int, world_size: int, link: Link, step_seconds: float = 0.0, *, densities: Sequence[float] = DENSITIES,
    overlap: float = OVERLAP, values: str = "fp32", device: torch.device | str = "cpu", cores: float = 1.0,
    buckets: int = 0, wrapped_dense: bool = False,
) -> list[Estimate]:  # fmt: skip
    """Return the estimates of dense and of every method at every density, fastest step first.

    A dense all-reduce overlaps with computation, as in ``DistributedDataParallel``. A sparse exchange starts after the
    backward pass. On a CPU, the work of a sparse exchange is counted, see :mod:`tritoncomm.step.cpu_cost`. On a GPU,
    host synchronizations and kernel launches are counted, see :func:`tritoncomm.step.gpu_cost.counts`. The selection
    is included. The rest of a sparse step is longer than that of a dense one, see
    :func:`tritoncomm.step.cpu_cost.rest_of_step` and :data:`tritoncomm.step.gpu_cost.REST_OF_STEP`.

    Args:
        numel: Number of parameters.
        world_size: Number of workers.
        link: Bandwidth and latency of every rank's network interface.
        step_seconds: Seconds of computation in one training step.
        densities: Densities to estimate.
        overlap: Fraction of the computation that hides a dense all-reduce, in [0, 1].
        values: Format of values on the wire, for the methods that send entries.
        device: Device of the gradients. It determines the form of messages, whether they are packed, and the time that
            an exchange takes beside the link.
        cores: CPU cores for each worker. Workers that share a core, below 1, do their work one after the other, and
            computation hides nothing. Ignored on a GPU.
        buckets: Number of equal vectors that the hook of DDP exchanges in a step with a sparse method, its buckets. 0
            means ``wrap`` without a hook, which exchanges one vector. They are exchanged one after the other. On a
            CPU, the work of the hook is counted, see :func:`tritoncomm.step.cpu_cost.hook`. On a GPU, they share waits
            of the host.
        wrapped_dense: Whether dense is ``wrap(algo="dense")`` instead of ``DistributedDataParallel``. It overlaps with
            nothing, and its work on a CPU is counted.

    Raises:
        ConfigurationError: A number is out of range.
    """
    if numel < 1 or world_size < 1:
        raise ConfigurationError(f"numel and workers must be at least 1, got numel={numel}, workers={world_size}")
    if not (step_seconds >= 0 and 0 <= overlap <= 1):
        raise ConfigurationError(
            f"step_seconds must be at least 0 and overlap in [0, 1], got step_seconds={step_seconds}, overlap={overlap}"
        )
    if not cores > 0:
        raise ConfigurationError(f"cores must be above 0, the CPU cores for each worker, got cores={cores}")
    if buckets < 0:
        raise ConfigurationError(
            f"buckets must be the number of buckets of DDP, or 0 without its hook, got buckets={buckets}"
        )
    cores, buckets = _used_cores(cores, device), min(buckets, numel)
    vectors, hook = max(1, buckets), hook_seconds(buckets, device) / cores
    dense = _estimate(Dense(), numel, world_size, link, device, cores)
    hidden = 0.0 if wrapped_dense else step_seconds * _hiding(overlap, cores)
    if not wrapped_dense:
        ddp = ddp_seconds(numel, world_size, link, device, cores)
        dense = dense._replace(low=ddp, high=ddp)
    rest = rest_of_step(numel, device) / cores
    collected = rest if wrapped_dense else 0.0  # wrap collects gradients of a dense exchange too
    found = [dense._replace(step=step_seconds + max(0.0, dense.high - hidden) + collected)]
    for name in algorithms():
        if name != dense.recipe.name:
            for density in densities:
                forms = [
                    _repeated(_estimate(each, -(-numel // vectors), world_size, link, device, cores), vectors, hook)
                    for each in _forms(at(name, density, values), device)
                ]
                fastest = min(forms, key=lambda estimate: estimate.high)
                found.append(fastest._replace(step=step_seconds + fastest.high + rest))
    return sorted(found, key=lambda estimate: (estimate.step, estimate.recipe.name, estimate.recipe.density))


def _repeated(one: Estimate, vectors: int, hook: float) -> Estimate:
    """Return the estimate of the exchange of several ``vectors`` in a step, from that of ``one``.

    ``hook`` are the seconds of the hook that exchanges them.

    On a GPU, all share the wait for the confirmation. If a form waits for nothing but the verdict besides, all share
    this wait, too. Exact lengths share more waits, those for counts, which are not subtracted.
    """
    shared = 0.0
    if one.counts is not None:
        waits = 2 if one.counts.synchronizations == 2 else 1  # noqa: PLR2004 - the verdict and the confirmation
        shared = (vectors - 1) * waits * gpu_cost.SYNCHRONIZATION
    low, high = (vectors * seconds - shared + hook for seconds in (one.low, one.high))
    return one._replace(low=low, high=high, step=high)


def _used_cores(cores: float, device: torch.device | str) -> float:
    """Return the cores that the work of an exchange uses, which is that of one thread. On a GPU it needs no core."""
    return 1.0 if torch.device(device).type == "cuda" else min(1.0, cores)


def _hiding(overlap: float, used_cores: float) -> float:
    """Return the fraction of the computation that hides a dense all-reduce: none if workers share cores."""
    return overlap if used_cores == 1 else 0.0


def ddp_seconds(numel: int, world_size: int, link: Link, device: torch.device | str, cores: float = 1.0) -> float:
    """Return the seconds of a dense all-reduce by ``DistributedDataParallel``. See :func:`estimates` for ``cores``."""
    if torch.device(device).type == "cuda":
        return exchange_seconds(Packing(Dense()), numel, world_size, link, device)[1]
    return Dense().formula(numel, world_size).seconds(cpu_cost.on_gloo(link, cores))[1]


def warmup_seconds(
    numel: int, world_size: int, link: Link, device: torch.device | str, cores: float = 1.0
) -> float:  # fmt: skip
    """Return the seconds of the exchange in one of the dense steps with which ``wrap`` begins, in 8 bits."""
    on_gpu, link = torch.device(device).type == "cuda", usable(link, device, cores)
    flows = traffic(numel, world_size, bits=BITS["8bit"], phase="dense", collective=on_gpu)
    seconds = math.fsum(flow.sent.messages * link.latency + link.transfer(flow.sent.bytes) for flow in flows.values())
    if on_gpu:
        return seconds + gpu_cost.counts(Dense(), world_size).seconds
    messages = sum(flow.sent.messages for flow in flows.values())
    return seconds + (cpu_cost.EXCHANGE + cpu_cost.MESSAGE * messages + cpu_cost.QUANTIZE * numel) / cores


def rest_of_step(numel: int, device: torch.device | str) -> float:
    """Return the seconds that a sparse step of ``wrap`` with AdamW is longer than a dense one beside its exchange."""
    on_gpu = torch.device(device).type == "cuda"
    return gpu_cost.REST_OF_STEP.seconds if on_gpu else cpu_cost.rest_of_step(numel)


def hook_seconds(buckets: int, device: torch.device | str) -> float:
    """Return the seconds of work of the hook of DDP with so many ``buckets``. On a GPU they are not known."""
    return 0.0 if torch.device(device).type == "cuda" else cpu_cost.hook(buckets)


def recommend(
    numel: int, world_size: int, link: Link, density: float, step_seconds: float = 0.0, *, overlap: float = OVERLAP,
    values: str = "fp32", device: torch.device | str = "cpu", cores: float = 1.0, buckets: int = 0,
    wrapped_dense: bool = False,
) -> Recipe:  # fmt: skip
    """Return the fastest of the trusted methods at ``density``, or dense if that takes nearly the same time.

    The sparse step must take less than 95 % of the dense step. ``static`` is ``"auto"`` unless the exact lengths are
    faster on a GPU, where ``"auto"`` is the static form. See :func:`estimates` for the arguments.
    """
    candidates = estimates(
        numel, world_size, link, step_seconds, densities=(density,), overlap=overlap, values=values, device=device,
        cores=cores, buckets=buckets, wrapped_dense=wrapped_dense,
    )  # fmt: skip
    dense = next(estimate for estimate in candidates if estimate.is_dense)
    trusted = next(estimate for estimate in candidates if estimate.recipe.name in TRUSTED)
    if not trusted.step < WORTH_IT * dense.step:
        return dense.recipe
    chosen = trusted.recipe
    # "auto" is True on a GPU. Unlike True, it is possible inside of a hierarchical exchange.
    return replace(chosen, static="auto") if isinstance(chosen, StaticRecipe) and chosen.static is True else chosen


def at(name: str, density: float, values: str = "fp32") -> Recipe:
    """Return the recipe of the method ``name`` at ``density``. ``values`` applies to methods that send entries."""
    if name == RandomBlock.name:  # advice() prints the note that its warning would give
        return RandomBlock(density=density, reduced_lr=True)
    found = recipe(name, density=density)
    return replace(found, values=values) if isinstance(found, EntryRecipe) else found


def exchange_seconds(
    packing: Packing, numel: int, world_size: int, link: Link, device: torch.device | str, cores: float = 1.0
) -> tuple[float, float]:
    """Return the lowest and the highest seconds of an exchange of ``packing.recipe``.

    They are the seconds on the link, and those on the device: the work of selection and messages on a CPU, and
    synchronizations and launches on a GPU, both with packing. See :func:`estimates` for ``cores``.
    """
    recipe, on_gpu = packing.recipe, torch.device(device).type == "cuda"
    low, high = recipe.formula(numel, world_size).seconds(usable(link, device, cores))
    if on_gpu:
        counts = _counts(recipe, world_size, device)
        more = packing.seconds if counts is None else counts.seconds
        return low + more, high + more
    least, most = cpu_cost.work(recipe, numel, world_size)
    return low + (least + packing.seconds) / cores, high + (most + packing.seconds) / cores


def usable(link: Link, device: torch.device | str, cores: float = 1.0) -> Link:
    """Return what an exchange of tensors on ``device`` can use of ``link``. gloo's bandwidth is limited."""
    return link if torch.device(device).type == "cuda" else cpu_cost.on_gloo(link, cores)


def _forms(method: Recipe, device: torch.device | str) -> list[Recipe]:
    """Return ``method`` in each form that it has on a GPU, the static one first."""
    if torch.device(device).type == "cuda" and isinstance(method, StaticRecipe) and method.can_be_static():
        return [replace(method, static=True), replace(method, static=False)]
    return [method]


def _estimate(
    method: Recipe, numel: int, world_size: int, link: Link, device: torch.device | str, cores: float
) -> Estimate:
    """Return the estimate of ``method`` as it is. Its ``step`` is that of an exchange alone."""
    packing = resolve(method, numel, world_size, device, usable(link, device, cores))
    low, high = exchange_seconds(packing, numel, world_size, link, device, cores)
    return Estimate(packing.recipe, low, high, high, _counts(packing.recipe, world_size, device))


def _counts(recipe: Recipe, world_size: int, device: torch.device | str) -> Counts | None:
    known = torch.device(device).type == "cuda" and gpu_cost.is_known(recipe)
    return gpu_cost.counts(recipe, world_size) if known else None


def advice(
    numel: int, world_size: int, link: Link, step_seconds: float, *, density: float = DEFAULT_DENSITY,
    overlap: float = OVERLAP, values: str = "fp32", device: torch.device | str = "cpu", cores: float = 1.0,
    buckets: int = 0,
) -> str:  # fmt: skip
    """Return the plan as text: the ranking, then the line of code to use or the advice to stay dense.

    The ranking starts with dense and the methods known to train well at ``density``. The other methods follow, and then
    other densities. See :func:`estimates` for the other arguments.
    """
    both = " and ".join(TRUSTED)
    others = [other for other in DENSITIES if other != density]
    ranked = estimates(
        numel, world_size, link, step_seconds, densities=(density, *others), overlap=overlap, values=values,
        device=device, cores=cores, buckets=buckets,
    )  # fmt: skip
    if world_size == 1:
        return "One worker exchanges nothing: use the optimizer without tritoncomm.wrap."
    dense = next(estimate for estimate in ranked if estimate.is_dense)
    on_gpu = torch.device(device).type == "cuda"
    network = f"{link.bandwidth * 8 / 1e9:g} Gbit/s, {link.latency * 1e6:g} us"
    on_device = f"{'form':>8}{'syncs':>7}{'launches':>10}" if on_gpu else ""
    used = _used_cores(cores, device)
    hiding = _hiding(overlap, used)
    further = ", on GPUs" if on_gpu else f", {used:g} core{'s' * (used != 1)} per worker"
    further += f", {buckets} bucket{'s' * (buckets != 1)} of DDP" * (buckets > 0)
    lines = [
        f"{numel:,} parameters, {world_size} workers, {network}{further}",
        f"{'method':16}{'density':>9}{on_device}{'exchange ms':>22}{'step ms':>10}{'of dense':>10}",
    ]
    for title, group in _groups(ranked, dense, density).items():
        lines += ["", f"{title}:", *(_row(e, dense, on_gpu) for e in sorted(group, key=lambda estimate: estimate.step))]
    lines += [
        "",
        "Exchange times come from the papers' cost formulas. Step times use the upper end of a range.",
        f"A dense all-reduce overlaps with {hiding:.0%} of the computation, a sparse exchange with none of it.",
        *(_NOTES_GPU if on_gpu else _NOTES_CPU),
        "",
        f"The first row is the fastest step by these formulas, among dense, {both} at density {_percent(density)}.",
        f"So it may differ from the default of wrap, which is {DEFAULT_ALGO} at density {_percent(DEFAULT_DENSITY)}.",
        "",
        "A faster step is not always faster training. random_k and random_block need a lower learning rate.",
        f"Loss of {both} with AdamW, in the training benchmark: {TRUSTED_LOSS}.",
        "",
    ]
    chosen = recommend(
        numel, world_size, link, density, step_seconds, overlap=overlap, values=values, device=device, cores=cores,
        buckets=buckets,
    )  # fmt: skip
    if isinstance(chosen, Dense):
        lines.append(
            f"Stay dense: at density {_percent(density)}, a step with {' or '.join(TRUSTED)} is not predicted to be "
            f"more than {1 - WORTH_IT:.0%} faster than a dense step."
        )
    else:
        lines += ["Use:", _line_of_code(chosen, values, hooked=buckets > 0)]
        if not chosen.delivers_all():
            step = next(e.step for e in ranked if (e.recipe.name, e.recipe.density) == (chosen.name, chosen.density))
            exchange = warmup_seconds(numel, world_size, link, device, used) + hook_seconds(buckets, device) / used
            lines += ["", dense_start(step_seconds + exchange + rest_of_step(numel, device) / used, step)]
    return "\n".join(lines)


def _groups(ranked: Sequence[Estimate], dense: Estimate, density: float) -> dict[str, list[Estimate]]:
    """Return the groups of rows of the plan, each with its title."""
    trained_well = [e for e in ranked if e.recipe.name in TRUSTED and e.recipe.density == density]
    rest = [e for e in ranked if e.recipe.name not in (*TRUSTED, dense.recipe.name) and e.recipe.density == density]
    at_others = [e for e in ranked if e.recipe.name in TRUSTED and e.recipe.density != density]
    return {
        f"Dense, and the methods known to train well, at density {_percent(density)}": [dense, *trained_well],
        f"Other methods at density {_percent(density)}": rest,
        f"{' and '.join(TRUSTED)} at other densities": at_others,
    }


def _line_of_code(chosen: Recipe, values: str, *, hooked: bool) -> str:
    formats = f", values={values!r}" if isinstance(chosen, EntryRecipe) else ""
    if getattr(chosen, "packed", None) is True:
        formats += ", packed=True"
    if getattr(chosen, "static", "auto") is False:
        formats += ", static=False"
    arguments = f"algo={chosen.name!r}, density={chosen.density}{formats}"
    return f"optimizer = tritoncomm.wrap(optimizer, {'model=model, ' if hooked else ''}{arguments})"


def dense_start(dense: float, sparse: float, *, quantized: bool = True) -> str:
    """Return a sentence on the dense steps at the start of ``wrap``, from the seconds of a dense and a sparse step."""
    seconds = DEFAULT_WARMUP * dense
    return (
        f"The first {DEFAULT_WARMUP} steps are dense{', in 8 bits,' if quantized else ''} and take {seconds:.3g} s, "
        f"as long as {seconds / sparse:.0f} of the others. In a short run on a slow link, pass fewer as warmup_steps."
    )


def _row(estimate: Estimate, dense: Estimate, on_gpu: bool) -> str:
    low, high = estimate.low * 1e3, estimate.high * 1e3
    exchange = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
    density = "" if estimate.is_dense else _percent(estimate.recipe.density)
    ratio = estimate.step / dense.step if dense.step else 1.0
    form = "" if estimate.is_dense else gpu_cost.form(estimate.recipe)
    syncs, launches = ("?", "?") if estimate.counts is None else (f"{count:.0f}" for count in estimate.counts)
    on_device = f"{form:>8}{syncs:>7}{launches:>10}" if on_gpu else ""
    return f"{estimate.recipe.name:16}{density:>9}{on_device}{exchange:>22}{estimate.step * 1e3:10.2f}{ratio:9.2f}x"


def _percent(density: float) -> str:
    return f"{100 * density:.3g}%"
