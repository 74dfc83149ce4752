"""Allowlist of the code that a checkpoint's configuration may call.

A checkpoint is data, but its configuration names the callable that builds the network
(``model._target_``), which may be any Python function, such as ``os.system``. Callables known to
only build a network are called; others need ``trust``.
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
_END_TO_END = "spatialdl.bags.EndToEndNetwork"  # its networks are checked as separate targets
_NO_BUILDERS = "torchvision.models.feature_extraction"


def check_targets(model: Any, trusted: Sequence[str]) -> None:
    """Check that a network's configuration only names trusted code.

    Args:
        model: configuration of a network, as plain dicts and lists.
        trusted: names of additionally trusted functions, classes or packages.

    Raises:
        CheckpointError: a target is not trusted.
    """
    for target in _targets(model):
        if not any(f"{target}.".startswith(f"{one}.") for one in trusted) and not builds(target):
            raise CheckpointError(
                f"the checkpoint's network is built by {shown(target)}, which may run any code: "
                f"if you trust it and the checkpoint's source, add trust=[{target}]"
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
            f"the checkpoint's configuration contains {shown(settings)}, but only plain values are "
            "allowed: it was not written by spatialdl.train"
        )


def builds(target: str) -> bool:
    """Whether a target only builds a network or layer.

    Only modules of spatialdl, PyTorch and torchvision are imported.
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
    # a module's imports are its attributes as well: spatialdl.models.resnet.torch
    home = str(getattr(found, "__module__", ""))
    if not f"{home}.".startswith(f"{package}.") or home == _NO_BUILDERS:
        return False
    if inspect.isclass(found):
        return issubclass(found, nn.Module)
    return package != _LAYERS and inspect.isfunction(found) and _returns_network(found)


def _returns_network(function: Any) -> bool:
    try:
        given = get_type_hints(function).get("return")
    except Exception:  # evaluating annotations may raise anything
        return False
    return inspect.isclass(given) and issubclass(given, nn.Module)
