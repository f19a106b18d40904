"""The ``Trainer`` of Transformers, for ``doors.py``."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from tritoncomm import ddp
from tritoncomm.integrations.transformers import SparseGradients

if TYPE_CHECKING:
    from doors import Run, Timer


class Batches(Dataset[Tensor]):
    """One batch per step, the one that the other doors use in this step on this rank."""

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
    """Records every step. Its clock is put on the hook before the first exchange."""

    trainer: Trainer
    state: ddp.CommState

    def __init__(self, run: Run, timer_of: Callable[[ddp.CommState], Timer]) -> None:
        self.run = run
        self._timer_of = timer_of
        self._timer: Timer | None = None

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        if self._timer is None:
            model = self.trainer.model_wrapped
            assert isinstance(model, DistributedDataParallel)
            state = ddp.state_of(model)
            assert state is not None
            self.state, self._timer = state, self._timer_of(state)
        self._started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Record the step."""
        self.run.add(float(self.trainer.last_loss), time.perf_counter() - self._started, self._timer)


def train_with_trainer(run: Run, plain: nn.Module, timer_of: Callable[[ddp.CommState], Timer]) -> float:
    """Train with ``Trainer``, and return the bytes that this worker has sent."""
    # Accelerate finds its place by these variables. The process group exists already.
    rank, size = dist.get_rank(), dist.get_world_size()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    sparse, watch = SparseGradients(**run.settings), Watch(run, timer_of)
    optimizer = run.optimizer(plain)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=run.task.steps, use_cpu=True, ddp_backend="gloo",
            max_grad_norm=run.cell.max_norm, ddp_find_unused_parameters=False, report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True, seed=run.cell.seed,
        )  # fmt: skip
        trainer = Trainer(
            ReturnsLoss(plain), arguments, train_dataset=Batches(run), callbacks=[sparse, watch],
            optimizers=(optimizer, LambdaLR(optimizer, run.rate)),
        )  # fmt: skip
        watch.trainer = trainer
        trainer.train()
    return watch.state.metrics()["bytes_sent_total"]
