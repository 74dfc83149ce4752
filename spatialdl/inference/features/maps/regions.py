"""Tissue regions of slides, with sizes that an encoder supports, and the stride of its map."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from spatialdl.inference.features.encoders.encoder import Encoder
from spatialdl.inference.features.sources import SlideSource
from spatialdl.inference.predicting.inputs import SlideImages, region_images
from spatialdl.slides.batch.report import TilingReport
from spatialdl.slides.batch.steps import Task, initial_report
from spatialdl.spatial.meta import meta_copy, on_meta

_FAR = 30240  # pixels; a multiple of all usual strides, such as 32 and 224
_TIMES = 64
_STEPS = (1, 5, 64)


@dataclass(frozen=True)
class Stride:
    """The stride of a map, in rows and columns.

    Attributes:
        pixels: pixels from one cell to the next.
        multiple: image sizes must be multiples of these pixels, a multiple of the stride.
    """

    pixels: tuple[int, int]
    multiple: tuple[int, int]


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
            plan = self.choosing.plan(slide, None, min_tissue=0.0)
            report = initial_report(task, slide, plan, whole=True)
            images = region_images(slide, plan, self.choosing, options.slide_mpp, stride.multiple)
            report.seconds = time.monotonic() - started
            if images is None:
                report.note = "no tissue found"
                return report, None
            report.with_tissue = 1
            return report, SlideRegion(task.name, images, slide.size, slide.known_mpp)


# --- the stride, found on the meta device


def stride_of(encoder: Encoder) -> Stride:
    """Find the stride of an encoder's maps.

    Raises:
        ValueError: the encoder does not take other image sizes, or its map does not grow with them.
    """
    side = encoder.preprocessing.size
    with torch.no_grad(), on_meta():
        shadow = meta_copy(encoder.network)
        first, far = _map_size(shadow, side), _map_size(shadow, side + _FAR)
        found = [_along(shadow, side, dim, first[dim], far[dim]) for dim in (0, 1)]
    (rows, of_rows), (columns, of_columns) = found
    return Stride((rows, columns), (of_rows, of_columns))


def _along(shadow: nn.Module, side: int, dim: int, first: int, far: int) -> tuple[int, int]:
    """Stride and multiple along one dim."""
    stride = round(_FAR / (far - first)) if far > first else 0
    for times in range(1, _TIMES + 1) if stride else ():
        if _is_regular(shadow, side, dim, first, stride, times):
            return stride, stride * times
    name = ("rows", "columns")[dim]
    raise ValueError(
        f"the encoder returns {first} {name} for an image of {side} x {side}, {far} for one of "
        f"{side + _FAR} x {side + _FAR}: its map has no regular stride, and cannot be located in a "
        "slide; use an encoder without pooling to a fixed size"
    )


def _is_regular(
    shadow: nn.Module, side: int, dim: int, first: int, stride: int, times: int
) -> bool:
    """Whether multiples of `times` strides more pixels add `times` cells each."""
    try:
        return all(
            _map_size(shadow, side + steps * times * stride)[dim] == first + steps * times
            for steps in _STEPS
        )
    except ValueError:  # the encoder does not take that size
        return False


def _map_size(shadow: nn.Module, side: int) -> tuple[int, int]:
    try:
        rows, columns = shadow(torch.empty(1, 3, side, side)).shape[2:]
    except NotImplementedError as error:
        raise ValueError(
            f"the encoder has an operation without a meta kernel ({error}): its stride is unknown"
        ) from error
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"the encoder does not take images of {side} x {side} ({reason}), but --whole needs "
            "any size: use another encoder; in timm, vision transformers support it with "
            "--encoder-args dynamic_img_size=true, and Swin with strict_img_size=false"
        ) from error
    return int(rows), int(columns)
