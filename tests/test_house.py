"""docs/house.md lists every folder, imports go downwards in it, or to what is declared."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest
import torch

from spatialdl import torch_internals

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "spatialdl"
PAGE = (ROOT / "docs" / "house.md").read_text()
ROOMS = dict(re.findall(r"^- `([\w/.]+)`: ((?:.|\n  )*)", PAGE, re.MULTILINE))
FILES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for file in (*PACKAGE.rglob("*.py"), *(PACKAGE / "conf").glob("*.py"))  # conf is a link
}


@cache
def nodes() -> dict[str, list[ast.AST]]:
    """Of each module."""
    return {name: list(ast.walk(ast.parse(file.read_text()))) for name, file in FILES.items()}


def imported(module: str) -> Iterator[str]:
    """Modules of the package that one of them imports, also inside functions."""
    for node in nodes()[module]:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = (f"{node.module}.{alias.name}" for alias in node.names)
            names = [name if name in FILES else node.module for name in whole]
        yield from (name for name in names if name in FILES and name != "spatialdl")


@cache
def arrows() -> dict[str, set[str]]:
    return {name: set(imported(name)) - {name} for name in FILES if name != "spatialdl"}


def room_of(module: str) -> str:
    name = module.split(".")[1]
    return f"{name}/" if (PACKAGE / name).is_dir() else f"{name}.py"


def folder_of(module: str) -> str:
    """The folder of a module, or the module itself if it lies in no subfolder."""
    return ".".join(module.split(".")[:3])


def test_every_folder_and_file_at_the_top_is_on_the_page():
    # Python leaves the compiled files of a folder that is gone
    there = {f"{path.name}/" for path in PACKAGE.iterdir() if [*path.glob("*[!_]")]}
    there |= {path.name for path in PACKAGE.glob("*.py")}
    assert set(ROOMS) == there - {"__pycache__/", "__init__.py"}


@pytest.mark.parametrize("room", [room for room in ROOMS if room.endswith("/")])
def test_every_folder_of_a_room_is_on_its_line(room):
    folders = [path for path in (PACKAGE / room).rglob("*") if path.is_dir()]
    missing = [path.name for path in folders if f"`{path.name}/`" not in ROOMS[room]]
    assert [name for name in missing if name not in ("__pycache__", "experiment")] == []


@pytest.mark.parametrize(
    "room", [r for r in ROOMS if r not in ("models/", "conf/") and r[-1] == "/"]
)
def test_a_room_opens_with_a_page_whose_files_are_there(room):
    page = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text()))
    assert page.count("\n") >= 5
    named = re.findall(r"`([\w/]+(?:\.py|/))`", page)
    assert [
        one for one in named if not any((at / one).exists() for at in (PACKAGE / room, PACKAGE))
    ] == []


def test_imports_go_downwards():
    floors = {room: floor for floor, room in enumerate(ROOMS)}
    upwards = [
        f"{name} imports {other}"
        for name, others in arrows().items()
        for other in others
        if floors[room_of(name)] > floors[room_of(other)]
    ]
    assert upwards == []


@pytest.mark.parametrize("seen_as", [str, folder_of])
def test_nothing_imports_itself_in_a_circle(seen_as: Callable[[str], str]):
    graph: dict[str, set[str]] = {}
    for name, others in arrows().items():
        graph.setdefault(seen_as(name), set()).update(map(seen_as, others))
    graph = {name: others - {name} for name, others in graph.items()}
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


# --- packages of others: what the source imports is declared, and what is declared is used

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
USERS = set(EXTRAS) - {"dev", "proof", "docs"}
NEEDED = [*PROJECT["dependencies"], *(one for name in USERS - {"all"} for one in EXTRAS[name])]
PLUGINS = ROOT / "hydra_plugins"
# through their own programs, libraries, or other packages
NOT_IMPORTED = {"openslide-bin", "openmpi", "tensorboard", "sqlalchemy", "alembic"}
IF_THERE = {"huggingface_hub", "kornia"}  # users bring them
NAMED_OTHERWISE = {
    "hydra": "hydra-core",
    "mlflow": "mlflow-skinny",
    "nrrd": "pynrrd",
    "openslide": "openslide-python",
    "PIL": "pillow",
    "skimage": "scikit-image",
    "yaml": "pyyaml",
}


def packages() -> set[str]:
    """Packages of others that the source imports, wherever in it."""
    names: set[str] = set()
    plugins = [ast.walk(ast.parse(one.read_text())) for one in PLUGINS.rglob("*.py")]
    for node in chain.from_iterable([*nodes().values(), *plugins]):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "needed":
            names.add(node.args[0].value.split(".")[0])  # of one format of volumes
    return names - set(sys.stdlib_module_names) - {"spatialdl"}


def declared() -> set[str]:
    return {re.match(r"[\w-]+", one)[0].lower() for one in NEEDED}


def test_what_is_imported_is_declared_and_used():
    used = {NAMED_OTHERWISE.get(name, name) for name in packages() - IF_THERE}
    assert used == declared() - NOT_IMPORTED


def test_every_extra_for_users_is_in_the_documentation():
    pages = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    text = "".join(page.read_text() for page in pages)
    assert {extra for extra in USERS if f"[{extra}]" not in text} == set()


def test_all_is_every_extra_for_users_but_that_of_mpi():
    (one,) = EXTRAS["all"]
    named = set(re.fullmatch(r"spatialdl\[([\w,]+)\]", one)[1].split(","))
    assert named == USERS - {"all", "mpi"}


# --- private names of PyTorch: in one file

IN_PLACE = {name for _, names in torch_internals.ATTRIBUTES for name in names.split()}
# of Python, OmegaConf and others; `_u` is made with weights of two dims or more only
OF_OTHERS = {
    *("_Hash", "_asdict", "_current_frames", "_exit", "_fields", "_get_full_key", "_get_node"),
    *("_getframe", "_iter_ex", "_layer_sync", "_mmap", "_replace", "_submit_command", "_target_"),
    "_u",
}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def private_names(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Private names of PyTorch that are imported, named in a string or looked up, and where."""
    names: list[str] = []
    if isinstance(node, ast.ImportFrom) and node.module:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        names = [node.value]
    yield from ((name, name) for name in names if name.startswith("torch.") and is_private(name))
    name = node.attr if isinstance(node, ast.Attribute) else ""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
        name = str(getattr(node.args[1], "value", ""))
    if is_private(name):
        yield name, ast.unparse(node)
    elif getattr(getattr(node, "value", None), "id", "") == "nn_functions" and name not in IN_PLACE:
        yield name, f"torch.{name}"


def defined(node: ast.AST) -> str:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
        return node.attr if isinstance(node, ast.Attribute) else node.id
    return ""


def test_only_one_file_has_private_names_of_pytorch():
    """Others would fail one by one with a version of PyTorch that lacks them."""
    others = {name: found for name, found in nodes().items() if name != torch_internals.__name__}
    ours = {defined(node) for found in others.values() for node in found}
    found = [
        f"{file}: {text}"
        for file, each in others.items()
        for node in each
        for name, text in private_names(node)
        if text.startswith(("torch.", "dist.", "nn.", "F.", "Tensor."))
        or name not in ours | IN_PLACE | OF_OTHERS
    ]
    assert found == []


@pytest.mark.parametrize(
    ("owner", "name"),
    [(torch._C, "_is_tracing"), (torch, "_foreach_norm"), (torch._C._nn, "nll_loss_nd")],
)
def test_a_version_that_lacks_a_name_is_refused_by_it(owner, name, monkeypatch):
    monkeypatch.delattr(owner, name)
    spec = importlib.util.spec_from_file_location("again", torch_internals.__file__)
    version = re.escape(torch.__version__)
    with pytest.raises(ImportError, match=f"PyTorch {version} .*'{name}'.* 2.8 to 2.15, "):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
