"""Keys that are the user's own: of a network or a loss that no configuration file knows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pkgutil import resolve_name

from omegaconf import DictConfig, open_dict


def rewritten(argument: str) -> str:
    """Let what is the user's own have keys that the group's file does not know; short forms."""
    if re.match(r"(model|task\.loss)\.[\w.]+=", argument):
        return f"++{argument}"
    return re.sub(r"^data\.stage=(?!\{)", "data.stage.to=", argument)


def fit_model_keys(config: DictConfig, overrides: Iterable[str]) -> None:
    """Where the user names a network, leave out what the group's file says and it does not take.

    Raises:
        ValueError: if there is no such network.
    """
    given = {key[1] for o in overrides if (key := re.match(r"\+*model\.(\w+)", o))}
    if "_target_" not in given:
        return
    target = config.model["_target_"]
    try:
        taken = inspect.signature(resolve_name(target)).parameters
    except Exception as error:
        raise ValueError(f"model._target_={target} cannot be imported: {error}") from error
    with open_dict(config.model):
        for key in list(config.model):
            if key not in taken and key not in given:
                del config.model[key]
