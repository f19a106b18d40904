"""The implementations that ``selection.py`` compares, and the expected result of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.verdict import Verdict

import tritoncomm_kernels as kernels
from tritoncomm_kernels.dispatch import kernel
from tritoncomm_kernels.select import Sum

Found = tuple[torch.Tensor, ...]  # indices, values, and the count if the kernel returns one
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SEGMENTS = 8


@dataclass(frozen=True)
class Problem:
    """One input and its expected results.

    ``total`` is ``residual`` plus ``gradient``. ``largest`` holds its k largest entries by magnitude, ``reaching`` its
    entries with a magnitude of at least ``threshold``.
    """

    n: int
    density: float
    dtype: str
    residual: torch.Tensor
    gradient: torch.Tensor
    total: torch.Tensor
    threshold: float
    reaching: Found
    largest: Found

    @property
    def k(self) -> int:
        """Number of entries that an exact selection returns."""
        return self.largest[0].numel()

    @property
    def pass_bytes(self) -> int:
        """Bytes that the addition must move: residual in and out, gradient in."""
        return self.n * (8 + self.gradient.element_size())


@dataclass(frozen=True)
class Route:
    """One implementation.

    Attributes:
        name: Label in the table.
        bytes: Bytes that any implementation must move.
        run: Function of the residual, which is restored before each call. Returns the result.
        check: Function of the result and the residual after the call. Returns whether both are correct.
        selects: Whether the route does the same job as ``abs().topk``.
    """

    name: str
    bytes: int
    run: Callable[[torch.Tensor], Any]
    check: Callable[[Any, torch.Tensor], bool]
    selects: bool = False


def problem(n: int, density: float, dtype: str, device: str) -> Problem:
    """Return normally distributed residual and gradient, with the results of the reference."""
    generator = torch.Generator().manual_seed(n)
    residual, gradient = (torch.randn(n, generator=generator) for _ in range(2))
    residual, gradient = residual.to(device), gradient.to(DTYPES[dtype]).to(device)
    total = torch.add(residual, gradient)
    # The references compute on a CPU.
    largest = kernels.top_k(total.cpu(), max(1, round(density * n)))
    threshold = kernels.smallest_magnitude(largest.values)
    reaching = kernels.select(total.cpu(), threshold)
    entries = [tuple(part.to(device) for part in found[:2]) for found in (reaching, largest)]
    return Problem(n, density, dtype, residual, gradient, total, threshold, *entries)


def routes(p: Problem) -> list[Route]:
    """Return all routes to compare on one problem. The first is the copy. ``abs().topk`` is one of them."""
    size = p.pass_bytes + 8 * p.reaching[0].numel()

    def summed(found: Found, left: torch.Tensor) -> bool:
        return all(map(torch.equal, (*found[:2], left), (*p.reaching, p.total)))

    return [
        _copy(p),
        Route("accumulate", p.pass_bytes, lambda r: r.add_(p.gradient), lambda found, _: torch.equal(found, p.total)),
        _segments(p),
        Route("select, not cleared", size, _fused(p, clear=False), summed),
        Route("select, fused", size, _fused(p), _same(p, p.reaching), selects=True),
        Route("exact k", p.pass_bytes + 8 * p.k, _exact(p), _same(p, p.largest), selects=True),
        *_by_update(p),
        _topk(p),
    ]


def _by_update(p: Problem) -> list[Route]:
    """Return selections of a default step of AdamW after its start, and a copy of the bytes that they must move.

    Every coordinate is compared after a division. Residual, gradient and divisor are read, and the sum is written. What
    was found is cleared in the sum, which becomes the residual. On a GPU, a default step takes the exact k. Only
    "select by update" waits for the host there, and "its kernels" are the launches of that route.
    """
    exponents = torch.randint(-3, 4, (p.n,), generator=torch.Generator().manual_seed(p.n))
    divisor = torch.ldexp(torch.ones(p.n), exponents)
    best = kernels.top_k(p.total.cpu(), p.k, divisor=divisor)
    threshold = kernels.smallest_magnitude(best.values)
    reaching = kernels.select(p.total.cpu(), threshold, divisor=divisor)
    device, size = p.residual.device, p.pass_bytes + 4 * p.n
    divisor, out, guesses = divisor.to(device), torch.empty_like(p.residual), defaultdict(kernels.Guess)
    source, target = torch.zeros(2, size // 2, dtype=torch.uint8, device=device)

    def by(select: Callable[[Accumulator], Any], verdict: Verdict | None) -> Callable[[torch.Tensor], Found]:
        def run(residual: torch.Tensor) -> Found:
            acc = Accumulator(residual, p.gradient, out, guesses, verdict)
            scaled = acc.scaled(divisor)
            found = select(scaled)
            scaled.subtract(found, rounded=False)
            acc.unscale_from(scaled, divisor)
            return found[:2]

        return run

    def same(expected: kernels.Entries) -> Callable[[Found, torch.Tensor], bool]:
        indices, values = (part.to(device) for part in expected[:2])
        left = p.total.index_fill(0, indices.long(), 0.0)
        return lambda found, residual: all(
            map(torch.equal, (*found[:2], residual, out), (indices, values, p.residual, left))
        )

    needed = size + 8 * reaching.room
    made = [
        Route("copy of these bytes", size, lambda _: target.copy_(source), lambda *_: True),
        Route("select by update", needed, by(lambda acc: acc.at_least(threshold), None), same(reaching)),
    ]
    if device.type != "cpu":
        exact = by(lambda acc: acc.top_k(p.k), Verdict(device))
        made.append(Route("exact k by update", size + 8 * p.k, exact, same(best)))
        launched = _launched_by_update(p, divisor, threshold, reaching.room, out)
        made.append(Route("its kernels", needed, launched, same(reaching)))
    return made


def _launched_by_update(
    p: Problem, divisor: torch.Tensor, threshold: float, count: int, out: torch.Tensor
) -> Callable[[torch.Tensor], Found]:
    """Return the launches of a selection by update, of ``count`` entries, into memory that is allocated here."""
    launches, least = kernel("select_triton"), _least(threshold, out.device)
    marks = launches.empty_marks(out)
    indices, values = out.new_empty(count, dtype=torch.int32), out.new_empty(count)
    found = torch.zeros(1, dtype=torch.int64, device=out.device)

    def launch(residual: torch.Tensor) -> Found:
        total = Sum(residual, p.gradient, out, divisor)
        launches.mark(total, least, marks)
        launches.expand(total, marks, indices, values, found)
        kernels.set_at(out, indices)
        return indices, values

    return launch


def _same(p: Problem, expected: Found) -> Callable[[Any, torch.Tensor], bool]:
    """Return a check that exactly ``expected`` was found and exactly these entries were cleared."""

    def check(found: Found, left: torch.Tensor) -> bool:
        cleared = p.total.clone()
        cleared[expected[0].long()] = 0.0
        indices, values, *count = found
        counted = all(int(n) == expected[0].numel() for n in count)  # a count above the capacity is wrong
        return counted and all(map(torch.equal, (indices.int(), values, left), (*expected, cleared)))

    return check


def _copy(p: Problem) -> Route:
    target = torch.empty_like(p.residual)
    return Route("copy", 8 * p.n, target.copy_, lambda found, left: torch.equal(found, p.residual))


def _cleared(residual: torch.Tensor, found: Found) -> Found:
    """Set the ``found`` entries of ``residual`` to 0, as an exchange does when they have been delivered."""
    residual.index_fill_(0, found[0].long(), 0.0)
    return found


def _fused(p: Problem, *, clear: bool = True) -> Callable[[torch.Tensor], Found]:
    done = _cleared if clear else lambda residual, found: found
    if p.residual.device.type == "cpu":

        def run(residual: torch.Tensor) -> Found:
            return done(residual, kernels.accumulate_and_select(residual, p.gradient, residual, p.threshold)[:2])

        return run
    # As in a captured step: fixed capacity, threshold in device memory, no synchronization with the host.
    launches, least = kernel("select_triton"), _least(p.threshold, p.residual.device)
    marks = launches.empty_marks(p.residual)
    indices, values = (torch.empty_like(t) for t in p.reaching)
    found = torch.zeros(1, dtype=torch.int64, device=p.residual.device)

    def launch(residual: torch.Tensor) -> Found:
        total = Sum(residual, p.gradient, residual)
        launches.mark(total, least, marks)
        launches.expand(total, marks, indices, values, found)
        return done(residual, (indices, values, found))

    return launch


def _least(threshold: float, device: torch.device) -> torch.Tensor:
    return torch.tensor([kernels.threshold_key(threshold)], dtype=torch.int32, device=device)


def _exact(p: Problem) -> Callable[[torch.Tensor], Found]:
    guess = kernels.Guess()

    def run(residual: torch.Tensor) -> Found:
        found = kernels.top_k_padded(residual, p.gradient, residual, p.k, guess=guess)
        return _cleared(residual, tuple(found))

    return run


def _topk(p: Problem) -> Route:
    def run(residual: torch.Tensor) -> Found:
        residual.add_(p.gradient)
        indices = torch.topk(residual.abs(), p.k, sorted=False).indices
        values = residual[indices]
        residual[indices] = 0.0
        return indices, values

    def magnitudes(found: Found, left: torch.Tensor) -> bool:
        # It may break ties differently. It must find the same k magnitudes and clear these entries.
        return torch.equal(*(v.abs().sort().values for v in (found[1], p.largest[1]))) and not left[found[0]].any()

    return Route("abs().topk", p.pass_bytes + 8 * p.k, run, magnitudes, selects=True)


def _segments(p: Problem) -> Route:
    """Select the largest entries of each of several segments of the sum, which is given."""
    device = p.residual.device
    room = -(-p.k // SEGMENTS)
    bounds = torch.arange(0, p.n + 1, p.n // SEGMENTS, dtype=torch.int32)[: SEGMENTS + 1].contiguous()
    budgets = torch.full((SEGMENTS,), room, dtype=torch.int32)
    found = kernels.top_k_rows(p.total.cpu(), bounds, budgets, room)
    expected = [part.to(device) for part in found]
    bounds, budgets = bounds.to(device), budgets.to(device)
    return Route(
        f"exact k of {SEGMENTS} segments", 4 * p.n + 8 * p.k,
        lambda _: kernels.top_k_rows(p.total, bounds, budgets, room),
        lambda found, _: all(map(torch.equal, found, expected)),
    )  # fmt: skip
