"""Tile features of a slide in the format of CLAM and TRIDENT: one HDF5 file per slide.

A file has `features` (N, D), one row per tile, and `coords` int64 (N, 2), level-0 x and y of the
tiles' top left corners (https://github.com/mahmoodlab/CLAM, https://github.com/mahmoodlab/TRIDENT).
Some programs write `features` as (1, N, D), which is also supported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from spatialdl.common.files import unfinished
from spatialdl.data.chunk_map import own_dataset

FEATURES, COORDS = "features", "coords"
UNREADABLE = (OSError, ValueError, RuntimeError, KeyError, TypeError)  # raised for damaged HDF5
_ROWS_A_CHUNK = 1024


@dataclass(frozen=True)
class FeatureFile:
    """The features of one slide on disk.

    Attributes:
        path: path of the file.
        tiles: number of rows.
        width: features per row.
        dtype: float16, float32 or float64.
        has_coords: whether the file has coordinates for each row.
        attributes: HDF5 attributes of `coords`, such as `patch_size`.
    """

    path: Path
    tiles: int
    width: int
    dtype: np.dtype[Any]
    has_coords: bool = True
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def slide(self) -> str:
        """Name of the slide: the file name without its suffix."""
        return self.path.stem

    @classmethod
    def open(cls, path: Path) -> FeatureFile:
        """Open a file, check it and read its sizes.

        Raises:
            ValueError: the file is missing, damaged, or has no tile features.
        """
        with _opened(path, "has no readable features") as h5:
            return cls._described(path, h5)

    @classmethod
    def _described(cls, path: Path, h5: h5py.File) -> FeatureFile:
        features = own_dataset(h5, FEATURES)
        shape = features.shape[1:] if _has_extra_dim(features) else features.shape
        if len(shape) != 2 or features.dtype.kind != "f":
            raise ValueError(
                f"{FEATURES!r} is {features.dtype} of shape {features.shape}, expected floats of "
                "shape (tiles, width)"
            )
        attributes: dict[str, Any] = {}
        if COORDS in h5:
            coords = own_dataset(h5, COORDS)
            if coords.shape != (shape[0], 2) or coords.dtype.kind not in "iuf":
                raise ValueError(
                    f"{COORDS!r} is {coords.dtype} of shape {coords.shape}, expected numbers of "
                    f"shape ({shape[0]}, 2)"
                )
            attributes = dict(coords.attrs)
        return cls(path, shape[0], shape[1], features.dtype, COORDS in h5, attributes)

    def read(self, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """Rows [start, stop) of the features, (rows, width) of the file's type.

        Raises:
            ValueError: the file is damaged or has changed.
        """
        rows = slice(start, self.tiles if stop is None else stop)
        with _opened(self.path, "is damaged") as h5:
            features = own_dataset(h5, FEATURES)
            return np.asarray(features[0, rows] if _has_extra_dim(features) else features[rows])

    def coords(self) -> npt.NDArray[np.int64]:
        """(tiles, 2): level-0 x and y of each tile's top left corner.

        Raises:
            ValueError: the file has no coordinates, or is damaged.
        """
        if not self.has_coords:
            raise ValueError(f"{self.path} has no {COORDS!r}: tile coordinates are unknown")
        with _opened(self.path, "is damaged") as h5:
            return np.asarray(own_dataset(h5, COORDS)[:]).astype(np.int64)


@contextmanager
def _opened(path: Path, problem: str) -> Iterator[h5py.File]:
    try:
        with h5py.File(path, "r", locking=False) as h5:
            yield h5
    except UNREADABLE as error:
        raise ValueError(f"{path} {problem}: {error}") from error


def _has_extra_dim(features: h5py.Dataset) -> bool:
    return bool(features.ndim == 3 and features.shape[0] == 1)


def list_features(paths: Iterable[Path]) -> list[FeatureFile]:
    """Open feature files, sorted by slide name.

    Args:
        paths: files, folders of `*.h5` files, or parents of such a folder `h5` or `h5_files`.

    Raises:
        ValueError: none found, a damaged file, duplicate slide names, or different widths.
    """
    files = sorted(
        (FeatureFile.open(path) for path in list_h5(paths)), key=lambda first: first.slide
    )
    if not files:
        raise ValueError("no feature files *.h5 in the given folders")
    for first, second in pairwise(files):
        if first.slide == second.slide:
            raise ValueError(
                f"{first.path} and {second.path} have the same slide name: give one of the folders"
            )
        if first.width != second.width:
            raise ValueError(
                f"{first.path} has {first.width} features per tile, {second.path} "
                f"{second.width}: all must come from one encoder"
            )
    return files


def list_h5(paths: Iterable[Path]) -> list[Path]:
    """List files, those of folders by the suffix `.h5`; see `list_features`.

    Raises:
        ValueError: a path does not exist, or is not a regular file.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path}: no such file or directory")
        if not path.is_dir():
            found.append(path)
            continue
        folders = [path / name for name in ("h5", "h5_files") if (path / name).is_dir()]
        inside = [file for folder in folders or [path] for file in folder.glob("*.h5")]
        found += [file for file in inside if not file.name.startswith(".")]
    for path in found:
        if not path.is_file():  # opening a pipe blocks
            raise ValueError(f"{path} is not a regular file")
    return found


def write_features(
    path: Path,
    features: npt.NDArray[Any],
    coords: npt.NDArray[np.int64] | None,
    attributes: Mapping[str, Any] | None = None,
    feature_attributes: Mapping[str, Any] | None = None,
) -> FeatureFile:
    """Write a feature file atomically.

    Args:
        path: path of the file, whose stem is the slide name.
        features: floats (tiles, width).
        coords: (tiles, 2), level-0 x and y of each tile; None for tiles without coordinates.
        attributes: HDF5 attributes of `coords`; CLAM and TRIDENT use names such as `patch_size`.
        feature_attributes: HDF5 attributes of `features`, such as the encoder's name.

    Raises:
        ValueError: invalid shapes or types.
        OSError: it cannot be written.
    """
    if features.ndim != 2 or features.dtype.kind != "f":
        raise ValueError(
            f"features are {features.dtype} of shape {features.shape}, expected floats "
            "(tiles, width)"
        )
    if coords is not None and coords.shape != (len(features), 2):
        raise ValueError(f"coords have shape {coords.shape}, expected ({len(features)}, 2)")
    path.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(path) as temporary, h5py.File(temporary, "w") as h5:
        rows = max(1, min(_ROWS_A_CHUNK, len(features)))
        chunks = (rows, features.shape[1]) if features.size else None
        h5.create_dataset(FEATURES, data=features, chunks=chunks)
        h5[FEATURES].attrs.update(dict(feature_attributes or {}))
        if coords is not None:
            h5.create_dataset(COORDS, data=coords.astype(np.int64))
            h5[COORDS].attrs.update(dict(attributes or {}))
    return FeatureFile.open(path)
