"""Subprocess that reads the tiles of a slide in one way; prints CPU seconds and tiles."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from itertools import islice, product
from pathlib import Path

import numpy as np
import openslide

from spatialdl.bench.tiling import HASHED, NATIVE, OPENSLIDE, PASSED, THROUGH, WAYS
from spatialdl.slides import command
from spatialdl.slides.reading import reader


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("slide", type=Path)
    parser.add_argument("--tile-size", type=int, required=True)
    parser.add_argument("--most", type=int, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--slides", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    ways = {OPENSLIDE: _read, NATIVE: _read, HASHED: _hash}
    (cpu_seconds, seconds), tiles = ways.get(options.way, _cut)(options)
    print(json.dumps({"cpu_seconds": cpu_seconds, "seconds": seconds, "tiles": tiles}))


def _since(cpu: float = 0.0, clock: float = 0.0) -> tuple[float, float]:
    """CPU and wall seconds since a start."""
    return time.process_time() - cpu, time.perf_counter() - clock


def _read(options: argparse.Namespace) -> tuple[tuple[float, float], int]:
    """Read tiles spread over the slide, without writing."""
    side, path = options.tile_size, str(options.slide)
    size = (side, side)
    read: Callable[[int, int], object]
    if options.way == OPENSLIDE:
        raw = openslide.OpenSlide(path)
        height, width = raw.dimensions[::-1]

        def read(x: int, y: int) -> object:
            return np.asarray(raw.read_region((x, y), 0, size).convert("RGB"))
    else:
        slide = reader.Slide(path)
        height, width = slide.size
        if not slide.is_native(1.0):
            raise RuntimeError(f"the tiles of {path} are not read natively")

        def read(x: int, y: int) -> object:
            return slide.read_scaled(x, y, size, 1.0)

    rows, cols = height // side, width // side
    # whole rows of tiles, as in tiling, spread over the slide
    chosen = range(0, rows, max(1, rows * cols // options.most))
    places = islice(product(chosen, range(cols)), options.most)
    before, tiles = _since(), 0
    for row, col in places:
        read(col * side, row * side)
        tiles += 1
    return _since(*before), tiles


def _cut(options: argparse.Namespace) -> tuple[tuple[float, float], int]:
    """Run the tiling command."""
    # a batch is several copies of the slide
    named = [options.out.with_name(f"{k}-{options.slide.name}") for k in range(options.slides)]
    for name in named:
        name.unlink(missing_ok=True)
        shutil.copyfile(options.slide, name)
    given = [*map(str, named), "--out", str(options.out), "--tile-size", str(options.tile_size)]
    given += ["--level", "0", "--jobs", str(options.jobs)]
    if options.way == PASSED:
        given += ["--codec", "jpeg-native"]
    shutil.rmtree(options.out, ignore_errors=True)
    before = _since()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        code = command.main(given, native=options.way != THROUGH)
    seconds = _since(*before)
    if code:
        raise RuntimeError(f"the tiling command failed with exit code {code}")
    manifest = json.loads((options.out / "manifest.json").read_text())
    for path in (options.out, *named):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return seconds, len(manifest["samples"])


def _hash(options: argparse.Namespace) -> tuple[tuple[float, float], int]:
    """Compute the checksums of raw tiles only."""
    tile = bytes(3 * options.tile_size**2)
    before, digest = _since(), hashlib.sha256()
    for _ in range(options.most):
        digest.update(tile)
    return _since(*before), options.most


if __name__ == "__main__":
    main()
