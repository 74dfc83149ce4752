"""Recorder of a network's operations on split images, and of those that are refused.

A refused operation does not end the run: it runs on the gathered image, and its result is split
again if possible. So one run finds all unsupported operations and their number of calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.spatial import SpatialTensor
from spatialdl.spatial.dims import from_image, split_tokens, to_image
from spatialdl.spatial.source_lines import users_line
from spatialdl.spatial.split import shard
from spatialdl.spatial.tensor import from_tile, to_tile
from spatialdl.torch_internals import tree_flatten, tree_map

_VALUES: dict[str, Any] = {
    "torch.Tensor.item": 1.0,
    "torch.Tensor.__float__": 1.0,
    "torch.Tensor.__int__": 1,
    "torch.Tensor.__index__": 1,
    "torch.Tensor.__bool__": False,
}
"""Results of value queries in a dry run, where tensors have no values."""


class Refusal(NamedTuple):
    """A place in the network where an operation is refused.

    Attributes:
        operation: name, such as ``torch.nn.functional.conv2d``.
        where: ``file:line`` in the network's source, as far as known.
        module: name and class of the calling module.
        reason: message of the first refusal.
        around: names of modules before which gathering may help: the calling module, unless it is
            the network itself, and the leaf module that ran last.
    """

    operation: str
    where: str
    module: str
    reason: str
    around: tuple[str, ...] = ()

    def place(self) -> str:
        """The operation and its location, for messages."""
        at = f" at {self.where}" if self.where else ""
        return f"{self.operation}{at}" + (f" in {self.module}" if self.module else "")


@dataclass
class Operation:
    """A function of PyTorch called on split images.

    Attributes:
        name: such as ``torch.nn.functional.conv2d``.
        calls: number of calls.
        refused: number of refused calls.
        refusal: the first one.
    """

    name: str
    calls: int = 0
    refused: int = 0
    refusal: Refusal | None = None


class Recorder(TorchFunctionMode):
    """Torch function mode that counts operations on split images.

    Args:
        model: network whose modules are tracked.
        keep_going: run refused operations on gathered images; otherwise record and raise.
        dry: tensors are on the ``meta`` device, without values: in-place operations and value
            queries do not end the run either.

    Attributes:
        operations: all operations called, by name.
        refusals: all places of refused operations, in order.
        guesses: ``file:line`` where a dry run queried the value of an ordinary tensor.
    """

    def __init__(self, model: nn.Module, keep_going: bool = True, dry: bool = False) -> None:
        super().__init__()
        self.operations: dict[str, Operation] = {}
        self.refusals: list[Refusal] = []
        self.guesses: list[str] = []
        self._keep_going, self._dry = keep_going, dry
        self._inside: list[str] = []
        self._names: dict[str, str] = {}
        self._last = ""
        for name, module in model.named_modules():
            shown = f"{name or 'the network'} ({type(module).__name__})"
            self._names[shown] = name
            self._follow(module, name, shown)

    @property
    def refused(self) -> list[Refusal]:
        """The first refusal of each operation that has one."""
        return [one.refusal for one in self.operations.values() if one.refusal is not None]

    def table(self, exact: bool) -> list[str]:
        """Table of operations with their calls and verdicts.

        Args:
            exact: whether all results equal those of a single process.
        """
        width = max((len(name) for name in self.operations), default=0)
        width = max(width, len("operation"))
        lines = [f"{'operation':{width}}  calls  verdict"]
        for name, operation in self.operations.items():
            done = operation.calls - operation.refused
            first = operation.refusal
            words = [] if first is None else [f"refused {first.where}".strip()]
            if done and words:
                words[0] = f"{operation.refused} {words[0]}"
            if done:
                words.append("exact" if exact else "done")
            lines.append(f"{name:{width}}  {operation.calls:5}  {', '.join(words)}")
        return lines

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _spatial(args, kwargs):
            if self._dry and _name(func) in _VALUES:
                self.guesses.append(users_line())
                return _VALUES[_name(func)]
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except UnsupportedSpatialOp as refusal:
            self._note_refusal(func, refusal)
            if self._dry and (_writes(func, kwargs) or _name(func) in _VALUES):
                return _VALUES.get(_name(func), args[0])
            if not self._keep_going or _writes(func, kwargs):
                raise
            return self._gathered(func, args, kwargs)
        if any(isinstance(value, Tensor) for value in tree_flatten(result)[0]):
            self._operation(func).calls += 1
        return result

    def _follow(self, module: nn.Module, name: str, shown: str) -> None:
        """Register hooks that keep the running module at the end of `_inside`."""
        is_leaf = next(module.children(), None) is None

        def leave(*_: Any) -> None:
            if self._inside:
                self._inside.pop()
            if is_leaf:
                self._last = name

        module.register_forward_pre_hook(lambda *_: self._inside.append(shown))
        module.register_forward_hook(leave, always_call=True)

    def _operation(self, func: Callable[..., Any]) -> Operation:
        name = _name(func)
        return self.operations.setdefault(name, Operation(name))

    def _note_refusal(self, func: Callable[..., Any], refusal: UnsupportedSpatialOp) -> None:
        operation = self._operation(func)
        operation.calls += 1
        operation.refused += 1
        where, module = users_line(), self._inside[-1] if self._inside else ""
        around = tuple(filter(None, dict.fromkeys((self._names.get(module, ""), self._last))))
        place = Refusal(operation.name, where, module, str(refusal), around)
        if not any(place[:3] == known[:3] for known in self.refusals):
            self.refusals.append(place)
        operation.refusal = operation.refusal or place

    def _gathered(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        like = _spatial(args, kwargs)[0]
        args, kwargs = tree_map(
            lambda value: value.full_tensor() if isinstance(value, SpatialTensor) else value,
            (args, kwargs),
        )
        return tree_map(lambda value: _split_as(like, value), func(*args, **kwargs))


def _split_as(like: SpatialTensor, value: Any) -> Any:
    """Split a whole result as `like`, if its shape shows an image in the same dims."""
    if not isinstance(value, Tensor) or value.dim() != like.dim():
        return value
    mesh, dims = like.mesh, like.spatial_dims
    size, count = like.spatial_layout.size, len(mesh.grid)
    if dims.is_image and value.dim() == count + 2:  # an image of any size
        size = tuple(value.shape[2:])
    if any(extent < parts for extent, parts in zip(size, mesh.grid, strict=True)):
        return value
    if tuple(value.shape) != dims.sizes(value.shape, size):
        return value
    before, pixels, after = split_tokens(value, dims)
    image = to_image(pixels, dims.of_pixels, size)
    split = shard(image.reshape(1, -1, *size), mesh)
    tile = to_tile(split)
    tile = tile.reshape(*image.shape[:-count], *tile.shape[-count:])
    tile = from_image(tile, dims.of_pixels, pixels.shape)
    again = from_tile(tile, split.spatial_layout, mesh, dims.of_pixels)
    return torch.cat([before, again, after], dims.at[0]) if dims.extra_tokens else again


def _spatial(*values: Any) -> list[SpatialTensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, SpatialTensor)]


def _name(func: Callable[..., Any]) -> str:
    found: str = resolve_name(func) or getattr(func, "__name__", str(func))
    return found.removesuffix(".__get__").replace("torch.nn.functional.", "F.")


def _writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    dunder = name.endswith("__")
    in_place = name.endswith("_") and not dunder
    return in_place or name in ("__setitem__", "__set__") or "out" in kwargs
