"""The tasks of ``train.py``, for four workers: language models of three sizes, images in noise, and a teacher."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tritoncomm.demo import train as demo_run
from tritoncomm.demo.model import ByteGPT, Shape
from tritoncomm.demo.text import batch, standard_library, validation_batches

WORKERS = 4
NOISE = 1.5
BATCHES = 32  # of held-out rows, in an evaluation


@dataclass(frozen=True)
class Task:
    """A training task: number of steps, model, loss of a rank in a step, and the score of the model, lower is better.

    The loss is called with the model, the seed, the step and the rank.
    """

    steps: int
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int, int], Tensor]
    score: Callable[[nn.Module], float]


def gpt(steps: int | None, batches: int = BATCHES) -> Task:
    """Return the language-model task, evaluated on ``batches`` of 64 rows. ``steps`` None is the default number."""
    return _language(Shape(context=32, width=64, layers=2, heads=2), steps or 1600, 16, 64, batches)


def demo(steps: int | None, batches: int = BATCHES) -> Task:
    """Return the task of ``python -m tritoncomm demo``, a larger model, see :func:`gpt`."""
    steps = steps or demo_run.Settings().steps
    return _language(Shape(), steps, demo_run.ROWS, demo_run.VALIDATION_ROWS, batches)


def gpt10m(steps: int | None, batches: int = BATCHES) -> Task:
    """Return the same with 10.9 million parameters, trained for longer: on a CPU, a step takes seconds."""
    shape = Shape(width=384, layers=6, heads=6)
    return _language(shape, steps or 1000, demo_run.ROWS, demo_run.VALIDATION_ROWS, batches)


def _language(shape: Shape, steps: int, rows: int, held_out_rows: int, batches: int) -> Task:
    """Return the task of a byte-level GPT that each worker trains on ``rows`` windows of text in a step."""
    text = standard_library()
    held_out = validation_batches(text.validation, held_out_rows, shape.context, batches)

    def loss(model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
        out: Tensor = model(batch(text.train, rows, shape.context, seed, step, rank))
        return out

    return Task(
        steps, lambda: ByteGPT(shape), loss, lambda model: statistics.fmean(float(model(rows)) for rows in held_out)
    )


class _Residual(nn.Module):
    """Two convolutions beside the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(*_convolution(16), nn.ReLU(), *_convolution(16))

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(images + self.inside(images))


def _convolution(channels: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(channels, 16, 3, padding=1), nn.GroupNorm(4, 16)


def cnn(steps: int | None, batches: int = BATCHES) -> Task:
    """Return the task of a residual network of 10,058 parameters that tells ten images apart in noise."""
    images = torch.randn(10, 3, 8, 8, generator=torch.Generator().manual_seed(7))

    def drawn(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        labels = torch.randint(10, (count,), generator=generator)
        return images[labels] + NOISE * torch.randn(count, 3, 8, 8, generator=generator), labels

    held_out, expected = drawn(64 * batches, torch.Generator().manual_seed(8))

    def loss(model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
        seen, labels = drawn(32, _generator(seed, step, rank))
        return F.cross_entropy(model(seen), labels)

    return Task(
        steps or 300,
        lambda: nn.Sequential(
            *_convolution(3), nn.ReLU(), _Residual(), _Residual(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
        ),
        loss,
        lambda model: float(F.cross_entropy(model(held_out), expected)),
    )  # fmt: skip


def mlp(steps: int | None, batches: int = BATCHES) -> Task:
    """Return the task of a network that learns a teacher from noisy answers. The score is its squared distance."""
    generator = torch.Generator().manual_seed(7)
    first, second = torch.randn(32, 64, generator=generator) / 32**0.5, torch.randn(64, 8, generator=generator) / 8
    held_out = torch.randn(64 * batches, 32, generator=generator)

    def answers(questions: Tensor) -> Tensor:
        return torch.tanh(2 * questions @ first) @ second

    def loss(model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
        drawn = _generator(seed, step, rank)
        questions = torch.randn(32, 32, generator=drawn)
        return F.mse_loss(model(questions), answers(questions) + 0.1 * torch.randn(32, 8, generator=drawn))

    return Task(
        steps or 300,
        lambda: nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8)),
        loss,
        lambda model: float(F.mse_loss(model(held_out), answers(held_out))),
    )


def _generator(seed: int, step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(((seed * 100_003) + step) * WORKERS + rank)


TASKS = {"gpt": gpt, "demo": demo, "gpt10m": gpt10m, "cnn": cnn, "mlp": mlp}
