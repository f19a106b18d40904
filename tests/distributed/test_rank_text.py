"""One function words the name of a rank, for every text of the library."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from models import adamw, exact, tiny
from tritoncomm import checkpoint
from tritoncomm.errors import TritoncommError
from tritoncomm.primitives.collectives import share_counts
from tritoncomm.scheduler.process_group import ProcessGroupScheduler, reporting
from tritoncomm.scheduler.ranks import rank_text, text_by_rank
from tritoncomm.step import agree

from ranks import ranks

LIBRARY = Path(tritoncomm.__file__).parent
# A text that goes on with a value behind the word: where it ends, in an f-string or a sum, or has a field.
_NAMES = re.compile(r"\branks? ($|%|\{)", re.IGNORECASE)


def exchange(rank, folder):
    """Both ranks have sent more than there can be."""
    ProcessGroupScheduler().run(share_counts([9, 9], True, torch.device("cpu"), limit=5))


def agreement(rank, folder):
    """A setting differs."""
    agree.compare({"lr": rank}, None)


def save(rank, folder):
    """The folder has the state of a group without this rank."""
    (own := folder / str(rank)).mkdir()
    (own / "group-of-rank-9.json").write_text("[9]")
    alone = dist.new_group([rank], use_local_synchronization=True)
    checkpoint.save(exact(adamw(tiny()), process_group=alone), own)


def failure_report(rank, folder):
    """Something fails on both ranks."""
    with reporting(None, torch.device("cpu"), "test"):
        raise RuntimeError("no room")


def process_group(rank, folder):
    """The ranks of a subgroup do not ascend."""
    ProcessGroupScheduler(subgroups=[(1, 0)])


ROOMS = {each.__name__: each for each in (exchange, agreement, save, failure_report, process_group)}


@ranks(2)
@pytest.mark.parametrize("room", ROOMS)
def test_another_wording(rank, world_size, room, tmp_path):
    """Where the one function says another word, the errors of every room do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_text, "__code__", (lambda *ranks: f"machine {ranks[0]}").__code__)
        with pytest.raises(TritoncommError, match=r"machine \d") as caught:
            ROOMS[room](rank, tmp_path)
    assert not re.search(r"\branks? \W?\d", str(caught.value))


def test_wording() -> None:
    """One rank is called without brackets, and texts of several ranks are one text."""
    assert [rank_text(*each) for each in ((), (3,), (0, 3))] == ["no rank", "rank 3", "ranks [0, 3]"]
    assert text_by_rank({0: "slow", 3: "lost"}, " was") == "rank 0 was slow; rank 3 was lost"


def test_nothing_else_words_the_name_of_a_rank() -> None:
    """No other text has a value behind the word. What ``portable.py`` has is a key of saved files."""
    found = {
        file.name
        for file in LIBRARY.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAMES.search(node.value)
    }
    assert found == {"ranks.py", "portable.py"}


@pytest.mark.parametrize("text", ['f"of rank {n}"', 'f"ranks " f"{n}"', '"Rank " + n', '"rank %d"', '"ranks {}"'])
def test_a_name_is_found(text: str) -> None:
    """However a text is put together."""
    constants = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    assert any(map(_NAMES.search, constants))


def test_one_function_knows_the_global_rank_of_this_process() -> None:
    """Everything else asks it. ``get_rank(group)`` is a place in a group, which no text names."""
    found = {file.name for file in LIBRARY.rglob("*.py") if re.search(r"get_rank\(\)", file.read_text())}
    assert found == {"ranks.py"}
