"""Runs a network on an image larger than memory: `spatialdl.stream`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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
from spatialdl.torch_internals import foreach_div_, tree_flatten, tree_map, tree_unflatten


def stream(
    model: nn.Module,
    image: Any,
    grid: Sequence[int] = (2, 2),
    *,
    limit_gb: float | None = None,
    store: str | Path | None = None,
) -> Any:
    """Compute ``model(image)`` tile by tile in this process, without MPI.

    Each tile of the grid is a virtual rank. It runs the network as a rank of a mesh does, until it
    needs pixels or sums of its peers; then the next one takes its turn. Results and gradients are
    those of the whole image. Tensors beyond `limit_gb` are offloaded to a store.

    Args:
        model: any network; its weights are in memory once.
        image: (N, C, *spatial), with as many spatial dims as the grid has. A tensor, or any array
            with such a ``shape`` that can be sliced (memory maps of NumPy, HDF5 and Zarr arrays):
            then each tile is read in its turn, and the image is never in memory as a whole. A
            tensor may require a gradient.
        grid: number of tiles along each spatial dim, one to three numbers.
        limit_gb: limit of activations and gradients in memory, in 10^9 bytes; weights, their
            gradients, the output, and the workspace of the largest operation on a tile come on
            top. None for no limit.
        store: folder of the store on disk; by default that for temporary files. Its file is
            unnamed and disappears with the process. See `streaming.memory.memory_within`.

    Returns:
        The whole output of the network, differentiable.

    Raises:
        ValueError: if the grid or the limit is invalid, or the store cannot be used.
        UnsupportedSpatialOp: an operation does not support split images.
        OSError: if the disk of the store is full.
    """
    axes = Axes(spatial=_grid_of(grid))
    _check(model, image, axes.spatial)
    run = _Run(model, image, axes, memory_within(limit_gb, store, _device_of(model)))
    if not torch.is_grad_enabled():
        return tree_unflatten(run.forward(), run.form)
    image_tensor = image if isinstance(image, Tensor) else None
    flat = _Streamed.apply(run, image_tensor, *run.weights)  # type: ignore[no-untyped-call]
    return tree_unflatten(list(flat), run.form)


def memory_of(output: Tensor) -> Memory:
    """Return the memory statistics of a streamed image, and its store.

    Args:
        output: result of `stream`, or a tensor in it, before backward.

    Raises:
        ValueError: if it is not a differentiable output of `stream`.
    """
    run = getattr(output.grad_fn, "run", None)
    if not isinstance(run, _Run):
        raise ValueError("memory_of needs a differentiable output of spatialdl.stream")
    return run.memory


def _grid_of(grid: Any) -> tuple[int, ...]:
    try:
        return tuple(grid)
    except TypeError as error:
        raise ValueError(
            f"grid must have one to three numbers, as (rows, columns) for images, got {grid!r}"
        ) from error


def _check(model: nn.Module, image: Any, grid: tuple[int, ...]) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got a {type(model).__name__}")
    shape = getattr(image, "shape", None)
    if isinstance(image, SpatialTensor) or shape is None or len(shape) != len(grid) + 2:
        found_input = f"shape {tuple(shape)}" if shape is not None else f"a {type(image).__name__}"
        raise ValueError(
            f"an image for a grid of {by(grid)} must be {image_shape(len(grid))}, a "
            f"tensor or an array, got {found_input}"
        )
    size = tuple(shape[2:])
    if any(extent < parts for extent, parts in zip(size, grid, strict=True)):
        raise ValueError(
            f"an image of {by(size)} is smaller than the grid {by(grid)}: use a smaller grid"
        )


def _device_of(model: nn.Module) -> torch.device:
    first = next((tensor for tensor in (*model.parameters(), *model.buffers())), None)
    return torch.device("cpu") if first is None else first.device


class _Run:
    """One forward over virtual ranks, and its backward.

    Attributes:
        weights: trainable parameters of the network.
        memory: memory and store of the tensors.
        form: tree structure of the output.
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
        """Run forward and return the tensors of the whole output."""
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
        """Slices of the image that select the tile of a rank."""
        mesh, samples = self._meshes[rank], self._image.shape[0]
        box = mesh.own_box(mesh.layout(samples, self._size))
        return (slice(None), slice(None), *(slice(*interval) for interval in box.spatial))

    def _whole(self, values: Sequence[Any]) -> Any:
        """Assemble an output of all ranks; an unsplit one is the first rank's."""
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
        """Return the gradients of the image, if it requires one, and of `weights`."""
        if not self._outputs:
            raise RuntimeError("backward through a streamed image a second time: stream it again")
        seeds = [self._seeds(rank, grads) for rank in range(self._count)]
        self._outputs = []
        with self._copies.in_place():
            self._turns.run([partial(self._backward, seeds, rank) for rank in range(self._count)])
        gradients = self._copies.take_gradients(self.weights)
        present = [grad for grad in gradients if grad is not None]
        self.memory.release(present)
        if present:  # as over ranks, gradients are of the mean of the ranks' losses
            foreach_div_(present, self._count)
        return self._image_gradient(), gradients

    def _seeds(self, rank: int, grads: Sequence[Tensor | None]) -> tuple[list[Any], list[Any]]:
        """Outputs of a rank from which backward starts, and their gradients."""
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
    """Slices of the whole image that select the tile of a split one."""
    samples, *spatial = x.mesh.own_box(x.spatial_layout).slices_in(x.spatial_layout.whole)
    return (samples, *last_slices(spatial))
