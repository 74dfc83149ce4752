"""Some tiles of a slide, cut into their own shard."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spatialdl.data.codec import CODECS
from spatialdl.data.tile_shard import TileShards
from spatialdl.errors import SlideError
from spatialdl.slides.batch.executors import count_tiles
from spatialdl.slides.batch.parts import NATIVE, Cutting, Seen, native_tiles
from spatialdl.slides.batch.record import PartRecord
from spatialdl.slides.cutting.tiling import CutTile, TilePlan, cut_tiles
from spatialdl.slides.reading.jpeg_grid import JpegGrid
from spatialdl.slides.reading.reader import Slide

_COUNTED = 16  # tiles between updates of the count


@dataclass(frozen=True)
class TilePart:
    """Tiles of a slide, and whether filters need their pixels."""

    plan: TilePlan
    filtered: bool

    @property
    def count(self) -> int:
        """Number of tiles."""
        return len(self.plan.places)

    def cut(self, slide: Slide, cutting: Cutting, folder: Path, part: PartRecord) -> list[Seen]:
        """Cut the tiles; unreadable tiles are recorded and skipped.

        Raises:
            SlideError: stains cannot be normalised as requested, or the slide has no JPEG tiles
                that can be copied.
        """
        return _Tiles(slide, self, cutting, folder, part).cut()


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


class _Tiles:
    """The work of `TilePart.cut`."""

    def __init__(
        self, slide: Slide, tiles: TilePart, cutting: Cutting, folder: Path, part: PartRecord
    ) -> None:
        self._slide = slide
        self._plan = tiles.plan
        self._cutting = cutting
        self._part = part
        self._seen: list[Seen] = []
        self._grid = native_grid(slide, tiles.plan) if cutting.codec == NATIVE else None
        self._read = tiles.filtered or cutting.codec in CODECS
        self._shards = TileShards(folder, 2**63, cutting.coding)

    def cut(self) -> list[Seen]:
        count = len(self._plan.places)
        tiles = cut_tiles(self._slide, self._plan, read=self._read)
        try:
            for number, tile in enumerate(tiles, 1):
                self._tile(tile)
                if number % _COUNTED == 0 or number == count:
                    count_tiles((number - 1) % _COUNTED + 1)
            if self._shards.samples:
                (self._part.shard,) = self._shards.finish()
        except BaseException:
            self._shards.abort()
            raise
        return self._seen

    def _tile(self, tile: CutTile) -> None:
        part, cutting, place = self._part, self._cutting, (tile.x, tile.y)
        if tile.problem:
            self._unreadable(tile, tile.problem)
        elif tile.bare:
            part.bare += 1
        elif tile.image is not None and (refused := cutting.choosing.refused(tile.image)):
            part.dropped.setdefault(refused, []).append(place)
        else:
            label = cutting.class_index(tile.label)
            if tile.image is not None:
                tile = tile._replace(image=cutting.choosing.finished(tile.image, cutting.own))
            try:
                self._write(tile, label)
            except SlideError as error:
                self._unreadable(tile, str(error))
                return
            part.taken.append((*place, label))
            if tile.image is not None and cutting.preview is not None:
                span = self._plan.step
                self._seen.append(Seen(*place, cutting.preview.shrunk(tile.image, span, span)))

    def _write(self, tile: CutTile, label: int | None) -> None:
        known = {"label": label, "split": self._cutting.split, "slide": self._cutting.name}
        known |= {"x": tile.x, "y": tile.y}
        if self._grid is not None:
            side = self._plan.tile_size
            tiles = self._grid.at(tile.x, tile.y, (side, side))
            if tiles is None:
                raise SlideError(f"the tile at x={tile.x}, y={tile.y} is not made of JPEG tiles")
            self._shards.add_encoded(tiles, None, known)
        elif self._cutting.codec is not None and tile.image is not None:
            self._shards.add(tile.image, None, known)

    def _unreadable(self, tile: CutTile, problem: str) -> None:
        self._part.unreadable.append((tile.x, tile.y))
        self._part.problem = problem
