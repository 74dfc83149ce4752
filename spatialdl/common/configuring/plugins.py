"""Lists of custom objects: ``key=[{_target_: package.Class, argument: value}, ...]``.

Imports no PyTorch: lists are checked before ranks start, when no user code is imported yet.
"""

from __future__ import annotations

import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra.utils
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

_LIBRARIES = (
    *(sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib")),
    *("<frozen", str(Path(__file__).resolve().parents[2])),
)
"""Code that is neither the user's nor named by the user."""


def describe_cause(error: BaseException) -> str:
    """Describe an error of code that a configuration names, without Hydra's words around it.

    The type is left out where the text has it, and the place is that in the user's code.
    """
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    text = text.partition(" full_key: ")[0]
    if not isinstance(error, ValueError | OSError | HydraException):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    if inside:
        text += f" ({inside[-1].filename}, line {inside[-1].lineno})"
    return text


@dataclass(frozen=True)
class Plugin:
    """An object that a configuration names.

    Attributes:
        key: configuration key, for messages.
        target: class or function, as package.Class.
        name: its ``name`` in the configuration, by default the last part of the target.
    """

    key: str
    target: str
    name: str
    _settings: DictConfig

    def make(self) -> Any:
        """Instantiate the object.

        Raises:
            ValueError: the target cannot be imported or called with its arguments.
        """
        try:
            plain = OmegaConf.to_container(self._settings, resolve=True)
            assert isinstance(plain, dict)
            plain.pop("name", None)
            return hydra.utils.instantiate({"_convert_": "all", **plain})
        except (OmegaConfBaseException, InstantiationException) as error:
            raise ValueError(
                f"{self.key}: {self.target} cannot be instantiated: {describe_cause(error)}"
            ) from error


def plugins_of(entries: object, key: str, example: str) -> list[Plugin]:
    """Parse a list of plugins; imports nothing.

    Args:
        entries: the list, or None.
        key: configuration key, for messages.
        example: a valid entry, for messages.

    Raises:
        ValueError: not a list, or an entry without a class or with an invalid name.
    """
    if entries is None:
        return []
    if not isinstance(entries, ListConfig):
        raise ValueError(f"{key}={entries} must be a list of entries such as {example}")
    plugins: list[Plugin] = []
    for entry in entries._iter_ex(resolve=False):
        target = entry.get("_target_") if isinstance(entry, DictConfig) else None
        if not isinstance(target, str) or "." not in target:
            raise ValueError(f"{key}: {entry} has no class: write it as {example}")
        name = entry.get("name", target.rpartition(".")[2])
        if not isinstance(name, str) or not name.replace("_", "").isalnum():
            raise ValueError(f"{key}: name={name} must have only letters, digits and _")
        plugins.append(Plugin(key, target, name, entry))
    return plugins


def check_names(plugins: list[Plugin], taken: set[str]) -> None:
    """Check that names are unique and not taken.

    Raises:
        ValueError: a name occurs twice; the message has it.
    """
    seen = set(taken)
    for plugin in plugins:
        if plugin.name in seen:
            raise ValueError(
                f"{plugin.key}: duplicate name {plugin.name}: rename one, "
                f"{{_target_: {plugin.target}, name: other_name}}"
            )
        seen.add(plugin.name)
