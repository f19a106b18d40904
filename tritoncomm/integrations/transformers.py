"""Sparse gradients with the Trainer of Transformers: one callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from tritoncomm import checkpoint
from tritoncomm.algorithms import Recipe
from tritoncomm.errors import ConfigurationError
from tritoncomm.integrations.shared import residuals as beside
from tritoncomm.integrations.shared.accelerated import connect, has_peers, load_instead, renew_methods
from tritoncomm.optimizer import SparseOptimizer
from tritoncomm.step.optimizer_list import parts_of
from tritoncomm.step.saved.optimizer_state import remove_marks
from tritoncomm.step.settings import restores
from tritoncomm.step.tensors.names import named_parameters, parameter_ids
from tritoncomm.step.torch_internals import variables_of_caller

__all__ = ["SparseGradients"]


class SparseGradients(TrainerCallback):
    """Callback that exchanges gradients sparsely: ``Trainer(..., callbacks=[SparseGradients()])``.

    Optimizer, schedule and accumulation stay as they are. ``max_grad_norm`` limits gradients as in a dense run, by that
    of ``wrap``. With ``local_steps``, workers exchange what they have changed before an
    evaluation, a checkpoint and the end, too. To train several optimizers together, pass the Trainer an
    :class:`~tritoncomm.OptimizerList`. A checkpoint gets a folder ``tritoncomm`` with the residual of each rank.

    Args:
        algo: Name of a method, or a recipe. See :func:`tritoncomm.wrap`, also for the default, None.
        residuals: ``"restore"``: a resumed run needs the residual of each rank. ``"reset"``: residuals start at zero,
            for a checkpoint that has none. Default: ``"restore"``.
        **settings: Further arguments of :func:`tritoncomm.wrap`.

    Attributes:
        optimizer: The wrapped optimizer, for example for its ``metrics()``. None before training.
    """

    def __init__(self, algo: str | Recipe | None = None, *, residuals: str = "restore", **settings: Any) -> None:
        self._restore = restores(residuals)
        self._algo, self._settings = algo, settings
        self.optimizer: SparseOptimizer | None = None
        self._trained: set[int] = set()  # ids of the parameters that it trains

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Wrap the optimizer, with the residuals of the checkpoint from which the Trainer resumes.

        Without one, go on with those of the ``train()`` before, or of a larger batch that memory was too short for.
        """
        trainer, resumed = (_trainer_frame()[name] for name in ("self", "resume_from_checkpoint"))
        handler = trainer.callback_handler
        handler.callbacks = [*(each for each in handler.callbacks if not isinstance(each, _Merges)), _Merges(self)]
        trained = {id(each) for each, _ in named_parameters(trainer.optimizer) if each.requires_grad}
        goes_on = resumed is None and trained == self._trained
        before = _state_to_continue(self.optimizer, trainer) if goes_on else None
        _disconnect(trainer)
        if before is not None or (resumed is not None and self._restore):
            _forget_state(trainer)  # loaded below: wrap() would warn that its residuals are lost
        _check(trainer)
        settings, accelerator = _with_limit(self._settings, trainer), trainer.accelerator
        self.optimizer = connect(accelerator, trainer.model_wrapped, trainer.optimizer, self._algo, **settings)
        self._trained = trained
        if before is not None:
            self.optimizer.load_state_dict(before)
        elif resumed is not None and self._restore:
            with beside.name_the_fix("SparseGradients()"):
                checkpoint.load(self.optimizer, Path(resumed) / beside.FOLDER)
        # A train() that resumes loads the state of one rank before it comes here.
        load_instead(trainer.optimizer, beside.without_residual)

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Save the residual of each rank into the checkpoint that the Trainer has just written."""
        frame = _trainer_frame()
        if self.optimizer is not None and not args.save_only_model:
            folder = Path(frame["self"]._get_output_dir(frame["trial"]))  # noqa: SLF001 - of a search, not args' folder
            checkpoint.save(self.optimizer, folder / f"checkpoint-{state.global_step}" / beside.FOLDER)


class _Merges(TrainerCallback):
    """Lets all workers hold the same parameters before they evaluate or save, and at the end.

    Only local steps make them differ. It is the last callback, because any other one may ask for an evaluation.
    """

    def __init__(self, sparse: SparseGradients) -> None:
        self._sparse = sparse

    def on_step_end(self, _args: Any, _state: Any, control: Any, **__: Any) -> None:
        optimizer = self._sparse.optimizer
        if optimizer is not None and (control.should_evaluate or control.should_save or control.should_training_stop):
            optimizer.merge()

    on_epoch_end = on_step_end


def _disconnect(trainer: Any) -> None:
    """Let the optimizer of ``trainer`` step as before. Without effect if it does."""
    optimizer = trainer.optimizer.optimizer
    if isinstance(optimizer, SparseOptimizer):
        optimizer.release()
        renew_methods(trainer.optimizer)


def _state_to_continue(before: SparseOptimizer | None, trainer: Any) -> dict[str, Any] | None:
    """Return the state of ``before``, with its residual, if ``trainer`` still has it.

    None if an error or a signal has stopped an update, so that residual and parameters are not of the same step.
    """
    if before is not trainer.optimizer.optimizer or not isinstance(before, SparseOptimizer):
        return None
    before.zero_grad()  # a step that an interrupt has ended may have averaged gradients
    try:
        return before.state_dict()
    except RuntimeError:
        return None


def _forget_state(trainer: Any) -> None:
    """Remove the state of the optimizer of ``trainer``, which is about to be loaded."""
    for part in parts_of(trainer.optimizer.optimizer):
        part.state.clear()
        remove_marks(part.param_groups)


def _check(trainer: Any) -> None:
    """Raise :class:`~tritoncomm.ConfigurationError` if ``trainer`` cannot exchange sparsely."""
    if getattr(trainer.args, "enable_jit_checkpoint", False):
        raise ConfigurationError(
            "enable_jit_checkpoint=True: such a checkpoint has no residuals, and may fall between the exchange and the "
            "step; leave it out, and save every few steps with save_steps="
        )
    if has_peers() and trainer.model_wrapped is trainer.model:
        raise ConfigurationError(
            "the Trainer has not wrapped the model in DistributedDataParallel: evaluate() or predict() was called "
            "before train(), after which Transformers trains each replica alone, or FSDP, DeepSpeed or torch_compile "
            "is used; call train() first, or use a Trainer of its own to evaluate"
        )


def _with_limit(settings: dict[str, Any], trainer: Any) -> dict[str, Any]:
    """Return ``settings`` of :func:`tritoncomm.wrap` that limit gradients, as ``trainer`` does, before the exchange.

    A limit in ``settings`` has precedence. Without a limit, with one worker, or if the optimizer has a part of the
    model's parameters, nothing changes, and ``trainer`` clips.
    """
    limit = trainer.args.max_grad_norm
    if "max_grad_norm" in settings or limit is None or limit <= 0 or not has_peers():
        return settings
    stepped = parameter_ids(trainer.optimizer)
    whole = all(id(parameter) in stepped for parameter in trainer.model.parameters() if parameter.requires_grad)
    return settings | {"max_grad_norm": limit} if whole else settings


def _trainer_frame() -> Any:
    """Return the variables of the Trainer's method that called.

    Up to Transformers 5.24, it passes neither itself nor its checkpoint to callbacks.
    """
    found = variables_of_caller(Trainer)
    if found is None:
        raise ConfigurationError("SparseGradients was not called by a transformers.Trainer: pass it as callbacks=")
    return found
