"""Prediction of all slides of a command, one after the other."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from spatialdl.comm import check
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.processes import Nodes
from spatialdl.comm.single_process import SingleProcess
from spatialdl.common.text import counted
from spatialdl.data.shards import ShardDataset
from spatialdl.inference.predicting.checks import GEOJSON
from spatialdl.inference.predicting.cutting import BatchCutting, cutting_of
from spatialdl.inference.predicting.inputs import (
    Input,
    SlideImages,
    named_samples,
    shard_inputs,
    slide_input,
)
from spatialdl.inference.predicting.loop import Team, Work, problem_of, process
from spatialdl.inference.predicting.maps import MapClasses, MapFolder, save_maps
from spatialdl.inference.predicting.pieces import Counts, confusion_of
from spatialdl.inference.predicting.records import (
    PredictionRecord,
    SlideReport,
    SlideResult,
    key_of,
    known_result,
    result_of,
    save_tables,
    table,
)
from spatialdl.inference.predicting.running import Runner, SlideOutput
from spatialdl.inference.predicting.slide_paths import slide_paths, volume_names, volume_paths
from spatialdl.inference.predicting.trained import Trained, find_trained
from spatialdl.inference.predicting.volume_inputs import (
    VolumeImages,
    shard_volume_input,
    volume_input,
)
from spatialdl.inference.predicting.volume_results import save_volume_maps
from spatialdl.layout.layout import by
from spatialdl.layout.node_order import placed_by_nodes
from spatialdl.slides.batch.finding_slides import slide_names
from spatialdl.training.layouts import placement_of

log = logging.getLogger("spatialdl.predict")

_SETTINGS = (
    *("average", "maps", "activation", "classes", "precision", "split", "tta", "geojson"),
    "spatialdata",
)
"""Keys of the command on which the prediction of a slide, or its files, depends."""


def run(config: DictConfig, run_dir: Path, world: Communicator) -> bool:
    """Predict all slides, or bags of their features; collective over `world`.

    Returns:
        Whether every slide was predicted.

    Raises:
        ValueError: the configuration does not match the checkpoint or the data.
    """
    check.enable(bool(config.comm.check))
    run_dir = world.bcast(run_dir)
    trained = find_trained(str(config.ckpt_path), world)
    log.info("the network of %s, step %d, task=%s", trained.path, trained.step, trained.task)
    team = Team(world)
    jobs: Sequence[Any]
    work: Work
    if config.features is not None:
        from spatialdl.inference.predicting.bags import BagWork, find_bags

        kind, jobs = "bags", find_bags(trained, config)
        team = Team(SingleProcess(), world.rank, world.size)
        work = BagWork(trained, config, run_dir, jobs)
    else:
        _check_maps(config, trained)
        shown = _shown(config, trained)
        kind, (jobs, single_images) = "slides", _jobs(config, trained)
        if trained.takes_volumes:
            kind = "volumes"
        if single_images:
            team, config = _replica(config, trained, world)
        work = _ImageWork(trained, config, run_dir, team.ranks, shown)
    results: list[SlideResult] = []
    for result in process(jobs, team, world, work):
        _log_report(result.report, kind)
        results.append(result)
    if world.rank == 0:
        paths = save_tables(
            run_dir, results, trained.classes, trained.task, str(config.table), kind
        )
        print(table([one.report for one in results], kind))
        log.info("written: %s", ", ".join(map(str, paths)))
    return bool(world.bcast(not any(one.report.failed for one in results)))


@dataclass(frozen=True)
class _Job:
    """A slide to predict.

    Attributes:
        key: digest of its inputs, see `records.key_of`.
        find: opens its images; called on the first rank of a team.
    """

    name: str
    key: str
    find: Callable[[], Input]


def _jobs(config: DictConfig, trained: Trained) -> tuple[list[_Job], bool]:
    """All slides, and whether any of them is a single image."""
    if trained.takes_bags:
        raise ValueError(
            f"the network of {trained.path} was trained on features of tiles (data=bags): give "
            "features=DIR, computed from these slides by the same encoder"
        )
    if config.shards is not None:
        return _jobs_of_shards(config, trained, Path(config.shards).expanduser())
    if config.volumes is not None:
        _check_dims(trained, volumes=True, given=f"volumes={config.volumes}")
        volumes = volume_names(volume_paths(config.volumes)).items()
        return [
            _Job(name, _key(config, trained, path), partial(volume_input, path, name, trained))
            for path, name in volumes
        ], True
    _check_dims(trained, volumes=False, given=f"slides={config.slides}")
    cutting = cutting_of(config, trained)
    return [
        _Job(name, _key(config, trained, path, cutting), partial(slide_input, path, name, cutting))
        for path, name in slide_names(slide_paths(config.slides)).items()
    ], cutting.whole


def _jobs_of_shards(config: DictConfig, trained: Trained, folder: Path) -> tuple[list[_Job], bool]:
    dataset = ShardDataset(folder, config.split, whole=False)
    key = _key(config, trained, folder / "manifest.json")
    _check_dims(trained, volumes=dataset.kind == "volumes", given=f"shards={folder}")
    if dataset.kind == "volumes":
        return [
            _Job(name, key, partial(shard_volume_input, dataset, number, name, trained))
            for number, name in named_samples(dataset)
        ], True
    maps = trained.task == "segmentation"
    found = shard_inputs(dataset, trained.image_size, maps=maps)
    jobs = [_Job(one.name, key, partial(_known, one)) for one in found]
    return jobs, any(one.whole for one in found)


def _key(
    config: DictConfig, trained: Trained, path: Path, cutting: BatchCutting | None = None
) -> str:
    given: Any = OmegaConf.to_container(config, resolve=True)
    settings = {key: given[key] for key in _SETTINGS}
    how = None if cutting is None else cutting.key()
    return key_of([trained.digest, settings, how], path)


def _replica(config: DictConfig, trained: Trained, world: Communicator) -> tuple[Team, DictConfig]:
    """Whole images are predicted one at a time, so each data replica predicts other slides.

    Returns:
        This rank's team, and the configuration of its ranks.
    """
    placement = placement_of(config.parallel, len(trained.image_size))
    if placement.data == 1:
        return Team(world), config
    placement = placed_by_nodes(placement, Nodes(world).of)
    number = placement.positions(world.rank)[0].replica
    config = config.copy()
    config.parallel.data = 1
    return Team(world.subset(placement.replica_ranks(number)), number, placement.data), config


class _ImageWork:
    """Prediction of images; construction is collective over the ranks of a team.

    Args:
        shown: indices of the classes whose maps are drawn.
    """

    def __init__(
        self,
        trained: Trained,
        config: DictConfig,
        run_dir: Path,
        ranks: Communicator,
        shown: Sequence[int],
    ) -> None:
        self._trained, self._config, self._run_dir = trained, config, run_dir
        self._ranks, self._shown = ranks, shown
        self._runner = Runner(trained, config, ranks)

    def known(self, job: _Job) -> SlideResult | None:
        if self._config.overwrite:
            return None
        return known_result(self._run_dir, job.name, job.key, self._trained)

    def open(self, job: _Job) -> Input:
        return job.find()

    def failed(self, job: _Job, given: Input | None, error: Exception) -> SlideResult:
        # before it is opened, errors name options of the tiling command
        problem = _in_keys(problem_of(error)) if given is None else str(error)
        return SlideResult(SlideReport(job.name, problem=problem, failed=True))

    def run(self, job: _Job, given: Input) -> SlideResult | None:
        try:
            return self._predicted(given, job.key)
        finally:
            if isinstance(given.source, SlideImages):
                given.source.close()

    def _predicted(self, given: Input, key: str) -> SlideResult | None:
        """The result of a slide, on the first rank of the team."""
        if given.remark and self._ranks.rank == 0:
            log.warning("%s: %s", given.name, given.remark)
        config, trained = self._config, self._trained
        outcome = self._runner.run(given)
        confusion = confusion_of(self._ranks, given, outcome.pieces, len(trained.classes))
        files: Sequence[str] = []
        if config.maps and trained.task != "regression":
            where = MapFolder(self._run_dir, given.name)
            classes = MapClasses(trained.task, trained.classes, self._shown)
            if isinstance(given.source, VolumeImages):
                save_volume_maps(where, given, outcome, classes, self._ranks)
            else:
                ending, store = GEOJSON[config.geojson], bool(config.spatialdata)
                save_maps(where, given, outcome, classes, self._ranks, ending, store=store)
            files = where.files
        if outcome.values is None:
            return None
        record = _record(given, outcome, key, files, confusion)
        if outcome.problem:
            left_out = counted(record.left_out, "tile")
            log.warning("%s: %s could not be read: %s", given.name, left_out, outcome.problem)
        if given.slide is not None or not record.left_out:
            record.save(self._run_dir)
        return result_of(record, trained, given.remark)


def _log_report(report: SlideReport, kind: str) -> None:
    if report.problem:
        log.warning("%s", report.problem)
        return
    tiles = "" if kind == "volumes" else f"{counted(report.tiles, 'tile')}, "
    log.info("%s: %s%s %.3f", report.name, tiles, report.predicted, report.value)


def _in_keys(text: str) -> str:
    """Replace options of the tiling command in its error message by keys of this command."""
    text = text.replace(", or a column mpp of the labels", "").replace("--edge pad", "edge=pad")
    return re.sub(r"--([a-z]+(?:-[a-z]+)*)", lambda m: m[1].replace("-", "_") + "=...", text)


def _known(given: Input) -> Input:
    return given


def _check_dims(trained: Trained, *, volumes: bool, given: str) -> None:
    """Check that the images have the dims that the network takes.

    Raises:
        ValueError: they do not.
    """
    if volumes == trained.takes_volumes:
        return
    has, takes = ("volumes", "images") if volumes else ("images", "volumes")
    remedy = "volumes=" if trained.takes_volumes else "slides="
    raise ValueError(
        f"{given} has {has}, but the network of {trained.path} was trained on {takes} of "
        f"{by(trained.image_size)}: give {takes} by {remedy}..., or a data set of them"
    )


def _check_maps(config: DictConfig, trained: Trained) -> None:
    """Check that the requested maps exist for the task.

    Raises:
        ValueError: they do not.
    """
    if config.activation and trained.task not in ("classification", "multilabel"):
        raise ValueError(
            "activation=true needs task=classification or multilabel, but the network of "
            f"{trained.path} was trained with task={trained.task}: leave it out"
        )
    if config.spatialdata and trained.task == "regression":
        raise ValueError(
            "spatialdata=true stores maps of slides, but the network of "
            f"{trained.path} was trained with task=regression, which has none: leave it out"
        )
    if config.maps and trained.task == "regression":
        log.info("task=regression has no maps: predictions are written to tables only")


def _shown(config: DictConfig, trained: Trained) -> list[int]:
    """Indices of the classes whose maps are drawn.

    Raises:
        ValueError: the network has no such class.
    """
    if config.classes is None:
        return list(range(len(trained.classes)))
    for name in config.classes:
        if str(name) not in trained.classes:
            raise ValueError(
                f"classes={list(config.classes)}: the network has no class {name}, only "
                f"{', '.join(trained.classes)}"
            )
    return [trained.classes.index(str(name)) for name in config.classes]


def _record(
    given: Input, outcome: SlideOutput, key: str, files: Sequence[str], confusion: Counts | None
) -> PredictionRecord:
    assert outcome.values is not None
    kept = np.asarray(outcome.kept, np.int64)
    places = np.asarray(given.places, np.int64)[kept]
    values = outcome.values.numpy()
    left_out = len(given.places) - len(kept)
    return PredictionRecord(
        *(given.name, key, places, given.span, values, left_out, files),
        labels=[given.labels[number] for number in outcome.kept] if given.labels else [],
        confusion=confusion,
        region_of=given.region_of,
        samples=[given.samples[number] for number in outcome.kept] if given.samples else [],
    )
