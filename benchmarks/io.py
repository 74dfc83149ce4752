"""Reading, loading, staging and writing of data sets, with targets.

Reading: boxes of one image from raw shards and other formats; windows of 1024 pixels at random
positions, and quarters, the boxes of 2 x 2 ranks; with warm page cache in MB per CPU second, and
cold in MB per second of wall time, if the system permits dropping pages. Feeding: utilisation of an
emulated accelerator, which sleeps as in DLIO. Staging: an epoch from a slow source. Writing: raw
shards against the same bytes in one file, both synced. Memory: opening a giant image and reading a
box of it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from tqdm import tqdm

from benchmarks.harness import (
    Bars,
    Lines,
    add_numbers,
    alternate,
    markdown,
    median_ratio,
    origin,
    parser_of,
    publish,
    run_ranks,
    start,
)
from benchmarks.io_formats import (
    FEWER,
    FORMATS,
    MEMMAP,
    PLAIN,
    RAW,
    SHARDS,
    Read,
    check_same,
    draw_image,
    drop,
    files_of,
    open_format,
    resident,
    write_all,
)
from benchmarks.io_worker import BOX, VALUE, middle, slow_environment
from spatialdl.common.text import size_in_bytes
from spatialdl.data import ShardWriter
from spatialdl.data.codec import Codec
from spatialdl.data.format import CHUNK, MANIFEST

WINDOW = 1024
KINDS = {"windows of 1024": WINDOW, "quarters of 512": WINDOW // 2}
WINDOWS, QUARTERS = KINDS
COLD_ROUNDS, WRITING_ROUNDS, DISTINCT = 3, 3, 16
ONE_FILE, WRITER = "one file", "ShardWriter"
STAGED, STAGING, SOURCE = "staged before", "staging meanwhile", "from the source"
AUGMENTED = "raw, augmented"
SETS: dict[str, Codec] = {"raw": "raw", "zstd": "zstd", "jpeg": "jpeg", AUGMENTED: "raw"}
WORKERS = 2
"""Reader processes of the staged epochs."""


class Target(NamedTuple):
    """A target, and what was measured."""

    what: str
    sign: str
    wanted: float
    found: float

    def cells(self) -> list[str]:
        met = self.found <= self.wanted if self.sign == "at most" else self.found >= self.wanted
        numbers = f"{self.wanted:.4g}", f"{self.found:.4g}"
        return [self.what, f"{self.sign} {numbers[0]}", numbers[1], "" if met else "missed"]


class Part(NamedTuple):
    """What one part measured: values for the JSON file, tables, panels and targets."""

    values: Any
    lines: list[str]
    panels: Sequence[Bars | Lines]
    targets: list[Target]


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    found: dict[str, Part] = {}
    for name in options.parts:
        print(name, flush=True)
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found[name] = PARTS[name](options, Path(folder))
    result = {
        **origin("io", arguments),
        **{"options": vars(options), "hdf5": h5py.version.hdf5_version},
        **{name: part.values for name, part in found.items()},
    }
    lines = [line for part in found.values() for line in (*part.lines, "")]
    targets = [target.cells() for part in found.values() for target in part.targets]
    lines += markdown(["", "target", "found", ""], targets)
    panels = [panel for part in found.values() for panel in part.panels]
    publish(result, lines, panels, Path(options.out) / "io")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("io", __doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (all)")
    add("--compute", type=float, default=0.3, help="seconds of compute per step (%(default)s)")
    add("--rate", type=float, default=50, help="rate of the slow source, MB/s (%(default)s)")
    add("--shard", type=size_in_bytes, default="128M", help="size of shards (%(default)s)")
    add("--folder", help="folder for temporary files (that of the system)")
    add_numbers(
        parser,
        side=(8192, WINDOW, "side of the image to read"),
        boxes=(100, 1, "boxes per kind and round"),
        rounds=(7, 1, "rounds with warm page cache"),
        tile=(1024, 1, "side of the tiles of data sets"),
        batch=(4, 1, "tiles per step"),
        workers=([0, 1, 2], 0, "reader processes"),
        steps=(24, 2, "loader steps"),
        skip=(4, 1, "loader steps of warm-up"),
        epoch=(100, 1, "steps of a staged epoch"),
        written=(340, 1, "tiles to write"),
        giant=(100_000, BOX, "side of the giant image"),
    )
    options = parser.parse_args(arguments)
    if options.steps <= options.skip:
        parser.error(f"--steps {options.steps} must be more than the {options.skip} skipped")
    if min(options.compute, options.rate) <= 0:
        parser.error("--compute and --rate must be more than 0")
    return options


# --- reading


def read_formats(options: argparse.Namespace, folder: Path) -> Part:
    """Rates of all formats by round; all read the same boxes in one process."""
    write_all(draw_image(options.side), folder)
    rng = np.random.default_rng(1)
    reads = {name: open_format(folder, options.side, name) for name in FORMATS}
    check_same(reads, WINDOW)
    values: dict[str, Any] = {}
    for kind, side in KINDS.items():  # the files have just been written
        rates: dict[str, list[float]] = {name: [] for name in FORMATS}
        values[kind] = rates
        for _ in tqdm(range(options.rounds), kind, unit="round"):
            places = _places(rng, options.side, side, options.boxes)
            for name, read in reads.items():
                few = places[: -(-len(places) // FEWER.get(name, 1))]
                rates[name].append(_rate(read, few, side, time.process_time))
    reads.clear()
    values["cold"] = _cold(options, folder, rng)
    size = {name: sum(path.stat().st_size for path in files_of(folder, name)) for name in FORMATS}
    values["stored"] = {name: size[name] / (3 * options.side**2) for name in FORMATS}
    rows = []
    for name in FORMATS:
        cells: list[str] = []
        for kind in KINDS:
            rates = values[kind]
            cells.append(f"{statistics.median(rates[name]):.0f}")
            cells += [f"{median_ratio(rates[name], rates[base]):.2f}" for base in (MEMMAP, PLAIN)]
        cold = f"{statistics.median(values['cold'][name]):.0f}" if values["cold"] else "-"
        rows.append([name, *cells, cold, f"{values['stored'][name]:.2f}"])
    windows, quarters = values[WINDOWS], values[QUARTERS]
    titles = ["", WINDOWS, "/ memmap", "/ plain", QUARTERS, "/ memmap", "/ plain", "cold", "stored"]
    lines = [
        f"boxes of an image of {options.side} x {options.side} pixels, medians; warm: MB per CPU "
        f"second; cold: MB per second, {WINDOWS} from the disk; stored: size to raw pixels",
        "",
        *markdown(titles, rows),
    ]
    if not values["cold"]:
        lines.append("cold: not permitted here: dropped pages stay in memory")
    panels = [Bars(f"{kind}, warm, MB per CPU second", values[kind], ours=SHARDS) for kind in KINDS]
    if values["cold"]:
        panels.append(Bars(f"{WINDOWS}, cold, MB per second", values["cold"], ours=SHARDS))
    targets = [
        Target(f"windows from {RAW}, to {MEMMAP}", "at least", 0.6, _to(windows, MEMMAP)),
        Target(f"windows from {RAW}, to plain", "at least", 3.0, _to(windows, PLAIN)),
        Target(f"quarters from {RAW}, to {MEMMAP}", "at least", 0.6, _to(quarters, MEMMAP)),
    ]
    return Part(values, lines, panels, targets)


def _to(rates: Mapping[str, Sequence[float]], base: str) -> float:
    return median_ratio(rates[RAW], rates[base])


def _cold(
    options: argparse.Namespace, folder: Path, rng: np.random.Generator
) -> dict[str, list[float]] | None:
    """Rates from the disk; None if pages stay in memory."""
    found: dict[str, list[float]] = {name: [] for name in FORMATS}
    for _ in range(COLD_ROUNDS):
        places = _places(rng, options.side, WINDOW, -(-options.boxes // 4))
        for name in FORMATS:
            gc.collect()  # an open memory map keeps its pages
            paths = files_of(folder, name)
            drop(paths)
            if resident(paths) > 0.02:
                return None
            read = open_format(folder, options.side, name)
            found[name].append(_rate(read, places, WINDOW, time.perf_counter))
            del read
    return found


def _places(rng: np.random.Generator, full: int, side: int, count: int) -> list[list[int]]:
    step = 1 if side == WINDOW else side
    places: list[list[int]]
    places = (rng.integers(0, (full - side) // step + 1, (count, 2)) * step).tolist()
    return places


def _rate(
    read: Read, places: Sequence[Sequence[int]], side: int, clock: Callable[[], float]
) -> float:
    before, count = clock(), 0
    for row, col in places:
        count += read(row, col, side).nbytes
    return count / 1e6 / (clock() - before)


# --- feeding and staging


def _write_tiles(folder: Path, side: int, count: int, **how: Any) -> None:
    """Write a data set of distinct tiles."""
    image = draw_image(side)
    with ShardWriter(folder, **how) as writer:
        for number in range(count):
            writer.add(np.roll(image, 7 * number, axis=1))


def _load(
    folder: Path,
    options: argparse.Namespace,
    workers: int,
    variables: Mapping[str, str] | None = None,
    **more: Any,
) -> list[float]:
    """Run an epoch in a subprocess; returns the end times of the steps in seconds."""
    given = {"folder": str(folder), "batch": options.batch, "compute": options.compute}
    given |= {"workers": workers, "augment": None, "stage": "off", "staged": False}
    options = argparse.Namespace(**{**given, **more})
    return list(run_ranks("io_worker", options, variables=variables)["ends"])


def feed(options: argparse.Namespace, folder: Path) -> Part:
    """Utilisation by data set and number of workers: compute time / total time."""
    for codec in dict.fromkeys(SETS.values()):
        _write_tiles(folder / codec, options.tile, options.steps * options.batch, codec=codec)
    values: dict[str, Any] = {name: {} for name in SETS}
    for name, codec in SETS.items():
        for count in options.workers:
            preset = "pathology" if name == AUGMENTED else None
            ends = _load(folder / codec, options, count, augment=preset)
            values[name][count] = utilisation(ends, options.compute, options.skip)
    rows = [[name, *(f"{found[n]:.3f}" for n in options.workers)] for name, found in values.items()]
    about = f"utilisation of an emulated accelerator: {options.batch} tiles of {options.tile} x "
    about += f"{options.tile}, {options.compute:g} s per step; by number of reader processes"
    lines = [about, "", *markdown(["", *map(str, options.workers)], rows)]
    bars = {f"{name}, {n} workers": [u] for name, one in values.items() for n, u in one.items()}
    targets = [
        Target("utilisation, raw, 2 workers", "at least", 0.98, value)
        for count, value in values.get("raw", {}).items()
        if count == 2
    ]
    return Part(values, lines, [Bars("utilisation of the accelerator", bars)], targets)


def utilisation(ends: Sequence[float], compute: float, skip: int) -> float:
    """Compute time / total time, without the first `skip` steps."""
    return compute * (len(ends) - skip) / (ends[-1] - ends[skip - 1])


def stage(options: argparse.Namespace, folder: Path) -> Part:
    """An epoch during staging to a local disk, against one with staged shards and the source."""
    source, count = folder / "source", options.epoch * options.batch
    _write_tiles(source, options.tile, count, shard_size=options.shard)
    values, curves = {}, {}
    for number, name in enumerate((STAGED, STAGING, SOURCE)):
        work = folder / f"slow-{number}"
        work.mkdir()
        server, slow = slow_environment(source, options.rate * 1e6, work)
        disk = "off" if name == SOURCE else str(folder / f"disk-{number}")
        given = {"stage": disk, "staged": name == STAGED}
        ends = _load(source, options, WORKERS, slow, **given)
        values[name] = {"seconds": ends[-1], "mb": server.served() / 1e6}
        curves[f"{name}: {ends[-1]:.1f} s"] = [(end, float(n)) for n, end in enumerate(ends, 1)]
    rows = [[name, f"{one['seconds']:.2f}", f"{one['mb']:.0f}"] for name, one in values.items()]
    about = f"an epoch of {count * 3 * options.tile**2 / 1e6:.0f} MB, the source slowed to "
    lines = [f"{about}{options.rate:g} MB/s", "", *markdown(["", "s", "MB of the source"], rows)]
    ratio = values[STAGING]["seconds"] / values[STAGED]["seconds"]
    target = Target(f"epoch {STAGING}, to {STAGED}", "at most", 1.05, ratio)
    return Part(values, lines, [Lines("a staged epoch", "seconds", "steps", curves)], [target])


# --- writing, and memory


def write(options: argparse.Namespace, folder: Path) -> Part:
    """MB per second of wall time until raw tiles are on the disk."""
    image = draw_image(options.tile)
    tiles = [np.roll(image, 7 * number, axis=1) for number in range(DISTINCT)]
    size, out = float(options.written * image.nbytes / 1e6), folder / "written"

    def one_file() -> None:
        out.mkdir()
        with (out / "file").open("xb", buffering=0) as file:
            for number in range(options.written):
                file.write(tiles[number % DISTINCT].data)
            os.fsync(file.fileno())

    def shards() -> None:
        with ShardWriter(out, shard_size=options.shard) as writer:
            for number in range(options.written):
                writer.add(tiles[number % DISTINCT])

    def rate(work: Callable[[], None]) -> float:
        os.sync()  # pending writes of other processes are not measured
        before = time.perf_counter()
        work()
        after = time.perf_counter()
        shutil.rmtree(out)
        return size / (after - before)

    sides = {ONE_FILE: partial(rate, one_file), WRITER: partial(rate, shards)}
    rates = alternate(sides, WRITING_ROUNDS)
    rows = [[name, f"{statistics.median(one):.0f}"] for name, one in rates.items()]
    lines = markdown([f"writing {size:.0f} MB of raw tiles, synced, with SHA-256", "MB/s"], rows)
    ratio = median_ratio(rates[WRITER], rates[ONE_FILE])
    target = Target(f"writing, to {ONE_FILE}", "at least", 0.8, ratio)
    return Part(rates, lines, [Bars("writing, MB per second", rates, ours=[WRITER])], [target])


def read_giant(options: argparse.Namespace, folder: Path) -> Part:
    """Peak MB of a process before opening the data set, and after reading the box."""
    _write_giant(folder / "giant", options.giant)
    found = run_ranks("io_worker", argparse.Namespace(giant=str(folder / "giant")))
    lines = [
        f"a box of {BOX} x {BOX} of an image of {options.giant} x {options.giant} pixels: peak "
        f"{found['peak']:.0f} MB, {found['mb']:.0f} MB more than after the imports"
    ]
    target = Target("MB to read a box of a giant", "at most", 200, found["mb"])
    panel = Bars("MB", {"imports": [found["imports"]], "box": [found["mb"]]}, ours=["box"])
    return Part(found, lines, [panel], [target])


def _write_giant(folder: Path, side: int) -> None:
    """Write a region of `side` x `side` with data only in a box in its middle.

    The shard is a sparse file: all chunks are allocated, but only those of the box are written.
    """
    with ShardWriter(folder, kind="regions") as writer:
        writer.add(np.zeros((1, 1, 3), np.uint8))
    shard = next(folder.glob("*.h5"))
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_chunk((CHUNK, CHUNK, 3))
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    with h5py.File(shard, "w", libver="earliest") as file:
        group = file.create_group("regions/000000")
        space = h5py.h5s.create_simple((side, side, 3))
        data = h5py.h5d.create(group.id, b"image", h5py.h5t.STD_U8LE, space, layout)
        chunk = np.full((CHUNK, CHUNK, 3), VALUE, np.uint8)
        begin = middle(side) // CHUNK * CHUNK
        for row in range(begin, middle(side) + BOX, CHUNK):
            for col in range(begin, middle(side) + BOX, CHUNK):
                data.write_direct_chunk((row, col, 0), chunk)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["shards"][0]["bytes"] = shard.stat().st_size
    manifest["samples"][0] |= {"height": side, "width": side}
    manifest["samples"][0]["bands"][0]["rows"] = side
    (folder / MANIFEST).write_text(json.dumps(manifest))


PARTS: dict[str, Callable[[argparse.Namespace, Path], Part]] = {
    "reading": read_formats,
    "feeding": feed,
    "staging": stage,
    "writing": write,
    "memory": read_giant,
}

if __name__ == "__main__":
    start(main)
