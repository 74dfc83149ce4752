"""Small pictures of images that no rank holds: each rank brings its part.

A pixel of a thumbnail is the mean of the pixels below it, of a mask the one in their middle; both
are the same in every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spatialdl.comm.communicator import Communicator
from spatialdl.data.format import UNLABELLED
from spatialdl.data.views import Views
from spatialdl.parallel.layout import even_bounds
from spatialdl.parallel.placement import Placement
from spatialdl.slides.stretching import stretched

Array = npt.NDArray[Any]

SIDE = 320
"""Pixels of the longer side at most."""

COLOURS = np.array(
    [
        *((230, 60, 40), (40, 110, 220), (250, 190, 0), (20, 160, 90), (160, 60, 190)),
        *((0, 180, 200), (240, 110, 170), (120, 80, 40), (150, 200, 40), (90, 90, 160)),
    ],
    np.float64,
)
"""Of the classes from 1 on; class 0 is left as it is."""

_OPACITY = 0.45
_DARK = 64  # what is less bright cannot be made out


class Patch(NamedTuple):
    """Part of a thumbnail, and where its first pixel lies."""

    row: int
    col: int
    values: Array


def thumbnail_size(size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of the thumbnail of an image; never more than the image has."""
    zoom = min(1.0, SIDE / max(size))
    return max(1, int(size[0] * zoom)), max(1, int(size[1] * zoom))


def sums(pixels: Array, box: tuple[int, int, int, int], size: tuple[int, int]) -> Patch:
    """What a box adds to the pixels of the thumbnail that it touches.

    Args:
        pixels: (rows, columns, channels) of the box.
        box: (row0, row1, col0, col1) of an image.
        size: (H, W) of the image.
    """
    small = thumbnail_size(size)
    row, rows = _starts(box[0], box[1], size[0], small[0])
    col, cols = _starts(box[2], box[3], size[1], small[1])
    dtype = np.float64 if pixels.dtype.kind == "f" else np.int64
    added = np.add.reduceat(np.add.reduceat(pixels, rows, 0, dtype), cols, 1, dtype)
    return Patch(row, col, added)


def middles(mask: Array, box: tuple[int, int, int, int], size: tuple[int, int]) -> Patch:
    """Those pixels of a box (..., rows, columns) that the thumbnail of a mask takes."""
    small = thumbnail_size(size)
    row, rows = _middles(box[0], box[1], size[0], small[0])
    col, cols = _middles(box[2], box[3], size[1], small[1])
    return Patch(row, col, mask[..., rows[:, None], cols[None, :]])


def _starts(begin: int, end: int, size: int, small: int) -> tuple[int, Array]:
    """The first pixel of a thumbnail that [begin, end) touches, and where each one begins."""
    bounds = np.asarray(even_bounds(size, small))
    first = int(np.searchsorted(bounds, begin, side="right")) - 1
    last = int(np.searchsorted(bounds, end, side="left"))
    return first, np.maximum(bounds[first:last], begin) - begin


def _middles(begin: int, end: int, size: int, small: int) -> tuple[int, Array]:
    bounds = np.asarray(even_bounds(size, small))
    middle = (bounds[:-1] + bounds[1:]) // 2
    first = int(np.searchsorted(middle, begin))
    return first, middle[first : int(np.searchsorted(middle, end))] - begin


def joined(patches: Sequence[Patch], shape: tuple[int, ...]) -> Array:
    """All patches of a thumbnail, added up."""
    whole = np.zeros(shape, np.result_type(*(one.values.dtype for one in patches), np.int64))
    for row, col, values in patches:
        rows, cols = values.shape[:2]
        whole[row : row + rows, col : col + cols] += values
    return whole


def gather_thumbnails(
    world: Communicator, placement: Placement, views: Views, samples: Sequence[int]
) -> list[npt.NDArray[np.uint8]] | None:
    """RGB thumbnails (rows, columns, 3) of samples on rank 0; all ranks must call it.

    The ranks of the first stage read their boxes, nobody else reads anything.
    """
    patches, box = [], _own_box(world.rank, placement, views.size)
    if box is not None and box[1] > box[0] and box[3] > box[2]:
        patches = [sums(views.read(0, sample, box), box, views.size) for sample in samples]
    everybody = world.gather(patches)
    if everybody is None:
        return None
    return [
        as_rgb(means([one[number] for one in everybody if one], views.size))
        for number in range(len(samples))
    ]


def means(patches: Sequence[Patch], size: tuple[int, int]) -> Array:
    """The thumbnail (rows, columns, channels) of an image (H, W), of its boxes' `sums`."""
    small = thumbnail_size(size)
    rows, cols = (np.diff(even_bounds(n, few)) for n, few in zip(size, small, strict=True))
    whole = joined(patches, (*small, patches[0].values.shape[2]))
    return np.asarray(whole / (rows[:, None] * cols[None, :])[..., None])


def _own_box(
    rank: int, placement: Placement, size: tuple[int, int]
) -> tuple[int, int, int, int] | None:
    """Of the first copy of the first replica's first stage."""
    ranks = placement.ranks(0, 0)
    if rank not in ranks:
        return None
    rows, cols = placement.grids[0]
    row, col = divmod(ranks.index(rank), cols)
    down, right = even_bounds(size[0], rows), even_bounds(size[1], cols)
    return down[row], down[row + 1], right[col], right[col + 1]


def as_rgb(pixels: Array) -> npt.NDArray[np.uint8]:
    """Channels as colours: one is grey, of more the first three.

    What is not of 8 bits is stretched, and so are dark images, as of fluorescence.

    Args:
        pixels: (rows, columns, channels), means.
    """
    channels = pixels[..., :3] if pixels.shape[-1] >= 3 else pixels[..., :1].repeat(3, -1)
    if not (1.0 < channels.max() <= 255.0 and channels.min() >= 0.0):
        low, high = np.nanpercentile(channels, (1, 99))
        channels = 255.0 * (channels - low) / (high - low if high > low else 1.0)
    found = np.asarray(np.nan_to_num(channels).round().clip(0, 255), np.uint8)
    return stretched(found) if np.percentile(found.max(-1), 99) < _DARK else found


def overlaid(image: npt.NDArray[np.uint8], classes: Array) -> npt.NDArray[np.uint8]:
    """An image with its classes in colours."""
    tint = COLOURS[(classes - 1) % len(COLOURS)]
    shown = ((classes > 0) & (classes != UNLABELLED))[..., None]
    mixed = (1 - _OPACITY) * image + _OPACITY * tint
    return np.where(shown, mixed, image).round().astype(np.uint8)
