"""Prediction of slides as bags of features, with attention heat maps."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
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
from spatialdl.data.bags import BagSource, PlacedBag, open_tile_bags
from spatialdl.data.feature_file import list_features
from spatialdl.data.loader import bag_to_input
from spatialdl.errors import ShardError, SlideError
from spatialdl.pipeline.autocast import autocast
from spatialdl.predicting.bag_maps import BagPlaces, save_bag_maps
from spatialdl.predicting.bag_records import BagOutcome, BagRecords
from spatialdl.predicting.network import Network
from spatialdl.predicting.progress import bar
from spatialdl.predicting.slide_paths import slide_paths
from spatialdl.predicting.tables import Columns, SlideReport, predicted_columns, save_columns, table
from spatialdl.predicting.trained import Trained, find_trained
from spatialdl.slides.batch.finding_slides import slide_names
from spatialdl.slides.reading.reader import Slide
from spatialdl.text import counted
from spatialdl.training.bag_sources import feature_paths
from spatialdl.training.tasks.survival import survival_columns, survival_of

log = logging.getLogger("spatialdl.predict")


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
    records = BagRecords(run_dir, trained, config)
    own = files[world.rank :: world.size]
    results = []
    progress = bar("bags", "predicted", len(own), "slide") if world.rank == 0 else nullcontext()
    with progress as shown:
        for file in own:
            slide = slides.get(file.slide)
            key = records.key(file, slide)
            outcome = records.load(file.slide, key)
            if outcome is None:
                outcome = predictor.predict(file)
                if slide is None or not outcome.remark:  # the slide may be readable next time
                    records.save(outcome, key)
            results.append(outcome)
            if shown is not None:
                shown.update()
    gathered = world.gather(results)
    succeeded = True
    if gathered is not None:
        outcomes = sorted((one for rank in gathered for one in rank), key=lambda one: one.name)
        _report_outcomes(outcomes, trained, run_dir, str(config.table))
        succeeded = not any(one.problem for one in outcomes)
    return bool(world.bcast(succeeded))


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
        self._trained, self._run_dir, self._slides = trained, run_dir, slides
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

    def predict(self, file: PlacedBag) -> BagOutcome:
        """Predict a slide and draw its heat map."""
        if not file.tiles:
            return BagOutcome(file.slide, 0, problem="it has no tiles")
        try:
            source = BagSource([file], np.zeros(1, np.int64), ())
            features = source.read(0)
        except (ValueError, ShardError) as error:
            return BagOutcome(file.slide, file.tiles, problem=str(error))
        values, attention = self._run(features)
        if not np.isfinite(values).all():
            return BagOutcome(file.slide, file.tiles, problem="the network returns NaN or Inf")
        remark, files = "", []
        if self._draws:
            try:
                files = self._draw(file, values, attention)
            except (ValueError, SlideError) as error:
                remark = f"no heat map: {error}"
        return BagOutcome(file.slide, file.tiles, values, remark, files=files)

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
        path = self._slides.get(file.slide)
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


def _report_outcomes(
    outcomes: Sequence[BagOutcome], trained: Trained, run_dir: Path, kind: str
) -> None:
    """Write the table of slides, and print it."""
    good = [one for one in outcomes if one.values is not None]
    values = np.stack([one.values for one in good]) if good else np.empty((0, 0))  # type: ignore[misc]
    columns = {}
    if good and trained.task == "survival":
        names = survival_columns(values.shape[1] - 1)
        columns = dict(zip(names, values.T.tolist(), strict=True))
    elif good:
        columns = predicted_columns(values, trained.classes, trained.task)
    place = {one.name: number for number, one in enumerate(good)}
    rows: Columns = {
        "slide": [one.name for one in outcomes],
        "tiles": [one.tiles for one in outcomes],
    }
    for head, cells in columns.items():
        rows[head] = [cells[place[one.name]] if one.name in place else None for one in outcomes]
    rows["status"] = ["failed" if one.problem else "processed" for one in outcomes]
    rows["reason"] = [one.problem or one.remark for one in outcomes]
    path = save_columns(run_dir, "slides", rows, kind)
    print(table([_report(one, trained) for one in outcomes]))
    if before := sum(one.done_before for one in outcomes):
        log.info("%s already predicted; overwrite=true predicts again", counted(before, "slide"))
    maps = counted(sum(bool(one.files) for one in outcomes), "heat map")
    log.info("written: %s, %s in %s", path, maps, run_dir)


def _report(one: BagOutcome, trained: Trained) -> SlideReport:
    if one.values is None:
        return SlideReport(one.name, one.tiles, problem=one.problem, failed=True)
    if trained.task == "survival":
        return SlideReport(one.name, one.tiles, "risk", float(one.values[0]), one.remark)
    best = int(one.values.argmax())
    name = trained.classes[best] if best < len(trained.classes) else str(best)
    return SlideReport(one.name, one.tiles, name, float(one.values[best]), one.remark)
