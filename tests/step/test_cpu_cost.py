"""What an exchange costs on a CPU: the table of work, and the plans that count it."""

from __future__ import annotations

import importlib
import json

import pytest
from tritoncomm import ConfigurationError, Hierarchical, Warmup
from tritoncomm.algorithms import Dense, algorithms
from tritoncomm.planning import planner
from tritoncomm.planning.doctor import diagnose
from tritoncomm.planning.planner import Estimate, at, estimates
from tritoncomm.scheduler.cost import Link
from tritoncomm.step import cpu_cost
from tritoncomm.step.packing import resolve, unpacked

from pages import ROOT

NUMEL, SLOW, FAST = 1_000_000, Link.parse("10mbit,50us"), Link.parse("400gbit,5us")


def _plan(link: Link, **arguments: object) -> dict[str, Estimate]:
    found = estimates(NUMEL, 4, link, 0.1, densities=(0.03,), values="4bit", **arguments)
    return {estimate.recipe.name: estimate for estimate in found}


def test_every_method_has_a_row() -> None:
    """All methods are in the table. A method that delivers everything is work like dense."""
    assert set(cpu_cost.TABLE) == set(algorithms())
    dense = cpu_cost.work(Dense(), NUMEL, 4)
    assert 0 < dense[0] == dense[1] < cpu_cost.work(at("oktopk", 0.03), NUMEL, 4)[0]
    assert cpu_cost.work(at("oktopk", 1.0), NUMEL, 4) == dense


def test_the_table_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constants are those that ``benchmarks/cpu_cost.py`` fits to the committed measurements, rounded."""
    pytest.importorskip("scipy", reason="needs the extra 'benchmarks'")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("cpu_cost")
    files = json.loads((ROOT / "benchmarks/results/cpu_cost.json").read_text())["files"]
    gloo = script.bandwidth(files)
    fixed, message, rates, _ = script.fitted([point for file in files for point in script.points(file, gloo)])
    assert pytest.approx(gloo, rel=0.02) == cpu_cost.GLOO_BANDWIDTH
    assert (fixed, message) == pytest.approx((cpu_cost.EXCHANGE, cpu_cost.MESSAGE), rel=0.01)
    for name, work in cpu_cost.TABLE.items():
        assert rates[name] == pytest.approx(work, rel=0.03, abs=0.6e-9), name


@pytest.mark.parametrize("name", sorted(set(cpu_cost.TABLE) - {"dense"}))
def test_work_grows(name: str) -> None:
    """More values, entries and workers are more work. One worker has none."""
    base = cpu_cost.work(at(name, 0.03), NUMEL, 4)
    assert 0 < base[0] <= base[1]
    assert cpu_cost.work(at(name, 0.03), 2 * NUMEL, 4)[0] > base[0]
    assert cpu_cost.work(at(name, 0.06), NUMEL, 4)[0] >= base[0]
    assert cpu_cost.work(at(name, 0.03), NUMEL, 8)[1] > base[1]
    assert cpu_cost.work(at(name, 0.03), NUMEL, 1) == (0.0, 0.0)


@pytest.mark.parametrize("name", ["oktopk", "random_k", "exdyna"])
def test_the_format_is_packing_and_no_work(name: str) -> None:
    """Rounded and packed values are the same work. ``packing`` counts what they take."""
    plain, rounded = at(name, 0.03), at(name, 0.03, "4bit")
    assert cpu_cost.work(plain, NUMEL, 4) == cpu_cost.work(rounded, NUMEL, 4)
    assert resolve(unpacked(rounded), NUMEL, 4, "cpu").seconds == 0
    wrapped = Warmup(recipe=rounded, steps=5)
    assert cpu_cost.work(wrapped, NUMEL, 4) == cpu_cost.work(plain, NUMEL, 4)


def test_a_hierarchical_exchange_is_work() -> None:
    """The method between nodes counts. A worker exchanges its share of the vector."""
    method = at("oktopk", 0.03)
    assert cpu_cost.work(Hierarchical(recipe=method, node_size=2), NUMEL, 8) == cpu_cost.work(method, NUMEL // 2, 4)
    assert cpu_cost.work(Hierarchical(recipe=method, node_size=4), NUMEL, 4) == (0.0, 0.0)


def test_an_unknown_method_has_the_work_of_others() -> None:
    """A recipe of a user is about as much work as a top-k method."""

    class Mine(type(at("topk_allgather", 0.03))):
        name = "mine"

    own, like = (cpu_cost.work(recipe, NUMEL, 4)[1] for recipe in (Mine(density=0.03), at("topk_allgather", 0.03)))
    assert own == pytest.approx(like, rel=0.2)


def test_plans_count_the_work() -> None:
    """An exchange takes its time on the link, its work and its packing. The rest of the step follows."""
    found = _plan(SLOW)["oktopk"]
    packing = resolve(at("oktopk", 0.03, "4bit"), NUMEL, 4, "cpu", SLOW)
    on_link = packing.recipe.formula(NUMEL, 4).seconds(SLOW)
    works = cpu_cost.work(packing.recipe, NUMEL, 4)
    for got, link, work in zip((found.low, found.high), on_link, works, strict=True):
        assert got == pytest.approx(link + work + packing.seconds)
    assert found.step == pytest.approx(0.1 + found.high + cpu_cost.rest_of_step(NUMEL))


def test_workers_share_cores() -> None:
    """With half a core for each worker, work takes twice as long, and computation hides nothing."""
    whole, half = _plan(SLOW), _plan(SLOW, cores=0.5)
    packing = resolve(at("oktopk", 0.03, "4bit"), NUMEL, 4, "cpu", SLOW)
    more = cpu_cost.work(packing.recipe, NUMEL, 4)[1] + packing.seconds
    assert half["oktopk"].high == pytest.approx(whole["oktopk"].high + more)
    assert half["oktopk"].step == pytest.approx(whole["oktopk"].step + more + cpu_cost.rest_of_step(NUMEL))
    assert half["dense"].high == whole["dense"].high
    assert half["dense"].step == pytest.approx(whole["dense"].step + planner.OVERLAP * 0.1)
    assert _plan(SLOW, cores=4) == whole
    for wrong, said in (({"cores": 0.0}, "got cores=0.0"), ({"buckets": -1}, "got buckets=-1")):
        with pytest.raises(ConfigurationError, match=said):
            _plan(SLOW, **wrong)


def test_buckets_are_exchanges() -> None:
    """Each bucket has its own messages, and is handled by the hook. Together they have the same entries."""
    one, four = _plan(SLOW, buckets=1)["oktopk"], _plan(SLOW, buckets=4)["oktopk"]
    messages = at("oktopk", 0.03).formula(NUMEL, 4).latencies
    more = four.high - one.high
    assert more > 3 * (cpu_cost.EXCHANGE + cpu_cost.BUCKET + messages * cpu_cost.MESSAGE)
    assert more < 3 * (cpu_cost.EXCHANGE + cpu_cost.BUCKET + messages * (cpu_cost.MESSAGE + 1e-3))
    assert _plan(SLOW, buckets=4)["dense"] == _plan(SLOW)["dense"]
    few = estimates(3, 4, SLOW, densities=(0.03,), buckets=100)
    assert few == estimates(3, 4, SLOW, densities=(0.03,), buckets=3)


def test_hook_is_work() -> None:
    """The hook of DDP takes the time of a core, more with each bucket. On a GPU, nothing is counted for it."""
    for cores in (1.0, 0.5):
        bare, one = _plan(SLOW, cores=cores)["oktopk"], _plan(SLOW, buckets=1, cores=cores)["oktopk"]
        assert one.high == pytest.approx(bare.high + (cpu_cost.HOOK + cpu_cost.BUCKET) / cores)
        assert one.step - bare.step == pytest.approx(one.high - bare.high)
    assert _plan(SLOW, device="cuda", buckets=1) == _plan(SLOW, device="cuda")
    assert cpu_cost.hook(0) == 0 < cpu_cost.hook(1) < cpu_cost.hook(2)


def test_dense_of_wrap_is_work() -> None:
    """``algo="auto"`` compares with a dense exchange of this library, which overlaps nothing, ``plan`` with DDP."""
    ddp, wrapped = _plan(SLOW)["dense"], _plan(SLOW, wrapped_dense=True)["dense"]
    assert wrapped.high == pytest.approx(ddp.high + cpu_cost.work(Dense(), NUMEL, 4)[1])
    assert wrapped.step == pytest.approx(0.1 + wrapped.high + cpu_cost.rest_of_step(NUMEL))
    assert _plan(SLOW)["oktopk"] == _plan(SLOW, wrapped_dense=True)["oktopk"]


def test_gloo_has_a_bandwidth() -> None:
    """A link faster than gloo is no faster, and a slow one stays as it is. It takes a core for that."""
    assert cpu_cost.on_gloo(SLOW) == SLOW
    assert cpu_cost.on_gloo(FAST) == Link(FAST.latency, cpu_cost.GLOO_BANDWIDTH)
    assert cpu_cost.on_gloo(FAST, 0.5).bandwidth == cpu_cost.GLOO_BANDWIDTH / 2
    dense = _plan(FAST)["dense"]
    assert dense.high == pytest.approx(2 * 3 / 4 * 4 * NUMEL / cpu_cost.GLOO_BANDWIDTH, rel=0.01)


def test_doctor_counts_the_selection_once() -> None:
    """In a single process, the predicted exchange holds the selection, and the measured one is shown beside it."""
    found = diagnose(NUMEL, lambda density: at("spardl", density), 0.03, link=SLOW, workers=4)
    packing = resolve(at("spardl", 0.03), NUMEL, 4, "cpu", SLOW)
    assert found.selection > 0
    assert found.sparse[0.03] == pytest.approx(planner.exchange_seconds(packing, NUMEL, 4, SLOW, "cpu")[1])


def test_doctor_counts_the_rest_of_the_step() -> None:
    """A sparse exchange that is faster by less than the rest of its step takes longer does not pay."""
    link = Link.parse("400mbit,30us")
    found = diagnose(50_000, lambda density: at("spardl", density, "4bit"), 0.03, link=link, workers=8)
    assert found.sparse[0.03] < planner.WORTH_IT * found.dense < found.sparse[0.03] + cpu_cost.rest_of_step(50_000)
    assert not found.pays
