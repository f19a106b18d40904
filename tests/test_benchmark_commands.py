"""Every results file has a command, and every command in a page exists, with options that parse."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import subprocess
from collections.abc import Iterator

import pytest
from tritoncomm.__main__ import main

from pages import ROOT

BENCHMARKS = ROOT / "benchmarks"
PAGES = sorted(
    str(file.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "kernels/*.md", "tests/**/*.md")
    for file in ROOT.glob(pattern)
)
FOLDERS = ("docs", "tritoncomm", "kernels", "tests", "benchmarks")
PLACEHOLDERS = "NAME", "my_methods"  # a reader fills in these


def spans(text: str) -> Iterator[tuple[str, str]]:
    """Yield the code of a page, and what follows it: each line of a block, and each piece inside a line of text."""
    for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL):
        yield from ((line, "") for line in block.replace("\\\n", " ").splitlines())
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for found in re.finditer(r"`([^`]+)`", prose):
        yield " ".join(found[1].split()), " ".join(prose[found.end() :][:40].split())


def check(script: str, options: str, after: str) -> None:
    """Raise unless ``script`` exists and its options parse, or ``after`` names a commit that has it."""
    gone = re.match(r"at (?:commit )?`([0-9a-f]{7,})`", after)
    if gone:
        if (ROOT / ".git").exists() and not (ROOT / ".git" / "shallow").exists():
            command = ["git", "cat-file", "-e", f"{gone[1]}:benchmarks/{script}"]
            found = subprocess.run(command, cwd=ROOT, check=False)  # noqa: S603 - a name from our own page
            assert found.returncode == 0, f"{gone[1]} has no {script}"
        return
    assert (BENCHMARKS / script).exists(), script
    if script.endswith(".py") and options:
        importlib.import_module(script.removesuffix(".py")).arguments().parse_args(shlex.split(options))


@pytest.mark.parametrize("page", PAGES)
def test_scripts_of_a_page(page: str) -> None:
    """Every script of ``benchmarks/`` that the page names exists, or existed at the commit that the page names."""
    for code, after in spans((ROOT / page).read_text()):
        found = re.search(r"benchmarks/(\w+\.(?:py|sh))\b([^|&>]*)", code)
        if found and not any(name in code for name in PLACEHOLDERS):
            check(found[1], found[2].strip(), after)


def test_readme_lists_the_scripts() -> None:
    """The table of the README of benchmarks has every script, and nothing else. Each has its parser in a function."""
    table = [line for line in (BENCHMARKS / "README.md").read_text().splitlines() if line.startswith("| `")]
    scripts = [file.name for file in BENCHMARKS.glob("*.py") if "def main()" in file.read_text()]
    assert all("\ndef arguments() ->" in (BENCHMARKS / name).read_text() for name in scripts)
    assert sorted(re.findall(r"`(\w+\.py)`", "".join(line.split(" | ")[0] for line in table))) == sorted(scripts)


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of ``python -m tritoncomm`` in the page exists, and its options parse."""

    class ParsedError(Exception):
        """The options are valid."""

    original = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, arguments: list[str]) -> None:
        original(self, arguments)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    for code, _ in spans((ROOT / page).read_text()):
        found = re.search(r"-m tritoncomm ([a-z][^|&>]*)", code)
        if found and not any(name in code for name in PLACEHOLDERS):
            arguments = shlex.split(found[1])
            if len(arguments) == 1:  # named, and not run
                with pytest.raises(SystemExit, match="0"):
                    main([*arguments, "--help"])
            else:
                with pytest.raises(ParsedError):
                    main(arguments)


def test_results_that_are_named_exist() -> None:
    """Every results file that a page, a comment or a test names exists."""
    named = {code for page in PAGES for code, _ in spans((ROOT / page).read_text())}
    named = {code for code in named if re.fullmatch(r"(h200/)?[a-z]\w+\.json", code)}
    scripts = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    for file in (*scripts, *(ROOT / page for page in PAGES)):
        named |= set(re.findall(r"benchmarks/results/([\w/-]+\.\w+)", file.read_text()))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (BENCHMARKS / "results" / name).exists()] == []


def test_every_result_has_a_command() -> None:
    """The index has one row for each file, with a command that exists, or a script and the commit that has it."""
    folder = BENCHMARKS / "results"
    lines = [line.split(" | ") for line in (folder / "README.md").read_text().splitlines() if line.startswith("| [")]
    listed = [name for file, *_ in lines for name in re.findall(r"\]\((?!\.\.)([^)]+)\)", file)]
    assert sorted(listed) == sorted(
        str(file.relative_to(folder)) for file in folder.rglob("*.*") if file.name != "README.md"
    )
    for file, command, *_ in lines:
        named = [(code, after) for code, after in spans(command) if re.search(r"\.py\b|^py", code)]
        assert named, f"{file} has no command"
        for code, after in named:
            script, _, options = code.partition(".py")
            if "/" not in script and " " not in script:
                check(f"{script}.py", options.strip(), after)
        rows = folder / listed[0]
        assert rows.suffix != ".json" or json.loads(rows.read_text())
