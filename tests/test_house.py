"""docs/house.md lists every folder, and imports go only downwards in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "spatialdl"
PAGE = (ROOT / "docs" / "house.md").read_text()
ROOMS = dict(re.findall(r"^- `([\w/.]+)`: ((?:.|\n  )*)", PAGE, re.MULTILINE))
FILES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for file in (*PACKAGE.rglob("*.py"), *(PACKAGE / "conf").glob("*.py"))  # conf is a link
}


def imported(file: Path) -> Iterator[str]:
    """Modules of the package that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = (f"{node.module}.{alias.name}" for alias in node.names)
            names = [name if name in FILES else node.module for name in whole]
        yield from (name for name in names if name in FILES and name != "spatialdl")


ARROWS = {name: set(imported(file)) - {name} for name, file in FILES.items() if name != "spatialdl"}


def room_of(module: str) -> str:
    name = module.split(".")[1]
    return f"{name}/" if (PACKAGE / name).is_dir() else f"{name}.py"


def folder_of(module: str) -> str:
    """The folder of a module, or the module itself if it lies in no subfolder."""
    return ".".join(module.split(".")[:3])


def test_every_folder_and_file_at_the_top_is_on_the_page():
    there = {f"{path.name}/" for path in PACKAGE.iterdir() if path.is_dir()}
    there |= {path.name for path in PACKAGE.glob("*.py")}
    assert set(ROOMS) == there - {"__pycache__/", "__init__.py"}


@pytest.mark.parametrize("room", [room for room in ROOMS if room.endswith("/")])
def test_every_folder_of_a_room_is_on_its_line(room):
    folders = [path for path in (PACKAGE / room).rglob("*") if path.is_dir()]
    missing = [path.name for path in folders if f"`{path.name}/`" not in ROOMS[room]]
    assert [name for name in missing if name not in ("__pycache__", "experiment")] == []


def test_imports_go_downwards():
    floors = {room: floor for floor, room in enumerate(ROOMS)}
    upwards = [
        f"{name} imports {other}"
        for name, others in ARROWS.items()
        for other in others
        if floors[room_of(name)] > floors[room_of(other)]
    ]
    assert upwards == []


@pytest.mark.parametrize("seen_as", [str, folder_of])
def test_nothing_imports_itself_in_a_circle(seen_as: Callable[[str], str]):
    arrows: dict[str, set[str]] = {}
    for name, others in ARROWS.items():
        arrows.setdefault(seen_as(name), set()).update(map(seen_as, others))
    graph = {name: others - {name} for name, others in arrows.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_paths_in_the_table_are_there():
    table = PAGE[PAGE.index("| new |") :]
    paths = [path for path in re.findall(r"`([\w/.]+[/y])`", table) if "NAME" not in path]
    assert len(paths) > 10
    inside = [path for path in paths if not (PACKAGE / path).exists()]
    assert [path for path in inside if not list(PACKAGE.glob(f"*/*/{path}"))] == []


def test_every_short_file_has_its_reason_on_the_page():
    section = PAGE.partition("## Short files")[2]
    short = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if file.name != "__init__.py" and file.read_text().count("\n") < 50
    }
    listed = set(re.findall(r"`([\w/]+\.py)`", section))
    assert not short - listed, (
        f"{sorted(short - listed)} have fewer than 50 lines: move their code into the file of its "
        "family, or, if it must stand alone, list them with the reason in docs/house.md, 'Short "
        "files'"
    )
    assert not listed - short, (
        f"{sorted(listed - short)} are no short files (any more): remove them from 'Short files' "
        "in docs/house.md"
    )
