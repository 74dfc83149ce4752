"""Runs a stage on this rank's tile in virtual tiles that take turns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spatialdl.comm.across import Across, GivenUp
from spatialdl.comm.handover import HandoverShape
from spatialdl.comm.mesh import Mesh
from spatialdl.comm.turns import Turns
from spatialdl.comm.virtual import virtual_ranks
from spatialdl.layout.layout import Box, Layout, finer_parts, last_slices
from spatialdl.layout.placement import Axes
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.own_tile import Criterion, MadeOfTile, Shapes, TileRegion, run_tile
from spatialdl.pipeline.steps import Value
from spatialdl.spatial.random.drawing import OnThreads
from spatialdl.spatial.split import as_image, from_local
from spatialdl.spatial.streaming.memory import Memory
from spatialdl.spatial.tensor import SpatialTensor, from_tile
from spatialdl.torch_internals import foreach_div_, reparametrize_module, tree_map


class VirtualTiles:
    """Runs a stage on virtual tiles one after the other; as `run_tile` runs it on one.

    Args:
        module: its layers, without hooks.
        mesh: the ranks of the stage; `Mesh.stream` defines the virtual tiles of a rank.
        options: see `run_tile`.
        memory: stores tensors of virtual tiles between uses.

    Attributes:
        across: their exchange with virtual tiles of other ranks, if there are any.
    """

    def __init__(
        self, module: nn.Module, mesh: Mesh, options: PipelineOptions, memory: Memory
    ) -> None:
        ranks = [finer_parts(mesh.grid, mesh.stream, part) for part in range(mesh.parts)]
        own, axes = ranks[mesh.part], Axes(spatial=mesh.tile_grid)
        self._module, self._options = module, options
        self.mesh, self.memory, self.count = mesh, memory, len(own)
        self._turns: Turns[Any] = Turns(len(own))
        self.across = Across(mesh.grid_comm, ranks) if mesh.parts > 1 else None
        comms = virtual_ranks(axes.parts, self._turns, self.across)
        self.meshes = [Mesh(axes, comm.rank, mesh.replica, comm, comm) for comm in comms]
        self._copies = ModelCopies(module, len(own))

    def forward(self, tiles: dict[Value, Any], shapes: Shapes, samples: int) -> MadeOfTiles:
        self._copies.follow()
        draws = OnThreads(self.meshes)

        def work(number: int) -> MadeOfTile:
            with draws.of():
                pieces = {
                    value: self._leaf(number, tile, shapes[value]) for value, tile in tiles.items()
                }
                network, mesh = self._copies.networks[number], self.meshes[number]
                return run_tile(network, mesh, pieces, shapes, samples, self._options)

        made = self.each(work)
        draws.finish()
        self.memory.release(self._module.buffers())
        return MadeOfTiles(self, made)

    def each(self, work: Callable[[int], Any]) -> list[Any]:
        """Run `work` for each virtual tile of this rank, in turns; return the results."""

        def watched(number: int) -> Any:
            with self.memory.watch(number):
                return work(number)

        try:
            with self._copies.in_place():
                results = self._turns.run(
                    [partial(watched, number) for number in range(self.count)]
                )
        except GivenUp:
            self._finish()
            raise
        self._finish()
        return results

    def _finish(self) -> None:
        if self.across is not None:
            self.across.finish()

    @property
    def trained(self) -> list[nn.Parameter]:
        """Trainable parameters of the network."""
        return self._copies.trained

    def take_gradients(self) -> tuple[list[nn.Parameter], list[Tensor | None]]:
        """Trainable parameters, and the gradients that backwards have accumulated for them."""
        weights, grads = self._copies.take_gradients()
        present = [grad for grad in grads if grad is not None]
        self.memory.release(present)
        if present:
            foreach_div_(present, self.count)  # mean of the tiles' losses, as over ranks
        return weights, grads

    def pass_gradients_on(self) -> None:
        """Accumulate gradients of the copies in the network's parameters, in one backward."""
        pairs = zip(*self.take_gradients(), strict=True)
        present = [(weight, grad) for weight, grad in pairs if grad is not None]
        if present:
            own, seeds = zip(*present, strict=True)
            torch.autograd.backward(own, seeds)

    # --- pieces of this rank's tile

    def slices(self, number: int, layout: Layout) -> tuple[Any, ...]:
        """Slices of this rank's tile that select a virtual tile, along all spatial dims."""
        boxes = [layout.boxes[mesh.part] for mesh in self.meshes]
        _, *spatial = boxes[number].slices_in(_around(boxes))
        return last_slices(spatial)

    def piece(self, number: int, tile: Any, layout: Layout) -> Any:
        """The part of this rank's tile in a virtual tile; the whole tensor if not split."""
        if len(layout.boxes) == 1 and not isinstance(tile, TileRegion):
            return tile
        return tile[self.slices(number, layout)]

    def together(self, pieces: Sequence[Tensor], layout: Layout) -> Tensor:
        """Assemble this rank's tile from the pieces of its virtual tiles."""
        box = _around([layout.boxes[mesh.part] for mesh in self.meshes])
        shape = (*pieces[0].shape[: -len(box.spatial)], *box.shape[1:])
        tile = torch.empty(shape, dtype=pieces[0].dtype, device=pieces[0].device)
        with self.memory.watch(), torch.no_grad():
            for number, piece in enumerate(pieces):
                tile[self.slices(number, layout)].copy_(piece)
        return tile

    def _leaf(self, number: int, tile: Any, shape: HandoverShape) -> Tensor:
        piece = self.piece(number, tile, shape.receiver)
        leaf: Tensor = piece if isinstance(tile, TileRegion) else piece.detach().clone()
        return leaf.requires_grad_(isinstance(tile, Tensor) and tile.requires_grad)


class MadeOfTiles:
    """Results on virtual tiles, with the methods of `MadeOfTile`."""

    def __init__(self, tiles: VirtualTiles, made: list[MadeOfTile]) -> None:
        self._tiles, self._made = tiles, made

    def leaving(self, value: Value, shape: HandoverShape) -> Tensor:
        with self._tiles.memory.watch(), torch.no_grad():
            pieces = [made.leaving(value, shape) for made in self._made]
        if len(shape.sender.boxes) > 1:
            return self._tiles.together(pieces, shape.sender)
        return self._own_copy(pieces[0])

    def _own_copy(self, tensor: Tensor) -> Tensor:
        """Copy into memory that is not offloaded, as peers read it or a send is in flight."""
        self._tiles.memory.bring([tensor])
        return tensor.detach().clone()

    @property
    def output(self) -> Any:
        return tree_map(self.whole, *self._images())

    def _images(self) -> list[Any]:
        return self._tiles.each(lambda number: tree_map(as_image, self._made[number].output))

    def take_images(self) -> list[Any]:
        """The output of each virtual tile; only the stage's inputs are kept beside it."""
        images = self._images()
        for made in self._made:
            made.values.clear()
        return images

    def outputs(self) -> Iterator[tuple[Mesh, Any]]:
        images = self._images()
        self._made = []
        if not isinstance(images[0], SpatialTensor):
            yield self._tiles.mesh, tree_map(self.whole, *images)
            return
        for mesh in self._tiles.meshes:
            image = images.pop(0)  # held in memory until the next one
            self._tiles.memory.bring([image._tile])
            yield mesh, image

    def whole(self, *values: Any) -> Any:
        """One leaf of the output on this rank, from those of its virtual tiles."""
        first, mesh = values[0], self._tiles.mesh
        if not isinstance(first, Tensor):
            return first
        if not isinstance(first, SpatialTensor):
            return self._own_copy(first)
        layout = first.spatial_layout
        tile = self._tiles.together([value._tile for value in values], layout)
        if mesh.parts == 1:
            return tile
        return from_tile(tile, layout.coarser(mesh.stream), mesh)

    def backward_of_loss(self, criterion: Criterion, target: Any, weight: float | Tensor) -> Tensor:
        tiles = self._tiles

        def work(number: int) -> Tensor:
            own = target
            if isinstance(target, TileRegion):
                own = self._own_part(number, target)
            return self._made[number].backward_of_loss(criterion, own, weight)

        values = tiles.each(work)
        tiles.pass_gradients_on()
        loss: Tensor = values[0]
        return loss

    def _own_part(self, number: int, target: TileRegion) -> Tensor:
        mesh = self._tiles.meshes[number]
        piece = self._tiles.piece(number, target, mesh.layout(1, target.size))
        return piece if mesh.parts == 1 else from_local(piece, mesh, target.size)

    def backward_of(self, grads: Mapping[Value, Tensor], shapes: Shapes) -> None:
        tiles, count = self._tiles, self._tiles.count

        def work(number: int) -> None:
            own = {}
            for value, grad in grads.items():
                layout = shapes[value].sender
                piece = tiles.piece(number, grad, layout)
                # a stage's objective is the mean over its ranks, here the virtual ones
                own[value] = piece * count if len(layout.boxes) > 1 else piece
            self._made[number].backward_of(own, shapes)

        tiles.each(work)
        tiles.pass_gradients_on()

    def gradient(self, value: Value, shape: HandoverShape) -> Tensor:
        tiles = self._tiles
        grads = [made.gradient(value, shape) for made in self._made]
        if len(shape.receiver.boxes) > 1:
            return tiles.together(grads, shape.receiver).div_(tiles.count)
        tiles.memory.release(grads)
        return torch.stack(grads).mean(0)


Made = MadeOfTile | MadeOfTiles


def _around(boxes: Sequence[Box]) -> Box:
    """The bounding box of `boxes`."""
    return Box((min(s for s, _ in dim), max(e for _, e in dim)) for dim in zip(*boxes, strict=True))


# --- networks that share weights


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

    def take_gradients(self) -> tuple[list[nn.Parameter], list[Tensor | None]]:
        """Trainable parameters, and the gradients of their leaves, which are reset."""
        trained = self.trained
        gradients = [self._leaves[parameter].grad for parameter in trained]
        for leaf in self._leaves.values():
            leaf.grad = None
        return trained, gradients
