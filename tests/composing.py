"""Configurations of commands, as Hydra composes them: once for each choice of files.

Composing takes 80 ms of a CPU, and the tests need two thousand; values are set in a copy, in 4 ms.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

import spatialdl.conf

_GROUPS = {path.name for path in Path(spatialdl.conf.__file__).parent.iterdir() if path.is_dir()}


def composed(command: str, *words: str) -> DictConfig:
    """The configuration of a command with words such as `parallel=dp`, `data.batch_size=3`."""
    values = [word for word in words if not _chooses(word)]
    found = deepcopy(_of_groups(command, *filter(_chooses, words)))
    try:
        for value in OverridesParser.create().parse_overrides(values):
            parent, _, name = value.key_or_group.rpartition(".")
            if value.is_delete():
                with open_dict(found):
                    del OmegaConf.select(found, parent)[name]
            else:
                adds = value.is_add() or value.is_force_add()
                OmegaConf.update(found, value.key_or_group, value.value(), force_add=adds)
    except OmegaConfBaseException:  # let Hydra say what is wrong
        return compose_anew(command, *words)
    return found


def _chooses(word: str) -> bool:
    """Whether a word chooses a file, or sets a key of Hydra."""
    key = word.lstrip("+~").partition("=")[0]
    return key in _GROUPS or not key.replace(".", "").isidentifier() or key.startswith("hydra")


@cache
def _of_groups(command: str, *words: str) -> DictConfig:
    """The choice of several files is put together of choices of one, if each sets its own group."""
    if len(words) < 2:
        return compose_anew(command, *words)
    groups = dict(_group_of(command, word) for word in words)
    if "" in groups or len(groups) < len(words):
        return compose_anew(command, *words)
    found = deepcopy(_of_groups(command))
    with open_dict(found):
        found.update(deepcopy(groups))
    return found


@cache
def _group_of(command: str, word: str) -> tuple[str, DictConfig | None]:
    """The only key that a choice of a file sets, and its value; "" where it sets others, too."""
    group = word.partition("=")[0]
    chosen = _of_groups(command, word)
    before, after = (OmegaConf.to_container(one) for one in (_of_groups(command), chosen))
    before.pop(group, None)
    alone = after.pop(group, None) is not None and list(before.items()) == list(after.items())
    return (group, chosen[group]) if alone else ("", None)


def compose_anew(command: str, *words: str, with_hydra: bool = False) -> DictConfig:
    """The configuration of a command with any overrides, as Hydra composes it."""
    with initialize_config_module("spatialdl.conf", job_name=command, version_base="1.3"):
        return compose(command, list(words), return_hydra_config=with_hydra)
