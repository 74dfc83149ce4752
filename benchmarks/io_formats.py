"""Storage formats of one image, of the benchmark `io`, and functions that read boxes of it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
from PIL import Image

from spatialdl.common.files import sync
from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.codec import Codec

Pixels = npt.NDArray[np.uint8]
Read = Callable[[int, int, int], Pixels]
"""Reads the square at a row and column with a side: `read(row, column, side)`."""

MEMMAP, RAW, PLAIN = "np.memmap", "raw shard", "plain h5py, chunks of 256"
PNG, JPEG = "folder of PNG", "folder of JPEG"
SHARDS: dict[str, Codec] = {
    RAW: "raw",
    "zstd shard": "zstd",
    "lz4 shard": "lz4",
    "JPEG shard": "jpeg",
}
FORMATS = (MEMMAP, *SHARDS, PLAIN, PNG, JPEG)
LOSSY = ("JPEG shard", JPEG)
FEWER = {"zstd shard": 4, "lz4 shard": 4, "JPEG shard": 4, PNG: 20, JPEG: 20}
"""Factor by which formats that decode read fewer boxes from the page cache."""
SUFFIX, QUALITY = {PNG: "png", JPEG: "jpg"}, 90
FILE = 1024
"""Rows and columns of a file in a folder."""


def draw_image(side: int) -> Pixels:
    """Square RGB image, smooth with some noise, as a photograph."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 240, (-(-side // 64), -(-side // 64), 3), np.uint8)
    image = coarse.repeat(64, 0).repeat(64, 1)[:side, :side].copy()
    image += rng.integers(0, 16, image.shape, np.uint8)
    return image


def check_same(reads: Mapping[str, Read], side: int) -> None:
    """Check that all lossless formats return the same pixels.

    Raises:
        RuntimeError: a format returns other pixels.
    """
    wanted = reads[MEMMAP](0, 0, side)
    for name in FORMATS:
        if name not in LOSSY and not np.array_equal(reads[name](0, 0, side), wanted):
            raise RuntimeError(f"{name} returns other pixels than {MEMMAP}")


def write_all(image: Pixels, folder: Path) -> None:
    """Write an image in all formats, and sync to disk."""
    image.tofile(folder / "image.raw")
    for codec in SHARDS.values():
        with ShardWriter(folder / codec, kind="regions", codec=codec, quality=QUALITY) as writer:
            writer.add(image)
    with h5py.File(folder / "plain.h5", "w") as file:
        file.create_dataset("image", data=image, chunks=(256, 256, 3))
    for name in SUFFIX:
        (folder / name).mkdir()
    for row in range(0, len(image), FILE):
        for col in range(0, len(image), FILE):
            part = Image.fromarray(image[row : row + FILE, col : col + FILE])
            part.save(_file(folder, PNG, row, col))
            part.save(_file(folder, JPEG, row, col), quality=QUALITY)
    for path in folder.rglob("*"):
        if path.is_file():
            sync(path)


def files_of(folder: Path, name: str) -> list[Path]:
    """The files of a format."""
    if name in SHARDS:
        return sorted((folder / SHARDS[name]).glob("*.h5"))
    single = {MEMMAP: "image.raw", PLAIN: "plain.h5"}
    return [folder / single[name]] if name in single else sorted((folder / name).iterdir())


def open_format(folder: Path, side: int, name: str) -> Read:
    """Open a format for reading boxes; files are closed with the returned function."""
    if name == MEMMAP:
        memmap = np.memmap(folder / "image.raw", np.uint8, "r", shape=(side, side, 3))
        return lambda row, col, n: np.array(memmap[row : row + n, col : col + n])
    if name == PLAIN:
        plain = h5py.File(folder / "plain.h5", "r")["image"]
        return lambda row, col, n: np.asarray(plain[row : row + n, col : col + n])
    if name in SHARDS:
        data = ShardDataset(folder / SHARDS[name])
        return lambda row, col, n: data.read(0, (row, row + n, col, col + n))
    return partial(_read_files, folder, name)


def _read_files(folder: Path, name: str, row: int, col: int, n: int) -> Pixels:
    out = np.empty((n, n, 3), np.uint8)
    for y in range(row // FILE * FILE, row + n, FILE):
        for x in range(col // FILE * FILE, col + n, FILE):
            with Image.open(_file(folder, name, y, x)) as file:
                pixels = np.asarray(file)
            y0, y1 = max(y, row), min(y + FILE, row + n)
            x0, x1 = max(x, col), min(x + FILE, col + n)
            out[y0 - row : y1 - row, x0 - col : x1 - col] = pixels[y0 - y : y1 - y, x0 - x : x1 - x]
    return out


def _file(folder: Path, name: str, row: int, col: int) -> Path:
    return folder / name / f"{row}-{col}.{SUFFIX[name]}"


def drop(paths: Iterable[Path]) -> None:
    """Drop files from the page cache, if they are on the disk and not mapped."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident(paths: Iterable[Path]) -> float:
    """Share of the pages of files in memory, by mincore(2).

    Raises:
        OSError: mincore failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    pages = found = 0
    for path in paths:
        mapped = np.memmap(path, np.uint8, "r")
        seen = np.zeros(-(-len(mapped) // os.sysconf("SC_PAGESIZE")), np.uint8)
        begin, size = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(len(mapped))
        if libc.mincore(begin, size, ctypes.c_void_p(seen.ctypes.data)):
            raise OSError(ctypes.get_errno(), f"mincore of {path}")
        pages += len(seen)
        found += int(np.count_nonzero(seen & 1))
    return found / pages
