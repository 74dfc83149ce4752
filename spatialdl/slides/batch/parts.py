"""Cutting a part of a slide into a folder of its own, which is there whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from spatialdl.data.codec import CODECS, QUALITY, Codec, Coding
from spatialdl.errors import SlideError
from spatialdl.slides.batch.choosing import Choosing
from spatialdl.slides.batch.labels import SlideLabel
from spatialdl.slides.batch.preview import Preview, Small
from spatialdl.slides.batch.record import PartRecord, save_part
from spatialdl.slides.cutting.stains import Colours
from spatialdl.slides.reading.jpeg_grid import JpegGrid
from spatialdl.slides.reading.reader import Slide

NATIVE = "jpeg-native"
"""The codec of a batch that takes the JPEG tiles of slides as they are."""

_SMALL = "small.npz"


@dataclass(frozen=True)
class Cutting:
    """How a slide is cut.

    Attributes:
        choosing: filters, stains.
        classes: that labels are indices into.
        name, label: of the slide.
        own: its colours.
        preview: for which pieces are made small (its picture is not touched); None where they are
            written as they are in the slide.
        codec: one of shards, or "jpeg-native"; None where only the places of tiles are noted.
        quality: of JPEGs made here.
    """

    choosing: Choosing
    classes: list[str]
    name: str
    label: SlideLabel | None
    own: Colours | str | None
    preview: Preview | None
    codec: str | None = "raw"
    quality: int = QUALITY

    def class_index(self, found: str | None) -> int | None:
        """Index of a class: that of the slide if it has one, else the one found there."""
        label = (self.label.label if self.label else "") or found
        return None if label is None else self.classes.index(label)

    @property
    def coding(self) -> Coding:
        """Of the chunks that are written."""
        return Coding(stored_codec(self.codec), self.quality)

    @property
    def split(self) -> str | None:
        """That the slide belongs to."""
        return self.label.split if self.label else None


def stored_codec(asked: str | None) -> Codec:
    """How chunks lie in the shards that a batch of this codec writes."""
    if asked == NATIVE:
        return "jpeg"
    return next((codec for codec in CODECS if codec == asked), "raw")


def native_tiles(slide: Slide, scale: float) -> JpegGrid:
    """The JPEG tiles of a slide at a scale.

    Raises:
        SlideError: there are none that could be taken as they are.
    """
    grid = slide.jpeg_grid(scale)
    if grid is None or grid.shape[2] != 3:
        kind = "no JPEG tiles" if grid is None else "grey JPEG tiles"
        raise SlideError(
            f"slide {slide.path} has {kind} at {scale:g} level-0 pixels per pixel, so that they "
            "cannot be taken as they are; ask for another of its levels, or for --codec jpeg"
        )
    return grid


class Seen(NamedTuple):
    """A piece of a slide made small, and the level-0 x, y of its corner."""

    x: float
    y: float
    small: Small


class PartPieces(Protocol):
    """What a part is made of: tiles, or a band of rows of a region."""

    @property
    def count(self) -> int:
        """Pieces that are told of, one after the other, while they are cut."""

    def cut(self, slide: Slide, cutting: Cutting, folder: Path, part: PartRecord) -> list[Seen]:
        """Cut them into a shard in a folder, and note in `part` what became of them.

        Returns:
            Those that were kept, made small, if a preview wants them.
        """


def cut_part(
    slide: Slide, pieces: PartPieces, cutting: Cutting, folder: Path, key: str
) -> PartRecord:
    """Cut pieces into a folder.

    Args:
        slide: open.
        pieces: of it.
        cutting: how.
        folder: to be made.
        key: noted with the part.

    Raises:
        SlideError: stains are to be normalised and cannot be, or a region cannot be read.
        OSError: it cannot be written.
    """
    started = time.monotonic()
    # a name of its own: what a killed run has left may still be at work on the same part
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    part = PartRecord()
    try:
        _save_seen(temporary / _SMALL, pieces.cut(slide, cutting, temporary, part))
        part.seconds = time.monotonic() - started
        save_part(temporary, key, part)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return part


def _save_seen(path: Path, seen: list[Seen]) -> None:
    spans = [(each.x, each.y, each.small.rows, each.small.cols) for each in seen]
    shapes = [each.small.pixels.shape[:2] for each in seen]
    pixels = [each.small.pixels.ravel() for each in seen]
    np.savez(
        path,
        spans=np.array(spans).reshape(-1, 4),
        shapes=np.array(shapes, int).reshape(-1, 2),
        pixels=np.concatenate([np.empty(0, np.uint8), *pixels]),
    )


def load_seen(folder: Path) -> list[Seen]:
    """The pieces of a part that were kept, made small, in their order."""
    with np.load(folder / _SMALL) as file:
        spans, shapes, pixels = file["spans"], file["shapes"], file["pixels"]
    found, start = [], 0
    for (x, y, down, across), (rows, cols) in zip(spans, shapes, strict=True):
        end = start + rows * cols * 3
        small = Small(pixels[start:end].reshape(rows, cols, 3), down, across)
        found.append(Seen(x, y, small))
        start = end
    return found
