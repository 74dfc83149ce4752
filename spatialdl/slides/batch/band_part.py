"""A band of rows of a whole region, written to its own shard."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spatialdl.data.format import CHUNK, stored_bytes
from spatialdl.data.region_shard import cut_rows, write_band
from spatialdl.data.samples import RegionBand, RegionSample
from spatialdl.data.shard_file import ShardFile
from spatialdl.errors import SlideError
from spatialdl.slides.batch.executors import count_tiles
from spatialdl.slides.batch.parts import NATIVE, Cutting, Seen, native_tiles
from spatialdl.slides.batch.record import PartRecord
from spatialdl.slides.cutting.whole import WholeImage, WholePlan
from spatialdl.slides.finding.region_mask import RegionMask
from spatialdl.slides.reading.jpeg_grid import JpegGrid
from spatialdl.slides.reading.reader import Slide

Bytes = npt.NDArray[np.uint8]


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

    def cut(self, slide: Slide, cutting: Cutting, folder: Path, part: PartRecord) -> list[Seen]:
        """Read the rows of the band and write them.

        Raises:
            SlideError: they cannot be read, or their stains cannot be normalised.
        """
        file = ShardFile(folder, 0)
        try:
            seen = self._write(slide, cutting, file)
        except BaseException:
            file.abort()
            raise
        file.samples = 1
        part.shard = file.finish()
        if self.number == 0:
            part.taken.append((self.plan.x, self.plan.y, self.sample.label))
        return seen

    def _write(self, slide: Slide, cutting: Cutting, file: ShardFile) -> list[Seen]:
        mask = self._mask(slide, cutting)
        if cutting.codec == NATIVE:
            tiles = native_region(slide, self.plan)
            write_band(file, self.sample, self.number, tiles, mask, cutting.coding)
            count_tiles(self.count)
            return []
        image = _Finished(slide, self.plan, cutting)
        write_band(file, self.sample, self.number, image, mask, cutting.coding)
        return image.seen

    def _mask(self, slide: Slide, cutting: Cutting) -> RegionMask | None:
        if not cutting.choosing.masked:
            return None
        plan, regions = self.plan, cutting.choosing.regions(slide) or []
        return RegionMask(regions, cutting.classes, (plan.x, plan.y), plan.size, plan.scale)


class _Finished:
    """A region with its final colours; keeps shrunk copies of the rows read, for the preview."""

    def __init__(self, slide: Slide, plan: WholePlan, cutting: Cutting) -> None:
        self._image = WholeImage(slide, plan)
        self._plan = plan
        self._cutting = cutting
        self.shape = self._image.shape
        self.seen: list[Seen] = []

    def __getitem__(self, rows: slice) -> Bytes:
        plan, cutting = self._plan, self._cutting
        image = cutting.choosing.finished(self._image[rows], cutting.own)
        down, across = len(image) * plan.scale, plan.span[1]
        y = plan.y + rows.indices(self.shape[0])[0] * plan.scale
        if cutting.preview is not None:
            self.seen.append(Seen(plan.x, y, cutting.preview.shrunk(image, down, across)))
        count_tiles(1)
        return image


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
