"""Storage formats of one image, and functions that read boxes of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
from PIL import Image
from tqdm import tqdm

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.codec import Codec
from spatialdl.data.raw_reading import Io
from spatialdl.data.saving import sync

Pixels = npt.NDArray[np.uint8]
Read = Callable[[int, int, int], Pixels]
"""Reads the square at a row and column with a side: `read(row, column, side)`."""

MEMMAP = "np.memmap"
OURS, PREAD, THROUGH = "raw shard", "raw shard, pread", "raw shard, through HDF5"
ZSTD, LZ4, CODED = "zstd shard", "lz4 shard", "JPEG shard"
PLAIN = "plain h5py, chunks of 256"
PNG, JPEG = "folder of PNG", "folder of JPEG"
WAYS = (MEMMAP, OURS, PREAD, THROUGH, ZSTD, LZ4, CODED, PLAIN, PNG, JPEG)
LOSSY = (CODED, JPEG)
FILE = 1024
"""Rows and columns of a file in a folder."""

_SHARDS: dict[str, tuple[Codec, Io]] = {
    OURS: ("raw", "auto"),
    PREAD: ("raw", "pread"),
    THROUGH: ("raw", "h5py"),
    ZSTD: ("zstd", "auto"),
    LZ4: ("lz4", "auto"),
    CODED: ("jpeg", "auto"),
}
_SUFFIX = {PNG: "png", JPEG: "jpg"}
_PLAIN_CHUNK = 256
_QUALITY = 90


def draw_image(side: int) -> Pixels:
    """Square RGB image, smooth with some noise, as a photograph."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 240, (-(-side // 64), -(-side // 64), 3), np.uint8)
    image = coarse.repeat(64, 0).repeat(64, 1)[:side, :side].copy()
    image += rng.integers(0, 16, image.shape, np.uint8)
    return image


def write_all(image: Pixels, folder: Path) -> None:
    """Write an image in all formats, and sync to disk."""
    image.tofile(folder / "image.raw")
    for codec in dict.fromkeys(codec for codec, _ in _SHARDS.values()):
        with ShardWriter(folder / codec, kind="regions", codec=codec, quality=_QUALITY) as writer:
            writer.add(image)
    with h5py.File(folder / "plain.h5", "w") as file:
        file.create_dataset("image", data=image, chunks=(_PLAIN_CHUNK, _PLAIN_CHUNK, 3))
    places = [
        (row, col) for row in range(0, len(image), FILE) for col in range(0, len(image), FILE)
    ]
    for way in _SUFFIX:
        (folder / way).mkdir()
    for row, col in tqdm(places, "writing files", unit="file", leave=False):
        part = Image.fromarray(image[row : row + FILE, col : col + FILE])
        part.save(_file(folder, PNG, row, col))
        part.save(_file(folder, JPEG, row, col), quality=_QUALITY)
    for path in folder.rglob("*"):
        if path.is_file():
            sync(path)


def files_of(folder: Path, way: str) -> list[Path]:
    """The files of a format."""
    if way == MEMMAP:
        return [folder / "image.raw"]
    if way == PLAIN:
        return [folder / "plain.h5"]
    if way in _SHARDS:
        return sorted((folder / _SHARDS[way][0]).glob("*.h5"))
    return sorted((folder / way).iterdir())


def open_way(folder: Path, side: int, way: str) -> Read:
    """Open a format for reading boxes; files are closed with the returned function."""
    if way == MEMMAP:
        memmap = np.memmap(folder / "image.raw", np.uint8, "r", shape=(side, side, 3))
        return lambda row, col, n: np.array(memmap[row : row + n, col : col + n])
    if way == PLAIN:
        plain = h5py.File(folder / "plain.h5", "r")["image"]
        return lambda row, col, n: np.asarray(plain[row : row + n, col : col + n])
    if way in _SHARDS:
        codec, io = _SHARDS[way]
        data = ShardDataset(folder / codec, io=io)
        return lambda row, col, n: data.read(0, (row, row + n, col, col + n))
    return partial(_read_files, folder, way)


def _read_files(folder: Path, way: str, row: int, col: int, n: int) -> Pixels:
    out = np.empty((n, n, 3), np.uint8)
    for y in range(row // FILE * FILE, row + n, FILE):
        for x in range(col // FILE * FILE, col + n, FILE):
            with Image.open(_file(folder, way, y, x)) as file:
                pixels = np.asarray(file)
            y0, y1 = max(y, row), min(y + FILE, row + n)
            x0, x1 = max(x, col), min(x + FILE, col + n)
            out[y0 - row : y1 - row, x0 - col : x1 - col] = pixels[y0 - y : y1 - y, x0 - x : x1 - x]
    return out


def _file(folder: Path, way: str, row: int, col: int) -> Path:
    return folder / way / f"{row}-{col}.{_SUFFIX[way]}"


def size_of(folder: Path, way: str) -> int:
    """Bytes of a format on the disk."""
    return sum(os.stat(path).st_size for path in files_of(folder, way))
