"""Exponential moving average (EMA) of the weights.

Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992. The average is
elementwise, so each rank averages its parameters or shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from spatialdl.comm.gradients import shard_of


class WeightAverage:
    """Average of parameters over the steps, initialised with their current values.

    Buffers, such as BatchNorm statistics, are averages already and are not averaged again.

    Args:
        parameters: parameters by name.
        decay: weight of the old average in a step, in [0, 1).

    Raises:
        ValueError: if `decay` is out of range.
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
        """Update the average after an optimizer step."""
        for average, parameter in self._pairs():
            average.lerp_(parameter, 1 - self._decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Swap the averages into the network; restore its weights bit for bit afterwards."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, Tensor]:
        """Averages by parameter name, sharded like the parameters."""
        return dict(self._averages)

    @torch.no_grad()
    def _swap(self) -> None:
        for average, parameter in self._pairs():
            kept = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Local shards of averages and parameters."""
        for name, average in self._averages.items():
            yield shard_of(average), shard_of(self._parameters[name].detach())
