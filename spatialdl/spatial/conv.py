"""Convolution on a split image.

The convolution of the tile overlaps with the halo exchange; see `halo_geometry` for how the results
are combined. If any tile has no pixels or no outputs, the tile is copied together with its halo
first.

Convolutions that read no neighbours along the spatial dims are local. Kernels of one pixel mix
channels, of tokens (N, C, H*W) and of windows (N, C, pixels, windows). Larger kernels are local if
each window is a sample, (N*H*W, C, rows, columns).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.boxed import BoxedTensor, Exchange
from spatialdl.comm.exchange import start_exchange
from spatialdl.comm.mesh import Mesh
from spatialdl.comm.once import once_differentiable
from spatialdl.comm.plan import Plan
from spatialdl.comm.repartition import add_up, empty_for, rooms_back
from spatialdl.common.text import counted
from spatialdl.layout.layout import Layout, Window
from spatialdl.spatial.autocast import autocast_cast
from spatialdl.spatial.halo_geometry import Edge, TileGeometry, tile_geometry
from spatialdl.spatial.meta import meta_result
from spatialdl.spatial.span import split_dims, without_dims
from spatialdl.spatial.tensor import SpatialTensor, from_tile, refusal, register_op, to_tile
from spatialdl.spatial.window import (
    check_image,
    empty_output,
    per_dim,
    plan_windows,
    windows_of,
)
from spatialdl.spatial.window_function import Convolution, apply_to_window

# --- without neighbours


def is_of_one_pixel(weight: Tensor, stride: Any, padding: Any) -> bool:
    """Whether each output of a convolution reads only the pixel at its position."""
    no_padding = padding in ("same", "valid") or _are_all(padding, 0)
    return _are_all(weight.shape[2:], 1) and _are_all(stride, 1) and no_padding


def _are_all(values: Any, wanted: int) -> bool:
    return all(v == wanted for v in ([values] if isinstance(values, int) else values))


def check_channels(name: str, input: Tensor, weight: Tensor, groups: int) -> None:
    """Refuse a weight for a different number of channels, as PyTorch does."""
    if input.shape[1] != weight.shape[1] * groups:
        raise ValueError(
            f"{name}: the image has {input.shape[1]} channels, but the weight "
            f"{tuple(weight.shape)} with groups={groups} expects {weight.shape[1] * groups}"
        )


def conv_of_channels(
    function: Any, input: SpatialTensor, weight: Tensor, bias: Tensor | None, groups: int
) -> Tensor:
    """`function` (`torch.conv1d`, ...) with a kernel of one pixel."""
    if input.dim() != weight.dim() or 1 in split_dims(input):
        return _conv_of_tokens(function, input, weight, bias, groups)
    check_channels(function.__name__, input, weight, groups)
    return conv_of_samples(function, input, weight, bias, groups=groups)


def _conv_of_tokens(
    function: Any, input: SpatialTensor, weight: Tensor, bias: Tensor | None, groups: int
) -> Tensor:
    """A convolution whose channels are the tokens (an MLP mixer): a linear layer over them."""
    if input.dim() != weight.dim() or split_dims(input) != (1,) or groups > 1:
        raise refusal(function, [input], "dim 1 (channels) must not be split; permute it")
    check_channels(function.__name__, input, weight, groups)
    return F.linear(input.movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)


def conv_of_samples(
    function: Any, input: SpatialTensor, weight: Tensor, bias: Tensor | None, **steps: Any
) -> SpatialTensor:
    """`function` on every tile, if no convolved dim is split."""
    # Cast here, so that ranks with and without pixels have results of one dtype.
    tile, weight, bias = autocast_cast(to_tile(input), weight, bias)
    if tile.numel() > 0:
        y = function(tile, weight, bias, **steps)
    else:
        size = tile.shape[2:]
        if tile.shape[0] == 0:
            one = tile.new_empty(1, *tile.shape[1:])
            size = meta_result(function, one, weight, bias, **steps).shape[2:]
        shape = (tile.shape[0], weight.shape[0], *size)
        y = empty_output(shape, tile, weight, *(() if bias is None else (bias,)))
    return without_dims(input, y, ())


def passes_unsplit_dims(input: SpatialTensor, weight: Tensor, stride: Any, padding: Any) -> bool:
    """Whether a convolution covers all spatial dims and dims that are not split.

    The latter must have a kernel of size 1, stride 1 and no padding.
    """
    split, dims = split_dims(input), weight.dim() - 2
    others = [n - 2 for n in range(2, weight.dim()) if n not in split]
    if input.dim() != weight.dim() or not others or min(split) < 2:
        return False
    return input.spatial_dims.are_separate and all(
        weight.shape[2 + n] == per_dim(stride, dims)[n] == 1
        and (isinstance(padding, str) or per_dim(padding, dims)[n] == 0)
        for n in others
    )


def conv_beside(
    input: SpatialTensor, weight: Tensor, bias: Tensor | None, steps: Sequence[Any], groups: int
) -> Tensor:
    """Convolve with one dim less: entries of a dim that is not split become samples.

    Args:
        steps: stride, padding and dilation.
    """
    dims = weight.dim() - 2
    place = next(n for n in range(2, weight.dim()) if n not in split_dims(input))
    fewer = [
        step if isinstance(step, str) else _without(per_dim(step, dims), place - 2)
        for step in steps
    ]
    function: Any = {1: torch.conv1d, 2: torch.conv2d}[dims - 1]
    x = input.movedim(place, 1).flatten(0, 1)
    y = function(x, weight.squeeze(place), bias, *fewer, groups)
    samples: Tensor = y.unflatten(0, (input.shape[0], input.shape[place]))
    return samples.movedim(1, place)


def _without(values: tuple[int, ...], place: int) -> tuple[int, ...]:
    return (*values[:place], *values[place + 1 :])


# --- with halos


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
        own, outside = [BoxedTensor(tile, plan.own)], geometry.outside_strips(strips)
        halo = Exchange(plan, own, outside, tile.device, name=conv.name)
        exchange = start_exchange(mesh.grid_comm, halo)
        alone = conv.forward(tile, weight, bias)
        y = geometry.select_outputs(alone)
        if y.shape != alone.shape:
            y = y.clone()  # preserves the memory format
        exchange.wait()
        for edge, strip in _present(geometry, strips):
            read, taps = edge.read_from(strip), edge.taps_of(weight)
            part = conv.without_padding.forward(read, taps, None)
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
            outside, name = geometry.outside_strips(grad_strips), conv.name
            halo = Exchange(plan, outside, arrivals, tile.device, adjoint=True, name=name)
            exchange = start_exchange(ctx.mesh.grid_comm, halo)
        if grad.shape != ctx.alone_shape:
            padded = empty_for(grad, ctx.alone_shape).zero_()
            geometry.select_outputs(padded).copy_(grad)
            grad = padded
        needs = (needs_tile, needs_weight, needs_bias)
        grad_tile, grad_weight, grad_bias = conv.backward(grad, tile, weight, needs)
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
        grad_read, grad_taps, _ = conv.without_padding.backward(
            edge.outputs_of(grad),
            edge.read_from(strip),
            edge.taps_of(weight),
            (needs_tile, needs_weight, False),
        )
        if grad_read is not None:
            edge.read_from(grad_strip).copy_(grad_read)
        if grad_taps is not None:
            weight_parts.append((edge, grad_taps))
    return grad_strips, weight_parts


def _convolution_windows(
    x: SpatialTensor, weight: Tensor, stride: Any, padding: Any, dilation: Any
) -> tuple[tuple[Window, ...], tuple[int, ...] | None]:
    """The windows, and the size of the output if it is that of the input."""
    dims = weight.dim() - 2
    name, before, size = f"conv{dims}d", padding, None
    if isinstance(padding, str):
        if padding not in ("same", "valid"):
            raise ValueError(f"{name}: padding must be 'same', 'valid' or numbers, got {padding!r}")
        before = 0
    if padding == "same":
        if max(per_dim(stride, dims)) > 1:
            raise ValueError(f"{name}: padding='same' needs stride 1")
        reach = zip(weight.shape[2:], per_dim(dilation, dims), strict=True)
        before, size = [step * (int(taps) - 1) // 2 for taps, step in reach], tuple(x.shape[2:])
    return windows_of(name, dims, weight.shape[2:], stride, before, dilation), size


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
        windows, size = _convolution_windows(input, weight, stride, padding, dilation)
        output, plan = plan_windows(function.__name__, input, windows, size=size)
        return _convolve(input, weight, bias, groups, windows, output, plan)


def _convolve(
    input: SpatialTensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    windows: tuple[Window, ...],
    output: Layout,
    plan: Plan,
) -> Tensor:
    mesh = input.mesh
    geometry = tile_geometry(input.spatial_layout, output, windows, mesh.part)
    conv = Convolution(
        stride=tuple(window.stride for window in windows),
        dilation=tuple(window.dilation for window in windows),
        groups=groups,
        padding=geometry.padding if geometry else (0,) * len(windows),
    )
    tile, weight, bias = autocast_cast(to_tile(input), weight, bias)
    if geometry and not plan.communicates and not geometry.skips:
        y = geometry.select_outputs(conv.forward(tile, weight, bias))
    elif geometry is None or tile.is_complex() or _has_large_weight(input, weight):
        samples, *extents = mesh.own_box(output).shape
        shape = (samples, weight.shape[0], *extents)
        y = apply_to_window(conv.without_padding, shape, tile, weight, bias, plan, mesh)
    else:
        y = _TileConvolution.apply(tile, weight, bias, conv, geometry, plan, mesh)  # type: ignore[no-untyped-call]
    return from_tile(y, output, mesh)


_register(torch.conv1d, 1)
_register(torch.conv2d, 2)
_register(torch.conv3d, 3)
