"""The implementations that ``selection.py`` compares, and the expected result of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tritoncomm.primitives.accumulator import Accumulator
from tritoncomm.primitives.verdict import Verdict

import tritoncomm_kernels as kernels
from tritoncomm_kernels.formats import FORMATS
from tritoncomm_kernels.section_layout import Layout
from tritoncomm_kernels.sections import read_rows, write_rows

Found = tuple[torch.Tensor, ...]  # indices, values, and the count if the kernel returns one
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DISTRIBUTIONS = ("normal", "laplace", "layered", "equal")
LISTS = 8
SECTION_FORMAT = FORMATS["4bit"]
WARM_UP_TO, GRAPH_UP_TO = 6_000_000, 1_000_000  # largest sizes at which caches or launch times matter


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
        warm: Whether a GPU's caches are not flushed before each call.
    """

    name: str
    bytes: int
    run: Callable[[torch.Tensor], Any]
    check: Callable[[Any, torch.Tensor], bool]
    selects: bool = False
    warm: bool = False


def problem(n: int, density: float, dtype: str, distribution: str, device: str) -> Problem:
    """Return residual and gradient of one distribution, with the results of the reference."""
    generator = torch.Generator().manual_seed(n)

    def noise() -> torch.Tensor:
        if distribution == "equal":
            return torch.full((n,), 0.5)
        if distribution == "normal":
            return torch.randn(n, generator=generator)
        signs = torch.randint(0, 2, (n,), generator=generator).mul_(2).sub_(1)
        values = torch.empty(n).exponential_(generator=generator).mul_(signs)
        if distribution == "layered":  # 24 layers whose scales are log-normal
            scales = torch.randn(24, generator=generator).exp()
            values *= scales.repeat_interleave(-(-n // 24))[:n]
        return values

    residual, gradient = noise().to(device), noise().to(DTYPES[dtype]).to(device)
    total = torch.add(residual, gradient)
    # The references compute on a CPU.
    largest = kernels.top_k(total.cpu(), max(1, round(density * n)))
    threshold = kernels.smallest_magnitude(largest.values)
    reaching = kernels.select(total.cpu(), threshold)
    entries = [tuple(part.to(device) for part in found[:2]) for found in (reaching, largest)]
    return Problem(n, density, dtype, residual, gradient, total, threshold, *entries)


def routes(p: Problem) -> list[Route]:
    """Return all routes to compare on one problem. The first is the copy. ``abs().topk`` is one of them."""
    static = static_parts(p) if p.dtype == "fp32" else []  # they do not read the gradient
    return [_copy(p), *parts(p), *static, *_ours(p), *_by_update(p), *_peers(p)]


def _ours(p: Problem) -> list[Route]:
    size, reaching = p.pass_bytes + 8 * p.reaching[0].numel(), _same(p, p.reaching)

    def kept(found: Found, left: torch.Tensor) -> bool:
        return all(map(torch.equal, (*found, left), (*p.reaching, p.residual)))

    def summed(found: Found, left: torch.Tensor) -> bool:
        return all(map(torch.equal, (*found[:2], left), (*p.reaching, p.total)))

    made = [
        Route("select, fused", size, _fused(p), reaching, selects=True),
        Route("select, not cleared", size, _fused(p, clear=False), summed),
        Route("select, two steps", size, _two_steps(p), reaching, selects=True),
        Route("select, residual kept", size, _apart(p), kept, selects=True),
        Route("exact k", p.pass_bytes + 8 * p.k, _exact(p), _same(p, p.largest), selects=True),
    ]
    if p.residual.device.type != "cpu":
        if p.n <= WARM_UP_TO:
            made.append(Route("select, warm", size, _fused(p), reaching, selects=True, warm=True))
        if p.n <= GRAPH_UP_TO:
            made.append(Route("select, in a graph", size, _graphed(p), reaching, selects=True))
    return made


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
    divisor, out, held = divisor.to(device), torch.empty_like(p.residual), kernels.Workspace()
    source, target = torch.zeros(2, size // 2, dtype=torch.uint8, device=device)

    def by(select: Callable[[Accumulator], Any], verdict: Verdict | None) -> Callable[[torch.Tensor], Found]:
        def run(residual: torch.Tensor) -> Found:
            acc = Accumulator(residual, p.gradient, out, held, verdict)
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
        exact = by(lambda acc: acc.top_k_padded(p.k), Verdict(device))
        made.append(Route("exact k by update", size + 8 * p.k, exact, same(best)))
        launched = _launched_by_update(p, divisor, threshold, reaching.room, out)
        made.append(Route("its kernels", needed, launched, same(reaching)))
    return made


def _launched_by_update(
    p: Problem, divisor: torch.Tensor, threshold: float, count: int, out: torch.Tensor
) -> Callable[[torch.Tensor], Found]:
    """Return the launches of a selection by update, of ``count`` entries, into memory that is allocated here."""
    marks, limit = kernels.Marks.empty(p.n, out.device), torch.tensor([threshold], device=out.device)
    indices, values = out.new_empty(count, dtype=torch.int32), out.new_empty(count)
    found = torch.zeros(1, dtype=torch.int64, device=out.device)

    def launch(residual: torch.Tensor) -> Found:
        kernels.mark(residual, p.gradient, out, limit, marks, divisor=divisor)
        kernels.expand(out, marks, indices, values, found, divisor=divisor)
        kernels.set_at(out, indices)
        return indices, values

    return launch


def _peers(p: Problem) -> list[Route]:
    size, reaching = p.pass_bytes + 8 * p.reaching[0].numel(), _same(p, p.reaching)

    def magnitudes(found: Found, left: torch.Tensor) -> bool:
        # Alternatives may break ties differently. They must find the same k magnitudes and clear these entries.
        return torch.equal(*(v.abs().sort().values for v in (found[1], p.largest[1]))) and not left[found[0]].any()

    return [
        Route("abs().topk", p.pass_bytes + 8 * p.k, _topk(p), magnitudes, selects=True),
        Route("nonzero", size, _nonzero(p), reaching, selects=True),
    ]


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
    marks = kernels.Marks.empty(p.n, p.residual.device)
    limit = torch.tensor([p.threshold], device=p.residual.device)
    indices, values = (torch.empty_like(t) for t in p.reaching)
    found = torch.zeros(1, dtype=torch.int64, device=p.residual.device)

    def launch(residual: torch.Tensor) -> Found:
        kernels.mark(residual, p.gradient, residual, limit, marks)
        kernels.expand(residual, marks, indices, values, found)
        return done(residual, (indices, values, found))

    return launch


def _graphed(p: Problem) -> Callable[[torch.Tensor], Found]:
    """Capture the launches of the fused route at the first call and replay them later, always on the same residual."""
    launch, graph, captured = _fused(p), torch.cuda.CUDAGraph(), []

    def run(residual: torch.Tensor) -> Found:
        if not captured:
            launch(residual.clone())  # compiles the kernels and allocates the workspace
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                captured.append(launch(residual))
        graph.replay()
        return captured[0]

    return run


def _two_steps(p: Problem) -> Callable[[torch.Tensor], Found]:
    workspace = kernels.Workspace()

    def run(residual: torch.Tensor) -> Found:
        residual.add_(p.gradient)
        return _cleared(residual, kernels.select(residual, p.threshold, workspace=workspace)[:2])

    return run


def _apart(p: Problem) -> Callable[[torch.Tensor], Found]:
    """Write the sum to another tensor, as in training, where a failed exchange must not change the residual."""
    workspace, out = kernels.Workspace(), torch.empty_like(p.residual)

    def run(residual: torch.Tensor) -> Found:
        return kernels.accumulate_and_select(residual, p.gradient, out, p.threshold, workspace=workspace)[:2]

    return run


def _exact(p: Problem) -> Callable[[torch.Tensor], Found]:
    workspace = kernels.Workspace()

    def run(residual: torch.Tensor) -> Found:
        found = kernels.top_k_padded(residual, p.gradient, residual, p.k, workspace=workspace)
        return _cleared(residual, tuple(found))

    return run


def _topk(p: Problem) -> Callable[[torch.Tensor], Found]:
    gradient, k = p.gradient, p.k

    def run(residual: torch.Tensor) -> Found:
        residual.add_(gradient)
        indices = torch.topk(residual.abs(), k, sorted=False).indices
        values = residual[indices]
        residual[indices] = 0.0
        return indices, values

    return run


def _nonzero(p: Problem) -> Callable[[torch.Tensor], Found]:
    gradient, threshold = p.gradient, p.threshold

    def run(residual: torch.Tensor) -> Found:
        residual.add_(gradient)
        indices = (residual.abs() >= threshold).nonzero().squeeze(1)
        values = residual[indices]
        residual[indices] = 0.0
        return indices, values

    return run


def parts(p: Problem) -> list[Route]:
    """Return routes of single operations: addition, marking, merging and decompression."""
    device, workspace = p.residual.device, kernels.Workspace()
    dense = torch.zeros_like(p.residual)
    dense[p.largest[0].long()] = p.largest[1]
    out = torch.empty_like(dense)
    rows = tuple(t.expand(LISTS, -1).contiguous() for t in p.largest)
    lists = list(zip(*rows, strict=True))
    merged = [part.to(device) for part in kernels.merge([(at.cpu(), x.cpu()) for at, x in lists], p.n)]
    marks, limit = kernels.Marks.empty(p.n, device), torch.tensor([p.threshold], device=device)
    made = [
        Route(
            "accumulate", p.pass_bytes, lambda r: r.add_(p.gradient),
            lambda found, left: torch.equal(found, p.total),
        ),
        Route(
            "exact k of a sum", 4 * p.n + 8 * p.k, lambda r: kernels.top_k(p.total, p.k, workspace=workspace)[:2],
            lambda found, left: all(map(torch.equal, found, p.largest)),
        ),
        Route(
            "decompress", 4 * p.n + 8 * p.k, lambda r: kernels.decompress(out, *p.largest),
            lambda found, left: torch.equal(found, dense),
        ),
        Route(
            f"merge of {LISTS} lists", 8 * LISTS * p.k + 8 * p.k,
            lambda r: kernels.merge(lists, p.n, workspace=workspace),
            lambda found, left: all(map(torch.equal, found, merged)),
        ),
    ]  # fmt: skip
    if device.type != "cpu":
        made.append(
            Route(
                "mark",
                p.pass_bytes + p.n // 8,
                lambda r: kernels.mark(r, p.gradient, r, limit, marks),
                lambda found, left: torch.equal(left, p.total) and int(marks.counts.sum()) == p.reaching[0].numel(),
            )
        )
        made.append(_rebalance(p))
    return made


def static_parts(p: Problem) -> list[Route]:
    """Return routes on lists with padding: top-k per segment, sums of rows, and rows of sections."""
    device, workspace = p.residual.device, kernels.Workspace()
    room = -(-p.k // LISTS)
    bounds = torch.arange(0, p.n + 1, p.n // LISTS, dtype=torch.int32, device=device)[: LISTS + 1].contiguous()
    budgets = torch.full((LISTS,), room, dtype=torch.int32, device=device)
    rows = kernels.Entries(*(t.expand(LISTS, -1).contiguous() for t in p.largest))
    layout, lows = Layout.of(p.k, p.n, SECTION_FORMAT), torch.zeros_like(budgets)

    def packed(lows: torch.Tensor, rows: kernels.Entries) -> Found:
        words, sent = write_rows(layout, lows, rows, workspace=workspace)
        found, malformed = read_rows(layout, lows, words, workspace=workspace)
        return words, *sent, *found, malformed

    # The references compute on a CPU.
    own, host = kernels.Entries(rows.indices.cpu(), rows.values.cpu()), kernels.Workspace()
    segments = kernels.top_k_rows(p.total.cpu(), bounds.cpu(), budgets.cpu(), room, workspace=host)
    union = kernels.merge_rows(own, p.n, workspace=host)
    summed = p.residual.cpu().clone()
    kernels.add_rows(summed, own, workspace=host)
    added, written = summed.to(device), [part.to(device) for part in packed(lows.cpu(), own)]
    segments, union = (kernels.Entries(*(part.to(device) for part in found)) for found in (segments, union))

    def same(expected: Found) -> Callable[[Found, torch.Tensor], bool]:
        return lambda found, left: all(map(torch.equal, found, expected))

    return [
        Route(
            f"exact k of {LISTS} segments", 4 * p.n + 8 * p.k,
            lambda r: kernels.top_k_rows(p.total, bounds, budgets, room, workspace=workspace), same(segments),
        ),
        Route(
            f"merge of {LISTS} rows", 8 * LISTS * p.k + 8 * union.room,
            lambda r: kernels.merge_rows(rows, p.n, workspace=workspace), same(union),
        ),
        Route(
            f"add {LISTS} rows", 16 * LISTS * p.k, lambda r: kernels.add_rows(r, rows, workspace=workspace),
            lambda found, left: torch.equal(left, added),
        ),
        Route(
            f"{LISTS} sections of {SECTION_FORMAT.bits} bits", 8 * LISTS * (2 * layout.words + p.k),
            lambda r: packed(lows, rows), same(written),
        ),
    ]  # fmt: skip


def _rebalance(p: Problem) -> Route:
    """Rebalance 64 equally loaded partitions of 16 blocks by the paper's rule. Read its time, not its bandwidth."""
    device = p.residual.device
    fresh = torch.full((64,), 16, dtype=torch.int32, device=device)
    counts = torch.full((64,), 100, dtype=torch.int32, device=device)
    blocks, bounds = fresh.clone(), fresh.new_zeros(65)
    numbers = {"iteration": 0, "block": 1024, "numel": 1 << 20, "min_blocks": 1, "rule": "paper"}

    def run(_: torch.Tensor) -> torch.Tensor:
        kernels.rebalance(blocks, bounds, counts, **numbers)
        return blocks

    return Route("rebalance 64", 64 * 16, run, lambda found, left: torch.equal(found, fresh))
