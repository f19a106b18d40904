"""The contenders of ``race.py``: dense DDP, its compressing hooks, DiLoCo, and ours. All train with AdamW or Muon."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import tritoncomm
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from tritoncomm.algorithms import field_names
from tritoncomm.demo import train as demo_run
from tritoncomm.step.optimizer_list import OptimizerList

OPTIMIZERS = ("adamw", "muon")
RIVALS = ("dense", "fp16", "powersgd", "diloco")
ONE_BUCKET = 1e6  # megabytes
DILOCO_STEPS = 30


@dataclass(frozen=True)
class Contender:
    """A method and its settings. The text ``"oktopk:density=0.03,values=4bit"`` describes one."""

    name: str
    settings: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Contender:
        """Return what ``text`` describes. Raises :class:`ValueError` for a malformed text."""
        name, _, rest = text.partition(":")
        settings = []
        for part in rest.split(",") if rest else []:
            key, equals, value = part.partition("=")
            if not (key and equals and value):
                raise ValueError(f"{text!r} is not a contender: write NAME or NAME:KEY=VALUE,KEY=VALUE")
            settings.append((key, _literal(value)))
        if name not in (*RIVALS, *tritoncomm.algorithms()):
            raise ValueError(f"{name!r} is no contender: choose from {', '.join([*RIVALS, *tritoncomm.algorithms()])}")
        found = cls(name, tuple(settings))
        if found.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={found.optimizer} is unknown: choose from {', '.join(OPTIMIZERS)}")
        return found

    def get(self, key: str, otherwise: Any) -> Any:
        """Return the setting ``key``."""
        return dict(self.settings).get(key, otherwise)

    @property
    def is_ours(self) -> bool:
        """Whether it is a method of this library."""
        return self.name not in RIVALS

    @property
    def optimizer(self) -> str:
        """The optimizer, one of :data:`OPTIMIZERS`."""
        return str(self.get("optimizer", "adamw"))

    @property
    def local_steps(self) -> int:
        """The number of steps between two exchanges."""
        return int(self.get("steps", DILOCO_STEPS) if self.name == "diloco" else self.get("local_steps", 1))

    @property
    def exchanges_updates(self) -> bool:
        """Whether it is a method of this library that exchanges what steps have changed."""
        return self.is_ours and (self.local_steps > 1 or self.optimizer == "muon")

    def warmup(self, steps: int) -> int:
        """Return the number of first steps of ``steps`` that averages leave out: the dense ones.

        There are none where updates travel, nor where ``wrap`` has none by default: all gradients travel in few bits.
        """
        if self.local_steps > 1 or self.exchanges_updates or self.name == "quantized":
            return 0
        return int(self.get("warmup_steps", int(steps * demo_run.WARMUP_SHARE)))


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def new_optimizer(model: nn.Module, contender: Contender) -> Any:
    """Return the optimizer of ``contender`` for ``model``, or a list of several."""
    return demo_run.optimizers(contender.optimizer, model)


def one(optimizers: Any) -> torch.optim.Optimizer:
    """Return one optimizer that stands for all of ``optimizers``."""
    return OptimizerList(optimizers) if isinstance(optimizers, list) else optimizers


Trained = tuple[nn.Module, torch.optim.Optimizer]


def trained(plain: nn.Module, contender: Contender, warmup: int) -> Trained:
    """Return ``plain`` and its optimizer, as ``contender`` trains them.

    Methods with dense steps at the start take ``warmup`` of them.
    """
    if contender.is_ours:
        return plain, _wrapped(plain, contender, warmup)
    optimizer = one(new_optimizer(plain, contender))
    if contender.name == "diloco":
        DiLoCo(plain, contender.local_steps).watch(optimizer)
        return plain, optimizer
    return _in_ddp(plain, contender, warmup), optimizer


def _in_ddp(plain: nn.Module, contender: Contender, warmup: int) -> nn.Module:
    """Return ``plain`` in DDP: without a hook, with torch's for fp16, or with its PowerSGD of ``rank``.

    The all-reduces of PowerSGD start each other in callbacks. With several buckets on gloo, they start in another order
    on each rank: four workers waited forever, two aborted. It therefore has one bucket.
    """
    powersgd = contender.name == "powersgd"
    model = DistributedDataParallel(plain, bucket_cap_mb=ONE_BUCKET if powersgd else None)
    if powersgd:
        state = powerSGD_hook.PowerSGDState(
            None, contender.get("rank", 1), start_powerSGD_iter=max(2, warmup), min_compression_rate=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif contender.name == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model


class DiLoCo:
    """DiLoCo: each rank trains alone for ``every`` steps. The mean change is then an outer step, as in the paper."""

    def __init__(self, model: nn.Module, every: int) -> None:
        self._own, self._every, self._steps = list(model.parameters()), every, 0
        self._anchor = [parameter.detach().clone() for parameter in self._own]
        self._outer = torch.optim.SGD(self._anchor, lr=0.7, momentum=0.9, nesterov=True)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchange after every ``every``-th step of ``optimizer``."""
        optimizer.register_step_post_hook(lambda *_: self._after_step())

    @torch.no_grad()
    def _after_step(self) -> None:
        self._steps += 1
        if self._steps % self._every:
            return
        change = torch.cat([(a - x).reshape(-1) for a, x in zip(self._anchor, self._own, strict=True)])
        dist.all_reduce(change)
        change /= dist.get_world_size()
        for anchor, part in zip(self._anchor, change.split([a.numel() for a in self._anchor]), strict=True):
            anchor.grad = part.view_as(anchor)
        self._outer.step()
        for parameter, anchor in zip(self._own, self._anchor, strict=True):
            parameter.copy_(anchor)


def _wrapped(plain: nn.Module, contender: Contender, warmup: int) -> torch.optim.Optimizer:
    """Return a wrapped optimizer. Where updates travel, the method and its fields are for them."""
    arguments = {key: value for key, value in contender.settings if key != "optimizer"}
    if contender.exchanges_updates:
        fields = {key: arguments.pop(key) for key in field_names(contender.name) if key in arguments}
        arguments["updates"] = tritoncomm.Updates(algo=tritoncomm.recipe(contender.name, **fields))
    else:
        arguments |= {"algo": contender.name, "warmup_steps": warmup}
    return tritoncomm.wrap(new_optimizer(plain, contender), **arguments)
