"""Which resolution a slide has, and which is wanted of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from spatialdl.errors import SlideError

if TYPE_CHECKING:
    from spatialdl.slides.reading.reader import Slide

PLAUSIBLE_MPP = (0.05, 20.0)
MPP_AT_1X = 10.0
"""Micrometres per pixel at an objective power of 1, by convention: 20x is 0.5, 40x is 0.25."""
SAME = 0.01
"""Sizes or resolutions that differ by less than this part are the same."""
_SQUARE_ENOUGH = 0.05
_FINEST = 0.9  # of the slide's own resolution: beyond it pixels would be invented


class FileMpp(NamedTuple):
    """Micrometres per level-0 pixel, and what is odd about them, a sentence or nothing."""

    mpp: float
    remark: str


class Wanted(NamedTuple):
    """The resolution that tiles are to have; exactly one of the three is given.

    `mpp` is micrometres per pixel, `mag` the power of an objective, `level` one of the slide's.
    """

    mpp: float | None = None
    mag: float | None = None
    level: int | None = None

    def scale(self, slide: Slide) -> float:
        """Level-0 pixels per pixel, those of a level where that is within 1 %.

        Raises:
            SlideError: the slide does not say what is needed, is coarser, or has no such level.
        """
        if self.level is not None:
            return _of_level(slide, self.level)
        if self.mpp is not None:
            own = slide.mpp
            if self.mpp < _FINEST * own:
                raise SlideError(
                    f"slide {slide.path} has {own:g} micrometres per pixel and cannot give "
                    f"{self.mpp:g}; ask for an mpp of {own:g} or more"
                )
            return slide.scale(self.mpp)
        mag, power = self.mag or 0.0, slide.objective_power
        if mag > power / _FINEST:
            raise SlideError(
                f"slide {slide.path} was taken at {power:g}x and cannot give {mag:g}x; "
                f"ask for {power:g} or less"
            )
        return slide.nearest(power / mag)


def _of_level(slide: Slide, level: int) -> float:
    if level >= len(slide.downsamples):
        raise SlideError(
            f"slide {slide.path} has levels 0 to {len(slide.downsamples) - 1}, and no level "
            f"{level}; ask for one of them, or for an mpp"
        )
    return slide.downsamples[level]


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
