"""Accelerate, Transformers and Lightning as the tests of the integrations call them, and small models for them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import tritoncomm
from models import same
from torch import nn

FRAMEWORKS = sorted(file.stem for file in Path(tritoncomm.__file__).parent.glob("integrations/[a-z]*.py"))
SETTINGS = {"algo": "oktopk", "density": 0.05, "warmup_steps": 2, "dense_below": 0}
MAX_NORM, LR = 0.5, 3e-3


def needs(framework: str) -> Any:
    """Skip a test where ``framework`` is not installed."""
    is_missing = find_spec(framework) is None
    return pytest.mark.skipif(is_missing, reason=f"{framework} is not installed")


class Net(nn.Module):
    """A regression that records its batches and losses. In evaluation, all workers have the same parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.batches: list[torch.Tensor] = []
        self.losses: list[float] = []
        self.norms: list[float] = []  # that the trainer has seen before it clips

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        """Return the loss."""
        loss = (self.layers(x) - x.sum(1, keepdim=True)).square().mean()
        if not self.training:
            assert same(values(self))
            return {"loss": loss, "logits": x}
        self.batches.append(x)
        self.losses.append(loss.item())
        return {"loss": loss}


def linear() -> nn.Linear:
    """Return a layer."""
    torch.manual_seed(0)
    return nn.Linear(16, 16)


def values(net: nn.Module) -> list[float]:
    """Return all parameters."""
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()]).tolist()


def rows(n: int) -> list[torch.Tensor]:
    """Return ``n`` samples."""
    return list(torch.randn(n, 16, generator=torch.Generator().manual_seed(1)))


def batches(rank: int, world_size: int, count: int) -> list[torch.Tensor]:
    """Return the batches of this rank."""
    return list(torch.stack(rows(world_size * 8 * count)).unflatten(0, (count, world_size, 8))[:, rank])


def under_torchrun() -> None:
    """Set the variables of torchrun. The group exists already. Forget earlier runs."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "TORCHELASTIC_RUN_ID": "test",
        "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    states = sys.modules.get("accelerate.state")  # of a run before, in this process
    if states is not None:
        states.AcceleratorState._reset_state(reset_partial_state=True)
        states.GradientState._reset_state()


def accelerator(**fields: Any) -> Any:
    """Return an Accelerator."""
    under_torchrun()
    return import_module("accelerate").Accelerator(cpu=True, **fields)


def wrap_prepared(*arguments: Any, **settings: Any) -> tritoncomm.SparseOptimizer:
    """Wrap what an Accelerator has prepared."""
    return import_module("tritoncomm.integrations.accelerate").wrap(*arguments, **settings)


def sparse_gradients(**settings: Any) -> Any:
    """Return the callback of the Trainer of Transformers."""
    return import_module("tritoncomm.integrations.transformers").SparseGradients(**settings)


def hugging_face(folder: str, net: nn.Module, *callbacks: Any, samples: int = 128, **fields: Any) -> Any:
    """Return a Trainer of Transformers, which neither logs nor saves. ``fields`` are those of its arguments."""
    under_torchrun()
    transformers = import_module("transformers")
    data = [{"x": x, "labels": 0.0} for x in rows(samples)]
    own = {"optimizers": fields.pop("optimizers")} if "optimizers" in fields else {}
    arguments = transformers.TrainingArguments(
        output_dir=folder, use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True,
        **{"logging_strategy": "no", "save_strategy": "no"} | fields,
    )  # fmt: skip
    return transformers.Trainer(
        net, arguments, train_dataset=data, eval_dataset=data[:16], callbacks=[*callbacks], **own
    )


def lightning_module(net: nn.Module, optimizers: Callable[[Any], Any], **methods: Callable[..., Any]) -> Any:
    """Return a LightningModule of ``net``. ``optimizers`` gets it, and ``methods`` are more of its methods."""
    given = {
        "training_step": lambda self, batch, _: self.net(batch)["loss"],
        "validation_step": lambda self, batch, _: self.net(batch) and None,
        "configure_optimizers": lambda self: optimizers(self.net),
    }
    module = type("Module", (import_module("lightning").LightningModule,), given | methods)()
    module.net = net
    return module


def lightning(devices: int, settings: dict[str, Any] | None, folder: str | None = None, **fields: Any) -> Any:
    """Return a Trainer of Lightning with our strategy, or with its own for DDP if ``settings`` is None.

    It saves into ``folder`` after each epoch, or every few steps if a field says so.
    """
    under_torchrun()
    library, backend = import_module("lightning").pytorch, {"process_group_backend": "gloo"}
    if settings is None:
        strategy = library.strategies.DDPStrategy(**backend)
    else:
        strategy = import_module("tritoncomm.integrations.lightning").SparseDDPStrategy(**backend, **settings)
    every, callbacks = fields.pop("save_steps", None), [*fields.pop("callbacks", [])]
    if folder is not None:
        name = "{epoch}" if every is None else "{step}"
        callbacks.append(library.callbacks.ModelCheckpoint(folder, name, save_top_k=-1, every_n_train_steps=every))
    return library.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=folder is not None, callbacks=callbacks, **fields,
    )  # fmt: skip
