"""Sparse gradients with Lightning: a strategy."""

from __future__ import annotations

import inspect
import shutil
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

import tritoncomm
from tritoncomm import checkpoint as checkpoints
from tritoncomm.algorithms import Recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.integrations import residuals as beside
from tritoncomm.optimizer import SparseOptimizer

__all__ = ["SparseDDPStrategy"]

# The rest is chosen here, and the time-out is the one of the process group.
_SETTINGS = set(inspect.signature(tritoncomm.wrap).parameters) - {"algo", "optimizer", "model", "scaler", "timeout"}


class SparseDDPStrategy(DDPStrategy):
    """Lightning's DDP strategy, with a sparse exchange: ``Trainer(strategy=SparseDDPStrategy(density=0.01))``.

    A checkpoint ``x.ckpt`` gets a folder ``x.ckpt.tritoncomm`` with the residual of each rank.

    Args:
        algo: Name of a method, or a recipe, which has the fields of the method. Default: ``"oktopk"``.
        residuals: ``"restore"``: a resumed run needs the residual of each rank. ``"reset"``: residuals start at zero,
            for a checkpoint that has none. Default: ``"restore"``.
        **settings: Further arguments of :func:`tritoncomm.wrap`, for example ``density``, and of ``DDPStrategy``.

    Attributes:
        sparse_optimizer: The wrapped optimizer, for example for its ``metrics()``. None before training.
    """

    optimizers: list[Any]  # a property of the strategy

    def __init__(self, algo: str | Recipe = "oktopk", *, residuals: str = "restore", **settings: Any) -> None:
        self._restore = beside.check(residuals)
        self._settings = {name: settings.pop(name) for name in _SETTINGS & set(settings)} | {"algo": algo}
        super().__init__(**settings)
        self.sparse_optimizer: SparseOptimizer | None = None

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create optimizer and schedule, and wrap the optimizer."""
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ConfigurationError(f"configure_optimizers() returned {len(self.optimizers)} optimizers: return one")
        scaler = getattr(self.precision_plugin, "scaler", None)
        self.sparse_optimizer = tritoncomm.wrap(self.optimizers[0], model=self.model, scaler=scaler, **self._settings)
        self.optimizers = [self.sparse_optimizer]

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of the original optimizer. Lightning writes the one of the first rank."""
        return super().optimizer_state(optimizer.optimizer)  # type: ignore[no-any-return]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the checkpoint on the first rank, and a residual on each rank."""
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if "optimizer_states" in checkpoint and self.sparse_optimizer is not None:
            checkpoints.save(self.sparse_optimizer, beside.folder_of(filepath))

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Restore the optimizer, with the residual of this rank."""
        if self._restore:
            with beside.name_the_fix("SparseDDPStrategy()"):
                checkpoints.load(self.optimizers[0], beside.folder_of(self.lightning_module.trainer.ckpt_path))
        else:
            super().load_optimizer_state_dict(checkpoint)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove the checkpoint and its residuals."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(beside.folder_of(filepath), ignore_errors=True)
