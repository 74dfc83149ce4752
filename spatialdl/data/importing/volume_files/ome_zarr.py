"""OME-Zarr stores of versions 0.4 and 0.5: full-resolution image, read chunk by chunk."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spatialdl.common.files import check_files
from spatialdl.common.packages import needed
from spatialdl.data.importing.volume_files.volume import (
    Read,
    Reader,
    StoredVolume,
    millimetres,
    numbers_of,
)


def open_ome_zarr(path: Path) -> StoredVolume:
    """Open the multiscale image of a store, with axes x, y, z and optionally channels.

    Raises:
        ValueError: zarr is missing, or it is not a volume; other errors if it is damaged.
    """
    group, inside = _group(path), ""
    check_files(path)
    attributes = _attributes(group)
    if "bioformats2raw.layout" in attributes and "0" in group and "1" not in group:
        attributes, inside = _attributes(group["0"]), "0/"
    images = attributes.get("multiscales")
    if not isinstance(images, list) or len(images) != 1:
        names = ", ".join(attributes) or "none"
        raise ValueError(
            f"it has no multiscale image, or several (attributes: {names}); expected one"
        )
    axes = images[0].get("axes")
    if not isinstance(axes, list) or not all(isinstance(one, dict) for one in axes):
        raise ValueError(f"it has axes {axes}, expected those of OME-Zarr 0.4 or 0.5")
    sets = {f"{inside}{one['path']}": one for one in images[0]["datasets"]}
    name = max(sets, key=lambda one: int(np.prod(group[one].shape)))
    array = group[name]
    order = _order(axes, array.shape)
    size = tuple(int(array.shape[axis]) for axis in order[:3])
    channels = int(np.prod([array.shape[axis] for axis in order[3:]]))
    transforms = [*_transforms(sets[name]), *_transforms(images[0])]
    spacing = _spacing(axes, transforms, order[:3])
    reader = Reader(partial(_start, path, name, order))
    return StoredVolume(size, channels, numbers_of(array.dtype), spacing, None, reader)


def _group(path: Path) -> Any:
    return needed("zarr", "volumes").open_group(str(path), mode="r")


def _attributes(group: Any) -> dict[str, Any]:
    """OME-Zarr attributes of a group; version 0.5 has a namespace for them."""
    found = dict(group.attrs)
    return dict(found.get("ome", found))


def _order(axes: list[dict[str, Any]], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Dims of slices, rows and columns, and perhaps channels."""
    names = [str(one["name"]).lower() for one in axes]
    others = [
        k
        for k, n in enumerate(shape)
        if k < len(names) and names[k] not in "zyx" and (n > 1 or _is_channel(axes[k], names[k]))
    ]
    wrong = [names[k] for k in others if not _is_channel(axes[k], names[k])]
    if len(names) != len(shape) or not set("zyx") <= set(names) or wrong or len(others) > 1:
        shown = " x ".join(map(str, shape))
        raise ValueError(
            f"it has axes {', '.join(names)} of {shown}, expected z, y and x, and perhaps channels"
        )
    return (*(names.index(axis) for axis in "zyx"), *others)


def _is_channel(axis: dict[str, Any], name: str) -> bool:
    return bool(axis.get("type", "channel" if name == "c" else "") == "channel")


def _transforms(described: dict[str, Any]) -> list[dict[str, Any]]:
    return [*described.get("coordinateTransformations", ())]


def _spacing(
    axes: list[dict[str, Any]], transforms: list[dict[str, Any]], order: tuple[int, ...]
) -> tuple[float, ...] | None:
    """The product of all scales, in millimetres; None if a unit or a scale is unknown."""
    scale = np.ones(len(axes))
    scales = [one for one in transforms if one.get("type") == "scale"]
    if not scales or any("scale" not in one for one in scales):  # it may be in a file
        return None
    for one in scales:
        scale = scale * np.asarray(one["scale"], np.float64)
    units = [millimetres(str(axes[k].get("unit"))) for k in order]
    found = [float(scale[k]) * (unit or 0.0) for k, unit in zip(order, units, strict=True)]
    return tuple(found) if min(found) > 0 and np.isfinite(found).all() else None


def _start(path: Path, name: str, order: tuple[int, ...]) -> Read:
    array = _group(path)[name]

    def read(box: tuple[slice, ...]) -> npt.NDArray[Any]:
        at: list[Any] = [0] * len(array.shape)
        for k in order[3:]:
            at[k] = slice(None)
        for k, span in zip(order, box, strict=False):
            at[k] = span
        left = sorted(order)  # dims that remain after indexing
        return np.asarray(array[tuple(at)]).transpose([left.index(k) for k in order])

    return read
