"""Type checks of configuration values: switches and numbers; values in files of other people."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from spatialdl.common.configuring.keys import CONF, keys_of

_FRACTIONS = ("comm.timeout",)
"""Fractions are valid although the defaults are whole numbers."""

_SWITCH, _WHOLE, _NUMBER, _NULL = "true or false", "a whole number", "a number", "null"
_STEPS = (
    "scheduler.T_max",
    "scheduler.step_size",
    "scheduler.total_iters",
    "scheduler.total_steps",
)
_NO_DEFAULT = {"scheduler.max_lr": (_NUMBER, _NULL), **dict.fromkeys(_STEPS, (_WHOLE, _NULL))}
"""Keys that are null in all files, and otherwise checked only after the network is built."""

_INTERPOLATION = re.compile(r"(\\*)\$\{")

_NAMED = ("data.mean", "data.std", "parallel.tensor")
"""Keys that also accept names or lists, see `data.normalisation` and `training.layouts`."""

_LIKE = {
    _SWITCH: re.compile(r"true|false"),
    _NULL: re.compile(r"null"),
    _WHOLE: re.compile(r"-?\d+"),
    _NUMBER: re.compile(r"-?\d+\.\d*(e[+-]?\d+)?|-?\d+e[+-]?\d+"),
}


def check_values(config: DictConfig) -> None:
    """Check that each value has the type of its key, known from default and comment.

    Arguments of the user's own networks and losses are not checked.

    Raises:
        ValueError: a value has another type; the message has the key.
    """
    is_own = not str(OmegaConf.select(config, "model._target_")).startswith("spatialdl.")
    for key, kinds in _kinds().items():
        if is_own and key.startswith("model."):
            continue
        parent, _, name = key.rpartition(".")
        try:
            node = OmegaConf.select(config, parent) if parent else config
            if not isinstance(node, DictConfig) or name not in node:
                continue
            value = node[name]
        except OmegaConfBaseException:  # an unresolved reference is reported where it is used
            continue
        if not any(_is(kind, value) for kind in kinds):
            raise ValueError(f"{key}={_written(value)} must be {', or '.join(kinds)}")


@cache
def _kinds() -> Mapping[str, tuple[str, ...]]:
    """Types of the keys that are a switch or a number in all files."""
    found: dict[str, set[str]] = {}
    for file in CONF.rglob("*.yaml"):
        for key in keys_of(file):
            kinds = found.setdefault(key.name, set())
            kinds.add(_kind(key.default))
            if re.search(r"\bnull\b", key.comment):
                kinds.add(_NULL)
    checked = {
        name: _allowed(name, kinds)
        for name, kinds in found.items()
        if name not in _NAMED and _is_checked(kinds)
    }
    return checked | _NO_DEFAULT


def _is_checked(kinds: set[str]) -> bool:
    plain = kinds - {_NULL}
    return plain == {_SWITCH} or (bool(plain) and plain <= {_WHOLE, _NUMBER})


def _allowed(name: str, kinds: set[str]) -> tuple[str, ...]:
    number = _NUMBER if _NUMBER in kinds or name in _FRACTIONS else _WHOLE
    kind = _SWITCH if _SWITCH in kinds else number
    return (kind, _NULL) if _NULL in kinds else (kind,)


def _kind(default: str) -> str:
    return next((kind for kind, like in _LIKE.items() if like.fullmatch(default)), "")


def _is(kind: str, value: object) -> bool:
    if isinstance(value, bool) or value is None:
        return kind == (_NULL if value is None else _SWITCH)
    if kind == _WHOLE:
        return isinstance(value, int)
    return kind == _NUMBER and isinstance(value, int | float) and math.isfinite(value)


def _written(value: object) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def literal(settings: Mapping[str, Any]) -> DictConfig:
    r"""A configuration in which ``${...}`` stands for itself.

    Otherwise ``${oc.env:NAME}`` in a file would show an environment variable of whoever reads it,
    and ``${new_folder:PATH}`` would create folders.
    """
    config: DictConfig = OmegaConf.create(_escaped(settings))
    return config


def _escaped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    if isinstance(value, str):
        return _INTERPOLATION.sub(lambda found: 2 * found[1] + r"\${", value)
    return value
