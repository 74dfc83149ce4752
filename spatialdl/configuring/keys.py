"""The keys of the configuration files, with the comments that stand beside them.

Read as text: the comments are the documentation, and help shall come at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

CONF = Path(str(files("spatialdl.conf")))

_LINE = re.compile(r"( *)([\w.]+):(?: +([^#\s].*?))?(?: +# (.*))?$")
_PACKAGE = re.compile(r"^# @package (\S+)", re.MULTILINE)


class Key(NamedTuple):
    """A key of a configuration file.

    Attributes:
        name: with all that it lies in, such as ``parallel.gems.variant``.
        default: as it is written there; empty for a key that holds others.
        comment: that stands beside it.
    """

    name: str
    default: str
    comment: str


@cache
def groups() -> dict[str, list[str]]:
    """The groups of the configuration, and what can be chosen of each."""
    found: dict[str, list[str]] = {}
    for file in sorted(CONF.rglob("*.yaml")):
        if file.parent != CONF:
            found.setdefault(file.parent.relative_to(CONF).as_posix(), []).append(file.stem)
    return {group: sorted(choices) for group, choices in found.items()}


def file_of(group: str, choice: str) -> Path:
    """Where a choice of a group is written down."""
    return CONF / group / f"{choice}.yaml"


def about(file: Path) -> str:
    """What a file says of itself in its first comment lines."""
    lines = file.read_text().splitlines()
    said = []
    for line in lines:
        if not line.startswith("#"):
            break
        if line == "#":  # what follows is for who reads the file
            break
        if not line.startswith("# @"):
            said.append(line.removeprefix("# "))
    return " ".join(said)


@cache
def keys_of(file: Path) -> tuple[Key, ...]:
    """The keys that a file sets, in its order; its list of defaults is none of them."""
    text = file.read_text()
    package = file.parent.relative_to(CONF).as_posix().replace("/", ".").strip(".")
    header = _PACKAGE.search(text)
    if header:
        package = "" if header[1] == "_global_" else header[1]
    return tuple(_keys(text.splitlines(), package))


def _keys(lines: list[str], package: str) -> Iterator[Key]:
    inside: list[tuple[int, str]] = []  # indents and names of the keys around
    for line in lines:
        found = _LINE.match(line)
        if found is None:
            continue
        indent, name = len(found[1]), found[2]
        inside = [one for one in inside if one[0] < indent]
        inside.append((indent, name))
        path = ".".join([*([package] if package else []), *(one for _, one in inside)])
        if inside[0][1] != "defaults":
            yield Key(path, (found[3] or "").strip(), found[4] or "")


def chosen_by_default(command: str) -> dict[str, str]:
    """The choice of each group that a command takes if nothing is said."""
    return _choices(CONF / f"{command}.yaml", "")


def _choices(file: Path, group: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in file.read_text().partition("defaults:\n")[2].splitlines():
        entry = re.match(r"  - ([\w/]+)(?:: ([\w+]+))?", line)
        if entry is None:
            break
        name = "/".join(filter(None, [group, entry[1]]))
        if entry[2]:
            found[name] = entry[2]
            below = file_of(name, entry[2])
            found |= _choices(below, name) if below.exists() else {}
        elif (CONF / f"{entry[1]}.yaml").exists():  # plan takes what train takes
            found |= _choices(CONF / f"{entry[1]}.yaml", "")
    return found
