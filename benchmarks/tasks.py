"""The tasks of the training benchmarks: language models of three sizes and an image classifier, with four workers."""

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
BATCHES = 32  # of held-out rows, in an evaluation
FORMER_LIMIT = 0.2  # max_relative_update of results that do not name theirs
NO_LIMIT = 0.0  # that of dense runs, in which nothing catches up


@dataclass(frozen=True)
class Task:
    """A training task: model, optimizer, loss of a rank in a step, and the score of the trained model."""

    steps: int
    model: Callable[[], nn.Module]
    optimizer: Callable[[list[nn.Parameter], float], torch.optim.Optimizer]
    lr: float
    loss: Callable[[nn.Module, int, int, int], Tensor]  # (model, seed, step, rank) -> loss
    score: Callable[[nn.Module], float]
    lower_is_better: bool


def gpt(steps: int | None, batches: int = BATCHES) -> Task:
    """Return the language-model task, evaluated on ``batches`` of 64 rows. ``steps`` None is the default number."""
    # A rate of 1e-2 helps dense runs, but hardly sparse ones: docs/explanation/adamw.md
    return _language(Shape(context=32, width=64, layers=2, heads=2), steps or 1600, 16, 64, batches, 5e-3)


def demo(steps: int | None, batches: int = BATCHES) -> Task:
    """Return the task of ``python -m tritoncomm demo``, a larger model, see :func:`gpt`."""
    steps = steps or demo_run.Settings().steps
    return _language(Shape(), steps, demo_run.ROWS, demo_run.VALIDATION_ROWS, batches, demo_run.LEARNING_RATE)


def gpt10m(steps: int | None, batches: int = BATCHES) -> Task:
    """Return the same with 10.9 million parameters, trained for longer: on a CPU, a step takes seconds."""
    shape = Shape(width=384, layers=6, heads=6)
    return _language(shape, steps or 1000, demo_run.ROWS, demo_run.VALIDATION_ROWS, batches, demo_run.LEARNING_RATE)


def _language(shape: Shape, steps: int, rows: int, held_out_rows: int, batches: int, lr: float) -> Task:
    """Return the task of a byte-level GPT that each worker trains on ``rows`` windows of text in a step."""
    text = standard_library()
    held_out = validation_batches(text.validation, held_out_rows, shape.context, batches)

    def loss(model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
        out: Tensor = model(batch(text.train, rows, shape.context, seed, step, rank))
        return out

    return Task(
        steps,
        lambda: ByteGPT(shape),
        lambda parameters, lr: torch.optim.AdamW(
            parameters, lr=lr, betas=demo_run.BETAS, weight_decay=demo_run.WEIGHT_DECAY
        ),
        lr,
        loss,
        lambda model: statistics.fmean(float(model(rows)) for rows in held_out),
        lower_is_better=True,
    )


def digits(steps: int | None, batches: int = BATCHES) -> Task:
    """Return the image-classification task. Every fifth image is held out, of which ``batches`` of 64 are used."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).div(16).unsqueeze(1)
    labels = torch.tensor(data.target)
    test = torch.arange(len(labels)) % 5 == 0
    trained, truth = images[~test], labels[~test]
    held_out, expected = images[test][: 64 * batches], labels[test][: 64 * batches]

    def loss(model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(((seed * 100_003) + step) * WORKERS + rank)
        chosen = torch.randint(len(truth), (32,), generator=generator)
        return F.cross_entropy(model(trained[chosen]), truth[chosen])

    def accuracy(model: nn.Module) -> float:
        return 100 * float((model(held_out).argmax(1) == expected).float().mean())

    return Task(
        steps or 400,
        lambda: nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10),
        ),
        lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-4),
        0.05,
        loss,
        accuracy,
        lower_is_better=False,
    )  # fmt: skip


TASKS = {"gpt": gpt, "demo": demo, "gpt10m": gpt10m, "digits": digits}
