"""TIFF stacks and OME-TIFF, read page by page; spacing from OME-XML."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
import tifffile

from spatialdl.common.files import file_status
from spatialdl.data.importing.volume_files.volume import (
    Read,
    Reader,
    StoredVolume,
    numbers_of,
    ome_spacing,
)

_UNNAMED = "QI"  # tifffile's names of unlabelled page axes


def open_tiff(path: Path) -> StoredVolume:
    """Open pages of grey or of channels; only OME-TIFF has a spacing.

    Raises:
        ValueError: it is not a volume; other errors if it is damaged.
    """
    with _damage_raises(), tifffile.TiffFile(path) as tiff:
        _check_companions(path.parent, tiff.ome_metadata)
        series, order = _stack(tiff)
        shape = dict(zip(series.axes, series.shape, strict=True))
        size = tuple(shape[axis] for axis in order[:3])
        spacing = ome_spacing(tiff.ome_metadata or "") if tiff.is_ome else None
        channels, dtype = prod(shape[axis] for axis in order[3:]), numbers_of(series.dtype)
        return StoredVolume(size, channels, dtype, spacing, None, Reader(partial(_start, path)))


@contextmanager
def _damage_raises() -> Iterator[None]:
    """Raise errors that tifffile only logs when it skips unreadable pages or tags."""
    errors: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: errors.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("tifffile")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
    if errors:
        raise ValueError(f"it is damaged: {errors[0]}")


def _check_companions(folder: Path, text: str | None) -> None:
    """Check the other files that OME-XML names, before tifffile opens them.

    Raises:
        ValueError: one lies in another folder, or is not a regular file.
    """
    described = ElementTree.fromstring(text) if text else ElementTree.Element("OME")
    own = described.get("UUID")
    for one in described.iterfind(".//{*}UUID"):
        if (name := one.get("FileName")) and (one.text or "").strip() != own:
            with suppress(FileNotFoundError):  # tifffile tells of those
                file_status(folder, name)


def _stack(tiff: tifffile.TiffFile) -> tuple[Any, str]:
    """The series, and the names of its axes of slices, rows, columns and perhaps channels."""
    series: Any = tiff.series[0]
    axes = series.axes
    depth = "Z" if "Z" in axes else next((axis for axis in _UNNAMED if axis in axes), "")
    order = depth + "YX" + "".join(axis for axis in "CS" if axis in axes)
    if len(tiff.series) > 1 or not depth or len(order) > 4 or sorted(order) != sorted(axes):
        raise ValueError(
            f"it has {len(tiff.series)} images, the first with axes {axes} of {series.shape}; "
            "expected pages of grey or channels of one volume (ZYX, CZYX or ZCYX)"
        )
    return series, order


def _start(path: Path) -> Read:
    tiff = tifffile.TiffFile(path)
    series, order = _stack(tiff)
    inside = series.keyframe.axes
    lead = series.axes.removesuffix(inside)
    outer = series.shape[: len(lead)]
    if lead + inside != series.axes or len(series.pages) != prod(outer):
        return _start_whole(path, tiff)
    colours = outer[lead.index("C")] if "C" in lead else 1

    def page(k: int, colour: int) -> npt.NDArray[Any]:
        number = {order[0]: k, "C": colour}
        found = series.pages[int(np.ravel_multi_index([number[axis] for axis in lead], outer))]
        if found is None:
            raise ValueError(f"it lacks the page of slice {k}")
        pixels: npt.NDArray[Any] = found.asarray()
        return np.moveaxis(pixels, inside.index("S"), -1) if "S" in inside else pixels[..., None]

    def read(box: tuple[slice, ...]) -> npt.NDArray[Any]:
        slices = [
            np.concatenate([page(k, colour)[box[1:]] for colour in range(colours)], axis=-1)
            for k in range(box[0].start, box[0].stop)
        ]
        return np.stack(slices)

    return read


def _start_whole(path: Path, tiff: tifffile.TiffFile) -> Read:
    """Read files in which one page describes all, as ImageJ writes them."""
    series, order = _stack(tiff)
    voxels = series.asarray() if series.dataoffset is None else tifffile.memmap(path, mode="r")
    voxels = voxels.transpose([series.axes.index(axis) for axis in order])
    return lambda box: voxels[box]
