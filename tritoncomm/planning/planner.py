"""Predict the time of a step with each method on a given network, and say whether a sparse exchange pays.

The prediction of a method is its :meth:`~tritoncomm.algorithms.base.Algorithm.predicted_traffic`, in seconds on a
:class:`~tritoncomm.scheduler.cost.Link`. Nothing is assumed about the machine: the time of selection and packing is
given, as ``doctor`` measures it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from tritoncomm.algorithms import Dense, Quantized, RandomBlock, Recipe, Warmup, algorithms, at_density
from tritoncomm.algorithms.base import EntryRecipe, StaticRecipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.scheduler.cost import Link
from tritoncomm.step.recipes import STATIC_SAVES, static_takes, with_form
from tritoncomm.step.settings import DEFAULT_ALGO, DEFAULT_DENSITY, DEFAULT_START, DEFAULT_WARMUP

DENSITIES = (0.001, 0.01, 0.05)
# The methods that are recommended, because they are known to train well: benchmarks/results/training.json
TRUSTED = ("oktopk", "spardl")
BITS = ("2bit", "4bit")  # further formats of the method whose values alone are compressed
# A sparse step must be predicted to take less than this fraction of a dense step: a margin for what is not counted.
WORTH_IT = 0.95
# The backward pass is about two thirds of a step's computation. Most of it follows the first bucket.
OVERLAP = 0.5
_STAY = "Stay dense: use the optimizer without tritoncomm.wrap."
_ALONE = "One worker exchanges nothing: use the optimizer without tritoncomm.wrap."
# Numbers of at least this size are printed without decimals.
_LARGE = 9.95
_LONG = 1000  # so are seconds that are printed with three digits otherwise


class Estimate(NamedTuple):
    """The predicted seconds of an exchange with ``recipe``, and of a whole training step.

    ``exchange`` is the time on the link alone. ``recipe`` has the form of messages that ``wrap`` would choose. There is
    one exchange for ``local_steps`` steps, and ``step`` is their mean.
    """

    recipe: Recipe
    exchange: float
    step: float
    local_steps: int = 1

    @property
    def is_dense(self) -> bool:
        """Whether the recipe is a plain all-reduce."""
        return isinstance(self.recipe, Dense)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a plan is made for.

    Attributes:
        numel: Number of parameters.
        workers: Number of workers.
        link: Bandwidth and latency of every rank's network interface.
        step: Seconds of computation in one training step, without any exchange.
        work: Seconds of selection, packing and merging in a sparse step, as ``doctor`` measures. None if unknown.
        overlap: Fraction of the computation that hides a dense all-reduce, in [0, 1].
        values: Format of values on the wire, for the methods that send entries.
        device: Device of the gradients. Messages have the form that they have there.

    Raises:
        ConfigurationError: A number is out of range.
    """

    numel: int
    workers: int
    link: Link
    step: float = 0.0
    work: float | None = None
    overlap: float = OVERLAP
    values: str = "fp32"
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if self.numel < 1 or self.workers < 1:
            raise ConfigurationError(
                f"numel and workers must be at least 1, got numel={self.numel}, workers={self.workers}"
            )
        if not (self.step >= 0 and (self.work or 0.0) >= 0 and 0 <= self.overlap <= 1):
            raise ConfigurationError(
                "step and work must be at least 0 and overlap in [0, 1], got "
                f"step={self.step}, work={self.work}, overlap={self.overlap}"
            )

    def estimate(self, method: Recipe, local_steps: int = 1) -> Estimate:
        """Return the estimate of ``method``, with one exchange for ``local_steps`` steps.

        A dense all-reduce overlaps with computation, as in ``DistributedDataParallel``. A sparse exchange starts after
        the backward pass, and a step with it takes ``work`` longer.
        """
        method = with_form(method, self.device, self.numel, self.workers)
        seconds = exchange_seconds(method, self.numel, self.workers, self.link)
        if isinstance(method, Dense):
            return Estimate(method, seconds, self.step + max(0.0, seconds - self.overlap * self.step))
        return Estimate(method, seconds, self.step + (seconds + (self.work or 0.0)) / local_steps, local_steps)

    def at(self, name: str, density: float) -> Recipe:
        """Return the recipe of the method ``name``."""
        return at(name, density, self.values)

    def best(self, density: float) -> Estimate:
        """Return the estimate of the fastest of the trusted methods at ``density``.

        It is the default method if no other one is faster by as much as is worth a change.
        """
        found = {name: self.estimate(self.at(name, density)) for name in TRUSTED}
        fastest = min(found.values(), key=lambda estimate: estimate.step)
        default = found[DEFAULT_ALGO]
        return fastest if fastest.step < WORTH_IT * default.step else default


def exchange_seconds(method: Recipe, numel: int, workers: int, link: Link) -> float:
    """Return the seconds of an ordinary exchange of ``method`` on ``link``."""
    return method.build(numel).predicted_traffic(workers, ordinary=True).seconds(link)


def at(name: str, density: float, values: str = "fp32") -> Recipe:
    """Return the recipe of the method ``name`` at ``density``. ``values`` applies to methods that send entries."""
    if name == RandomBlock.name:  # a plan needs no warning about the learning rate
        return RandomBlock(density=density, reduced_lr=True)
    found = at_density(name, density)
    return replace(found, values=values) if isinstance(found, EntryRecipe) else found


def advice(setting: Setting, density: float = DEFAULT_DENSITY, *, everything: bool = False) -> str:
    """Return the plan as text: whether a sparse exchange pays, a table, and the line of code to use.

    The table has dense and the methods known to train well. ``everything`` adds the other methods, and other densities.
    """
    if setting.workers == 1:
        return _ALONE
    dense, best = setting.estimate(Dense()), setting.best(density)
    code = [_line_of_code(best.recipe, setting.values)]
    if not best.recipe.delivers_all():
        code.append(dense_start(setting, best.recipe))
    code += form_advice(setting, best.recipe)
    lines = [_answer(setting, dense, best), "", *_table(setting, density, dense, everything=everything)]
    return _plan(setting, dense, best, lines, code)


def advice_on_updates(setting: Setting, local_steps: int) -> str:
    """Return the plan as text for an optimizer whose updates are exchanged, once for ``local_steps`` of its steps.

    The table has dense, and other numbers of local steps.
    """
    if setting.workers == 1:
        return _ALONE
    method, dense = Quantized(values=setting.values), setting.estimate(Dense())
    rows = [setting.estimate(method, steps) for steps in sorted({1, 4, 16, local_steps})]
    best = setting.estimate(method, local_steps)
    lines = [_answer(setting, dense, best, "Updates pay", "updates"), "", _network(setting)]
    lines.append(f"{'method':16}{'local steps':>13}{'exchange ms':>14}{'step ms':>12}{'of dense':>10}")
    lines += [
        f"{each.recipe.name:16}{each.local_steps:13}{_times(each, dense)}"
        for each in sorted([dense, *rows], key=lambda found: found.step)
    ]
    arguments = [f"local_steps={local_steps}"] if local_steps > 1 else []
    if method != Quantized():
        arguments.append(f"updates=tritoncomm.Updates(algo=tritoncomm.Quantized(values={method.values!r}))")
    code = f"optimizer = tritoncomm.wrap(optimizer, {', '.join(arguments) or 'updates=True'})"
    return _plan(setting, dense, best, lines, [code])


def _plan(setting: Setting, dense: Estimate, best: Estimate, lines: list[str], code: list[str]) -> str:
    """Return ``lines``, what they do not count, and ``code`` if ``best`` is worth it."""
    lines = [*lines, ""]
    if setting.work is None:
        lines += _not_counted(dense, best)
    return "\n".join(lines + (code if best.step < WORTH_IT * dense.step else [_STAY]))


def _answer(
    setting: Setting, dense: Estimate, best: Estimate, pays: str = "Sparse pays", what: str = "a sparse exchange"
) -> str:
    """Return the sentence with which a plan begins."""
    condition = ""
    if setting.step:
        share = f"{setting.overlap:.0%} of the" if setting.overlap else "no"
        condition = f", if {share} computation hides a dense all-reduce"
    sparse, plain = _seconds(best.step, dense.step)
    work = ", without the work of selecting," if setting.work is None else ""
    if best.step < WORTH_IT * dense.step:
        return f"{pays}: {sparse} a step{work} instead of {plain.split()[0]}{condition}."
    if best.step < dense.step:
        return f"{pays.replace(' ', ' hardly ')}: {sparse} a step{work} instead of {plain.split()[0]}{condition}."
    return f"Dense is faster here: {plain} a step, and {sparse.split()[0]} with {what}{condition}."


def _not_counted(dense: Estimate, best: Estimate) -> list[str]:
    lines = ["Not counted: the time of selection and packing. Measure it with doctor, and pass it as --work-ms."]
    room = best.local_steps * (WORTH_IT * dense.step - best.step)
    if room > 0:
        lines.append(f"Sparse pays if it is below {_seconds(room)[0]} an exchange.")
    return [*lines, ""]


def _table(setting: Setting, density: float, dense: Estimate, *, everything: bool) -> list[str]:
    """Return the rows of the plan. Those of dense and the trusted methods come first."""
    first = [dense, *(setting.estimate(setting.at(name, density)) for name in TRUSTED)]
    groups = [first]
    if everything:
        others = [name for name in algorithms() if name not in (*TRUSTED, Dense.name)]
        found = [setting.at(name, density) for name in others]
        groups.append([setting.estimate(each) for each in (*found, *(Quantized(values=values) for values in BITS))])
        densities = [other for other in DENSITIES if other != density]
        groups.append([setting.estimate(setting.at(name, other)) for name in TRUSTED for other in densities])
    lines = [
        _network(setting),
        f"{'method':16}{'density':>9}{'exchange ms':>14}{'step ms':>12}{'of dense':>10}",
    ]
    for group in groups:
        lines += [_row(each, dense) for each in sorted(group, key=lambda found: found.step)]
    last = "Some of the other methods need a lower learning rate: random_block does."
    return [*lines, last if everything else "Other methods and densities: --all"]


def _row(estimate: Estimate, dense: Estimate) -> str:
    method = estimate.recipe
    density = "" if estimate.is_dense else f"{100 * method.density:.3g}%"
    if isinstance(method, Quantized):
        density = method.values
    return f"{method.name:16}{density:>9}{_times(estimate, dense)}"


def _times(estimate: Estimate, dense: Estimate) -> str:
    ratio = estimate.step / dense.step if dense.step else 1.0
    return f"{_column(1e3 * estimate.exchange, 14)}{_column(1e3 * estimate.step, 12)}{_column(ratio, 9)}x"


def _column(number: float, width: int) -> str:
    """Return ``number`` in a column of ``width`` characters, with a power of ten if it is too long with decimals."""
    text = f"{number:.2f}"
    return f"{text if len(text) < width else f'{number:.2e}':>{width}}"


def _network(setting: Setting) -> str:
    return f"{setting.numel:,} parameters, {setting.workers:,} workers, {setting.link.readable()}"


def _line_of_code(chosen: Recipe, values: str) -> str:
    formats = f", values={values!r}" if isinstance(chosen, EntryRecipe) else ""
    return f"optimizer = tritoncomm.wrap(optimizer, algo={chosen.name!r}, density={chosen.density}{formats})"


def form_advice(setting: Setting, chosen: Recipe) -> list[str]:
    """Return a sentence if messages of a fixed length, the default on GPUs, take longer on the link than they save."""
    if not isinstance(chosen, StaticRecipe) or not chosen.can_be_static():
        return []
    more = static_takes(chosen, setting.numel, setting.workers, setting.link)
    if more <= STATIC_SAVES:
        return []
    longer, saved = _seconds(more)[0], _seconds(STATIC_SAVES)[0]
    return [f"On GPUs, add static=False: messages of a fixed length take {longer} longer here, and save about {saved}."]


def dense_start(setting: Setting, chosen: Recipe) -> str:
    """Return a sentence on the dense steps with which ``wrap`` begins before it uses ``chosen``."""
    quantized = chosen.averages_when_dense
    warmup = Warmup(recipe=chosen, steps=DEFAULT_WARMUP, values=DEFAULT_START if quantized else "fp32")
    exchange = warmup.build(setting.numel).predicted_traffic(setting.workers).seconds(setting.link)
    seconds = DEFAULT_WARMUP * (setting.step + (setting.work or 0.0) + exchange)
    bits = f", in {DEFAULT_START[0]} bits," if quantized else ""
    takes = f"{seconds:.3g}" if seconds < _LONG else f"{seconds:,.0f}"
    return (
        f"The first {DEFAULT_WARMUP} steps are dense{bits} and take {takes} s, "
        f"as long as {seconds / setting.estimate(chosen).step:.0f} of the others. In a short run on a slow link, pass "
        "fewer as warmup_steps."
    )


def _seconds(*times: float) -> list[str]:
    """Return ``times`` as texts with two digits or more, in seconds if one of them is at least a second, else in ms."""
    unit, scale = ("s", 1.0) if max(times) >= 1 else ("ms", 1e3)
    return [f"{scale * time:{',.0f' if scale * time >= _LARGE else '#.2g'}} {unit}" for time in times]
