"""Copies of a network for virtual ranks that share weights but not buffers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from spatialdl.torch_internals import reparametrize_module

_PLAIN = (bool, int, float, str, type(None))


class ModelCopies:
    """The network itself for the first virtual rank, and copies of it for the other ones.

    Their parameters are separate leaves in the memory of the network's parameters, so gradients of
    all virtual ranks accumulate apart from other uses of these parameters.

    Args:
        model: without hooks that a copy should not have.
        count: number of virtual ranks.

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
        """Update the copies to the network's current weights, buffers, modes and settings."""
        for own, leaf in self._leaves.items():
            leaf.requires_grad_(own.requires_grad)
            leaf.data = own.data  # averaged weights may have replaced them
        for network in self.networks[1:]:
            for module, copied in zip(self._model.modules(), network.modules(), strict=True):
                vars(copied).update(
                    (name, value) for name, value in vars(module).items() if type(value) in _PLAIN
                )
                for name, buffer in module._buffers.items():
                    copied._buffers[name] = None if buffer is None else buffer.detach().clone()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the network itself has the leaves; also for recomputation."""
        names: dict[str, Tensor] = {
            name: self._leaves[parameter] for name, parameter in self._model.named_parameters()
        }
        with reparametrize_module(self._model, names, tie_weights=True):
            yield

    @property
    def trained(self) -> list[nn.Parameter]:
        """Trainable parameters of the network."""
        return [parameter for parameter in self._leaves if parameter.requires_grad]

    def take_gradients(self, of: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """Return and reset the gradients that backwards have accumulated for parameters."""
        gradients = [self._leaves[parameter].grad for parameter in of]
        for leaf in self._leaves.values():
            leaf.grad = None
        return gradients
