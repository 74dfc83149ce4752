"""Gathers split images on every rank before a module that the user names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from torch import nn

from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.torch_internals import tree_map

Names = str | int | Iterable[str | int] | None


def module_names(names: Names) -> list[str]:
    """Names of modules from a configuration, where those of a chain are numbers."""
    if names is None:
        return []
    return [str(one) for one in ([names] if isinstance(names, str | int) else names)]


def gather_before(model: nn.Module, name: Names) -> None:
    """Pass whole images, the same on every rank, to a module instead of split ones.

    Use it before an operation that is not supported on a split image: from there on every rank
    holds and computes the whole image. Gradients are exact. Plain tensors are passed unchanged.

    Args:
        model: the network.
        name: of the module, as in ``model.named_modules()``; or several names, or None.

    Raises:
        ValueError: no such module; the message lists similar names.
    """
    for one in module_names(name):
        _first_called(_named(model, one)).register_forward_pre_hook(
            _gather, prepend=True, with_kwargs=True
        )


def _named(model: nn.Module, name: str) -> nn.Module:
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if name and name in modules:
        return modules[name]
    names = [known for known in modules if known]
    near = get_close_matches(name, names, n=5, cutoff=0.5)
    near += [known for known in names if name and name in known and known not in near]
    some = ", ".join(near[:8] or [known for known in names if "." not in known])
    raise ValueError(
        f"gather_before: {type(model).__name__} has no module '{name}'; "
        f"{'similar names' if near else 'its modules'}: {some}"
    )


def _first_called(module: nn.Module) -> nn.Module:
    """The first called module: stages of a chain call its layers, not the chain."""
    while type(module).forward is nn.Sequential.forward and len(module._modules) > 0:
        module = next(child for child in module._modules.values() if child is not None)
    return module


def _gather(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    gathered: tuple[Any, Any] = tree_map(
        lambda value: value.full_tensor() if isinstance(value, SpatialTensor) else value,
        (args, kwargs),
    )
    return gathered
