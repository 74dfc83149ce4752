"""Import and build the user's network, and disable its dropout."""

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

from spatialdl.common.configuring.own_keys import named
from spatialdl.torch_internals import DropoutBase


def find_builder(target: str) -> Callable[..., Any]:
    """Import a callable by ``package.module.function`` or ``file.py:function``.

    Raises:
        ValueError: `target` does not exist or is not callable.
    """
    file, colon, name = target.rpartition(":")
    if colon and file.endswith(".py"):
        imported = getattr(_module_of(Path(file)), name, None)
        if imported is None:
            raise ValueError(f"{file} has no {name}: name a function that returns the network")
    else:
        try:
            imported = named(target)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"cannot import {target}: {error}; name a function that returns the network as "
                f"package.module.function or file.py:function, relative to {Path.cwd()}"
            ) from error
    if not callable(imported):
        raise ValueError(f"{target} is {_a(imported)}, not a function that returns the network")
    builder: Callable[..., Any] = imported
    return builder


def _module_of(file: Path) -> ModuleType:
    if not file.is_file():
        raise ValueError(f"file {file} does not exist")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.resolve().parent))  # as for a script, so that siblings import
    spec.loader.exec_module(module)
    return module


def arguments_of(words: Sequence[str]) -> dict[str, Any]:
    """Parse arguments of a builder, such as ``num_classes=3``; values are YAML.

    Raises:
        ValueError: a word is not ``key=value``.
    """
    arguments = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"{word} is not key=value, an argument of the function")
        arguments[key] = yaml.safe_load(value)
    return arguments


def build(target: str, seed: int, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Build the network of `target`, with the same weights on every rank.

    Args:
        target: callable that returns the network, see `find_builder`.
        seed: seed of PyTorch's generator for the weights.
        arguments: keyword arguments of the callable.

    Raises:
        ValueError: the callable rejects the arguments or returns no network.
    """
    builder, keywords = find_builder(target), dict(arguments or {})
    torch.manual_seed(seed)
    call = f"{target}({_written(keywords)})"
    try:
        network = builder(**keywords)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # raised inside the builder: an error of the network
        raise ValueError(f"{call} failed: {error}; pass arguments as key=value") from error
    if not isinstance(network, nn.Module):
        raise ValueError(f"{call} returned {_a(network)}, not a torch.nn.Module")
    return network


def switch_off_dropout(network: nn.Module) -> int:
    """Set p = 0 in all dropout modules; returns the number of modules changed."""
    active = [m for m in network.modules() if isinstance(m, DropoutBase) and m.p > 0]
    for module in active:
        module.p = 0.0
    return len(active)


def _written(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


def _a(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
