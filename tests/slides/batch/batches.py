"""Batches of small slides that tests run, and what comes out of them."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from spatialdl.comm.launch import mpiexec_command
from spatialdl.data import ShardDataset
from spatialdl.data.format import sha256_of
from spatialdl.data.samples import ShardInfo
from spatialdl.slides.batch.choosing import Choosing
from spatialdl.slides.batch.parts import Cutting
from spatialdl.slides.batch.tile_options import parsed
from spatialdl.slides.reading.reader import Slide
from spatialdl.slides.tile_cli import main
from tests.processes import ended
from tests.vision import import_path

TILES = ["--tile-size", "64", "--mpp", "0.5", "--shard-size", "64K"]
"""Twelve tiles of slide a, eight of slide b, five a shard."""


def tile(*arguments: object) -> int:
    """The command, in this process."""
    return main([str(argument) for argument in arguments])


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


WHOLE = ["--whole", "--mpp", "0.5"]
COORDS = [*TILES[:4], "--format", "coords"]


def inside(folder: Path) -> list[str]:
    """What is in a folder."""
    return sorted(path.name for path in folder.iterdir())


def samples(folder: Path) -> list[Any]:
    """The samples of a data set."""
    data = ShardDataset(folder)
    return [data.sample(number) for number in range(len(data))]


def places(folder: Path) -> list[tuple[int, int]]:
    """Where its tiles lie."""
    return [(sample.x, sample.y) for sample in samples(folder)]


def in_python(*program: object, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    """A program run to its end in another process, or by ranks."""
    words = [*(mpiexec_command(ranks) if ranks else []), sys.executable, *map(str, program)]
    more = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    return ended(words, Path(), PYTHONPATH=import_path(), **more)


def forked(call: Callable[[], int]) -> tuple[int, str]:
    """The exit code and standard error of a call in a copy of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with redirect_stderr(io.StringIO()) as said:
            try:
                code = call()
            except BaseException:
                traceback.print_exc()
                code = 99
        os.write(writing, said.getvalue().encode(errors="replace")[-60_000:])
        os._exit(code)
    os.close(writing)
    with open(reading) as file:
        said = file.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def polygon(x0: int, y0: int, x1: int, y1: int, name: str | None) -> dict[str, object]:
    """A rectangle as GeoJSON, of a class or of none."""
    ring = [[x0, y0], [x1, y0], [x1, y1], [x0, y1], [x0, y0]]
    properties = {"classification": {"name": name}} if name else {}
    geometry = {"type": "Polygon", "coordinates": [ring]}
    return {"type": "Feature", "geometry": geometry, "properties": properties}


def annotate(folder: Path, name: str, *features: object) -> None:
    """Write what is drawn on a slide of that name."""
    folder.mkdir(exist_ok=True)
    content = {"type": "FeatureCollection", "features": features}
    (folder / f"{name}.geojson").write_text(json.dumps(content))


def choosing(path: Path, *more: str) -> Choosing:
    given = [str(path), "--out", "set", "--tile-size", "64", "--mpp", "0.5", *more]
    return Choosing(parsed(given), [path])


def cutting(slide: Slide, *more: str, **changes: Any) -> Cutting:
    """How a slide is cut, with nothing but what cutting needs."""
    known = {"classes": [], "name": "a", "label": None, "own": None, **changes}
    return Cutting(choosing(slide.path, *more), **known)


def shard(folder: Path, name: str = "shard-00000.h5") -> ShardInfo:
    """Ten bytes that a record calls a shard of two samples."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"0123456789")
    return ShardInfo(name, 10, sha256_of(path), 2)
