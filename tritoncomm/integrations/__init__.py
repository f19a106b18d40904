"""Sparse gradients in trainers. Each module here is about one, has the name of its package, and imports it.

A module does what its trainer does not do by itself:

* ``wrap`` the optimizer after the model is in DDP, and before its state is loaded.
* Average gradients, by ``synchronize()``, before the trainer clips them.
* Let a ``GradScaler`` of the trainer keep equal scales on all ranks, by :func:`tritoncomm.amp.with_equal_scales`.
* ``merge()`` local steps before an evaluation, before a save, and at the end.
* Save and load residuals with the trainer's checkpoints, by :class:`~tritoncomm.checkpoint.ResidualState`.
"""
