"""Objects are sent from the device of the parameters when ranks compare something, whatever device is current."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import tritoncomm
from torch import nn
from tritoncomm import ConfigMismatchError, ConfigurationError, NonFiniteError, SparseOptimizer, checkpoint

from emulated_cuda import doors, ranks
from emulated_cuda.device import to_gpu
from emulated_cuda.network import Network


def test_objects_are_sent_from_the_device_of_the_parameters(tmp_path: Path) -> None:
    """NCCL sends objects from the current device. Without set_device(), all ranks would send them from GPU 0."""

    def main(rank: int) -> None:
        with torch.cuda.device(rank):
            parameters, more = list(doors.model_on("cuda").parameters()), nn.Parameter(to_gpu(torch.ones(4)))
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, torch.nan)

        def wrapped(density: float = 0.1) -> SparseOptimizer:
            inner = torch.optim.SGD(parameters, lr=0.1)
            return tritoncomm.wrap(inner, density=density, warmup_steps=0, on_nonfinite="raise")

        with pytest.raises((ConfigurationError, ConfigMismatchError), match=r"density=2\.0"):
            wrapped(0.1 if rank == 0 else 2.0)
        optimizer = wrapped()
        with pytest.raises(NonFiniteError, match=r"rank 0: .*rank 1: "):
            optimizer.step()
        checkpoint.save(optimizer, tmp_path)
        checkpoint.load(optimizer, tmp_path)
        optimizer.add_param_group({"params": [more]})
        optimizer.reset_process_group()

    ranks.run(main, 2, network=Network(2, several_gpus=True))
