"""The situations of ``torture.py``: a function that each rank runs, and the report that counts as good."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tritoncomm
import tritoncomm.checkpoint
import tritoncomm.step.agree
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from tritoncomm.amp import GradScaler
from tritoncomm.checkpoint import ResidualState
from tritoncomm.step.shards import local

from torture_trainer import OURS, TIMEOUT, VICTIM, WORKERS, WRAP_DDP, WRAP_FSDP, Net, Trainer, opened

# DDP compares its buckets between the ranks in its second pass. A failure in a later pass meets the exchange itself.
FIRST_STEPS = 3
BAD_STEP = 4


def killed(trainer: Trainer, send: Callable[[str], None]) -> None:
    """A rank is killed. The others may continue in a new process group."""
    for step in range(FIRST_STEPS):
        trainer.step(step)
    if trainer.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    before = [p.clone() for p in trainer.parameters()]
    try:
        trainer.step(FIRST_STEPS)
    except RuntimeError as error:
        named = f"rank {VICTIM}" in str(error)
        kept = all(map(torch.equal, before, trainer.parameters()))
        then = ""
        if trainer.library == WRAP_FSDP:
            try:
                trainer.optimizer.reset_process_group()
            except tritoncomm.ConfigurationError as refused:
                then = f", {str(refused).rpartition(': ')[2]}"
        elif isinstance(trainer.optimizer, tritoncomm.SparseOptimizer):
            left = [r for r in range(WORKERS) if r != VICTIM]
            group = dist.new_group(left, timeout=timedelta(seconds=TIMEOUT), use_local_synchronization=True)
            if trainer.library == WRAP_DDP:
                trainer.net = DistributedDataParallel(trainer.model, process_group=group, init_sync=False)
                trainer.optimizer.reset_process_group(model=trainer.net)
            else:
                trainer.optimizer.reset_process_group(group)
            trainer.step(FIRST_STEPS + 1)
            then = ", the others continue in a new group"
        send(f"error, {'names' if named else 'does not name'} the rank, parameters {'kept' if kept else 'changed'}"
             + then)  # fmt: skip


def slow(trainer: Trainer, send: Callable[[str], None]) -> None:
    """A rank is slower than the time-out."""
    for step in range(FIRST_STEPS):
        trainer.step(step)
    if trainer.rank == VICTIM:
        time.sleep(3 * TIMEOUT)
    try:
        trainer.step(FIRST_STEPS)
    except RuntimeError as error:
        text = str(error)
        named = f"rank {VICTIM}" in text or (trainer.rank == VICTIM and "stopped waiting for this rank" in text)
        send(f"error, {'names' if named else 'does not name'} the rank")


def nan_on_one_rank(trainer: Trainer, send: Callable[[str], None]) -> None:
    """One rank's loss is NaN in one step."""
    for step in range(4):
        trainer.step(step)
    trainer.step(BAD_STEP, float("nan") if trainer.rank == VICTIM else 1.0)
    for step in range(5, 8):
        trainer.step(step)
    send(
        "skipped by all, training continues"
        if trainer.finite() and trainer.ranks_agree()
        else "parameters or residual stay NaN"
    )


def overflow_under_scaler(trainer: Trainer, send: Callable[[str], None]) -> None:
    """Training uses a GradScaler, and one rank's gradients overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    if trainer.library in OURS:
        scaler = GradScaler("cpu", init_scale=2.0**8)
    for step in range(6):
        trainer.optimizer.zero_grad()
        factor = float("inf") if step == BAD_STEP and trainer.rank == VICTIM else 1.0
        scaler.scale(trainer.loss(step) * factor).backward()
        scaler.step(trainer.optimizer)
        scaler.update()
    scales: list[Any] = [None] * WORKERS
    dist.all_gather_object(scales, scaler.get_scale())
    fine = trainer.finite() and trainer.ranks_agree() and len(set(scales)) == 1
    send("all skip, scales equal" if fine else "parameters or residual not finite, or ranks differ")


def scale_halves(trainer: Trainer, send: Callable[[str], None]) -> None:
    """The loss scale halves during a run. Check that the residual keeps its value in gradient units."""
    scaler = GradScaler("cpu", init_scale=1024.0)
    for step in range(5):
        scale = 1024.0 if step < BAD_STEP else 512.0
        trainer.optimizer.zero_grad()
        if trainer.library in OURS:
            scaler.scale(trainer.loss(step)).backward()
            scaler.step(trainer.optimizer)
            scaler.update(1024.0 if step + 1 < BAD_STEP else 512.0)
        else:
            (trainer.loss(step) * scale).backward()
            for parameter in trainer.model.parameters():
                parameter.grad /= scale
            trainer.optimizer.step()
    residual = trainer.residual()
    if residual is None:
        send("no residual")
    else:
        gradient = torch.cat([local(p.grad).reshape(-1) for p in trainer.model.parameters()])
        send("residual in units of the gradient" if float(residual.norm()) < 100 * float(gradient.norm()) + 1 else
             "residual in units of the old loss scale, which doubles its value")  # fmt: skip


def other_settings(trainer: Trainer, send: Callable[[str], None], library: str) -> None:
    """One rank has another PowerSGD rank, density or layer width than the others."""
    try:
        if library == "PowerSGD":
            trainer.state.matrix_approximation_rank = 2 if trainer.rank == VICTIM else 1
            for step in range(4):
                trainer.step(step)
        elif library in OURS:
            Trainer(library, trainer.rank, density=0.2 if trainer.rank == VICTIM else 0.1)
        else:
            Trainer(library, trainer.rank, numel=65 if trainer.rank == VICTIM else 64).step(0)
    except RuntimeError as error:
        text = str(error)
        named = "density" in text if library in OURS else "rank" in text.lower() or "params" in text
        send(f"error at start, {'says' if named else 'does not say'} what differs")
    else:
        send("not noticed" if trainer.ranks_agree() else "not noticed, ranks differ")


def wrong_length(trainer: Trainer, send: Callable[[str], None], library: str) -> None:
    """A message is longer than the receiver expects."""
    long, short = torch.ones(100), torch.zeros(10)
    try:
        if library in OURS:
            _send_words(trainer.rank, sent=100, expected=10)
        elif trainer.rank == 0:  # as in a custom communication hook
            dist.isend(long, VICTIM).wait(timedelta(seconds=TIMEOUT))
        elif trainer.rank == VICTIM:
            dist.irecv(short, 0).wait(timedelta(seconds=TIMEOUT))
        dist.barrier()
    except RuntimeError as error:
        send(f"error, {'says' if '100' in str(error) else 'does not say'} which length is wrong")


def _send_words(rank: int, sent: int, expected: int) -> None:
    """Run a round in which one rank sends ``sent`` words and its peer expects ``expected``."""
    from tritoncomm.scheduler.process_group import ProcessGroupScheduler
    from tritoncomm.scheduler.rounds import AllReduce, Round

    def talk() -> Any:
        sends = {VICTIM: torch.arange(sent, dtype=torch.int32)} if rank == 0 else {}
        yield Round("lists", sends, {0: expected} if rank == VICTIM else {})
        yield AllReduce("after", torch.ones(1))

    ProcessGroupScheduler(timeout=timedelta(seconds=TIMEOUT)).run(talk())


def too_short(trainer: Trainer, send: Callable[[str], None], library: str) -> None:
    """A message is shorter than the receiver expects."""
    try:
        if library in OURS:
            _send_words(trainer.rank, sent=10, expected=100)
        elif trainer.rank == 0:
            dist.isend(torch.ones(10), VICTIM).wait(timedelta(seconds=TIMEOUT))
        elif trainer.rank == VICTIM:
            buffer = torch.full((100,), -1.0)
            dist.irecv(buffer, 0).wait(timedelta(seconds=TIMEOUT))
            send("treats old memory contents as the missing part" if (buffer == -1).any() else "whole")
            return
        dist.barrier()
    except RuntimeError as error:
        send(
            f"error, {'says' if '10 words' in str(error) or ' 10,' in str(error) else 'does not say'} "
            "which length is wrong"
        )
    else:
        send("not noticed")


def skipped(trainer: Trainer, send: Callable[[str], None]) -> None:
    """One rank skips a step and does not return."""
    for step in range(FIRST_STEPS):
        trainer.step(step)
    if trainer.rank == VICTIM:
        time.sleep(3 * TIMEOUT)
        return
    try:
        trainer.step(FIRST_STEPS)
    except RuntimeError as error:
        send(f"error, {'names' if f'rank {VICTIM}' in str(error) else 'does not name'} the rank")


def other_order(trainer: Trainer, send: Callable[[str], None], library: str) -> None:
    """One rank has two layers of equal shape in another order, in its model and optimizer."""
    torch.manual_seed(trainer.rank)  # DDP broadcasts the parameters in the order of the model
    layers = {"first": nn.Linear(8, 8), "second": nn.Linear(8, 8)}
    order = list(layers) if trainer.rank != VICTIM else list(reversed(layers))
    model = nn.ModuleDict({name: layers[name] for name in order})

    def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            net(x).square().mean().backward()
            optimizer.step()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers["second"](torch.relu(self.layers["first"](x)))

    net: nn.Module = Net()
    try:
        if library in OURS:
            torch.manual_seed(5)
            for parameter in net.parameters():
                nn.init.normal_(parameter)
            outer, arguments = opened(net, library)
            optimizer: Any = torch.optim.SGD(net.named_parameters(), lr=0.1)
            train(outer, tritoncomm.wrap(optimizer, timeout=timedelta(seconds=TIMEOUT), **arguments))
        else:
            inner, net = net, DistributedDataParallel(net)
            if library == "PowerSGD":
                net.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=1), powerSGD_hook)
            train(net, torch.optim.SGD(inner.parameters(), lr=0.1))
    except RuntimeError as error:
        send(f"error at start, {'says' if 'order' in str(error) else 'does not say'} what differs")
        return
    everybody: list[Any] = [None] * WORKERS
    dist.all_gather_object(everybody, layers["first"].weight.tolist())
    send("not noticed" + ("" if all(w == everybody[0] for w in everybody) else ": ranks train different models"))


def other_dtype(trainer: Trainer, send: Callable[[str], None], library: str) -> None:
    """One rank's model is in double precision."""
    model: nn.Module = Net(64).double() if trainer.rank == VICTIM else Net(64)
    try:
        if library in OURS:
            model, arguments = opened(model, library)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            tritoncomm.wrap(optimizer, timeout=timedelta(seconds=TIMEOUT), **arguments)
        else:
            net = DistributedDataParallel(model)
            if library == "PowerSGD":
                net.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=1), powerSGD_hook)
            dtype = next(model.parameters()).dtype
            for _ in range(3):
                net(torch.ones(4, 16, dtype=dtype)).sum().backward()
    except RuntimeError as error:
        said = "dtype" in str(error) or "float64" in str(error)
        send(f"error at start, {'says' if said else 'does not say'} what differs")
    else:
        send("not noticed")


def other_method(trainer: Trainer, send: Callable[[str], None], library: str) -> None:
    """One rank uses another method. With DDP or PowerSGD, it is the only one with or without the hook."""
    victim = trainer.rank == VICTIM
    try:
        if library in OURS:
            Trainer(library, trainer.rank, algo="spardl" if victim else "oktopk")
        else:
            with_hook = victim == (library == "DDP")
            mixed = Trainer("PowerSGD" if with_hook else "DDP", trainer.rank)
            for step in range(4):
                mixed.step(step)
    except RuntimeError as error:
        named = any(field in str(error) for field in ("algorithm", "recipe"))
        send(f"error at start, {'says' if named else 'does not say'} what differs")
    else:
        send("not noticed" if mixed.ranks_agree() else "not noticed, ranks differ")


def other_version(trainer: Trainer, send: Callable[[str], None], library: str) -> None:
    """One rank runs another version of the library that exchanges gradients."""
    try:
        if library in OURS:
            if trainer.rank == VICTIM:
                tritoncomm.step.agree.__version__ = "0.0.1"
            Trainer(library, trainer.rank)
        else:
            if trainer.rank == VICTIM:
                torch.__version__ = "2.6.0"
            Trainer(library, trainer.rank).step(0)
    except RuntimeError as error:
        send(f"error at start, {'says' if 'version' in str(error) else 'does not say'} what differs")
    else:
        send("not checked")


def damaged(trainer: Trainer, send: Callable[[str], None], folder: str) -> None:
    """One bit of one rank's checkpoint flips on disk."""
    trainer.optimizer.param_groups[0]["momentum"] = 0.9
    for step in range(3):
        trainer.step(step)
    path, ours = Path(folder) / "checkpoint", isinstance(trainer.optimizer, tritoncomm.SparseOptimizer)
    if ours:
        tritoncomm.checkpoint.save(trainer.optimizer, path)
        file = path / f"rank-{VICTIM}-of-{WORKERS}.pt"
    else:
        file = Path(folder) / f"{trainer.rank}.pt"
        torch.save(trainer.optimizer.state_dict(), file)
    dist.barrier()
    if trainer.rank == VICTIM:
        content = bytearray(file.read_bytes())
        momentum = next(iter(trainer.optimizer.state.values()))["momentum_buffer"]
        at = content.find(local(momentum).numpy().tobytes())
        content[at + 3] ^= 0x40  # the exponent of a value
        file.write_bytes(content)
    dist.barrier()
    try:
        if ours:
            tritoncomm.checkpoint.load(trainer.optimizer, path)
        else:
            trainer.optimizer.load_state_dict(torch.load(file))
    except RuntimeError as error:
        send(f"error on all ranks, {'names' if file.name in str(error) else 'does not name'} the file")
    except tritoncomm.ConfigurationError as error:
        send(f"error on all ranks, {'names' if file.name in str(error) else 'does not name'} the file")
    else:
        trainer.step(4)
        send("not noticed" + ("" if trainer.ranks_agree() else ", ranks differ"))


def no_gradient(trainer: Trainer, send: Callable[[str], None], library: str) -> None:
    """A parameter gets no gradient on one rank."""
    if library in OURS:
        trainer = Trainer(library, trainer.rank, unused=True)
    try:
        for step in range(3):
            trainer.optimizer.zero_grad()
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + trainer.rank))
            whole = trainer.rank != VICTIM  # this rank's loss does not use the last layer
            trainer.net(x, whole=whole).square().mean().backward()
            trainer.optimizer.step()
    except RuntimeError as error:
        send(f"error: {str(error).splitlines()[0][:60]}")
    else:
        send("counts as zero, ranks agree" if trainer.ranks_agree() else "ranks differ")


def drifted(trainer: Trainer, send: Callable[[str], None]) -> None:
    """A bit of a parameter flips on one rank."""
    for step in range(FIRST_STEPS):
        trainer.step(step)
    if trainer.rank == VICTIM:
        trainer.parameters()[0].view(-1).view(torch.int32)[0] ^= 1 << 20
    try:
        for step in range(FIRST_STEPS, 102):
            trainer.step(step)
    except RuntimeError as error:
        named = "first.weight" in str(error)
        send(f"error on all ranks within 100 steps, {'names' if named else 'does not name'} the parameter")
    else:
        send("not noticed" + ("" if trainer.ranks_agree() else ", ranks differ"))


def resumed(trainer: Trainer, send: Callable[[str], None], folder: str) -> None:
    """A checkpoint is saved during a run and loaded into new objects. Check that the residual is restored."""
    for step in range(4):
        trainer.step(step)
    before = trainer.residual()
    path = Path(folder) / "checkpoint"
    if trainer.library == WRAP_FSDP:
        dcp.save({"residuals": ResidualState(trainer.optimizer)}, checkpoint_id=path)
        fresh = Trainer(trainer.library, trainer.rank)
        dcp.load({"residuals": ResidualState(fresh.optimizer)}, checkpoint_id=path)
    elif isinstance(trainer.optimizer, tritoncomm.SparseOptimizer):
        tritoncomm.checkpoint.save(trainer.optimizer, path)
        fresh = Trainer(trainer.library, trainer.rank)
        tritoncomm.checkpoint.load(fresh.optimizer, path)
    else:
        fresh = Trainer("PowerSGD" if trainer.state is not None else "DDP", trainer.rank)
        fresh.optimizer.load_state_dict(trainer.optimizer.state_dict())
    after = fresh.residual()
    if before is None:
        send("no residual")
    else:
        kept = after is not None and torch.equal(before, after)
        send(
            "every rank gets its own residual back"
            if kept
            else "residual lost: no state dict of model or optimizer holds it"
        )


SITUATIONS: dict[str, tuple[Callable[..., None], str]] = {
    "a rank is killed": (killed, "names the rank, parameters kept, the others continue"),
    "a rank is slower than the time-out": (slow, "error, names"),
    "a rank skips a step": (skipped, "error, names the rank"),
    "NaN on one rank, no scaler": (nan_on_one_rank, "skipped by all"),
    "GradScaler, overflow on one rank": (overflow_under_scaler, "all skip, scales equal"),
    "the loss scale halves": (scale_halves, "units of the gradient"),
    "settings differ on one rank": (other_settings, "error at start, says"),
    "another method on one rank": (other_method, "error at start, says"),
    "another version on one rank": (other_version, "error at start, says"),
    "parameters in another order on one rank": (other_order, "error at start, says"),
    "another dtype on one rank": (other_dtype, "error at start, says"),
    "a message is too long": (wrong_length, "error, says"),
    "a message is too short": (too_short, "error, says"),
    "no gradient on one rank": (no_gradient, "counts as zero"),
    "a replica drifts": (drifted, "error on all ranks, names"),
    "save and load": (resumed, "its own residual back"),
    "a bit of a checkpoint flips": (damaged, "error on all ranks, names"),
}

# FSDP cannot change its process groups.
GOOD_WITH_FSDP = {"a rank is killed": "names the rank, parameters kept, load a checkpoint in new processes"}
# Situations that do not apply. The messages are the same for all kinds of modules. DDP rejects another dtype itself,
# before wrap(). torch.distributed.checkpoint, which saves shards, has no checksums.
NOT_APPLICABLE = {
    ("a message is too long", WRAP_DDP),
    ("a message is too long", WRAP_FSDP),
    ("a message is too short", WRAP_DDP),
    ("a message is too short", WRAP_FSDP),
    ("another dtype on one rank", WRAP_DDP),
    ("a bit of a checkpoint flips", WRAP_FSDP),
}
