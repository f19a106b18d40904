# ruff: noqa: E501 - lines of the library with their line breaks
"""Lines that must not be lost: each is broken here, and the tests that are named must fail.

``python tests/broken_lines.py`` breaks a sample of them, ``--all`` each, one after the other, in a copy of the package.
It ends with status 1 if a broken line survives its tests. Most are the decisive lines of fixes in the history.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PROMISES = Path("tests", "promises")


class BrokenLine(NamedTuple):
    """A line in a ``file`` of the package, what to write instead of ``old``, and the tests of which one must fail.

    Tests are given by file and name, as in ``"exchange test_a test_b"``: those of ``tests/promises/test_exchange.py``.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str

    @property
    def test_file(self) -> Path:
        """The file of the tests."""
        return PROMISES / f"test_{self.tests.split()[0]}.py"

    @property
    def test_names(self) -> list[str]:
        """The names of the tests."""
        return self.tests.split()[1:]


BROKEN = [
    # exchange: from .grad to a mean that all ranks confirmed
    BrokenLine(
        "the residual is not replaced by a step",
        "step/feedback.py",
        "before, self.residual = self.residual, self._scratch",
        "before = self._scratch",
        "exchange test_sum_of_all_steps_and_a_flush_is_dense",
    ),
    BrokenLine(
        "a mean that is thrown away counts as delivered",
        "step/exchange.py",
        "            self.skipped += bool(self._begun)\n            self._drop()",
        "            self.skipped += bool(self._begun)\n            self._commit()",
        "exchange test_thrown_away_mean_leaves_no_trace",
    ),
    BrokenLine(
        "a mean that is thrown away changes the state of the method",
        "step/feedback.py",
        "self.algorithm.state = self._after = self._before",
        "self._before = self.algorithm.state = self._after",
        "exchange test_thrown_away_mean_leaves_no_trace",
    ),
    BrokenLine(
        "a step that was rejected does not count",
        "step/exchange.py",
        "        self.skipped += 1\n        error = ",
        "        error = ",
        "exchange test_non_finite_gradient_skips_the_step_everywhere",
    ),
    BrokenLine(
        "an error about a NaN does not name the parameter",
        "step/exchange.py",
        "self._at_fault = self._at_fault or listed(bad)",
        "self._at_fault = ''",
        "exchange test_error_about_a_nan_names_rank_and_parameter_in_a_group",
    ),
    BrokenLine(
        "what ranks tell is listed by their number in the group",
        "step/agree.py",
        "return dict(zip(global_ranks(group), gathered, strict=True))",
        "return dict(enumerate(gathered))",
        "exchange test_error_about_a_nan_names_rank_and_parameter_in_a_group",
    ),
    BrokenLine(
        "a mean may overflow in fp16",
        "step/flat.py",
        "return values.abs() <= torch.finfo(torch.float16).max",
        "return values.isfinite()",
        "exchange test_overflow_in_half_precision_is_refused",
    ),
    BrokenLine(
        "a rank whose gradients cannot be exchanged takes part with zeros",
        "step/exchange.py",
        "vector.flat.fill_(math.nan)",
        "vector.flat.zero_()",
        "exchange test_gradient_that_cannot_be_exchanged_is_refused_by_name",
    ),
    BrokenLine(
        "gradients are not clipped",
        "step/clipping.py",
        "        vector.flat.mul_(factor)",
        "        vector.flat.mul_(1.0)",
        "exchange test_max_grad_norm_limits_the_mean_of_this_step",
    ),
    BrokenLine(
        "a bias is selected like other tensors",
        "step/flat.py",
        "or (dense_below > 0 and parameter.dim() <= 1 and not flattened)",
        "or False",
        "exchange test_small_tensors_and_dense_groups_travel_whole",
    ),
    BrokenLine(
        "dense=True of a group has no effect",
        "step/parameters.py",
        'found.update(map(id, group["params"]) if chosen else ())',
        "found.update(())",
        "exchange test_small_tensors_and_dense_groups_travel_whole",
    ),
    BrokenLine(
        "traffic is not summed over steps",
        "step/exchange.py",
        'self.total.count("all", vector.meter.sent, vector.meter.received)',
        "pass",
        "exchange test_metrics_count_bytes_and_steps",
    ),
    BrokenLine(
        "a parameter without gradient takes part in a step",
        "step/exchange.py",
        "return frozenset() if self._leaves_none else self.presence.absent",
        "return frozenset()",
        "exchange test_parameter_without_gradient_anywhere_is_left_alone",
    ),
    BrokenLine(
        "a parameter of which one rank has no gradient is left alone on all",
        "step/presence.py",
        "if count == vector.world_size)",
        "if count > 0)",
        "exchange test_parameter_without_gradient_anywhere_is_left_alone",
    ),
    BrokenLine(
        "what waits for a frozen parameter is delivered and lost",
        "step/presence.py",
        "id(each) for each in parameters if each.grad is None or not each.requires_grad or id(each) in resting",
        "id(each) for each in parameters if id(each) in resting",
        "exchange test_frozen_parameter_keeps_its_residual",
    ),
    BrokenLine(
        "what waits for a group with a rate of zero is delivered and lost",
        "step/exchange.py",
        "rests = resting(self.optimizer) if delays else frozenset[int]()",
        "rests = frozenset[int]()",
        "exchange test_group_with_a_rate_of_zero_keeps_its_residual",
    ),
    BrokenLine(
        "coupled decay has the sign of a minimization",
        "step/update.py",
        '* (-1.0 if group.get("maximize") else 1.0)',
        "* 1.0",
        "exchange test_coupled_decay_reaches_coordinates_without_gradient",
    ),
    BrokenLine(
        "coupled decay stays out of the residual",
        "step/decay.py",
        "vector.feedback.pending.add_(_without(decay, whole))",
        "pass",
        "exchange test_coupled_decay_reaches_coordinates_without_gradient",
    ),
    BrokenLine(
        "coupled decay counts twice",
        "step/update.py",
        '        for group, _ in held:\n            group["weight_decay"] = 0',
        "        pass",
        "exchange test_coupled_decay_reaches_coordinates_without_gradient",
    ),
    BrokenLine(
        "options may differ between ranks",
        "step/agree.py",
        "return repr((options, self.updates, self.is_stopped))",
        "return repr((self.updates, self.is_stopped))",
        "exchange test_options_that_differ_are_refused_in_the_step",
    ),
    BrokenLine(
        "frozen parameters may differ between ranks",
        "step/presence.py",
        'return "".join(str(2 * (id(each) in self.absent) + each.requires_grad) for each in parameters)',
        'return "".join(str(id(each) in self.absent) for each in parameters)',
        "exchange test_parameters_frozen_on_one_rank_are_refused",
    ),
    BrokenLine(
        "an update that has stopped may be saved",
        "step/exchange.py",
        "if self.state in (State.MEANS, State.STOPPED):",
        "if self.state is State.MEANS:",
        "exchange test_update_that_fails_in_the_middle_stops_the_training",
    ),
    BrokenLine(
        "ranks that have all stopped step on",
        "step/exchange.py",
        "return agree.Stepping(self.optimizer, self.updates, self.state is State.STOPPED)",
        "return agree.Stepping(self.optimizer, self.updates, False)",
        "exchange test_update_that_fails_in_the_middle_stops_the_training",
    ),
    BrokenLine(
        "loading does not end a stop",
        "step/exchange.py",
        '        self._move("restart")',
        "        pass",
        "exchange test_update_that_fails_in_the_middle_stops_the_training",
    ),
    BrokenLine(
        "hooks before the update run within it",
        "step/update.py",
        "            _run(before, part.optimizer)\n        readable = not any(before for before, _ in hooks)\n        with update:",
        "            pass\n        readable = False\n        with update:\n            _run(hooks[0][0], self.parts[0].optimizer)",
        "exchange test_hook_that_fails_before_the_update_loses_nothing",
    ),
    BrokenLine(
        "a hook that fails behind the update lets it be repeated",
        "optimizer.py",
        "            if exchange.steps > steps:",
        "            if False:",
        "exchange test_hook_that_fails_behind_the_update_does_not_repeat_it",
    ),
    BrokenLine(
        "what a hook makes of .grad is not read",
        "step/update.py",
        "readable = not any(before for before, _ in hooks)",
        "readable = True",
        "exchange test_hooks_run_once_and_may_change_the_mean",
    ),
    BrokenLine(
        "hooks of all optimizers run twice",
        "step/update.py",
        'inspect.unwrap(step, stop=lambda inner: not getattr(inner, "hooked", False))(optimizer)',
        "step(optimizer)",
        "exchange test_hooks_run_once_and_may_change_the_mean test_schedules_made_before_or_after_count_every_step",
    ),
    BrokenLine(
        "hooks of the original optimizer do not run",
        "step/update.py",
        "return [hook for hook in before if hook is not refuse], after",
        "return [], []",
        "exchange test_hooks_run_once_and_may_change_the_mean",
    ),
    BrokenLine(
        "local gradients may be added to the mean",
        "step/misuse.py",
        "if self._changed and any(id(each) in self._changed for each in gradients if each is not None):",
        "if False:",
        "exchange test_backward_after_synchronize_is_refused",
    ),
    BrokenLine(
        ".grad may be replaced after synchronize()",
        "step/update.py",
        "if self.written and any(now is not then for now, then in zip(gradients, self.written, strict=True)):",
        "if False:",
        "exchange test_synchronize_shows_the_mean_once",
    ),
    BrokenLine(
        "synchronize() exchanges again",
        "step/exchange.py",
        '            raise RuntimeError("gradients were exchanged already',
        '            self.discard()\n        if False:\n            raise RuntimeError("gradients were exchanged already',
        "exchange test_synchronize_shows_the_mean_once",
    ),
    BrokenLine(
        "a state is saved between synchronize() and step()",
        "step/optimizer_setup.py",
        "if self.is_synchronized and self._exchange.delivered is not None:",
        "if False:",
        "exchange test_synchronize_shows_the_mean_once",
    ),
    BrokenLine(
        "elements of .grad that share memory are overwritten",
        "step/flat.py",
        "return 0 not in gradient.stride()",
        "return True",
        "exchange test_gradients_may_have_any_strides",
    ),
    BrokenLine(
        "a .grad that is not contiguous stays zero",
        "step/flat.py",
        "    if not out.is_contiguous():\n        out.copy_(flat.view(out.shape))",
        "    pass",
        "exchange test_gradients_may_have_any_strides",
    ),
    BrokenLine(
        "a closure runs without gradients inside no_grad()",
        "optimizer.py",
        "with torch.enable_grad():",
        "with nullcontext():",
        "exchange test_closure_is_called_once_with_gradients",
    ),
    BrokenLine(
        "a group that is added drops the residual",
        "step/state.py",
        "own[parameter].copy_(residual)",
        "pass",
        "exchange test_group_that_is_added_keeps_the_residual",
    ),
    BrokenLine(
        "a group that is refused stays",
        "step/optimizer_setup.py",
        "del self.param_groups[before:]",
        "pass",
        "exchange test_group_that_is_added_keeps_the_residual",
    ),
    BrokenLine(
        "residuals are not scaled to the size of a new group",
        "step/state.py",
        "share = new.world_size / before.world_size",
        "share = 1.0",
        "exchange test_smaller_group_keeps_the_share_of_its_residuals",
    ),
    BrokenLine(
        "a state for a checkpoint is made by an exchange",
        "optimizer.py",
        "if creates_state(self.optimizer):",
        "if False:",
        "exchange test_state_for_a_checkpoint_is_made_without_an_exchange",
    ),
    BrokenLine(
        "schedules do not see that a step was taken",
        "step/torch_internals.py",
        "optimizer._opt_called = True",
        "optimizer._opt_called = False",
        "exchange test_schedules_made_before_or_after_count_every_step",
    ),
    # end
]


def problems() -> list[str]:
    """Return what is wrong with the table: a text that is not there once, or a test that does not exist."""
    found = [
        f"the name {line.name!r} is there twice" for line in BROKEN if [x.name for x in BROKEN].count(line.name) > 1
    ]
    for line in BROKEN:
        count = (ROOT / "tritoncomm" / line.file).read_text().count(line.old)
        if count != 1:
            found.append(f"{line.name}: {line.old!r} is {count} times in tritoncomm/{line.file}, expected once")
        text = (ROOT / line.test_file).read_text() if (ROOT / line.test_file).exists() else ""
        missing = [name for name in line.test_names if f"\ndef {name}(" not in text]
        if missing or not line.test_names:
            found.append(f"{line.name}: {line.test_file} has no {' and '.join(missing) or 'test'}")
    return found


def survives(line: BrokenLine) -> str:
    """Run the tests of ``line`` on a copy of the package with the line broken. Return why it survives, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "tritoncomm")
        shutil.copytree(ROOT / "tritoncomm", package, ignore=shutil.ignore_patterns("__pycache__"))
        file = package / line.file
        file.write_text(file.read_text().replace(line.old, line.new))
        path = os.pathsep.join([folder, str(ROOT / "kernels")])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        # No conftest: it looks inside the library. Not from the root, where the package would be found first.
        options = ["-q", "-x", "--noconftest", "-p", "no:cacheprovider", f"--rootdir={ROOT}", "--tb=short"]
        options += [f"--config-file={ROOT / 'pyproject.toml'}"]
        tests = [f"{ROOT / line.test_file}::{name}" for name in line.test_names]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        ended = subprocess.run(  # noqa: S603 - runs pytest
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    if ended.returncode == 1:
        return ""
    return "no test fails" if ended.returncode == 0 else f"the tests did not run:\n{ended.stdout}{ended.stderr}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Break lines, and return 1 if one survives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="lines whose name contains one of these texts")
    parser.add_argument("--sample", type=int, default=40, help="number of lines (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of the sample (default: another one each day)")
    parser.add_argument("--all", action="store_true", help="all lines")
    chosen = parser.parse_args(arguments)
    wrong = problems()
    if wrong:
        sys.stdout.write("\n".join(wrong) + "\n")
        return 1
    lines = [line for line in BROKEN if any(name in line.name for name in chosen.names)] if chosen.names else BROKEN
    if not chosen.all and not chosen.names:
        seed = int(time.time() // 86400) if chosen.seed is None else chosen.seed
        lines = random.Random(seed).sample(lines, min(chosen.sample, len(lines)))  # noqa: S311 - a choice of tests
    survivors = 0
    for line in lines:
        began = time.monotonic()
        reason = survives(line)
        survivors += bool(reason)
        state = f"SURVIVED, {reason}" if reason else "caught"
        sys.stdout.write(f"{state}: {line.name} ({line.file}) {time.monotonic() - began:.1f} s\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(lines)} lines broken, {survivors} survived\n")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
