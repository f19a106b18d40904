"""The contenders of ``race.py``: dense DDP, its compressing hooks, DiLoCo, and ours. All train with AdamW or Muon."""

from __future__ import annotations

import ast
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import tritoncomm
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from tritoncomm.algorithms import field_names
from tritoncomm.demo import train as demo_run
from tritoncomm.demo.model import ByteGPT
from tritoncomm.step.optimizer_list import OptimizerList

DOORS = ("wrap", "ddp", "fsdp")
REPLICAS = 2  # of fsdp
OPTIMIZERS = ("adamw", "muon")
ONE_BUCKET = 1e6  # megabytes
Optimizers = torch.optim.Optimizer | list[torch.optim.Optimizer]
NewOptimizer = Callable[[nn.Module], Optimizers]


@dataclass(frozen=True)
class Contender:
    """A method and its settings. The text ``"oktopk:door=ddp,density=0.03"`` describes one."""

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
        door = found.get("door", "wrap")
        if door not in DOORS:
            raise ValueError(f"door={door} is unknown: choose from {', '.join(DOORS)}")
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

    @property
    def period(self) -> int:
        """The number of steps after which the work of steps repeats, as far as it does not depend on the data."""
        return self.local_steps


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


class Watch:
    """Notes when backward has computed the last gradient of a step."""

    def __init__(self, model: nn.Module) -> None:
        self.last = 0.0
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, _: torch.Tensor) -> None:
        self.last = time.perf_counter()


class Trained:
    """A model that one contender trains: here dense, by ``DistributedDataParallel`` with or without a hook.

    ``hidden`` is the share of the seconds of exchange that backward did not wait for, over all steps so far. ``parts``
    splits the last step, whose times are those of its start, the return of ``backward()`` and its end. The buckets are
    those of torch by default, whose first one is small.
    """

    def __init__(self, plain: nn.Module, optimizer: NewOptimizer, bucket_megabytes: float | None = None) -> None:
        self._watch = Watch(plain)
        self.model: nn.Module = DistributedDataParallel(plain, bucket_cap_mb=bucket_megabytes)
        self.optimizer = one(optimizer(plain))

    def parts(self, began: float, returned: float, ended: float) -> dict[str, float]:
        """Return the seconds of the last step by part."""
        computed = min(max(self._watch.last, began), returned)
        return {
            "compute": computed - began, "select": 0.0, "exchange": returned - computed, "apply": ended - returned,
        }  # fmt: skip

    @property
    def hidden(self) -> float | None:
        """See the class. DDP's own timers measure it. None if there was nothing to hide."""
        timers = self.model._get_ddp_logging_data()  # noqa: SLF001 - DDP has no public timers
        busy = timers.get("avg_backward_comm_time", 0)
        return timers["avg_backward_compute_comm_overlap_time"] / busy if busy else None

    @contextlib.contextmanager
    def evaluated(self) -> Iterator[nn.Module]:
        """Context in which the model has the parameters that all ranks agree on."""
        yield self.model

    def finish(self) -> None:
        """Exchange what is left after the last step of a run."""


def one(optimizers: Optimizers) -> torch.optim.Optimizer:
    """Return one optimizer that stands for all of ``optimizers``."""
    return OptimizerList(optimizers) if isinstance(optimizers, list) else optimizers


def dense(plain: ByteGPT, optimizer: NewOptimizer, contender: Contender, _: int) -> Trained:
    """Train with DDP and no hook. ``bucket_mb`` is the size of its buckets."""
    trained = Trained(plain, optimizer, contender.get("bucket_mb", None))
    trained.model._set_ddp_runtime_logging_sample_rate(1)  # noqa: SLF001 - DDP has no public timers
    return trained


def fp16(plain: ByteGPT, optimizer: NewOptimizer, contender: Contender, warmup: int) -> Trained:
    """Train with torch's hook that sends gradients in fp16."""
    trained = dense(plain, optimizer, contender, warmup)
    trained.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return trained


def powersgd(plain: ByteGPT, optimizer: NewOptimizer, contender: Contender, warmup: int) -> Trained:
    """Train with torch's PowerSGD hook of ``rank``, after ``warmup`` dense steps.

    Its all-reduces start each other in callbacks. With several buckets on gloo, they start in another order on each
    rank: four workers waited forever, two aborted. The default is therefore one bucket.
    """
    megabytes = contender.get("bucket_mb", ONE_BUCKET)
    trained = dense(plain, optimizer, Contender("dense", (("bucket_mb", megabytes),)), warmup)
    state = powerSGD_hook.PowerSGDState(
        None, contender.get("rank", 1), start_powerSGD_iter=max(2, warmup), min_compression_rate=2
    )
    trained.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return trained


DILOCO_STEPS = 30


class DiLoCo(Trained):
    """DiLoCo: each rank trains alone for ``steps`` steps. The mean change is then an outer step with Nesterov momentum.

    The defaults are those of the paper: an outer rate ``lr`` of 0.7, and ``momentum`` of 0.9. With ``lr=1,momentum=0``
    it averages the parameters. The optimizer's state stays local.
    """

    def __init__(self, plain: ByteGPT, optimizer: NewOptimizer, contender: Contender, warmup: int) -> None:
        self.model = plain
        self.optimizer = one(optimizer(plain))
        self._every = contender.local_steps
        self._anchor = [parameter.detach().clone() for parameter in plain.parameters()]
        momentum = contender.get("momentum", 0.9)
        self._outer = torch.optim.SGD(
            self._anchor, lr=contender.get("lr", 0.7), momentum=momentum, nesterov=momentum > 0
        )
        self._steps, self._waited = 0, 0.0
        self.optimizer.register_step_post_hook(lambda *_: self._after_step())

    def _after_step(self) -> None:
        self._steps += 1
        self._waited = 0.0
        if self._steps % self._every == 0:
            self._merge()

    @torch.no_grad()
    def _merge(self) -> None:
        own = list(self.model.parameters())
        change = torch.cat([(a - x).reshape(-1) for a, x in zip(self._anchor, own, strict=True)])
        started = time.perf_counter()
        dist.all_reduce(change)
        self._waited = time.perf_counter() - started
        change /= dist.get_world_size()
        for anchor, part in zip(self._anchor, change.split([a.numel() for a in self._anchor]), strict=True):
            anchor.grad = part.view_as(anchor)
        self._outer.step()
        for parameter, anchor in zip(own, self._anchor, strict=True):
            parameter.copy_(anchor)

    def parts(self, began: float, returned: float, ended: float) -> dict[str, float]:
        """See :class:`Trained`."""
        return {
            "compute": returned - began, "select": 0.0, "exchange": self._waited,
            "apply": ended - returned - self._waited,
        }  # fmt: skip

    @property
    def hidden(self) -> float | None:
        """Nothing is hidden."""
        return 0.0

    @contextlib.contextmanager
    def evaluated(self) -> Iterator[nn.Module]:
        """Context in which the model has the parameters of the last merge."""
        own = [parameter.detach().clone() for parameter in self.model.parameters()]
        with torch.no_grad():
            for parameter, anchor in zip(self.model.parameters(), self._anchor, strict=True):
                parameter.copy_(anchor)
            yield self.model
            for parameter, saved in zip(self.model.parameters(), own, strict=True):
                parameter.copy_(saved)


def opened(door: str, model: ByteGPT, world_size: int, options: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Return ``model`` in the kind of module that ``door`` names, and the arguments of ``wrap`` for it.

    With ``"fsdp"`` there are two replicas, each sharded over half of the workers.
    """
    if door == "ddp":
        ddp = DistributedDataParallel(model)
        return ddp, options | {"model": ddp}
    if door == "fsdp":
        mesh = init_device_mesh("cpu", (REPLICAS, world_size // REPLICAS), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        return model, options | {"model": model, "process_group": mesh["replicate"].get_group()}
    return model, options


class Wrapped(Trained):
    """Train with a wrapped optimizer and the kind of module that ``door`` names. ``step()`` exchanges.

    Where updates travel, the method and its fields are for them.
    """

    def __init__(self, plain: ByteGPT, optimizer: NewOptimizer, contender: Contender, warmup: int) -> None:
        self.model, arguments = opened(contender.get("door", "wrap"), plain, dist.get_world_size(), {})
        arguments |= {key: value for key, value in contender.settings if key not in ("door", "optimizer", "rate")}
        if contender.exchanges_updates:
            fields = {key: arguments.pop(key) for key in field_names(contender.name) if key in arguments}
            outer = {key: arguments.pop(key) for key in ("outer_lr", "outer_momentum") if key in arguments}
            arguments["updates"] = tritoncomm.Updates(algo=tritoncomm.recipe(contender.name, **fields), **outer)
        else:
            arguments |= {"algo": contender.name, "warmup_steps": warmup}
        self.optimizer: Any = tritoncomm.wrap(optimizer(plain), **arguments)
        self._every, self._steps = contender.local_steps, 0

    def parts(self, began: float, returned: float, ended: float) -> dict[str, float]:
        """See :class:`Trained`."""
        metrics = self.optimizer.metrics()
        self._steps += 1
        exchanged = self._steps % self._every == 0  # else the metrics are of an earlier step
        select, exchange = (metrics[name] if exchanged else 0.0 for name in ("seconds_select", "seconds_exchange"))
        return {
            "compute": returned - began, "select": select, "exchange": exchange,
            "apply": max(0.0, ended - returned - select - exchange),
        }  # fmt: skip

    @property
    def hidden(self) -> float | None:
        """Nothing is hidden: the exchange follows backward."""
        return 0.0

    @contextlib.contextmanager
    def evaluated(self) -> Iterator[nn.Module]:
        """See :class:`Trained`."""
        with self.optimizer.averaged():
            yield self.model

    def finish(self) -> None:
        """See :class:`Trained`."""
        if self._steps % self._every:
            self.optimizer.merge()


RIVALS: dict[str, Callable[..., Trained]] = {"dense": dense, "fp16": fp16, "powersgd": powersgd, "diloco": DiLoCo}


def trained(plain: ByteGPT, optimizer: NewOptimizer, contender: Contender, warmup: int) -> Trained:
    """Return ``plain`` and the optimizer that ``optimizer(model)`` makes, as ``contender`` trains them.

    Methods with dense steps at the start take ``warmup`` of them.
    """
    if not contender.is_ours:
        return RIVALS[contender.name](plain, optimizer, contender, warmup)
    return Wrapped(plain, optimizer, contender, warmup)
