"""A model and its wrapped optimizer, saved together, and what a run that loads them must have again."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tritoncomm
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from tritoncomm.checkpoint import ResidualState

OF_ADAM = ("step", "exp_avg", "exp_avg_sq")


class SavedRun:
    """A module of any kind, its wrapped optimizer, and the group of its replicas. None is the default group."""

    model: nn.Module
    optimizer: tritoncomm.SparseOptimizer
    group: dist.ProcessGroup | None = None

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return dist.get_world_size(self.group)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters that are trained, by the name that every kind of module gives them."""
        found = {name.removeprefix("module."): p for name, p in self.model.named_parameters()}
        return {name: parameter for name, parameter in found.items() if parameter.requires_grad}

    def content(self, **fields) -> dict:
        """Return what is saved and loaded."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "residuals": ResidualState(self.optimizer, **fields)}

    def load(self, path: str, **fields) -> None:
        """Resume as docs/how-to/checkpoints.md shows."""
        content = self.content(**fields)
        dcp.load(content, checkpoint_id=path)
        parts = {"model_state_dict": content["model"], "optim_state_dict": content["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)

    def pending(self) -> dict[str, torch.Tensor]:
        """Return the pending update of each whole parameter: the mean of the residuals over the replicas."""
        residuals: dict[torch.Tensor, torch.Tensor] = {}
        for vector in self.optimizer._tritoncomm.setup.exchange.vectors:
            residuals |= vector.residuals_by_parameter()
        found = {}
        for name, parameter in self.parameters.items():
            update = residuals[parameter].clone()
            if isinstance(parameter, DTensor):
                like = {"shape": parameter.shape, "stride": parameter.stride()}
                update = update.view(parameter.to_local().shape)
                update = DTensor.from_local(update, parameter.device_mesh, parameter.placements, **like).full_tensor()
            dist.all_reduce(update, group=self.group)
            found[name] = update / self.replicas
        return found

    def state(self, entries: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Return those of the ``entries`` that the optimizer's state of each parameter has, whole."""
        return {
            f"{name} {entry}": whole(value)
            for name, parameter in self.parameters.items()
            for entry, value in self.optimizer.state[parameter].items()
            if entry in entries
        }


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return ``value``, gathered if it is a DTensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def lists(values: dict[str, torch.Tensor]) -> dict[str, list]:
    """Return ``values`` without tensors, to send them."""
    return {name: value.flatten().tolist() for name, value in sorted(values.items())}
