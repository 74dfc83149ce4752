"""Description of an HDF5 file: a shard, or coordinates of CLAM or TRIDENT."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from spatialdl.data.chunk_map import is_elsewhere
from spatialdl.errors import ShardError
from spatialdl.text import aligned, counted, fitted, readable_bytes

HDF5_START = b"\x89HDF\r\n\x1a\n"
_LFS = b"version https://git-lfs"
_MOST = 40  # datasets listed: a shard of regions may have thousands
_LONGEST = 100  # characters of a value


def describe_hdf5(path: Path) -> str:
    """Describe an HDF5 file, in lines of text: datasets, shapes, chunks, attributes.

    Raises:
        ShardError: the file is not HDF5, or damaged.
    """
    with _opened(path) as file:
        datasets, attributes = _contents(file)
        lines = [f"file  {path}", f"kind  {_kind(file)}", f"size  {_size(path)}"]
        rows: list[tuple[str, ...]] = [("dataset", "shape", "type", "chunk", "codec")]
        rows += [_row(name, data) for name, data in datasets[:_MOST]]
    lines += ["", *aligned(rows, left=range(5))]
    if len(datasets) > _MOST:
        lines.append(f"and {counted(len(datasets) - _MOST, 'dataset')} more")
    if attributes:
        lines += ["", "attributes"]
        lines += [f"  {name}: {value}" for name, value in attributes[:_MOST]]
    if len(attributes) > _MOST:
        lines.append(f"  and {len(attributes) - _MOST} more")
    return "\n".join(lines)


def hdf5_in_a_line(path: Path) -> str:
    """Describe the kind and size of an HDF5 file.

    Raises:
        ShardError: the file is not HDF5, or damaged.
    """
    with _opened(path) as file:
        return f"{_kind(file)}, {_size(path)}"


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    """Open a file; errors while it is read are raised as ShardError, too."""
    check_start(path)
    try:
        with h5py.File(path, "r", locking=False) as file:
            yield file
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError) as error:
        why = " ".join(str(error).split())
        raise ShardError(
            f"cannot read {path}: it is cut short or damaged ({why}); copy it again"
        ) from error


def check_start(path: Path) -> None:
    """Check that a file has the signature of HDF5.

    Raises:
        ShardError: it does not, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(_LFS))
    except OSError as error:
        raise ShardError(f"cannot open {path}: {error.strerror}") from error
    if start.startswith(HDF5_START):
        return
    if not start:
        raise ShardError(f"cannot open {path}: the file is empty; copy or write it again")
    if start == _LFS:
        raise ShardError(
            f"cannot open {path}: it is a Git LFS pointer, not the file; fetch it with "
            "`git lfs pull`"
        )
    raise ShardError(f"cannot open {path}: it is not an HDF5 file")


def _contents(file: h5py.File) -> tuple[list[tuple[str, h5py.Dataset]], list[tuple[str, str]]]:
    """All datasets by name, and all attributes, those of the file first."""
    datasets, attributes = [], [(name, _value(value)) for name, value in file.attrs.items()]

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            datasets.append((name, item))
        attributes.extend((f"{name} {key}", _value(value)) for key, value in item.attrs.items())

    file.visititems(visit)
    return datasets, attributes


def _kind(file: h5py.File) -> str:
    coords, images, regions = (_own(file, name) for name in ("coords", "images", "regions"))
    if isinstance(images, h5py.Dataset):
        return f"shard of {counted(len(images), 'tile')}"
    if isinstance(regions, h5py.Group):
        return f"shard with parts of {counted(len(regions), 'region')}"
    if isinstance(coords, h5py.Dataset) and coords.ndim:
        return f"coordinates of {counted(len(coords), 'tile')}{_tools(coords)}"
    return f"HDF5 file of {counted(len(file), 'item')}, of unknown kind"


def _own(file: h5py.File, name: str) -> Any:
    """An item in the file itself; None if it is a link or has its values in other files."""
    if not isinstance(file.get(name, getlink=True), h5py.HardLink):
        return None
    item = file[name]
    return None if isinstance(item, h5py.Dataset) and is_elsewhere(item) else item


def _tools(coords: h5py.Dataset) -> str:
    names = {"patch_level": "CLAM", "patch_size_level0": "TRIDENT"}
    tools = [tool for attribute, tool in names.items() if attribute in coords.attrs]
    return f", in the format of {' and '.join(tools)}" if tools else ""


def _size(path: Path) -> str:
    return readable_bytes(path.stat().st_size)


def _row(name: str, data: h5py.Dataset) -> tuple[str, ...]:
    text = h5py.check_string_dtype(data.dtype) is not None
    properties = data.id.get_create_plist()
    filters = [properties.get_filter(k) for k in range(properties.get_nfilters())]
    shape = "in other files" if is_elsewhere(data) else " x ".join(map(str, data.shape or ()))
    return (
        fitted(name, _LONGEST),
        shape,
        "text" if text else str(data.dtype),
        " x ".join(map(str, data.chunks or ())),
        # third-party filters may have only a number
        ", ".join(f[3].decode() or str(f[0]) for f in filters) or "raw",
    )


def _value(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    elif isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    return fitted(str(value), _LONGEST)
