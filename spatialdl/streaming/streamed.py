"""A network on an image larger than memory: `spatialdl.stream`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from spatialdl.comm.mesh import Mesh
from spatialdl.comm.once import once_differentiable
from spatialdl.comm.turns import Turns
from spatialdl.comm.virtual import virtual_ranks
from spatialdl.parallel.axes import Axes
from spatialdl.parallel.layout import by, image_shape, last_slices
from spatialdl.random.drawing import OnThreads
from spatialdl.spatial.split import as_image, from_local
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.streaming.copies import ModelCopies
from spatialdl.streaming.memory import Memory, memory_within


def stream(
    model: nn.Module,
    image: Any,
    grid: Sequence[int] = (2, 2),
    *,
    limit_gb: float | None = None,
    store: str | Path | None = None,
) -> Any:
    """What ``model(image)`` gives, worked out tile by tile in this process, without MPI.

    Each tile of the grid is a virtual rank. It runs the network as a rank of a mesh does, until it
    needs pixels or sums of the others; then the next has its turn. Numbers and gradients are those
    of the whole image. What does not fit into `limit_gb` lies on a disk until it is needed again.

    Args:
        model: any network; its weights are there once.
        image: (N, C, *spatial), as many spatial dims as the grid has. A tensor, or anything that
            has such a ``shape`` and gives parts of it by slices (memory maps of NumPy, HDF5 and
            Zarr arrays): then each tile is read when its turn comes, and the image is never in
            memory as a whole. A tensor may want a gradient.
        grid: into how many tiles each spatial dim is cut, one to three numbers.
        limit_gb: 10^9 bytes of activations and gradients that may be in memory at a time; beside
            them are the weights, their gradients, the output, and what the largest operation on
            a tile takes for itself. None for no limit.
        store: folder for what does not fit; by default that for temporary files. Nothing is left
            there, however the process ends.

    Returns:
        The output of the network, whole, and differentiable.

    Raises:
        ValueError: the grid or the limit does not fit, or the store cannot be used.
        UnsupportedSpatialOp: an operation is not supported on a split image.
        OSError: the disk of the store is full.
    """
    axes = Axes(spatial=_grid_of(grid))
    _check(model, image, axes.spatial)
    run = _Run(model, image, axes, memory_within(limit_gb, store, _device_of(model)))
    if not torch.is_grad_enabled():
        return tree_unflatten(run.forward(), run.form)
    given = image if isinstance(image, Tensor) else None
    flat = _Streamed.apply(run, given, *run.weights)  # type: ignore[no-untyped-call]
    return tree_unflatten(list(flat), run.form)


def memory_of(output: Tensor) -> Memory:
    """What the tensors of a streamed image have taken, and its store.

    Args:
        output: what `stream` gave, or a tensor of it; it can go backward, and has not yet.

    Raises:
        ValueError: it is no such tensor.
    """
    run = getattr(output.grad_fn, "run", None)
    if not isinstance(run, _Run):
        raise ValueError("memory_of takes an output of spatialdl.stream that can go backward")
    return run.memory


def _grid_of(grid: Any) -> tuple[int, ...]:
    try:
        return tuple(grid)
    except TypeError as error:
        raise ValueError(
            f"a grid has one to three numbers, as (rows, columns) for images, got {grid!r}"
        ) from error


def _check(model: nn.Module, image: Any, grid: tuple[int, ...]) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"stream takes a network, a torch.nn.Module, got a {type(model).__name__}")
    shape = getattr(image, "shape", None)
    if isinstance(image, SpatialTensor) or shape is None or len(shape) != len(grid) + 2:
        what = f"shape {tuple(shape)}" if shape is not None else f"a {type(image).__name__}"
        raise ValueError(
            f"an image to be streamed over a grid of {by(grid)} is {image_shape(len(grid))}, a "
            f"tensor or an array, got {what}"
        )
    size = tuple(shape[2:])
    if any(extent < parts for extent, parts in zip(size, grid, strict=True)):
        raise ValueError(
            f"an image of {by(size)} is smaller than the grid {by(grid)}: use a smaller grid"
        )


def _device_of(model: nn.Module) -> torch.device:
    first = next((each for each in (*model.parameters(), *model.buffers())), None)
    return torch.device("cpu") if first is None else first.device


class _Run:
    """One forward over virtual ranks, and its backward.

    Attributes:
        weights: parameters of the network that want gradients.
        memory: where tensors are kept.
        form: how the output is put together from tensors.
    """

    def __init__(self, model: nn.Module, image: Any, axes: Axes, memory: Memory) -> None:
        self._model, self._image, self.memory = model, image, memory
        self._size = tuple(image.shape[2:])
        self._count = axes.parts
        self._turns: Turns[Any] = Turns(self._count)
        ranks = virtual_ranks(self._count, self._turns)
        self._meshes = [Mesh(axes, rank, 0, comm, comm) for rank, comm in enumerate(ranks)]
        self._copies = ModelCopies(model, self._count)
        self.weights = self._copies.trained
        self._device = _device_of(model)
        self._tiles: list[Tensor | None] = [None] * self._count
        self._outputs: list[list[Any]] = []
        self.form: Any = None

    # --- forward

    def forward(self, wants_image_gradient: bool = False) -> list[Any]:
        """The tensors of the output, whole."""
        draws = OnThreads(self._meshes)
        works = [
            partial(self._forward, rank, network, draws, wants_image_gradient)
            for rank, network in enumerate(self._copies.networks)
        ]
        with self._copies.in_place():
            outputs = self._turns.run(works)
        draws.finish()
        flat = [tree_flatten(output)[0] for output in outputs]
        self.form = tree_flatten(outputs[0])[1]
        self._outputs = [list(values) for values in zip(*flat, strict=True)]
        with torch.no_grad():
            return [self._whole(values) for values in self._outputs]

    def _forward(self, rank: int, network: nn.Module, draws: OnThreads, wants_grad: bool) -> Any:
        with self.memory.watch(rank), draws.of():
            tile = self._read(rank)
            if wants_grad:
                tile = self._tiles[rank] = tile.clone().requires_grad_()
            if self._count > 1:
                tile = from_local(tile, self._meshes[rank], self._size)
            return tree_map(as_image, network(tile))

    def _read(self, rank: int) -> Tensor:
        part = self._image[self._part(rank)]
        if isinstance(part, Tensor):
            return part.detach()
        return torch.from_numpy(np.array(part)).to(self._device)

    def _part(self, rank: int) -> tuple[Any, ...]:
        """The tile of a rank in the image."""
        mesh, samples = self._meshes[rank], self._image.shape[0]
        box = mesh.own_box(mesh.layout(samples, self._size))
        return (slice(None), slice(None), *(slice(*interval) for interval in box.spatial))

    def _whole(self, values: Sequence[Any]) -> Any:
        """An output, from those of all ranks: the first one's, or put together from their tiles."""
        first = values[0]
        if not isinstance(first, SpatialTensor):
            return first.detach() if isinstance(first, Tensor) else first
        whole = first._tile.new_empty(first.shape)
        for value in values:
            self.memory.bring([value._tile])
            whole[_place(value)] = value._tile
        return whole

    # --- backward

    def backward(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, list[Any]]:
        """Gradients of the image, if it wants one, and of `weights`."""
        if not self._outputs:
            raise RuntimeError("a streamed image goes backward once; stream it again")
        seeds = [self._seeds(rank, grads) for rank in range(self._count)]
        self._outputs = []
        with self._copies.in_place():
            self._turns.run([partial(self._backward, seeds, rank) for rank in range(self._count)])
        found = self._copies.take_gradients(self.weights)
        there = [grad for grad in found if grad is not None]
        self.memory.release(there)
        if there:  # as over ranks: of the mean of their losses
            torch._foreach_div_(there, self._count)
        return self._image_gradient(), found

    def _seeds(self, rank: int, grads: Sequence[Tensor | None]) -> tuple[list[Any], list[Any]]:
        """From where a rank goes backward: its outputs, and their gradients."""
        roots: list[Tensor] = []
        seeds: list[Tensor] = []
        for values, grad in zip(self._outputs, grads, strict=True):
            value = values[rank]
            if grad is not None and isinstance(value, Tensor) and value.requires_grad:
                roots.append(value)
                seeds.append(grad)
                if isinstance(value, SpatialTensor):
                    seeds[-1] = value._like(grad[_place(value)] * self._count)
        return roots, seeds

    def _backward(self, seeds: list[Any], rank: int) -> None:
        with self.memory.watch(rank):
            roots, grads = seeds[rank]
            seeds[rank] = None
            torch.autograd.backward(roots, grads)

    def _image_gradient(self) -> Tensor | None:
        if self._tiles[0] is None:
            return None
        whole = torch.empty_like(self._image)
        for rank, tile in enumerate(self._tiles):
            grad = None if tile is None else tile.grad
            if grad is None:
                return None  # the output does not depend on the image
            self.memory.bring([grad])
            whole[self._part(rank)] = grad
        return whole


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, image: Tensor | None, *weights: Tensor) -> Any:
        ctx.run = run
        with torch.enable_grad():
            return tuple(run.forward(ctx.needs_input_grad[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        image, weights = ctx.run.backward(grads)
        return None, image, *weights


def _place(x: SpatialTensor) -> tuple[Any, ...]:
    """The tile of a split image in the whole one."""
    samples, *spatial = x.mesh.own_box(x.spatial_layout).slices_in(x.spatial_layout.whole)
    return (samples, *last_slices(spatial))
