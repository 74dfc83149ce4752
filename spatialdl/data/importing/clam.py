"""Import of CLAM patch files, one HDF5 file per slide, as a data set of tiles.

A file has `imgs` (N, rows, cols, channels) and `coords` (N, 2), level-0 x and y
(https://github.com/mahmoodlab/CLAM).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from spatialdl.common.text import progress_bar
from spatialdl.data.chunk_map import own_dataset
from spatialdl.data.feature_file import COORDS, UNREADABLE, list_h5
from spatialdl.data.image_source import image_dtype
from spatialdl.data.tables import TableRow, label_slides
from spatialdl.data.writer import ShardWriter

IMAGES = "imgs"
_AT_ONCE = 16 * 2**20  # bytes of patches in memory


@dataclass(frozen=True)
class PatchFile:
    """A patch file: slide name, number of patches, (rows, cols, channels) and type of each."""

    path: Path
    slide: str
    patches: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def import_clam(
    paths: Iterable[Path],
    out: Path,
    *,
    labels: Path | None = None,
    skip_broken: bool = False,
    **settings: Any,
) -> list[str]:
    """Write a data set from patch files, reading some patches at a time.

    Args:
        paths: files, or folders of `*.h5` files.
        out: the data set to create.
        labels: a table with columns slide or slide_id, label and, optionally, split.
        skip_broken: skip files without readable patches.
        settings: arguments of `ShardWriter`.

    Returns:
        Errors of the skipped files.

    Raises:
        ValueError: no files, some are broken and `skip_broken` is false, inconsistent patches or
            labels, or a file is damaged; nothing was written.
    """
    files, broken = _opened(_listed(paths))
    if broken and (not skip_broken or not files):
        shown = "\n  ".join(broken)
        raise ValueError(
            f"{len(broken)} files have no readable patches, and nothing was written; "
            f"--skip-broken skips them:\n  {shown}"
        )
    _check_alike(files)
    rows = label_slides([file.slide for file in files], labels)
    classes = sorted({row.labels[0] for row in rows.values()})
    total = sum(file.patches for file in files)
    with (
        ShardWriter(out, classes, **settings) as writer,
        progress_bar(None, None, "patch", total=total) as bar,
    ):
        for file in files:
            bar.set_description(file.slide)
            for count in _copy(file, rows.get(file.slide), writer):
                bar.update(count)
    return broken


def _listed(paths: Iterable[Path]) -> list[Path]:
    found = sorted(list_h5(paths))
    if not found:
        raise ValueError("no files *.h5 in the given folders")
    names: dict[str, Path] = {}
    for path in found:
        if names.setdefault(path.stem, path) != path:
            raise ValueError(f"{names[path.stem]} and {path} have the same name; rename one")
    return found


def _opened(paths: Sequence[Path]) -> tuple[list[PatchFile], list[str]]:
    files, broken = [], []
    for path in paths:
        try:
            with h5py.File(path, "r", locking=False) as h5:
                files.append(_described(path, h5))
        except UNREADABLE as error:
            broken.append(f"{path}: {error}")
    return files, broken


def _described(path: Path, h5: h5py.File) -> PatchFile:
    for name, dims in ((IMAGES, 4), (COORDS, 2)):
        if name not in h5:
            raise ValueError(f"it has no dataset {name!r}; it has {', '.join(h5) or 'none'}")
        dataset = own_dataset(h5, name)
        if dataset.ndim != dims:
            raise ValueError(f"{name!r} has shape {dataset.shape}, expected {dims} dims")
    images, coords = h5[IMAGES], h5[COORDS]
    if 0 in images.shape:
        raise ValueError(f"it has no patches: {IMAGES!r} has shape {images.shape}")
    if coords.shape != (len(images), 2) or coords.dtype.kind not in "iuf":
        raise ValueError(
            f"{COORDS!r} is {coords.dtype} of shape {coords.shape}, expected numbers of shape "
            f"({len(images)}, 2)"
        )
    dtype = image_dtype(images.dtype)
    return PatchFile(path, path.stem, len(images), images.shape[1:], dtype)


def _check_alike(files: Sequence[PatchFile]) -> None:
    first = files[0]
    for file in files[1:]:
        if (file.shape, file.dtype) != (first.shape, first.dtype):
            raise ValueError(
                f"{file.path} has patches of {file.shape} {file.dtype}, {first.path} of "
                f"{first.shape} {first.dtype}; import them into separate data sets"
            )


def _copy(file: PatchFile, row: TableRow | None, writer: ShardWriter) -> Iterable[int]:
    each = int(np.prod(file.shape)) * file.dtype.itemsize
    at_once = max(1, _AT_ONCE // each)
    with h5py.File(file.path, "r", locking=False) as h5:
        for begin in range(0, file.patches, at_once):
            try:
                images = h5[IMAGES][begin : begin + at_once]
                coords = h5[COORDS][begin : begin + at_once]
            except UNREADABLE as error:
                raise ValueError(
                    f"{file.path} is damaged from patch {begin} on, and nothing was written: "
                    f"{error}"
                ) from error
            for image, (x, y) in zip(images, coords, strict=True):
                writer.add(
                    image,
                    row.labels[0] if row else None,
                    row.split if row else None,
                    slide=file.slide,
                    xy=(int(x), int(y)),
                )
            yield len(images)
