"""Which resolution a slide has, by what its file says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from spatialdl.errors import SlideError

PLAUSIBLE_MPP = (0.05, 20.0)
MPP_AT_1X = 10.0
"""Micrometres per pixel at an objective power of 1, by convention: 20x is 0.5, 40x is 0.25."""
SAME = 0.01
"""Sizes or resolutions that differ by less than this part are the same."""
_SQUARE_ENOUGH = 0.05


class FileMpp(NamedTuple):
    """Micrometres per level-0 pixel, and what is odd about them, a sentence or nothing."""

    mpp: float
    remark: str


def is_plausible(mpp: float) -> bool:
    """Whether a slide can have so many micrometres per pixel."""
    return PLAUSIBLE_MPP[0] <= mpp <= PLAUSIBLE_MPP[1]


def mpp_of(properties: Mapping[str, str], path: Path) -> FileMpp:
    """What the properties of a slide say of its resolution.

    Pixels that are not quite square, by up to 5 %, have the mean of both directions.

    Raises:
        SlideError: they say nothing, or nothing that can be right.
    """
    says = [properties.get(f"openslide.mpp-{axis}") for axis in "xy"]
    if None in says:
        raise SlideError(
            f"slide {path} does not say its micrometres per pixel; give them with --slide-mpp, or "
            "a column mpp of the labels"
        )
    try:
        x, y = (float(str(value)) for value in says)
    except ValueError:
        x, y = 0.0, 0.0
    if not (is_plausible(x) and is_plausible(y)):
        raise SlideError(
            f"slide {path} says {_short(says[0])} x {_short(says[1])} micrometres per "
            f"pixel, which is not between {PLAUSIBLE_MPP[0]:g} and {PLAUSIBLE_MPP[1]:g}; "
            "give the right value with --slide-mpp"
        )
    apart = abs(x - y) / max(x, y)
    if apart > _SQUARE_ENOUGH:
        raise SlideError(
            f"slide {path} says {x:g} micrometres per pixel across and {y:g} down, "
            "and pixels that are not square cannot be tiled; if that is wrong, give the "
            "right value with --slide-mpp"
        )
    mean = (x + y) / 2
    remark = ""
    if apart > SAME:
        remark = (
            f"pixels are not square: {x:g} micrometres across, {y:g} down; {mean:g} is used for "
            "both"
        )
    return FileMpp(mean, remark)


def power_of(properties: Mapping[str, str]) -> float | None:
    """The power of the objective that the properties tell, if they do and it can be right."""
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
