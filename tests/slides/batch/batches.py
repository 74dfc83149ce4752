"""Batches of small slides that tests run, and what comes out of them."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

from spatialdl.data.format import sha256_of
from spatialdl.slides.command import main
from tests.vision import import_path

TILES = ["--tile-size", "64", "--mpp", "0.5", "--shard-size", "64K"]
"""Twelve tiles of slide a, nine of slide b, five a shard."""

WHOLE = ["--whole", "--mpp", "0.5"]
COORDS = ["--tile-size", "64", "--mpp", "0.5", "--format", "coords"]


def tile(*arguments: object) -> int:
    """The command, in this process."""
    return main([str(argument) for argument in arguments])


def started(*arguments: object, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """The command, in another process."""
    return subprocess.Popen(
        [*launcher, sys.executable, "-m", "spatialdl.slides.command", *map(str, arguments)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "PYTHONPATH": import_path(),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its exit code, standard output and error."""
    out, err = process.communicate(timeout=250)
    return process.returncode, out, err


def contents(folder: Path) -> dict[str, str]:
    """Every file of a data set and its SHA-256, less what tells the time that was taken."""
    found = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
    digests = {name: sha256_of(path) for name, path in found.items()}
    for name in digests:
        if name in ("process_list.csv", "report.html") or name.startswith("records/"):
            digests[name] = "tells the time"
    return digests


def rows(folder: Path) -> dict[str, dict[str, str]]:
    """The rows of process_list.csv, by slide."""
    with (folder / "process_list.csv").open(newline="", encoding="utf-8") as file:
        return {row["slide"]: row for row in csv.DictReader(file)}


def leftovers(folder: Path) -> list[str]:
    """What nobody wants to find, anywhere below a folder."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*")]
    return [name for name in names if ".tmp" in name or ".partial" in name or ".old" in name]


def inside(folder: Path) -> list[str]:
    """What is in a folder."""
    return sorted(path.name for path in folder.iterdir())


def in_python(*program: object) -> subprocess.CompletedProcess[str]:
    """A program run to its end in another process."""
    return subprocess.run(
        [sys.executable, *map(str, program)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
