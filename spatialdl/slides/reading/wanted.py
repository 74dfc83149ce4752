"""Target resolution of tiles."""

from __future__ import annotations

from typing import NamedTuple

from spatialdl.errors import SlideError
from spatialdl.slides.reading.reader import Slide

_FINEST = 0.9  # smallest mpp relative to the slide's own; less would interpolate pixels


class Wanted(NamedTuple):
    """Target resolution of tiles; exactly one of the three is set.

    `mpp` is micrometres per pixel, `mag` an objective power, `level` a level of the slide.
    """

    mpp: float | None = None
    mag: float | None = None
    level: int | None = None

    def scale(self, slide: Slide) -> float:
        """Return level-0 pixels per pixel, rounded to a level within 1 %.

        Raises:
            SlideError: the slide has no resolution, a coarser one, or no such level.
        """
        if self.level is not None:
            return _of_level(slide, self.level)
        if self.mpp is not None:
            own = slide.mpp
            if self.mpp < _FINEST * own:
                raise SlideError(
                    f"slide {slide.path} has {own:g} micrometres per pixel and cannot give "
                    f"{self.mpp:g}; set an mpp of {own:g} or more"
                )
            return slide.scale(self.mpp)
        mag, power = self.mag or 0.0, slide.objective_power
        if mag > power / _FINEST:
            raise SlideError(
                f"slide {slide.path} was taken at {power:g}x and cannot give {mag:g}x; "
                f"set {power:g} or less"
            )
        return slide.nearest(power / mag)


def _of_level(slide: Slide, level: int) -> float:
    if level >= len(slide.downsamples):
        raise SlideError(
            f"slide {slide.path} has levels 0 to {len(slide.downsamples) - 1}, and no level "
            f"{level}; set one of them, or an mpp"
        )
    return slide.downsamples[level]
