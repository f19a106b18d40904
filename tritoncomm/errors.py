"""The exceptions that this library raises."""

from __future__ import annotations

from collections.abc import Iterable


class TritoncommError(Exception):
    """Base class of all exceptions that this library raises on purpose."""


class ConfigurationError(TritoncommError, ValueError):
    """An argument is invalid. The message names the argument, its value and the fix."""


class ConfigMismatchError(TritoncommError, RuntimeError):
    """Ranks are configured differently. The message names the fields that differ and the ranks."""


class ProtocolMismatchError(TritoncommError, RuntimeError):
    """The ranks disagree about the messages of a round. The message names the round, the phase and both sides."""


class ExchangeError(TritoncommError, RuntimeError):
    """An exchange failed during a round: a peer was lost, a wait timed out, or a rank raised an exception.

    This rank applied nothing of the step. Other ranks may have, if the failure came as they confirmed it. The message
    names step, round, phase and method. The process group is unusable afterwards. To continue with
    :func:`~tritoncomm.wrap`, create a new group of the remaining ranks and call ``optimizer.reset_process_group()``.

    Attributes:
        peers: Global ranks that caused the failure, as far as known.
    """

    def __init__(self, message: str, peers: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.peers = tuple(peers)


class PeerLostError(ExchangeError):
    """A rank died, or closed its connections without reporting an error."""


class ExchangeTimeoutError(ExchangeError):
    """A rank did not answer within the time-out. It may still be running."""


class NonFiniteError(TritoncommError, ArithmeticError):
    """A gradient or a sum of gradients is NaN or Inf in this step.

    Every rank raises this error, and no residual has changed.

    Attributes:
        ranks: Global ranks where the NaN or Inf was found first: in their own gradients, or in the region of the vector
            whose sum overflowed. Empty when the method only sees that the sum is not finite.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
