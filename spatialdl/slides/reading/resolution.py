"""Resolution of a slide from its metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from spatialdl.data.importing.volume_files.volume import ome_spacing
from spatialdl.errors import SlideError

PLAUSIBLE_MPP = (0.05, 20.0)
MPP_AT_1X = 10.0
"""Micrometres per pixel at an objective power of 1, by convention: 20x is 0.5, 40x is 0.25."""
SAME = 0.01
"""Relative difference below which sizes or resolutions are equal."""
_SQUARE_ENOUGH = 0.05


class FileMpp(NamedTuple):
    """Micrometres per level-0 pixel, and a remark on irregularities, or "" ."""

    mpp: float
    remark: str


def is_plausible(mpp: float) -> bool:
    """Whether a value is a plausible resolution of a slide, in micrometres per pixel."""
    return PLAUSIBLE_MPP[0] <= mpp <= PLAUSIBLE_MPP[1]


def mpp_of(properties: Mapping[str, str], path: Path) -> FileMpp:
    """Return the resolution in the properties of a slide.

    For pixels that are not quite square, by up to 5 %, it is the mean of both directions.

    Raises:
        SlideError: the properties have no resolution, or an implausible one.
    """
    values = _ome_mpp(properties) or [properties.get(f"openslide.mpp-{axis}") for axis in "xy"]
    if None in values:
        raise SlideError(
            f"slide {path} has no micrometres per pixel in its metadata; set them with "
            "--slide-mpp, or a column mpp of the labels"
        )
    try:
        x, y = (float(str(value)) for value in values)
    except ValueError:
        x, y = 0.0, 0.0
    if not (is_plausible(x) and is_plausible(y)):
        raise SlideError(
            f"slide {path} has {_short(values[0])} x {_short(values[1])} micrometres per "
            f"pixel, which is not between {PLAUSIBLE_MPP[0]:g} and {PLAUSIBLE_MPP[1]:g}; "
            "set the right value with --slide-mpp"
        )
    difference = abs(x - y) / max(x, y)
    if difference > _SQUARE_ENOUGH:
        raise SlideError(
            f"slide {path} has {x:g} micrometres per pixel horizontally and {y:g} vertically, "
            "and only square pixels can be tiled; if that is wrong, set the right value with "
            "--slide-mpp"
        )
    mean = (x + y) / 2
    remark = ""
    if difference > SAME:
        remark = (
            f"pixels are not square: {x:g} micrometres horizontally, {y:g} vertically; using "
            f"{mean:g} for both"
        )
    return FileMpp(mean, remark)


def _ome_mpp(properties: Mapping[str, str]) -> list[str | None]:
    """Values along x and y from the OME-XML of a TIFF, which openslide does not read."""
    text = properties.get("tiff.ImageDescription", "")
    if "<OME" not in text:
        return []
    try:
        spacing = ome_spacing(text, "XY")
    except (ElementTree.ParseError, ValueError):
        return []
    return [repr(length * 1000) for length in spacing or ()]


def power_of(properties: Mapping[str, str]) -> float | None:
    """Return the objective power in the properties; None if it is missing or implausible."""
    try:
        power = float(properties.get("openslide.objective-power", ""))
    except ValueError:
        return None
    low, high = (MPP_AT_1X / mpp for mpp in reversed(PLAUSIBLE_MPP))
    return power if low <= power <= high else None


def _short(number: str | None) -> str:
    try:
        return f"{float(str(number)):.4g}"
    except ValueError:
        return repr(number)
