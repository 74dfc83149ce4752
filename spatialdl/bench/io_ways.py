"""One image kept in several ways on the disk, and how a box of it is read from each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
from PIL import Image
from tqdm import tqdm

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.format import sha256_of
from spatialdl.data.raw_reading import Io

Pixels = npt.NDArray[np.uint8]
Read = Callable[[int, int, int], Pixels]
"""From a row, a column and a side to the pixels of that square."""

MEMMAP = "np.memmap"
OURS, PREAD, THROUGH = "raw shard", "raw shard, pread", "raw shard, through HDF5"
PLAIN = "plain h5py, chunks of 256"
PNG, JPEG = "folder of PNG", "folder of JPEG"
WAYS = (MEMMAP, OURS, PREAD, THROUGH, PLAIN, PNG, JPEG)
DECODED = (PNG, JPEG)
FILE = 1024
"""Rows and columns of a file in a folder."""

_IOS: dict[str, Io] = {OURS: "auto", PREAD: "pread", THROUGH: "h5py"}
_SUFFIX = {PNG: "png", JPEG: "jpg"}
_PLAIN_CHUNK = 256
_QUALITY = 90


def draw_image(side: int) -> Pixels:
    """A square RGB image, smooth with some noise, as photographs are."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 240, (-(-side // 64), -(-side // 64), 3), np.uint8)
    image = coarse.repeat(64, 0).repeat(64, 1)[:side, :side].copy()
    image += rng.integers(0, 16, image.shape, np.uint8)
    return image


def write_all(image: Pixels, folder: Path) -> None:
    """Write an image in all ways, and read it once, so that it is in the page cache."""
    image.tofile(folder / "raw")
    with ShardWriter(folder / "set", kind="regions") as writer:
        writer.add(image)
    with h5py.File(folder / "plain.h5", "w") as file:
        file.create_dataset("image", data=image, chunks=(_PLAIN_CHUNK, _PLAIN_CHUNK, 3))
    places = [
        (row, col) for row in range(0, len(image), FILE) for col in range(0, len(image), FILE)
    ]
    for row, col in tqdm(places, "writing files", unit="file", leave=False):
        part = Image.fromarray(image[row : row + FILE, col : col + FILE])
        part.save(_file(folder, PNG, row, col))
        part.save(_file(folder, JPEG, row, col), quality=_QUALITY)
    for path in folder.rglob("*"):
        if path.is_file():
            sha256_of(path)


def open_all(folder: Path, side: int) -> dict[str, Read]:
    """How to read a box in each way."""
    memmap = np.memmap(folder / "raw", np.uint8, "r", shape=(side, side, 3))
    plain = h5py.File(folder / "plain.h5", "r")["image"]
    return {
        MEMMAP: lambda row, col, n: np.array(memmap[row : row + n, col : col + n]),
        **{way: _shard_reader(folder / "set", io) for way, io in _IOS.items()},
        PLAIN: lambda row, col, n: np.asarray(plain[row : row + n, col : col + n]),
        **{way: _folder_reader(folder, way) for way in DECODED},
    }


def _shard_reader(path: Path, io: Io) -> Read:
    data = ShardDataset(path, io=io)
    return lambda row, col, n: data.read(0, (row, row + n, col, col + n))


def _folder_reader(folder: Path, way: str) -> Read:
    def read(row: int, col: int, n: int) -> Pixels:
        out = np.empty((n, n, 3), np.uint8)
        for y in range(row // FILE * FILE, row + n, FILE):
            for x in range(col // FILE * FILE, col + n, FILE):
                with Image.open(_file(folder, way, y, x)) as file:
                    pixels = np.asarray(file)
                y0, y1, x0, x1 = (
                    max(y, row),
                    min(y + FILE, row + n),
                    max(x, col),
                    min(x + FILE, col + n),
                )
                out[y0 - row : y1 - row, x0 - col : x1 - col] = pixels[
                    y0 - y : y1 - y, x0 - x : x1 - x
                ]
        return out

    return read


def _file(folder: Path, way: str, row: int, col: int) -> Path:
    return folder / f"{row}-{col}.{_SUFFIX[way]}"
