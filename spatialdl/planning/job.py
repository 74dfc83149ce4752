"""What is to be trained, as far as its costs depend on it, and its layers' costs, counted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import nn

from spatialdl.pipeline.balance import Costs, balance, estimated
from spatialdl.pipeline.partition import named_bounds
from spatialdl.pipeline.recording import meta_copy
from spatialdl.pipeline.stage import SAMPLES, pieces
from spatialdl.pipeline.steps import Recording
from spatialdl.planning.costs import NetworkCosts, between, count
from spatialdl.planning.layers import Layer, layers_of
from spatialdl.planning.ledger import Ledger, Work
from spatialdl.spatial.recompute import recompute, recompute_blocks
from spatialdl.training.optimization.optimizers import state_ratio, stepped

Recompute = Literal["none", "block", "stage"]

COUNTED = (2, 4)
"""Samples that are counted; costs of more of them are on the line through these."""


class _Again(nn.Module):
    """Loose layers of a chain that run again in backward together, as a `Stage` does it."""

    def __init__(self, piece: Sequence[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer for _, layer in piece])

    def forward(self, x: Any) -> Any:
        def run(x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

        return recompute(run, x, modules=list(self.layers))


@dataclass
class Job:
    """A network, its images and its optimizer.

    Attributes:
        model: on any device; it is not run.
        image: (channels, H, W).
        batch: images of a global batch.
        names: with which stages begin, see `pipeline.partition.cut`.
        optimizer: makes one for parameters.
        read_bytes: memory that reading takes for each pixel of an image.
    """

    model: nn.Module
    image: tuple[int, int, int]
    batch: int
    optimizer: Any
    segments: bool = False
    names: Sequence[str] | None = None
    read_bytes: float = 0.0
    on_cpu: bool = True
    _counted: dict[tuple[int, tuple[int, int], bool], NetworkCosts] = field(
        default_factory=dict, init=False
    )
    _bounds: dict[tuple[int, ...], list[int]] = field(default_factory=dict, init=False)

    @cached_property
    def layers(self) -> list[Layer]:
        """Of a chain; any other network counts as one layer, and is planned uncut."""
        return self._found[0]

    @property
    def _recording(self) -> Recording | None:
        return self._found[1]

    @cached_property
    def _found(self) -> tuple[list[Layer], Recording | None]:
        return layers_of(self.model, self.image)

    @cached_property
    def weights(self) -> int:
        return sum(p.nbytes for p in self.model.parameters())

    @cached_property
    def _layer_costs(self) -> Costs:
        if self._recording is None:
            return Costs([1.0], {})
        return estimated(self.model, self._recording, (SAMPLES, *self.image))

    @cached_property
    def has_blocks(self) -> bool:
        """Whether there is anything that `recompute=block` could run again."""
        return len(self.layers) > 1 or bool(recompute_blocks(meta_copy(self.model)))

    def bounds(self, widths: tuple[int, ...]) -> list[int]:
        """Where `pipeline.partition.cut` cuts the layers for stages of these widths."""
        if widths not in self._bounds:
            if self._recording is None or len(widths) == 1:
                self._bounds[widths] = [0, len(self.layers)]
            elif self.names:
                self._bounds[widths] = named_bounds(self._recording, self.names, len(widths))
            else:
                self._bounds[widths] = balance(self._layer_costs, self._recording, widths)
        return self._bounds[widths]

    def costs(self, samples: int, grid: tuple[int, int], again: bool) -> NetworkCosts:
        """Of all layers on one rank; with `again`, blocks run again in backward.

        There may be fewer parts than layers then: `owner` tells them apart.
        """
        key = (samples, grid, again)
        if key not in self._counted:
            low, high = COUNTED
            found = None
            if samples > high and not self.on_cpu:  # there sizes of memory matter, too
                share = (samples - low) / (high - low)
                found = between(self.costs(low, grid, again), self.costs(high, grid, again), share)
            self._counted[key] = found or self._count(samples, grid, again)
        return self._counted[key]

    def _count(self, samples: int, grid: tuple[int, int], again: bool) -> NetworkCosts:
        layers = self._again if again else self.layers
        shape = (samples, *self.image)
        return count(layers, shape, grid, segments=self.segments, on_cpu=self.on_cpu)

    @cached_property
    def _pieces(self) -> list[list[Layer]]:
        shadow = meta_copy(self.model)
        recompute_blocks(shadow)
        layers = [(path, shadow.get_submodule(path)) for path, _ in self.layers]
        if len(layers) == 1:
            return [layers]
        lengths = (len(piece) for piece in pieces([layer for _, layer in layers]))
        return [layers[a:b] for a, b in pairwise([0, *accumulate(lengths)])]

    @cached_property
    def _again(self) -> list[Layer]:
        return [
            piece[0] if len(piece) == 1 else (piece[0][0], _Again(piece)) for piece in self._pieces
        ]

    def parts(self, bounds: Sequence[int], again: bool) -> list[tuple[int, int]]:
        """Of each stage its first part, and the one after its last, in `costs`.

        A piece that runs again belongs to the stage in which it begins.
        """
        if not again:
            return list(pairwise(bounds))
        starts = [0]
        for piece in self._pieces:
            starts.append(starts[-1] + len(piece))
        places = [sum(start < bound for start in starts[:-1]) for bound in bounds]
        return list(pairwise(places))

    @cached_property
    def state_ratio(self) -> float:
        """Bytes that the optimizer keeps for each byte of weights."""
        return state_ratio(self.optimizer)

    @cached_property
    def updates(self) -> list[list[Work]]:
        """What the optimizer does for each layer in a step, its state being there."""
        return [self._update(layer) for _, layer in self.layers]

    def _update(self, layer: nn.Module) -> list[Work]:
        ledger = Ledger()
        for p in layer.parameters():
            shadow = nn.Parameter(torch.empty_like(p, device="meta"))
            parameter, optimizer = stepped(self.optimizer, shadow)
            parameter.grad = torch.empty_like(parameter)
            with ledger.watch():
                optimizer.step()
        return [work for works in ledger.work.values() for work in works]
