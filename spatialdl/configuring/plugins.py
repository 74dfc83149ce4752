"""Lists of objects of the user's own: ``key=[{_target_: package.Class, argument: value}, ...]``.

No PyTorch here: they are checked before ranks start, where nothing of the user's is imported yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hydra.utils
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


@dataclass(frozen=True)
class Plugin:
    """An object that a configuration names.

    Attributes:
        key: of the configuration, for messages.
        target: its class or function, as package.Class.
        name: that the configuration gives it; else the last part of the target.
    """

    key: str
    target: str
    name: str
    _settings: DictConfig

    def make(self) -> Any:
        """The object.

        Raises:
            ValueError: if it cannot be imported, or refuses its arguments.
        """
        try:
            plain = OmegaConf.to_container(self._settings, resolve=True)
            assert isinstance(plain, dict)
            plain.pop("name", None)
            return hydra.utils.instantiate({"_convert_": "all", **plain})
        except (OmegaConfBaseException, hydra.errors.InstantiationException) as error:
            said = " ".join(str(error).split())
            raise ValueError(f"{self.key}: {self.target} cannot be made: {said}") from error


def plugins_of(given: object, key: str, example: str) -> list[Plugin]:
    """What a list of a configuration names; nothing is imported.

    Args:
        given: the list, or None.
        key: of the configuration, for messages.
        example: of an entry, for messages.

    Raises:
        ValueError: if it is no such list, or two entries have the same name.
    """
    if given is None:
        return []
    if not isinstance(given, ListConfig):
        raise ValueError(f"{key}={given} must be a list of such as {example}")
    found: list[Plugin] = []
    for one in given._iter_ex(resolve=False):
        target = one.get("_target_") if isinstance(one, DictConfig) else None
        if not isinstance(target, str) or "." not in target:
            raise ValueError(f"{key}: {one} names no class: write it as {example}")
        name = one.get("name", target.rpartition(".")[2])
        if not isinstance(name, str) or not name.replace("_", "").isalnum():
            raise ValueError(f"{key}: name={name} must have letters, digits and _ only")
        found.append(Plugin(key, target, name, one))
    return found


def check_names(plugins: list[Plugin], taken: set[str]) -> None:
    """Refuse names that two have, or that are taken.

    Raises:
        ValueError: naming it.
    """
    seen = set(taken)
    for plugin in plugins:
        if plugin.name in seen:
            raise ValueError(
                f"{plugin.key}: there are two called {plugin.name}: give one another name, "
                f"{{_target_: {plugin.target}, name: other_name}}"
            )
        seen.add(plugin.name)
