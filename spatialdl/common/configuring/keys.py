"""Keys of the configuration files, with their comments.

Files are parsed as text: comments are the documentation, and help must not wait for imports.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from spatialdl.common.configuring.registered import ABOUT, NAMES

CONF = Path(str(files("spatialdl.conf")))

_LINE = re.compile(r"( *)([\w.]+):(?: +([^#\s].*?))?(?: +# (.*))?$")
_RARE = "# rarely set"
_PACKAGE = re.compile(r"^# @package (\S+)", re.MULTILINE)


class Key(NamedTuple):
    """A key of a configuration file.

    Attributes:
        name: full path, such as ``parallel.gems.variant``.
        default: text of the value; empty for a key of a mapping.
        comment: text of the comment on the same line.
        is_rare: whether only the help of its group lists it: it stands below a line
            ``# rarely set``, or follows from other keys.
    """

    name: str
    default: str
    comment: str
    is_rare: bool = False


@cache
def groups() -> dict[str, list[str]]:
    """The groups of the configuration, and the choices of each."""
    found: dict[str, list[str]] = {}
    for file in sorted(CONF.rglob("*.yaml")):
        if file.parent != CONF:
            found.setdefault(file.parent.relative_to(CONF).as_posix(), []).append(file.stem)
    found["parallel"] += NAMES
    return {group: sorted(choices) for group, choices in found.items()}


def file_of(group: str, choice: str) -> Path:
    """The file of a choice of a group; named layouts have none."""
    return CONF / group / f"{choice}.yaml"


def about(file: Path) -> str:
    """Description of a file: its first comment lines, up to an empty comment line."""
    if not file.exists():
        return ABOUT.get(file.stem, "")
    lines = file.read_text().splitlines()
    words = []
    for line in lines:
        if not line.startswith("#"):
            break
        if line == "#":  # further lines are not part of the help
            break
        if not line.startswith("# @"):
            words.append(line.removeprefix("# "))
    return " ".join(words)


@cache
def keys_of(file: Path) -> tuple[Key, ...]:
    """The keys that a file sets, in its order, without its list of defaults."""
    if not file.exists():
        return ()
    text = file.read_text()
    package = file.parent.relative_to(CONF).as_posix().replace("/", ".").strip(".")
    header = _PACKAGE.search(text)
    if header:
        package = "" if header[1] == "_global_" else header[1]
    return tuple(_keys(text.splitlines(), package))


def _keys(lines: list[str], package: str) -> Iterator[Key]:
    parents: list[tuple[int, str]] = []  # indents and names, this key's included
    is_rare = False
    for line in lines:
        is_rare = is_rare or line == _RARE
        match = _LINE.match(line)
        if match is None:
            continue
        indent, name = len(match[1]), match[2]
        parents = [parent for parent in parents if parent[0] < indent]
        parents.append((indent, name))
        path = ".".join([*([package] if package else []), *(part for _, part in parents)])
        if parents[0][1] != "defaults":
            default = (match[3] or "").strip()
            yield Key(path, default, match[4] or "", is_rare or default.startswith("${data."))


def chosen_by_default(command: str) -> dict[str, str]:
    """The default choice of each group of a command."""
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
        elif (CONF / f"{entry[1]}.yaml").exists():  # plan extends train
            found |= _choices(CONF / f"{entry[1]}.yaml", "")
    return found
