"""MkDocs hook: adds pages for files of the repository that the documentation links.

In the repository `[site.yaml](../examples/slurm/launcher/site.yaml)` opens the file. The site lacks
such files, so each gets a page in `FOLDER` with its text, and links are redirected to it. Files in
`ALWAYS` and the log of decisions are added to the navigation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # tests import this file without MkDocs
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs"
FOLDER = "source"
ALWAYS = ("CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "CHANGELOG.md")
"""Files at the root of the repository; missing ones are skipped."""
DECISIONS = "decisions"
"""Folder in `DOCS`; may be missing."""

_LINK = re.compile(r"\]\((?![a-z]+:|#)([^()\s#]+)((?:#[^()\s]*)?)\)")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash", ".sh": "bash", ".toml": "toml"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add pages to the last section of the navigation, for contributors."""
    (pages,) = config.nav[-1].values()
    pages += [f"{FOLDER}/{name}" for name in ALWAYS if (ROOT / name).is_file()]
    log = sorted(
        (ROOT / DOCS / DECISIONS).glob("*.md"), key=lambda file: (file.stem != "README", file)
    )
    if log:
        pages.append({"Decisions": [f"{DECISIONS}/{file.name}" for file in log]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each linked file, including links in added pages."""
    from mkdocs.structure.files import File

    found = {name: None for name in ALWAYS if (ROOT / name).is_file()}
    for file in files.documentation_pages():
        found |= dict.fromkeys(outside(file.content_string, f"{DOCS}/{file.src_uri}"))
    waiting = list(found)
    while waiting:
        path = waiting.pop()
        text = page_of(path)
        if path.endswith(".md"):
            new = [one for one in outside(text, path) if one not in found]
            found |= dict.fromkeys(new)
            waiting += new
            text = redirected(text, path, address(path))
        files.append(File.generated(config, address(path), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Redirect links that leave the documentation to the added pages."""
    own = page.file.src_uri
    added = own.startswith(f"{FOLDER}/")
    return markdown if added else redirected(markdown, f"{DOCS}/{own}", own)


def outside(markdown: str, path: str) -> Iterator[str]:
    """Files and folders outside `DOCS` linked by a page, relative to the root."""
    for link, _ in _LINK.findall(markdown):
        target = normpath(join(dirname(path), link))
        if not target.startswith(f"{DOCS}/") and (ROOT / target).exists():
            yield target


def redirected(markdown: str, path: str, own: str) -> str:
    """Text of a page with links redirected to pages of the site.

    Args:
        markdown: text of the page.
        path: path of the page in the repository.
        own: path of the page in the documentation.
    """

    def to(found: re.Match[str]) -> str:
        target = normpath(join(dirname(path), found[1]))
        if not (ROOT / target).exists():
            return found[0]  # MkDocs reports it
        there = (
            target.removeprefix(f"{DOCS}/") if target.startswith(f"{DOCS}/") else address(target)
        )
        return f"]({relpath(there, dirname(own) or '.')}{found[2]})"

    return _LINK.sub(to, markdown)


def address(path: str) -> str:
    """Path within the documentation of the page of a file or folder of the repository."""
    return f"{FOLDER}/{path}" if path.endswith(".md") else f"{FOLDER}/{path}.md"


def page_of(path: str) -> str:
    """Page in Markdown: a Markdown file as it is, any other file as a listing, all of a folder."""
    there = ROOT / path
    if there.suffix == ".md":
        return there.read_text()
    if there.is_dir():
        inside = sorted(file for file in there.rglob("*") if file.is_file())
        inside = [file for file in inside if "__pycache__" not in file.parts]
        listed = (_listing(file, file.relative_to(ROOT).as_posix(), "##") for file in inside)
        return "\n\n".join([f"# {path}", *listed])
    return _listing(there, path, "#")


def _listing(file: Path, name: str, heading: str) -> str:
    language = _LANGUAGES.get(file.suffix, "text")
    return f"{heading} {name}\n\n````{language}\n{file.read_text().rstrip()}\n````"
