"""``packed="auto"``: whether messages with unrounded values are packed, and how long packing takes.

Packing saves bytes on the link, and takes time at both ends: on a CPU for each section and entry, on a GPU for the
synchronizations and launches that plain messages do not need. The device decides where the link is not known: a GPU
packs, a CPU does not. Where it is known, messages are packed if that saves more time than it takes. All inputs of the
decision are equal on all ranks, and so is the decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from tritoncomm.algorithms import Hierarchical, Recipe
from tritoncomm.algorithms.base import IndexRecipe, StaticRecipe
from tritoncomm.scheduler import cost
from tritoncomm.scheduler.cost import Flow, Link, Traffic
from tritoncomm.step import gpu_cost


class Speed(NamedTuple):
    """Seconds to write or read packed sections: ``section`` for each section, and ``entry`` for each entry."""

    section: float
    entry: float


class Coding(NamedTuple):
    """The speed of writing and of reading."""

    write: Speed
    read: Speed


# One core: benchmarks/results/sections.json
_CPU = Coding(Speed(15e-6, 4e-9), Speed(17e-6, 4e-9))
_CPU_ROUNDED = Coding(Speed(35e-6, 6e-9), Speed(21e-6, 5e-9))
# In these phases a rank writes its entries once, for all ranks. In others it writes as many as it reads.
_GATHERS = ("all-gather", "indices", "broadcast")


@dataclass(frozen=True)
class Packing:
    """Whether the messages of one vector are packed in an ordinary step.

    Attributes:
        recipe: The recipe, in which the decision is made.
        packed: Whether messages are packed.
        link: The link that is known, or None.
        saved: Bytes that packing and rounding save per step, or would save.
        coding: Seconds per step that packing takes, or would take, at both ends together. On a GPU it can be 0, where
            packed messages take no more synchronizations and launches than plain ones.
    """

    recipe: Recipe
    packed: bool = False
    link: Link | None = None
    saved: float = 0.0
    coding: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds per step that packing takes. 0 for plain messages."""
        return self.coding if self.packed else 0.0


def resolve(
    recipe: Recipe, numel: int, world_size: int, device: torch.device | str, link: Link | None = None
) -> Packing:
    """Return ``recipe`` with ``packed`` and ``static`` resolved for vectors of ``numel`` elements on ``device``.

    On a GPU, ``static="auto"`` is True if the method has the static form, whatever the link, unless the exchange is
    hierarchical. Rounded values are always packed, and ``packed=True`` and ``packed=False`` stay as they are. A link in
    ``packed`` has precedence over ``link``. A single worker sends nothing, so nothing is resolved.
    """
    method, on_gpu = recipe.layers[-1], torch.device(device).type == "cuda"
    is_hierarchical = any(isinstance(layer, Hierarchical) for layer in recipe.layers)
    if isinstance(method, StaticRecipe) and on_gpu and method.static == "auto" and not is_hierarchical:
        recipe = _with(recipe, static=method.can_be_static())
    if not isinstance(method, IndexRecipe) or world_size == 1 or numel == 0:
        return Packing(recipe)
    is_open = method.packs_by_link and not method.encoding.packed
    link = method.known_link or link
    packed = _with(recipe, packed=True) if is_open else recipe
    kept = _with(recipe, packed=False) if is_open else recipe
    plain = unpacked(recipe)
    flows = _changed(plain, packed, numel, world_size)
    if on_gpu:
        coding = _launching(plain, packed, world_size) if flows else 0.0
    else:
        words = 2 if hasattr(method, "values") else 1
        coding = _coding(flows, words, world_size, _CPU_ROUNDED if method.encoding.rounds else _CPU)
    saved = sum(_busier(before).bytes - _busier(after).bytes for before, after in flows.values())
    packs = bool(method.encoding.packed)
    if is_open:
        packs = on_gpu if link is None else link.transfer(saved) > coding
    return Packing(packed if packs else kept, packs and bool(flows), link if is_open else None, saved, coding)


def describe(packings: Sequence[Packing]) -> str:
    """Return in a few words how the messages of all vectors travel, and why. Empty if no vector has a choice."""
    found = [packing for packing in packings if packing.coding or packing.saved]
    if not found:
        return ""
    packed = [packing for packing in found if packing.packed]
    coding = sum(packing.coding for packing in found)
    saved, link = sum(packing.saved for packing in found), found[0].link
    how = "packed" if len(packed) == len(found) else "plain"
    if 0 < len(packed) < len(found):
        how = f"packed for {len(packed)} of {len(found)} vectors"
    text = f"messages are {how}"
    if link is not None:
        would = "" if packed else "would "
        return (
            f"{text}: packing {would}save{'' if would else 's'} {1e3 * link.transfer(saved):.3g} ms on this link and "
            f"{would}take{'' if would else 's'} {1e3 * coding:.3g} ms"
        )
    if packed:
        return f"{text}, which takes {1e3 * coding:.3g} ms" if coding else text
    return f"{text}: packing pays on links below {8e-9 * saved / coding:.2g} Gbit/s, and the link is not known"


def unpacked(recipe: Recipe) -> Recipe:
    """Return ``recipe`` with plain messages and values that are not rounded."""
    method = recipe.layers[-1]
    if not isinstance(method, IndexRecipe):
        return _with(recipe, values="fp32") if hasattr(method, "values") else recipe
    return _with(recipe, packed=False, **({"values": "fp32"} if hasattr(method, "values") else {}))


def rounds(recipe: Recipe) -> bool:
    """Return True if values are rounded on the wire, at least in some steps."""
    return any(getattr(layer, "values", "fp32") != "fp32" for layer in recipe.layers)


def _with(recipe: Recipe, **fields: Any) -> Recipe:
    """Return ``recipe`` with other ``fields`` of its method."""
    return recipe.with_method(lambda method: replace(method, **fields))


def _changed(plain: Recipe, packed: Recipe, numel: int, world_size: int) -> dict[str, tuple[Flow, Flow]]:
    """Return the traffic of each phase that differs, before and after packing."""
    before, after = (each.build(numel).ordinary_traffic(world_size).phases for each in (plain, packed))
    return {phase: (flow, after[phase]) for phase, flow in before.items() if after[phase] != flow}


def _coding(flows: Mapping[str, tuple[Flow, Flow]], words: int, world_size: int, coding: Coding) -> float:
    """Return the seconds to write and read the entries of ``flows``, each of ``words`` words in plain messages.

    In each phase there is a section for every peer.
    """
    seconds, peers = 0.0, world_size - 1
    for phase, (plain, _) in flows.items():
        traffic = _busier(plain)
        entries = (traffic.bytes / cost.WORD - cost.HEADER_WORDS * traffic.messages) / words
        copies = peers if phase in _GATHERS else 1
        seconds += peers * coding.read.section + entries * coding.read.entry
        seconds += (peers * coding.write.section + entries * coding.write.entry) / copies
    return seconds


def _launching(plain: Recipe, packed: Recipe, world_size: int) -> float:
    """Return the seconds that packing adds on a GPU. They are 0 for a method whose counts are not known."""
    if not (gpu_cost.is_known(plain) and gpu_cost.is_known(packed)):
        return 0.0
    more = gpu_cost.counts(packed, world_size).seconds - gpu_cost.counts(plain, world_size).seconds
    return max(0.0, more)


def _busier(flow: Flow) -> Traffic:
    return max(flow, key=lambda traffic: traffic.bytes)
