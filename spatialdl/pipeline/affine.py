"""Tracks the updates of buffers in a forward, operation by operation.

An exponential moving average, a running statistic or a counter is updated to ``factor * old +
rest``, with a number as factor and a rest that does not depend on the old value. Such updates can
be composed. All other uses of a buffer are recorded by name.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from spatialdl.channels.tensor import ChannelTensor
from spatialdl.random.composite import inside
from spatialdl.torch_internals import tree_leaves

_BACKWARDS = (torch.Tensor.backward, torch.autograd.backward)
_BATCH_NORMS = {
    # position or name: of the input's statistics, training, momentum
    F.batch_norm: (1, 2, 5, 6),
    torch.batch_norm: (3, 4, 5, 6),
    F.instance_norm: (1, 2, 5, 6),
    torch.instance_norm: (3, 4, 5, 6),
}
_NAMES = ("running_mean", "running_var", "training", "momentum")
_SAME_MEMORY = {"detach", "detach_"}
_COPIES = {"clone", "contiguous", "to", "float", "double", "half", "bfloat16"}
_FILLED = {"zero_", "fill_", "copy_"}
_OTHER_NAMES = {
    **dict.fromkeys(("multiply", "rmul", "imul"), "mul"),
    **dict.fromkeys(("divide", "true_divide", "truediv", "itruediv", "idiv"), "div"),
    **dict.fromkeys(("radd", "iadd"), "add"),
    **dict.fromkeys(("subtract", "isub"), "sub"),
}
_PROPERTIES = {
    *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad", "grad_fn"),
    *("is_cuda", "is_cpu", "is_meta", "itemsize", "nbytes", "_version", "_base", "names"),
}
_SHAPES = {
    *("size", "dim", "numel", "nelement", "element_size", "stride", "is_contiguous", "get_device"),
    *("is_floating_point", "is_complex", "__len__", "__repr__", "__hash__", "is_same_size"),
    *("zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "full_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "requires_grad_"),
}


class AffinePart:
    """State of a tensor that is ``factor`` times a buffer's old value plus a rest without it.

    Attributes:
        version: of the tensor, after the last tracked operation.
        written: whether an operation has changed the value since it was the buffer's.
    """

    def __init__(self, buffer: int, version: int, factor: float = 1.0) -> None:
        self.buffer, self.version, self.factor = buffer, version, factor
        self.written = False

    def write(self, factor: float) -> None:
        self.factor, self.written = factor, True


class Followed(TorchFunctionMode):
    """Tracks the operations on buffers.

    Args:
        buffers: tensors, each identified by its index.

    Attributes:
        uses: by index, the name of an operation that uses the old value in another way.
    """

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        super().__init__()
        self._parts: Any = WeakIdKeyDictionary()
        self._shapes = [buffer.shape for buffer in buffers]
        for place, buffer in enumerate(buffers):
            self._parts[buffer] = AffinePart(place, buffer._version)
        self.uses: dict[int, str] = {}

    def part(self, tensor: Tensor) -> AffinePart | None:
        """State of a tensor; None if it contains no old value."""
        part: AffinePart | None = self._parts.get(own(tensor))
        return part

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        backward = inside(func) if func in _BACKWARDS else None
        if backward is not None:
            with self:  # PyTorch has disabled this mode, but recomputation in backward needs it
                return backward(*args, **kwargs)
        parts = [self.part(leaf) for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)]
        before = [part for part in parts if part is not None]
        result = func(*args, **kwargs)
        if before and not self._follows(func, args, kwargs, result):
            name = getattr(func, "__name__", str(func))
            for part in before:
                self.uses.setdefault(part.buffer, name)
        return result

    def _follows(self, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
        """Track an operation; return whether it is supported."""
        if func in _BATCH_NORMS:
            return self._batch_norm(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            owner = getattr(getattr(func, "__self__", None), "__name__", "")
            return owner in _PROPERTIES or (owner == "data" and self._data(name, args, result))
        if name in _SHAPES or "out" in kwargs or not args or not _is_tensor(args[0]):
            return name in _SHAPES
        if name in _SAME_MEMORY:
            return self._alias(args[0], result)
        if name in _FILLED:
            return self._fill(args)
        factor = self._factor(name, args, kwargs, result)
        return factor is not None and self._gives(args[0], result, self._place(args), factor)

    def _factor(self, name: str, args: Any, kwargs: Any, result: Any) -> float | None:
        """Factor of the old value in a result; None if it is not a number."""
        bare = _OTHER_NAMES.get(name.strip("_"), name.strip("_"))
        factor = None
        if name in _COPIES:
            factor = self._copied(*args, result)
        elif bare in ("mul", "div") and len(args) == 2 and not kwargs:
            factor = self._scaled(bare, *args)
        elif bare in ("add", "sub", "rsub"):
            factor = self._sum(bare, *args, **kwargs)
        elif bare == "lerp" and len(args) == 3 and isinstance(args[2], numbers.Real):
            first, second = self._factors(args[0], args[1])
            factor = first + float(args[2]) * (second - first)
        elif bare in ("addcmul", "addcdiv") and not self._any(args[1:]):
            factor = self._factors(args[0])[0]
        return factor

    def _place(self, args: Any) -> int | None:
        """Index of the only buffer among the operands; None if there is none or several."""
        places = {
            part.buffer for operand in args if _is_tensor(operand) and (part := self.part(operand))
        }
        return places.pop() if len(places) == 1 else None

    def _any(self, args: Any) -> bool:
        return any(_is_tensor(operand) and self.part(operand) is not None for operand in args)

    def _factors(self, *tensors: Any) -> list[float]:
        parts = [self.part(tensor) if _is_tensor(tensor) else None for tensor in tensors]
        return [0.0 if part is None else part.factor for part in parts]

    def _copied(self, tensor: Tensor, *others: Any) -> float | None:
        """Factor of a copy or conversion, unless it rounds."""
        rounds = tensor.is_floating_point() and not others[-1].is_floating_point()
        return None if rounds or self._any(others[:-1]) else self._factors(tensor)[0]

    def _scaled(self, name: str, tensor: Tensor, by: Any) -> float | None:
        if not isinstance(by, numbers.Real):
            return None
        factor = self._factors(tensor)[0]
        return factor * float(by) if name == "mul" else factor / float(by)

    def _sum(self, name: str, tensor: Any, other: Any, alpha: Any = 1) -> float | None:
        if not isinstance(alpha, numbers.Real):
            return None
        first, second = self._factors(tensor, other)
        if name == "rsub":
            return second - float(alpha) * first
        return first + (-1 if name == "sub" else 1) * float(alpha) * second

    def _gives(self, first: Tensor, result: Any, place: int | None, factor: float) -> bool:
        if place is None or not _is_tensor(result):
            return False
        if self._shapes[place] not in (result.shape, own(result).shape):
            return False
        if result is first:
            part = self.part(result)
            if part is None:  # a buffer's value was written into an untracked tensor
                part = self._parts[own(result)] = AffinePart(place, result._version)
            if part.version != result._version or part.factor != factor:
                part.write(factor)
            part.version = result._version
        elif result.requires_grad:
            return False  # it takes part in training
        else:
            part = self._parts[own(result)] = AffinePart(place, result._version, factor)
            part.written = True
        return True

    def _alias(self, tensor: Tensor, result: Tensor) -> bool:
        part = self.part(tensor)
        if part is not None:
            self._parts[own(result)] = part
        return True

    def _data(self, name: str, args: Any, result: Any) -> bool:
        if name == "__get__":
            return self._alias(args[0], result)
        part = self.part(args[1])
        if part is not None:
            self._parts[args[0]] = part
        elif (old := self.part(args[0])) is not None:
            old.write(0.0)
        return True

    def _fill(self, args: Any) -> bool:
        tensor, *values = args
        part = self.part(tensor)
        source = self.part(values[0]) if values and _is_tensor(values[0]) else None
        if part is None or (source is not None and source.buffer != part.buffer):
            return False
        if source is not None and source.factor and values[0].shape != tensor.shape:
            return False
        part.write(0.0 if source is None else source.factor)
        part.version = tensor._version
        return True

    def _batch_norm(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Track an update of running statistics, on which nothing else depends in training."""
        options = [
            args[place] if place < len(args) else kwargs.get(name)
            for place, name in zip(_BATCH_NORMS[func], _NAMES, strict=True)
        ]
        running, training, momentum = options[:2], options[2], options[3]
        if "instance" in func.__name__:
            training = kwargs.get("use_input_stats", True if training is None else training)
        momentum = 0.1 if momentum is None else momentum
        tensors = [leaf for leaf in (*args, *kwargs.values()) if _is_tensor(leaf)]
        if not training or self._any([o for o in tensors if all(o is not r for r in running)]):
            return False
        for tensor in running:
            part = self.part(tensor) if _is_tensor(tensor) else None
            if part is not None:
                part.write(part.factor * (1.0 - float(momentum)))
                part.version = tensor._version
        return True


def own(tensor: Tensor) -> Tensor:
    """The tensor to track: this rank's part where channels are divided."""
    return tensor.part if isinstance(tensor, ChannelTensor) else tensor


def _is_tensor(operand: Any) -> bool:
    return isinstance(operand, Tensor)
