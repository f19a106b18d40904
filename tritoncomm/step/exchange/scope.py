"""What is exchanged, and with whom; and what ranks compare of a step.

In its one confirmation, they tell each other what must be equal on all when they have the mean. Sometimes they compare
gradients before, to notice that somebody else averages them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from tritoncomm.algorithms import Recipe
from tritoncomm.scheduler.process_group import ProcessGroupScheduler, take_suspects
from tritoncomm.scheduler.ranks import global_ranks, speaks
from tritoncomm.scheduler.rounds import AllGather, AllReduce, Pattern
from tritoncomm.step.agree import LOADED, compare, telling
from tritoncomm.step.agree.number import number_of
from tritoncomm.step.agree.replica import Replica
from tritoncomm.step.exchange.feedback import ErrorFeedback
from tritoncomm.step.exchange.presence import frozen
from tritoncomm.step.exchange.vector import ExchangeOptions, VectorExchange
from tritoncomm.step.tensors.shards import local, stored
from tritoncomm_kernels.devices import is_asynchronous

logger = logging.getLogger("tritoncomm")

# What to do if a field differs whose name begins with this. For others: _SAME_OPTIONS.
_ADVICE = {
    f"{LOADED} of": (
        "Since the last exchange, weights were loaded that differ between ranks (a number stands for their bits, 0 for "
        "none), or changed outside of step(), as by Embedding(max_norm=...) or by another optimizer with the same "
        "parameters: load the same checkpoint of the model and the optimizer on all, and let step() alone change it"
    ),
    "local_steps of": (
        "All ranks call step() equally often before they exchange, a rank without a batch without gradients: let the "
        "others catch up, then repeat the exchange"
    ),
}
_SAME_OPTIONS = (
    "Use the same options and freeze the same parameters on all ranks; a schedule that follows a loss needs its mean "
    "over ranks. Then repeat the step"
)

_HALF = 32  # bits
_LARGE = 1024  # elements


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Scope:
    """What is exchanged, and with whom. With other parameters, or in another group, there is a new one.

    Attributes:
        optimizer: The optimizer that is wrapped.
        exchanged: The optimizer whose gradients are exchanged: that of the anchors if updates are, else the same.
        vectors: The flat vectors, in the order in which they are exchanged.
        parameters: Their parameters in the order of the optimizer.
        names: Their names. That of a parameter without one is empty.
        owners: The owner of each of them: the parameter of an anchor if updates are exchanged, else the same.
        all_shards: Scheduler of a group that is larger than the group of the exchange, for models that are sharded. A
            step is confirmed only if no rank of this larger group has rejected it. None for others.
        replica: What must be equal on all ranks with the same shard, and is compared every 100 updates, and early.
    """

    optimizer: torch.optim.Optimizer
    exchanged: torch.optim.Optimizer
    vectors: Sequence[VectorExchange]
    parameters: Sequence[torch.Tensor]
    names: Sequence[str]
    owners: Mapping[torch.Tensor, torch.Tensor]
    all_shards: ProcessGroupScheduler | None
    replica: Replica

    @property
    def options(self) -> ExchangeOptions:
        """The settings that all vectors have in common."""
        return self.vectors[-1].options

    @property
    def everybody(self) -> dist.ProcessGroup | None:
        """The ranks that must change alike: those of the exchange, or those of all shards."""
        return self.options.group if self.all_shards is None else self.all_shards.group

    @property
    def shard(self) -> int:
        """A number of this rank's shard of the model, equal on the ranks that hold the same shard."""
        return 0 if self.all_shards is None else global_ranks(self.options.group)[0]

    @property
    def schedulers(self) -> list[ProcessGroupScheduler]:
        """The schedulers of the vectors. There are none without a process group."""
        return [vector.scheduler for vector in self.vectors if vector.scheduler is not None]

    @property
    def scheduler(self) -> ProcessGroupScheduler | None:
        """The scheduler of all ranks that confirm a step."""
        return self.all_shards or self.vectors[-1].scheduler

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        """Every ``.grad``, in the order of :attr:`parameters`."""
        return [parameter.grad for parameter in self.parameters]

    def frozen_ids(self) -> frozenset[int]:
        """Return the ids of the parameters that cannot change, or whose owners cannot."""
        return frozen(self.optimizer, self.owners.items())

    def agree_on_exchange_id(self, everybody: dist.ProcessGroup | None) -> None:
        """Agree on an identifier of each vector within its group. All of ``everybody`` compare something next."""
        with telling(everybody, self.options.group, self.vectors[0].device):
            for scheduler in self.schedulers:
                scheduler.agree_on_exchange_id()

    def moved(self, recipe: Recipe, group: dist.ProcessGroup | None) -> Scope:
        """Return what is exchanged by ``recipe`` in ``group``, whose ranks all call this. It has no residual yet."""
        vectors = [
            VectorExchange(old.layout.named, replace(old.options, recipe=recipe, group=group)) for old in self.vectors
        ]
        connect(vectors, group)
        found = replace(self, vectors=vectors)
        found.agree_on_exchange_id(group)
        return found

    def restore(self, feedbacks: Sequence[ErrorFeedback]) -> None:
        """Let each vector continue with the residual and method state in ``feedbacks``."""
        for vector, feedback in zip(self.vectors, feedbacks, strict=True):
            vector.feedback = feedback


def connect(vectors: Sequence[VectorExchange], everybody: dist.ProcessGroup | None) -> None:
    """Make the schedulers of ``vectors``. All ranks of ``everybody`` call this together.

    They tell each other first that none lacks memory: the others would wait for it in a new process group.
    """
    first = vectors[0]
    if first.options.recipe.subgroups(first.world_size):
        compare({"memory": "is enough"}, everybody, first.device)
    for vector in vectors:
        vector.connect()


def advice(found: Collection[str]) -> str:
    """Return what to do if fields with the names ``found`` differ between ranks."""
    return next(
        (text for begin, text in _ADVICE.items() if any(name.startswith(begin) for name in found)), _SAME_OPTIONS
    )


class Vote(NamedTuple):
    """What a rank says of a step in numbers, or the sum over all ranks.

    Attributes:
        rejects: 1 if it has rejected the step.
        raises: 1 if it raises a flag.
        claim: The sum of numbers of what it has in common with others, each times :func:`lead` among these.
    """

    rejects: int = 0
    raises: int = 0
    claim: int = 0


def lead(rank: int, world_size: int) -> int:
    """Return a factor of numbers. Their sum over ranks is zero if they are equal, and otherwise by chance alone."""
    return 1 if rank else 1 - world_size


def vote(own: Vote, device: torch.device, schedulers: Sequence[ProcessGroupScheduler] = ()) -> Pattern[Vote]:
    """Return the sum of the votes of all ranks. ``schedulers`` are those of the vote and of the vectors of the step.

    Raises:
        ProtocolMismatchError: A GPU has received a wrong header. All ranks raise it.
    """
    # Each word is filled by a kernel, because the host would wait for a GPU to copy them.
    told = ((own.rejects << _HALF) + own.raises, own.claim)
    words = [torch.full((1,), each, dtype=torch.int64, device=device) for each in told]
    if is_asynchronous(device):  # headers are counted on GPUs only, and all ranks have the same kind of device
        words += take_suspects(schedulers) or [torch.zeros_like(words[0])]
    flags, claim, *suspects = (yield AllReduce("confirm", torch.cat(words))).tolist()
    if any(suspects):
        raise schedulers[0].suspicion()
    return Vote(flags >> _HALF, flags % (1 << _HALF), claim)


class Inspection:
    """Compares the gradients of all ranks before they are exchanged. Averaged ones are equal.

    Somebody else then averages them beside the exchange, such as a DDP module that it was not told of. This is due in
    the first step, and when parameters are compared: after 1, 10 and every 100 updates.
    """

    def __init__(self) -> None:
        self._has_warned = False

    def run(self, scope: Scope, step: int) -> None:
        """Log once which gradients are equal on all ranks, which all call this together in the ``step``.

        Every ``.grad`` must still be this rank's own. Zeros say nothing, and neither does a bias, unless all gradients
        are equal. It is a check of the configuration: like the others, its messages do not count as traffic. The host
        waits for a GPU once.
        """
        first = scope.vectors[0]
        named = [(scope.owners[each], name) for vector in scope.vectors for each, name in vector.layout.named]
        figures = torch.stack([_number_of(owner.grad, first.device) for owner, _ in named])

        def gathering() -> Pattern[tuple[list[bool], list[bool]]]:
            everybody = yield AllGather("compare", figures)
            same = (everybody.view(-1, len(figures)) == figures).all(0)
            there, equal = torch.stack([figures != 0, same]).tolist()
            return there, equal

        assert first.scheduler is not None  # there are several ranks
        there, equal = first.scheduler.run(gathering(), new_step=False)
        found = [each for each, is_there, same in zip(named, there, equal, strict=True) if is_there and same]
        averaged = found if len(found) == sum(there) else [each for each in found if _tells(each[0])]
        if averaged and not self._has_warned and speaks(scope.options.group):
            logger.warning(
                "in step %d, the gradients of %d parameters are equal on all ranks before the exchange, the first is "
                "that of %s. Somebody has averaged them densely, or all ranks have the same data. For a model in "
                "DistributedDataParallel, pass model=ddp_model to tritoncomm.wrap(), and for a module that was built "
                "later call optimizer.reset_process_group(model=ddp_model), which keeps residuals. Of two "
                "wrapped optimizers with the same parameters, each needs a backward pass of its own after zero_grad(). "
                "Otherwise do not average gradients before step(), and give each rank other data",
                step,
                len(averaged),
                averaged[0][1],
            )
        self._has_warned |= bool(averaged)


def _tells(parameter: torch.Tensor) -> bool:
    """Return False for a tensor whose gradients may be equal by nature, such as a last bias."""
    return parameter.dim() > 1 or parameter.numel() >= _LARGE


def _number_of(gradient: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Return a number that equal gradients have in common, int64 ``[]``.

    It is zero for none, for one of zeros, and for one with NaN or Inf, which may be equal because the loss is.
    """
    if gradient is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    own = stored(local(gradient).detach())
    return torch.where(torch.isfinite(own).all(), number_of(own), 0).to(device)
