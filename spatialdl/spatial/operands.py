"""Brings the operands of a pointwise operation to one layout.

Scalars stay unchanged, tensors of size 1 in the spatial dims are broadcast, whole images are cut
to the own box, and split images on another layout are repartitioned.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from spatialdl.layout.layout import Interval
from spatialdl.spatial.dims import SpatialDims, split_tokens
from spatialdl.spatial.gradient_checks import skip_comparison
from spatialdl.spatial.random.composite import inside
from spatialdl.spatial.table import any_other, refusal, register_op
from spatialdl.spatial.tensor import SpatialTensor, are_aligned, from_tile, on_layout, to_tile
from spatialdl.torch_internals import tree_flatten, tree_map


@register_op(any_other, prefix=True)
def on_one_layout(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of `func` with all tensors brought to one shape and layout."""
    if len(args) == 2 and not kwargs and _are_alike(*args):
        return args, kwargs
    is_flat = not kwargs and not any(isinstance(value, list | tuple | dict) for value in args)
    flat = args if is_flat else tree_flatten((args, kwargs))[0]
    operands = [value for value in flat if isinstance(value, Tensor)]
    split = [value for value in operands if isinstance(value, SpatialTensor)]
    if not split or len(operands) == 1:
        return args, kwargs
    written = _write_targets(func, args, kwargs)
    if any(not isinstance(value, SpatialTensor) for value in written):
        raise refusal(func, split, "a split tensor cannot be written to a whole one in place")
    shape = _broadcast_shape(func, split, operands)
    target = _target(split, written, shape)
    if all(_fits(value, target, shape) for value in operands):
        return args, kwargs

    def lift_one(value: Any) -> Any:
        left_alone = not isinstance(value, Tensor) or any(value is target for target in written)
        return value if left_alone else lift(func, value, target, shape)

    return tree_map(lift_one, (args, kwargs))  # type: ignore[no-any-return]


def _are_alike(x: Any, y: Any) -> bool:
    """Whether two operands are split tensors of one shape and layout, the common case."""
    both = type(x) is SpatialTensor and type(y) is SpatialTensor
    return both and x._tile.shape == y._tile.shape and are_aligned(x, y)


@register_op(Tensor.backward, prefix=True)
def backward(self: Tensor, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
    """Backward, with a whole gradient of a split image cut to the own box."""
    skip_comparison([self])
    if isinstance(self, SpatialTensor) and gradient is not None:
        gradient = lift(Tensor.backward, gradient, self, self.shape)
    run = inside(Tensor.backward)
    if run is not None:
        run(self, gradient, *args, **kwargs)


def _write_targets(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that `func` writes to: its first argument in place, or ``out``."""
    name = getattr(func, "__name__", "")
    ends_in_place = name.endswith("_") and not name.endswith("__")
    in_place = ends_in_place or name in ("__setitem__", "__set__")
    targets = tree_flatten((args[:1] if in_place else (), kwargs.get("out")))[0]
    return [target for target in targets if isinstance(target, Tensor)]


def _broadcast_shape(func: Any, split: list[SpatialTensor], operands: list[Tensor]) -> torch.Size:
    if all(value.shape == operands[0].shape for value in operands):
        return operands[0].shape  # torch.broadcast_shapes is slower than many operations
    try:
        return torch.Size(torch.broadcast_shapes(*(value.shape for value in operands)))  # type: ignore[no-untyped-call]
    except RuntimeError:
        shapes = ", ".join(str(tuple(value.shape)) for value in operands)
        raise refusal(func, split, f"operands of shapes {shapes} do not broadcast") from None


def _target(split: list[SpatialTensor], written: list[Tensor], shape: torch.Size) -> SpatialTensor:
    """The operand that determines the layout: a written one, else the first of full size."""
    for value in written:
        if isinstance(value, SpatialTensor):
            return value
    return next((x for x in split if _is_full_size(x, shape)), split[0])


def _is_full_size(x: SpatialTensor, shape: torch.Size) -> bool:
    return all(x.shape[dim] == shape[dim] for dim in x.spatial_dims.at)


def _fits(value: Tensor, target: SpatialTensor, shape: torch.Size) -> bool:
    if isinstance(value, SpatialTensor):
        return value.shape == shape and are_aligned(value, target)
    return value.dim() == 0 and not value.requires_grad


def lift(func: Any, value: Tensor, target: SpatialTensor, shape: torch.Size) -> Tensor:
    """`value` broadcast to `shape` and split as `target` is.

    A scalar that needs no gradient is returned unchanged.
    """
    if isinstance(value, SpatialTensor):
        if value is target and value.shape == shape:
            return value
        value = _on_layout_of(func, value, target, shape)
    if isinstance(value, SpatialTensor):
        tile = to_tile(value)
        box = target.mesh.own_box(target.spatial_layout)
        local = target.spatial_dims.of_part(target.mesh.part).sizes(shape, box.shape[1:])
        return from_tile(
            tile.expand(local), target.spatial_layout, target.mesh, target.spatial_dims
        )
    if value.dim() == 0:
        if not value.requires_grad:
            return value
        # A trained scalar: broadcast to an image, its gradient is a sum over the own tile. The cast
        # keeps PyTorch's rule that scalars do not promote the dtype of the other operand.
        if value.is_floating_point() == target.is_floating_point():
            value = value.to(target.dtype)
    return own_box_of(func, value, target, shape)


def _on_layout_of(
    func: Any, value: SpatialTensor, target: SpatialTensor, shape: torch.Size
) -> Tensor:
    if value.spatial_dims == target.spatial_dims and _is_full_size(value, shape):
        return on_layout(value, target.spatial_layout)
    if any(value.shape[dim] == 1 for dim in value.spatial_dims.at):
        return value.full_tensor()  # one row or one column: small
    dims = value.spatial_dims
    description = f"another split tensor of shape {tuple(value.shape)}"
    if dims.describe() == target.spatial_dims.describe():
        advice = f"{description} is split {value.describe()}; call full_tensor() on it"
    else:
        advice = (
            f"{description}{dims.describe()} does not match one of shape {tuple(target.shape)}; "
            "permute it so that the spatial dims are at the same dims"
        )
    raise refusal(func, [target], advice)


def own_box_of(func: Any, value: Tensor, target: SpatialTensor, shape: torch.Size) -> SpatialTensor:
    """A whole tensor split as `target` is: cut to the own box, broadcast to `shape`."""
    dims, mesh, layout = target.spatial_dims, target.mesh, target.spatial_layout
    value = value.reshape((1,) * (len(shape) - value.dim()) + tuple(value.shape))
    box = mesh.own_box(layout)
    for dim in dims.at:
        if value.shape[dim] not in (1, target.shape[dim]):
            raise refusal(
                func,
                [target],
                f"its operand of shape {tuple(value.shape)} does not broadcast to the global shape "
                f"{tuple(target.shape)}; call full_tensor() before it, or register a handler with "
                "spatialdl.register_op",
            )
    if mesh.agreement is not None and all(value.shape[dim] > 1 for dim in dims.at):
        mesh.agreement.operand(value)
    tile = cut(value, dims, layout.size, box.spatial, mesh.part)
    local = dims.of_part(mesh.part).sizes(shape, box.shape[1:])
    return from_tile(tile.expand(local), layout, mesh, dims)


def unflatten(whole: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    split: Tensor = whole.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return split


def cut(
    whole: Tensor,
    dims: SpatialDims,
    size: Sequence[int],
    intervals: Sequence[Interval],
    part: int,
) -> Tensor:
    """The box of a whole tensor with the spatial dims `dims`; dims of size 1 stay.

    Args:
        size: of the whole image.
        intervals: the box.
        part: the owner of the box.
    """
    if dims.extra_tokens and whole.shape[dims.at[0]] > 1:
        before, pixels, after = split_tokens(whole, dims)
        pixels = cut(pixels, dims.of_pixels, size, intervals, part)
        if part:
            before, after = (x.narrow(dims.at[0], 0, 0) for x in (before, after))
        return torch.cat([before, pixels, after], dims.at[0])
    each = list(zip(dims.at, zip(dims.outer, size, intervals, strict=True), strict=True))
    for dim in sorted(set(dims.at)):
        held = [part for at, part in each if at == dim]
        factors = [n for outer, extent, _ in held for n in (outer, extent)]
        if whole.shape[dim] == 1 < prod(factors):
            continue
        first = whole.dim() + dim
        split = whole if factors[:-1] == [1] else unflatten(whole, first, tuple(factors))
        step = split.dim() - whole.dim()
        for number, (_, _, (start, stop)) in enumerate(held):
            place = first + 2 * number + 1 if step else first
            split = split.narrow(place, start, stop - start)
        whole = split.flatten(first, first + step) if step else split
    return whole
