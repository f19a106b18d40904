"""Sparse gradients with Lightning: a strategy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

import tritoncomm
from tritoncomm import checkpoint as checkpoints
from tritoncomm.algorithms import Recipe
from tritoncomm.amp import with_equal_scales
from tritoncomm.integrations.shared import residuals as beside
from tritoncomm.optimizer import SparseOptimizer, setup_of, stepper_of
from tritoncomm.step.recipes import arguments_of, check_keywords
from tritoncomm.step.settings import DEFAULT_ALGO, restores

__all__ = ["SparseDDPStrategy"]


def _of_ddp() -> set[str]:
    """Return the arguments of ``DDPStrategy``, with those of DDP, whose module and devices Lightning chooses."""
    return {*arguments_of(DDPStrategy), *arguments_of(DistributedDataParallel)} - {"module", "device_ids"}


def _of_wrap() -> set[str]:
    """Return the arguments that are for ``wrap``. The process group and time-out are those of ``DDPStrategy``."""
    return {*arguments_of(tritoncomm.wrap)} - {"algo", "optimizer", "model"} - _of_ddp()


class SparseDDPStrategy(DDPStrategy):
    """Lightning's DDP strategy, with a sparse exchange: ``Trainer(strategy=SparseDDPStrategy(density=0.01))``.

    Each optimizer of ``configure_optimizers()`` is wrapped. Return a :class:`~tritoncomm.OptimizerList` if several step
    together. They are ``trainer.optimizers``, for example for their
    ``metrics()``. Gradients are exchanged after the backward pass of a step, before ``on_before_optimizer_step()`` and
    before Lightning clips them. With manual optimization, ``clip_gradients()`` and ``step()`` exchange them.

    With ``local_steps``, workers exchange what they have changed before a validation, a checkpoint and the end, too.
    Gradients that Lightning clips are then this worker's own.

    A checkpoint ``x.ckpt`` gets a folder ``x.ckpt.tritoncomm`` with the residual of each rank. The folder of a second
    optimizer is ``x.ckpt.tritoncomm_1``.

    Args:
        algo: Name of a method, or a recipe, which has the fields of the method. Default: None, see
            :func:`tritoncomm.wrap`.
        residuals: ``"restore"``: a resumed run needs the residual of each rank. ``"reset"``: residuals start at zero,
            for a checkpoint that has none. Default: ``"restore"``.
        **settings: Further arguments of :func:`tritoncomm.wrap`, for example ``density``, or fields of the method, and
            those of ``DDPStrategy`` and ``DistributedDataParallel``.

    Raises:
        ConfigurationError: An argument is invalid.
    """

    optimizers: list[Any]  # a property of the strategy

    def __init__(self, algo: str | Recipe | None = None, *, residuals: str = "restore", **settings: Any) -> None:
        self._restore = restores(residuals)
        of_ddp = {name: settings.pop(name) for name in _of_ddp() & set(settings)}
        known = sorted(_of_wrap() | _of_ddp())
        given = settings.keys() - _of_wrap()
        check_keywords("SparseDDPStrategy", known, DEFAULT_ALGO if algo is None else algo, given)
        self._settings = {"algo": algo, **settings}
        super().__init__(**of_ddp)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create optimizers and schedules, and wrap the optimizers."""
        super().setup_optimizers(trainer)
        self._wrap()
        plugin = self.precision_plugin
        if getattr(plugin, "scaler", None) is not None:
            plugin.scaler = with_equal_scales(plugin.scaler, self.root_device)

        def clip_gradients(optimizer: Any, clip_val: float = 0.0, *algorithm: Any, **named: Any) -> None:
            if clip_val > 0:
                self._average(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)
            # Not the method of MixedPrecision, which refuses an optimizer that can unscale by itself.
            Precision.clip_gradients(plugin, optimizer, clip_val, *algorithm, **named)

        plugin.clip_gradients = clip_gradients

    def _wrap(self) -> None:
        self.optimizers = [tritoncomm.wrap(each, model=self.model, **self._settings) for each in self.optimizers]

    def _average(self, optimizer: Any) -> None:
        """Exchange the gradients of ``optimizer``, unless that was done, or updates are exchanged."""
        if optimizer.is_synchronized:
            return
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None and stepper_of(optimizer).found_in_unscale is None:
            scaler.unscale_(optimizer)
        optimizer.synchronize()

    def _merge(self) -> None:
        """Let all workers hold the same parameters, if their optimizers take local steps."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, SparseOptimizer):
                optimizer.merge()

    def on_validation_start(self) -> None:
        """Validate the parameters that all workers have in common."""
        self._merge()
        super().on_validation_start()

    def on_train_end(self) -> None:
        """End with them, too."""
        self._merge()
        super().on_train_end()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the parameters that all workers have in common. Lightning calls this on all ranks."""
        self._merge()
        return super().lightning_module_state_dict()  # type: ignore[no-any-return]

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run ``closure``, exchange the gradients, let Lightning clip them, and take the step."""
        has_scaler = getattr(self.precision_plugin, "scaler", None) is not None

        def closure_and_exchange() -> Any:
            loss = closure()
            is_skipped = loss is None and has_scaler and self.lightning_module.automatic_optimization
            if not is_skipped:  # else the training step returned None, and Lightning takes no step
                self._average(optimizer)
            return loss

        return super().optimizer_step(optimizer, closure_and_exchange, model, **kwargs)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of the optimizer without residuals. Lightning writes the one of the first rank."""
        return beside.without_residual(super().optimizer_state(optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the checkpoint on the first rank, and a residual on each rank."""
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if "optimizer_states" in checkpoint:
            for number, optimizer in enumerate(self.optimizers):
                checkpoints.save(optimizer, beside.folder_of(filepath, number))

    def _wrap_again(self) -> None:
        """Wrap the optimizers again if they got further parameters. A fine-tuning callback will train them."""
        new = [parameter for each in self.optimizers for parameter in setup_of(each).known.new]
        if not new:
            return
        before = [(parameter, parameter.requires_grad) for parameter in new]
        for parameter in new:
            parameter.requires_grad = True
        for optimizer in self.optimizers:
            optimizer.release()
        self._wrap()
        for parameter, requires_grad in before:
            parameter.requires_grad = requires_grad

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Restore the optimizers, with the residuals of this rank."""
        self._wrap_again()
        if not self._restore:
            super().load_optimizer_state_dict(checkpoint)
            return
        for number, optimizer in enumerate(self.optimizers):
            with beside.name_the_fix("SparseDDPStrategy()"):
                checkpoints.load(optimizer, beside.folder_of(self.lightning_module.trainer.ckpt_path, number))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove the checkpoint and its residuals."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            for number in range(len(self.optimizers)):
                shutil.rmtree(beside.folder_of(filepath, number), ignore_errors=True)
