"""Prediction of slides as bags of features, with attention heat maps.

NAME-attention.png   the slide, and the attention over it, as the share of tiles with less
NAME-attention.tif   1 + 254 x that share over the whole slide; 0 outside tiles
NAME.geojson         a box per tile, with its attention, for QuPath
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from omegaconf import DictConfig
from scipy.stats import rankdata
from torch import Tensor, nn

from spatialdl.comm.single_process import SingleProcess
from spatialdl.data.bags import BagSource, PlacedBag, open_tile_bags
from spatialdl.data.feature_file import list_features
from spatialdl.data.format import MANIFEST
from spatialdl.data.loader import bag_to_input
from spatialdl.errors import SlideError
from spatialdl.inference.predicting.loop import problem_of
from spatialdl.inference.predicting.maps import MapFolder, Overview, TileMap, save_class_map
from spatialdl.inference.predicting.network import Network
from spatialdl.inference.predicting.pictures import save_overlay, slide_thumbnail
from spatialdl.inference.predicting.polygons import box_of, save_geojson
from spatialdl.inference.predicting.records import (
    PredictionRecord,
    SlideReport,
    SlideResult,
    key_of,
    known_result,
    result_of,
)
from spatialdl.inference.predicting.slide_paths import slide_paths
from spatialdl.inference.predicting.trained import Trained
from spatialdl.pipeline.autocast import autocast
from spatialdl.slides.batch.finding_slides import slide_names
from spatialdl.slides.reading.reader import Slide
from spatialdl.training.bag_sources import feature_paths
from spatialdl.training.tasks.survival import survival_of

log = logging.getLogger("spatialdl.predict")

_SETTINGS = ("average", "maps", "precision")
"""Keys of the command on which the prediction of a slide, or its files, depends."""

_STRONG = 0.9
"""Least share of tiles with less attention for a tile to be marked."""
_MARK = [220, 40, 40]


def find_bags(trained: Trained, config: DictConfig) -> Sequence[PlacedBag]:
    """Bags of features; or of pixels, for a network trained end to end with its encoder.

    Raises:
        ValueError: the network does not take them.
    """
    if not trained.takes_bags:
        raise ValueError(
            f"features={config.features} needs a network trained on data=bags, but the one of "
            f"{trained.path} was trained on data={trained.config.data.name}: give images instead"
        )
    paths = feature_paths(config.features)
    if trained.config.data.get("tile") is None:
        files: Sequence[PlacedBag] = list_features(paths)
    elif len(paths) > 1 or not paths[0].is_dir():
        raise ValueError(
            f"features={config.features}: the network of {trained.path} takes tiles: give the "
            "folder of a data set written by spatialdl-tile"
        )
    else:
        files = open_tile_bags(paths[0], key="features")[0]
    if files[0].width != trained.channels:
        raise ValueError(
            f"{files[0].path} has {files[0].width} features per tile, but the network of "
            f"{trained.path} was trained on {trained.channels}: use features of the same encoder, "
            "or tiles of the same size"
        )
    return sorted(files, key=lambda file: file.slide)


def slides_of(config: DictConfig, files: Sequence[PlacedBag]) -> dict[str, Path]:
    """Paths of the slides of `slides=` that have features, by name.

    Raises:
        ValueError: none of them has features.
    """
    if config.slides is None:
        return {}
    paths = {name: path for path, name in slide_names(slide_paths(config.slides)).items()}
    known = {file.slide for file in files}
    found = {name: path for name, path in paths.items() if name in known}
    if not found:
        raise ValueError(
            f"slides={config.slides} match no features: features are of "
            f"{', '.join(sorted(known)[:3])}, slides are {', '.join(sorted(paths)[:3])}"
        )
    return found


class BagWork:
    """Prediction of bags on this rank.

    Args:
        config: configuration of the command.
        files: all bags.

    Raises:
        ValueError: `slides=` names slides, but none with features.
    """

    def __init__(
        self, trained: Trained, config: DictConfig, run_dir: Path, files: Sequence[PlacedBag]
    ) -> None:
        self._trained, self._run_dir = trained, run_dir
        self._slides = slides_of(config, files)
        self._settings = [trained.digest, {name: config[name] for name in _SETTINGS}]
        self._draws, self._overwrite = bool(config.maps), bool(config.overwrite)
        single = config.copy()
        single.parallel.data = 1
        network = Network(trained, single, SingleProcess())
        self._precision = network.precision
        pipeline = network.pipeline(trained.image_size)
        self._device = pipeline.device
        [self._model] = pipeline.stages.values()
        self._model.eval()
        if self._draws and attention_of(self._model) is None:
            log.info("%s has no method attention: no heat maps", type(self._model).__name__)
            self._draws = False

    def key(self, file: PlacedBag) -> str:
        """A digest of all inputs of a bag's prediction."""
        path = file.path / MANIFEST if file.path.is_dir() else file.path
        slide = self._slides.get(file.slide)
        under = None if slide is None else key_of(None, slide)
        return key_of([*self._settings, file.slide, file.tiles, under], path)

    def known(self, file: PlacedBag) -> SlideResult | None:
        if self._overwrite:
            return None
        return known_result(self._run_dir, file.slide, self.key(file), self._trained)

    def open(self, file: PlacedBag) -> npt.NDArray[Any]:
        if not file.tiles:
            raise SlideError("it has no tiles")
        try:
            return BagSource([file], np.zeros(1, np.int64), ()).read(0)
        except ValueError as error:
            raise SlideError(str(error)) from error

    def failed(self, file: PlacedBag, opened: object, error: Exception) -> SlideResult:
        report = SlideReport(file.slide, file.tiles, problem=problem_of(error), failed=True)
        return SlideResult(report)

    def run(self, file: PlacedBag, features: npt.NDArray[Any]) -> SlideResult:
        """Predict a slide and draw its heat map."""
        try:
            values, attention = self._run(features)
        except ValueError as error:
            raise SlideError(str(error)) from error
        if not np.isfinite(values).all():
            raise SlideError("the network returns NaN or Inf")
        remark, where = "", MapFolder(self._run_dir, file.slide)
        if attention is not None:
            try:
                self._draw(where, file, values, attention)
            except (ValueError, SlideError) as error:
                remark = f"no heat map: {error}"
                where.files.clear()
        record = PredictionRecord(
            file.slide,
            self.key(file),
            np.zeros((1, 2), np.int64),
            None,
            values[None],
            files=where.files,
            bag=file.tiles,
            remark=remark,
        )
        if file.slide not in self._slides or not remark:  # the slide may be readable next time
            record.save(self._run_dir)
        return result_of(record, self._trained)

    @torch.no_grad()
    def _run(self, features: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
        """Probabilities or values (columns,), and attention (maps, tiles)."""
        tiles, dtype = torch.from_numpy(features[None]), self._precision.dtype
        bag = bag_to_input(tiles, dtype, self._device, self._trained.normalisation)
        attention = None
        with autocast(self._device, self._precision.mixed):
            output = self._model(bag)
            if self._draws:
                attention = attention_of(self._model)(bag)[0]
        values = values_of(output.double().cpu(), self._trained.task)[0]
        maps = None if attention is None else attention.double().cpu().numpy()
        return values.numpy(), maps

    def _draw(
        self,
        where: MapFolder,
        file: PlacedBag,
        values: npt.NDArray[Any],
        attention: npt.NDArray[Any],
    ) -> None:
        number, what = 0, "attention"
        if len(attention) > 1:  # a map per class or time interval
            if self._trained.task == "survival":  # the interval with the likeliest event
                number = int((-np.diff(values[1:], prepend=1.0)).argmax())
                what = f"attention for interval {number + 1}"
            else:
                number = int(values.argmax())
                what = f"attention for {self._trained.classes[number]}"
        path = self._slides.get(file.slide)
        with nullcontext() if path is None else Slide(path) as slide:
            places = BagPlaces.of(file, None if slide is None else slide.size)
            save_bag_maps(where, attention[number], places, slide, what)


def attention_of(model: nn.Module) -> Any:
    """The method `attention` of a network, which returns (N, maps, tiles); None if it has none."""
    method = getattr(model, "attention", None)
    return method if callable(method) and not isinstance(method, nn.Module) else None


def values_of(output: Tensor, task: str) -> Tensor:
    """Probabilities or values (N, columns) of a network's output."""
    if task == "classification":
        return output.softmax(1)
    if task == "multilabel":
        return output.sigmoid()
    if task == "survival":
        return survival_of(output)
    return output if output.dim() > 1 else output.unsqueeze(1)


# --- heat maps


@dataclass(frozen=True)
class BagPlaces:
    """The positions of a bag's tiles.

    Attributes:
        places: int64 (tiles, 2), level-0 x and y.
        span: side of a tile, in level-0 pixels.
        extent: level-0 rows and columns of the slide.
    """

    places: npt.NDArray[np.int64]
    span: float
    extent: tuple[int, int]

    @classmethod
    def of(cls, file: PlacedBag, size: tuple[int, int] | None) -> BagPlaces:
        """Read the positions of a feature file.

        Args:
            size: level-0 rows and columns of the slide, if it is available.

        Raises:
            ValueError: the file has no positions, or the size of its tiles is unknown.
        """
        places = file.coords()
        span = tile_span(file.attributes, places)
        if span is None:
            raise ValueError(
                f"{file.path} does not record the size of its tiles (patch_size_level0, or "
                "patch_size and downsample): no heat map can be drawn"
            )
        if size is None:
            rows, cols = (_whole(file.attributes, f"level0_{side}") for side in ("height", "width"))
            right, bottom = (places.max(0) + np.ceil(span)).tolist()
            size = max(int(bottom), rows or 0), max(int(right), cols or 0)
        return cls(places, span, size)


def tile_span(attributes: Mapping[str, Any], places: npt.NDArray[np.int64]) -> float | None:
    """The side of a tile in level-0 pixels; None if unknown.

    TRIDENT records `patch_size_level0`, CLAM the side and the downsampling of a level. Otherwise it
    is the smallest distance of neighbours.
    """
    level0_side = _whole(attributes, "patch_size_level0")
    if level0_side:
        return float(level0_side)
    side, down = _whole(attributes, "patch_size"), attributes.get("downsample")
    if side and down is not None and attributes.get("patch_level", 0) != 0:
        return float(side * np.ravel(down)[0])
    if side and attributes.get("patch_level") == 0:
        return float(side)
    gaps = [np.diff(np.unique(column)) for column in places.T]
    least = [int(gap.min()) for gap in gaps if len(gap)]
    return float(min(least)) if least else (float(side) if side else None)


def _whole(attributes: Mapping[str, Any], name: str) -> int | None:
    value = attributes.get(name)
    if not isinstance(value, int | float | np.integer | np.floating):
        return None
    return int(value) if np.isfinite(value) and value >= 1 else None


def shares_below(attention: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """(tiles,): share of the other tiles with less attention; ties count half."""
    if len(attention) == 1:
        return np.ones(1)
    ranks = rankdata(attention, method="average") - 1
    return np.asarray(ranks / (len(attention) - 1), np.float64)


def save_bag_maps(
    where: MapFolder,
    attention: npt.NDArray[np.float64],
    places: BagPlaces,
    slide: Slide | None,
    what: str,
) -> None:
    """Write the heat map of a slide.

    Args:
        attention: (tiles,), of any range.
        slide: the open slide, drawn under the map; None if it is not available.
        what: title of the map, such as "attention for CLASS".
    """
    thumbnail = None
    if slide is not None:  # QuPath shows this part of it only
        part = slide.scanned
        places = replace(places, places=places.places - part[:2], extent=(part.rows, part.cols))
        thumbnail = part.of_thumbnail(slide_thumbnail(slide))
    shares, span = shares_below(attention), (places.span, places.span)
    found = TileMap(places.places, span, places.extent, shares[:, None, None, None])
    label, limits = "share of tiles with less attention", (0.0, 1.0)
    mpp = None if slide is None or slide.known_mpp is None else slide.known_mpp * found.scale
    path = where.path("-attention.tif")
    overview = save_class_map(path, found, 0, limits, mpp, {"what": label})
    save_overlay(
        where.path("-attention.png"),
        where.name,
        {what: overview},
        found.scale * Overview(found.size).factor,
        places.extent,
        thumbnail,
        label,
        limits,
    )
    save_geojson(where.path(".geojson"), _features(places, attention, shares))


def _features(
    places: BagPlaces, attention: npt.NDArray[np.float64], shares: npt.NDArray[np.float64]
) -> Iterator[dict[str, Any]]:
    """GeoJSON boxes of tiles; tiles with the most attention are classified as such."""
    rows, cols = places.extent
    for (x, y), value, share in zip(places.places.tolist(), attention, shares, strict=True):
        right, bottom = min(x + places.span, cols), min(y + places.span, rows)
        properties: dict[str, Any] = {
            "objectType": "tile",
            "measurements": {"attention": float(value), "attention share": float(share)},
        }
        if share >= _STRONG:
            properties["classification"] = {"name": "strong attention", "color": _MARK}
        geometry = box_of(x, y, right, bottom)
        yield {"type": "Feature", "geometry": geometry, "properties": properties}
