from __future__ import annotations

import re
import sys
from pathlib import Path

import jinja2
import pytest
from matplotlib.figure import Figure

from spatialdl.common.pages import as_svg, save_page
from spatialdl.version import __version__

BLOCKS = '{% extends "article.html" %}{% block title %}{{ name }}{% endblock %}'


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with a page of its own."""
    folder = tmp_path / "own_pages"
    folder.mkdir()
    (folder / "__init__.py").touch()
    text = BLOCKS + "{% block body %}<p>{{ name }} {{ version }}</p>{% endblock %}"
    (folder / "page.html").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_pages"
    sys.modules.pop("own_pages", None)


def test_a_page_has_the_common_head_and_escapes_what_is_given(tmp_path: Path, package: str) -> None:
    save_page(tmp_path / "a.html", package, name="<b>\udcff")
    text = (tmp_path / "a.html").read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "<title>&lt;b&gt;\\udcff</title>" in text
    assert f"<p>&lt;b&gt;\\udcff {__version__}</p>" in text
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'\">" in text
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    assert used <= set(re.findall(r"(--[\w-]+):", text)), "every colour has a value"
    assert len(used) > 4


def test_a_name_without_a_value_leaves_the_page_before(tmp_path: Path, package: str) -> None:
    (tmp_path / "a.html").write_text("before")
    with pytest.raises(jinja2.UndefinedError, match="name"):
        save_page(tmp_path / "a.html", package)
    assert (tmp_path / "a.html").read_text() == "before"


@pytest.mark.parametrize(
    "package",
    [
        "spatialdl.inference.evaluating",
        "spatialdl.slides.batch",
        "spatialdl.training",
    ],
)
def test_pages_take_head_and_colours_from_the_common_one(package: str) -> None:
    from importlib.resources import files

    text = files(package).joinpath("page.html").read_text()
    assert re.match(r'{% extends "(base|article)\.html" %}', text)
    assert "<head>" not in text
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    common = files("spatialdl.common").joinpath("base.html").read_text()
    assert used <= set(re.findall(r"(--[\w-]+):", text + common))


def test_the_same_figure_gives_the_same_text() -> None:
    def drawn() -> str:
        figure = Figure(figsize=(2, 1))
        figure.subplots().plot([0, 1], [1, 0])
        return as_svg(figure)

    assert drawn() == drawn()
