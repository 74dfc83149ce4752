"""Cutting a part of a slide into its own folder, atomically."""

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
"""The codec of a batch that copies the JPEG tiles of slides without re-encoding."""

_SMALL = "small.npz"


@dataclass(frozen=True)
class Cutting:
    """Parameters for cutting a slide.

    Attributes:
        choosing: filters and stains.
        classes: class names; labels are indices into them.
        name, label: of the slide.
        own: its colours.
        preview: shrinks the pieces (its picture is not modified); None where pieces keep the
            colours of the slide.
        codec: one of shards, or "jpeg-native"; None records only the places of tiles.
        quality: of JPEGs encoded here.
    """

    choosing: Choosing
    classes: list[str]
    name: str
    label: SlideLabel | None
    own: Colours | str | None
    preview: Preview | None
    codec: str | None = "raw"
    quality: int = QUALITY

    def class_index(self, region: str | None) -> int | None:
        """Return the class index of the slide's label if it has one, else of the region's."""
        label = (self.label.label if self.label else "") or region
        return None if label is None else self.classes.index(label)

    @property
    def coding(self) -> Coding:
        """Coding of the chunks written."""
        return Coding(stored_codec(self.codec), self.quality)

    @property
    def split(self) -> str | None:
        """Split of the slide, None without labels."""
        return self.label.split if self.label else None


def stored_codec(batch_codec: str | None) -> Codec:
    """Return the codec of the shards for the codec of a batch."""
    if batch_codec == NATIVE:
        return "jpeg"
    return next((codec for codec in CODECS if codec == batch_codec), "raw")


def native_tiles(slide: Slide, scale: float) -> JpegGrid:
    """Return the JPEG tiles of a slide at a scale.

    Raises:
        SlideError: the slide has no JPEG tiles that can be copied.
    """
    grid = slide.jpeg_grid(scale)
    if grid is None or grid.shape[2] != 3:
        kind = "no JPEG tiles" if grid is None else "grey JPEG tiles"
        raise SlideError(
            f"slide {slide.path} has {kind} at {scale:g} level-0 pixels per pixel, which cannot "
            "be copied; choose another of its levels, or --codec jpeg"
        )
    return grid


class Seen(NamedTuple):
    """A shrunk piece of a slide, and the level-0 x, y of its corner."""

    x: float
    y: float
    small: Small


class PartPieces(Protocol):
    """The pieces of a part: tiles, or a band of rows of a region."""

    @property
    def count(self) -> int:
        """Number of pieces, which `cut` counts one by one in the progress bar."""

    def cut(self, slide: Slide, cutting: Cutting, folder: Path, part: PartRecord) -> list[Seen]:
        """Cut the pieces into a shard in a folder, and fill in their `part`.

        Returns:
            The pieces written, shrunk, if there is a preview.
        """


def cut_part(
    slide: Slide, pieces: PartPieces, cutting: Cutting, folder: Path, key: str
) -> PartRecord:
    """Cut pieces of a slide into a folder.

    Args:
        slide: open.
        pieces: of the slide.
        cutting: parameters.
        folder: to be created.
        key: recorded with the part.

    Raises:
        SlideError: stains cannot be normalised as requested, or a region cannot be read.
        OSError: the folder cannot be written.
    """
    started = time.monotonic()
    # a unique name: a worker of a killed run may still write the same part
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
    """Read the shrunk pieces of a part, in order."""
    with np.load(folder / _SMALL) as file:
        spans, shapes, pixels = file["spans"], file["shapes"], file["pixels"]
    pieces, start = [], 0
    for (x, y, down, across), (rows, cols) in zip(spans, shapes, strict=True):
        end = start + rows * cols * 3
        small = Small(pixels[start:end].reshape(rows, cols, 3), down, across)
        pieces.append(Seen(x, y, small))
        start = end
    return pieces
