"""Guards for copies with all channels: writes to views of them would be lost and are refused."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from spatialdl.errors import UnsupportedSpatialOp
from spatialdl.spatial.random.composite import inside
from spatialdl.spatial.table import name_of
from spatialdl.torch_internals import DisableTorchFunctionSubclass, tree_leaves, tree_map


def refusal(func: Any, advice: str) -> UnsupportedSpatialOp:
    return UnsupportedSpatialOp(
        f"{name_of(func)} is not supported on a tensor whose channels are divided over ranks: "
        f"{advice}, or use tensor=1"
    )


class CopiedView(Tensor):
    """A view of a copy with all channels, which refuses writes because they would be lost."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        composite = inside(func)
        if composite is not None:  # may write in place
            return composite(*args, **kwargs)
        if isinstance(target_of(func, args, kwargs), CopiedView):
            raise refusal(func, "it would modify a copy; use a call that returns a new tensor")
        plain = tree_map(_remove_guard, (args, kwargs))
        return guard_views(func(*plain[0], **plain[1]), args, plain[0])


def _remove_guard(x: Any) -> Any:
    if isinstance(x, CopiedView):
        with DisableTorchFunctionSubclass():
            return x.as_subclass(Tensor)
    return x


def guard_views(result: Any, args: Any, copies: Any) -> Any:
    """Guard the results that are views of copies against writes.

    Args:
        result: of a function of the copies.
        args: the original arguments.
        copies: the arguments with copies.
    """
    pairs = zip(tree_leaves(args), tree_leaves(copies), strict=False)
    copied = {_memory(copy) for x, copy in pairs if isinstance(x, Tensor) and x is not copy} - {
        None
    }

    def guard(y: Any) -> Any:
        if not copied or type(y) is not Tensor or _memory(y) not in copied:
            return y
        return y.as_subclass(CopiedView)

    return tree_map(guard, result) if copied else result


def _memory(x: Any) -> int | None:
    if type(x) is not Tensor or x.is_meta:
        return None
    return x.untyped_storage().data_ptr()


def target_of(func: Any, args: Any, kwargs: Any) -> Any:
    """The object that a call writes to; None if none."""
    writes = writes_into(func) or func.__name__ in ("__set__", "__setitem__")
    return args[0] if writes and args else kwargs.get("out")


def writes_into(func: Any) -> bool:
    name = func.__name__
    if name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}"):
        return True
    return name.endswith("_") and not name.endswith("__")
