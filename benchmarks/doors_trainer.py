"""The ``Trainer`` of Transformers, for ``doors.py``."""

from __future__ import annotations

import os
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from tritoncomm.integrations.transformers import SparseGradients

if TYPE_CHECKING:
    from doors import Run


class Batches(Dataset[Tensor]):
    """One batch per step, the one that is used otherwise in this step on this rank."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __len__(self) -> int:
        return self.run.task.steps

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        return {"text": self.run.loss(nn.Identity(), step)}  # the loss of a model that returns its input


class ReturnsLoss(nn.Module):
    """A language model in the form that ``Trainer`` expects."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, text: Tensor) -> dict[str, Tensor]:
        """Return the loss of ``text``."""
        return {"loss": self.model(text)}


class Trainer(transformers.Trainer):
    """A trainer with the batches of :class:`Batches`, which belong to this rank already, in their order."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return one batch after the other."""
        return DataLoader(self.train_dataset, batch_size=None)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the gradients, and keep the loss."""
        self.last_loss: Tensor = super().training_step(*args, **kwargs)
        return self.last_loss


class Watch(transformers.TrainerCallback):
    """Records every step, and the bytes that were sent until then."""

    trainer: Trainer
    sent = 0.0

    def __init__(self, run: Run, sparse: SparseGradients) -> None:
        self._run, self._sparse = run, sparse

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Record the step."""
        self._run.add(float(self.trainer.last_loss), self._started)
        assert self._sparse.optimizer is not None
        self.sent = self._sparse.optimizer.metrics()["bytes_sent_total"]


def train_with_trainer(run: Run, plain: nn.Module) -> float:
    """Train with ``Trainer``, and return the bytes that this worker has sent."""
    # Accelerate finds its place by these variables. The process group exists already.
    rank, size = dist.get_rank(), dist.get_world_size()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    sparse = SparseGradients(**run.arguments)
    watch, optimizer = Watch(run, sparse), run.optimizer(plain)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=run.task.steps, use_cpu=True, ddp_backend="gloo", max_grad_norm=0.0,
            ddp_find_unused_parameters=False, report_to=[], save_strategy="no", logging_strategy="no",
            disable_tqdm=True, seed=run.cell.seed,
        )  # fmt: skip
        trainer = Trainer(
            ReturnsLoss(plain), arguments, train_dataset=Batches(run), callbacks=[sparse, watch],
            optimizers=(optimizer, LambdaLR(optimizer, run.rate)),
        )  # fmt: skip
        watch.trainer = trainer
        trainer.train()
    return watch.sent
