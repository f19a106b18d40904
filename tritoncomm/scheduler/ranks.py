"""How texts name ranks: by their global numbers, whatever the process group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar

import torch.distributed as dist

members: ContextVar[Sequence[int] | None] = ContextVar("members", default=None)
"""The global ranks of the group of the pattern that runs, for :func:`named`. None in a simulation of one group."""


def rank_text(*ranks: int) -> str:
    """Return what texts call the ``ranks`` with these global numbers: "rank 3", "ranks [0, 3]" or "no rank".

    Nothing else words it, so that a change here changes every text.
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {list(ranks)}" if ranks else "no rank"


def text_by_rank(texts: Mapping[int, str], said: str = ":") -> str:
    """Return the ``texts`` of several ranks as one. What is ``said`` stands between a rank and its text."""
    return "; ".join(f"{rank_text(rank)}{said} {text}" for rank, text in texts.items())


def global_ranks(group: dist.ProcessGroup | None) -> list[int]:
    """Return the global ranks of ``group``, in its order. ``None`` is the default process group.

    Without process groups, there is rank 0.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [0]
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def name_of(group: dist.ProcessGroup | None) -> str:
    """Return the name of ``group``, which is the same on all its ranks."""
    return str(getattr(group or dist.group.WORLD, "group_name", ""))


def own_rank() -> int:
    """Return the global rank of this process, 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def speaks(group: dist.ProcessGroup | None) -> bool:
    """Return True on the first rank of ``group``, which logs for all, and without a process group."""
    if group is None or not dist.is_initialized():
        return own_rank() == 0
    return dist.get_rank(group) == 0


def named(numbers: Iterable[int]) -> list[int]:
    """Return the global ranks of ``numbers``, which count the ranks of the group whose pattern calls this.

    A pattern knows no process group. It calls this for what its errors say. Numbers of no rank stay as they are.
    """
    held = members.get() or ()
    return [held[number] if number in range(len(held)) else number for number in numbers]
