"""A simulated worker: its copy of the model, and the optimizers that train it together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from runs import Run
from tasks import Task

LR_WARMUP_SHARE = 0.1  # of the steps
ADAMW_SHARE = 0.25  # rate of the AdamW beside a Muon, as a share of Muon's

Named = list[tuple[str, nn.Parameter]]


class Lion(torch.optim.Optimizer):
    """Lion, as users have it: X. Chen et al., "Symbolic Discovery of Optimization Algorithms" (NeurIPS 2023).

    It steps by the sign of an average of gradients, with decoupled weight decay. The state of a parameter is
    ``exp_avg``, the average of gradients.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(average.lerp(parameter.grad, 1 - beta1).sign_(), alpha=-group["lr"])
                average.lerp_(parameter.grad, 1 - beta2)
        return loss


def _all(named: Named) -> list[nn.Parameter]:
    return [parameter for _, parameter in named]


def _adamw(parameters: Sequence[nn.Parameter], run: Run, share: float = 1.0) -> torch.optim.Optimizer:
    """Return AdamW. DeMo has a momentum of its own, and steps by the sign, as AdamW does without averages."""
    betas = (0.0, 0.0) if run.method == "demo" else (0.9, run.beta2)
    return torch.optim.AdamW(parameters, lr=run.lr * share, betas=betas, weight_decay=run.weight_decay)


def _muon(named: Named, run: Run) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the blocks, and AdamW for all others."""
    hidden = [p for name, p in named if p.dim() > 1 and name.startswith("blocks.")]
    rest = [p for name, p in named if not (p.dim() > 1 and name.startswith("blocks."))]
    return [torch.optim.Muon(hidden, lr=run.lr, weight_decay=0.1), _adamw(rest, run, ADAMW_SHARE)]


def _schedule_free(named: Named, run: Run) -> list[torch.optim.Optimizer]:
    from schedulefree import AdamWScheduleFree

    warmup = int(run.steps * LR_WARMUP_SHARE)
    optimizer = AdamWScheduleFree(_all(named), lr=run.lr, betas=(0.9, 0.95), weight_decay=0.1, warmup_steps=warmup)
    optimizer.train()
    return [optimizer]


OPTIMIZERS: dict[str, Callable[[Named, Run], list[torch.optim.Optimizer]]] = {
    "adamw": lambda named, run: [_adamw(_all(named), run)],
    "sgd": lambda named, run: [torch.optim.SGD(_all(named), lr=run.lr, momentum=0.9, weight_decay=1e-4)],
    "lion": lambda named, run: [Lion(_all(named), lr=run.lr, weight_decay=0.1)],
    "muon": _muon,
    "adafactor": lambda named, run: [torch.optim.Adafactor(_all(named), lr=run.lr)],
    "schedule-free": _schedule_free,
}


class Worker:
    """A model, and its optimizers, of the run ``run``."""

    def __init__(self, model: nn.Module, run: Run) -> None:
        self.model = model
        self.optimizers = OPTIMIZERS[run.optimizer](list(model.named_parameters()), run)
        self.has_schedule = run.optimizer == "schedule-free"
        self.rates = [[group["lr"] for group in each.param_groups] for each in self.optimizers]

    def set_rate(self, share: float) -> None:
        """Set all learning rates to this share of the highest ones, unless the optimizer has a schedule of its own."""
        if self.has_schedule:
            return
        for optimizer, rates in zip(self.optimizers, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * share

    def backward(self, task: Task, seed: int, step: int, rank: int) -> None:
        """Compute the gradients of one batch."""
        self.model.zero_grad()
        task.loss(self.model, seed, step, rank).backward()

    @contextlib.contextmanager
    def evaluated(self) -> Iterator[nn.Module]:
        """Context in which the model is as the optimizer evaluates it. Training then continues to the bit."""
        if not self.has_schedule:
            yield self.model
            return
        saved = [parameter.detach().clone() for parameter in self.model.parameters()]
        for optimizer in self.optimizers:
            optimizer.eval()
        yield self.model
        for optimizer in self.optimizers:
            optimizer.train()
        with torch.no_grad():
            torch._foreach_copy_(list(self.model.parameters()), saved)
