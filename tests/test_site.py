"""The site has every page, every public name, every key; what it says of messages is true."""

from __future__ import annotations

import html
import re
import tomllib
from importlib import import_module
from pathlib import Path

import markdown
import pytest
import torch.nn.functional as F
import yaml

from spatialdl.common.configuring.keys import CONF, groups, keys_of
from spatialdl.spatial.table import HANDLERS
from tests.test_docs import PUBLIC
from tools.site import commands, configuration, repository

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = {page.relative_to(DOCS).as_posix(): page.read_text() for page in DOCS.rglob("*.md")}
OF_OTHERS = ("There are", "mpiexec has", "The PMIx server", "DataLoader", "UserWarning", "/dev/shm")
COMMANDS = ("train", "predict", "evaluate", "plan")


def nav() -> list[str]:
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    return re.findall(r"([\w/.-]+\.md)(?:  #.*)?$", text, re.MULTILINE)


def test_every_page_is_in_the_navigation_once():
    by_themselves = {page for page in PAGES if page.startswith(f"{repository.DECISIONS}/")}
    assert sorted(nav()) == sorted(set(PAGES) - by_themselves)


def test_every_page_has_one_title_and_every_picture_a_text():
    for name, text in PAGES.items():
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        assert len(re.findall(r"^# ", prose, re.MULTILINE)) == 1, name
        assert re.findall(r"!\[\s*\]", prose) == [], name


def test_the_reference_has_every_public_name():
    shown = re.findall(r"^::: (\S+)$", PAGES["api.md"] + PAGES["api-more.md"], re.MULTILINE)
    assert len(shown) == len(set(shown))
    assert set(PUBLIC) - set(shown) == set()
    for name in shown:
        module, _, word = name.rpartition(".")
        assert hasattr(import_module(module), word)


def test_the_reference_has_every_key_with_its_comment():
    page = "\n".join(configuration.tables(command) for command in COMMANDS)
    files = [CONF / f"{command}.yaml" for command in COMMANDS]
    files += [
        CONF / group / f"{one}.yaml" for group, choices in groups().items() for one in choices
    ]
    keys = [key for file in files for key in keys_of(file) if not key.name.startswith("hydra")]
    rendered = markdown.markdown(page, extensions=["tables"])
    rows = re.findall(r"<tr>\n<td>(.*?)</td>\n<td>.*?</td>\n<td>(.*?)</td>", rendered)
    shown = {tuple(html.unescape(re.sub(r"</?\w+>", "", cell)) for cell in row) for row in rows}
    assert {(key.name, key.comment.replace("`", "")) for key in keys} - shown == set()
    assert "<em>" not in rendered  # of `_target_` in comments and headings
    assert "| `data.batch_size` | `8` | images per step" in page
    assert "#### `parallel=sp+pp`" in page
    for command in COMMANDS:
        assert f"<!-- keys of {command} -->" in PAGES["configuration.md"]


def test_the_reference_has_every_installed_command():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert [name for name in scripts if f"| `{name}` |" not in PAGES["configuration.md"]] == []
    assert [name for name in scripts if f"<!-- help of {name}" not in PAGES["commands.md"]] == []


@pytest.mark.parametrize("words", re.findall(r"<!-- help of (.*) -->", PAGES["commands.md"]))
def test_the_reference_has_the_options_of_every_command(words):
    text = commands.help_of(words.split())
    assert text.startswith(f"usage: {words} [-h]")
    assert "--help" in text
    assert max(map(len, text.splitlines())) <= 100


def test_links_out_of_the_documentation_lead_to_these_pages():
    text = "[a](../SECURITY.md#data) [b](gpus.md) [c](https://x.org) [d](#e) [f](../no_such.py)"
    assert list(repository.outside(text, "docs/page.md")) == ["SECURITY.md"]
    assert repository.redirected(text, "docs/page.md", "page.md") == text.replace(
        "../SECURITY", "source/SECURITY"
    )
    text = "[a](../../LICENSE) [b](../gpus.md)"
    there = repository.redirected(text, "docs/decisions/0001.md", "decisions/0001.md")
    assert there == "[a](../source/LICENSE.md) [b](../gpus.md)"
    there = repository.redirected("[a](docs/gpus.md) [b](LICENSE)", "X.md", "source/X.md")
    assert there == "[a](../gpus.md) [b](LICENSE.md)"


def test_pages_that_the_site_fills_in_say_so_in_the_repository():
    generated = [
        name for name, text in PAGES.items() if re.search(r"^(:::|<!-- \w+ of) ", text, re.M)
    ]
    assert [name for name in generated if "`make docs`" not in PAGES[name]] == []
    assert len(generated) == 4


def test_the_operation_that_a_page_teaches_is_not_there_already():
    taught = re.findall(r"register_op\(F\.(\w+)\)", PAGES["own-operation.md"])
    assert [name for name in taught if getattr(F, name) not in HANDLERS] == taught != []


def messages() -> list[str]:
    """What the page of messages quotes in its first column, between the places that differ."""
    rows = re.findall(r"^\| ([^|]+) \|", PAGES["troubleshooting.md"], re.MULTILINE)
    quoted = [one for row in rows for one in re.findall(r"`([^`]+)`", row)]
    own = [one for one in quoted if not one.startswith(OF_OTHERS)]
    return [part.strip(" ,") for one in own for part in one.split("...") if len(part) > 7]


def test_messages_are_those_of_the_source():
    source = "\n".join(file.read_text() for file in (ROOT / "spatialdl").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", source)  # of texts over several lines
    assert [part for part in messages() if part not in joined] == []
    assert len(messages()) > 12


def test_the_configuration_of_the_site_fetches_nothing():
    text = re.sub(r"!!\S+", "", (ROOT / "mkdocs.yml").read_text())
    settings = yaml.safe_load(text)
    assert settings["theme"]["font"] is False
    assert "extra_javascript" not in settings
    assert settings["extra"] == {"polyfills": ["iframe-worker.js"]}  # or a script of the network
    assert (DOCS / "iframe-worker.js").is_file()
