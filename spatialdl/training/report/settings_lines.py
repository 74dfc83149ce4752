"""A configuration line by line, with what the user has changed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Line(NamedTuple):
    """A line of YAML, and the words of the command line that have set it."""

    text: str
    override: str


def settings_lines(config: Mapping[str, Any], overrides: Sequence[str]) -> list[Line]:
    """The lines of a nested configuration.

    Args:
        overrides: as on the command line; that of a group belongs to the group's own line.
    """
    given = {}
    for word in overrides:
        key, _, value = word.lstrip("+~").partition("=")
        given[key.partition("@")[0].replace("/", ".")] = f"{key}={value}" if value else word
    return list(_lines(config, given, "", 0))


def _lines(
    config: Mapping[str, Any], given: Mapping[str, str], path: str, depth: int
) -> Iterator[Line]:
    for key, value in config.items():
        name, indent = f"{path}{key}", "  " * depth
        if isinstance(value, Mapping) and value:
            yield Line(f"{indent}{key}:", given.get(name, ""))
            yield from _lines(value, given, f"{name}.", depth + 1)
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            yield Line(f"{indent}{key}: {text}", given.get(name, ""))
