"""The meta device, whose tensors have shapes but no memory: copies of networks, cached results.

Networks repeat operations, and much of PyTorch's meta device is slow Python code: BatchNorm takes a
millisecond.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from spatialdl.torch_internals import (
    BatchNormBase,
    DisableTorchFunction,
    TorchDispatchMode,
    disable_current_modes,
    len_torch_dispatch_stack,
    tree_leaves,
    tree_map_only,
)

Known = dict[Any, Any]
"""Forms of results by operation, operands and default dtype; they depend on nothing else."""

KNOWN: Known = {}
"""Shared by the process."""

_MANY = 50_000
"""Entries from which on `KNOWN` is cleared."""


class _Form:
    """Size, stride and dtype of a result."""

    def __init__(self, like: Tensor) -> None:
        self.size, self.stride, self.dtype = like.size(), like.stride(), like.dtype

    def tensor(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


def meta_copy(model: nn.Module, device: str | torch.device = "meta") -> nn.Module:
    """A copy on the meta device, for shapes and costs; in eval mode, which accepts any batch.

    Args:
        device: another one, for copies that consist of fake tensors.

    Raises:
        ValueError: the model has uninitialized (lazy) parameters.
    """
    for path, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"{type(model).__name__} has uninitialized parameters, such as '{path}' of a lazy "
                "module: run one forward, on an image of the data's size, where it is built"
            )
    memo: dict[int, object] = {
        id(p): nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
        for p in model.parameters()
    }
    memo |= {id(b): torch.empty_like(b, device=device) for b in model.buffers()}
    memo |= {id(one): torch.empty_like(one, device=device) for one in computed_attributes(model)}
    shadow = copy.deepcopy(model, memo).eval()
    for layer in shadow.modules():
        if isinstance(layer, BatchNormBase) and layer.momentum is None:
            layer.momentum = 0.1  # a cumulative average reads a counter, which has no value here
    return shadow


def computed_attributes(model: nn.Module) -> list[Tensor]:
    """Tensors computed from parameters by hooks, as by weight norm and pruning.

    ``deepcopy`` refuses them.
    """
    return [
        value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    ]


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype in which a network takes images: that of its first parameter of real numbers.

    Of complex ones that of their parts; integers, such as quantised weights, do not count.
    """
    numbers = (p for p in model.parameters() if p.is_floating_point() or p.is_complex())
    return next((p.dtype.to_real() for p in numbers), torch.get_default_dtype())


Note = Callable[[Any, Any, Any, Any], None]
"""Receiver of an operation below autograd: function, args, kwargs, result."""


@contextmanager
def on_meta(note: Note | None = None) -> Iterator[None]:
    """Context of dry runs: new tensors are on the meta device, results of operations cached."""
    if len(KNOWN) > _MANY:
        KNOWN.clear()
    with _CachedResults(note), torch.device("meta"):
        yield


class _CachedResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, note: Note | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # its operations on plain tensors are dispatched here again
        result = run(func, args, kwargs or {})
        if self._note is not None:
            self._note(func, args, kwargs or {}, result)
        return result


def run_backward(outputs: Any) -> None:
    """Run the backward of a dry run from all outputs that require gradients."""
    roots = [one for one in tree_leaves(outputs) if isinstance(one, Tensor) and one.requires_grad]
    del outputs
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def run(func: Any, args: Any, kwargs: Any, known: Known = KNOWN) -> Any:
    """Return ``func(*args, **kwargs)``, from the cache if all operands are on the meta device.

    Args:
        known: the cache, to which the result is added.
    """
    tensors = tensors_in((args, *kwargs.values()))
    if func.is_view or not tensors or any(tensor.device.type != "meta" for tensor in tensors):
        return func(*args, **kwargs)
    key = (func, torch.get_default_dtype(), _key(args), _key(sorted(kwargs.items())))
    if func._schema.is_mutable:
        return _in_place(func, args, kwargs, known, key)
    if key in known:
        return tree_map_only(_Form, _Form.tensor, known[key])
    result = func(*args, **kwargs)
    owned = {_memory(tensor) for tensor in tensors}
    if not any(_memory(tensor) in owned for tensor in tensors_in(result)):  # an undeclared view
        known[key] = tree_map_only(Tensor, _Form, result)
    return result


def _in_place(func: Any, args: Any, kwargs: Any, known: Known, key: Any) -> Any:
    """Of operations that change values only; others, such as ``transpose_``, are not cached."""
    if key in known:
        return args[0]
    before = _key(args), [_memory(tensor) for tensor in tensors_in(args)]
    result = func(*args, **kwargs)
    if result is args[0] and before == (_key(args), [_memory(one) for one in tensors_in(args)]):
        known[key] = None
    return result


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors among operands or results."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.size(), value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(_key(item) for item in value)
    return type(value), value  # 2 and 2.0 give other dtypes


# --- operations on whole tensors without data


def meta_result(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of `function` for whole tensors without data; raises PyTorch's errors.

    These tensors are hidden from the planner, which counts the tensors that a rank creates, and
    from modes that draw random numbers or communicate.
    """
    own = map(_without_data, args)
    named = {name: _without_data(value) for name, value in kwargs.items()}
    with DisableTorchFunction():
        if len_torch_dispatch_stack() == 0:
            return function(*own, **named)
        with disable_current_modes():
            return function(*own, **named)


def _without_data(value: Any) -> Any:
    """`value` with each tensor replaced by a plain, whole one on the meta device."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
        return [_without_data(v) for v in value]
    return value
