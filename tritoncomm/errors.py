"""Every error a user can meet."""

from __future__ import annotations

from collections.abc import Iterable


class TritoncommError(Exception):
    """Base of all errors that this library raises on purpose."""


class ConfigurationError(TritoncommError, ValueError):
    """An argument that cannot work; the message names it, its value and the fix."""


class ConfigMismatchError(TritoncommError, RuntimeError):
    """Ranks were set up differently; the message names the differing fields and the ranks."""


class ProtocolMismatchError(TritoncommError, RuntimeError):
    """Two ranks disagree about what travels in a round; the message names round, phase and both sides."""


class ExchangeError(TritoncommError, RuntimeError):
    """The network failed during a round: a lost peer, a time-out. Nothing of the step was applied.

    ``peers`` are the ranks at fault, as far as known. The message names step, round, phase and method. The process
    group is of no more use: make one of the ranks that are left and call ``optimizer.reset_process_group()``.
    """

    def __init__(self, message: str, peers: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.peers = tuple(peers)


class PeerLostError(ExchangeError):
    """A rank has died, or closed its connections without a word."""


class ExchangeTimeoutError(ExchangeError):
    """A rank did not answer within the time-out; it may still be there."""


class NonFiniteError(TritoncommError, ArithmeticError):
    """A NaN or Inf came up in this step; every rank raises it and no residual has changed.

    ``ranks`` names the ranks where it was seen first (their own gradients, or the region in which a
    sum overflowed); it is empty when the method can tell only that the sum is not finite.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
