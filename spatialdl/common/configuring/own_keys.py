"""Keys of the user's own networks and losses, which no configuration file has."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from importlib.resources import files
from inspect import Parameter
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

FROM_DATA = {
    "${data.num_classes}": ("num_classes", "num_labels"),
    "${data.channels}": ("in_channels", "in_chans"),
}
"""Values from the data set, and the arguments of networks that take them."""

_PRODUCT = "spatialdl.models."


def named(target: str) -> Any:
    """Import the object of a dotted name; functions take precedence over modules of that name,
    such as spatialdl.models.unet.

    Raises:
        ImportError, AttributeError, ValueError: there is no such object.
    """
    found = resolve_name(target)
    if isinstance(found, ModuleType) and "." in target:
        found = resolve_name(":".join(target.rsplit(".", 1)))
    return found


def is_own_network(target: str) -> bool:
    """Whether ``model._target_`` is not in this package."""
    return not target.startswith(_PRODUCT)


def rewritten(argument: str) -> str:
    """Rewrite an override: ``++`` for keys of custom objects; expand short forms."""
    if re.match(r"(model|task\.loss|data\.dataset|data\.validation)\.[\w.]+=", argument):
        return f"++{argument}"
    if argument == "task=bag":  # also chooses data and network, which a task cannot
        return "experiment=bag"
    return re.sub(r"^data\.stage=(?!\{)", "data.stage.to=", argument)


def fit_model_keys(config: DictConfig, overrides: Iterable[str]) -> None:
    """Set the arguments of the user's own network, and those that follow from the data.

    Settings of the group's file belong to another network and are removed. Numbers of classes and
    channels go to the argument that takes them; a network with ``**kwargs`` gets all names in
    `FROM_DATA`, see `refused_key`.

    Raises:
        ValueError: there is no such network, or an argument may belong to either network.
    """
    given = {key[1] for o in overrides if (key := re.match(r"[+~]*model\.(\w+)", o))}
    group = {} if "_target_" in given else _settings_of_group(config.model)
    if "_target_" not in given and not group:
        return
    given |= {
        key for key, value in _plain(config.model).items() if group and group.get(key) != value
    }
    named = _arguments(str(config.model["_target_"]))
    _check_clear(config.model, [key for key in group if key not in given], named)
    takes_any = any(one.kind == Parameter.VAR_KEYWORD for one in named.values())
    with open_dict(config.model):
        for key in [key for key in config.model if key not in given]:
            del config.model[key]
        for value, names in FROM_DATA.items():
            taken = [name for name in names if _is_keyword(named.get(name))][:1]
            if not given.intersection(names):
                offered = taken or (names if takes_any else ())
                config.model.update(dict.fromkeys(offered, value))


def _settings_of_group(model: DictConfig) -> dict[str, Any]:
    """Settings of the file of ``model=``, if an experiment replaces its network.

    Empty if the network is that of the file, or the file is the user's.
    """
    if not HydraConfig.initialized():
        return {}
    file = (
        files("spatialdl.conf") / "model" / f"{HydraConfig.get().runtime.choices.get('model')}.yaml"
    )
    if not file.is_file():
        return {}
    found = DictConfig(OmegaConf.create(file.read_text()))
    settings = _plain(found.get("model", found))
    return {} if settings["_target_"] == model["_target_"] else settings


def _plain(model: DictConfig) -> dict[str, Any]:
    """Unresolved, with interpolations."""
    return cast(dict[str, Any], OmegaConf.to_container(model, resolve=False))


def _check_clear(model: DictConfig, keys: Iterable[str], named: dict[str, Parameter]) -> None:
    """Refuse a value that may come from the experiment, or from the group's file."""
    for key in keys:
        offered = any(key in names for names in FROM_DATA.values())
        if not offered and _is_keyword(named.get(key)) and named[key].default != model[key]:
            raise ValueError(
                f"model.{key}={model[key]} is ambiguous: it may be meant for {model['_target_']}, "
                f"or come from the file of model=: write model.{key}=... on the command line, or "
                "put your network into a file model/NAME.yaml and use model=NAME"
            )


def offered_keys(model: DictConfig) -> list[str]:
    """Arguments from the data passed to ``**kwargs`` of the network, which may reject them."""
    named = _arguments(str(model["_target_"]))
    return [
        name
        for names in FROM_DATA.values()
        for name in names
        if name in model
        and OmegaConf.is_interpolation(model, name)
        and not _is_keyword(named.get(name))
    ]


def refused_key(error: Exception, offered: Iterable[str]) -> str | None:
    """The offered argument that a network rejected, from the error of its call."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    return found[1] if found and found[1] in offered else None


def _arguments(target: str) -> dict[str, Parameter]:
    """Parameters by name; empty for a builtin without a signature."""
    try:
        return dict(inspect.signature(named(target)).parameters)
    except Exception as error:
        if isinstance(error, ValueError) and "no signature" in str(error):
            return {}
        raise ValueError(f"model._target_={target} cannot be imported: {error}") from error


def _is_keyword(argument: Parameter | None) -> bool:
    kinds = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
    return argument is not None and argument.kind in kinds
