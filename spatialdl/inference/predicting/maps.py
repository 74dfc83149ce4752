"""Maps of a slide: pyramidal TIFFs, pictures, GeoJSON.

NAME-CLASS.tif              1 + 254 x the probability of a class over the whole slide; 0 where
                            nothing was predicted
NAME-heatmap.png            the slide, and the probabilities over it
NAME.geojson[.gz]           for QuPath: tiles, or regions by their most probable class, and
                            regions of strong activation
NAME-CLASS-activation.tif   contribution of each place to a class; 255 is the slide's maximum
NAME-activation.png         the slide, and the activation over it
NAME.zarr                   maps and polygons as a SpatialData store, optional
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from spatialdl.comm.communicator import Communicator
from spatialdl.common.files import storable
from spatialdl.inference.predicting.inputs import Input
from spatialdl.inference.predicting.pictures import save_overlay, slide_thumbnail
from spatialdl.inference.predicting.pieces import PiecedMap
from spatialdl.inference.predicting.polygons import (
    SlideMaps,
    active_features,
    region_features,
    save_geojson,
    save_spatial_data,
    tile_features,
)
from spatialdl.inference.predicting.records import ONE_CLASS
from spatialdl.inference.predicting.running import SlideOutput, bar
from spatialdl.slides.pyramid import TILE, write_pyramid
from spatialdl.slides.reading.reader import Slide, Thumbnail

log = logging.getLogger("spatialdl.predict")

Bands = Iterator[npt.NDArray[Any]]
Array = npt.NDArray[Any]
Limits = tuple[float, float]
"""Values of the first and the last colour."""
ROWS = 2 * TILE
"""Rows of a band."""
LONGEST = 1600
"""Longer side of an overview map at most, in pixels."""
_LEAST = 8
"""Least pixels of a map along a tile's side, to resolve overlaps."""
_UNIT: Limits = (0.0, 1.0)


@dataclass
class MapFolder:
    """The files of one slide or volume in a run directory.

    Attributes:
        files: names of the files so far.
    """

    run_dir: Path
    name: str
    files: list[str] = field(default_factory=list)

    def path(self, ending: str) -> Path:
        """Add a file, NAME and an ending."""
        # names of a data set may not be valid file names
        self.files.append(f"{storable(self.name)}{ending}")
        return self.run_dir / self.files[-1]


@dataclass(frozen=True)
class MapClasses:
    """The classes of maps: all names, and the indices of those that are drawn."""

    task: str
    names: Sequence[str]
    shown: Sequence[int]


def save_maps(
    where: MapFolder,
    given: Input,
    outcome: SlideOutput,
    classes: MapClasses,
    world: Communicator,
    geojson: str = ".geojson",
    *,
    store: bool = False,
) -> None:
    """Write all maps of a slide; collective over `world`, rank 0 writes.

    Args:
        geojson: file ending of tiles or regions, `.geojson` or `.geojson.gz` (compressed).
        store: whether to write a SpatialData store as well.
    """
    if given.span is None or given.extent is None:
        log.info("%s: no maps written, as the level-0 size of its tiles is unknown", given.name)
        return
    regions = classes.task == "segmentation"
    if not regions and world.rank != 0:
        return
    given, thumbnail = _in_scanned_part(given, draws=world.rank == 0)
    assert given.span is not None
    assert given.extent is not None
    found: Any
    if regions:
        found, scale = _region_map(given, given.extent, outcome, world), given.scale
    else:
        assert outcome.values is not None
        values, kept = outcome.values.numpy(), list(outcome.kept)
        places = np.asarray(given.places, np.int64)[kept]
        found = TileMap(places, given.span, given.extent, values[:, :, None, None])
        scale = found.scale
    # among all classes of regions the most probable one is found
    numbers = range(len(classes.names)) if regions else classes.shown
    tiffs = where if world.rank == 0 else None
    means = _save_class_maps(tiffs, given, found, scale, classes, numbers, _UNIT, "probability")
    if world.rank != 0:
        return
    step = _step(found, scale)
    _save_overlay(where, given, means, step, classes, thumbnail, "heatmap", "probability", _UNIT)
    if regions:
        stack = np.stack([means[k] for k in numbers])
        features = [*region_features(stack, step, classes.names, classes.shown)]
    else:
        one = classes.task in ONE_CLASS
        tiles = tile_features(
            places, given.span, given.extent, values, classes.names, one_class=one
        )
        features = [*tiles]
    if store:
        path = where.path(".zarr")
        where.files[-1] += "/zarr.json"  # resumed runs check for files, not folders
        log.info("%s: writing %s", given.name, path.name)
        maps = {classes.names[k]: means[k] for k in sorted(means)}
        complete = classes.task in ONE_CLASS and len(means) == len(classes.names)
        stored = SlideMaps(
            given.name,
            given.mpp,
            thumbnail,
            maps,
            step,
            "regions" if regions else "tiles",
            features,
            classes.names if complete else (),
        )
        save_spatial_data(path, stored)
    if outcome.activation is not None:
        active = outcome.activation[kept]
        features += _save_activation(where, given, places, active, classes, thumbnail)
    if regions or given.slide is not None:
        save_geojson(where.path(geojson), features)


def _in_scanned_part(given: Input, draws: bool) -> tuple[Input, Thumbnail | None]:
    """The input in coordinates of the part of its slide that QuPath shows, and the part."""
    if given.slide is None:
        return given, None
    source: Any = given.source
    with Slide(given.slide, source.mpp) as slide:
        slide.background, part = source.background, slide.scanned
        thumbnail = part.of_thumbnail(slide_thumbnail(slide)) if draws else None
    places = [(x - part.x, y - part.y) for x, y in given.places]
    return replace(given, places=places, extent=(part.rows, part.cols)), thumbnail


def _region_map(
    given: Input, extent: tuple[int, int], outcome: SlideOutput, world: Communicator
) -> PiecedMap:
    """The map of a segmentation at its place in the slide."""
    x, y = given.places[0]
    offset = round(y / given.scale), round(x / given.scale)
    rows, cols = (
        max(1, round(length / given.scale), min(first + side, ceil(length / given.scale)))
        for length, first, side in zip(extent, offset, given.size, strict=True)
    )
    return PiecedMap(world, (rows, cols), outcome.pieces, given.size, offset)


def _save_activation(
    where: MapFolder,
    given: Input,
    places: npt.NDArray[np.int64],
    values: Array,
    classes: MapClasses,
    thumbnail: Thumbnail | None,
) -> Iterator[dict[str, Any]]:
    """Write pyramids and picture of the activation.

    Returns:
        The regions of strong activation, as GeoJSON features.
    """
    assert given.span is not None
    assert given.extent is not None
    # the network's input is the tile's centre, or the tile with padding
    shares = np.divide(given.size, given.source.image_size(0))
    height, width = np.asarray(given.span) * shares
    inset = np.rint((np.asarray(given.span) - (height, width)) / 2).astype(np.int64)
    found = TileMap(places + inset[::-1], (float(height), float(width)), given.extent, values)
    most = float(values[:, list(classes.shown)].max())
    limits = (0.0, most if most > 0 else 1.0)
    what, label = "activation", "activation: contribution to the logit"
    means = _save_class_maps(
        where, given, found, found.scale, classes, classes.shown, limits, what, f"-{what}"
    )
    step = _step(found, found.scale)
    _save_overlay(where, given, means, step, classes, thumbnail, what, label, limits)
    return active_features(means, step, classes.names)


def _save_class_maps(
    where: MapFolder | None,
    given: Input,
    found: ClassMap,
    scale: float,
    classes: MapClasses,
    numbers: Sequence[int],
    limits: Limits,
    what: str,
    ending: str = "",
) -> dict[int, Array]:
    """Write a pyramid per shown class; returns the overviews of all `numbers`, valid on rank 0.

    Args:
        where: None on ranks that do not write.
        scale: level-0 pixels per pixel of the map.
    """
    mpp = None if given.mpp is None else given.mpp * scale
    names, means = class_files(classes.names), {}
    bands = len(numbers) * ceil(found.size[0] / ROWS)
    with bar(given.name, "maps", bands, "band", shows=where is not None) as done:
        for k in sorted(numbers, key=lambda k: (k not in classes.shown, k)):
            path = None
            if where is not None and k in classes.shown:
                path = where.path(f"-{names[k]}{ending}.tif")
            tags = {"class": classes.names[k], "what": what}
            means[k] = save_class_map(path, found, k, limits, mpp, tags, done.update)
    return means


def _save_overlay(
    where: MapFolder,
    given: Input,
    means: Mapping[int, Array],
    step: float,
    classes: MapClasses,
    thumbnail: Thumbnail | None,
    what: str,
    label: str,
    limits: Limits,
) -> None:
    assert given.extent is not None
    shown = {classes.names[k]: means[k] for k in classes.shown}
    path = where.path(f"-{what}.png")
    save_overlay(path, given.name, shown, step, given.extent, thumbnail, label, limits)


def class_files(classes: Sequence[str]) -> list[str]:
    """Unique, file-system-safe parts of file names for the classes."""
    names = [re.sub(r"[^\w.+-]", "_", name)[:40] for name in classes]
    if len({name.casefold() for name in names}) == len(names):
        return names
    return [f"{name}_{number}" for number, name in enumerate(names)]


def _step(found: ClassMap, scale: float) -> float:
    """Level-0 pixels per pixel of the overview."""
    return scale * Overview(found.size).factor


# --- maps of slides, band by band


class ClassMap(Protocol):
    """A map per class over a slide; iterating bands is collective, rank 0 gets the values."""

    @property
    def size(self) -> tuple[int, ...]: ...

    def bands(self, column: int, rows: int) -> Bands: ...


class TileMap:
    """A map of tile values at their positions; the mean where tiles overlap.

    Args:
        places: (N, 2), level-0 x and y of the tiles.
        span: level-0 rows and columns of a tile.
        extent: level-0 rows and columns of the slide.
        values: (N, classes, rows, columns), a grid of values over each tile.

    Attributes:
        scale: level-0 pixels per pixel of the map.
        size: rows and columns of the map.
    """

    def __init__(
        self,
        places: npt.NDArray[np.int64],
        span: tuple[float, float],
        extent: tuple[int, int],
        values: npt.NDArray[Any],
    ) -> None:
        self.scale = max(1.0, span[0] / max(_LEAST, values.shape[2]))
        self.size = ceil(extent[0] / self.scale), ceil(extent[1] / self.scale)
        self._values = values
        self._rows = self._edges(places[:, 1], span[0])
        self._cols = self._edges(places[:, 0], span[1])

    def _edges(self, starts: npt.NDArray[Any], span: float) -> npt.NDArray[np.int64]:
        """(N, 2): first pixel of each tile, and one past its last."""
        first = np.rint(starts / self.scale)
        last = np.maximum(np.rint((starts + span) / self.scale), first + 1)
        return np.stack([first, last], 1).astype(np.int64)

    def bands(self, column: int, rows: int) -> Iterator[npt.NDArray[np.float64]]:
        """Iterate over the map of a class, `rows` rows at a time; NaN outside tiles."""
        for first in range(0, self.size[0], rows):
            last = min(first + rows, self.size[0])
            sums = np.zeros((last - first, self.size[1]))
            counts = np.zeros(sums.shape, np.int32)
            inside = (self._rows[:, 0] < last) & (self._rows[:, 1] > first)
            for number in np.flatnonzero(inside).tolist():
                place, part = self._part(number, column, first, last)
                sums[place] += part
                counts[place] += 1
            with np.errstate(invalid="ignore"):
                yield sums / counts

    def _part(self, number: int, column: int, first: int, last: int) -> tuple[Any, Any]:
        """The slice of a tile within a band, and its values there."""
        (top, bottom), (left, right) = self._rows[number], self._cols[number]
        values = self._values[number, column]
        row0, row1 = max(first, top), min(last, bottom)
        # a tile may end beyond the slide
        col0, col1 = max(0, left), max(0, left, min(self.size[1], right))
        at_rows = (np.arange(row0, row1) - top) * values.shape[0] // (bottom - top)
        at_cols = (np.arange(col0, col1) - left) * values.shape[1] // (right - left)
        return np.s_[row0 - first : row1 - first, col0:col1], values[np.ix_(at_rows, at_cols)]


class Overview:
    """A downsampled map of one class, accumulated band by band.

    Args:
        size: rows and columns of the full map.

    Attributes:
        factor: downsampling factor along each dim.
    """

    def __init__(self, size: tuple[int, ...]) -> None:
        self.factor = max(1, ceil(max(size) / LONGEST))
        shape = ceil(size[0] / self.factor), ceil(size[1] / self.factor)
        self._sums, self._counts, self._row = np.zeros(shape), np.zeros(shape), 0

    def accumulate(self, bands: Iterable[npt.NDArray[Any]]) -> Iterator[npt.NDArray[Any]]:
        """Accumulate and pass through the bands, from top to bottom."""
        for band in bands:
            if not band.size:  # on ranks that have no values
                yield band
                continue
            known = np.isfinite(band)
            at = (self._row + np.arange(len(band))) // self.factor
            self._row += len(band)
            for total, values in ((self._sums, np.where(known, band, 0)), (self._counts, known)):
                starts = range(0, band.shape[1], self.factor)
                np.add.at(total, at, np.add.reduceat(values, starts, axis=1, dtype=np.float64))
            yield band

    @property
    def means(self) -> npt.NDArray[np.float64]:
        """The overview (rows, columns), NaN where the map has no value."""
        with np.errstate(invalid="ignore"):
            return self._sums / self._counts


def save_class_map(
    path: Path | None,
    found: ClassMap,
    column: int,
    limits: tuple[float, float],
    mpp: float | None,
    tags: Mapping[str, Any],
    progress: Callable[[], object] | None = None,
) -> Array:
    """Write the map of a class as a pyramid, in values of 1 to 255; collective.

    Args:
        path: the file; None on ranks that do not write, and if only the overview is needed.
        column: index of the class.
        limits: values at 1 and at 255.
        mpp: micrometres per pixel, if known.
        tags: description of the values.
        progress: called after each band.

    Returns:
        The overview, valid on rank 0.
    """
    overview = Overview(found.size)
    bands = overview.accumulate(_advanced(found.bands(column, ROWS), progress))
    if path is None:
        for _ in bands:
            pass
        return overview.means
    about = {**tags, "value_at_1": limits[0], "value_at_255": limits[1], "not_examined": 0}
    write_pyramid(
        path,
        (as_bytes(band, limits) for band in bands),
        (found.size[0], found.size[1]),
        mpp,
        grey=True,
        empty=True,
        description=json.dumps(about),
    )
    return overview.means


def _advanced(bands: Bands, progress: Callable[[], object] | None) -> Bands:
    for band in bands:
        yield band
        if progress is not None:
            progress()


def as_bytes(band: npt.NDArray[Any], limits: tuple[float, float]) -> npt.NDArray[np.uint8]:
    """Scale values within the limits to 1...255; NaN becomes 0."""
    shares = (np.nan_to_num(band, nan=limits[0]) - limits[0]) / (limits[1] - limits[0])
    levels = 1 + np.rint(254 * shares.clip(0, 1))
    return np.asarray(np.where(np.isnan(band), 0, levels), np.uint8)
