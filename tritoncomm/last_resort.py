"""What Python prints of the library's log if a program has not configured logging.

Python then prints the bare text of a warning, and nobody can tell where it comes from. The name of the library is put
in front of it. Once there is a handler for the log, it alone decides.
"""

from __future__ import annotations

import logging
import sys


class LastResort(logging.Handler):
    """Writes warnings to the standard error stream, with ``name`` in front, as long as no other handler gets them.

    Args:
        name: The name of the logger.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.WARNING)
        self._logger = logging.getLogger(name)
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write ``record``, unless another handler of the logger, or of the root logger, is there."""
        handlers = [*self._logger.handlers, *(logging.getLogger().handlers if self._logger.propagate else ())]
        if handlers == [self] and sys.stderr is not None:
            sys.stderr.write(f"{self.format(record)}\n")


def install() -> None:
    """Let the warnings of the library begin with its name where logging is not configured."""
    logger = logging.getLogger("tritoncomm")
    if not any(isinstance(handler, LastResort) for handler in logger.handlers):
        logger.addHandler(LastResort(logger.name))
