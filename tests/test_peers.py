"""``benchmarks/train.py``: what it trains, the methods of others, and its file of results."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import runs
import train
from exchanges import Sent, exchanges
from peers import PEERS, SparseLoCoWorld
from runs import Run
from workers import Worker

SHAPES = [torch.Size(shape) for shape in ([96, 128], [5000], [7])]
SIZES = [4096, 4096, 4096, 4096, 904, 7]  # of the chunks
# Sent per step after the start. Dense is 809.472. The last three take 20 steps, and exchange once, once and twice.
KILOBYTES = {
    "powersgd-4": 77.6, "powersgd-8": 144.4, "demo": 70.3, "1bit": 34.2, "2bit": 59.2,
    "diloco": 809.472 / 20, "muloco": 2.85, "sparseloco": 1.77,
}  # fmt: skip


def test_sparseloco_keeps_what_it_does_not_send() -> None:
    """What is delivered and what is kept add up to the updates. 64 entries of each chunk travel, the largest."""
    world = SparseLoCoWorld(3, SHAPES)
    numel = sum(SIZES)
    updates = torch.randn(3, numel, generator=torch.Generator().manual_seed(0))
    means = world.step(updates)
    mean = means[0].to_dense()
    assert all(torch.equal(each.to_dense(), mean) for each in means)
    torch.testing.assert_close(3 * mean + world.residuals.sum(0), updates.sum(0), rtol=0, atol=1e-5)
    sent = updates - world.residuals
    for before, chunk in zip(updates.split(SIZES, dim=1), sent.split(SIZES, dim=1), strict=True):
        kept = min(64, chunk.shape[1])
        assert ((chunk != 0).sum(1) == kept).all()
        least = before.abs().sort(1).values[:, -kept, None]
        assert torch.equal(chunk != 0, before.abs() >= least)
        assert torch.equal(chunk.sign(), torch.where(chunk != 0, before.sign(), 0.0))
        decoded = [set(row.abs().bfloat16().tolist()) - {0.0} for row in chunk]
        assert all(len(found) == 2 for found in decoded)
    bits = (5 * 64 + 7) * 14 + len(SIZES) * 32
    assert [traffic.bytes for traffic in world.traffic] == [2 * -(-bits // 8)] * 3  # to two others


@pytest.mark.parametrize("name", KILOBYTES)
def test_every_peer_trains(name: str) -> None:
    """It lowers the loss, sends what it is known to send, and the curve ends with the last step."""
    assert list(PEERS) == list(KILOBYTES)
    number = 20 if PEERS[name]["exchange"] == "updates" else 10
    arguments = ["--peer", name, "--steps", str(number), "--lr", "0.01", "--seeds", "10"]
    (run,) = train.runs(train.arguments().parse_args(arguments))
    outcome = train.train(run, 1)
    assert run.seed == 10
    assert outcome["score"] < 4.8 < outcome["curve"][0][1] or outcome["curve"][0][0] > 2
    assert outcome["curve"][-1] == [number, outcome["score"]]  # the batches of a point are those of the score here
    steps = [step for step, _ in outcome["curve"]]
    every = run.local_steps if run.exchange == "updates" else 1
    assert steps == sorted({*range(every, number + 1, every), number})
    assert outcome["kilobytes_after_start"] == pytest.approx(KILOBYTES[name], rel=0.01)


@pytest.mark.parametrize("method", ["quantized", "sparseloco"])
def test_decay_forgets(method: str) -> None:
    """An exchange delivers and keeps the residuals times the decay, and what has changed: here nothing."""
    settings = {"quantized": {"values": "2bit"}, "sparseloco": {"count": 64}}[method]
    run = Run("gpt", 9, "sgd", 0.1, "updates", method, decay=0.5, local_steps=3, **settings)
    model = train.TASKS["gpt"](9, 1).model()
    made = [Worker(copy.deepcopy(model), run) for _ in range(train.WORKERS)]
    (exchange,) = exchanges(run, made)

    def residuals() -> list[torch.Tensor]:
        world = exchange.world
        return list(world.residuals) if method == "sparseloco" else [each.residual for each in world.workers]

    for residual in residuals():
        residual.fill_(0.25)
    before = exchange.anchor.clone()
    with torch.no_grad():
        exchange.merge(Sent())
    total = len(made) * (before - exchange.anchor) + sum(residuals())
    torch.testing.assert_close(total, torch.full_like(total, len(made) * 0.125), rtol=0, atol=1e-5)


def test_dense_steps_at_the_start() -> None:
    """Exchanges of gradients by Ok-Topk start with 20 dense steps in 2 bits, for any length. PowerSGD takes a tenth."""

    def starts(*arguments: str) -> list[tuple[str, int, str]]:
        options = train.arguments().parse_args(["--seeds", "0", *arguments])
        return [(run.method, run.dense_steps, run.dense_values) for run in train.runs(options)]

    start = (20, "2bit")
    assert starts("--steps", "300", "--exchange", "gradients") == [("oktopk", *start)]
    assert starts("--steps", "1600") == [("dense", 0, "fp32"), ("quantized", 0, "fp32")]
    assert starts("--local-steps", "4", "--exchange", "updates") == [("quantized", 0, "fp32")]
    assert starts("--steps", "300", "--peer", "powersgd-4", "1bit") == [
        ("powersgd", 30, "fp32"), ("quantized", 0, "fp32")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "aware", "by_update"), [([], True, True), (["--select-by", "gradient"], True, False),
                                      (["--staleness", "off"], False, False)],
)  # fmt: skip
def test_rule_and_selection(given: list[str], aware: bool, by_update: bool) -> None:
    """AdamW has its rule for late gradients, and selects by update, unless told otherwise. Formats are those given."""
    options = ["--steps", "9", "--optimizer", "adamw", "--exchange", "gradients", "--seeds", "0", "--values", "2bit"]
    (run,) = train.runs(train.arguments().parse_args([*options, "--dense-values", "8bit", *given]))
    made = [Worker(train.TASKS["gpt"](9, 1).model(), run) for _ in range(train.WORKERS)]
    (exchange,) = exchanges(run, made)
    staged, warmup, method = exchange.world.recipe.layers
    assert (exchange.rule is not None, staged.shapes is not None) == (aware, by_update)
    assert (warmup.values, method.name, method.values) == ("8bit", "oktopk", "2bit")


def test_schedule_free_is_evaluated_as_its_average() -> None:
    """Inside the context, parameters are those of its eval mode. Training then continues with the same bits."""
    run = Run("gpt", 4, "schedule-free", 0.01, "dense")
    task = train.TASKS["gpt"](4, 1)
    torch.manual_seed(0)
    worker = Worker(task.model(), run)
    for step in range(3):
        worker.set_rate(0.0)  # it has a schedule of its own
        worker.backward(task, 0, step, 0)
        worker.optimizers[0].step()
    before = [parameter.detach().clone() for parameter in worker.model.parameters()]
    assert worker.optimizers[0].param_groups[0]["lr"] == 0.01
    with worker.evaluated() as model:
        inside = [parameter.detach().clone() for parameter in model.parameters()]
        assert not worker.optimizers[0].param_groups[0]["train_mode"]
    assert worker.optimizers[0].param_groups[0]["train_mode"]
    assert all(torch.equal(a, b) for a, b in zip(before, worker.model.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, inside, strict=True))


def test_file_keeps_rows_of_others(tmp_path: Path) -> None:
    """A run is added to what the file holds by then, whoever has written it. A repeated run replaces its row."""
    file = tmp_path / "runs.json"
    first, second = (Run("gpt", 3, "adamw", 0.01, "dense", seed=seed) for seed in (0, 1))
    outcomes: list[dict[str, Any]] = [{"score": 1.0}, {"score": 2.0}]
    runs.add(file, first, outcomes[1], {"workers": 4})
    runs.add(file, second, outcomes[0], {"workers": 5})
    runs.add(file, first, outcomes[0], {})
    assert runs.read(file, tmp_path / "none.json", None) == {first: outcomes[0], second: outcomes[0]}
    assert json.loads(file.read_text())["workers"] == 4
    assert json.loads(file.read_text())["rows"][0] == asdict(first) | outcomes[0]


def test_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a tenth of the steps, the rate falls by half a cosine, or stays. Every worker trains with it."""
    falling, constant = (Run("gpt", 20, "sgd", 0.01, "dense", schedule=schedule) for schedule in ("cosine", "constant"))
    for run, shares in ((falling, [1.0, 0.5, 0.0]), (constant, [1.0, 1.0, 1.0])):
        rates = [train.share_of_rate(run, step) for step in range(20)]
        assert rates[0] == pytest.approx(0.5, abs=0.01)
        assert [rates[1], rates[10], rates[19]] == pytest.approx(shares, abs=0.01)
    found: list[float] = []
    monkeypatch.setattr(train.Worker, "set_rate", lambda _, share: found.append(share))
    short = replace(falling, steps=2)
    train.train(short, 1)
    assert found == [train.share_of_rate(short, step) for step in (0, 1) for _ in range(train.WORKERS)]


def test_best_are_trained_again(tmp_path: Path) -> None:
    """With ``--best``, the other seeds are those of the best rate and outer step of each kind of this task."""
    file = tmp_path / "runs.json"
    dense = Run("gpt", 1600, "adamw", 0.0, "dense", seed=10)
    local = Run("gpt", 1600, "adamw", 0.0, "updates", local_steps=30, outer_lr=0.7, outer_momentum=0.9, seed=10)
    for kind in (dense, local, replace(local, outer_lr=1.0), replace(dense, task="demo", steps=300)):
        for lr in (0.1, 0.2, 0.3):
            score = abs(lr - 0.2) + kind.outer_lr
            runs.add(file, replace(kind, lr=lr), {"score": score}, {})
    options = train.arguments().parse_args(["--best", "--json", str(file), "--seeds", "0", "1"])
    assert list(train.runs(options)) == [replace(kind, lr=0.2, seed=seed) for kind in (local, dense) for seed in (0, 1)]
