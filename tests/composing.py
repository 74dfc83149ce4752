"""Configurations of commands; for tables of words parts that were composed before are copied."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

_GROUPS = ("parallel=", "data=", "optimizer=", "task=", "logger=", "+")


def composed(command: str, words: str) -> DictConfig:
    """The configuration of a command with words such as `parallel=dp batch_size=3`."""
    given = words.split()
    found = deepcopy(_of_groups(command, tuple(one for one in given if one.startswith(_GROUPS))))
    others = [one for one in given if not one.startswith(_GROUPS)]
    for one in OverridesParser.create().parse_overrides(others):
        OmegaConf.update(found, one.key_or_group, one.value())
    return found


@cache
def _of_groups(command: str, groups: tuple[str, ...]) -> DictConfig:
    return compose_anew(command, *groups)


def compose_anew(command: str, *words: str, with_hydra: bool = False) -> DictConfig:
    """The configuration of a command with any overrides, as Hydra composes it."""
    with initialize_config_module("spatialdl.conf", job_name=command, version_base="1.3"):
        return compose(command, list(words), return_hydra_config=with_hydra)
