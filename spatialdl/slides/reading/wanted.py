"""Which resolution is wanted of a slide."""

from __future__ import annotations

from typing import NamedTuple

from spatialdl.errors import SlideError
from spatialdl.slides.reading.reader import Slide

_FINEST = 0.9  # of the slide's own resolution: beyond it pixels would be invented


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
