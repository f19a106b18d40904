"""From ``.grad`` to a mean that all ranks have confirmed."""
