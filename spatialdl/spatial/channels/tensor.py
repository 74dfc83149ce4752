"""ChannelTensor: a tensor whose channels are divided over the tensor axis.

A network sees the whole shape. The wrapper holds a tensor with this rank's channels, plain or split
over a grid. Operations independent of the channel run on that tensor. Operations without a handler
run on all channels, equally on every rank, and outputs of networks have all channels: slower, but
never wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, wraps
from inspect import Parameter, signature
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.layout.partition import Partition
from spatialdl.spatial.channels.copies import guard_views, refusal, target_of, writes_into
from spatialdl.spatial.channels.moves import gather, replicate, take_channels
from spatialdl.spatial.random.composite import functions_of, getter, inside, tags_of
from spatialdl.spatial.tensor import SpatialTensor, from_tile, to_tile
from spatialdl.torch_internals import (
    DisableTorchFunction,
    make_wrapper_subclass,
    set_throw_on_mutable_data_ptr,
    tensor_version,
    tree_leaves,
    tree_map,
)

Handler = TypeVar("Handler", bound=Callable[..., Any])
CHANNEL_OPS: dict[Callable[..., Any], Callable[..., Any]] = {}
KEYWORDS: dict[Callable[..., Any], set[str] | None] = {}
"""The keyword arguments of handlers; None: any."""


class ChannelTensor(Tensor):
    """A tensor divided along one dim.

    Attributes:
        part: this rank's part, which carries the autograd graph.
        at: the divided dim.
        partition: of this dim.
        comm: the ranks with the parts.
        origin: the weight whose partition determined this one.
    """

    part: Tensor
    at: int
    partition: Partition
    comm: Communicator
    origin: ChannelTensor | None = None
    is_whole = False  # True for a replicated weight
    form: str | None = None  # the division of a weight that tensor_plan requests
    is_open = False  # True for a weight whose division is undecided
    holds_channels = True  # takes precedence over SpatialTensor in dispatch

    @staticmethod
    def __new__(
        cls, part: Tensor, at: int, partition: Partition, comm: Communicator
    ) -> ChannelTensor:
        shape = [*part.shape]
        shape[at] = partition.size
        # The wrapper itself is a leaf. A function that bypasses the handlers creates a wrapper with
        # a grad_fn that does not lead to `part`; `_check_history` detects it.
        x: ChannelTensor = make_wrapper_subclass(
            cls, shape, dtype=part.dtype, device=part.device, requires_grad=part.requires_grad
        )
        set_throw_on_mutable_data_ptr(x)
        x.part, x.at, x.partition, x.comm = part, at, partition, comm
        return x

    def decide(self, at: int | None = None, partition: Partition | None = None) -> None:
        """Decide the division of a weight by its use; see `weights.Weight`."""

    def request(self, unit: int = 1, pieces: int = 1) -> None:
        """Request another partition of the origin, for an operation that now needs all channels.

        Args:
            unit: number of channels that must stay together.
            pieces: number of equal pieces of this dim.
        """
        if self.origin is not None:
            self.origin.divide_for(self.partition.size, unit, pieces)

    def request_apart(self) -> None:
        """Request a partition of the origin in which each entry of this dim is a piece."""
        if self.origin is not None:
            total = self.origin.partition.size
            self.origin.divide_for(total, 1, self.partition.size)

    def match(self, partition: Partition) -> bool:
        """Request `partition` for the origin; returns whether it is granted."""
        return self.origin is not None and self.origin.divide_as(partition)

    def divide_as(self, partition: Partition) -> bool:
        """Whether a weight will be divided by `partition`; see `weights.Weight`."""
        return False

    def divide_for(self, size: int, unit: int, pieces: int) -> None:
        """Request a partition for a dim of `size`; see `weights.Weight`."""

    def like(
        self, part: Tensor, at: int | None = None, partition: Partition | None = None
    ) -> ChannelTensor:
        """A result of this tensor with `part`, divided likewise except for `at`, `partition`."""
        at = self.at if at is None else at
        other = ChannelTensor(part, at, partition or self.partition, self.comm)
        other.origin = self.origin
        return other

    def stand_in(self) -> Tensor:
        """A tensor by whose strides all ranks decide alike on views and contiguity.

        A rank with a single channel could create a view where other ranks must copy.
        """
        if self.part.shape[self.at] > 1 or isinstance(self.part, SpatialTensor):
            return self.part
        step = self.part.stride(self.at)
        size, stride = [*self.part.shape], [*self.part.stride()]
        stride = [n * 2 if n >= step else n for n in stride]
        size[self.at], stride[self.at] = 2, step
        return torch.empty_strided(size, stride, device="meta")

    def full_tensor(self) -> Tensor:
        """The whole tensor on every rank; collective."""
        whole = all_channels(self)
        return whole.full_tensor() if isinstance(whole, SpatialTensor) else whole

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ChannelTensor({self.part!r}, dim {self.at} of {self.partition.size})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ChannelTensor:
        return self.like(copy.deepcopy(self.part, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("channels are divided over ranks: save full_tensor() instead")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # by checkpointing, of saved inputs
            return args[0].like(args[0].part.detach())
        raise refusal(func, "it bypasses the handlers; pass full_tensor()")


def channel_op(*functions: Callable[..., Any]) -> Callable[[Handler], Handler]:
    """Register a handler of functions of PyTorch on a `ChannelTensor`.

    If the handler returns NotImplemented, the function runs on all channels.
    """

    def register(handler: Handler) -> Handler:
        parameters = signature(handler).parameters.values()
        takes_any = any(one.kind is Parameter.VAR_KEYWORD for one in parameters)
        names = {one.name for one in parameters if one.kind is not Parameter.VAR_POSITIONAL}
        for function in functions:
            CHANNEL_OPS[function] = handler
            KEYWORDS[function] = None if takes_any else names
        return handler

    return register


def divided_op(*functions: Callable[..., Any]) -> Callable[[Handler], Handler]:
    """`channel_op` for handlers that need a divided first argument."""

    def register(handler: Handler) -> Handler:
        @wraps(handler)
        def check(*args: Any, **kwargs: Any) -> Any:
            if not args or not is_divided(args[0]):
                return NotImplemented
            return handler(*args, **kwargs)

        channel_op(*functions)(check)
        return handler

    return register


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    if func in _OF_WRAPPER:
        with DisableTorchFunction():
            return func(*args, **kwargs)
    for x in args:
        for one in x if isinstance(x, list | tuple) else (x,):
            if isinstance(one, ChannelTensor):
                _check_history(one)
    result = _handle(func, args, kwargs)
    return on_all_channels(func, args, kwargs) if result is NotImplemented else result


def _handle(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a handler or pointwise operation; NotImplemented if there is none."""
    if kwargs.get("out") is not None:
        return NotImplemented
    handler = CHANNEL_OPS.get(func)
    if handler is not None:
        keywords = KEYWORDS[func]
        spelled = not kwargs or keywords is None or keywords.issuperset(kwargs)
        return handler(*args, **kwargs) if spelled else NotImplemented
    if is_pointwise(func):
        return pointwise(func, args, kwargs)
    composite = inside(func)
    return NotImplemented if composite is None else composite(*args, **kwargs)


def on_all_channels(func: Any, args: Any, kwargs: Any) -> Any:
    """The operation on whole tensors, replicated on every rank."""
    if is_divided(target_of(func, args, kwargs)):
        raise refusal(func, "it would modify a copy; use a call that returns a new tensor")
    wholes = tree_map(all_channels, (args, kwargs))
    result = func(*wholes[0], **wholes[1])
    return guard_views(result, args, wholes[0])


_PROPERTIES = (
    "shape dtype device requires_grad is_cuda is_cpu is_meta layout ndim is_sparse is_nested"
)
_METHODS = (
    "size dim ndimension numel nelement is_floating_point is_complex element_size get_device "
    "__len__ __hash__ __repr__ __format__"
)
_OF_WRAPPER = {
    *map(getter, _PROPERTIES.split()),
    *functions_of(Tensor, _METHODS),
    *functions_of(torch, "is_floating_point is_complex numel"),
}
"""Properties of the whole shape, answered by the wrapper."""


def _refuse(func: Any, advice: str) -> None:
    @channel_op(func)
    def handler(*args: Any, **kwargs: Any) -> Any:
        raise refusal(func, advice)


for _name in ("register_hook", "retain_grad", "backward", "numpy", "data_ptr", "share_memory_"):
    _refuse(getattr(Tensor, _name), "it would see a copy; use full_tensor()")
_SET = "set the attribute itself (module.name = x)"
for _name in ("data", "grad"):
    _refuse(getter(_name), "it would see a copy; use detach()")
    _refuse(getattr(Tensor, _name).__set__, f"it would change a copy; {_SET}")


@channel_op(tensor_version.__get__)  # type: ignore[attr-defined]
def _version(x: ChannelTensor) -> int:
    return x.part._version


@channel_op(Tensor.is_contiguous)
def _is_contiguous(x: ChannelTensor, *args: Any, **kwargs: Any) -> bool:
    return x.stand_in().is_contiguous(*args, **kwargs)


@channel_op(Tensor.requires_grad_)
def _requires_grad_(x: ChannelTensor, requires_grad: bool = True) -> ChannelTensor:
    return x.like(x.part.requires_grad_(requires_grad))


# --- parts and whole tensors


def on_tile(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function that does not move pixels to a plain tensor or to a tile."""
    if isinstance(x, SpatialTensor):
        return from_tile(function(to_tile(x)), x.spatial_layout, x.mesh, x.spatial_dims)
    return function(x)


def _check_history(x: ChannelTensor) -> None:
    with DisableTorchFunction():
        is_leaf, is_followed = x.grad_fn is None, x.requires_grad
    if not is_leaf:
        raise UnsupportedSpatialOp(
            "a torch.autograd.Function or a hook was applied to a tensor whose channels are "
            "divided over ranks: pass it full_tensor(), or use tensor=1"
        )
    if is_followed and type(x) is ChannelTensor and not x.part.requires_grad:
        # Saved by a nested checkpoint: PyTorch detaches it and sets requires_grad on the wrapper
        # only, but the third run must save the same tensors for backward as the first two.
        x.part = x.part.detach().requires_grad_()


def all_channels(x: Any, alike: bool = True) -> Any:
    """All channels of a `ChannelTensor`, on every rank; other values are returned unchanged.

    Args:
        alike: whether all ranks compute the same from it; else each computes a part.
    """
    if not isinstance(x, ChannelTensor):
        return x
    x.decide()
    if x.is_whole:
        return x.part if alike else all_channels_for_parts(x.part, x.comm)
    return on_tile(lambda tile: gather(tile, x.at, x.partition, x.comm, alike), x.part)


def all_channels_for_parts(x: Any, comm: Communicator) -> Any:
    """All channels, from which each rank computes a part of the result."""
    if isinstance(x, ChannelTensor):
        return all_channels(x, alike=False)
    if isinstance(x, Tensor) and x.requires_grad:
        return on_tile(lambda tile: replicate(tile, comm), x)
    return x


def local_channels(x: Tensor, at: int, partition: Partition, comm: Communicator) -> Tensor:
    """This rank's channels of a whole tensor or of one divided in any way."""
    if isinstance(x, ChannelTensor):
        x.decide(at, partition)
        if not x.is_whole and (x.at, x.partition) == (at, partition):
            return x.part
        if not x.is_whole and x.at == at:
            x.match(partition)
        x = all_channels(x)
    return on_tile(lambda tile: take_channels(tile, at, partition, comm), x)


def is_divided(x: Any) -> TypeGuard[ChannelTensor]:
    """Whether `x` is a divided activation or weight."""
    return isinstance(x, ChannelTensor) and not x.is_whole and x.partition is not None


# --- pointwise operations


@cache
def is_pointwise(func: Any) -> bool:
    """Whether a function of PyTorch is pointwise and deterministic."""
    name = getattr(func, "__name__", "")
    if name.startswith("__") and name.endswith("__"):
        name = f"{name[3:-2]}_" if writes_into(func) else name[2:-2]
        name = _DUNDERS.get(name, name)
    tags = tags_of(name)
    if not tags or name in _UNTAGGED or name == "copy":
        return name in _UNTAGGED
    draws = any(torch.Tag.nondeterministic_seeded in some for some in tags)
    return not draws and any(torch.Tag.pointwise in some for some in tags)


_DUNDERS = {
    **dict.fromkeys(("truediv", "rdiv", "rtruediv"), "div"),
    **{"truediv_": "div_", "radd": "add", "rmul": "mul", "invert": "bitwise_not"},
    **{"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"},
}
_UNTAGGED = {"hardswish", "hardswish_", "log_sigmoid"}


def pointwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Apply to each rank's channels; whole operands are cut to them, or broadcast."""
    if len(args) + len(kwargs) == 1 and func.__name__ == "where":
        return on_all_channels(func, args, kwargs)
    operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    writes, first = writes_into(func), next(filter(is_divided, operands), None)
    if (writes and first is not args[0]) or first is None:
        return on_all_channels(func, args, kwargs)
    from_end, size = first.at - first.dim(), first.shape[first.at]
    if any(x.dim() >= -from_end and x.shape[from_end] not in (1, size) for x in operands):
        return on_all_channels(func, args, kwargs)
    comm, partition = first.comm, first.partition
    for x in operands:
        if is_divided(x) and x.at - x.dim() == from_end and x.partition != partition:
            _ = x.match(partition) or first.match(x.partition)

    def own(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x.dim() >= -from_end and x.shape[from_end] == size:
            return local_channels(x, x.dim() + from_end, partition, comm)
        return all_channels_for_parts(x, comm)

    def outer(y: Any) -> Any:
        return first.like(y, y.dim() + from_end) if isinstance(y, Tensor) else y

    inner = func(*tree_map(own, args), **tree_map(own, kwargs))
    return args[0] if writes else tree_map(outer, inner)
