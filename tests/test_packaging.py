"""The wheel and the source distribution have what they need, and nothing of the tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from fnmatch import fnmatch
from importlib.metadata import EntryPoint
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
from PIL import Image

from spatialdl.version import __version__
from tests.processes import printed

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("spatialdl/", "hydra_plugins/")
LINK, LINKED = "spatialdl/conf", "conf"  # a link to the folder at the top
INFO = f"spatialdl-{__version__}.dist-info"
GENERATED = ("PKG-INFO", "setup.cfg", "spatialdl.egg-info/*")
BUILD = (
    "import setuptools.build_meta as backend\n"
    "backend.build_wheel('dist')\n"
    "backend.build_sdist('dist')\n"
)


def in_repository() -> list[str]:
    """Files and links of the repository, also new ones that git does not ignore."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git repository here says which files are the project's")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(name for name in done.stdout.split("\n") if name and (ROOT / name).exists())


def in_package() -> list[str]:
    """Files that are installed, under the names that they have then."""
    names = [
        name.replace(LINKED, LINK, 1) if name.startswith(f"{LINKED}/") else name
        for name in in_repository()
    ]
    return sorted(name for name in names if name.startswith(PACKAGES) and name != LINK)


def copied(folder: Path) -> Path:
    """The repository in another folder, as a build writes beside its sources."""
    for name in in_repository():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, place, follow_symlinks=False)
    return folder


def python(*words: str, folder: Path, **environment: str) -> str:
    """What this Python prints, run in a folder."""
    return printed([sys.executable, *words], folder, **environment)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, with wheel and source distribution in its `dist`."""
    folder = copied(tmp_path_factory.mktemp("source"))
    python("-c", BUILD, folder=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(source / "dist" / f"spatialdl-{__version__}-py3-none-any.whl")


@pytest.fixture(scope="module")
def sdist(source: Path) -> tarfile.TarFile:
    return tarfile.open(source / "dist" / f"spatialdl-{__version__}.tar.gz")


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: zipfile.ZipFile) -> None:
    inside = [name for name in wheel.namelist() if not name.startswith(INFO)]
    assert sorted(inside) == in_package()


def test_the_configuration_lies_at_the_top_and_is_installed_in_the_package() -> None:
    # a link, and no entry of package-dir: a clone whose environment has another one installed would
    # find the configuration of that one
    assert (ROOT / LINK).is_symlink() or not (ROOT / ".git").exists()
    assert (ROOT / LINK).resolve() in (ROOT / LINKED, ROOT / LINK)


def test_every_command_of_the_wheel_can_be_called(wheel: zipfile.ZipFile) -> None:
    lines = wheel.read(f"{INFO}/entry_points.txt").decode().splitlines()
    commands = dict(line.split(" = ") for line in lines if " = " in line)
    assert commands == PROJECT["project"]["scripts"]
    for name, place in commands.items():
        assert callable(EntryPoint(name, place, "console_scripts").load()), name


def test_the_source_distribution_has_the_whole_repository(sdist: tarfile.TarFile) -> None:
    # tests and documentation, too: whoever packages it runs them
    top = PurePosixPath(f"spatialdl-{__version__}")
    inside = {
        str(PurePosixPath(one.name).relative_to(top)) for one in sdist.getmembers() if one.isfile()
    }
    added = {name for name in inside if not any(fnmatch(name, one) for one in GENERATED)}
    # which has no links: the configuration is there twice
    assert added == {name for name in in_repository() if name != LINK} | set(in_package())


def test_the_changelog_begins_with_what_comes_next_and_has_this_version() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    versions = [line.split()[1].strip("[]") for line in lines if line.startswith("## ")]
    assert versions[0] == "Unreleased"
    assert versions[1] == __version__
    assert len(set(versions)) == len(versions)


@pytest.mark.slow
def test_a_wheel_made_of_the_source_distribution_is_the_same(
    sdist: tarfile.TarFile, wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    sdist.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    made = ("wheel", ".", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", "made")
    python("-m", "pip", *made, folder=folder)
    (path,) = (folder / "made").glob("*.whl")
    other = zipfile.ZipFile(path)
    assert sorted(other.namelist()) == sorted(wheel.namelist())
    different = [
        name
        for name in wheel.namelist()
        if not name.startswith(INFO) and other.read(name) != wheel.read(name)
    ]
    assert different == []


@pytest.mark.slow
def test_the_installed_wheel_tiles_trains_and_predicts(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    place = tmp_path / "installed"
    made = ("install", "--no-deps", "--no-index", "--quiet", "--target", str(place))
    python("-m", "pip", *made, str(wheel.filename), folder=tmp_path)
    inside = {"folder": tmp_path, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
    where = python("-c", "import spatialdl; print(spatialdl.__file__)", **inside)
    assert Path(where.strip()).is_relative_to(place)
    assert "Train a network" in python("-m", "spatialdl.train", "--help", **inside)

    pixels = np.random.default_rng(0).integers(0, 200, (128, 96, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "slide.png")
    cut = ("slide.png", "--out", "tiles", "--tile-size", "32", "--level", "0", "--slide-mpp", "1")
    python("-m", "spatialdl.slides.tile_cli", *cut, **inside)
    small = ("model=resnet18", "model.width=2", "data.image_size=[32,32]", "data.batch_size=2")
    python("-m", "spatialdl.train", *small, "trainer.max_steps=1", "hydra.run.dir=out", **inside)
    assert (tmp_path / "out" / "report.html").is_file()
    given = ("ckpt_path=out", "shards=tiles", "hydra.run.dir=predicted")
    python("-m", "spatialdl.predict", *given, **inside)
    assert (tmp_path / "predicted" / "slides.csv").read_text().startswith("slide,")
