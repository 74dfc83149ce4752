"""Tissue regions of slides, with sizes that an encoder supports."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from spatialdl.errors import SlideError
from spatialdl.features.maps.stride import Stride
from spatialdl.features.sources import SlideSource
from spatialdl.predicting.inputs import SlideImages
from spatialdl.slides.batch.report import TilingReport
from spatialdl.slides.batch.steps import Task, initial_report
from spatialdl.slides.cutting.tiling import plan_tiles
from spatialdl.slides.cutting.whole import plan_whole
from spatialdl.slides.reading.wanted import Wanted


@dataclass(frozen=True)
class SlideRegion:
    """The region of a slide.

    Attributes:
        name: name of the slide.
        images: source whose only image is the region.
        extent: level-0 rows and columns of the slide.
        mpp: micrometres per level-0 pixel, if known.
    """

    name: str
    images: SlideImages
    extent: tuple[int, int]
    mpp: float | None

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the region."""
        return self.images.size

    def attributes(self, stride: Stride, cells: tuple[int, int]) -> dict[str, Any]:
        """Attributes of the geometry of a map's cells.

        Args:
            cells: rows and columns of the map. Without padding in the encoder there are fewer cells
                than strides in the region, and they are centred.
        """
        [(x, y)], scale = self.images.places, self.images.scale
        top, left = (
            (side - count * step) / 2 * scale
            for side, count, step in zip(self.size, cells, stride.pixels, strict=True)
        )
        attributes: dict[str, Any] = {
            "name": self.name,
            "stride": stride.pixels,
            "region": self.size,
            "scale": scale,
            "level0_x": x,
            "level0_y": y,
            "level0_height": self.extent[0],
            "level0_width": self.extent[1],
            "affine": (
                (stride.pixels[1] * scale, 0.0, x + left),
                (0.0, stride.pixels[0] * scale, y + top),
            ),
        }
        return attributes if self.mpp is None else {**attributes, "mpp": self.mpp * scale}


class RegionSource(SlideSource):
    """Slides, each as the bounding box of its tissue, as by `spatialdl-tile --whole`."""

    def region(self, task: Task, stride: Stride) -> tuple[TilingReport, SlideRegion | None]:
        """The report of a slide, and its region; None without tissue.

        Args:
            stride: the region's sides are rounded up to its multiples.

        Raises:
            SlideError, OSError: the slide is unusable.
        """
        started, options = time.monotonic(), self.options
        with self._opened(task) as slide:
            wanted = Wanted(options.mpp, options.mag, options.level)
            finder = self.choosing.finder(slide)
            plan = plan_tiles(slide, options.tile_size, wanted, 0.0, finder=finder)
            report = initial_report(task, slide, plan, options)
            report.in_grid = 1
            own = self.choosing.own_colours(slide, plan)
            if isinstance(own, str):
                raise SlideError(own)
            whole = plan_whole(slide, plan)
            report.seconds = time.monotonic() - started
            if whole is None:
                report.note = "no tissue found"
                return report, None
            report.with_tissue = 1
            images = SlideImages(
                task.path,
                options.slide_mpp,
                [(whole.x, whole.y)],
                (
                    _multiple(whole.size[0], stride.multiple[0]),
                    _multiple(whole.size[1], stride.multiple[1]),
                ),
                whole.scale,
                plan.background,
            )
            if own is not None:
                images.choosing, images.own = self.choosing, own
            return report, SlideRegion(task.name, images, slide.size, slide.known_mpp)


def _multiple(length: int, of: int) -> int:
    return -(-length // of) * of
