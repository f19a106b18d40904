"""Two training runs, dense and sparse, that differ only in the exchange of gradients."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tritoncomm
from tritoncomm.algorithms import field_names, takes_density
from tritoncomm.demo.local_workers import Send
from tritoncomm.demo.model import ByteGPT, Shape
from tritoncomm.demo.text import Text, batch, standard_library, validation_batches
from tritoncomm.step.settings import DEFAULT_DENSITY, DEFAULT_SMALL, DEFAULT_VALUES

ROWS = 8
LEARNING_RATE = 1e-3  # of AdamW, whose other options are PyTorch's defaults
MUON_RATE, RATE_BESIDE_MUON = 0.02, 2e-3  # of --optimizer muon, for matrices in blocks and for the other parameters
LEARNING_RATE_WARMUP_SHARE = 0.1  # fraction of the steps; linear, in both runs
VALIDATIONS = 10  # evaluations of the validation loss per run
VALIDATION_BATCHES, VALIDATION_ROWS = 32, 32
# The first steps change every coordinate, and the thresholds with them. A few dense steps at the start pay off.
WARMUP_SHARE = 0.02


@dataclass(frozen=True)
class Settings:
    """Settings from the command line."""

    algo: str = "oktopk"
    density: float = DEFAULT_DENSITY
    values: str = DEFAULT_VALUES
    workers: int = 4
    steps: int = 300
    seed: int = 0
    small: str = DEFAULT_SMALL
    optimizer: str = "adamw"
    local_steps: int = 1

    @property
    def warmup(self) -> int:
        """Number of dense steps at the start of the sparse run. An exchange of updates alone has none."""
        return 0 if self.exchanges_updates else int(self.steps * WARMUP_SHARE)

    @property
    def label(self) -> str:
        """A short name of the second run."""
        if self.local_steps > 1:
            return f"{self.local_steps} local steps"
        if self.exchanges_updates:
            return "updates"
        return self.algo if self.algo != "dense" else "dense, again"

    @property
    def described(self) -> str:
        """What the second run exchanges."""
        if self.local_steps > 1:
            return f"{self.optimizer}, updates of {self.local_steps} local steps"
        if self.exchanges_updates:
            return "muon and adamw, updates"
        values = "" if self.values == "fp32" else f" with {self.values} values"
        density = f" at density {self.density:.3%}" if takes_density(self.algo) and self.algo != "dense" else ""
        return f"{self.algo}{density}{values}"

    @property
    def exchanges_updates(self) -> bool:
        """Whether the second run exchanges updates, by their default method."""
        return self.local_steps > 1 or self.optimizer == "muon"

    @property
    def lr_warmup(self) -> int:
        """Number of steps of learning-rate warm-up, in both runs."""
        return max(1, int(self.steps * LEARNING_RATE_WARMUP_SHARE))


@dataclass(frozen=True)
class Progress:
    """Rank 0's report after each step. ``bytes_sent`` is the total of the run so far."""

    method: str
    step: int
    loss: float
    bytes_sent: float


@dataclass
class Run:
    """The result of one run.

    Lists have one entry per step, except ``densities``, which has one per exchange, and ``validations``, which holds
    pairs of step and loss. Losses are in nats per byte. ``bytes_sent`` is cumulative. Losses and bytes are means over
    the workers.
    """

    method: str
    numel: int
    losses: list[float] = field(default_factory=list)
    bytes_sent: list[float] = field(default_factory=list)
    densities: list[float] = field(default_factory=list)
    validations: list[tuple[int, float]] = field(default_factory=list)
    seconds_exchange: float = 0.0
    seconds: float = 0.0


def compare(rank: int, world_size: int, send: Send, settings: Settings) -> list[Run]:
    """Train with dense exchange, then with the chosen method, as one of ``world_size`` workers. Return both runs."""
    text = standard_library()
    dense = _train("dense", rank, world_size, send, settings, text, {"algo": "dense", "updates": False})
    chosen = {
        "algo": settings.algo,
        **({"density": settings.density} if takes_density(settings.algo) else {}),
        **({"values": settings.values} if "values" in field_names(settings.algo) else {}),
        "warmup_steps": settings.warmup,
        "small": settings.small,
    }
    if settings.exchanges_updates:
        chosen = {"local_steps": settings.local_steps}
    return [dense, _train(settings.label, rank, world_size, send, settings, text, chosen)]


def _train(
    label: str, rank: int, world_size: int, send: Send, settings: Settings, text: Text, options: dict[str, Any],
) -> Run:  # fmt: skip
    torch.manual_seed(settings.seed)
    model = ByteGPT(Shape())
    context = model.shape.context
    held_out = validation_batches(text.validation, VALIDATION_ROWS, context, VALIDATION_BATCHES)
    run = Run(label, sum(p.numel() for p in model.parameters()))
    optimizer = tritoncomm.wrap(optimizers(settings.optimizer, model), **options)
    rates = [group["lr"] for group in optimizer.param_groups]
    every = max(1, settings.steps // VALIDATIONS)
    started = time.perf_counter()
    for step in range(settings.steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1.0, (step + 1) / settings.lr_warmup)
        optimizer.zero_grad()
        loss = model(batch(text.train, ROWS, context, settings.seed, step, rank))
        loss.backward()
        optimizer.step()
        if step + 1 == settings.steps:
            optimizer.merge()
        metrics = optimizer.metrics()
        run.losses.append(loss.item())
        run.bytes_sent.append(metrics["bytes_sent_total"])
        if metrics.get("exchanges", step + 1) > len(run.densities):  # else the figures are of an earlier step
            run.densities.append(metrics["density_delivered"])
            run.seconds_exchange += metrics["seconds_exchange"]
        if (step + 1) % every == 0 or step + 1 == settings.steps:
            with optimizer.averaged():
                run.validations.append((step + 1, _validate(model, held_out, rank, world_size)))
        if rank == 0:
            send(Progress(run.method, step + 1, run.losses[-1], run.bytes_sent[-1]))
    run.seconds = time.perf_counter() - started
    run.losses = _mean_over_ranks(run.losses)
    run.bytes_sent = _mean_over_ranks(run.bytes_sent)
    return run


def optimizers(name: str, model: nn.Module) -> torch.optim.Optimizer | list[torch.optim.Optimizer]:
    """Return AdamW, or for ``"muon"`` a Muon for the matrices in blocks, and AdamW for the other parameters."""
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    named = list(model.named_parameters())
    hidden = [parameter for key, parameter in named if ".blocks." in f".{key}" and parameter.dim() > 1]
    chosen = {id(parameter) for parameter in hidden}
    rest = [parameter for _, parameter in named if id(parameter) not in chosen]
    return [torch.optim.Muon(hidden, lr=MUON_RATE), torch.optim.AdamW(rest, lr=RATE_BESIDE_MUON)]


@torch.no_grad()
def _validate(model: nn.Module, batches: list[torch.Tensor], rank: int, world_size: int) -> float:
    """Return the mean validation loss. Each rank evaluates a part of the batches."""
    losses = [model(rows).item() for rows in batches[rank::world_size]]
    total = torch.tensor([sum(losses), len(losses)], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def _mean_over_ranks(values: list[float]) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    means: list[float] = (total / dist.get_world_size()).tolist()
    return means
