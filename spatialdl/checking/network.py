"""The network that the user names: finding its builder, building it, keeping chance out of it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from spatialdl.configuring.own_keys import named


def find_builder(target: str) -> Callable[..., Any]:
    """What `target` names: ``package.module.function`` or ``file.py:function``.

    Raises:
        ValueError: if there is no such thing, or it cannot be called.
    """
    file, colon, name = target.rpartition(":")
    if colon and file.endswith(".py"):
        found = getattr(_module_of(Path(file)), name, None)
        if found is None:
            raise ValueError(f"{file} has no {name}: name a function that makes the network")
    else:
        try:
            found = named(target)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{target} is not to be found: {error}; name a function that makes the network as "
                f"package.module.function or file.py:function, seen from {Path.cwd()}"
            ) from error
    if not callable(found):
        raise ValueError(f"{target} is {_a(found)}, not a function that makes the network")
    builder: Callable[..., Any] = found
    return builder


def _module_of(file: Path) -> ModuleType:
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.resolve().parent))  # as if it had been started: its neighbours
    spec.loader.exec_module(module)
    return module


def arguments_of(words: Sequence[str]) -> dict[str, Any]:
    """Arguments of a builder from words such as ``num_classes=3``; values are read as YAML.

    Raises:
        ValueError: if a word is no ``key=value``.
    """
    found = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"{word} is not key=value, an argument of the function")
        found[key] = yaml.safe_load(value)
    return found


def build(target: str, seed: int, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """The network of `target`, the same on every rank.

    Args:
        arguments: of what `target` names.

    Raises:
        ValueError: if what `target` names does not make one with these arguments.
    """
    builder, given = find_builder(target), dict(arguments or {})
    torch.manual_seed(seed)
    try:
        network = builder(**given)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # from within: the network's own defect
        raise ValueError(
            f"{target}({_written(given)}) does not make the network: {error}; arguments follow "
            "the function as key=value"
        ) from error
    if not isinstance(network, nn.Module):
        raise ValueError(f"{target}({_written(given)}) gives {_a(network)}, not a torch.nn.Module")
    return network


def switch_off_dropout(network: nn.Module) -> int:
    """Let all dropout modules keep everything; how many there were that did not."""
    found = [m for m in network.modules() if isinstance(m, _DropoutNd) and m.p > 0]
    for module in found:
        module.p = 0.0
    return len(found)


def _written(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


def _a(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
