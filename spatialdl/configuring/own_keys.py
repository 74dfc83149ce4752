"""Keys that are the user's own: of a network or a loss that no configuration file knows."""

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
"""What the data say of a network, and how networks call it."""

_PRODUCT = "spatialdl.models."


def named(target: str) -> Any:
    """The object of a dotted name; a function comes before its module, as spatialdl.models.unet.

    Raises:
        ImportError, AttributeError, ValueError: if there is none.
    """
    found = resolve_name(target)
    if isinstance(found, ModuleType) and "." in target:
        found = resolve_name(":".join(target.rsplit(".", 1)))
    return found


def is_own_network(target: str) -> bool:
    """Whether ``model._target_`` is the user's, and not one of this package."""
    return not target.startswith(_PRODUCT)


def rewritten(argument: str) -> str:
    """Let what is the user's own have keys that the group's file does not know; short forms."""
    if re.match(r"(model|task\.loss|data\.dataset|data\.validation)\.[\w.]+=", argument):
        return f"++{argument}"
    if argument == "task=bag":  # also chooses data and network, which no task can
        return "experiment=bag"
    return re.sub(r"^data\.stage=(?!\{)", "data.stage.to=", argument)


def fit_model_keys(config: DictConfig, overrides: Iterable[str]) -> None:
    """Give a network that the user names its own arguments, and those that follow from the data.

    Settings of the group's file are those of another network and are left out. Classes and channels
    go to the argument that takes them; where a network has ``**kwargs``, all names in use are
    offered, see `refused_key`.

    Raises:
        ValueError: if there is no such network, or it is not clear whose an argument is.
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
    """Those of the file that ``model=`` names, where an experiment puts another network over it.

    Empty if the network is the file's own, or the file is the user's.
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
    """As it is written, interpolations included."""
    return cast(dict[str, Any], OmegaConf.to_container(model, resolve=False))


def _check_clear(model: DictConfig, keys: Iterable[str], named: dict[str, Parameter]) -> None:
    """Refuse a value that the experiment may have set, or the group's file for another network."""
    for key in keys:
        offered = any(key in names for names in FROM_DATA.values())
        if not offered and _is_keyword(named.get(key)) and named[key].default != model[key]:
            raise ValueError(
                f"model.{key}={model[key]} may be meant for {model['_target_']}, or come from the "
                f"network that model= names: write model.{key}=... on the command line, or put "
                "your network into a file model/NAME.yaml beside the experiment and take model=NAME"
            )


def offered_keys(model: DictConfig) -> list[str]:
    """Arguments from the data that only ``**kwargs`` of the network take, which may refuse them."""
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
    """The offered argument that a network does not know, by the error of its call."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    return found[1] if found and found[1] in offered else None


def _arguments(target: str) -> dict[str, Parameter]:
    """By name; none of a builtin without a signature."""
    try:
        return dict(inspect.signature(named(target)).parameters)
    except Exception as error:
        if isinstance(error, ValueError) and "no signature" in str(error):
            return {}
        raise ValueError(f"model._target_={target} cannot be imported: {error}") from error


def _is_keyword(argument: Parameter | None) -> bool:
    kinds = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
    return argument is not None and argument.kind in kinds
