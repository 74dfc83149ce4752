"""Writer of a slide's maps: pyramidal TIFFs, pictures, GeoJSON.

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

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from spatialdl.comm.communicator import Communicator
from spatialdl.common.files import storable
from spatialdl.inference.predicting.geojson import (
    active_features,
    region_features,
    save_geojson,
    tile_features,
)
from spatialdl.inference.predicting.inputs import Input
from spatialdl.inference.predicting.pictures import (
    ROWS,
    Bands,
    ClassMap,
    Overview,
    TileMap,
    save_class_map,
    save_overlay,
    slide_thumbnail,
)
from spatialdl.inference.predicting.pieces import PiecedMap
from spatialdl.inference.predicting.records import ONE_CLASS
from spatialdl.inference.predicting.running import SlideOutput, bar
from spatialdl.inference.predicting.spatial_data import SlideMaps, save_spatial_data
from spatialdl.inference.predicting.trained import Trained
from spatialdl.slides.reading.reader import Slide, Thumbnail

log = logging.getLogger("spatialdl.predict")

_UNIT = (0.0, 1.0)  # limits of probabilities


class Maps:
    """Writer of the maps of one slide; construction and calls are collective.

    Args:
        shown: indices of the classes to write.
        geojson: file ending of tiles or regions, `.geojson` or `.geojson.gz` (compressed).
        store: whether to write a SpatialData store as well.
    """

    def __init__(
        self,
        run_dir: Path,
        given: Input,
        trained: Trained,
        shown: Sequence[int],
        world: Communicator,
        geojson: str = ".geojson",
        store: bool = False,
    ) -> None:
        self._geojson, self._store = geojson, store
        self._run_dir, self._given, self._trained = run_dir, given, trained
        self._shown, self._world = shown, world
        self._files: list[str] = []
        self._thumbnail: Thumbnail | None = None

    def save(self, outcome: SlideOutput) -> list[str]:
        """Write all maps of the slide.

        Returns:
            Names of the files, on rank 0.
        """
        given, rank = self._given, self._world.rank
        if given.span is None or given.extent is None:
            log.info("%s: no maps written, as the level-0 size of its tiles is unknown", given.name)
            return []
        if rank == 0 and given.slide is not None:
            source: Any = given.source
            with Slide(given.slide, source.mpp) as slide:
                slide.background = source.background
                self._thumbnail = slide_thumbnail(slide)
        if self._trained.task == "segmentation":
            self._save_map(outcome)
        elif rank == 0:
            self._save_tiles(outcome)
        return self._files

    # --- tiles

    def _save_tiles(self, outcome: SlideOutput) -> None:
        given, classes = self._given, self._trained.classes
        assert outcome.values is not None
        values = outcome.values.numpy()
        kept = list(outcome.kept)
        places = np.asarray(given.places, np.int64)[kept]
        assert given.span is not None
        assert given.extent is not None
        found = TileMap(places, given.span, given.extent, values[:, :, None, None])
        means = self._tiffs(found, found.scale, _UNIT, "", "probability")
        self._picture("heatmap", means, _scale(found, found.scale), "probability", _UNIT)
        one = self._trained.task in ONE_CLASS
        tiles = [*tile_features(places, given.span, given.extent, values, classes, one_class=one)]
        if self._store:
            self._save_store(means, _scale(found, found.scale), "tiles", tiles)
        features: Iterable[dict[str, Any]] = tiles
        if outcome.activation is not None:
            features = chain(features, self._save_activation(places, outcome.activation[kept]))
        if given.slide is not None:
            save_geojson(self._named(self._geojson), features)

    def _save_activation(
        self, places: npt.NDArray[np.int64], values: npt.NDArray[Any]
    ) -> Iterator[dict[str, Any]]:
        """Write pyramids and picture of the activation.

        Returns:
            The regions of strong activation, as GeoJSON features.
        """
        given = self._given
        assert given.span is not None
        assert given.extent is not None
        # the network's input is the tile's centre, or the tile with padding
        shares = np.divide(given.size, given.source.image_size(0))
        height, width = np.asarray(given.span) * shares
        inset = np.rint((np.asarray(given.span) - (height, width)) / 2).astype(np.int64)
        view = float(height), float(width)
        found = TileMap(places + inset[::-1], view, given.extent, values)
        most = float(values[:, list(self._shown)].max())
        limits = (0.0, most if most > 0 else 1.0)
        means = self._tiffs(found, found.scale, limits, "-activation", "activation")
        label = "activation: contribution to the logit"
        scale = _scale(found, found.scale)
        self._picture("activation", means, scale, label, limits)
        return active_features(means, scale, self._trained.classes)

    # --- maps

    def _save_map(self, outcome: SlideOutput) -> None:
        """Write the maps of a segmentation; all ranks iterate over the bands of all classes."""
        given = self._given
        assert given.extent is not None
        scale = given.scale
        size = tuple(max(1, round(length / scale)) for length in given.extent)
        x, y = given.places[0]
        offset = round(y / scale), round(x / scale)
        whole = (max(size[0], offset[0] + given.size[0]), max(size[1], offset[1] + given.size[1]))
        found = PiecedMap(self._world, whole, outcome.pieces, given.size, offset)
        classes = self._trained.classes
        rank, bands = self._world.rank, len(classes) * ceil(whole[0] / ROWS)
        with bar(given.name, "maps", bands, "band", shows=rank == 0) as done:
            counted = _CountedMap(found, done)
            means = self._tiffs(counted, scale, _UNIT, "", "probability")
            for number in range(len(classes)):  # the most probable class is found among all
                if number not in means:
                    means[number] = save_class_map(None, counted, number, _UNIT, None, {})
        if rank != 0:
            return
        self._picture("heatmap", means, _scale(counted, scale), "probability", _UNIT)
        stack = np.stack([means[k] for k in range(len(means))])
        features = [*region_features(stack, _scale(counted, scale), classes, self._shown)]
        save_geojson(self._named(self._geojson), features)
        if self._store:
            self._save_store(means, _scale(counted, scale), "regions", features)

    # --- files

    def _save_store(
        self,
        means: dict[int, npt.NDArray[Any]],
        scale: float,
        kind: str,
        features: Sequence[Mapping[str, Any]],
    ) -> None:
        given, classes = self._given, self._trained.classes
        store = self._named(".zarr")
        self._files[-1] += "/zarr.json"  # resumed runs check for files, not folders
        complete = self._trained.task in ONE_CLASS and len(means) == len(classes)
        log.info("%s: writing %s", given.name, store.name)
        save_spatial_data(
            store,
            SlideMaps(
                given.name,
                given.mpp,
                self._thumbnail,
                {classes[k]: means[k] for k in sorted(means)},
                scale,
                kind,
                features,
                classes if complete else (),
            ),
        )

    def _tiffs(
        self, found: ClassMap, scale: float, limits: tuple[float, float], ending: str, what: str
    ) -> dict[int, npt.NDArray[Any]]:
        """Write a pyramid per shown class; returns their overviews, valid on rank 0."""
        mpp = None if self._given.mpp is None else self._given.mpp * scale
        names, means = class_files(self._trained.classes), {}
        for number in self._shown:
            writes = self._world.rank == 0
            path = self._named(f"-{names[number]}{ending}.tif") if writes else None
            tags = {"class": self._trained.classes[number], "what": what}
            means[number] = save_class_map(path, found, number, limits, mpp, tags)
        return means

    def _picture(
        self,
        what: str,
        means: dict[int, npt.NDArray[Any]],
        scale: float,
        label: str,
        limits: tuple[float, float],
    ) -> None:
        given = self._given
        assert given.extent is not None
        save_overlay(
            self._named(f"-{what}.png"),
            given.name,
            {self._trained.classes[k]: means[k] for k in self._shown},
            scale,
            given.extent,
            self._thumbnail,
            label,
            limits,
        )

    def _named(self, ending: str) -> Path:
        # slide names of a data set may not be valid file names
        name = f"{storable(self._given.name)}{ending}"
        self._files.append(name)
        return self._run_dir / name


@dataclass
class _CountedMap:
    """A map that advances a progress bar band by band."""

    given: PiecedMap
    bar: tqdm[Any]

    @property
    def size(self) -> tuple[int, int]:
        rows, cols = self.given.size
        return rows, cols

    def bands(self, column: int, rows: int) -> Bands:
        for band in self.given.bands(column, rows):
            yield band
            self.bar.update()


def class_files(classes: Sequence[str]) -> list[str]:
    """Unique, file-system-safe parts of file names for the classes."""
    names = [re.sub(r"[^\w.+-]", "_", name)[:40] for name in classes]
    if len({name.casefold() for name in names}) == len(names):
        return names
    return [f"{name}_{number}" for number, name in enumerate(names)]


def _scale(found: ClassMap, scale: float) -> float:
    """Level-0 pixels per pixel of the overview."""
    return scale * Overview(found.size).factor
