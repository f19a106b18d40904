"""Plans and comparisons of methods, from predictions and from simulated networks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tritoncomm import ConfigurationError, Quantized, SparDL
from tritoncomm.__main__ import main
from tritoncomm.algorithms import Dense, algorithms
from tritoncomm.planning.comparison import compare_methods, picture, shortened
from tritoncomm.planning.planner import Setting, at
from tritoncomm.planning.synthetic_gradients import AdversarialGradients, LayeredGradients
from tritoncomm.primitives.packing import Encoding
from tritoncomm.scheduler.cost import HEADER_WORDS, WORD, Link

SLOW, FAST = Link.parse("1gbit,50us"), Link.parse("400gbit,100us")


def test_prediction_is_traffic_on_the_link() -> None:
    """An exchange takes the messages and bytes of an ordinary step. A sparse step also takes the given work."""
    for device, static in (("cpu", "auto"), ("cuda", True)):
        setting = Setting(numel=1_000_000, workers=8, link=SLOW, step=0.02, work=0.003, values="4bit", device=device)
        found = setting.estimate(setting.at("spardl", 0.03))
        assert found.recipe == SparDL(density=0.03, values="4bit", static=static)
        expected = found.recipe.build(1_000_000).predicted_traffic(8, ordinary=True).seconds(SLOW)
        assert found.exchange == expected
        assert found.step == pytest.approx(0.02 + expected + 0.003)
    assert setting.estimate(Dense()).step == replace(setting, work=0.0).estimate(Dense()).step


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"numel": 0}, "numel=0"), ({"workers": 0}, "workers=0"), ({"step": -1.0}, "step=-1.0"), ({"work": -2.0}, "-2.0")],
)
def test_impossible_plans_are_rejected(arguments: dict, named: str) -> None:
    """The error names the impossible argument."""
    with pytest.raises(ConfigurationError, match=named):
        Setting(**{"numel": 10, "workers": 4, "link": SLOW, **arguments})


PLAN = ["plan", "--numel", "124e6", "--workers", "64", "--link", "1gbit,30us", "--step-ms", "350"]


def _table(out: str) -> list[list[str]]:
    """Return the rows of the printed plan, split into words."""
    return [line.split() for line in out.splitlines() if line.endswith("x")]


def test_plan_answers_first(capsys: pytest.CaptureFixture[str]) -> None:
    """The first line is the answer, in one sentence. Then come three rows, and the code to use."""
    assert main([*PLAN, "--device", "cpu"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    answer = (
        "Sparse pays: 0.44 s a step, without the work of selecting, instead of 8.0, if 50% of the computation hides "
    )
    assert first == answer + "a dense all-reduce."
    rows = _table("\n".join(rest))
    assert [row[0] for row in rows] == ["spardl", "oktopk", "dense"]
    assert [row[1] for row in rows[:2]] == ["3%", "3%"]
    assert (
        "optimizer = tritoncomm.wrap(optimizer, algo='oktopk', density=0.03, values='4bit')" in rest
    )  # within 5 % of the fastest
    assert max(map(len, rest)) < 160


FEW = ["plan", "--numel", "1e6", "--workers"]


@pytest.mark.parametrize(
    ("arguments", "first", "last"),
    [
        (
            [*FEW, "8", "--link", "400gbit,5us", "--step-ms", "100"],
            "Dense is faster here: 100 ms a step, and 100 with a sparse exchange, if 50% of the ",
            "Stay dense: use the optimizer without tritoncomm.wrap.",
        ),
        # A sparse step that is faster by less than 5 % hardly pays.
        (
            [*FEW, "4", "--link", "1gbit,50us", "--step-ms", "20", "--work-ms", "35"],
            "Sparse hardly pays: 56 ms a step instead of 58, if 50% of the ",
            "Stay dense",
        ),
        (
            [*FEW, "1"],
            "One worker exchanges nothing: use the optimizer without tritoncomm.wrap.",
            "One worker exchanges nothing: use the optimizer without tritoncomm.wrap.",
        ),
        (
            [*PLAN, "--density", "0.05"],
            "Sparse pays: ",
            "optimizer = tritoncomm.wrap(optimizer, algo='oktopk', density=0.05, values='4bit')",
        ),
    ],
)
def test_answers_of_plan(arguments: list[str], first: str, last: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The first line says what is faster, and the last one what to write."""
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(first)
    assert any(line.startswith(last) for line in lines[-4:])


def test_plan_names_the_format(capsys: pytest.CaptureFixture[str]) -> None:
    """The code names the format that was planned for, fp32 too. Shorter formats make the exchange shorter."""
    milliseconds = []
    for values in ("fp32", "8bit", "2bit"):
        assert main([*PLAN, "--values", values]) == 0
        out = capsys.readouterr().out
        assert re.search(rf"wrap\(optimizer, algo='\w+', density=0.03, values='{values}'", out)
        milliseconds.append(_times(out, "spardl")[0])
    assert milliseconds == sorted(milliseconds, reverse=True)


def test_plan_counts_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    """Without ``--work-ms``, the plan says up to which work a sparse exchange pays. With it, dense may be faster."""
    command = ["plan", "--numel", "867072", "--workers", "4", "--link", "1gbit,50us", "--step-ms", "80"]
    assert main([*command, "--overlap", "0"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "Sparse pays: 81 ms a step, without the work of selecting, instead of 122, if no computation hides"
    )
    room = float(re.search(r"Sparse pays if it is below (\d+) ms an exchange", out)[1])
    for more, answer in ((-2, "Sparse pays: "), (2, "Sparse hardly pays: "), (12, "Dense is faster here: ")):
        assert main([*command, "--overlap", "0", "--work-ms", str(room + more)]) == 0
        out = capsys.readouterr().out
        assert out.startswith(answer)
        assert "Not counted" not in out


def test_plan_prints_everything_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    """``--all`` prints every method at the density, and the trusted ones at other densities."""
    assert main(PLAN) == 0
    short = _table(capsys.readouterr().out)
    assert main([*PLAN, "--all"]) == 0
    rows = _table(capsys.readouterr().out)
    assert len(short) <= 5
    assert rows[: len(short)] == short
    assert {row[0] for row in rows} == set(algorithms())
    # First all methods at the same density, and only then other densities.
    densities = [row[1] for row in rows if row[0] not in ("dense", "quantized")]
    assert densities[: len(algorithms()) - 2] == ["3%"] * (len(algorithms()) - 2)
    assert sorted(densities[len(algorithms()) - 2 :]) == ["0.1%", "0.1%", "1%", "1%", "5%", "5%"]
    # A method without a density has rows for several numbers of bits.
    assert [row[1] for row in rows if row[0] == "quantized"] == ["1bit", "2bit", "4bit"]


def test_plan_counts_the_dense_steps_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    """``plan`` says how long the dense steps take with which ``wrap`` begins, in steps of the chosen method."""
    command = ["plan", "--numel", "1e6", "--workers", "4", "--link", "10mbit,50us", "--device", "cpu"]
    assert main([*command, "--density", "1"]) == 0
    assert "steps are dense" not in capsys.readouterr().out  # a warm-up would change nothing
    assert main([*command, "--step-ms", "1000"]) == 0
    out = capsys.readouterr().out
    chosen = re.search(r"algo='(\w+)'", out)[1]
    _, sparse = _times(out, chosen)
    said = re.search(
        r"The first 16 steps are dense, in 2 bits, and take ([\d.]+) s, as long as (\d+) of the others", out
    )
    # 2 bits and 1/64 of a 16-bit scale for each of 10^6 values, in both directions. A quarter is this rank's own.
    dense = 1000 + 2 * 3 / 4 * 1e6 * (2 + 16 / 64) / 1e7 * 1e3
    assert float(said[1]) == pytest.approx(16e-3 * dense, rel=0.02)
    assert int(said[2]) == pytest.approx(16 * dense / sparse, abs=0.5)
    assert "warmup_steps" in out


def test_plan_for_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """It says if messages of a fixed length, the default on GPUs, take longer on the link than they save."""
    said = []
    for link in ("1gbit,50us", "100gbit,5us"):
        main(["plan", "--numel", "124e6", "--workers", "8", "--link", link, "--step-ms", "5"])
        said.append(
            "On GPUs, add static=False: messages of a fixed length take 58 ms longer" in capsys.readouterr().out
        )
    assert said == [True, False]


def test_columns_of_large_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Columns stay apart, and lines as long as others, whatever the numbers."""
    for more in (["--all"], ["--local-steps", "4"]):
        lengths = []
        for work, link in (("1", "1gbit,30us"), ("1e9", "1gbit,30us"), ("1e13", "1bit,30us")):
            command = ["plan", "--numel", "1e6", "--workers", "4", "--link", link, "--work-ms", work]
            assert main([*command, *more]) == 0
            rows = [line for line in capsys.readouterr().out.splitlines() if line.endswith("x")]
            assert {len(row.split()) for row in rows if not row.startswith("dense")} == {5}
            lengths.append({len(row) for row in rows})
        assert lengths[0] == lengths[1] == lengths[2]
        assert len(lengths[0]) == 1


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("10gbit,30us", "10 Gbit/s, 30 us"),
        ("10mbit,50ms", "10 Mbit/s, 50 ms"),
        ("999kbit,1.5ms", "999 kbit/s, 1.5 ms"),
        ("2.5gbit,800ns", "2.5 Gbit/s, 800 ns"),
        ("1000mbit,1000us", "1 Gbit/s, 1 ms"),
        ("100bit,2s", "100 bit/s, 2 s"),
        ("40000gbit,0s", "40,000 Gbit/s, 0 ns"),
    ],
)
def test_units_of_a_link(link: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A link is printed in the units that a person would choose."""
    assert main(["plan", "--numel", "1e6", "--workers", "4", "--link", link]) == 0
    assert f"1,000,000 parameters, 4 workers, {said}\n" in capsys.readouterr().out
    assert main(["simulate", "--numel", "1e3", "--algo", "dense", "--workers", "2", "--link", link]) == 0
    assert f"virtual time on {said}\n" in capsys.readouterr().out


def test_plan_for_updates(capsys: pytest.CaptureFixture[str]) -> None:
    """``--local-steps`` plans for an optimizer whose updates are exchanged: one exchange for so many steps."""
    assert main([*PLAN, "--local-steps", "8", "--work-ms", "400"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "Updates pay: 0.44 s a step instead of 8.0, if 50% of the computation hides a dense all-reduce."
    assert rest[-1] == "optimizer = tritoncomm.wrap(optimizer, local_steps=8)"
    rows = {tuple(row[:2]): row[2:] for row in _table("\n".join(rest))}
    assert set(rows) == {
        ("quantized", "1"),
        ("quantized", "4"),
        ("quantized", "8"),
        ("quantized", "16"),
        ("dense", "1"),
    }
    exchange = Quantized().build(124_000_000).predicted_traffic(64).seconds(Link.parse("1gbit,30us"))
    for steps in (1, 4, 8, 16):
        found, step, _ = (float(text.rstrip("x")) for text in rows["quantized", str(steps)])
        assert found == pytest.approx(1e3 * exchange, abs=0.01)
        assert step == pytest.approx(350 + (found + 400) / steps, abs=0.02)
    assert main([*PLAN, "--local-steps", "1", "--values", "2bit"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    method = "tritoncomm.Quantized(values='2bit')"
    assert last == f"optimizer = tritoncomm.wrap(optimizer, updates=tritoncomm.Updates(algo={method}))"


def _times(out: str, method: str) -> tuple[float, float]:
    """Return the milliseconds of the exchange, the upper end of a range, and of the step, in the printed plan."""
    exchange, step = re.search(rf"^{method} .* ([\d.]+) +([\d.]+) +[\d.]+x$", out, re.MULTILINE).groups()
    return float(exchange), float(step)


def test_simulate_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``simulate`` prints a row per method and number of workers, and writes a JSON file and a picture."""
    figures, picture = tmp_path / "rows.json", tmp_path / "volume.png"
    arguments = ["simulate", "--algo", "all", "--workers", "2,5", "--numel", "8e3", "--density", "0.05"]
    assert main([*arguments, "--json", str(figures), "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    rows = json.loads(figures.read_text())
    assert {row["method"] for row in rows} == set(algorithms())
    assert len(rows) == 2 * len(algorithms())
    assert all(name in out for name in algorithms())
    assert picture.read_bytes().startswith(b"\x89PNG")
    spardl = next(row for row in rows if row["method"] == "spardl" and row["workers"] == 5)
    assert spardl["busiest"] == spardl["predicted"]


def test_simulate_in_a_format(tmp_path: Path) -> None:
    """``simulate --values`` sends the format: the words of a message are those of its layout."""
    figures = tmp_path / "rows.json"
    arguments = ["--workers", "2", "--numel", "4e3", "--density", "0.05", "--steps", "1", "--json", str(figures)]
    for values in ("4bit", "1bit"):
        methods = ["topk_allgather", "random_k", "random_block"]
        assert main(["simulate", "--algo", *methods, "--values", values, *arguments]) == 0
        row, other, block = json.loads(figures.read_text())
        assert row["words"] == Encoding(values, True).words(4_000, 200) + HEADER_WORDS
        assert block["words"] < 100
        assert other["words"] == 200  # indices do not travel, and the format is one of entries


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["simulate", "--workers", "0"], "--workers"),
        (["simulate", "--numel", "1.5"], "--numel"),
        (["simulate", "--algo", "sparkle"], "unknown"),
        (["simulate", "--algo", "spardl:team=2"], "no field 'team'"),
        (["simulate", "--algo", "spardl:teams=0"], "teams=0"),
        (["simulate", "--link", "fast"], "--link"),
        (["simulate", "--import", "no_such_module"], "no_such_module"),
        (["simulate", "--gradients", "x"], "--gradients"),
        (["plan", "--workers", "4"], "--numel"),
        (["plan", "--numel", "inf", "--workers", "4"], "--numel"),
        (["plan", "--numel", "1e6", "--workers", "4", "--step-ms", "-1"], "--step-ms"),
        (["plan", "--numel", "1e6", "--workers", "4", "--overlap", "2"], "--overlap: must be from 0 to 1, got 2"),
        (["plan", "--numel", "1e6", "--workers", "4", "--overlap", "nan"], "--overlap"),
        (["plan", "--numel", "1e6", "--workers", "1000000000000"], "must be a whole number from 1 to 1,000,000"),
    ],
)
def test_bad_command_line_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad argument prints an error with its name, and exits with code 2."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--density", "0.5"], ["--all"]])
def test_options_for_gradients_are_refused_with_updates(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What a plan for updates does not read is named."""
    assert main(["plan", "--numel", "1e6", "--workers", "4", "--local-steps", "4", *given]) == 2
    assert f"{given[0]} is for gradients" in capsys.readouterr().err


def test_recipe_fields_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The command line sets the fields of a recipe."""
    arguments = ["simulate", "--workers", "8", "--numel", "1e5", "--algo"]
    assert main([*arguments, "spardl:teams=2:sag=recursive", "oktopk:strict_volume=True", "spardl"]) == 0
    out = capsys.readouterr().out
    assert "spardl teams=2 sag=recursive " in out
    assert "oktopk strict_volume=True " in out
    small = ["simulate", "--workers", "2", "--numel", "1e3", "--steps", "1", "--algo"]
    assert main([*small, "all", "oktopk:strict_volume=True"]) == 0
    assert "oktopk strict_volume=True " in (out := capsys.readouterr().out)
    assert all(name in out for name in algorithms())


def test_long_vectors_are_extrapolated() -> None:
    """Figures extrapolated from a vector and its half equal those of the long vector where they are linear."""
    numel = 160_000
    assert shortened(numel, 4, 0.01, 1e6) == 12_500
    (direct,) = compare_methods([SparDL()], [4], numel, SLOW, LayeredGradients)
    (extrapolated,) = compare_methods([SparDL()], [4], numel, SLOW, LayeredGradients, memory=20 * 4 * 40_000)
    assert extrapolated.simulated == 40_000
    assert (direct.words, direct.messages) == (extrapolated.words, extrapolated.messages)
    assert direct.milliseconds == pytest.approx(extrapolated.milliseconds)
    assert direct.as_predicted


def test_picture_for_one_worker(tmp_path: Path) -> None:
    """The picture for one worker, which receives nothing, is drawn without a warning."""
    picture([*compare_methods([Dense(), SparDL()], [1], 400, SLOW, LayeredGradients)], tmp_path / "volume.png")


def test_too_large_simulations_are_rejected() -> None:
    """A simulation that would need too much memory is rejected with the fix."""
    with pytest.raises(ConfigurationError, match="choose a higher density"):
        shortened(25_000_000, 1024, 1e-4, 1e9)
    assert shortened(25_000_000, 1024, 0.01, 1e9) == 409_600


def test_all_gather_methods_use_shorter_vectors() -> None:
    """Methods in which every worker holds data of all workers are simulated with shorter vectors."""
    for method, most in ((at("oktopk", 0.01), 409_600), (at("topk_allgather", 0.01), 10_000)):
        predicted = method.build(25_000_000).predicted_traffic(1024, ordinary=True)
        gathered = predicted.received.bytes / WORD / 25_000_000
        short = shortened(25_000_000, 1024, 0.01, 1e9, max(0.0, gathered - 2))
        assert most / 2 < short <= most
        assert 1024 * short * (20 + 4 * gathered) < 9e9


def test_synthetic_gradients() -> None:
    """Synthetic gradients are repeatable. Layered ones share scale and signal, adversarial ones lie in one stretch."""
    first, second = LayeredGradients(4800, 0), LayeredGradients(4800, 1)
    assert torch.equal(first.at(3), LayeredGradients(4800, 0).at(3))
    assert not torch.equal(first.at(3), first.at(4))
    assert torch.equal(first.scale, second.scale)
    assert torch.equal(first.signal, second.signal)
    assert not torch.equal(first.noise, second.noise)
    narrow = AdversarialGradients(5000, 2).at(1)
    inside = narrow.nonzero().flatten()
    assert 0 < len(inside) <= 100
    assert int(inside[-1] - inside[0]) < 100
    assert AdversarialGradients(0, 0).at(0).numel() == LayeredGradients(0, 0).at(0).numel() == 0


def test_no_simulation_begins_before_all_numbers_of_workers_are_possible() -> None:
    """A comparison that takes hours does not end with an error about its last line."""
    rows = compare_methods([Dense(), SparDL(teams=3)], [3, 7], 400, SLOW, LayeredGradients, steps=1)
    with pytest.raises(ConfigurationError, match="teams=3 does not divide world_size=7"):
        next(rows)
