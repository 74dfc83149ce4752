"""What the source imports is declared, and what is declared is used."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
NEEDED = PROJECT["dependencies"] + [
    one
    for extra in (
        *("mpi", "parquet", "slurm", "wandb", "mlflow", "volumes", "features", "lightning"),
        *("dicom", "spatialdata", "tensorboard"),
    )
    for one in EXTRAS[extra]
]
# through their own programs, libraries, or other packages
NOT_IMPORTED = {"openslide-bin", "openmpi", "tensorboard", "sqlalchemy", "alembic"}
IF_THERE = {"huggingface_hub", "kornia", "sklearn"}  # users bring them, or a benchmark compares
NAMED_OTHERWISE = {
    "hydra": "hydra-core",
    "mlflow": "mlflow-skinny",
    "nrrd": "pynrrd",
    "openslide": "openslide-python",
    "PIL": "pillow",
    "skimage": "scikit-image",
    "yaml": "pyyaml",
}


def imported() -> set[str]:
    """Packages of others that the source imports, wherever in it."""
    names: set[str] = set()
    for folder in ("spatialdl", "hydra_plugins"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
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
    used = {NAMED_OTHERWISE.get(name, name) for name in imported() - IF_THERE}
    assert used == declared() - NOT_IMPORTED


def test_packages_are_called_as_here():
    there = packages_distributions()
    for name, distribution in NAMED_OTHERWISE.items():
        assert distribution in {one.lower() for one in there.get(name, [distribution])}


def test_every_extra_for_users_is_in_the_documentation():
    pages = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    text = "".join(page.read_text() for page in pages)
    users = set(EXTRAS) - {"dev", "proof", "docs"}
    assert {extra for extra in users if f"[{extra}]" not in text} == set()


def test_all_is_every_extra_for_users_but_that_of_mpi():
    (one,) = EXTRAS["all"]
    named = set(re.fullmatch(r"spatialdl\[([\w,]+)\]", one)[1].split(","))
    assert named == set(EXTRAS) - {"dev", "proof", "docs", "all", "mpi"}
