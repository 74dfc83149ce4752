"""SpatialTensor: a tensor of which every rank holds a tile.

PyTorch and the user's model see the global size; the wrapper holds the tile. Operations take one
of three paths:

- ``__torch_function__`` looks up the *handler* of the called function (convolution, pooling,
  norm, ...). A handler receives all arguments, takes the tile out, lets PyTorch differentiate the
  local computation, and wraps the result.
- Pointwise operations are differentiated on the wrapper and reach ``__torch_dispatch__``, which
  runs them on the tiles.
- All other operations reach ``__torch_dispatch__`` too and are refused there. An unregistered
  operation never runs on a raw tile, because its result would be wrong.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.comm.agreement import Agreement
from spatialdl.comm.mesh import Mesh
from spatialdl.comm.once import once_differentiable
from spatialdl.comm.plan import Plan, plan_for
from spatialdl.comm.repartition import repartition
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.layout.layout import Layout
from spatialdl.spatial.autocast import as_autocast
from spatialdl.spatial.dims import (
    SpatialDims,
    from_image,
    image_dims,
    move_tokens,
    samples_of,
    to_image,
)
from spatialdl.spatial.gradient_checks import hook_result
from spatialdl.spatial.random.composite import functions_of, inside
from spatialdl.spatial.sharing import Family, check_lines, check_write, note_tile, note_view, share
from spatialdl.spatial.table import (
    HANDLERS,
    WITH_PREFIX,
    any_other,
    refusal,
    register_op,
    register_refusal,
    spatial_in,
)
from spatialdl.torch_internals import (
    DisableTorchFunctionSubclass,
    current_graph_task_id,
    disable_dynamo,
    get_eval_frame_callback,
    is_tracing,
    make_wrapper_subclass,
    set_throw_on_mutable_data_ptr,
    tree_flatten,
    tree_map,
)

__all__ = [
    "SpatialTensor",
    "from_tile",
    "on_layout",
    "redistribute",
    "refusal",
    "register_op",
    "to_tile",
]

aten = torch.ops.aten

# Not tagged pointwise by PyTorch, but local to each tile.
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
    aten.mish_.default,
    aten.mish_backward.default,
    aten.softplus_backward.default,
    aten.softshrink_backward.default,
    aten.threshold_.default,
    # Not tagged in PyTorch 2.8 to 2.11.
    aten._conj_physical.default,
    aten.celu_.default,
    aten.elu_.default,
    aten.hardsigmoid_.default,
    aten.hardtanh_.default,
    aten.ldexp.Tensor,
    aten.leaky_relu.default,
    aten.leaky_relu_.default,
    aten.selu_.default,
}


# In the backward of complex tensors: they add (-1) or remove (1) a last dim of two parts.
_REAL_AND_IMAGINARY = {
    aten.view_as_real.default: -1,
    aten.view_as_complex.default: 1,
    aten.select.int: 1,
    aten.select_backward.default: -1,
}


_NO_TRACE = (
    "torch.jit.trace and torch.onnx.export record operations on plain tensors in one process; pass "
    "a plain image"
)


_NO_SCRIPT = (
    "TorchScript bypasses the handlers of split images; pass the image to the original module, "
    "before torch.jit.script or torch.jit.trace"
)


class _Called(threading.local):
    """The function that the user called, for error messages."""

    function: Any = None


_called = _Called()


class SpatialTensor(torch.Tensor):
    """A tensor, initially (N, ..., *spatial), split along its spatial dims over a mesh.

    `shape` and `size()` are global, as for DTensor. Create one with `spatialdl.shard` or
    `spatialdl.from_local`.

    Attributes:
        spatial_layout: the box of each rank.
        spatial_dims: the dims that hold the spatial dims.
        mesh: the ranks.
    """

    _tile: Tensor
    _family: Family
    _apart = _inner = _is_averaged = False
    spatial_layout: Layout
    spatial_dims: SpatialDims
    mesh: Mesh
    any_has_prefix: ClassVar[bool] = False
    """Whether any tensor so far had tokens that belong to no pixel."""
    of_one_rank: ClassVar[Callable[[Tensor, Layout, Mesh, SpatialDims], SpatialTensor]]
    """Creates the split tensor of a grid of one rank, see `one_rank`."""

    @staticmethod
    def __new__(
        cls,
        tile: Tensor,
        layout: Layout,
        mesh: Mesh,
        dims: SpatialDims | None = None,
        requires_grad: bool = False,
    ) -> SpatialTensor:
        if tile.is_conj() or tile.is_neg():  # which kernels below this class would not see
            tile = tile.resolve_conj().resolve_neg()
        dims = dims or image_dims(len(layout.cuts))
        layout = layout.of_samples(samples_of(tile.shape, dims))
        if _is_whole(tile, mesh):
            leaf = tile.detach().requires_grad_(requires_grad)
            return SpatialTensor.of_one_rank(leaf, layout, mesh, dims)
        size = dims.sizes(tile.shape, layout.size)
        if dims.extra_tokens:
            SpatialTensor.any_has_prefix = True
        wrapper: SpatialTensor = make_wrapper_subclass(
            cls,
            size,
            strides=_strides(size, tile.stride(), tile.is_contiguous()),
            dtype=tile.dtype,
            device=tile.device,
            requires_grad=requires_grad,
        )
        # C++ extensions bypass the handlers and would read address 0.
        set_throw_on_mutable_data_ptr(wrapper)
        wrapper._tile = tile
        wrapper._family = Family()
        wrapper.spatial_layout = layout
        wrapper.spatial_dims = dims
        wrapper.mesh = mesh
        return wrapper

    def dim(self) -> int:
        """The number of dims, without dispatch because every operation reads it."""
        return self._tile.dim()

    def to_local(self) -> Tensor:
        """This rank's tile, e.g. (N, C, h, w) of (N, C, H, W); differentiable.

        On a rank without pixels one size is 0.
        """
        tile: Tensor = hook_result(self, to_tile(self), compares=False)
        return tile

    def full_tensor(self) -> Tensor:
        """The whole tensor, of `shape`, the same on every rank; differentiable.

        Collective over the grid. Backward sums the gradients of all ranks (DTensor's does not).
        """
        layout = self.spatial_layout
        plan = plan_for(layout.boxes, (layout.whole,) * len(layout.boxes), self.mesh.part)
        whole: Tensor = hook_result(
            self, move_pixels(self, plan, "full_tensor", gathers_tokens=True)
        )
        return whole

    def describe(self) -> str:
        """The grid and the image size, for messages: ``2x1 over 70x93``."""
        return self.spatial_layout.describe() + self.spatial_dims.describe()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"SpatialTensor(shape={tuple(self.shape)}, tile={tuple(self._tile.shape)}, "
            f"grid={self.mesh.grid}, dtype={self.dtype}, requires_grad={self.requires_grad})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> SpatialTensor:
        if not self.is_leaf:
            raise RuntimeError("only leaf tensors can be deep-copied; call detach() first")
        copied = self._like(self._tile.clone())
        copied._inner = self._inner
        memo[id(self)] = copied
        copied.requires_grad_(self.requires_grad)
        return copied

    def _like(self, tile: Tensor, requires_grad: bool = False) -> SpatialTensor:
        return SpatialTensor(tile, self.spatial_layout, self.mesh, self.spatial_dims, requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refusal(torch.save, [self], "save to_local() or full_tensor() instead")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(types) > 1 and above_split(types):
            return NotImplemented
        if is_tracing():
            raise refusal(func, spatial_in((args, kwargs or {})), _NO_TRACE)
        # Disabling Dynamo takes longer than some operations, so only if it is active.
        if torch.compiler.is_dynamo_compiling() or get_eval_frame_callback() is not None:
            return _call_untraced(func, args, kwargs or {})
        return _call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is aten.view.default and tuple(args[1]) == tuple(args[0].shape):
            func, args = aten.alias.default, args[:1]  # autograd's identity of an input
        if func is aten.new_empty_strided.default and tuple(args[1]) == tuple(args[0].shape):
            # Autograd accumulates a gradient with other strides than the leaf's this way.
            func, args = aten.empty_like.default, args[:1]
        if func in _PER_TILE or _is_pointwise(func):
            return _on_tiles(func, args, kwargs or {})
        if func is aten._conj.default:  # lazy
            return _on_tiles(aten._conj_physical.default, args, kwargs or {})
        if func in _REAL_AND_IMAGINARY:
            return _beside_last_dim(func, *args)
        if _called.function is not None or current_graph_task_id() != -1:
            raise refusal(_called.function or func, spatial_in((args, kwargs)))
        error = refusal(func, spatial_in((args, kwargs)), _NO_SCRIPT)
        # The TorchScript interpreter drops the message of the error.
        warnings.warn(str(error), stacklevel=2)
        raise error


def above_split(types: Any) -> bool:
    """Whether an operand has divided channels, and so dispatches the operation itself."""
    return any(getattr(kind, "holds_channels", False) for kind in types)


@functools.cache
def _is_pointwise(func: Any) -> bool:
    tags = func.tags
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    if kwargs and kwargs.get("requires_grad"):  # e.g. zeros_like, which would bypass the handler
        return _call(func, args, {**kwargs, "requires_grad": False}).requires_grad_()
    handler = HANDLERS.get(func) or inside(func)
    if handler is not None:
        if SpatialTensor.any_has_prefix and func in HANDLERS and func not in WITH_PREFIX:
            _check_no_prefix(func, args, kwargs)
        args, kwargs = as_autocast(func, args, kwargs)
        result = handler(*args, **kwargs)
        return hook_result((args, kwargs), result) if Agreement.any_compares else result
    if isinstance(func, torch.ScriptMethod):
        raise refusal(f"{func.name} of a scripted module", spatial_in((args, kwargs)), _NO_SCRIPT)
    if len(args) + len(kwargs) > 1:
        args, kwargs = HANDLERS[any_other](func, args, kwargs)
    outermost, _called.function = _called.function, func
    try:
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    finally:
        _called.function = outermost


def _check_no_prefix(func: Any, args: Any, kwargs: Any) -> None:
    split = [x for x in spatial_in((args, kwargs)) if isinstance(x, SpatialTensor)]
    if any(x.spatial_dims.extra_tokens for x in split):
        raise refusal(func, split, "class tokens are not supported; slice them off before it")


# torch.compile must not trace exchanges; it runs these calls eagerly.
_call_untraced = disable_dynamo(_call)


def _is_whole(tile: Tensor, mesh: Mesh) -> bool:
    """Whether the tile can serve as the split tensor; subclasses such as fake tensors cannot."""
    return mesh.grid_comm.size == 1 and type(tile) is Tensor


@functools.lru_cache(maxsize=4096)
def _strides(size: tuple[int, ...], of: tuple[int, ...], contiguous: bool) -> tuple[int, ...]:
    """Strides of a global tensor in the memory format of its tile, which has the strides `of`."""
    order = sorted(range(len(size)), key=lambda dim: (of[dim], -dim))
    if contiguous:
        order.sort(reverse=True)
    strides = [0] * len(size)
    step = 1
    for dim in order:
        strides[dim] = step
        step *= max(size[dim], 1)
    return tuple(strides)


# --- pointwise operations on tiles


def _on_tiles(func: Any, args: Any, kwargs: Any) -> Any:
    is_flat = not kwargs and not any(isinstance(value, list | tuple) for value in args)
    flat = args if is_flat else tree_flatten((args, kwargs))[0]
    first = next(value for value in flat if isinstance(value, SpatialTensor))
    for value in flat:
        if isinstance(value, SpatialTensor):
            check_lines(value)
            if value is not first and not are_aligned(value, first):
                raise refusal(func, [first, value], "its operands are split differently")
        elif isinstance(value, Tensor) and value.dim() > 0:
            raise refusal(func, [first], "it mixes split and whole tensors")
    is_mutable = func._schema.is_mutable
    if is_mutable:
        check_write(_called.function or func, args[0])
    tile_args, tile_kwargs = (
        (tuple(map(_tile_of, args)), {}) if is_flat else tree_map(_tile_of, (args, kwargs))
    )
    result = func(*tile_args, **tile_kwargs)
    if is_mutable:
        # Below autograd versions are not counted. A convolution that saved the tile would not
        # detect that it was overwritten, and would compute a wrong gradient.
        torch.autograd.graph.increment_version(args[0]._tile)
        return args[0]
    if isinstance(result, Tensor):
        split: Any = first._like(result)
    else:
        split = tree_map(lambda one: first._like(one) if isinstance(one, Tensor) else one, result)
    if func in (aten.detach.default, aten.alias.default):
        split._inner = first._inner or first.requires_grad
        if first._apart:
            share(first, split)
    return split


def _beside_last_dim(func: Any, x: SpatialTensor, *args: Any) -> SpatialTensor:
    """An operator on all pixels of a complex tensor, or of its real and imaginary parts."""
    if func is aten.select_backward.default:
        sizes, dim, index = args
        last, args = len(sizes) - 1, ((*x._tile.shape, sizes[-1]), dim, index)
    else:
        last, dim = x.dim() - 1, args[0] if args else -1
    if dim not in (-1, last) or (func is aten.select.int and -1 in x.spatial_dims.at):
        raise refusal(_called.function or func, [x])
    moved = x.spatial_dims.map_dims(lambda old: old + _REAL_AND_IMAGINARY[func])
    tile = x._tile.contiguous() if func is aten.view_as_complex.default else x._tile
    return SpatialTensor(func(tile, *args), x.spatial_layout, x.mesh, moved)


def _tile_of(value: Any) -> Any:
    return value._tile if isinstance(value, SpatialTensor) else value


def are_aligned(x: SpatialTensor, y: SpatialTensor) -> bool:
    """Whether two tiles hold the same pixels in the same dims, counted from the end."""
    a, b = x.spatial_layout, y.spatial_layout
    same_cut = a is b or a.cuts == b.cuts
    return same_cut and x.spatial_dims == y.spatial_dims


# --- between the wrapper and its tile


class _ToTile(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: SpatialTensor) -> Tensor:
        ctx.layout, ctx.mesh, ctx.dims = x.spatial_layout, x.mesh, x.spatial_dims
        return x._tile.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> SpatialTensor:
        return SpatialTensor(grad, ctx.layout, ctx.mesh, ctx.dims)


class _FromTile(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tile: Tensor, layout: Layout, mesh: Mesh, dims: SpatialDims | None
    ) -> SpatialTensor:
        return SpatialTensor(tile.detach(), layout, mesh, dims)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not isinstance(grad, SpatialTensor):
            raise UnsupportedSpatialOp(
                "the gradient of a split image must be split as well: pass a SpatialTensor to "
                "backward()"
            )
        return grad._tile, None, None, None


def to_tile(x: SpatialTensor) -> Tensor:
    """The tile of `x`, for local computation that autograd differentiates."""
    if x.mesh.grid_comm.size == 1 and type(x) is not SpatialTensor:
        with DisableTorchFunctionSubclass():
            return x.as_subclass(Tensor)
    check_lines(x)
    note_tile(x)
    tile: Tensor = _ToTile.apply(x)  # type: ignore[no-untyped-call]
    return tile


def from_tile(
    tile: Tensor, layout: Layout, mesh: Mesh, dims: SpatialDims | None = None
) -> SpatialTensor:
    """The split image of which this rank holds `tile`; the inverse of `to_tile`.

    Args:
        tile: this rank's box of `layout`; dims that are not split have their global sizes.
        dims: the dims that hold the spatial dims; by default the last ones.
    """
    if _is_whole(tile, mesh):
        dims = dims or image_dims(len(layout.cuts))
        layout = layout.of_samples(samples_of(tile.shape, dims))
        return SpatialTensor.of_one_rank(tile, layout, mesh, dims)
    x: SpatialTensor = _FromTile.apply(tile, layout, mesh, dims)  # type: ignore[no-untyped-call]
    note_view(x)
    return x


def image_of(x: SpatialTensor) -> Tensor:
    """The tile of `x` as (..., *spatial); differentiable, a view where possible."""
    return to_image(to_tile(x), x.spatial_dims, x.mesh.own_box(x.spatial_layout).shape[1:])


def redistribute(x: SpatialTensor, layout: Layout, mesh: Mesh) -> SpatialTensor:
    """`x` on another layout of the same image.

    Raises:
        UnsupportedSpatialOp: the images have different sizes.
    """
    if x.spatial_layout.size != layout.size:
        raise UnsupportedSpatialOp(
            f"split images have different sizes: {x.describe()} and {layout.describe()}; "
            "broadcasting over a split dim is not supported"
        )
    return on_layout(x, layout)


def on_layout(x: SpatialTensor, layout: Layout) -> SpatialTensor:
    """`x` on `layout`, a layout of the same image."""
    old = x.spatial_layout
    if old.cuts == layout.cuts:
        return x
    layout = layout.of_samples(old.samples)
    plan = plan_for(old.boxes, layout.boxes, x.mesh.part)
    return from_tile(move_pixels(x, plan, "redistribute"), layout, x.mesh, x.spatial_dims)


def move_pixels(x: SpatialTensor, plan: Plan, name: str, gathers_tokens: bool = False) -> Tensor:
    """The box of `x` that this rank needs by `plan`: a plain tensor with the dims of `x`.

    Args:
        plan: moves pixels.
        name: the operation, for messages.
        gathers_tokens: whether every rank gets the tokens that belong to no pixel; else they stay.
    """
    if x.spatial_dims.extra_tokens:
        extents = x.mesh.own_box(x.spatial_layout).shape[1:]
        return move_tokens(to_tile(x), x.spatial_dims, extents, plan, x.mesh, name, gathers_tokens)
    image = repartition(image_of(x), x.mesh.grid_comm, plan, name=name)
    return from_image(image, x.spatial_dims, x._tile.shape)


@register_op(Tensor.requires_grad_, Tensor.requires_grad.__set__, prefix=True)  # type: ignore[attr-defined]
def requires_grad_(self: SpatialTensor, requires_grad: bool = True) -> SpatialTensor:
    """Make a leaf's gradient that of the mean of the ranks' losses.

    A tensor detached from a graph keeps the sum, as an activation does: it is passed to the
    backward of the first part where a network is cut in two.
    """
    with DisableTorchFunctionSubclass():
        self.requires_grad_(requires_grad)
        if self.requires_grad and self.is_leaf and not (self._inner or self._is_averaged):
            self._is_averaged = True
            ranks = self.mesh.size
            self.register_hook(lambda grad: grad / ranks)  # type: ignore[no-untyped-call]
    return self


register_refusal(
    "use to_local() for this rank's tile or full_tensor() for the whole tensor",
    functions_of(
        Tensor, "numpy item tolist data_ptr __array__ __dlpack__ share_memory_ apply_ map_"
    ),
)
register_refusal(
    "each output may read pixels of any rank; call full_tensor() on the image, or "
    "gather_before() on the module that samples",
    [F.grid_sample, torch.grid_sampler, torch.grid_sampler_2d],
)
register_refusal("rebind the variable", [Tensor.data.__set__])  # type: ignore[attr-defined]
register_refusal(
    "ranks would return different results; compare the results of full_tensor()",
    [Tensor.equal, torch.equal],
)
