"""Convolution on a split image.

The convolution of the tile runs while the halos travel; see `edges` for how the two are put
together. Where tiles are too odd for that (no pixels, no outputs), the tile is copied together
with its halo first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from spatialdl.comm.exchange import start_exchange
from spatialdl.comm.held import Held
from spatialdl.comm.once import once_differentiable
from spatialdl.comm.plan import Plan
from spatialdl.comm.repartition import shape_of, view_of
from spatialdl.layout import Box, Layout, Window
from spatialdl.mesh import Mesh
from spatialdl.spatial.channel_conv import check_channels, conv_of_channels, is_of_one_pixel
from spatialdl.spatial.conv_window import Convolution, conv_of_window
from spatialdl.spatial.dims import IMAGE
from spatialdl.spatial.edges import Cut, Strip, cut_dim
from spatialdl.spatial.later import later
from spatialdl.spatial.tensor import SpatialTensor, from_tile, register_op, to_tile
from spatialdl.spatial.window import autocast_cast, check_image, check_output, pair, window_move


@dataclass(frozen=True)
class Edge:
    """A halo strip of the tile: its pixels, and the outputs and taps of the kernel it meets."""

    box: Box
    rows: Strip
    cols: Strip

    def outputs_of(self, y: Tensor) -> Tensor:
        return y[..., self.rows.outputs, self.cols.outputs]

    def taps_of(self, weight: Tensor) -> Tensor:
        return weight[..., self.rows.taps, self.cols.taps]

    def read_from(self, strip: Tensor) -> Tensor:
        """The part of the strip's buffer where the taps lie."""
        rows, cols = self.rows, self.cols
        return strip[..., rows.first : rows.last, cols.first : cols.last]


@dataclass(frozen=True)
class TileGeometry:
    """One rank's tile: how to convolve it alone, and its halo strips."""

    rows: Cut
    cols: Cut
    edges: tuple[Edge | None, ...]  # before and after in rows, before and after in columns
    outside: tuple[tuple[int, tuple[slice, slice] | None, Box], ...]
    """Of each strip its number, its part outside the tile (None: all), and that part's box."""

    @property
    def padding(self) -> tuple[int, int]:
        return self.rows.padding, self.cols.padding

    def wanted(self, y: Tensor) -> Tensor:
        """The outputs that are this rank's, of those that the tile alone gives."""
        return y[
            ...,
            self.rows.skip : self.rows.skip + self.rows.outputs,
            self.cols.skip : self.cols.skip + self.cols.outputs,
        ]

    def strips(self, like: Tensor) -> list[Tensor]:
        """A zero buffer per strip; empty where there is none, so that all ranks keep as many."""
        return [
            like.new_zeros(shape_of(like, edge.box)) if edge else _no_strip(like.dtype, like.device)
            for edge in self.edges
        ]

    def held(self, strips: list[Tensor]) -> list[Held]:
        """What of the strips lies outside the tile, where halos arrive, with its boxes.

        Those above and below come first and hold the corners. A strip may reach over the tile and
        beyond, if a neighbour's outputs are this tile's: what comes from there is another strip's.
        """
        return [
            Held(strips[side] if inner is None else strips[side][(..., *inner)], box)
            for side, inner, box in self.outside
        ]


@lru_cache(maxsize=64)
def _no_strip(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Made once: even an empty tensor takes some microseconds of an exchange."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


def _outside(box: Box, own: Box, side: int) -> Box:
    """The part of `box` above, below, left or right (0 to 3) of the tile `own`."""
    if side == 0:
        return box._replace(row1=min(box.row1, own.row0))
    if side == 1:
        return box._replace(row0=max(box.row0, own.row1))
    if side == 2:
        return box._replace(col1=min(box.col1, own.col0))
    return box._replace(col0=max(box.col0, own.col1))


@lru_cache(maxsize=4096)
def tile_geometry(
    layout: Layout, output: Layout, rows: Window, cols: Window, part: int
) -> TileGeometry | None:
    """This rank's geometry; None, on all ranks alike, if any tile is too odd."""
    row_cuts = cut_dim(layout.rows, output.rows, rows)
    col_cuts = cut_dim(layout.cols, output.cols, cols)
    if row_cuts is None or col_cuts is None:
        return None
    row_part, col_part = divmod(part, layout.grid[1])
    row, col = row_cuts[row_part], col_cuts[col_part]
    sides = (
        (row.before, col.full),
        (row.after, col.full),
        (row.full, col.before),
        (row.full, col.after),
    )
    samples = layout.batch[-1]
    edges = tuple(
        Edge(Box(0, samples, r.start, r.stop, c.start, c.stop), r, c) if r and c else None
        for r, c in sides
    )
    return TileGeometry(row, col, edges, tuple(_outside_parts(edges, layout.boxes[part])))


def _outside_parts(
    edges: tuple[Edge | None, ...], own: Box
) -> Iterator[tuple[int, tuple[slice, slice] | None, Box]]:
    for side, edge in enumerate(edges):
        if edge is not None:
            box = _outside(edge.box, own, side)
            yield side, None if box == edge.box else box.slices_in(edge.box)[1:], box


class _TileConvolution(torch.autograd.Function):
    """Keeps the tile, which the network keeps anyhow, and the thin halo strips."""

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
        exchange = start_exchange(
            mesh.grid_comm,
            plan,
            [Held(tile, plan.own)],
            geometry.held(strips),
            device=tile.device,
            name="conv2d",
        )
        alone = conv.forward(tile, weight, bias, geometry.padding)
        y = geometry.wanted(alone)
        if y.shape != alone.shape:
            y = y.clone(memory_format=torch.contiguous_format)
        exchange.wait()
        for edge, strip in _present(geometry, strips):
            part = conv.forward(edge.read_from(strip), edge.taps_of(weight), None, (0, 0))
            edge.outputs_of(y).add_(part)
        ctx.save_for_backward(tile, weight, *strips)
        ctx.conv, ctx.geometry, ctx.plan, ctx.mesh = conv, geometry, plan, mesh
        ctx.alone_shape, ctx.parameter = alone.shape, weight
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tile, weight, *strips = ctx.saved_tensors
        conv, geometry, plan = ctx.conv, ctx.geometry, ctx.plan
        needs_tile, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        waiting = later(ctx.parameter) if needs_weight else None
        needs_weight = needs_weight and waiting is None
        grad_strips, weight_parts = _strip_gradients(
            conv, geometry, grad, weight, strips, needs_tile, needs_weight
        )
        arrivals = [
            Held(grad.new_empty(shape_of(tile, piece.box)), piece.box) for piece in plan.sends
        ]
        exchange = None
        if needs_tile:
            exchange = start_exchange(
                ctx.mesh.grid_comm,
                plan,
                geometry.held(grad_strips),
                arrivals,
                device=tile.device,
                adjoint=True,
                name="conv2d",
            )
        if grad.shape != ctx.alone_shape:
            padded = grad.new_zeros(ctx.alone_shape)
            geometry.wanted(padded).copy_(grad)
            grad = padded
        if waiting is not None:
            what = (conv, geometry, grad, tile, weight, strips)
            waiting.leave(ctx.parameter, (grad, tile, *strips), partial(_weight_gradient, *what))
        needs = (needs_tile, needs_weight, needs_bias and waiting is None)
        grad_tile, grad_weight, grad_bias = conv.backward(
            grad, tile, weight, geometry.padding, needs
        )
        if waiting is not None and needs_bias:
            # not together with the tile's, or the weight's would be worked out for it
            grad_bias = grad.sum((0, 2, 3))
        if grad_weight is not None:
            _add_parts(grad_weight, weight_parts)
        if exchange is not None and grad_tile is not None:
            exchange.wait()
            for arrival, box in arrivals:
                view_of(grad_tile, plan.own, box).add_(arrival)
        return grad_tile, grad_weight, grad_bias, None, None, None, None


def _add_parts(grad_weight: Tensor, parts: Sequence[tuple[Edge, Tensor]]) -> None:
    for edge, part in parts:
        edge.taps_of(grad_weight).add_(part)


def _weight_gradient(
    conv: Convolution,
    geometry: TileGeometry,
    grad: Tensor,
    tile: Tensor,
    weight: Tensor,
    strips: list[Tensor],
) -> Tensor:
    """By itself, when the tile's is long known.

    Args:
        grad: of all outputs that the tile alone gives.
    """
    own = geometry.wanted(grad)
    parts = _strip_gradients(conv, geometry, own, weight, strips, False, True)[1]
    grad_weight = conv.backward(grad, tile, weight, geometry.padding, (False, True, False))[1]
    assert grad_weight is not None
    _add_parts(grad_weight, parts)
    return grad_weight


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
    """Gradients of the halo strips, and what the strips add to the weight's gradient."""
    grad_strips = [torch.zeros_like(strip) for strip in strips]
    weight_parts = []
    for (edge, strip), (_, grad_strip) in zip(
        _present(geometry, strips), _present(geometry, grad_strips), strict=True
    ):
        grad_read, grad_taps, _ = conv.backward(
            edge.outputs_of(grad),
            edge.read_from(strip),
            edge.taps_of(weight),
            (0, 0),
            (needs_tile, needs_weight, False),
        )
        if grad_read is not None:
            edge.read_from(grad_strip).copy_(grad_read)
        if grad_taps is not None:
            weight_parts.append((edge, grad_taps))
    return grad_strips, weight_parts


def _windows(
    x: SpatialTensor, weight: Tensor, stride: Any, padding: Any, dilation: Any
) -> tuple[tuple[Window, Window], tuple[int, int]]:
    """The windows, and the size (H, W) of the output."""
    steps, spread = pair(stride), pair(dilation)
    if isinstance(padding, str):
        if padding not in ("same", "valid"):
            raise ValueError(f"conv2d: padding must be 'same', 'valid' or numbers, got {padding!r}")
        if padding == "same" and steps != (1, 1):
            raise ValueError("conv2d: padding='same' needs stride 1")
        same = padding == "same"
        before = [
            d * (k - 1) // 2 if same else 0 for k, d in zip(weight.shape[2:], spread, strict=True)
        ]
    else:
        same, before = False, list(pair(padding))
    rows, cols = (
        Window(int(k), s, p, d)
        for k, s, p, d in zip(weight.shape[2:], steps, before, spread, strict=True)
    )
    height, width = x.shape[-2:]
    size = (height, width) if same else (rows.output_size(height), cols.output_size(width))
    return (rows, cols), size


def _has_large_weight(input: SpatialTensor, weight: Tensor) -> bool:
    """Whether copying the taps that halo strips meet costs more than copying the tile."""
    return weight.numel() * input.mesh.grid_comm.size > input.numel()


@register_op(torch.conv2d, split=("input",))
def conv2d(
    input: SpatialTensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    if input.spatial_dims != IMAGE and is_of_one_pixel(weight, stride, padding):
        return conv_of_channels(torch.conv2d, input, weight, bias, groups)
    check_image("conv2d", input)
    check_channels("conv2d", input, weight, groups)
    (rows, cols), size = _windows(input, weight, stride, padding, dilation)
    check_output("conv2d", input, size)
    output, plan = window_move(input.spatial_layout, rows, cols, size, input.mesh.part)
    conv = Convolution((rows.stride, cols.stride), (rows.dilation, cols.dilation), groups)
    geometry = tile_geometry(input.spatial_layout, output, rows, cols, input.mesh.part)
    tile, weight, bias = autocast_cast(to_tile(input), weight, bias)
    mesh = input.mesh
    if geometry and not plan.talks and geometry.rows.skip == geometry.cols.skip == 0:
        y = geometry.wanted(conv.forward(tile, weight, bias, geometry.padding))
    elif geometry is None or _has_large_weight(input, weight):
        y = conv_of_window(tile, weight, bias, conv, mesh.own_box(output), plan, mesh)
    else:
        y = _TileConvolution.apply(tile, weight, bias, conv, geometry, plan, mesh)  # type: ignore[no-untyped-call]
    return from_tile(y, output, mesh)
