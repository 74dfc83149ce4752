"""The parts of a slide, tiles or bands of its region, each cut into a folder, atomically."""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spatialdl.data.codec import CODECS, QUALITY, Codec, Coding
from spatialdl.data.format import CHUNK, stored_bytes
from spatialdl.data.region_shard import cut_rows, write_band
from spatialdl.data.samples import RegionBand, RegionSample
from spatialdl.data.shard_file import ShardFile
from spatialdl.data.tile_shard import TileShards
from spatialdl.errors import SlideError
from spatialdl.slides.batch.choosing import NATIVE, Choosing
from spatialdl.slides.batch.finding_slides import SlideLabel
from spatialdl.slides.batch.record import PartRecord, save_part
from spatialdl.slides.cutting.stains import Colours
from spatialdl.slides.cutting.tiling import CutTile, TilePlan, WholeImage, WholePlan, cut_tiles
from spatialdl.slides.finding.annotations import RegionMask
from spatialdl.slides.reading.native import JpegGrid
from spatialdl.slides.reading.reader import Slide


@dataclass(frozen=True)
class Cutting:
    """Parameters for cutting a slide.

    Attributes:
        choosing: filters and stains.
        classes: class names; labels are indices into them.
        name, label: of the slide.
        own: its colours.
        codec: one of shards, or "jpeg-native"; None records only the places of tiles.
        quality: of JPEGs encoded here.
    """

    choosing: Choosing
    classes: list[str]
    name: str
    label: SlideLabel | None
    own: Colours | str | None
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
        pieces.cut(slide, cutting, temporary, part)
        part.seconds = time.monotonic() - started
        save_part(temporary, key, part)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return part


@dataclass(frozen=True)
class TilePart:
    """Tiles of a slide, and whether filters need their pixels."""

    plan: TilePlan
    filtered: bool

    @property
    def count(self) -> int:
        """Number of tiles."""
        return len(self.plan.places)

    def cut(self, slide: Slide, cutting: Cutting, folder: Path, part: PartRecord) -> None:
        """Cut the tiles; unreadable tiles are recorded and skipped.

        Raises:
            SlideError: stains cannot be normalised as requested, or the slide has no JPEG tiles
                that can be copied.
        """
        grid = native_grid(slide, self.plan) if cutting.codec == NATIVE else None
        read = self.filtered or cutting.codec in CODECS
        shards = TileShards(folder, 2**63, cutting.coding)
        try:
            for tile in cut_tiles(slide, self.plan, read=read):
                self._store(tile, cutting, grid, shards, part)
            if shards.samples:
                (part.shard,) = shards.finish()
        except BaseException:
            shards.abort()
            raise

    def _store(
        self,
        tile: CutTile,
        cutting: Cutting,
        grid: JpegGrid | None,
        shards: TileShards,
        part: PartRecord,
    ) -> None:
        """Store a tile, or record why it is dropped."""
        place, image, problem = (tile.x, tile.y), tile.image, tile.problem
        refused = None if image is None else cutting.choosing.refused(image)
        label = cutting.class_index(tile.label)
        known = {"label": label, "split": cutting.split, "slide": cutting.name}
        known |= {"x": tile.x, "y": tile.y}
        if tile.bare:
            part.bare += 1
            return
        if refused:
            part.dropped.setdefault(refused, []).append(place)
            return
        if not problem and grid is not None:
            side = self.plan.tile_size
            tiles = grid.at(*place, (side, side))
            try:
                if tiles is None:
                    raise SlideError(f"the tile at x={tile.x}, y={tile.y} is not of JPEG tiles")
                shards.add(tiles, None, known)
            except SlideError as error:
                problem = str(error)
        elif cutting.codec is not None and image is not None:
            shards.add(cutting.choosing.finished(image, cutting.own), None, known)
        if problem:
            part.unreadable.append(place)
            part.problem = problem
        else:
            part.taken.append((*place, label))


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


def native_grid(slide: Slide, plan: TilePlan) -> JpegGrid:
    """Return the JPEG tiles of a slide that make up the tiles of a plan.

    Raises:
        SlideError: there are none, or their grid does not divide the tiles.
    """
    grid = native_tiles(slide, plan.scale)
    stride = round(plan.stride / plan.scale)
    if any(length % side for side in grid.chunk for length in (plan.tile_size, stride)):
        rows, cols = grid.chunk
        raise SlideError(
            f"slide {slide.path} has JPEG tiles of {rows} x {cols}; to copy them, "
            f"--tile-size {plan.tile_size} and --overlap {plan.tile_size - stride} must be "
            "multiples of that; or use --codec jpeg"
        )
    return grid


def native_region(slide: Slide, plan: WholePlan) -> JpegGrid:
    """Return the JPEG tiles of a slide that make up a region.

    Raises:
        SlideError: there are none, or the region is not aligned with them.
    """
    region = native_tiles(slide, plan.scale).at(plan.x, plan.y, plan.size)
    if region is None:
        raise SlideError(
            f"slide {slide.path}: its region at x={plan.x}, y={plan.y} is not aligned with its "
            "JPEG tiles; use --codec jpeg"
        )
    return region


@dataclass(frozen=True)
class BandPart:
    """Band `number` of a region."""

    plan: WholePlan
    sample: RegionSample
    number: int

    @property
    def count(self) -> int:
        """Number of rows of chunks."""
        return -(-self.sample.bands[self.number].rows // CHUNK)

    def cut(self, slide: Slide, cutting: Cutting, folder: Path, part: PartRecord) -> None:
        """Read the rows of the band and write them.

        Raises:
            SlideError: they cannot be read, or their stains cannot be normalised.
        """
        plan, mask = self.plan, None
        native = cutting.codec == NATIVE
        if cutting.choosing.masked:
            regions = cutting.choosing.regions(slide) or []
            mask = RegionMask(regions, cutting.classes, (plan.x, plan.y), plan.size, plan.scale)
        image = native_region(slide, plan) if native else _FinishedImage(slide, plan, cutting)
        file = ShardFile(folder, 0)
        try:
            write_band(file, self.sample, self.number, image, mask, cutting.coding)
        except BaseException:
            file.abort()
            raise
        file.samples = 1
        part.shard = file.finish()
        if self.number == 0:
            part.taken.append((plan.x, plan.y, self.sample.label))


PartPieces = TilePart | BandPart
"""The pieces of a part: tiles, or a band of rows of a region."""


class _FinishedImage(WholeImage):
    """A region with its final colours."""

    def __init__(self, slide: Slide, plan: WholePlan, cutting: Cutting) -> None:
        super().__init__(slide, plan)
        self._cutting = cutting

    def __getitem__(self, rows: slice) -> npt.NDArray[np.uint8]:
        return self._cutting.choosing.finished(super().__getitem__(rows), self._cutting.own)


def bands_of(
    plan: WholePlan, stripes: int | None, shard_size: int, multiple: int
) -> list[RegionBand]:
    """Split a region into bands of rows, one per shard.

    Args:
        plan: the region.
        stripes: largest number of bands; None uses as many as keep shards below `shard_size`.
        shard_size: in bytes.
        multiple: the rows of a band are a multiple of it.
    """
    count = stripes or -(-stored_bytes(plan.size, 3) // shard_size)
    cuts = cut_rows(plan.size[0], count, multiple)
    return [RegionBand(k, row, end - row) for k, (row, end) in enumerate(cuts)]
