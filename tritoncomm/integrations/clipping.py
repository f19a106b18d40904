"""What a trainer clips: averaged gradients, or those of this worker where updates are exchanged."""

from __future__ import annotations

from tritoncomm.optimizer import SparseOptimizer, setup_of


def average(optimizer: SparseOptimizer) -> bool:
    """Exchange the gradients of ``optimizer``, unless that was done. Return False if they stay those of this worker.

    That is so if updates are exchanged, also of some optimizers of a list. To clip this worker's gradients before the
    exchange is safe: replicas stay equal.
    """
    local_steps = setup_of(optimizer).local
    if local_steps is not None:
        local_steps.say_gradients_are_local()
        return False
    if not optimizer.is_synchronized:
        optimizer.synchronize()
    return True


def clips_itself(optimizer: SparseOptimizer) -> bool:
    """Return True if :meth:`~tritoncomm.SparseOptimizer.step` limits the norm, so that the trainer need not."""
    return setup_of(optimizer).options.max_grad_norm is not None
