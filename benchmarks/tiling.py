"""Tiles per CPU second of one slide: openslide, native tiles, and the command end to end.

All alternate, in separate processes. The command finds the tissue of the slide, reads all its tiles
and writes a data set with checksums, pictures and a report; it reads natively, through openslide
only, or passes the JPEG tiles of the slide through. A batch of several slides is timed with one and
more processes, in wall time.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import openslide
from tqdm import tqdm

from benchmarks.harness import (
    Bars,
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
from spatialdl.slides import tile_cli
from spatialdl.slides.reading import native, reader
from spatialdl.slides.synthetic import write_synthetic_slide

OPENSLIDE, NATIVE = "openslide alone", "native alone"
OURS, THROUGH = "end to end", "end to end, through openslide"
PASSED, HASHED = "end to end, passed through", "SHA-256 alone"
WAYS = (OPENSLIDE, NATIVE, OURS, THROUGH, PASSED, HASHED)
HS2P = 270.0
"""Tiles of 256 pixels per CPU second, read and written by hs2p."""
TARGETS = (
    f"targets, tiles of 256: {3 * HS2P:.0f} end to end and {5 * HS2P:.0f} passed through (3 and 5 "
    "times hs2p), 0.85 through openslide, 1.8 by 2 processes"
)
BATCH = 4  # slides of a timed batch
DECODER = "simplejpeg"


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        slide = Path(options.slide or Path(folder) / f"{options.side}.tiff")
        if not slide.exists():
            with tqdm(total=options.side, desc="drawing the slide", unit="row") as bar:
                size = options.side, options.side
                write_synthetic_slide(slide, "ring", size, progress=bar.update)
        common = {"slide": str(slide), "out": str(Path(folder) / "set"), "most": options.most}
        single = {f"{way}, {side}": (way, side, 1, 1) for side, way in product(options.tiles, WAYS)}
        clocked = {
            _processes(jobs): (OURS, options.tiles[0], jobs, BATCH)
            for jobs in dict.fromkeys([1, *options.jobs])
        }
        sides = {}
        for name, words in {**single, **clocked}.items():
            given = dict(zip(("way", "side", "jobs", "slides"), words, strict=True))
            sides[name] = partial(run_ranks, "tiling", argparse.Namespace(**common, **given))
        found = alternate(sides, options.rounds)
    result = {
        **origin("tiling", arguments),
        **{"options": vars(options), "decoder": DECODER, "found": found},
        "rates": {
            side: {way: _rates(found[f"{way}, {side}"], "cpu_seconds") for way in WAYS}
            for side in options.tiles
        },
        "clock": {name: _rates(found[name], "seconds") for name in clocked},
    }
    panels = [
        Bars(f"tiles of {side} pixels per CPU second", rates, ours=[OURS, THROUGH, PASSED])
        for side, rates in result["rates"].items()
    ]
    publish(result, table(result), panels, Path(options.out) / f"tiling-{options.side}")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("tiling", __doc__)
    parser.add_argument("--slide", help="file to keep the slide in for later runs (not kept)")
    add_numbers(
        parser,
        side=(20_000, 1, "side of the slide"),
        tiles=([256, 1024], 1, "sides of tiles"),
        rounds=(3, 1, "rounds"),
        most=(2000, 1, "tiles per round without writing"),
        jobs=([2], 1, "processes, besides one"),
    )
    options = parser.parse_args(arguments)
    if options.side < max(options.tiles):
        parser.error(f"--side {options.side} is smaller than a tile of {max(options.tiles)}")
    return options


def _processes(jobs: int) -> str:
    return f"{jobs} process{'es' * (jobs > 1)}"


def _rates(runs: Sequence[dict[str, float]], clock: str) -> list[float]:
    return [run["tiles"] / run[clock] for run in runs]


def table(result: dict[str, Any]) -> list[str]:
    """Table of tiles per CPU second, and ratios to openslide alone."""
    options, rates, clock = result["options"], result["rates"], result["clock"]
    titles = [""]
    for side in rates:
        titles += [str(side), "ratio"]
    rows = [
        [way, *(cell for one in rates.values() for cell in _cells(one[way], one[OPENSLIDE]))]
        for way in WAYS
    ]
    clocked = f"{BATCH} such slides, tiles of {options['tiles'][0]} per second of wall time"
    first = next(iter(clock.values()))
    return [
        f"slide of {options['side']} x {options['side']} pixels in JPEG tiles; tiles per CPU "
        f"second, medians; native tiles by {result['decoder']}",
        "",
        *markdown(titles, rows),
        "",
        *markdown(
            [clocked, "end to end", "ratio"], [[k, *_cells(v, first)] for k, v in clock.items()]
        ),
        "",
        f"ratio: to {OPENSLIDE} (below: to one process), median of the rounds",
        TARGETS,
    ]


def _cells(rates: Sequence[float], base: Sequence[float]) -> tuple[str, str]:
    return f"{statistics.median(rates):.0f}", f"{median_ratio(rates, base):.2f}"


# --- processes


def work(options: argparse.Namespace) -> dict[str, float]:
    """Process a slide in one way; returns CPU seconds, wall seconds and tiles."""
    ways = {OPENSLIDE: _read, NATIVE: _read, HASHED: _hash}
    (cpu_seconds, seconds), tiles = ways.get(options.way, _cut)(options)
    return {"cpu_seconds": cpu_seconds, "seconds": seconds, "tiles": tiles}


def _since(cpu: float = 0.0, clock: float = 0.0) -> tuple[float, float]:
    """CPU and wall seconds since a start."""
    return time.process_time() - cpu, time.perf_counter() - clock


def _read(options: argparse.Namespace) -> tuple[tuple[float, float], int]:
    """Read tiles spread over the slide, without writing."""
    side, size = options.side, (options.side, options.side)
    read: Callable[[int, int], object]
    if options.way == OPENSLIDE:
        raw = openslide.OpenSlide(options.slide)
        height, width = raw.dimensions[::-1]

        def read(x: int, y: int) -> object:
            return np.asarray(raw.read_region((x, y), 0, size).convert("RGB"))
    else:
        slide = reader.Slide(options.slide)
        height, width = slide.size
        if not slide.is_native(1.0):
            raise RuntimeError(f"the tiles of {options.slide} are not read natively")

        def read(x: int, y: int) -> object:
            return slide.read_scaled(x, y, size, 1.0)

    rows, cols = height // side, width // side
    # whole rows of tiles, as in tiling, spread over the slide
    chosen = range(0, rows, max(1, rows * cols // options.most))
    before, tiles = _since(), 0
    for row, col in islice(product(chosen, range(cols)), options.most):
        read(col * side, row * side)
        tiles += 1
    return _since(*before), tiles


def _cut(options: argparse.Namespace) -> tuple[tuple[float, float], int]:
    """Run the tiling command; a batch is several copies of the slide."""
    slide, out = Path(options.slide), Path(options.out)
    named = [out.with_name(f"{number}-{slide.name}") for number in range(options.slides)]
    for name in named:
        shutil.copyfile(slide, name)
    given = [*map(str, named), "--out", str(out), "--tile-size", str(options.side)]
    given += ["--level", "0", "--jobs", str(options.jobs)]
    if options.way == PASSED:
        given += ["--codec", "jpeg-native"]
    shutil.rmtree(out, ignore_errors=True)
    before = _since()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        if options.way == THROUGH:
            native.tile_levels = lambda path, properties: {}  # of this process
        code = tile_cli.main(given)
    seconds = _since(*before)
    if code:
        raise RuntimeError(f"the tiling command failed with exit code {code}")
    manifest = json.loads((out / "manifest.json").read_text())
    for path in (out, *named):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return seconds, len(manifest["samples"])


def _hash(options: argparse.Namespace) -> tuple[tuple[float, float], int]:
    """Compute the checksums of raw tiles only."""
    tile = bytes(3 * options.side**2)
    before, digest = _since(), hashlib.sha256()
    for _ in range(options.most):
        digest.update(tile)
    return _since(*before), options.most


if __name__ == "__main__":
    start(main)
