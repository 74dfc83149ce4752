"""MkDocs hook: reference of the configuration keys, from `spatialdl/conf` and its comments.

A line `<!-- keys of train -->` in a page is replaced by tables of all keys of that command.
"""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from spatialdl.common.configuring.keys import (
    CONF,
    Key,
    about,
    chosen_by_default,
    file_of,
    groups,
    keys_of,
)

if TYPE_CHECKING:  # tests import this file without MkDocs
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_PLACE = re.compile(r"^<!-- keys of (\w+) -->$", re.MULTILINE)
_WITH_GROUPS = ("train",)
"""Commands whose groups are listed; all others have few groups, or those of train."""


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the markers by tables."""
    return _PLACE.sub(lambda found: tables(found[1]), markdown)


def tables(command: str) -> str:
    """All keys of a command in Markdown: its own, then those of each group by choice.

    Args:
        command: name of a file in `spatialdl/conf`, without suffix.
    """
    own = [key for key in keys_of(CONF / f"{command}.yaml") if not key.name.startswith("hydra")]
    parts = [_table(own)] if own else []
    if command in _WITH_GROUPS:
        taken = chosen_by_default(command)
        names = sorted(groups(), key=lambda name: (name not in taken, [*taken, name].index(name)))
        parts += [_group(name, groups()[name], taken.get(name, "")) for name in names]
    return "\n\n".join(parts)


def _group(name: str, choices: Sequence[str], default: str) -> str:
    """A heading for the group, and a table per choice of its differences from the first."""
    first = default if default in choices else choices[0]
    known = set(keys_of(file_of(name, first)))
    parts = [f"### {name}"]
    for choice in (first, *(one for one in choices if one != first)):
        file = file_of(name, choice)
        keys = [key for key in keys_of(file) if choice == first or key not in known]
        mark = " (default)" if choice == default else ""
        parts += [f"#### `{name}={choice}`{mark}", *filter(None, [_sentence(about(file))])]
        if keys:
            parts.append(_table(keys))
    return "\n\n".join(parts)


def _table(keys: Sequence[Key]) -> str:
    rows = [f"| `{key.name}` | {_value(key.default)} | {_text(key.comment)} |" for key in keys]
    return "\n".join(["| key | default | |", "|---|---|---|", *rows])


def _value(default: str) -> str:
    return f"`{default}`".replace("|", "\\|") if default else ""


def _text(comment: str) -> str:
    """Plain text as Markdown that shows it unchanged, but for `code`."""
    parts = re.split(r"(`[^`]+`)", comment)
    parts[::2] = [
        re.sub(r"[\\*_\[\]]", r"\\\g<0>", html.escape(part, quote=False)) for part in parts[::2]
    ]
    return "".join(parts).replace("|", "\\|")


def _sentence(text: str) -> str:
    return _text(f"{text[0].upper()}{text[1:].rstrip('.')}.") if text else ""
