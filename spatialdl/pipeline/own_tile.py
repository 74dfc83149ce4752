"""Runs a stage on this rank's tile, without hand-overs to other stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spatialdl.comm.handover import HandoverShape
from spatialdl.comm.mesh import Mesh
from spatialdl.pipeline.autocast import autocast
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.shapes import SplitShape
from spatialdl.pipeline.stage import OUTPUT, run_stage, run_stage_again
from spatialdl.pipeline.steps import IMAGE, Value
from spatialdl.spatial.channels.weights import full_outputs
from spatialdl.spatial.recompute import recompute
from spatialdl.spatial.tensor import SpatialTensor, from_tile

Criterion = Callable[[Tensor, Tensor], Tensor]

Shapes = Mapping[Value, HandoverShape]
"""Shapes of a stage's inputs for a micro-batch; for images both layouts are the stage's."""


@dataclass(frozen=True)
class TileRegion:
    """Region of a micro-batch's images, or masks, on a rank with virtual tiles.

    Attributes:
        shape: of the rank's box: (N, C, *spatial), of masks (N, *spatial).
        dtype: of the data read.
        size: of the spatial dims of the whole image.
        read: returns a part, from slices of all dims or with ``...`` of the last ones.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    size: tuple[int, ...]
    read: Callable[[Any], Tensor]

    def __getitem__(self, part: Any) -> Tensor:
        return self.read(part)


class _Enter(torch.autograd.Function):
    """Identity, as autograd forbids operations in place on a leaf, with which a stage may begin."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor) -> Tensor:
        return tile.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def enter(tile: Tensor) -> Tensor:
    """Alias a tensor so that the first operation of a stage may write into it."""
    entered: Tensor = _Enter.apply(tile)  # type: ignore[no-untyped-call]
    return entered


def received(tile: Tensor, shape: HandoverShape, mesh: Mesh) -> Tensor:
    """Make the input of a stage from what a rank of its mesh has received."""
    if isinstance(shape, SplitShape):
        return shape.stage_input(mesh, enter(tile))
    tile = enter(tile)
    if len(shape.receiver.boxes) == 1 or mesh.parts == 1:
        return tile
    return from_tile(tile, shape.receiver, mesh)


def run_tile(
    module: nn.Module,
    mesh: Mesh,
    tiles: dict[Value, Any],
    shapes: Shapes,
    samples: int,
    options: PipelineOptions,
) -> MadeOfTile:
    """Run a stage on one tile; collective over its mesh.

    Args:
        module: its layers.
        mesh: the ranks of the tiles.
        tiles: inputs on this rank; leaves, some of which require gradients.
        samples: number of samples on this rank.
        options: `device`, `mixed` and `recompute` count.
    """
    values = {value: received(tile, shapes[value], mesh) for value, tile in tiles.items()}
    context = partial(autocast, options.device, options.mixed)
    with context():
        if options.recompute == "stage":
            outputs = recompute(run_stage_again, module, values, samples, modules=[module])
        else:
            outputs = run_stage(module, values, samples)
    if mesh.tensor > 1:
        outputs = full_outputs(outputs)
    if IMAGE in values:  # later stages may take it
        outputs = {IMAGE: values[IMAGE]} | outputs
    return MadeOfTile(mesh, tiles, outputs, context)


class MadeOfTile:
    """Results of a forward on one tile, kept until its backward.

    Args:
        tiles: inputs of the stage.
        values: its outputs, and the images.
        loss_context: makes the context of the criterion.
    """

    def __init__(
        self,
        mesh: Mesh,
        tiles: dict[Value, Tensor],
        values: dict[Value, Any],
        loss_context: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._mesh, self._tiles, self.values = mesh, tiles, values
        self._loss_context = loss_context

    def leaving(self, value: Value, shape: HandoverShape) -> Tensor:
        """This rank's part of a value, in the form for hand-over."""
        output = self.values[value]
        local: Tensor = output._tile if isinstance(output, SpatialTensor) else output
        return shape.leaving(local, self._mesh.part) if isinstance(shape, SplitShape) else local

    @property
    def output(self) -> Any:
        """Return value of the network; None before the last stage."""
        return self.values.get(OUTPUT)

    def outputs(self) -> Iterator[tuple[Mesh, Any]]:
        """Yield the output by tile with the mesh of each; may free the inputs."""
        yield self._mesh, self.output

    def backward_of_loss(self, criterion: Criterion, target: Any, weight: float | Tensor) -> Tensor:
        """Return the mean loss, float64 (), not yet synchronized.

        Args:
            weight: weight of the loss in the objective.
        """
        with self._loss_context():
            loss = criterion(self.output, target)
        value = loss.detach().double()
        if loss.requires_grad:
            (loss * weight).backward()  # type: ignore[no-untyped-call]
        return value

    def backward_of(self, grads: Mapping[Value, Tensor], shapes: Shapes) -> None:
        """Run backward from outputs that require gradients; the rest depend on no weight."""
        roots, seeds = [], []
        for value, grad in grads.items():
            output = self.values[value]
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
        """Gradient of an input of the stage."""
        tile = self._tiles[value]
        return tile.grad if tile.grad is not None else torch.zeros_like(tile)
