"""Read boxes of one large image from a raw shard and from other formats.

Windows of 1024 pixels have random positions; quarters are the boxes of 2 x 2 ranks in an image of
1024 pixels. All strategies read the same boxes in one process. Warm: from the page cache as left by
writing, in MB per CPU second (after dropping and reading again, the cache has smaller pages and
boxes take a third longer). Cold: windows from the disk, in MB per second of wall time, if the
system permits dropping pages.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spatialdl.bench.io_strategies import (
    CODED,
    JPEG,
    LOSSY,
    LZ4,
    MEMMAP,
    PLAIN,
    PNG,
    WAYS,
    ZSTD,
    Read,
    draw_image,
    files_of,
    open_way,
    size_of,
    write_all,
)
from spatialdl.bench.results import median_ratio

WINDOW = 1024
QUARTER = WINDOW // 2
KINDS = {f"windows of {WINDOW}": WINDOW, f"quarters of {QUARTER}": QUARTER}
WINDOWS, QUARTERS = KINDS
OF_MEMMAP, OF_PLAIN = 0.6, 3.0
"""Targets: rate of a raw shard relative to `np.memmap` and to plain HDF5."""
FEWER = {ZSTD: 4, LZ4: 4, CODED: 4, PNG: 20, JPEG: 20}
"""Factor by which strategies that decode read fewer boxes from the page cache."""
COLD_ROUNDS = 3
COLD_FEWER = 4
_COLD = 0.02  # largest share of pages still resident

Rates = Mapping[str, Sequence[float]]
"""MB per second by strategy and round."""
_PAGE = os.sysconf("SC_PAGESIZE")


def ticks(options: argparse.Namespace) -> int:
    """Number of progress ticks of `measure`."""
    return len(WAYS) * (int(options.rounds) * len(KINDS) + COLD_ROUNDS)


def measure(
    options: argparse.Namespace, folder: Path, tick: Callable[[], object]
) -> dict[str, Any]:
    """Rates of all strategies by round, their medians, and medians of ratios per round."""
    write_all(draw_image(options.side), folder)
    rng = np.random.default_rng(1)
    reads = {way: open_way(folder, options.side, way) for way in WAYS}
    check_same(reads)
    warm = _warm(options, reads, rng, tick)  # the files have just been written
    reads.clear()
    cold = _cold(options, folder, rng, tick)
    return {
        "warm": {kind: _summarised(rates) for kind, rates in warm.items()},
        "cold": None if cold is None else _summarised(cold),
        "stored": {way: size_of(folder, way) / (3 * options.side**2) for way in WAYS},
    }


def check_same(reads: Mapping[str, Read]) -> None:
    """Check that all lossless strategies return the same pixels.

    Raises:
        RuntimeError: a strategy returns other pixels.
    """
    wanted = reads[MEMMAP](0, 0, WINDOW)
    for way in WAYS:
        if way not in LOSSY and not np.array_equal(reads[way](0, 0, WINDOW), wanted):
            raise RuntimeError(f"{way} returns other pixels than {MEMMAP}")


def _warm(
    options: argparse.Namespace,
    reads: Mapping[str, Read],
    rng: np.random.Generator,
    tick: Callable[[], object],
) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {k: {way: [] for way in WAYS} for k in KINDS}
    for _ in range(options.rounds):
        for kind, side in KINDS.items():
            places = _places(rng, options.side, side, options.boxes)
            for way, read in reads.items():
                few = -(-len(places) // FEWER.get(way, 1))
                found[kind][way].append(_rate(read, places[:few], side, time.process_time))
                tick()
    return found


def _cold(
    options: argparse.Namespace, folder: Path, rng: np.random.Generator, tick: Callable[[], object]
) -> dict[str, list[float]] | None:
    """Rates from the disk; None if pages stay in memory."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(COLD_ROUNDS):
        places = _places(rng, options.side, WINDOW, -(-options.boxes // COLD_FEWER))
        for way in WAYS:
            gc.collect()  # an open memory map keeps its pages
            paths = files_of(folder, way)
            drop(paths)
            if resident(paths) > _COLD:
                return None
            read = open_way(folder, options.side, way)
            found[way].append(_rate(read, places, WINDOW, time.perf_counter))
            del read
            tick()
    return found


def _places(rng: np.random.Generator, whole: int, side: int, count: int) -> list[list[int]]:
    step = QUARTER if side == QUARTER else 1
    found: list[list[int]] = (
        rng.integers(0, (whole - side) // step + 1, (count, 2)) * step
    ).tolist()
    return found


def _rate(
    read: Read, places: Sequence[Sequence[int]], side: int, clock: Callable[[], float]
) -> float:
    before, count = clock(), 0
    for row, col in places:
        count += read(row, col, side).nbytes
    return count / 1e6 / (clock() - before)


def _summarised(rates: Rates) -> dict[str, Any]:
    def ratios(to: str) -> dict[str, float]:
        return {way: median_ratio(rates[way], rates[to]) for way in WAYS}

    return {
        "rates": {way: statistics.median(rates[way]) for way in WAYS},
        "to_memmap": ratios(MEMMAP),
        "to_plain": ratios(PLAIN),
        "rounds": rates,
    }


def drop(paths: Iterable[Path]) -> None:
    """Drop files from the page cache, if they are on the disk and not mapped."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def resident(paths: Iterable[Path]) -> float:
    """Share of the pages of files in memory, by mincore(2).

    Raises:
        OSError: mincore failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    pages = found = 0
    for path in paths:
        mapped = np.memmap(path, np.uint8, "r")
        seen = np.zeros(-(-len(mapped) // _PAGE), np.uint8)
        begin, size = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(len(mapped))
        if libc.mincore(begin, size, ctypes.c_void_p(seen.ctypes.data)):
            raise OSError(ctypes.get_errno(), f"mincore of {path}")
        pages += len(seen)
        found += int(np.count_nonzero(seen & 1))
    return found / pages
