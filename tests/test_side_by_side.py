"""Commands that run beside each other."""

from __future__ import annotations

import sys

import pytest

import side_by_side


@pytest.mark.parametrize("failing", [None, 0, 1, 2])
def test_each_command_counts(failing: int | None, capfd: pytest.CaptureFixture[str]) -> None:
    """All commands run, what they print is shown, and one that fails is named, wherever it stands."""
    code = "import sys; print('number', sys.argv[1]); sys.exit(sys.argv[1] == sys.argv[2])"
    command = [sys.executable, "-c", code]
    arguments = [each for number in range(3) for each in (*command, str(number), str(failing), ":::")]
    assert side_by_side.main(arguments[:-1]) == (failing is not None)
    *printed, first, second, third = capfd.readouterr().out.splitlines()
    assert [line for line in printed if line.startswith("number")] == ["number 0", "number 1", "number 2"]
    for number, end in enumerate((first, second, third)):
        assert end.startswith("failed after" if number == failing else "passed after")
