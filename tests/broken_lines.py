# ruff: noqa: E501 - lines of the library with their line breaks
"""Lines that must not be lost: each is broken here, and the tests that are named must fail.

``python tests/broken_lines.py`` breaks a sample of them, ``--all`` each, one after the other, in a copy of the package.
It ends with status 1 if a broken line survives its tests. Most are the decisive lines of fixes in the history.

``--tests PATH ... FOLDER ...`` runs all tests of a file against the lines in these folders of the package, and writes
into ``tests/broken_lines.json`` which of them catch which line.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

import pytest

import ranks

ROOT = Path(__file__).resolve().parent.parent
NOTHING_FAILS = "no test fails"
SKIPPED = "its test was skipped"  # it needs a trainer that is not installed
PROMISES = Path("tests", "promises")
CATCHES = ROOT / "tests" / "broken_lines.json"


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
        "step/exchange/feedback.py",
        "before, self.residual = self.residual, self.pending",
        "before = self.pending",
        "exchange test_sum_of_all_steps_and_a_flush_is_dense",
    ),
    BrokenLine(
        "a mean that is thrown away counts as delivered",
        "step/exchange/machine.py",
        "            self.skipped += bool(self.pending.parts)\n            self._drop()",
        "            self.skipped += bool(self.pending.parts)\n            self._commit()",
        "exchange test_thrown_away_mean_leaves_no_trace",
    ),
    BrokenLine(
        "a mean that is thrown away changes the state of the method",
        "step/exchange/feedback.py",
        "self.algorithm.state = self._after = self._before",
        "self._before = self.algorithm.state = self._after",
        "exchange test_thrown_away_mean_leaves_no_trace",
    ),
    BrokenLine(
        "a step that was rejected does not count",
        "step/exchange/machine.py",
        "        self.skipped += 1\n        return naming",
        "        return naming",
        "exchange test_non_finite_gradient_skips_the_step_everywhere",
    ),
    BrokenLine(
        "an error about a NaN does not name the parameter",
        "step/exchange/pending.py",
        "self.fault = self.fault or listed(bad)",
        "self.fault = ''",
        "exchange test_error_about_a_nan_names_rank_and_parameter_in_a_group",
    ),
    BrokenLine(
        "what ranks tell is listed by their number in the group",
        "step/agree/__init__.py",
        "told = dict(zip(global_ranks(group), gathered, strict=True))",
        "told = dict(enumerate(gathered))",
        "exchange test_error_about_a_nan_names_rank_and_parameter_in_a_group",
    ),
    BrokenLine(
        "a mean may overflow in fp16",
        "step/exchange/layout.py",
        "~(mean.values.abs() <= torch.finfo(torch.float16).max)",
        "~mean.values.isfinite()",
        "exchange test_overflow_in_half_precision_is_refused",
    ),
    BrokenLine(
        "a rank whose gradients cannot be exchanged takes part with zeros",
        "step/exchange/pending.py",
        "vector.flat.fill_(math.nan)",
        "vector.flat.zero_()",
        "exchange test_gradient_that_cannot_be_exchanged_is_refused_by_name",
    ),
    BrokenLine(
        "gradients are not clipped",
        "step/exchange/vector.py",
        "        vector.flat.mul_(factor)",
        "        vector.flat.mul_(1.0)",
        "exchange test_max_grad_norm_limits_the_mean_of_this_step",
    ),
    BrokenLine(
        "a bias is selected like other tensors",
        "step/exchange/layout.py",
        "or (dense_below > 0 and parameter.dim() <= 1 and not flattened)",
        "or False",
        "exchange test_small_tensors_and_dense_groups_travel_whole",
    ),
    BrokenLine(
        "dense=True of a group has no effect",
        "step/setup.py",
        'found.update(map(id, group["params"]) if chosen else ())',
        "found.update(())",
        "exchange test_small_tensors_and_dense_groups_travel_whole",
    ),
    BrokenLine(
        "traffic is not summed over steps",
        "step/exchange/machine.py",
        'self.total.count("all", vector.meter.sent, vector.meter.received)',
        "pass",
        "exchange test_metrics_count_bytes_and_steps",
    ),
    BrokenLine(
        "a parameter without gradient takes part in a step",
        "step/exchange/machine.py",
        "return self.presence.absent",
        "return frozenset()",
        "resting test_parameter_without_gradient_anywhere_is_left_alone",
    ),
    BrokenLine(
        "the residual of a rank without gradient waits while another rank has one",
        "step/exchange/presence.py",
        "missing & self.absent | resting",
        "missing | resting",
        "resting test_residual_takes_part_where_another_rank_has_a_gradient",
    ),
    BrokenLine(
        "a parameter of which one rank has no gradient is left alone on all",
        "step/exchange/presence.py",
        "if count == vector.world_size)",
        "if count > 0)",
        "resting test_parameter_without_gradient_anywhere_is_left_alone",
    ),
    BrokenLine(
        "what waits for a frozen parameter is delivered and lost",
        "step/exchange/machine.py",
        "missing = frozenset(id(each) for each in self.scope.parameters if each.grad is None or not each.requires_grad)",
        "missing = frozenset[int]()",
        "resting test_frozen_parameter_keeps_its_residual",
    ),
    BrokenLine(
        "what waits for a group with a rate of zero is delivered and lost",
        "step/exchange/machine.py",
        "self.presence.begin(missing | unrated)",
        "self.presence.begin(missing)",
        "resting test_group_with_a_rate_of_zero_keeps_its_residual",
    ),
    BrokenLine(
        "coupled decay has the sign of a minimization",
        "step/rules/step.py",
        '* (-1.0 if group.get("maximize") else 1.0)',
        "* 1.0",
        "exchange test_coupled_decay_reaches_coordinates_without_gradient",
    ),
    BrokenLine(
        "coupled decay stays out of the residual",
        "step/exchange/decay.py",
        "vector.feedback.pending.add_(_without(decay, whole))",
        "pass",
        "exchange test_coupled_decay_reaches_coordinates_without_gradient",
    ),
    BrokenLine(
        "coupled decay counts twice",
        "step/rules/step.py",
        '        for group, _ in held:\n            group["weight_decay"] = 0',
        "        pass",
        "exchange test_coupled_decay_reaches_coordinates_without_gradient",
    ),
    BrokenLine(
        "options may differ between ranks",
        "step/exchange/machine.py",
        "state = (self.presence.kinds(scope.parameters), option_numbers(scope.exchanged), compared)",
        "state = (self.presence.kinds(scope.parameters), compared)",
        "exchange test_options_that_differ_are_refused_in_the_step",
    ),
    BrokenLine(
        "frozen parameters may differ between ranks",
        "step/exchange/presence.py",
        "return [2 * (key in self.absent) + each.requires_grad for each, key in zip(parameters, keys, strict=True)]",
        "return [key in self.absent for key in keys]",
        "exchange test_parameters_frozen_on_one_rank_are_refused",
    ),
    BrokenLine(
        "an update that has stopped may be saved",
        "step/exchange/machine.py",
        "if self.state in (State.MEANS, State.STOPPED):",
        "if self.state is State.MEANS:",
        "around test_update_that_fails_in_the_middle_stops_the_training",
    ),
    BrokenLine(
        "ranks that have all stopped step on",
        "step/exchange/machine.py",
        "if self.state is State.STOPPED or total.claim:",
        "if total.claim:",
        "around test_update_that_fails_in_the_middle_stops_the_training",
    ),
    BrokenLine(
        "loading does not end a stop",
        "step/exchange/machine.py",
        '        self._move("restart")',
        "        pass",
        "around test_update_that_fails_in_the_middle_stops_the_training",
    ),
    BrokenLine(
        "hooks before the update run within it",
        "step/rules/step.py",
        "            _run(before, optimizer)\n        readable = not any(before for _, before, _ in hooks)\n        with update:",
        "            pass\n        readable = False\n        with update:\n            _run([hook for _, before, _ in hooks for hook in before], self._parts[0].optimizer)",
        "around test_hook_that_fails_before_the_update_loses_nothing",
    ),
    BrokenLine(
        "a hook that fails behind the update lets it be repeated",
        "step/stepper.py",
        "            if exchange.steps > steps:",
        "            if False:",
        "around test_hook_that_fails_behind_the_update_does_not_repeat_it",
    ),
    BrokenLine(
        "what a hook makes of .grad is not read",
        "step/rules/step.py",
        "readable = not any(before for _, before, _ in hooks)",
        "readable = True",
        "around test_hooks_run_once_and_may_change_the_mean",
    ),
    BrokenLine(
        "hooks of all optimizers run twice",
        "step/torch_internals.py",
        'inspect.unwrap(step, stop=lambda inner: not getattr(inner, "hooked", False))(optimizer)',
        "step(optimizer)",
        "around test_hooks_run_once_and_may_change_the_mean test_schedules_made_before_or_after_count_every_step",
    ),
    BrokenLine(
        "hooks of the original optimizer do not run",
        "step/rules/step.py",
        "return [hook for hook in before if hook not in (refuse, check_not_stepped)], after",
        "return [], []",
        "around test_hooks_run_once_and_may_change_the_mean",
    ),
    BrokenLine(
        "local gradients may be added to the mean",
        "step/model/misuse.py",
        "if self._changed and any(id(each) in self._changed for each in gradients if each is not None):",
        "if False:",
        "around test_backward_after_synchronize_is_refused",
    ),
    BrokenLine(
        "nobody says what FSDP has kept back before a step",
        "step/model/misuse.py",
        "if not any(map(holds_gradients, held)):",
        "if True:",
        "model test_a_pass_that_shards_keep_back_is_told_once",
    ),
    BrokenLine(
        "nobody says what FSDP has kept back before a local step",
        "step/stepper.py",
        "if setup.unreduced.modules:\n            setup.unreduced.look(setup.everybody)\n        if setup.steps.alone",
        "if setup.steps.alone",
        "model test_a_pass_that_shards_keep_back_is_told_once",
    ),
    BrokenLine(
        "nobody says what FSDP has kept back after the exchange",
        "step/stepper.py",
        "if self.setup.local is None and self.setup.unreduced.modules:",
        "if False:",
        "model test_a_pass_that_shards_keep_back_after_the_exchange_is_told",
    ),
    BrokenLine(
        "nobody says that shards without a module hide what FSDP keeps back",
        "step/setup.py",
        "if model is None and speaks(self.everybody) and any(",
        "if model is not None and speaks(self.everybody) and any(",
        "model test_shards_need_the_model_to_notice_such_a_pass",
    ),
    BrokenLine(
        "nobody notices a parameter that was taken out of the optimizer",
        "step/model/parameters.py",
        "if {*map(id, held)} != self._known:",
        "if False:",
        "model test_a_parameter_taken_out_of_the_optimizer_is_named",
    ),
    BrokenLine(
        "flush() takes a step by the moments where nothing waits",
        "step/stepper.py",
        "if setup.local is None and setup.exchange.has_no_residual():",
        "if False:",
        "exchange test_flush_changes_nothing_where_nothing_can_wait",
    ),
    BrokenLine(
        "a group that is added in inference mode cannot be stepped",
        "optimizer.py",
        "    @torch.inference_mode(False)  # what is made here outlives an evaluation\n    def add_param_group(",
        "    def add_param_group(",
        "local test_evaluation_in_inference_mode_may_exchange",
    ),
    BrokenLine(
        "a NaN that was told stops every exchange that follows",
        "step/stepper.py",
        'setup.local.fault = ""',
        "pass",
        "local test_nan_is_an_error_on_all_workers_if_asked",
    ),
    BrokenLine(
        ".grad may be replaced after synchronize()",
        "step/stepper.py",
        "if pending.are_others(gradients):",
        "if False:",
        "around test_synchronize_shows_the_mean_once",
    ),
    BrokenLine(
        "synchronize() exchanges again",
        "step/exchange/machine.py",
        '            raise RuntimeError(\n                "gradients were exchanged already',
        '            self.discard()\n        if False:\n            raise RuntimeError(\n                "gradients were exchanged already',
        "around test_synchronize_shows_the_mean_once",
    ),
    BrokenLine(
        "a state is saved between synchronize() and step()",
        "step/setup.py",
        "if self.is_synchronized and self.exchange.pending.parts:",
        "if False:",
        "around test_synchronize_shows_the_mean_once",
    ),
    BrokenLine(
        "elements of .grad that share memory are overwritten",
        "step/exchange/layout.py",
        "size == 1 or own == other\n",
        "size == 1 or own is not None\n",
        "exchange test_gradients_may_have_any_strides",
    ),
    BrokenLine(
        "a .grad that is not contiguous stays zero",
        "step/exchange/layout.py",
        "out.copy_(out.new_zeros(out.numel()).index_copy_(0, indices, values.to(out.dtype)).view(out.shape))",
        "pass",
        "exchange test_gradients_may_have_any_strides",
    ),
    BrokenLine(
        "a closure runs without gradients inside no_grad()",
        "step/stepper.py",
        "with torch.enable_grad():",
        "with nullcontext():",
        "around test_closure_is_called_once_with_gradients",
    ),
    BrokenLine(
        "a group that is added drops the residual",
        "step/saved/state.py",
        "new.restore(carry_over(new, [old], 1.0))",
        "pass",
        "exchange test_group_that_is_added_keeps_the_residual",
    ),
    BrokenLine(
        "a group that is refused stays",
        "step/setup.py",
        "del self.optimizer.param_groups[before:]",
        "pass",
        "exchange test_group_that_is_added_keeps_the_residual",
    ),
    BrokenLine(
        "residuals are not scaled to the size of a new group",
        "step/saved/state.py",
        "new.vectors[0].world_size / size)",
        "1.0)",
        "exchange test_smaller_group_keeps_the_share_of_its_residuals",
    ),
    BrokenLine(
        "a state for a checkpoint is made by an exchange",
        "step/stepper.py",
        "if creates_state(setup.optimizer):",
        "if False:",
        "around test_state_for_a_checkpoint_is_made_without_an_exchange",
    ),
    BrokenLine(
        "schedules do not see that a step was taken",
        "step/torch_internals.py",
        'vars(optimizer)["_opt_called"] = True',
        'vars(optimizer)["_opt_called"] = False',
        "around test_schedules_made_before_or_after_count_every_step",
    ),
    BrokenLine(
        "flush() deletes the residual of what is frozen",
        "step/exchange/presence.py",
        "if not owner.requires_grad or id(owner) in unrated)",
        "if id(owner) in unrated)",
        "resting test_flush_leaves_the_residual_of_what_rests",
    ),
    BrokenLine(
        "flush() deletes the residual of a group with a rate of zero",
        "step/exchange/presence.py",
        "if not owner.requires_grad or id(owner) in unrated)",
        "if not owner.requires_grad)",
        "resting test_flush_leaves_the_residual_of_what_rests",
    ),
    BrokenLine(
        "what rounding leaves of gradients at a rate of zero is applied later",
        "step/exchange/machine.py",
        "self.presence.begin(missing, unrated)",
        "self.presence.begin(missing)",
        "resting test_gradients_at_a_rate_of_zero_are_not_applied_later",
    ),
    BrokenLine(
        "a parameter that is frozen when a group is added leaves the exchange",
        "step/model/parameters.py",
        "if each.requires_grad or id(each) in before]",
        "if each.requires_grad]",
        "resting test_frozen_parameter_stays_in_the_exchange_when_a_group_is_added",
    ),
    # rules: what an optimizer does with a late sum
    BrokenLine(
        "no optimizer has a rule for late sums",
        "step/rules/step.py",
        "find_rule(each) if late else None",
        "None",
        "rules test_steady_gradient_moves_as_far_as_in_a_dense_run test_coordinate_that_is_not_delivered_does_not_move",
    ),
    BrokenLine(
        "a late sum counts for one step",
        "step/rules/late.py",
        'tau = (steps - at["last"]).clamp_(min=1).float()',
        'tau = torch.ones_like(at["last"]).float()',
        "rules test_steady_gradient_moves_as_far_as_in_a_dense_run",
    ),
    BrokenLine(
        "a coordinate that is not delivered does not decay",
        "step/rules/late.py",
        'flat["parameter"].mul_(self.decay(group))',
        "pass",
        "rules test_decoupled_decay_is_never_late",
    ),
    BrokenLine(
        "Adam's decoupled decay is left out",
        "step/rules/adam.py",
        'return control, 1 - learning_rate * float(group["weight_decay"]) if decoupled else 1.0',
        "return control, 1.0",
        "rules test_decoupled_decay_is_never_late test_optimizer_is_itself_if_everything_is_delivered",
    ),
    BrokenLine(
        "catching up has no limit per tensor",
        "step/rules/late.py",
        "share = (limit / length).nan_to_num(1.0).clamp(max=1.0)",
        "share = torch.ones_like(length)",
        "rules test_catching_up_changes_a_tensor_by_a_small_part",
    ),
    BrokenLine(
        "Nesterov momentum is plain momentum",
        "step/rules/sgd.py",
        'direction = torch.add(mean, buffer, alpha=momentum) if group["nesterov"] else buffer',
        "direction = buffer",
        "rules test_optimizer_is_itself_if_everything_is_delivered",
    ),
    BrokenLine(
        "SGD with momentum minimizes whatever it is told",
        "step/rules/sgd.py",
        'mean = -mean if group["maximize"] else mean',
        "pass",
        "rules test_optimizer_is_itself_if_everything_is_delivered",
    ),
    BrokenLine(
        "Lion steps by the average that it keeps",
        "step/rules/lion.py",
        "direction = (read * average + added * mean).sign()",
        "direction = (kept * average + entered * mean).sign()",
        "rules test_optimizer_is_itself_if_everything_is_delivered",
    ),
    BrokenLine(
        "a rule reads the mean although a script has clipped it",
        "step/rules/step.py",
        "rule.step(each if untouched else each.read_again())",
        "rule.step(each)",
        "rules test_clipped_mean_is_what_counts",
    ),
    BrokenLine(
        "rules of users come last",
        "step/rules/choose.py",
        "RULES.insert(0, rule)",
        "RULES.append(rule)",
        "rules test_rule_of_a_user_comes_first",
    ),
    BrokenLine(
        "options that are set later are not checked",
        "step/rules/step.py",
        "                part.rule.check_options()",
        "                pass",
        "rules test_options_that_no_rule_supports_are_refused_by_name",
    ),
    BrokenLine(
        "eps=0 is accepted",
        "step/rules/adam.py",
        'if any(float(group["eps"]) == 0 for group in self.optimizer.param_groups):',
        "if False:",
        "rules test_options_that_no_rule_supports_are_refused_by_name",
    ),
    BrokenLine(
        "an optimizer that needs a closure is accepted",
        "step/model/optimizers.py",
        "    _check_closure(optimizer)\n",
        "",
        "rules test_optimizers_that_cannot_be_exchanged_are_refused_by_name",
    ),
    BrokenLine(
        "an optimizer may be wrapped twice",
        "optimizer.py",
        "if is_wrapped(optimizer):",
        "if False:",
        "rules test_optimizers_that_cannot_be_exchanged_are_refused_by_name",
    ),
    # local: workers that step alone between exchanges
    BrokenLine(
        "a subclass with a step of its own counts as linear",
        "step/torch_internals.py",
        "return isinstance(optimizer, kinds) and written_step(optimizer) in map(written_step, kinds)",
        "return isinstance(optimizer, kinds)",
        "local test_optimizer_without_a_rule_steps_by_its_own_gradients",
    ),
    BrokenLine(
        "workers stay where they were after an exchange",
        "step/local/steps.py",
        "        self._go_to_anchor()\n        if self._is_broken:",
        "        if self._is_broken:",
        "local test_workers_are_apart_between_exchanges_and_together_after",
    ),
    BrokenLine(
        "flush() drops the steps since the last exchange",
        "step/local/steps.py",
        "residuals[anchor].view(delta.shape).add_(delta)",
        "pass",
        "local test_workers_are_apart_between_exchanges_and_together_after",
    ),
    BrokenLine(
        "workers may exchange after other numbers of steps",
        "step/local/steps.py",
        "group[_TAKEN] = self.taken",
        "group[_TAKEN] = 0",
        "local test_other_numbers_of_steps_are_refused",
    ),
    BrokenLine(
        "a step that is left out does not count",
        "step/local/steps.py",
        "            self._count()\n            return",
        "            return",
        "local test_step_with_a_nan_is_left_out_on_its_worker",
    ),
    BrokenLine(
        "a step with a NaN is taken",
        "step/local/steps.py",
        "if overflowed or not (math.isfinite(figure) or self._usable(trained)):",
        "if overflowed:",
        "local test_step_with_a_nan_is_left_out_on_its_worker",
    ),
    BrokenLine(
        "a NaN of local steps is no error",
        "step/local/steps.py",
        "self.fault = listed(bad)",
        "self.fault = ''",
        "local test_nan_is_an_error_on_all_workers_if_asked",
    ),
    BrokenLine(
        "broken parameters of one worker go to all",
        "step/local/steps.py",
        "            for delta in deltas:\n                delta.zero_()",
        "            pass",
        "local test_worker_whose_parameters_are_broken_goes_on_with_the_others",
    ),
    BrokenLine(
        "a worker does not get its own parameters back",
        "step/local/steps.py",
        "for parameter, values in zip(self.parameters, own, strict=False):",
        "for parameter, values in ():",
        "local test_average_is_shown_and_taken_back",
    ),
    BrokenLine(
        "merge() inside averaged() is accepted",
        "step/local/steps.py",
        "        if self._swaps:\n",
        "        if False:\n",
        "local test_average_is_shown_and_taken_back",
    ),
    BrokenLine(
        "weights that one worker has loaded are exchanged like a step",
        "step/local/steps.py",
        "self.outer.param_groups[0][LOADED] = number_of_text(repr(numbers(self.parameters)))",
        "pass",
        "local test_weights_that_one_worker_loads_are_refused",
    ),
    BrokenLine(
        "weights that all workers have loaded are no new beginning",
        "step/local/steps.py",
        "numbers(self.parameters)))\n            self.accept()\n",
        "numbers(self.parameters)))\n",
        "local test_weights_that_one_worker_loads_are_refused",
    ),
    BrokenLine(
        "rounding to bf16 counts as a change",
        "step/local/anchor.py",
        "return anchor.to(parameter.dtype).to(anchor.dtype, copy=True).sub_(parameter)",
        "return anchor - parameter",
        "local test_small_means_add_up_in_half_precision",
    ),
    BrokenLine(
        "a single worker steps through the common parameters",
        "step/local/steps.py",
        "if alone and goes_to_mean:",
        "if False:",
        "local test_single_worker_takes_the_steps_of_its_optimizer",
    ),
    BrokenLine(
        "merge() exchanges nothing again",
        "step/stepper.py",
        "            if not local_steps.taken:\n                return\n",
        "",
        "local test_merge_exchanges_early_and_once",
    ),
    BrokenLine(
        "states of a list are numbered from 0 for each",
        "step/optimizer_list.py",
        'start = sum(len(group["params"]) for group in groups)',
        "start = 0",
        "local test_list_is_one_optimizer",
    ),
    BrokenLine(
        "optimizers of a list are clipped apart",
        "step/exchange/vector.py",
        "    for other in others:\n        total += other\n",
        "",
        "local test_list_has_one_norm",
    ),
    BrokenLine(
        "showing the average counts as a change by the user",
        "step/local/steps.py",
        "            if swaps:\n                self._note()",
        "            pass",
        "local test_average_is_shown_and_taken_back",
    ),
    BrokenLine(
        "a frozen parameter of which workers exchange updates moves on shards",
        "step/local/steps.py",
        "(self._has_shards and id(anchor) not in still)",
        "self._has_shards",
        "model test_frozen_shards_do_not_move_by_updates",
    ),
    # agree: what ranks must have in common
    BrokenLine(
        "values of parameters are not compared",
        "step/setup.py",
        "values = {} if broadcast else {",
        "values = {} if True else {",
        "agreement test_parameters_that_differ_are_refused_by_name",
    ),
    BrokenLine(
        "values that differ do not name the parameter",
        "step/agree/setup.py",
        "place if not name else name if",
        "place if name else name if",
        "agreement test_parameters_that_differ_are_refused_by_name",
    ),
    BrokenLine(
        "broadcast parameters are not written",
        "step/agree/setup.py",
        "        shard.copy_(values)",
        "        pass",
        "agreement test_broadcast_makes_parameters_and_buffers_equal",
    ),
    BrokenLine(
        "buffers are not broadcast",
        "step/setup.py",
        "broadcast([*held, *self._others, *buffers], process_group",
        "broadcast([*held, *self._others], process_group",
        "agreement test_broadcast_makes_parameters_and_buffers_equal",
    ),
    BrokenLine(
        "parameters that the optimizer does not hold are not compared",
        "step/setup.py",
        "for each, name in (*named, *others)}",
        "for each, name in named}",
        "agreement test_parameters_that_the_optimizer_does_not_hold_must_be_equal",
    ),
    BrokenLine(
        "buffers that differ are not told",
        "step/model/module.py",
        "if found and speaks(group):",
        "if False:",
        "agreement test_buffers_that_differ_are_a_warning",
    ),
    BrokenLine(
        "an argument that is invalid on one rank is not told to others",
        "step/agree/__init__.py",
        "                all_gather({_ERROR: str(error)}, group, device)\n",
        "                pass\n",
        "agreement test_argument_that_is_invalid_on_one_rank_is_an_error_on_all",
    ),
    BrokenLine(
        "fields of methods are not compared",
        "step/agree/setup.py",
        'fields |= {f"{name} of {type(layer).__name__}": value for name, value in _fields_of(layer)}',
        "pass",
        "agreement test_settings_that_differ_are_named",
    ),
    BrokenLine(
        "arguments are not compared",
        "step/agree/setup.py",
        'return fields | {f"argument {name}": value for name, value in _fields_of(options)}',
        "return fields",
        "agreement test_settings_that_differ_are_named",
    ),
    BrokenLine(
        "options of the optimizer are not compared at wrap()",
        "step/setup.py",
        "() if caught_up else self.optimizer.param_groups",
        "()",
        "agreement test_settings_that_differ_are_named",
    ),
    BrokenLine(
        "states of optimizers are not compared at wrap()",
        "step/setup.py",
        "values |= {f",
        "_ = {f",
        "agreement test_states_of_optimizers_that_differ_are_refused",
    ),
    BrokenLine(
        "replicas are not compared in the first steps",
        "step/agree/replica.py",
        "EARLY = (1, 10)",
        "EARLY = ()",
        "agreement test_replicas_that_drift_are_found",
    ),
    BrokenLine(
        "replicas are compared in the first steps alone",
        "step/agree/replica.py",
        "return updates % EVERY == 0 or updates in EARLY",
        "return updates in EARLY",
        "agreement test_replicas_that_drift_are_found",
    ),
    BrokenLine(
        "the state of the optimizer may drift apart",
        "step/agree/replica.py",
        "found |= self.state()",
        "pass",
        "agreement test_replicas_that_drift_are_found",
    ),
    BrokenLine(
        "ranks may load states of other steps",
        "step/saved/state.py",
        '    agree.compare({"steps": saved["steps"] if saved else None}, everybody, device)\n',
        "",
        "agreement test_rank_with_other_updates_is_refused",
    ),
    # failures of ranks
    BrokenLine(
        "a closed connection does not say who was lost",
        "scheduler/failure_report.py",
        "            return sorted(silent & self._closed), True\n        waited_for",
        "            return [], True\n        waited_for",
        "failures test_rank_that_dies_is_named_and_the_others_go_on",
    ),
    BrokenLine(
        "a lost rank is named by its number in the group",
        "scheduler/failure_report.py",
        "missing = self.missing or [*others_at_fault(cause)]",
        "missing = [*range(len(self.missing))] or [*others_at_fault(cause)]",
        "failures test_ranks_of_a_group_are_named_by_their_global_numbers",
    ),
    BrokenLine(
        "a time-out looks like a loss",
        "scheduler/failure_report.py",
        'if (self.gone or not texts["timeout"]) and self.silent_store is None:',
        "if self.silent_store is None:",
        "failures test_rank_that_is_slow_is_named_within_the_timeout",
    ),
    BrokenLine(
        "timeout= has no effect",
        "scheduler/process_group.py",
        "self._messages = Messages(group, self.device, timeout)",
        "self._messages = Messages(group, self.device, None)",
        "failures test_rank_that_is_slow_is_named_within_the_timeout",
    ),
    BrokenLine(
        "a rank that has failed lets others wait",
        "scheduler/failure_report.py",
        '                store.set(f"{self._prefix}{self._rank}", json.dumps(asdict(self._reports[self._rank])))',
        "                pass",
        "failures test_rank_that_dies_is_named_and_the_others_go_on test_what_a_signal_handler_raises_leaves_as_it_is",
    ),
    BrokenLine(
        "what a handler raises becomes an error of the exchange",
        "step/torch_internals.py",
        "            if value is interrupted or (isinstance(value, tuple) and any(each is interrupted for each in value)):\n                return True",
        "            pass",
        "failures test_what_a_signal_handler_raises_leaves_as_it_is",
    ),
    BrokenLine(
        "a rank that stopped is not told by its type",
        "scheduler/failure_report.py",
        'text = f"{name}: {text}" if text else name',
        "pass",
        "failures test_what_a_signal_handler_raises_leaves_as_it_is",
    ),
    BrokenLine(
        "a rank that is lost in a comparison raises torch's error",
        "step/agree/__init__.py",
        "with reporting(group, device, _CHECK, is_interruption), devices.on(device):",
        "with devices.on(device):",
        "failures test_rank_that_is_lost_at_wrap_is_named",
    ),
    BrokenLine(
        "an interrupt before the update can be saved",
        "step/stepper.py",
        "            if not isinstance(error, Exception):\n                exchange.stop()",
        "            if not isinstance(error, Exception):\n                pass",
        "failures test_interrupt_between_exchange_and_update_is_told",
    ),
    BrokenLine(
        "local steps go on behind an exchange that has failed",
        "step/stepper.py",
        "            if setup.local.is_pending:\n",
        "            if False:\n",
        "failures test_exchange_of_updates_is_repeated_after_a_loss",
    ),
    # model: modules, shards, refusals
    BrokenLine(
        "DDP averages beside the exchange",
        "wrapping.py",
        "        keep_gradients_local(model)\n    compare_buffers(",
        "    compare_buffers(",
        "model test_ddp_averages_nothing_and_ends_in_the_bits_of_a_plain_module",
    ),
    BrokenLine(
        "a communication hook is accepted",
        "step/model/module.py",
        "        if hook is not noop_hook:\n",
        "        if False:\n",
        "model test_communication_hook_is_refused_by_name",
    ),
    BrokenLine(
        "another group than that of DDP is accepted",
        "step/model/module.py",
        "if group is not None and group is not module.process_group:",
        "if False:",
        "model test_group_is_that_of_the_module",
    ),
    BrokenLine(
        "DDP's group is not used",
        "step/model/module.py",
        "        group = module.process_group\n",
        "",
        "model test_group_is_that_of_the_module",
    ),
    BrokenLine(
        "an optimizer that was not wrapped steps by local gradients",
        "step/model/module.py",
        "if stays_local(parameter) and not any(",
        "if False and not any(",
        "model test_optimizer_that_was_not_wrapped_cannot_step_a_wrapped_module",
    ),
    BrokenLine(
        "parameters that DDP ignores are exchanged",
        "step/model/parameters.py",
        "for each, name in named if id(each) not in self.ignored]",
        "for each, name in named]",
        "model test_ignored_parameters_are_their_ranks_own",
    ),
    BrokenLine(
        "a NaN in an ignored parameter steps",
        "step/stepper.py",
        "fault=self._fault(found, own))",
        "fault=self._fault(found, []))",
        "model test_ignored_parameters_are_their_ranks_own",
    ),
    BrokenLine(
        "shards step although one of them has rejected the step",
        "step/exchange/machine.py",
        "        if total.rejects:\n",
        "        if rejects:\n",
        "model test_no_shard_steps_alone",
    ),
    BrokenLine(
        "each shard is clipped by its own norm",
        "step/exchange/machine.py",
        "scope.all_shards.run(clipping, new_step=False)\n            clipping = None",
        "pass",
        "model test_no_shard_steps_alone",
    ),
    BrokenLine(
        "the group of the shards is accepted",
        "step/setup.py",
        "if mesh & ranks != {own_rank()}:",
        "if False:",
        "model test_shards_need_the_group_of_their_replicas",
    ),
    BrokenLine(
        "what torch.compile puts around a module hides it",
        "step/model/module.py",
        'model = getattr(model, "_orig_mod", model)',
        "pass",
        "model test_compiled_module_is_the_module",
    ),
    BrokenLine(
        "a parameter on the meta device is accepted",
        "step/model/optimizers.py",
        "if parameter.is_meta:",
        "if False:",
        "model test_parameters_without_values_are_refused_by_name",
    ),
    BrokenLine(
        "a lazy parameter is accepted",
        "step/model/optimizers.py",
        "if is_lazy(parameter):",
        "if False:",
        "model test_parameters_without_values_are_refused_by_name",
    ),
    BrokenLine(
        "a complex parameter is accepted",
        "step/exchange/layout.py",
        "if parameter.is_complex():",
        "if False:",
        "model test_parameters_without_values_are_refused_by_name",
    ),
    BrokenLine(
        "another model is accepted",
        "step/model/module.py",
        "if trained and held and not any(id(each) in held for each in trained):",
        "if False:",
        "model test_model_must_be_what_the_optimizer_trains",
    ),
    BrokenLine(
        "a parameter that was added later is left alone",
        "step/model/parameters.py",
        "        if new:\n",
        "        if False:\n",
        "model test_parameter_that_is_added_behind_the_back_is_refused_by_name",
    ),
    BrokenLine(
        "a parameter that was frozen at wrap() trains on each rank",
        "step/model/parameters.py",
        "            if parameter.grad is not None:\n",
        "            if False:\n",
        "model test_parameter_that_was_frozen_at_wrap_cannot_train",
    ),
    BrokenLine(
        "other methods may move parameters by gradients",
        "step/model/refuse.py",
        "if before and before != _versions(optimizer):",
        "if False:",
        "model test_other_methods_that_use_gradients_are_refused",
    ),
    # saved: what a checkpoint holds
    BrokenLine(
        "a residual is not loaded",
        "step/saved/state.py",
        "residual.add_(local(values).reshape(-1).to(vector.device))",
        "pass",
        "saved test_run_that_is_loaded_goes_on_to_the_bit",
    ),
    BrokenLine(
        "the state of the method is not loaded",
        "step/saved/state.py",
        "            feedback.algorithm.load_state_dict(method)\n",
        "            pass\n",
        "saved test_run_that_is_loaded_goes_on_to_the_bit",
    ),
    BrokenLine(
        "the count of steps is not loaded",
        "step/saved/state.py",
        'exchange.steps = state["steps"]',
        "pass",
        "saved test_run_that_is_loaded_goes_on_to_the_bit",
    ),
    BrokenLine(
        "ages are not loaded",
        "step/saved/state.py",
        "            view.copy_(local(last).view(view.shape))\n",
        "            pass\n",
        "saved test_run_in_half_precision_goes_on_to_the_bit",
    ),
    BrokenLine(
        "residuals are not scaled to another number of ranks",
        "step/saved/portable.py",
        "share = here.replicas / before.replicas",
        "share = 1.0",
        "saved test_files_of_more_ranks_keep_the_pending_update test_checkpoint_of_torch_keeps_the_pending_update_on_fewer_ranks",
    ),
    BrokenLine(
        "residuals of some ranks are dropped",
        "step/saved/portable.py",
        "return range(here.replica, len(self.replicas), here.replicas)",
        "return range(here.replica, here.replica + 1)",
        "saved test_files_of_more_ranks_keep_the_pending_update test_checkpoint_of_torch_keeps_the_pending_update_on_fewer_ranks",
    ),
    BrokenLine(
        "residuals of parameters in another order are loaded",
        "step/saved/state.py",
        '    _check_names(state["names"], scope.names)\n',
        "",
        "saved test_parameters_in_another_order_are_refused",
    ),
    BrokenLine(
        "ages of other parameters are loaded",
        "step/saved/state.py",
        'if len(state["last"]) != len(lengths) or any(',
        "if any(",
        "saved test_state_of_one_rank_of_other_parameters_is_refused",
    ),
    BrokenLine(
        "the state of another rank is loaded",
        "step/saved/state.py",
        "_check_fields(state, rank=first.rank, world_size=first.world_size, recipe=_name(scope))",
        "_check_fields(state, recipe=_name(scope))",
        "saved test_state_of_another_rank_or_method_is_refused",
    ),
    BrokenLine(
        "the state of another method is loaded",
        "step/saved/state.py",
        "_check_fields(state, rank=first.rank, world_size=first.world_size, recipe=_name(scope))",
        "_check_fields(state, rank=first.rank, world_size=first.world_size)",
        "saved test_state_of_another_rank_or_method_is_refused",
    ),
    BrokenLine(
        "a reset keeps residuals",
        "step/saved/state.py",
        "keeps = not reset and any(",
        "keeps = any(",
        "saved test_state_of_another_rank_or_method_is_refused",
    ),
    BrokenLine(
        "a damaged state is loaded",
        "step/saved/state.py",
        '    if not _is_converted(state) and checksum(state) != state.get("checksum"):',
        "    if False:",
        "saved test_damaged_state_of_one_rank_is_loaded_by_none",
    ),
    BrokenLine(
        "a state that one rank cannot load is loaded by others",
        "step/agree/__init__.py",
        "    if errors:\n",
        "    if False:\n",
        "saved test_damaged_state_of_one_rank_is_loaded_by_none",
    ),
    BrokenLine(
        "a state without residual belongs to its rank",
        "step/saved/state.py",
        '(saved["rank"], saved["world_size"]) == (rank, size)',
        "True",
        "saved test_state_without_residuals_is_loaded_everywhere",
    ),
    BrokenLine(
        "a lost residual is not told",
        "step/saved/optimizer_state.py",
        "if not is_marked or not speaks(everybody):",
        "if True:",
        "saved test_lost_residual_is_a_warning",
    ),
    BrokenLine(
        "replicas that have drifted are saved",
        "checkpoint.py",
        "    if difference:\n",
        "    if False:\n",
        "saved test_replicas_that_have_drifted_are_not_saved",
    ),
    BrokenLine(
        "a rank that cannot write is not told to others",
        "checkpoint.py",
        'raise ConfigurationError(f"{failed}: {text_by_rank(reasons)}") from error',
        "raise",
        "saved test_rank_that_cannot_write_is_told_to_all",
    ),
    BrokenLine(
        "groups mix their files",
        "checkpoint.py",
        "if not set(found) & set(ranks):",
        "if False:",
        "saved test_folder_of_another_group_is_refused",
    ),
    BrokenLine(
        "the state of another optimizer is loaded",
        "checkpoint.py",
        'if pointer["optimizer"] != _kind(optimizer):',
        "if False:",
        "saved test_optimizer_of_another_class_is_refused",
    ),
    BrokenLine(
        "parameters between two exchanges are not saved",
        "step/local/steps.py",
        '"parameters": [parameter.detach().clone() for parameter in self.parameters] if self.taken else [],',
        '"parameters": [],',
        "saved test_state_between_exchanges_goes_on_to_the_bit",
    ),
    BrokenLine(
        "the anchors are not loaded",
        "step/local/steps.py",
        "            write(anchor, own)\n",
        "            pass\n",
        "saved test_local_steps_go_on_from_a_save_between_exchanges",
    ),
    BrokenLine(
        "the number of local steps is not loaded",
        "step/local/steps.py",
        'self.taken, self.total, self.is_pending = state["taken"], state["total"], state["pending"]',
        'self.total = state["total"]',
        "saved test_state_between_exchanges_goes_on_to_the_bit",
    ),
    BrokenLine(
        "a save leaves local steps as they are",
        "checkpoint.py",
        "    optimizer.merge()\n",
        "",
        "saved test_state_between_exchanges_goes_on_to_the_bit",
    ),
    BrokenLine(
        "a save leaves the one before",
        "checkpoint.py",
        'for old in set(folder.glob(_DATA + 16 * "[0-9a-f]")) - {data}:',
        "for old in set[Path]():",
        "saved test_save_into_a_used_folder_removes_the_one_before",
    ),
    BrokenLine(
        "a save removes what the user has in its folder",
        "checkpoint.py",
        'folder.glob(_DATA + 16 * "[0-9a-f]")',
        'folder.glob(f"{_DATA}*")',
        "saved test_save_into_a_used_folder_removes_the_one_before",
    ),
    BrokenLine(
        "an optimizer around a wrapped one cannot step",
        "step/model/module.py",
        "not any(id(parameter) in held for held in exchanged)",
        "True",
        "model test_optimizer_around_a_wrapped_one_steps",
    ),
    BrokenLine(
        "gradients of what a wrapped optimizer inside does not hold are stepped",
        "step/model/module.py",
        "id(parameter) in held for held in exchanged",
        "True for held in exchanged",
        "model test_optimizer_around_a_wrapped_one_of_some_parameters_cannot_step_others",
    ),
    BrokenLine(
        "a file that is damaged is loaded",
        "checkpoint.py",
        "if _digest(data / name) != files[name]:",
        "if False:",
        "saved test_damaged_file_is_loaded_by_none",
    ),
    BrokenLine(
        "the residuals of a checkpoint of torch are not loaded",
        "step/saved/portable.py",
        "return placed(tensors[value[_TENSOR]], ",
        "return placed(0 * tensors[value[_TENSOR]], ",
        "saved test_checkpoint_of_torch_goes_on_to_the_bit",
    ),
    BrokenLine(
        "numbers of NumPy are saved as they are",
        "step/saved/packed.py",
        "        return value.item()\n",
        "        return value\n",
        "content test_numbers_of_numpy_are_saved_as_numbers",
    ),
    BrokenLine(
        "what cannot be loaded is saved",
        "step/saved/packed.py",
        "        _value_of(content)\n",
        "",
        "content test_what_cannot_be_loaded_is_not_saved test_what_cannot_be_loaded_is_no_part_of_a_checkpoint_of_torch",
    ),
    BrokenLine(
        "objects in a file raise any error",
        "step/saved/packed.py",
        """raise ConfigurationError(f"the state of a rank cannot be read: {error}") from error""",
        "raise",
        "content test_saved_objects_are_refused_together",
    ),
    BrokenLine(
        "a failed save leaves its files",
        "checkpoint.py",
        "            shutil.rmtree(data, ignore_errors=True)\n",
        "            pass\n",
        "content test_failed_saves_leave_nothing",
    ),
    BrokenLine(
        "small states of shards come back as plain tensors",
        "step/saved/portable.py",
        "    if here is None:\n        return tensor\n",
        "    if here is None or tensor.shape != parameter.shape:\n        return tensor\n",
        "content test_small_states_of_shards_go_on_to_the_bit test_small_states_on_another_mesh",
    ),
    BrokenLine(
        "plain tensors beside shards come back as copies on a mesh",
        "step/saved/portable.py",
        'if hasattr(tensor, "device_mesh") or (had_shards and along is None):',
        'if hasattr(tensor, "device_mesh"):',
        "content test_small_states_of_shards_go_on_to_the_bit",
    ),
    BrokenLine(
        "partial sums are saved",
        "step/saved/portable.py",
        "if any(each.is_partial() for each in placements):",
        "if False:",
        "content test_partial_sums_are_not_saved",
    ),
    BrokenLine(
        "an optimizer reads the state of another one in the same checkpoint",
        "step/saved/portable.py",
        "    return found\n\n\ndef _room_for",
        "    return next(iter(by_name.values()))\n\n\ndef _room_for",
        "content test_two_optimizers_in_a_checkpoint_of_torch",
    ),
    BrokenLine(
        "a bare state drops the residual",
        "optimizer.py",
        "        if saved is None:\n",
        "        if saved is None:\n            setup.scope.restore([each.new_feedback() for each in setup.scope.vectors])\n",
        "saved test_bare_state_leaves_the_residual",
    ),
    # scalers and trainers
    BrokenLine(
        "gradients keep the loss scale",
        "step/exchange/vector.py",
        "self.flat.mul_(factor)",
        "pass",
        "trainers test_scale_is_no_part_of_the_step",
    ),
    BrokenLine(
        "an overflow is an error of the gradient",
        "step/stepper.py",
        'if setup.options.on_nonfinite == "raise" and found is None:',
        'if setup.options.on_nonfinite == "raise":',
        "trainers test_overflow_on_one_rank_skips_and_lowers_all_scales",
    ),
    BrokenLine(
        "an overflow in unscale_() does not skip the step",
        "amp.py",
        "        stepper_of(optimizer).found_in_unscale = found",
        "        pass",
        "trainers test_overflow_on_one_rank_skips_and_lowers_all_scales",
    ),
    BrokenLine(
        "an overflow lowers the scale of its rank alone",
        "amp.py",
        "                found.fill_(1.0)",
        "                pass",
        "trainers test_overflow_on_one_rank_skips_and_lowers_all_scales",
    ),
    BrokenLine(
        "a rank without gradients has no overflow flag",
        "amp.py",
        "        if not found:\n",
        "        if False:\n",
        "trainers test_rank_without_gradients_agrees_about_an_overflow",
    ),
    BrokenLine(
        "unscale_() is too late and says nothing",
        "amp.py",
        "        if optimizer.is_synchronized:\n",
        "        if False:\n",
        "trainers test_order_of_unscaling_and_averaging_is_checked",
    ),
    BrokenLine(
        "scaled averages are applied",
        "step/stepper.py",
        "elif self._scale is not None and pending.scale is None:",
        "elif False:",
        "trainers test_order_of_unscaling_and_averaging_is_checked",
    ),
    BrokenLine(
        "local steps keep the loss scale",
        "step/local/steps.py",
        "                gradient.div_(scale.to(gradient.device))",
        "                pass",
        "trainers test_overflow_of_local_steps_is_a_matter_of_one_rank",
    ),
    BrokenLine(
        "Accelerate clips local gradients",
        "integrations/shared/accelerated.py",
        "        if not optimizer.is_synchronized:\n            optimizer.synchronize()\n",
        "        pass\n",
        "trainers test_accelerate_clips_averages",
    ),
    BrokenLine(
        "Accelerate returns the norm of what was delivered",
        "integrations/shared/accelerated.py",
        "if any(setup_of(each).options.max_grad_norm is None for each in averaged):",
        "if True:",
        "trainers test_accelerate_clips_averages",
    ),
    BrokenLine(
        "Accelerate loads the state of the first rank on all",
        "integrations/accelerate.py",
        "return checkpoint.state_of_rank(optimizer, folder)",
        "return state",
        "trainers test_accelerate_saves_the_residual_of_each_rank",
    ),
    BrokenLine(
        "Accelerate saves optimizers whose memory was freed",
        "integrations/accelerate.py",
        "any(each.optimizer is optimizer for each in accelerator._optimizers)",
        "True",
        "trainers test_accelerate_forgets_an_optimizer_whose_memory_was_freed",
    ),
    BrokenLine(
        "Accelerate keeps the parameters of optimizers whose memory was freed",
        "integrations/accelerate.py",
        "reference = weakref.ref(prepared.optimizer)",
        "reference = lambda kept=prepared.optimizer: kept",
        "trainers test_accelerate_forgets_an_optimizer_whose_memory_was_freed",
    ),
    BrokenLine(
        "the Trainer's limit is that of what was delivered",
        "integrations/transformers.py",
        'return settings | {"max_grad_norm": limit} if whole else settings',
        "return settings",
        "trainers test_trainer_limits_gradients_and_resumes",
    ),
    BrokenLine(
        "the Trainer resumes without residuals",
        "integrations/transformers.py",
        "        elif resumed is not None and self._restore:\n",
        "        elif False:\n",
        "trainers test_trainer_limits_gradients_and_resumes",
    ),
    BrokenLine(
        "a second train() begins without residuals",
        "integrations/transformers.py",
        "            self.optimizer.load_state_dict(before)",
        "            pass",
        "trainers test_trainer_that_trains_twice_keeps_what_is_pending",
    ),
    BrokenLine(
        "Lightning clips local gradients",
        "integrations/lightning.py",
        "            if not is_skipped:",
        "            if False:",
        "trainers test_lightning_trains_clips_and_resumes",
    ),
    BrokenLine(
        "Lightning keeps fields of a method from wrap()",
        "integrations/lightning.py",
        'self._settings = {"algo": algo, **settings}',
        'self._settings = {"algo": algo} | {name: settings[name] for name in _of_wrap() & set(settings)}',
        "trainers test_lightning_takes_fields_of_a_method",
    ),
    BrokenLine(
        "Lightning resumes without residuals",
        "integrations/lightning.py",
        "                checkpoints.load(optimizer, beside.folder_of(self.lightning_module.trainer.ckpt_path, number))",
        "                pass",
        "trainers test_lightning_trains_clips_and_resumes",
    ),
    BrokenLine(
        "a callback of Transformers does not know what later ones ask for",
        "integrations/transformers.py",
        "[*(each for each in handler.callbacks if not isinstance(each, _Merges)), _Merges(self)]",
        "[_Merges(self), *handler.callbacks]",
        "trainers test_workers_are_equal_where_a_later_callback_saves",
    ),
    BrokenLine(
        "weights that .data was given are exchanged like a step",
        "step/local/anchor.py",
        "return not self._samples or torch.equal(torch.cat(self._samples), self._values)",
        "return True",
        "local test_weights_that_all_workers_load_are_the_new_beginning",
    ),
    BrokenLine(
        "weights of a small tensor that were loaded are exchanged like a step",
        "step/local/anchor.py",
        "(changes > limits**2 * sizes).any()",
        "changes.sum() > _LARGE**2 * sizes.sum()",
        "local test_weights_that_all_workers_load_are_the_new_beginning",
    ),
    BrokenLine(
        "a state does not have weights that were loaded before it",
        "step/local/steps.py",
        '"anchors": [] if is_loaded else [',
        '"anchors": [',
        "local test_weights_loaded_before_a_save_are_saved",
    ),
    BrokenLine(
        "a flush applies weights that were loaded before it by the outer rate",
        "step/local/steps.py",
        "        self.note_loading()\n        deltas = self._deltas()",
        "        deltas = self._deltas()",
        "local test_weights_loaded_before_a_save_are_saved",
    ),
    BrokenLine(
        "any change of a tensor of zeros counts as loaded weights",
        "step/local/anchor.py",
        "sizes = torch.maximum(sizes, _LARGE**2 * usual * counts)",
        "pass",
        "local test_small_change_of_a_tensor_of_zeros_is_a_part_of_a_step",
    ),
    BrokenLine(
        "one tensor that is changed rounds all others",
        "step/local/steps.py",
        "torch.where(held.to(own.dtype) == own, held, own.to(held.dtype))",
        "own",
        "local test_tensor_that_is_loaded_rounds_no_other",
    ),
    BrokenLine(
        "a state that is taken changes the anchor",
        "step/local/steps.py",
        "        is_loaded = self._were_loaded()",
        "        self.note_loading()\n        is_loaded = False",
        "local test_state_taken_while_an_average_is_swapped_in",
    ),
    BrokenLine(
        "a state is loaded with gradients enabled",
        "optimizer.py",
        "outlives an evaluation\n    @torch.no_grad()\n",
        "outlives an evaluation\n",
        "local test_state_is_loaded_without_gradients",
    ),
    BrokenLine(
        "a loss scale that was divided out of thrown away gradients counts for the next",
        "step/local/steps.py",
        "gradient is each and version_of(gradient) == version",
        "version_of(gradient) == version",
        "local test_loss_scale_is_divided_out_after_a_hook_has_failed",
    ),
    BrokenLine(
        "merge() in inference mode makes tensors that no step can change",
        "step/stepper.py",
        "    @torch.inference_mode(False)  # what is made here outlives an evaluation\n",
        "",
        "local test_evaluation_in_inference_mode_may_exchange",
    ),
    BrokenLine(
        "flush() in inference mode makes tensors that no step can change",
        "step/stepper.py",
        "    @torch.inference_mode(False)\n",
        "",
        "local test_evaluation_in_inference_mode_may_exchange",
    ),
    BrokenLine(
        "a gradient keeps strides that other ranks do not have",
        "step/exchange/layout.py",
        "    return all(\n        size == 1",
        "    return 0 not in gradient.stride() or all(\n        size == 1",
        "exchange test_strides_of_a_gradient_on_one_rank_change_no_bits",
    ),
    BrokenLine(
        "a format of values that differs is taken for parameters that differ",
        "step/agree/__init__.py",
        'CONTENT, STATE = "content of",',
        'CONTENT, STATE = "values of",',
        "agreement test_format_that_differs_is_no_matter_of_parameters",
    ),
    BrokenLine(
        "a checkpoint that is loaded in inference mode makes tensors that no step can change",
        "checkpoint.py",
        "@torch.inference_mode(False)  # what is loaded outlives an evaluation\n",
        "",
        "local test_evaluation_in_inference_mode_may_exchange",
    ),
    BrokenLine(
        "an overflow of a local step is not counted",
        "step/local/steps.py",
        "            self._left_out += overflowed\n",
        "",
        "local test_overflow_leaves_out_the_step_of_its_worker",
    ),
    # end
    BrokenLine(
        "a state that torch asks for before it loads one uses up what was loaded",
        "step/local/steps.py",
        "self._later = later if again else None",
        "self._later = None",
        "saved test_checkpoint_of_torch_keeps_the_state_of_each_worker",
    ),
    BrokenLine(
        "a group with a rate of zero loses its state where nothing waits",
        "step/exchange/machine.py",
        " and not self.scope.options.recipe.delivers_all()",
        "",
        "rules test_group_whose_rate_begins_at_zero_has_its_state_if_everything_is_delivered",
    ),
    BrokenLine(
        "the first entry of a tensor in fp16 counts for the one before",
        "step/exchange/layout.py",
        "mean.indices.clamp(min=0), right=True)",
        "mean.indices.clamp(min=0))",
        "exchange test_overflow_is_found_in_the_first_entry_of_a_tensor",
    ),
    BrokenLine(
        "a step that was skipped may be in the way of further parameters",
        "step/setup.py",
        'raise RuntimeError(f"a step was skipped',
        'print(f"a step was skipped',
        "exchange test_parameters_are_not_added_in_a_step_that_was_skipped",
    ),
    BrokenLine(
        "gradients after a flush that failed are lost",
        "step/stepper.py",
        "with self._noted():\n            self._apply()",
        "with nullcontext():\n            self._apply()",
        "around test_backward_pass_after_a_flush_that_failed_is_noticed",
    ),
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


class Failures:
    """A plugin of pytest that writes the names of tests that fail into a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a name."""
        if report.failed:
            with self._file.open("a") as file:
                file.write(report.nodeid.rpartition("::")[2] + "\n")


def survives(line: BrokenLine, path: str | None = None) -> str | list[str]:
    """Run the tests of ``line`` on a copy of the package with the line broken. Return why it survives, or nothing.

    With a ``path``, run all tests of this file, and return the names of those that fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "tritoncomm")
        shutil.copytree(ROOT / "tritoncomm", package, ignore=shutil.ignore_patterns("__pycache__"))
        file = package / line.file
        file.write_text(file.read_text().replace(line.old, line.new))
        with Path(folder, "output").open("w") as output:
            child = os.fork()
            if child == 0:
                _exit_with(partial(_tested, line, folder, output, path))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        failures = Path(folder, "failures")
        if path is not None:
            return sorted(set(failures.read_text().split("\n")) - {""}) if failures.exists() else []
        text = Path(folder, "output").read_text()
    summary = text.rpartition("=\n")[2] or text[-200:]
    if status == pytest.ExitCode.TESTS_FAILED and " failed" in summary and " error" not in summary:
        return ""
    if status == 0:
        return NOTHING_FAILS if " skipped" not in summary else SKIPPED
    return f"the tests did not run (status {status}):\n{text}"


def _exit_with(function: Callable[[], int]) -> NoReturn:
    """End this process with the status that ``function`` returns, without what its parent will clean up."""
    status = 70
    try:
        status = function()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _tested(line: BrokenLine, folder: str, output: IO[str], path: str | None) -> int:
    """Run the tests of ``line``, or of a file, with the package in ``folder``, and return the status of pytest.

    In a process of its own.
    """
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    os.chdir(folder)
    sys.path[:0] = [folder, str(ROOT / "kernels")]
    sys.dont_write_bytecode = True
    ranks.START_METHOD = "fork"
    # No conftest: it looks inside the library.
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, str(ROOT / "kernels")])  # of processes that are not forked
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", f"--rootdir={ROOT}", "--tb=short"]
    options += ["-x"] if path is None else []
    options += [f"--config-file={ROOT / 'pyproject.toml'}", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    options += ["-o", "faulthandler_timeout=0"]  # its thread would not live on in forked processes
    tests = [f"{ROOT / line.test_file}::{name}" for name in line.test_names] if path is None else [str(ROOT / path)]
    status = pytest.main([*options, *tests], plugins=[Failures(Path(folder, "failures"))])
    found = sys.modules["tritoncomm"].__file__
    assert found is not None
    assert found.startswith(folder), f"another package was tested: {found}"
    ranks.end()
    return int(status)


def preload(lines: Iterable[BrokenLine]) -> None:
    """Import what tests take longest to import, once for all of them."""
    trainers = ("accelerate", "transformers.trainer", "lightning")
    is_needed = any(line.test_file.stem == "test_trainers" for line in lines)
    for module in (*ranks.PRELOADED, *(trainers if is_needed else ())):
        with suppress(ImportError):
            importlib.import_module(module)


def write_catches(lines: Sequence[BrokenLine], path: str) -> int:
    """Write which tests of a file catch which of the ``lines``. Return 1 if a test fails with nothing broken."""
    whole = survives(lines[0]._replace(new=lines[0].old), path)
    if whole:
        sys.stdout.write(f"with nothing broken: {whole} fail\n")
        return 1
    found = json.loads(CATCHES.read_text()) if CATCHES.exists() else {}
    found[path] = {}
    for line in lines:
        found[path][line.name] = survives(line, path)
        sys.stdout.write(f"{line.name}: {', '.join(found[path][line.name]) or 'nothing'}\n")
        sys.stdout.flush()
        CATCHES.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Break lines, and return 1 if one survives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="lines whose name or file contains one of these texts")
    parser.add_argument("--sample", type=int, default=40, help="number of lines (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of the sample (default: another one each day)")
    parser.add_argument("--all", action="store_true", help="all lines")
    parser.add_argument("--tests", metavar="PATH", help="write which tests of this file catch these lines")
    chosen = parser.parse_args(arguments)
    wrong = problems()
    if wrong:
        sys.stdout.write("\n".join(wrong) + "\n")
        return 1
    lines = BROKEN
    if chosen.names:
        lines = [each for each in BROKEN if any(name in each.name or name in each.file for name in chosen.names)]
    if not lines:
        sys.stdout.write("no line has such a name\n")
        return 1
    if not chosen.all and not chosen.names:
        seed = int(time.time() // 86400) if chosen.seed is None else chosen.seed
        lines = random.Random(seed).sample(lines, min(chosen.sample, len(lines)))  # noqa: S311 - a choice of tests
    preload(lines)
    if chosen.tests:
        return write_catches(lines, chosen.tests)
    whole = survives(lines[0]._replace(name="nothing is broken", new=lines[0].old))
    if whole != NOTHING_FAILS:
        sys.stdout.write(f"with nothing broken: {whole or 'a test fails'}\n")
        return 1
    survivors = 0
    for line in lines:
        began = time.monotonic()
        reason = survives(line)
        survivors += bool(reason) and reason != SKIPPED
        state = SKIPPED if reason == SKIPPED else f"SURVIVED, {reason}" if reason else "caught"
        sys.stdout.write(f"{state}: {line.name} ({line.file}) {time.monotonic() - began:.1f} s\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(lines)} lines broken, {survivors} survived\n")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
