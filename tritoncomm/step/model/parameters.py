"""The parameters that a wrapped optimizer exchanges by itself."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch

from tritoncomm.errors import ConfigurationError
from tritoncomm.step.tensors.names import label_of, named_parameters, parameter_ids


class KnownParameters:
    """The parameters that ``optimizer`` has at ``wrap``, or at the last :meth:`note`.

    Args:
        optimizer: The optimizer.
        names: Names of parameters by their ids, for those to which the optimizer gives none.
        ignored: Ids of the parameters that are this rank's own, see :mod:`tritoncomm.step.model.ignored`.

    Attributes:
        names: See above.
        ignored: See above.
        trained: The others that require gradients, or did at an earlier :meth:`note`, each with its name, in the order
            of the optimizer. Unnamed ones have the name ``""``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], ignored: Collection[int]) -> None:
        self._optimizer = optimizer
        self.names, self.ignored = names, ignored
        self.trained: list[tuple[torch.Tensor, str]] = []
        self.note()

    def note(self) -> None:
        """Take the present parameters of the optimizer for known. One that was trained before may be frozen now."""
        before = {id(parameter) for parameter, _ in self.trained}
        self._known = parameter_ids(self._optimizer)
        self.trained = [(each, name) for each, name in self.common if each.requires_grad or id(each) in before]
        trained = {id(parameter) for parameter, _ in self.trained}
        self._frozen = [parameter for parameter, _ in self.common if id(parameter) not in trained]

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Let what is known be what it was before if the body raises."""
        before = self._known, self.trained, self._frozen
        try:
            yield
        except BaseException:
            self._known, self.trained, self._frozen = before
            raise

    @property
    def common(self) -> list[tuple[torch.Tensor, str]]:
        """The parameters that all ranks have in common, each with its name."""
        named = named_parameters(self._optimizer)
        return [(each, name or self.names.get(id(each), "")) for each, name in named if id(each) not in self.ignored]

    @property
    def are_outdated(self) -> bool:
        """True if a parameter requires gradients now that did not, or was not there."""
        trained = {id(parameter) for parameter, _ in self.trained}
        return any(parameter.requires_grad and id(parameter) not in trained for parameter, _ in self.common)

    @property
    def new(self) -> list[torch.Tensor]:
        """Those that somebody has added to the optimizer since."""
        lists = [group["params"] for group in self._optimizer.param_groups]
        return [each for own in lists for each, key in zip(own, map(id, own), strict=True) if key not in self._known]

    def check(self) -> None:
        """Raise if the user has added, replaced or removed parameters, or one that was frozen has a gradient now.

        One that is frozen on all ranks may be removed.
        """
        held = [each for group in self._optimizer.param_groups for each in group["params"]]
        if {*map(id, held)} != self._known:
            new = self.new
            if new:
                raise ConfigurationError(
                    f"the optimizer has {len(new)} parameters that it did not have at wrap(), the first is "
                    f"{label_of(self._optimizer, new[0], self.names)}: call add_param_group() on all ranks instead of "
                    "changing param_groups; for a list, or if parameters were replaced, call flush() and release(), "
                    "and wrap again"
                )
            self.check_kept(if_trained=True)
        for parameter in self._frozen:
            if parameter.grad is not None:
                raise ConfigurationError(
                    f"{label_of(self._optimizer, parameter, self.names)} was frozen at wrap() and now has a gradient: "
                    "leave frozen parameters out of the optimizer, as by filter(lambda p: p.requires_grad, ...), and "
                    "add them later by add_param_group(), or set requires_grad=True before wrap() and freeze them "
                    "afterwards"
                )

    def check_kept(self, *, if_trained: bool = False) -> None:
        """Raise if the user has removed a parameter, or ``if_trained`` one that requires gradients."""
        held = parameter_ids(self._optimizer)
        gone = [(p, name) for p, name in self.trained if id(p) not in held and (p.requires_grad or not if_trained)]
        if gone:
            names = ", ".join(name or f"one of shape {tuple(parameter.shape)}" for parameter, name in gone)
            raise ConfigurationError(
                f"the optimizer has lost parameters that it had at wrap(): {names}. Put them back, and set "
                "requires_grad=False on all ranks instead. To take them out, call flush() and release() first, and "
                "wrap again"
            )

    def local_error(self) -> ConfigurationError | None:
        """Return why the gradients of this rank cannot be exchanged, if so."""
        try:
            self.check()
        except ConfigurationError as error:
            return error
        return None
