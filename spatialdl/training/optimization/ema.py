"""An exponential moving average of the weights, which often validates better than the last ones.

Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992. It is worked
out element by element, so each rank averages what it holds, whole parameters or shards of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from spatialdl.comm.gradients import shard_of


class WeightAverage:
    """The average of parameters over the steps so far; it begins with what they are now.

    Buffers, such as BatchNorm's statistics, are averages already: those of the network are used.

    Args:
        parameters: by name.
        decay: what the average keeps of itself in a step, in [0, 1).

    Raises:
        ValueError: if `decay` is not in that range.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        if not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise ValueError(f"trainer.ema={decay} must be at least 0 and below 1, or null")
        self._parameters, self._decay = dict(parameters), float(decay)
        self._averages = {
            name: parameter.detach().clone() for name, parameter in parameters.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """After a step of the optimizer."""
        for average, parameter in self._pairs():
            average.lerp_(parameter, 1 - self._decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The averages are in the network; afterwards its own weights are, bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, Tensor]:
        """The averages, by the names of the parameters, sharded as these are."""
        return dict(self._averages)

    @torch.no_grad()
    def _swap(self) -> None:
        for average, parameter in self._pairs():
            kept = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Averages and parameters, as far as this rank holds them."""
        for name, average in self._averages.items():
            yield shard_of(average), shard_of(self._parameters[name].detach())
