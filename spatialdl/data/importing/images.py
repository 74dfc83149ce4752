"""Images of other programs, found in a folder.

The layout is that of torchvision's `ImageFolder`: `CLASS/image.png`, or `SPLIT/CLASS/image.png` if
all folders are named after splits. Where a table has the labels, images lie at any depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import numpy.typing as npt
import tifffile
from PIL import Image, ImageOps

from spatialdl.data.image_source import as_image
from spatialdl.data.tables import SPLITS

_STUBS = {"BUFR", "GRIB", "HDF5", "WMF"}  # Pillow recognises but cannot decode these
_TIFF = {".tif", ".tiff"}
_SAMPLES = {tifffile.PHOTOMETRIC.MINISBLACK, tifffile.PHOTOMETRIC.RGB}  # need no conversion
_MODES = {"1": "L", "P": "RGB", "PA": "RGBA", "La": "LA", "RGBa": "RGBA", "RGBX": "RGB"}
_MODES |= dict.fromkeys(("CMYK", "YCbCr", "LAB", "HSV"), "RGB")
_PNG_DEPTH = 24  # offset of a PNG's bit depth


class BrokenImageError(ValueError):
    """An image that cannot be read; with its path and the reason."""


@dataclass(frozen=True)
class FoundImage:
    """An image in the folder.

    Attributes:
        path: the file.
        name: path relative to the folder.
        label: class name, None without class folders.
        split: None without splits.
    """

    path: Path
    name: str
    label: str | None
    split: str | None


def find_images(folder: Path, *, class_folders: bool = True) -> list[FoundImage]:
    """Find all images of a folder, sorted by split, class and name; other files are ignored.

    Args:
        folder: the folder.
        class_folders: folders are classes; else images lie at any depth, without labels.

    Raises:
        ValueError: the folder does not exist, has no images, or an image lies beside folders.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder; give one with a folder of images per class, or of images "
            "with --labels CSV"
        )
    inside = _folders(folder)
    splits = bool(inside) and all(path.name.lower() in SPLITS for path in inside)
    found = []
    for top in inside if splits else [folder]:
        split = SPLITS[top.name.lower()] if splits else None
        for group in (_folders(top) if class_folders else []) or [top]:
            label = None if group == top else group.name
            paths = sorted(path for path in group.rglob("*") if _is_image(path))
            found += [
                FoundImage(path, path.relative_to(folder).as_posix(), label, split)
                for path in paths
            ]
        if class_folders:
            _check_loose(top)
    if splits:
        _check_loose(folder)
    if not found:
        raise ValueError(f"{folder} contains no images in a format that Pillow reads")
    return found


def class_names(images: Sequence[FoundImage]) -> list[str]:
    """Class names, in torchvision's order: alphabetical."""
    return sorted({image.label for image in images if image.label is not None})


def image_size(path: Path) -> tuple[int, int]:
    """(Rows, columns) in the header of an image.

    Raises:
        BrokenImageError: the header cannot be read.
    """
    try:
        if path.suffix.lower() in _TIFF:
            with tifffile.TiffFile(path) as tiff:
                page = tiff.pages.first
                return int(page.imagelength), int(page.imagewidth)
        with Image.open(path) as image:
            cols, rows = image.size
            on_its_side = image.getexif().get(274, 1) >= 5  # EXIF orientation tag
            return (cols, rows) if on_its_side else (rows, cols)
    except Exception as error:  # decoders raise arbitrary errors for damaged files
        raise _broken(path, error) from error


def load_image(path: Path, *, rgb: bool = False) -> npt.NDArray[Any]:
    """Load an image as (rows, cols, channels) of uint8, uint16 or floats, with EXIF orientation.

    Grey is one channel, transparency an additional one, palettes become RGB; 16-bit samples and
    floats in TIFF are kept.

    Args:
        path: the file.
        rgb: convert any image to three channels of uint8.

    Raises:
        BrokenImageError: it is damaged, has several pages, or an unsupported sample type.
    """
    try:
        return _as_rgb(path) if rgb else as_image(_samples(path))
    except Exception as error:
        raise _broken(path, error) from error


def _broken(path: Path, error: Exception) -> BrokenImageError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return BrokenImageError(f"{path}: {reason}")


def _samples(path: Path) -> npt.NDArray[Any]:
    suffix = path.suffix.lower()
    if suffix in _TIFF:
        with tifffile.TiffFile(path) as tiff:
            series = tiff.series[0]
            if len(tiff.series) > 1 or not set(series.axes) <= set("YXSC"):
                raise ValueError(f"it has several pages ({series.axes} {series.shape}); give one")
            if tiff.pages.first.photometric in _SAMPLES and series.dtype != bool:
                array = series.asarray()
                return np.moveaxis(array, 0, -1) if series.axes[0] in "SC" else array
    if suffix == ".png":
        with path.open("rb") as file:
            head = file.read(_PNG_DEPTH + 1)
        if head[_PNG_DEPTH:] == b"\x10":  # Pillow would reduce 16 bits to 8
            return np.asarray(imagecodecs.png_decode(path.read_bytes()))
    with Image.open(path) as image:
        turned = ImageOps.exif_transpose(image)
        mode = _MODES.get(turned.mode, turned.mode)
        if turned.mode == "P" and "transparency" in turned.info:
            mode = "RGBA"
        array = np.asarray(turned.convert(mode) if mode != turned.mode else turned)
        return array.astype(np.uint16) if mode.startswith("I;16") else array


def _as_rgb(path: Path) -> npt.NDArray[np.uint8]:
    array = as_image(_samples(path))
    if array.dtype == np.uint16:
        array = (array >> 8).astype(np.uint8)
    if array.dtype != np.uint8 or array.shape[2] > 4:
        raise ValueError(f"it has {array.shape[2]} channels of {array.dtype}, expected colours")
    if array.shape[2] < 3:
        return np.repeat(array[..., :1], 3, axis=2)
    return array[..., :3]


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")


def _check_loose(folder: Path) -> None:
    loose = [path for path in sorted(folder.iterdir()) if _is_image(path)]
    if loose and _folders(folder):
        raise ValueError(
            f"{loose[0]} lies beside folders; move it into one of them, remove it, or "
            "give the labels of all images by --labels CSV"
        )


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in _suffixes() and path.name[0] != "." and path.is_file()


@cache
def _suffixes() -> frozenset[str]:
    known = Image.registered_extensions()  # loads all plugins
    return frozenset(
        suffix for suffix, kind in known.items() if kind in Image.OPEN and kind not in _STUBS
    )
