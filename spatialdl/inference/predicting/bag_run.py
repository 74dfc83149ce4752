"""Prediction of slides as bags of features, with attention heat maps."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from spatialdl.comm import check
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.single_process import SingleProcess
from spatialdl.common.text import counted
from spatialdl.data.bags import BagSource, PlacedBag, open_tile_bags
from spatialdl.data.feature_file import list_features
from spatialdl.data.format import MANIFEST
from spatialdl.data.loader import bag_to_input
from spatialdl.errors import ShardError, SlideError
from spatialdl.inference.predicting.bag_maps import BagPlaces, save_bag_maps
from spatialdl.inference.predicting.network import Network
from spatialdl.inference.predicting.records import (
    Columns,
    PredictionRecord,
    SlideReport,
    key_of,
    predicted_columns,
    save_columns,
    table,
)
from spatialdl.inference.predicting.running import bar
from spatialdl.inference.predicting.slide_paths import slide_paths
from spatialdl.inference.predicting.trained import Trained, find_trained
from spatialdl.pipeline.autocast import autocast
from spatialdl.slides.batch.finding_slides import slide_names
from spatialdl.slides.reading.reader import Slide
from spatialdl.training.bag_sources import feature_paths
from spatialdl.training.tasks.survival import survival_columns, survival_of

log = logging.getLogger("spatialdl.predict")

_SETTINGS = ("average", "maps", "precision")
"""Keys of the command on which the prediction of a slide, or its files, depends."""


def run(config: DictConfig, run_dir: Path, world: Communicator) -> bool:
    """Predict all bags, distributed over the ranks; collective over `world`.

    Bags that an earlier run predicted in this directory are not predicted again.

    Returns:
        Whether every bag was predicted.

    Raises:
        ValueError: the configuration does not match the checkpoint or the features.
    """
    check.enable(bool(config.comm.check))
    run_dir = world.bcast(run_dir)
    trained = find_trained(str(config.ckpt_path), world)
    if not trained.takes_bags:
        raise ValueError(
            f"features={config.features} needs a network trained on data=bags, but the one of "
            f"{trained.path} was trained on data={trained.config.data.name}: give images instead"
        )
    files = _bags(trained, config)
    if files[0].width != trained.channels:
        raise ValueError(
            f"{files[0].path} has {files[0].width} features per tile, but the network of "
            f"{trained.path} was trained on {trained.channels}: use features of the same encoder, "
            "or tiles of the same size"
        )
    slides = slides_of(config, files)
    predictor = BagPredictor(trained, config, run_dir, slides)
    own = files[world.rank :: world.size]
    results = []
    with bar("bags", "predicted", len(own), "slide", shows=world.rank == 0) as progress:
        for file in own:
            results.append(_one(file, predictor, config, run_dir))
            progress.update()
    gathered = world.gather(results)
    succeeded = True
    if gathered is not None:
        found = sorted((one for rank in gathered for one in rank), key=lambda one: one.name)
        _save_slides(found, trained, run_dir, str(config.table))
        succeeded = not any(one.problem for one in found)
    return bool(world.bcast(succeeded))


@dataclass(frozen=True)
class BagResult:
    """The result of a slide: its record, or the problem why it has none."""

    name: str
    tiles: int
    record: PredictionRecord | None = None
    problem: str = ""
    done_before: bool = False

    def report(self, trained: Trained) -> SlideReport:
        """The result as a row of the console table."""
        if self.record is None:
            return SlideReport(self.name, self.tiles, problem=self.problem, failed=True)
        values = self.record.values[0]
        best = int(values.argmax())
        name = trained.classes[best] if best < len(trained.classes) else str(best)
        if trained.task == "survival":
            best, name = 0, "risk"
        return SlideReport(self.name, self.tiles, name, float(values[best]), self.record.remark)


def _one(file: PlacedBag, predictor: BagPredictor, config: DictConfig, run_dir: Path) -> BagResult:
    """The recorded result of a slide, if its inputs are the same, or a new one."""
    slide, key = predictor.slides.get(file.slide), predictor.key(file)
    if not config.overwrite:
        record = PredictionRecord.load(run_dir, file.slide, key)
        if record is not None:
            return BagResult(file.slide, record.bag, record, done_before=True)
    try:
        record = predictor.predict(file, key)
    except (ValueError, ShardError) as error:
        return BagResult(file.slide, file.tiles, problem=str(error))
    if slide is None or not record.remark:  # the slide may be readable next time
        record.save(run_dir)
    return BagResult(file.slide, file.tiles, record)


def _bags(trained: Trained, config: DictConfig) -> Sequence[PlacedBag]:
    """Bags of features; or of pixels, for a network trained end to end with its encoder."""
    paths = feature_paths(config.features)
    if trained.config.data.get("tile") is None:
        return list_features(paths)
    if len(paths) > 1 or not paths[0].is_dir():
        raise ValueError(
            f"features={config.features}: the network of {trained.path} takes tiles: give the "
            "folder of a data set written by spatialdl-tile"
        )
    return open_tile_bags(paths[0], key="features")[0]


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


class BagPredictor:
    """Predictor of bags on this rank.

    Args:
        config: configuration of the command.
        slides: paths by name, drawn under the heat maps.
    """

    def __init__(
        self, trained: Trained, config: DictConfig, run_dir: Path, slides: Mapping[str, Path]
    ) -> None:
        self._trained, self._run_dir, self.slides = trained, run_dir, slides
        self._settings = [trained.digest, {name: config[name] for name in _SETTINGS}]
        self._draws = bool(config.maps)
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
        slide = self.slides.get(file.slide)
        try:
            under = None if slide is None else key_of(None, slide)
            return key_of([*self._settings, file.slide, file.tiles, under], path)
        except OSError as error:
            return f"{path}: {error.strerror}"  # reported where it is opened

    def predict(self, file: PlacedBag, key: str) -> PredictionRecord:
        """Predict a slide and draw its heat map.

        Raises:
            ValueError, ShardError: it cannot be predicted.
        """
        if not file.tiles:
            raise ValueError("it has no tiles")
        features = BagSource([file], np.zeros(1, np.int64), ()).read(0)
        values, attention = self._run(features)
        if not np.isfinite(values).all():
            raise ValueError("the network returns NaN or Inf")
        remark, files = "", []
        if self._draws:
            try:
                files = self._draw(file, values, attention)
            except (ValueError, SlideError) as error:
                remark = f"no heat map: {error}"
        nowhere = np.zeros((1, 2), np.int64)
        return PredictionRecord(
            *(file.slide, key, nowhere, None, values[None]),
            files=files,
            bag=file.tiles,
            remark=remark,
        )

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
        self, file: PlacedBag, values: npt.NDArray[Any], attention: npt.NDArray[Any] | None
    ) -> list[str]:
        assert attention is not None
        number, what = 0, "attention"
        if len(attention) > 1:  # a map per class or time interval
            if self._trained.task == "survival":  # the interval with the likeliest event
                number = int((-np.diff(values[1:], prepend=1.0)).argmax())
                what = f"attention for interval {number + 1}"
            else:
                number = int(values.argmax())
                what = f"attention for {self._trained.classes[number]}"
        path = self.slides.get(file.slide)
        if path is None:
            places = BagPlaces.of(file, None)
            return save_bag_maps(self._run_dir, file.slide, attention[number], places, None, what)
        with Slide(path) as slide:
            places = BagPlaces.of(file, slide.size)
            return save_bag_maps(self._run_dir, file.slide, attention[number], places, slide, what)


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


def _save_slides(found: Sequence[BagResult], trained: Trained, run_dir: Path, kind: str) -> None:
    """Write the table of slides, and print it."""
    good = {one.name: one.record.values[0] for one in found if one.record is not None}
    values = np.stack([*good.values()]) if good else np.empty((0, 0))
    columns: Columns = {}
    if good and trained.task == "survival":
        columns = dict(zip(survival_columns(values.shape[1] - 1), values.T.tolist(), strict=True))
    elif good:
        columns = predicted_columns(values, trained.classes, trained.task)
    reports = [one.report(trained) for one in found]
    rows: Columns = {
        "slide": [one.name for one in found],
        "tiles": [one.tiles for one in found],
    }
    for head, cells in columns.items():
        of_slides = dict(zip(good, cells, strict=True))
        rows[head] = [of_slides.get(one.name) for one in found]
    rows["status"] = [one.status for one in reports]
    rows["reason"] = [one.problem or one.remark for one in reports]
    path = save_columns(run_dir, "slides", rows, kind)
    print(table(reports))
    if before := sum(one.done_before for one in found):
        log.info("%s already predicted; overwrite=true predicts again", counted(before, "slide"))
    maps = sum(one.record is not None and bool(one.record.files) for one in found)
    log.info("written: %s, %s in %s", path, counted(maps, "heat map"), run_dir)
