"""Runs a network on an image larger than memory: `spatialdl.stream`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spatialdl.comm.handover import HandoverShape
from spatialdl.comm.mesh import Mesh
from spatialdl.comm.once import once_differentiable
from spatialdl.comm.single_process import SingleProcess
from spatialdl.layout.layout import Layout, by, image_shape
from spatialdl.layout.placement import Axes
from spatialdl.pipeline.layout_checks import check_size
from spatialdl.pipeline.options import PipelineOptions
from spatialdl.pipeline.own_tile import TileRegion
from spatialdl.pipeline.steps import IMAGE
from spatialdl.pipeline.virtual_tiles import VirtualTiles
from spatialdl.spatial.streaming.memory import Memory, memory_within
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.torch_internals import tree_flatten, tree_map, tree_unflatten


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
    tiles = Axes(spatial=_grid_of(grid)).spatial
    _check(model, image, tiles)
    run = _StreamedRun(model, image, tiles, memory_within(limit_gb, store, _device_of(model)))
    if not torch.is_grad_enabled():
        return tree_unflatten(run.forward(), run.form)
    image_tensor = image if isinstance(image, Tensor) else None
    flat = _Streamed.apply(run, image_tensor, *run.tiles.trained)  # type: ignore[no-untyped-call]
    return tree_unflatten(list(flat), run.form)


def memory_of(output: Tensor) -> Memory:
    """Return the memory statistics of a streamed image, and its store.

    Args:
        output: result of `stream`, or a tensor in it, before backward.

    Raises:
        ValueError: if it is not a differentiable output of `stream`.
    """
    run = getattr(output.grad_fn, "run", None)
    if not isinstance(run, _StreamedRun):
        raise ValueError("memory_of needs a differentiable output of spatialdl.stream")
    return run.tiles.memory


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
    check_size(shape[2:], grid)


def _device_of(model: nn.Module) -> torch.device:
    first = next((tensor for tensor in (*model.parameters(), *model.buffers())), None)
    return torch.device("cpu") if first is None else first.device


class _StreamedRun:
    """One forward on the virtual tiles of a single process, and its backward.

    Attributes:
        form: tree structure of the output.
    """

    def __init__(self, model: nn.Module, image: Any, grid: tuple[int, ...], memory: Memory) -> None:
        alone = SingleProcess()
        mesh = Mesh(Axes(spatial=(1,) * len(grid)), 0, 0, alone, alone, stream=grid)
        self._image, self._device = image, _device_of(model)
        self.tiles = VirtualTiles(model, mesh, PipelineOptions(device=self._device), memory)
        layout = Layout.even(image.shape[0], image.shape[2:], grid)
        self._shape = HandoverShape(tuple(image.shape), torch.get_default_dtype(), layout, layout)
        self._roots: list[list[Any]] = []
        self.form: Any = None

    def forward(self) -> list[Any]:
        """Run forward and return the tensors of the whole output."""
        image = self._image
        if not (isinstance(image, Tensor) and image.requires_grad):
            size = self._shape.receiver.size
            image = TileRegion(self._shape.shape, self._shape.dtype, size, self._read)
        shapes = {IMAGE: self._shape}
        samples = self._shape.shape[0]
        self._made = self.tiles.forward({IMAGE: image}, shapes, samples)
        images = self._made.take_images()
        flat, self.form = tree_flatten(tree_map(self._made.whole, *images))
        self._roots = [tree_flatten(image)[0] for image in images]
        return flat

    def _read(self, part: Any) -> Tensor:
        """Read a part of an image that takes no gradient, or is no tensor."""
        own = self._image[(slice(None), slice(None), *part[1:])]
        if isinstance(own, Tensor):
            return own.detach()
        return torch.from_numpy(np.array(own)).to(self._device)

    def backward(
        self, grads: Sequence[Tensor | None], to_image: bool
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Return the gradients of the image, if it requires one, and of the weights."""
        if not self._roots:
            raise RuntimeError("backward through a streamed image a second time: stream it again")
        roots, self._roots = self._roots, []
        self.tiles.each(partial(self._backward, roots, grads))
        _, gradients = self.tiles.take_gradients()
        image = self._made.gradient(IMAGE, self._shape) if to_image else None
        return image, gradients

    def _backward(
        self, roots: list[list[Any]], grads: Sequence[Tensor | None], number: int
    ) -> None:
        own, seeds = [], []
        for root, grad in zip(roots[number], grads, strict=True):
            if grad is None or not isinstance(root, Tensor) or not root.requires_grad:
                continue
            own.append(root)
            if isinstance(root, SpatialTensor):
                piece = self.tiles.piece(number, grad, root.spatial_layout)
                grad = root._like(piece * self.tiles.count)  # noqa: PLW2901
            seeds.append(grad)
        roots[number] = []
        torch.autograd.backward(own, seeds)


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _StreamedRun, image: Tensor | None, *weights: Tensor) -> Any:
        ctx.run = run
        with torch.enable_grad():
            return tuple(run.forward())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        image, weights = ctx.run.backward(grads, ctx.needs_input_grad[1])
        return None, image, *weights
