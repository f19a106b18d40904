"""Trainers whose optimizer exchanges updates, beside the same training by hand, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import tritoncomm
from models import same
from test_integrations import LR, MAX_NORM, Net, needs, rows, under_torchrun, weights
from torch import nn

from ranks import ranks

STEPS, SAVE_AT = 8, 4  # both are no multiple of the local steps
SETTINGS = {
    "local_steps": 3,
    "updates": tritoncomm.Updates(algo=tritoncomm.Quantized(values="2bit"), outer_momentum=0.5),
}


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that takes local steps."""
    return torch.optim.AdamW(net.parameters(), lr=LR)


def mixed(net: nn.Module) -> tritoncomm.OptimizerList:
    """Return one that exchanges updates, and one that exchanges gradients."""
    matrices, others = [p for p in net.parameters() if p.dim() > 1], [p for p in net.parameters() if p.dim() <= 1]
    return tritoncomm.OptimizerList([torch.optim.Muon(matrices, lr=LR), torch.optim.AdamW(others, lr=LR)])


OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], dict[str, Any]]] = {
    "local steps": (adamw, SETTINGS),
    "list": (mixed, {}),
}


def by_hand(kind: str, data: list[torch.Tensor], merged_after: Collection[int], limit: float | None) -> Net:
    """Train with ``tritoncomm.wrap``, and merge after these numbers of steps."""
    make, settings = OPTIMIZERS[kind]
    net = Net()
    optimizer = tritoncomm.wrap(make(net), model=net, max_grad_norm=limit, **settings)
    for number, x in enumerate(data, 1):
        optimizer.zero_grad()
        net(x)["loss"].backward()
        optimizer.step()
        if number in merged_after:
            optimizer.merge()
            assert same(weights(net).tolist())
    return net


def batches(rank: int, world_size: int) -> list[torch.Tensor]:
    """Return the batches of this rank."""
    return list(torch.stack(rows(world_size * 8 * STEPS)).unflatten(0, (STEPS, world_size, 8))[:, rank])


@needs("accelerate")
@ranks(2, limit=200.0)
def test_accelerate(rank, world_size, tmp_path):
    """Accelerate saves between two exchanges, which merges, and resumes to the bit. Clipping is of local gradients."""
    folder = str(tmp_path / "checkpoints")
    from accelerate import Accelerator  # noqa: PLC0415 - optional
    from tritoncomm.integrations.accelerate import wrap  # noqa: PLC0415 - optional

    under_torchrun(rank, world_size)
    data = batches(rank, world_size)

    def train(kind: str, first: int) -> Net:
        make, settings = OPTIMIZERS[kind]
        accelerator, net = Accelerator(cpu=True), Net()
        model, optimizer = accelerator.prepare(net, make(net))
        sparse = wrap(accelerator, model, optimizer, **settings)
        path = f"{folder}/{kind}"
        if first:
            accelerator.load_state(path)
        for number, x in enumerate(data[first:], first + 1):
            optimizer.zero_grad()
            accelerator.backward(model(x)["loss"])
            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            if not first and number == SAVE_AT:
                accelerator.save_state(path)
        sparse.merge()
        return net

    for kind in OPTIMIZERS:
        whole = weights(train(kind, 0))
        expected, unclipped = (weights(by_hand(kind, data, [SAVE_AT, STEPS], limit)) for limit in (MAX_NORM, None))
        torch.testing.assert_close(whole, expected)
        assert not torch.allclose(expected, unclipped)
        assert torch.equal(whole, weights(train(kind, SAVE_AT)))


@needs("transformers")
@ranks(2, limit=200.0)
def test_transformers(rank, world_size, tmp_path):
    """The Trainer evaluates and saves common parameters, and ends with them."""
    folder = str(tmp_path / "checkpoints")
    import transformers as library  # noqa: PLC0415 - optional
    from tritoncomm.integrations.transformers import SparseGradients  # noqa: PLC0415 - optional

    under_torchrun(rank, world_size)
    data = [{"x": x, "labels": 0.0} for x in rows(2 * 8 * STEPS)]

    class Recording(Net):
        def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
            if not self.training:
                assert same(weights(self).tolist())
                return {"loss": self.layers(x).square().mean(), "logits": x}
            return super().forward(x)

    def train(kind: str, path: str | None) -> Net:
        make, settings = OPTIMIZERS[kind]
        arguments = library.TrainingArguments(
            output_dir=f"{folder}/{kind}", max_steps=STEPS, per_device_train_batch_size=8, max_grad_norm=MAX_NORM,
            lr_scheduler_type="constant", use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True,
            save_strategy="steps", save_steps=SAVE_AT, eval_strategy="steps", eval_steps=SAVE_AT,
        )  # fmt: skip
        net, callback = Recording(), SparseGradients(**settings)
        own = (make(net), None)
        trainer = library.Trainer(
            net, arguments, train_dataset=data, eval_dataset=data[:32], callbacks=[callback], optimizers=own
        )
        trainer.train(resume_from_checkpoint=path)
        return net

    for kind in OPTIMIZERS:
        net = train(kind, None)
        assert torch.equal(weights(net), weights(by_hand(kind, net.batches, [SAVE_AT, STEPS], MAX_NORM)))
        assert torch.equal(weights(net), weights(train(kind, f"{folder}/{kind}/checkpoint-{SAVE_AT}")))


@needs("lightning")
@ranks(2, limit=200.0)
def test_lightning(rank, world_size, tmp_path):
    """Lightning validates and saves common parameters, and ends with them. Lightning clips this worker's gradients."""
    folder = str(tmp_path / "checkpoints")
    import lightning as library  # noqa: PLC0415 - optional
    from tritoncomm.integrations.lightning import SparseDDPStrategy  # noqa: PLC0415 - optional

    under_torchrun(rank, world_size)
    half = 2 * 8 * SAVE_AT

    class Module(library.LightningModule):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind, self.net = kind, Net()

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.net(batch)["loss"]

        def validation_step(self, batch: torch.Tensor, _: int) -> None:
            assert same(weights(self.net).tolist())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return OPTIMIZERS[self.kind][0](self.net)

        def train_dataloader(self) -> torch.utils.data.DataLoader:
            first = half * self.trainer.current_epoch
            return torch.utils.data.DataLoader(rows(2 * half)[first : first + half], batch_size=8)

        def val_dataloader(self) -> torch.utils.data.DataLoader:
            return torch.utils.data.DataLoader(rows(32), batch_size=8)

    def train(kind: str, path: str | None) -> Net:
        strategy = SparseDDPStrategy(process_group_backend="gloo", **OPTIMIZERS[kind][1])
        saving = library.pytorch.callbacks.ModelCheckpoint(
            f"{folder}/{kind}", "{step}", every_n_train_steps=SAVE_AT, save_top_k=-1
        )
        trainer = library.Trainer(
            accelerator="cpu", devices=world_size, strategy=strategy, max_epochs=2, logger=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[saving], gradient_clip_val=1e9,
            reload_dataloaders_every_n_epochs=1,
        )  # fmt: skip
        module = Module(kind)
        trainer.fit(module, ckpt_path=path)
        return module.net

    for kind in OPTIMIZERS:
        net = train(kind, None)
        assert torch.equal(weights(net), weights(by_hand(kind, net.batches, [SAVE_AT, STEPS], None)))
        saved = Path(f"{folder}/{kind}/step={SAVE_AT}.ckpt")
        assert torch.equal(weights(net), weights(train(kind, str(saved))))
