"""The network that the user names: finding its builder, building it, keeping chance out of it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd


def find_builder(target: str) -> Callable[[], Any]:
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
            found = resolve_name(target)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{target} is not to be found: {error}; name a function that makes the network as "
                f"package.module.function or file.py:function, seen from {Path.cwd()}"
            ) from error
    if not callable(found):
        raise ValueError(f"{target} is {_a(found)}, not a function that makes the network")
    builder: Callable[[], Any] = found
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


def build(target: str, seed: int) -> nn.Module:
    """The network of `target`, the same on every rank.

    Raises:
        ValueError: if what `target` names does not make one without arguments.
    """
    builder = find_builder(target)
    torch.manual_seed(seed)
    try:
        network = builder()
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # from within: the network's own defect
        raise ValueError(f"{target}() must make the network without arguments: {error}") from error
    if not isinstance(network, nn.Module):
        raise ValueError(f"{target}() gives {_a(network)}, not a torch.nn.Module")
    return network


def switch_off_dropout(network: nn.Module) -> int:
    """Let all dropout modules keep everything; how many there were that did not."""
    found = [m for m in network.modules() if isinstance(m, _DropoutNd) and m.p > 0]
    for module in found:
        module.p = 0.0
    return len(found)


def _a(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
