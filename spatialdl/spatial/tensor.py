"""SpatialTensor: a tensor of which every rank holds a tile.

PyTorch, and the user's model, see the global size; the tile is inside. Three ways lead through it:

- ``__torch_function__`` looks the called function up among the *handlers* (convolution, pooling,
  norm ...), which see all arguments, take the tile out, let PyTorch differentiate the local work,
  and put the result back;
- pointwise operations differentiate on the wrapper itself and reach ``__torch_dispatch__``, which
  runs them on the tiles;
- everything else reaches ``__torch_dispatch__`` too and is refused there. What no table knows
  never runs on a raw tile, because there it would give a wrong number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from spatialdl.comm.plan import plan_for
from spatialdl.comm.repartition import repartition
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.layout import Layout
from spatialdl.mesh import Mesh

Handler = TypeVar("Handler", bound=Callable[..., Any])
HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {}

aten = torch.ops.aten

# not pointwise by PyTorch's tags, yet each tile can be treated by itself
_PER_TILE = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.copy_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten._to_copy.default,
    aten.elu_backward.default,
    aten.hardshrink_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardswish.default,
    aten.hardswish_.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
    aten.mish_backward.default,
    aten.softplus_backward.default,
    aten.softshrink_backward.default,
}


class SpatialTensor(torch.Tensor):
    """A tensor (N, ..., H, W) cut along H and W over the ranks of a mesh.

    `shape` and `size()` are global, as DTensor's. Make one with `spatialdl.shard` or
    `spatialdl.from_local`.

    Attributes:
        spatial_layout: which rank holds which box.
        mesh: the ranks.
    """

    _tile: Tensor
    spatial_layout: Layout
    mesh: Mesh

    __slots__ = ("_tile", "mesh", "spatial_layout")

    @staticmethod
    def __new__(
        cls, tile: Tensor, layout: Layout, mesh: Mesh, requires_grad: bool = False
    ) -> SpatialTensor:
        samples, height, width = layout.size
        size = (samples, *tile.shape[1:-2], height, width)
        wrapper: SpatialTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            size,
            strides=_strides(size, tile),
            dtype=tile.dtype,
            device=tile.device,
            requires_grad=requires_grad,
        )
        wrapper._tile = tile
        wrapper.spatial_layout = layout
        wrapper.mesh = mesh
        return wrapper

    def to_local(self) -> Tensor:
        """This rank's tile; differentiable."""
        return to_tile(self)

    def full_tensor(self) -> Tensor:
        """The whole tensor, the same on every rank; every rank of the grid must call it.

        Differentiable: backward adds up what all ranks make of it.
        """
        layout = self.spatial_layout
        plan = plan_for(layout.boxes, (layout.whole,) * len(layout.boxes), self.mesh.part)
        return repartition(to_tile(self), self.mesh.grid_comm, plan, name="full_tensor")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"SpatialTensor(shape={tuple(self.shape)}, tile={tuple(self._tile.shape)}, "
            f"grid={self.mesh.grid}, dtype={self.dtype}, requires_grad={self.requires_grad})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> SpatialTensor:
        if not self.is_leaf:
            raise RuntimeError("only leaf tensors can be deep-copied; call detach() first")
        copied = SpatialTensor(
            self._tile.clone(), self.spatial_layout, self.mesh, self.requires_grad
        )
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refusal(torch.save, [self], "save to_local() or full_tensor() instead")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        if len(args) + len(kwargs) > 1 and func is not torch.autograd.grad:
            args, kwargs = _on_one_layout(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is aten.view.default and tuple(args[1]) == tuple(args[0].shape):
            func, args = aten.alias.default, args[:1]  # how autograd hands an input on
        tags = func.tags
        pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
        if pointwise or func in _PER_TILE or _sums_channels(func, args):
            return _on_tiles(func, args, kwargs or {})
        raise refusal(func, _spatial(tree_flatten((args, kwargs))[0]))


def _strides(size: tuple[int, ...], tile: Tensor) -> tuple[int, ...]:
    """Strides of a global tensor in the memory format of its tile."""
    strides = [0] * len(size)
    channels_last = (
        tile.dim() == 4
        and tile.is_contiguous(memory_format=torch.channels_last)
        and not tile.is_contiguous()
    )
    step = 1
    for dim in (1, 3, 2, 0) if channels_last else reversed(range(len(size))):
        strides[dim] = step
        step *= max(size[dim], 1)
    return tuple(strides)


def _spatial(values: Iterable[Any]) -> list[SpatialTensor]:
    return [value for value in values if isinstance(value, SpatialTensor)]


def refusal(func: Any, operands: list[SpatialTensor], advice: str = "") -> UnsupportedSpatialOp:
    """The error that names the operation, the layout and what to do."""
    name = getattr(func, "__name__", None) or str(func)
    if isinstance(func, torch._ops.OpOverload):
        name = str(func)
    where = f" on an image split {operands[0].spatial_layout.describe()}" if operands else ""
    advice = advice or (
        "call full_tensor() before it to gather the image on every rank, or teach it with "
        "spatialdl.register_op"
    )
    return UnsupportedSpatialOp(f"{name} cannot be done{where}: {advice}")


# --- pointwise operations on tiles


def _sums_channels(func: Any, args: Any) -> bool:
    """Does `func` sum over channels only? So do gradients of operands that were broadcast."""
    if func is not aten.sum.dim_IntList or len(args) < 2 or not args[1]:
        return False
    dims = {dim % args[0].dim() for dim in args[1]}
    keepdim = len(args) > 2 and args[2]
    return keepdim and not dims & {0, args[0].dim() - 2, args[0].dim() - 1}


def _on_tiles(func: Any, args: Any, kwargs: Any) -> Any:
    flat = tree_flatten((args, kwargs))[0]
    operands = _spatial(flat)
    first = operands[0]
    for value in flat:
        if isinstance(value, SpatialTensor):
            if value.spatial_layout != first.spatial_layout:
                raise refusal(func, operands, "its operands are split differently")
        elif isinstance(value, Tensor) and value.dim() > 0:
            raise refusal(func, operands, "it mixes split and whole tensors")
    tile_args, tile_kwargs = tree_map(
        lambda value: value._tile if isinstance(value, SpatialTensor) else value, (args, kwargs)
    )
    result = func(*tile_args, **tile_kwargs)
    if func._schema.is_mutable:
        # below autograd nobody counts: without this a convolution that has kept the tile would
        # not notice that it was overwritten, and give a wrong gradient
        torch.autograd.graph.increment_version(args[0]._tile)
        return args[0]
    return tree_map(
        lambda value: (
            SpatialTensor(value, first.spatial_layout, first.mesh)
            if isinstance(value, Tensor)
            else value
        ),
        result,
    )


def _on_one_layout(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Bring all tensor operands of a pointwise operation onto the layout of the first."""
    flat = tree_flatten((args, kwargs))[0]
    operands = _spatial(flat)
    if not operands:
        return args, kwargs
    first = operands[0]
    if any(not isinstance(value, SpatialTensor) for value in _written(func, args, kwargs)):
        raise refusal(func, operands, "a whole tensor cannot take a split one in place")
    mixed = any(
        isinstance(value, Tensor)
        and (value.dim() > 0 or value.requires_grad)
        and not (isinstance(value, SpatialTensor) and value.spatial_layout == first.spatial_layout)
        for value in flat
    )
    if not mixed:
        return args, kwargs
    return tree_map(  # type: ignore[no-any-return]
        lambda value: _like(first, value, func) if isinstance(value, Tensor) else value,
        (args, kwargs),
    )


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that `func` writes into: its first argument in place, or ``out``."""
    name = getattr(func, "__name__", "")
    ends_in_place = name.endswith("_") and not name.endswith("__")
    in_place = ends_in_place or name in ("__setitem__", "__set__")
    targets = tree_flatten((args[:1] if in_place else (), kwargs.get("out")))[0]
    return [target for target in targets if isinstance(target, Tensor)]


def _like(first: SpatialTensor, value: Tensor, func: Any) -> Tensor:
    if isinstance(value, SpatialTensor):
        return redistribute(value, first.spatial_layout, first.mesh)
    if value.dim() > 0:
        return _own_box_of(value, first, func)
    if not value.requires_grad:
        return value
    # a trained scalar: seen as an image its gradient is a sum over the own tile; and a scalar does
    # not widen the type of what it is combined with
    same_kind = value.is_floating_point() == first.is_floating_point()
    return _own_box_of(value.to(first.dtype) if same_kind else value, first, func)


def _own_box_of(value: Tensor, like: SpatialTensor, func: Any) -> SpatialTensor:
    """A whole tensor beside a split one: broadcast, or cut to the own box."""
    layout = like.spatial_layout
    split = {0: 0, like.dim() - 2: 1, like.dim() - 1: 2}
    box = like.mesh.own_box(layout)
    missing = like.dim() - value.dim()
    if missing < 0:
        raise refusal(func, [like], f"a whole tensor of shape {tuple(value.shape)} beside it")
    value = value.reshape((1,) * missing + tuple(value.shape))
    for dim, axis in split.items():
        count = layout.size[axis]
        start, extent = box[2 * axis], box.shape[axis]
        if value.shape[dim] == 1:
            shape = [-1] * value.dim()
            shape[dim] = extent
            value = value.expand(shape)
        elif value.shape[dim] == count:
            value = value.narrow(dim, start, extent)
        else:
            raise refusal(
                func,
                [like],
                f"its operand of shape {tuple(value.shape[missing:])} is no image of the global "
                f"size {tuple(like.shape)} and does not broadcast to one; call full_tensor() "
                "before it, or teach it with spatialdl.register_op",
            )
    return from_tile(value, layout, like.mesh)


# --- between the wrapper and its tile


class _ToTile(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: SpatialTensor) -> Tensor:
        ctx.layout, ctx.mesh = x.spatial_layout, x.mesh
        return x._tile.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> SpatialTensor:
        return SpatialTensor(grad, ctx.layout, ctx.mesh)


class _FromTile(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tile: Tensor, layout: Layout, mesh: Mesh) -> SpatialTensor:
        return SpatialTensor(tile.detach(), layout, mesh)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not isinstance(grad, SpatialTensor):
            raise UnsupportedSpatialOp(
                "the gradient of a split image must be split as well: pass a SpatialTensor to "
                "backward()"
            )
        return grad._tile, None, None


def to_tile(x: SpatialTensor) -> Tensor:
    """The tile of `x`, for local work that autograd differentiates."""
    tile: Tensor = _ToTile.apply(x)  # type: ignore[no-untyped-call]
    return tile


def from_tile(tile: Tensor, layout: Layout, mesh: Mesh) -> SpatialTensor:
    """The split image of which this rank holds `tile`; the inverse of `to_tile`."""
    x: SpatialTensor = _FromTile.apply(tile, layout, mesh)  # type: ignore[no-untyped-call]
    return x


def redistribute(x: SpatialTensor, layout: Layout, mesh: Mesh) -> SpatialTensor:
    """`x` on another layout of the same image.

    Raises:
        UnsupportedSpatialOp: if the two images have different sizes.
    """
    if x.spatial_layout == layout:
        return x
    if x.spatial_layout.size != layout.size:
        raise UnsupportedSpatialOp(
            f"two split images of different sizes meet: {x.spatial_layout.describe()} and "
            f"{layout.describe()}; broadcasting over a split dim is not supported"
        )
    plan = plan_for(x.spatial_layout.boxes, layout.boxes, mesh.part)
    moved = repartition(to_tile(x), mesh.grid_comm, plan, name="redistribute")
    return from_tile(moved, layout, mesh)


# --- the table of operations


def register_op(torch_function: Callable[..., Any]) -> Callable[[Handler], Handler]:
    """Teach SpatialTensor one more operation.

    The decorated function takes the arguments of `torch_function` (a function of ``torch``,
    ``torch.nn.functional`` or a method of ``torch.Tensor``) whenever one of them is a
    SpatialTensor, and does it on a split image, or raises `UnsupportedSpatialOp`.

    Example:
        >>> @spatialdl.register_op(torch.nn.functional.my_op)
        ... def my_op(x, inplace=False):
        ...     return spatialdl.from_local(...)
    """

    def register(handler: Handler) -> Handler:
        HANDLERS[torch_function] = handler
        return handler

    return register


def _refuse(func: Callable[..., Any], advice: str) -> None:
    def handler(*args: Any, **kwargs: Any) -> Any:
        raise refusal(func, _spatial(tree_flatten((args, kwargs))[0]), advice)

    HANDLERS[func] = handler


for _func in (
    Tensor.numpy,
    Tensor.item,
    Tensor.tolist,
    Tensor.data_ptr,
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.share_memory_,
    Tensor.apply_,
    Tensor.map_,
):
    _refuse(_func, "take to_local() for this rank's tile, full_tensor() for the whole")
for _equal in (Tensor.equal, torch.equal):
    _refuse(_equal, "ranks would answer differently; compare what full_tensor() gives")
