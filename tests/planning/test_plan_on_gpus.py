"""Plans and simulations for GPUs: host synchronizations and launches, the form of messages, and when to stay dense."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tritoncomm import ConfigurationError, OkTopk, SimulatedWorld, TopkAllgather, Warmup
from tritoncomm.__main__ import main
from tritoncomm.algorithms import Dense, Hierarchical
from tritoncomm.planning import doctor, planner
from tritoncomm.planning.comparison import compare_methods, timeline
from tritoncomm.planning.planner import Estimate, at, estimates, recommend
from tritoncomm.planning.synthetic_gradients import LayeredGradients
from tritoncomm.scheduler.cost import Link
from tritoncomm.step import gpu_cost, packing

from pages import ROOT

NUMEL, STEP, DENSITY = 124_000_000, 0.1, 0.03
LINKS = {speed: Link.parse(f"{speed}gbit,5us") for speed in (10, 100, 400)}
SLOW = Link.parse("1gbit,50us")


def _plan(speed: int, workers: int, values: str = "4bit") -> dict[str, Estimate]:
    """Return the estimates on GPUs by method."""
    found = estimates(NUMEL, workers, LINKS[speed], STEP, densities=(DENSITY,), values=values, device="cuda")
    return {estimate.recipe.name: estimate for estimate in found}


@pytest.mark.parametrize("workers", [8, 64])
@pytest.mark.parametrize("speed", LINKS)
def test_estimates_are_link_and_device(speed: int, workers: int) -> None:
    """An exchange takes its bytes on the link, 15 us a synchronization and 5 us a launch, in the faster form."""
    found = _plan(speed, workers)
    for name, estimate in found.items():
        candidates = []
        method = at(name, DENSITY, "4bit") if name != "dense" else Dense()
        has_form = getattr(method, "can_be_static", bool)()
        for form in (True, False) if has_form else (None,):
            recipe = replace(method, static=form) if has_form else method
            recipe = packing.resolve(recipe, NUMEL, workers, "cuda", LINKS[speed]).recipe
            syncs, launches = gpu_cost.counts(recipe, workers)
            high = recipe.formula(NUMEL, workers).seconds(LINKS[speed])[1]
            candidates.append((high + 15e-6 * syncs + 5e-6 * launches, recipe, (syncs, launches)))
        seconds, recipe, counts = min(candidates, key=lambda each: each[0])
        assert estimate.high == pytest.approx(seconds), name
        assert estimate.recipe == recipe
        assert estimate.counts == counts
        assert estimate.low <= estimate.high
        rest = 49 * 5e-6  # of a sparse step
        exposed = max(0.0, seconds - STEP / 2) if name == "dense" else seconds + rest
        assert estimate.step == pytest.approx(STEP + exposed)
    assert list(found) == sorted(found, key=lambda name: (found[name].step, name))


def test_buckets_share_waits() -> None:
    """25 buckets cost their launches and latencies, and as many waits for the verdict and the confirmation as one."""
    one, many = (
        {
            each.recipe.name: each
            for each in estimates(25 * 40_000, 8, SLOW, densities=(DENSITY,), device="cuda", buckets=buckets)
            if not each.is_dense
        }
        for buckets in (1, 25)
    )
    bucket = {
        each.recipe.name: each
        for each in estimates(40_000, 8, SLOW, densities=(DENSITY,), device="cuda")
        if not each.is_dense
    }
    for name, estimate in many.items():
        waits = 2 if estimate.counts.synchronizations == 2 else 1
        if estimate.recipe == bucket[name].recipe:
            assert estimate.high == pytest.approx(25 * bucket[name].high - 24 * waits * 15e-6), name
        assert estimate.high > one[name].high
    assert {name for name, each in many.items() if each.counts.synchronizations == 2} >= {
        "oktopk",
        "spardl",
        "random_k",
    }


@pytest.mark.parametrize("workers", [8, 64])
def test_recommendation_follows_the_network(workers: int) -> None:
    """A sparse method is recommended at 10 and 100 Gbit/s. At 400, computation hides the dense all-reduce."""
    for speed in (10, 100):
        assert recommend(NUMEL, workers, LINKS[speed], DENSITY, STEP, values="4bit", device="cuda").name == "spardl"
        assert _plan(speed, workers)["dense"].high > planner.OVERLAP * STEP
    assert isinstance(recommend(NUMEL, workers, LINKS[400], DENSITY, STEP, values="4bit", device="cuda"), Dense)
    dense = _plan(400, workers)["dense"]
    assert dense.step == STEP
    # Without computation to hide behind, bytes decide.
    assert recommend(NUMEL, workers, LINKS[400], DENSITY, values="4bit", device="cuda").name == "spardl"


def test_launches_make_small_models_stay_dense() -> None:
    """A small model on a fast network stays dense on GPUs because of launches. On the link alone, sparse is faster."""
    arguments = (500_000, 8, LINKS[100], DENSITY)
    sparse = at("spardl", DENSITY, "4bit").formula(*arguments[:2]).seconds(arguments[2])[1]
    dense = Dense().formula(*arguments[:2]).seconds(arguments[2])[1]
    assert sparse < planner.WORTH_IT * dense
    assert isinstance(recommend(*arguments, values="4bit", device="cuda"), Dense)


@pytest.mark.parametrize("workers", [8, 64])
def test_static_form_wins_where_its_bytes_are_not_many_more(workers: int) -> None:
    """The static form is faster where it sends the same bytes, and for Ok-Topk where the link is fast or ranks many."""
    for speed in LINKS:
        found = _plan(speed, workers)
        assert found["spardl"].recipe.static is True
        assert found["topk_allgather"].recipe.static is True
    assert _plan(100, workers)["oktopk"].recipe.static is True
    # With eight workers at 10 Gbit/s, the room of its messages takes longer than the launches of exact lengths.
    assert _plan(10, workers)["oktopk"].recipe.static is (workers == 64)


def test_recommended_recipe_can_be_used_between_nodes() -> None:
    """``static`` stays "auto" where that is the static form, which a hierarchical exchange refuses."""
    chosen = recommend(NUMEL, 64, LINKS[10], DENSITY, values="4bit", device="cuda")
    assert chosen.static == "auto"
    assert packing.resolve(chosen, NUMEL, 64, "cuda", LINKS[10]).recipe.static is True
    assert Hierarchical(recipe=chosen, node_size=8).recipe == chosen


def test_code_of_the_plan_names_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where exact lengths are faster on GPUs, the printed code asks for them, because ``wrap`` would not."""
    monkeypatch.setattr(planner, "TRUSTED", ("oktopk",))
    arguments = {"density": DENSITY, "values": "4bit", "device": "cuda"}
    assert "values='4bit', static=False)" in planner.advice(NUMEL, 8, LINKS[10], STEP, **arguments)
    assert "values='4bit')" in planner.advice(NUMEL, 64, LINKS[10], STEP, **arguments)


def test_plan_command_on_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """``plan --device cuda`` prints forms, synchronizations and launches, and where they come from. A CPU has none."""
    command = ["plan", "--numel", "124e6", "--workers", "64", "--link", "400gbit,5us", "--step-ms", "100", "--device"]
    assert main([*command, "cuda"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in reversed(out.splitlines()) if line.endswith("x")}
    assert "400 Gbit/s, 5 us, on GPUs" in out
    assert rows["spardl"][:3] == ["3%", "static", "2"]
    syncs, launches = gpu_cost.counts(Dense(), 64)
    assert rows["dense"][:2] == [f"{syncs:.0f}", f"{launches:.0f}"]
    assert "15 us per host synchronization and 5 us per launch." in out
    assert "counted on an emulated GPU" in out
    assert "Stay dense: at density 3%" in out
    assert main([*command, "cpu"]) == 0
    out = capsys.readouterr().out
    assert "launches" not in out
    assert "as measured on an AMD EPYC" in out


def test_doctor_predicts_like_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, ``doctor`` counts the same for GPUs as the plan, and adds the selection that it has measured."""
    monkeypatch.setattr(doctor, "_select", lambda *_: None)
    monkeypatch.setattr(doctor, "_best", lambda *_: 0.002)
    monkeypatch.setattr(doctor, "_slowest", lambda seconds, _: seconds)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_: self)
    found = doctor.diagnose(
        1_000_000, lambda density: at("spardl", density, "4bit"), DENSITY, link=LINKS[10], workers=8, device="cuda"
    )
    planned = estimates(1_000_000, 8, LINKS[10], densities=(DENSITY,), values="4bit", device="cuda")
    by_name = {estimate.recipe.name: estimate for estimate in planned}
    assert found.dense == by_name["dense"].high
    assert found.sparse[DENSITY] == pytest.approx(0.002 + by_name["spardl"].high)


@pytest.mark.parametrize("recipe", [Dense(), OkTopk(), OkTopk(static=True), TopkAllgather(values="4bit", static=True)])
def test_simulation_charges_synchronizations_and_launches(recipe: planner.Recipe) -> None:
    """A step of a simulated GPU takes as much longer as the counts say. The results are the same."""
    given = torch.stack([LayeredGradients(1000, rank).at(0) for rank in range(4)])
    plain, on_gpu = (SimulatedWorld(recipe, 4, 1000, link=SLOW, gpu=gpu) for gpu in (False, True))
    for _ in range(2):
        expected, found = plain.step(given), on_gpu.step(given)
        assert torch.equal(found[0].values, expected[0].values)
        assert on_gpu.seconds - plain.seconds == pytest.approx(gpu_cost.counts(recipe, 4).seconds)
    assert on_gpu.traffic == plain.traffic


def test_dense_steps_of_a_warmup_are_charged_as_dense() -> None:
    """The dense steps of a warm-up cost on a GPU what a dense exchange costs, and later ones what the method does."""
    recipe = Warmup(recipe=OkTopk(static=True), steps=1)
    given = torch.stack([LayeredGradients(1000, rank).at(0) for rank in range(4)])
    plain, on_gpu = (SimulatedWorld(recipe, 4, 1000, link=SLOW, gpu=gpu) for gpu in (False, True))
    for charged in (Dense(), recipe.recipe):
        plain.step(given)
        on_gpu.step(given)
        assert on_gpu.seconds - plain.seconds == pytest.approx(gpu_cost.counts(charged, 4).seconds)


def test_simulated_gpus_need_a_link() -> None:
    """Without a link there is no clock to charge, and the error says what to pass."""
    with pytest.raises(ConfigurationError, match="gpu=True charges time to the clock of a link: pass one"):
        SimulatedWorld(Dense(), 2, 10, gpu=True)


def test_comparison_on_gpus(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    """``simulate --device cuda`` runs the form that ``wrap`` takes on GPUs, and both columns of time charge for it."""
    (row,) = compare_methods([TopkAllgather()], [4], 4000, LINKS[100], LayeredGradients, gpu=True)
    assert row.method == "topk_allgather static=True packed=True"
    recipe = TopkAllgather(packed=True, static=True)
    seconds = gpu_cost.counts(recipe, 4).seconds
    assert row.formula_milliseconds == pytest.approx(1e3 * (seconds + recipe.formula(4000, 4).seconds(LINKS[100])[1]))
    (plain,) = compare_methods([recipe], [4], 4000, LINKS[100], LayeredGradients)
    assert row.milliseconds == pytest.approx(plain.milliseconds + 1e3 * seconds)
    timeline(TopkAllgather(), 2, 1000, LINKS[100], LayeredGradients, tmp_path / "trace.json", steps=1, gpu=True)
    assert (tmp_path / "trace.json").exists()
    arguments = ["simulate", "--algo", "topk_allgather", "oktopk:static=False", "--workers", "4", "--numel", "4e3"]
    assert main([*arguments, "--device", "cuda"]) == 0
    out = capsys.readouterr().out
    assert "topk_allgather static=True packed=True" in out
    assert "oktopk static=False packed=" in out
    assert "static=False" in out


def test_documented_plans() -> None:
    """The figures in the table of the documentation are those of the planner."""
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    for speed, workers in ((speed, workers) for speed in LINKS for workers in (8, 64)):
        found = _plan(speed, workers)
        advised = recommend(NUMEL, workers, LINKS[speed], DENSITY, STEP, values="4bit", device="cuda")
        cells = [f"{1e3 * found['dense'].high:.1f} ms"]
        cells += [f"{1e3 * (e := found[n]).high:.1f} ms, {gpu_cost.form(e.recipe)}" for n in ("spardl", "oktopk")]
        cells.append("stay dense" if isinstance(advised, Dense) else f"`{advised.name}`")
        assert f"| {speed} Gbit/s | {workers} | {' | '.join(cells)} |" in page
