"""A hook of MkDocs: what the commands of `pyproject.toml` print with ``--help``.

A line `<!-- help of spatialdl-tile inspect -->` of a page becomes a block with that text.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tomllib
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:  # tests import this file without MkDocs
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_PLACE = re.compile(r"^<!-- help of ([\w -]+\w) -->$", re.MULTILINE)
_COLUMNS = 96
"""Of the text, so that a block needs no scrolling on a desktop."""


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the texts."""
    return _PLACE.sub(lambda found: f"```text\n{help_of(found[1].split())}\n```", markdown)


def help_of(words: list[str]) -> str:
    """Return what a command prints with ``--help``.

    Args:
        words: the name of an installed command, and of its subcommand if any.
    """
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, main = scripts[words[0]].partition(":")
    printed = io.StringIO()
    environment = mock.patch.dict(os.environ, COLUMNS=str(_COLUMNS))
    arguments = mock.patch.object(sys, "argv", [words[0]])  # argparse takes its name from there
    with environment, arguments, redirect_stdout(printed), suppress(SystemExit):
        getattr(import_module(module), main)([*words[1:], "--help"])
    return printed.getvalue().rstrip()
