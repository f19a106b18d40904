"""One ``optimizer.step()``, from ``.grad`` to the parameter update. Shared by ``wrap``, DDP and FSDP2."""
