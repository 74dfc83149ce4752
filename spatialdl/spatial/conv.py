"""Convolution on a split image.

The convolution of the tile overlaps with the halo exchange; see `halo_geometry` for how the results
are combined. If any tile has no pixels or no outputs, the tile is copied together with its halo
first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from spatialdl.comm.boxed import BoxedTensor, Exchange
from spatialdl.comm.exchange import start_exchange
from spatialdl.comm.mesh import Mesh
from spatialdl.comm.once import once_differentiable
from spatialdl.comm.plan import Plan
from spatialdl.comm.repartition import add_up, empty_for, rooms_back, shape_of
from spatialdl.parallel.layout import Box, Layout, Window, last_slices
from spatialdl.spatial.channel_conv import (
    check_channels,
    conv_beside,
    conv_of_channels,
    conv_of_samples,
    is_of_one_pixel,
    passes_unsplit_dims,
)
from spatialdl.spatial.conv_window import Convolution, conv_of_window
from spatialdl.spatial.halo_geometry import Cut, Strip, cut_dim
from spatialdl.spatial.span import split_dims
from spatialdl.spatial.tensor import SpatialTensor, from_tile, refusal, register_op, to_tile
from spatialdl.spatial.window import autocast_cast, check_image, check_output, per_dim, window_move
from spatialdl.text import counted


@dataclass(frozen=True)
class Edge:
    """A halo strip of the tile, and the outputs and kernel taps that read it.

    Attributes:
        box: the pixels of the strip.
        strips: the strip in each spatial dim.
    """

    box: Box
    strips: tuple[Strip, ...]

    def outputs_of(self, y: Tensor) -> Tensor:
        return y[last_slices(strip.outputs for strip in self.strips)]

    def taps_of(self, weight: Tensor) -> Tensor:
        return weight[last_slices(strip.taps for strip in self.strips)]

    def read_from(self, buffer: Tensor) -> Tensor:
        """The part of the strip's buffer that the taps read."""
        return buffer[last_slices(slice(strip.first, strip.last) for strip in self.strips)]


@dataclass(frozen=True)
class TileGeometry:
    """The geometry of a convolution of one rank's tile, and its halo strips.

    Attributes:
        cuts: one per spatial dim.
        edges: before and after the tile in the first dim, in the second, and so on.
        outside: for each strip its number, its part outside the tile (None: all), and its box.
    """

    cuts: tuple[Cut, ...]
    edges: tuple[Edge | None, ...]
    outside: tuple[tuple[int, tuple[slice, ...] | None, Box], ...]

    @property
    def padding(self) -> tuple[int, ...]:
        return tuple(cut.padding for cut in self.cuts)

    @property
    def skips(self) -> bool:
        """Whether convolving the tile alone yields outputs before this rank's."""
        return any(cut.skip for cut in self.cuts)

    def wanted(self, y: Tensor) -> Tensor:
        """This rank's outputs, of all outputs of the tile alone."""
        return y[last_slices(slice(cut.skip, cut.skip + cut.outputs) for cut in self.cuts)]

    def strips(self, like: Tensor) -> list[Tensor]:
        """A zero buffer per strip, empty if there is none: all ranks save as many tensors."""
        return [
            like.new_zeros(shape_of(like, edge.box)) if edge else _no_strip(like.dtype, like.device)
            for edge in self.edges
        ]

    def held(self, strips: list[Tensor]) -> list[BoxedTensor]:
        """The parts of the strips outside the tile, which receive halos, with their boxes.

        Strips of the first dim come first and hold the corners. A strip may span the whole tile
        and extend beyond it, if this rank owns outputs of a neighbour's pixels: the pixels beyond
        belong to another strip.
        """
        return [
            BoxedTensor(strips[side] if inner is None else strips[side][last_slices(inner)], box)
            for side, inner, box in self.outside
        ]


@lru_cache(maxsize=64)
def _no_strip(dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty buffer, cached: creating one takes some microseconds of an exchange."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


def _outside(box: Box, own: Box, side: int) -> Box:
    """The part of `box` before the tile `own` (even sides) or after it in its dim ``side // 2``."""
    dim = 1 + side // 2
    (start, stop), (first, last) = box[dim], own[dim]
    return box.but(dim, (max(start, last), stop) if side % 2 else (start, min(stop, first)))


@lru_cache(maxsize=4096)
def tile_geometry(
    layout: Layout, output: Layout, windows: tuple[Window, ...], part: int
) -> TileGeometry | None:
    """This rank's geometry; None on all ranks if `cut_dim` does not support any tile."""
    cuts = []
    for tiles, outputs, window, place in zip(
        layout.cuts, output.cuts, windows, layout.part_at(part), strict=True
    ):
        of_all = cut_dim(tiles, outputs, window)
        if of_all is None:
            return None
        cuts.append(of_all[place])
    edges = tuple(
        _edge(tuple(cuts), dim, strip, layout.samples)
        for dim, cut in enumerate(cuts)
        for strip in (cut.before, cut.after)
    )
    return TileGeometry(tuple(cuts), edges, tuple(_outside_parts(edges, layout.boxes[part])))


def _edge(cuts: tuple[Cut, ...], dim: int, strip: Strip | None, samples: int) -> Edge | None:
    """The strip of one dim, over the full extent of the other dims."""
    if strip is None:
        return None
    strips = tuple(strip if number == dim else cut.full for number, cut in enumerate(cuts))
    return Edge(Box(((0, samples), *((one.start, one.stop) for one in strips))), strips)


def _outside_parts(
    edges: tuple[Edge | None, ...], own: Box
) -> Iterator[tuple[int, tuple[slice, ...] | None, Box]]:
    for side, edge in enumerate(edges):
        if edge is not None:
            box = _outside(edge.box, own, side)
            yield side, None if box == edge.box else box.slices_in(edge.box)[1:], box


class _TileConvolution(torch.autograd.Function):
    """Saves the tile, which the network keeps anyway, and the thin halo strips."""

    @staticmethod
    def forward(
        ctx: Any,
        tile: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        conv: Convolution,
        geometry: TileGeometry,
        plan: Plan,
        mesh: Mesh,
    ) -> Tensor:
        strips = geometry.strips(tile)
        halo = Exchange(plan, [BoxedTensor(tile, plan.own)], geometry.held(strips), tile.device)
        exchange = start_exchange(mesh.grid_comm, halo, conv.name)
        alone = conv.forward(tile, weight, bias, geometry.padding)
        y = geometry.wanted(alone)
        if y.shape != alone.shape:
            y = y.clone()  # preserves the memory format
        exchange.wait()
        no_padding = (0,) * len(geometry.cuts)
        for edge, strip in _present(geometry, strips):
            part = conv.forward(edge.read_from(strip), edge.taps_of(weight), None, no_padding)
            edge.outputs_of(y).add_(part)
        ctx.save_for_backward(tile, weight, *strips)
        ctx.conv, ctx.geometry, ctx.plan, ctx.mesh = conv, geometry, plan, mesh
        ctx.alone_shape = alone.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tile, weight, *strips = ctx.saved_tensors
        conv, geometry, plan = ctx.conv, ctx.geometry, ctx.plan
        needs_tile, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_strips, weight_parts = _strip_gradients(
            conv, geometry, grad, weight, strips, needs_tile, needs_weight
        )
        arrivals = rooms_back(tile, plan)
        exchange = None
        if needs_tile:
            halo = Exchange(plan, geometry.held(grad_strips), arrivals, tile.device, adjoint=True)
            exchange = start_exchange(ctx.mesh.grid_comm, halo, conv.name)
        if grad.shape != ctx.alone_shape:
            padded = empty_for(grad, ctx.alone_shape).zero_()
            geometry.wanted(padded).copy_(grad)
            grad = padded
        needs = (needs_tile, needs_weight, needs_bias)
        grad_tile, grad_weight, grad_bias = conv.backward(
            grad, tile, weight, geometry.padding, needs
        )
        if grad_weight is not None:
            for edge, part in weight_parts:
                edge.taps_of(grad_weight).add_(part)
        if exchange is not None and grad_tile is not None:
            exchange.wait()
            add_up(grad_tile, plan, arrivals)
        return grad_tile, grad_weight, grad_bias, None, None, None, None


def _present(geometry: TileGeometry, strips: list[Tensor]) -> Iterator[tuple[Edge, Tensor]]:
    for edge, strip in zip(geometry.edges, strips, strict=True):
        if edge is not None:
            yield edge, strip


def _strip_gradients(
    conv: Convolution,
    geometry: TileGeometry,
    grad: Tensor,
    weight: Tensor,
    strips: list[Tensor],
    needs_tile: bool,
    needs_weight: bool,
) -> tuple[list[Tensor], list[tuple[Edge, Tensor]]]:
    """Gradients of the halo strips, and their contributions to the weight gradient."""
    grad_strips = [torch.zeros_like(strip) for strip in strips]
    weight_parts = []
    for (edge, strip), (_, grad_strip) in zip(
        _present(geometry, strips), _present(geometry, grad_strips), strict=True
    ):
        grad_read, grad_taps, _ = conv.backward(
            edge.outputs_of(grad),
            edge.read_from(strip),
            edge.taps_of(weight),
            (0,) * len(geometry.cuts),
            (needs_tile, needs_weight, False),
        )
        if grad_read is not None:
            edge.read_from(grad_strip).copy_(grad_read)
        if grad_taps is not None:
            weight_parts.append((edge, grad_taps))
    return grad_strips, weight_parts


def _windows(
    x: SpatialTensor, weight: Tensor, stride: Any, padding: Any, dilation: Any
) -> tuple[tuple[Window, ...], tuple[int, ...]]:
    """The windows, and the size of the output."""
    dims = weight.dim() - 2
    steps, spread = per_dim(stride, dims), per_dim(dilation, dims)
    same = padding == "same"
    if isinstance(padding, str):
        if padding not in ("same", "valid"):
            raise ValueError(
                f"conv{dims}d: padding must be 'same', 'valid' or numbers, got {padding!r}"
            )
        if same and max(steps) > 1:
            raise ValueError(f"conv{dims}d: padding='same' needs stride 1")
        before = tuple(
            d * (int(k) - 1) // 2 if same else 0
            for k, d in zip(weight.shape[2:], spread, strict=True)
        )
    else:
        before = per_dim(padding, dims)
    windows = tuple(map(Window, map(int, weight.shape[2:]), steps, before, spread))
    pixels = tuple(x.shape[2:])
    if same:
        return windows, pixels
    return windows, tuple(w.output_size(n) for w, n in zip(windows, pixels, strict=True))


def _has_large_weight(input: SpatialTensor, weight: Tensor) -> bool:
    """Whether copying the taps that read halo strips costs more than copying the tile."""
    return weight.numel() * input.mesh.grid_comm.size > input.numel()


def _register(function: Any, dims: int) -> None:
    @register_op(function, split=("input",))
    def conv(
        input: SpatialTensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        is_image = input.spatial_dims.is_image and len(input.mesh.grid) == dims
        if not is_image and is_of_one_pixel(weight, stride, padding):
            return conv_of_channels(function, input, weight, bias, groups)
        if split_dims(input) == (0,):
            return conv_of_samples(
                function,
                input,
                weight,
                bias,
                stride=stride,
                padding=padding,
                dilation=dilation,
                groups=groups,
            )
        if passes_unsplit_dims(input, weight, stride, padding):
            return conv_beside(input, weight, bias, (stride, padding, dilation), groups)
        if dims < len(input.mesh.grid):
            of_image = len(input.mesh.grid)
            raise refusal(
                function,
                [input],
                f"it has {counted(dims, 'spatial dim')}, but the image has {of_image}, for which "
                f"only kernels of one pixel are supported: use conv{of_image}d",
            )
        check_image(function.__name__, input, dims)
        check_channels(function.__name__, input, weight, groups)
        windows, size = _windows(input, weight, stride, padding, dilation)
        check_output(function.__name__, input, size)
        return _convolved(input, weight, bias, groups, windows, size)


def _convolved(
    input: SpatialTensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    windows: tuple[Window, ...],
    size: tuple[int, ...],
) -> Tensor:
    mesh = input.mesh
    output, plan, _ = window_move(input.spatial_layout, windows, size, mesh.part)
    conv = Convolution(
        tuple(window.stride for window in windows),
        tuple(window.dilation for window in windows),
        groups,
    )
    geometry = tile_geometry(input.spatial_layout, output, windows, mesh.part)
    tile, weight, bias = autocast_cast(to_tile(input), weight, bias)
    if geometry and not plan.communicates and not geometry.skips:
        y = geometry.wanted(conv.forward(tile, weight, bias, geometry.padding))
    elif geometry is None or _has_large_weight(input, weight):
        y = conv_of_window(tile, weight, bias, conv, mesh.own_box(output), plan, mesh)
    else:
        y = _TileConvolution.apply(tile, weight, bias, conv, geometry, plan, mesh)  # type: ignore[no-untyped-call]
    return from_tile(y, output, mesh)


_register(torch.conv1d, 1)
_register(torch.conv2d, 2)
_register(torch.conv3d, 3)
