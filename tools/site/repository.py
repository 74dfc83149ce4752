"""A hook of MkDocs: files of the repository that pages link become pages of the site.

In the repository `[site.yaml](../examples/slurm/launcher/site.yaml)` opens the file. The site has
no such file, so its text is shown on a page of its own, and the link leads there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # tests import this file without MkDocs
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "source"
ALWAYS = ("SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md")
"""Pages of the navigation, as far as they are there."""

_OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)((?:#[^)]*)?)\)")
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)]+)\)")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash", ".sh": "bash", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file that a page links, and for those of `ALWAYS`.

    Raises:
        FileNotFoundError: a page links a file that is not there.
    """
    from mkdocs.structure.files import File

    linked = {name for name in ALWAYS if (ROOT / name).is_file()}
    for file in files.documentation_pages():
        linked |= {path for path, _ in _OUTSIDE.findall(file.content_string)}
    for path in sorted(linked):
        files.append(File.generated(config, address(path), content=page_of(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links out of the documentation lead to these pages."""
    if page.file.src_uri.startswith(f"{FOLDER}/"):
        return markdown
    return _OUTSIDE.sub(lambda found: f"]({address(found[1])}{found[2]})", markdown)


def address(path: str) -> str:
    """Where the page of a file or folder of the repository is, within the documentation."""
    path = path.rstrip("/")
    return f"{FOLDER}/{path}" if path.endswith(".md") else f"{FOLDER}/{path}.md"


def page_of(path: str) -> str:
    """The page in Markdown: of a page itself, of another file its text, of a folder all files."""
    path = path.rstrip("/")
    there = ROOT / path
    if there.suffix == ".md":
        return _LINK.sub(lambda found: f"]({_from_source(found[1])})", there.read_text())
    if there.is_dir():
        inside = sorted(file for file in there.rglob("*") if file.is_file())
        inside = [file for file in inside if "__pycache__" not in file.parts]
        listed = (_listing(file, file.relative_to(ROOT).as_posix(), "##") for file in inside)
        return "\n\n".join([f"# {path}", *listed])
    return _listing(there, path, "#")


def _from_source(link: str) -> str:
    """A link of a page at the root of the repository, seen from its page in `FOLDER`."""
    if link.startswith("docs/"):
        return f"../{link.removeprefix('docs/')}"
    return link if link.partition("#")[0] in ALWAYS else "../index.md"


def _listing(file: Path, name: str, heading: str) -> str:
    language = _LANGUAGES.get(file.suffix, "text")
    return f"{heading} {name}\n\n````{language}\n{file.read_text().rstrip()}\n````"
