"""Access to the documentation pages, for tests that run their code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def blocks(page: str) -> list[str]:
    """Return the Python code blocks of a page."""
    return code_of((ROOT / page).read_text())


def code_of(text: str, language: str = "python") -> list[str]:
    """Return the code blocks of a text in a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def in_place_of_ddp(page: str, number: int) -> str:
    """Return the script of the page on DDP with block ``number`` of ``page`` in place of its lines up to ``wrap``."""
    (script, *_), own = blocks("docs/how-to/ddp.md"), blocks(page)[number]
    before, middle, after = re.split(r"(?sm)(^dist\.init_process_group.*^optimizer = tritoncomm\.wrap[^\n]*\n)", script)
    assert "DistributedDataParallel(model)" in middle
    return before + own + after


def section(page: str, title: str) -> str:
    """Return the text below a heading of a page, up to the next heading of its level."""
    return (ROOT / page).read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
