"""What CONTRIBUTING.md and the decision log name is there, and versions agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from spatialdl.version import __version__

ROOT = Path(__file__).resolve().parent.parent
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "CODE_OF_CONDUCT.md", *DECISIONS]
PAGES += [ROOT / "docs" / name for name in ("decisions/README.md", "containers.md")]
ALL = sorted({*PAGES, ROOT / "README.md", *(ROOT / "docs").rglob("*.md")})
HEADINGS = ["Context", "Tried and measured", "Decision", "Consequences"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = re.findall(
        r"`((?:spatialdl|conf|tests|docs|tools|examples|\.ci)/[\w/.+-]*)`", page.read_text()
    )
    assert [one for one in named if "NAME" not in one and not (ROOT / one).exists()] == []


def headings(page: Path) -> set[str]:
    """As GitHub makes links of them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_every_place_that_a_page_links_is_there(page: Path) -> None:
    for link in re.findall(r"\]\(([^):]+)\)", page.read_text()):
        file, _, heading = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not heading or heading in headings(target), link


def names_in(file: Path) -> set[str]:
    return set(re.findall(r"\w+", file.read_text()))


def test_every_name_of_the_guide_is_in_the_source() -> None:
    # `name` beside `file.py` in one sentence would be too fine; somewhere in the source is enough
    sources = [*(ROOT / "spatialdl").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    known = set().union(*map(names_in, sources)) | {"make", "python"}
    words = re.findall(r"`([A-Za-z_]\w+)(?:\([^`]*\))?`", GUIDE)
    assert [word for word in words if word not in known] == []


def test_targets_of_make_that_are_named_are_there() -> None:
    text = "\n".join(page.read_text() for page in ALL)
    lines = re.findall(r"(?:^|`)make ([\w -]+?)(?:`|  +#|$)", text, re.MULTILINE)
    targets = {target for line in lines for target in line.split()}
    assert {"setup", "demo", "test-fast", "test", "lint"} <= targets
    assert {one for one in targets if not re.search(rf"^{one}:", MAKEFILE, re.MULTILINE)} == set()


def words_of(variable: str) -> list[str]:
    """The files of a variable of the Makefile, of which parts stand in $(addprefix ...)."""
    start = MAKEFILE.index(f"\n{variable} :=") + 1
    text = re.split(r"(?<!\\)\n", MAKEFILE[start:])[0].partition(":=")[2].replace("\\\n", " ")
    inner = re.compile(r"\$\(addprefix ([^,()]*),([^()]*)\)")
    while found := inner.search(text):
        put = " ".join(found[1].strip() + word for word in found[2].split())
        text = text[: found.start()] + put + text[found.end() :]
    return text.split()


@pytest.mark.parametrize("variable", ["FAST", "FAST_MPI"])
def test_files_of_the_fast_tests_are_there(variable: str) -> None:
    words = words_of(variable)
    assert len(words) > 5
    assert [word for word in words if not (ROOT / word).exists()] == []


def test_decisions_are_numbered_and_in_the_list() -> None:
    assert [page.name[:4] for page in DECISIONS] == [
        f"{n:04}" for n in range(1, len(DECISIONS) + 1)
    ]
    index = (ROOT / "docs" / "decisions" / "README.md").read_text()
    assert re.findall(r"\((\d{4}-[\w-]+\.md)\)", index) == [page.name for page in DECISIONS]


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.name)
def test_a_decision_has_its_number_a_status_and_all_headings(page: Path) -> None:
    text = page.read_text()
    assert text.startswith(f"# {page.name[:4]} ")
    assert re.search(r"^Status: (accepted|replaced by \[)", text, re.MULTILINE)
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS


def test_the_citation_has_the_version_and_the_day_of_the_changelog() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = re.search(rf"^## \[?{re.escape(__version__)}\]?\D+([\d-]+)", changelog, re.MULTILINE)
    assert released
    assert citation["date-released"] == released[1]


RECIPES = [ROOT / "containers" / name for name in ("Dockerfile", "spatialdl.def")]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_recipes_of_images_take_the_range_of_torch_and_files_that_are_there(recipe: Path) -> None:
    text = recipe.read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (one for one in project["dependencies"] if one.startswith("torch>"))
    assert f'"{torch}"' in text
    copied = re.findall(r"^COPY (.+) \S+$|^    (\S+) /src/\S+$", text, re.MULTILINE)
    names = {name for pair in copied for words in pair for name in words.split()}
    assert {"spatialdl", "conf", "hydra_plugins", "pyproject.toml"} <= names
    assert [name for name in names if not (ROOT / name).exists()] == []
