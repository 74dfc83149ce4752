"""Cutting a part of a slide into a folder of its own, which is there whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spatialdl.data.tile_shard import TileShards
from spatialdl.slides.batch.choosing import Choosing
from spatialdl.slides.batch.crew import tell
from spatialdl.slides.batch.labels import SlideLabel
from spatialdl.slides.batch.preview import Preview, Small
from spatialdl.slides.batch.record import Part, save_part
from spatialdl.slides.cutting.stains import Colours
from spatialdl.slides.cutting.tiling import CutTile, TilePlan, cut_tiles
from spatialdl.slides.reading.reader import Slide

_SMALL = "tiles.npy"
_TOLD = 16  # tiles that are told at a time


@dataclass(frozen=True)
class Cutting:
    """How the tiles of one slide are cut.

    Attributes:
        choosing: filters, stains.
        classes: that labels are indices into.
        name, label: of the slide.
        own: its colours.
        preview: for which tiles are made small; its picture is not touched.
        side: pixels along a side at which tiles are looked at where only their places are noted;
            None where the tiles themselves are written.
    """

    choosing: Choosing
    classes: list[str]
    name: str
    label: SlideLabel | None
    own: Colours | str | None
    preview: Preview
    side: int | None

    def class_of(self, tile: CutTile) -> int | None:
        """Index of its class."""
        label = self.label.label if self.label else tile.label
        return None if label is None else self.classes.index(label)


def cut_part(slide: Slide, plan: TilePlan, cutting: Cutting, folder: Path, key: str) -> Part:
    """Cut the tiles of a plan, all of them into one shard.

    Args:
        slide: open.
        plan: a part of that of the slide.
        cutting: how.
        folder: to be made.
        key: noted with the part.

    Raises:
        SlideError: stains are to be normalised and cannot be.
        OSError: it cannot be written.
    """
    started = time.monotonic()
    # a name of its own: what a killed run has left may still be at work on the same part
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    part = Part()
    shards = TileShards(temporary, 2**63)
    try:
        small = _tiles(slide, plan, cutting, part, shards)
        if cutting.side is None and part.taken:
            (info,) = shards.finish()
            part.shard = info
    except BaseException:
        shards.abort()
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if small:
        np.save(temporary / _SMALL, np.stack([tile.pixels for tile in small]))
    part.seconds = time.monotonic() - started
    save_part(temporary, key, part)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    return part


def small_tiles(folder: Path, step: float) -> list[Small]:
    """The tiles of a part as they were made small, in the order in which they were taken."""
    return [Small(pixels, step, step) for pixels in np.load(folder / _SMALL)]


def _tiles(
    slide: Slide, plan: TilePlan, cutting: Cutting, part: Part, shards: TileShards
) -> list[Small]:
    small: list[Small] = []
    for number, tile in enumerate(cut_tiles(slide, plan, cutting.side), 1):
        if number % _TOLD == 0 or number == len(plan.places):
            tell((number - 1) % _TOLD + 1)
        place = (tile.x, tile.y)
        if tile.problem:
            part.unreadable.append(place)
            part.problem = tile.problem
        elif tile.image is None:
            part.bare += 1
        elif refused := cutting.choosing.refused(tile.image):
            part.dropped.setdefault(refused, []).append(place)
        else:
            image = cutting.choosing.finished(tile.image, cutting.own)
            label = cutting.class_of(tile)
            if cutting.side is None:
                split = cutting.label.split if cutting.label else None
                known = {"label": label, "split": split, "slide": cutting.name}
                shards.add(image, None, {**known, "x": tile.x, "y": tile.y})
            part.taken.append((tile.x, tile.y, label))
            small.append(cutting.preview.shrunk(image, plan.step, plan.step))
    return small
