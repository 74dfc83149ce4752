"""Which code a checkpoint may name.

A checkpoint is data, but its configuration names what builds its network (``model._target_``), and
any function of Python can be named so, ``os.system`` as well. Names of networks that do nothing but
build are called; any other only if the user says so by ``trust``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, get_type_hints

from torch import nn

from spatialdl.data.fields import shown
from spatialdl.errors import CheckpointError

_OURS, _LAYERS, _TORCHVISION = "spatialdl.models", "torch.nn", "torchvision.models"
_END_TO_END = "spatialdl.bags.EndToEndNetwork"  # of networks that are looked at by themselves
_NO_BUILDERS = "torchvision.models.feature_extraction"


def check_targets(model: Any, trusted: Sequence[str]) -> None:
    """Refuse a network that names code which nobody trusts.

    Args:
        model: the configuration of a network, as plain dicts and lists.
        trusted: names of functions, classes or packages that are called all the same.

    Raises:
        CheckpointError: naming it, and what to say if it is all right.
    """
    for target in _targets(model):
        if not any(f"{target}.".startswith(f"{one}.") for one in trusted) and not builds(target):
            raise CheckpointError(
                f"the checkpoint says that {shown(target)} builds its network, which may be any "
                f"program: if you know it, and who made the checkpoint, add trust=[{target}]"
            )


def _targets(settings: Any) -> Iterator[str]:
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            if key == "_target_":
                yield str(value)
            else:
                yield from _targets(value)
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from _targets(value)
    elif isinstance(settings, str) and "${" in settings:
        raise CheckpointError(
            f"the checkpoint has {shown(settings)} in its configuration, where there should be "
            "values only: it was not written by spatialdl.train"
        )


def builds(target: str) -> bool:
    """Whether a name is that of a network, or a layer, whose making does nothing else.

    Modules are imported if they are ours, PyTorch's or torchvision's, and no others.
    """
    if target == _END_TO_END:
        return True
    module, _, name = target.rpartition(".")
    package = next(
        (one for one in (_OURS, _LAYERS, _TORCHVISION) if f"{module}.".startswith(f"{one}.")), None
    )
    if package is None:
        return False
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return False
    # what a module imports can be named as its own: spatialdl.models.resnet.torch
    home = str(getattr(found, "__module__", ""))
    if not f"{home}.".startswith(f"{package}.") or home == _NO_BUILDERS:
        return False
    if inspect.isclass(found):
        return issubclass(found, nn.Module)
    return package != _LAYERS and inspect.isfunction(found) and _gives_network(found)


def _gives_network(function: Any) -> bool:
    try:
        given = get_type_hints(function).get("return")
    except Exception:  # what annotations may raise is anything
        return False
    return inspect.isclass(given) and issubclass(given, nn.Module)
