"""A network for each of several virtual ranks: weights are there once, buffers for each."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

_PLAIN = (bool, int, float, str, type(None))


class ModelCopies:
    """The network itself for the first virtual rank, and copies of it for the others.

    What they train are leaves of their own in the memory of the network's parameters: so gradients
    of all virtual ranks come together apart from whatever else these take part in.

    Args:
        model: without hooks that a copy should not have.
        count: of virtual ranks.

    Attributes:
        networks: one for each virtual rank.
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        self._model, self._count = model, count
        self._leaves = {
            parameter: nn.Parameter(parameter.detach(), parameter.requires_grad)
            for parameter in model.parameters()
        }
        self.networks = [model, *(self._copied() for _ in range(count - 1))]

    def _copied(self) -> nn.Module:
        memo: dict[int, Any] = {id(own): leaf for own, leaf in self._leaves.items()}
        return copy.deepcopy(self._model, memo)

    def follow(self) -> None:
        """Make the copies what the network is now: its weights, buffers, modes and settings."""
        for own, leaf in self._leaves.items():
            leaf.requires_grad_(own.requires_grad)
            leaf.data = own.data  # an average of the weights may have taken their place
        for other in self.networks[1:]:
            for module, copied in zip(self._model.modules(), other.modules(), strict=True):
                vars(copied).update(
                    (name, value) for name, value in vars(module).items() if type(value) in _PLAIN
                )
                for name, buffer in module._buffers.items():
                    copied._buffers[name] = None if buffer is None else buffer.detach().clone()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the network itself has the leaves, too; in backward for what runs again."""
        names: dict[str, Tensor] = {
            name: self._leaves[each] for name, each in self._model.named_parameters()
        }
        with _reparametrize_module(self._model, names, tie_weights=True):
            yield

    @property
    def trained(self) -> list[nn.Parameter]:
        """The network's parameters that want gradients."""
        return [parameter for parameter in self._leaves if parameter.requires_grad]

    def take_gradients(self, of: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """What backwards have added up for these parameters since it was asked last."""
        found = [self._leaves[parameter].grad for parameter in of]
        for leaf in self._leaves.values():
            leaf.grad = None
        return found
