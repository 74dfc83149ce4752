"""A stage at work on this rank's tile, apart from what it hands over to other stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spatialdl.channels.weights import whole_outputs
from spatialdl.comm.handover import HandoverShape
from spatialdl.comm.mesh import Mesh
from spatialdl.pipeline.autocast import autocast
from spatialdl.pipeline.shapes import SplitShape
from spatialdl.pipeline.stage import OUTPUT, run_stage, run_stage_again
from spatialdl.pipeline.steps import IMAGE, Value
from spatialdl.spatial.recompute import recompute
from spatialdl.spatial.tensor import SpatialTensor, from_tile

Criterion = Callable[[Tensor, Tensor], Tensor]

Shapes = Mapping[Value, HandoverShape]
"""What a stage is given for a micro-batch; of the images both layouts are that of the stage."""


class Made(Protocol):
    """What a forward has made, until its backward."""

    def leaving(self, value: Value, shape: HandoverShape) -> Tensor:
        """This rank's part of a value, as it is handed over."""

    @property
    def output(self) -> Any:
        """What the network returns; None where it goes on."""

    def outputs(self) -> Iterator[tuple[Mesh, Any]]:
        """The same tile by tile, each with the mesh over which it lies; what was given may go."""

    def backward_of_loss(self, criterion: Criterion, target: Any, weight: float | Tensor) -> Tensor:
        """Returns the mean loss, float64 (), which is not waited for.

        Args:
            weight: with which it counts in the objective.
        """

    def backward_of(self, grads: Mapping[Value, Tensor], shapes: Shapes) -> None:
        """The backward of values that were handed over, from their gradients on this rank."""

    def gradient(self, value: Value, shape: HandoverShape) -> Tensor:
        """That of what the stage was given."""


class TileWorker(Protocol):
    """Runs a stage on what this rank has of its input."""

    def forward(
        self, tiles: dict[Value, Any], shapes: Shapes, samples: int, device: torch.device
    ) -> Made:
        """What the stage makes of its input; the ranks of its mesh call it together.

        Args:
            tiles: on this rank; leaves, of which some want gradients.
            samples: on this rank.
        """


@dataclass(frozen=True)
class TileRegion:
    """What a rank with virtual tiles has of a micro-batch's images, or of their masks.

    Attributes:
        shape: of the rank's box: (N, C, *spatial), of masks (N, *spatial).
        dtype: of what is read.
        size: of the spatial dims of the whole image.
        read: gives a part, from slices of all dims or with ``...`` of the last ones.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    size: tuple[int, ...]
    read: Callable[[Any], Tensor]

    def __getitem__(self, part: Any) -> Tensor:
        return self.read(part)


class _Enter(torch.autograd.Function):
    """A stage may begin with an operation in place, which autograd forbids on a leaf."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor) -> Tensor:
        return tile.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def enter(tile: Tensor) -> Tensor:
    """The same tensor, into which the first operation of a stage may write."""
    entered: Tensor = _Enter.apply(tile)  # type: ignore[no-untyped-call]
    return entered


def received(tile: Tensor, shape: HandoverShape, mesh: Mesh) -> Tensor:
    """What a stage gets for what a rank of its mesh has received."""
    if isinstance(shape, SplitShape):
        return shape.given_to(mesh, enter(tile))
    tile = enter(tile)
    if len(shape.receiver.boxes) == 1 or mesh.parts == 1:
        return tile
    return from_tile(tile, shape.receiver, mesh)


class OwnTile:
    """Runs a stage on one tile.

    Args:
        module: its layers.
        mesh: the ranks that have the tiles.
        recompute: whether only its input is kept for backward, and it runs again there.
        mixed: the type to which autocast casts, if it does.
    """

    def __init__(
        self, module: nn.Module, mesh: Mesh, recompute: bool, mixed: torch.dtype | None
    ) -> None:
        self.module, self.mesh = module, mesh
        self._recompute, self._mixed = recompute, mixed

    def forward(
        self, tiles: dict[Value, Any], shapes: Shapes, samples: int, device: torch.device
    ) -> MadeOfTile:
        values = {value: received(tile, shapes[value], self.mesh) for value, tile in tiles.items()}
        with autocast(device, self._mixed):
            if self._recompute:
                modules = [self.module]
                outputs = recompute(run_stage_again, self.module, values, samples, modules=modules)
            else:
                outputs = run_stage(self.module, values, samples)
        if self.mesh.tensor > 1:
            outputs = whole_outputs(outputs)
        if IMAGE in values:  # which later stages may want
            outputs = {IMAGE: values[IMAGE]} | outputs
        return MadeOfTile(self.mesh, tiles, outputs, partial(autocast, device, self._mixed))


class MadeOfTile:
    """See `Made`.

    Args:
        tiles: what the stage was given.
        values: what it gives, and the images.
        around_loss: contexts for the criterion.
    """

    def __init__(
        self,
        mesh: Mesh,
        tiles: dict[Value, Tensor],
        values: dict[Value, Any],
        around_loss: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._mesh, self._tiles, self._values = mesh, tiles, values
        self._around_loss = around_loss

    def leaving(self, value: Value, shape: HandoverShape) -> Tensor:
        given = self._values[value]
        local: Tensor = given._tile if isinstance(given, SpatialTensor) else given
        return shape.leaving(local, self._mesh.part) if isinstance(shape, SplitShape) else local

    @property
    def output(self) -> Any:
        return self._values.get(OUTPUT)

    def outputs(self) -> Iterator[tuple[Mesh, Any]]:
        yield self._mesh, self.output

    def backward_of_loss(self, criterion: Criterion, target: Any, weight: float | Tensor) -> Tensor:
        with self._around_loss():
            loss = criterion(self.output, target)
        value = loss.detach().double()
        if loss.requires_grad:
            (loss * weight).backward()  # type: ignore[no-untyped-call]
        return value

    def backward_of(self, grads: Mapping[Value, Tensor], shapes: Shapes) -> None:
        """A value need not depend on any weight."""
        roots, seeds = [], []
        for value, grad in grads.items():
            output = self._values[value]
            if output.requires_grad:
                roots.append(output)
                seeds.append(self._seed(output, grad, shapes[value]))
        if roots:
            torch.autograd.backward(roots, seeds)

    def _seed(self, output: Tensor, grad: Tensor, shape: HandoverShape) -> Tensor:
        if isinstance(shape, SplitShape):
            grad = shape.tile_of(grad, shape.pixels[0], self._mesh.part)
        if isinstance(output, SpatialTensor):
            return SpatialTensor(grad, output.spatial_layout, self._mesh, output.spatial_dims)
        return grad

    def gradient(self, value: Value, shape: HandoverShape) -> Tensor:
        tile = self._tiles[value]
        return tile.grad if tile.grad is not None else torch.zeros_like(tile)
