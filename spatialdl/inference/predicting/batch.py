"""Prediction of all slides of a command, one after the other."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from spatialdl.comm import check
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.processes import Nodes
from spatialdl.common.text import counted
from spatialdl.data.shards import ShardDataset
from spatialdl.errors import SlideError
from spatialdl.inference.predicting.checks import GEOJSON
from spatialdl.inference.predicting.cutting import BatchCutting, cutting_of
from spatialdl.inference.predicting.inputs import (
    Input,
    SlideImages,
    named_samples,
    shard_inputs,
    slide_input,
)
from spatialdl.inference.predicting.pieces import Counts, confusion_of
from spatialdl.inference.predicting.records import (
    PredictionRecord,
    SlideReport,
    key_of,
    save_tables,
    table,
)
from spatialdl.inference.predicting.results import Maps
from spatialdl.inference.predicting.running import Runner, SlideOutput
from spatialdl.inference.predicting.slide_paths import slide_paths, volume_names, volume_paths
from spatialdl.inference.predicting.trained import Trained, find_trained
from spatialdl.inference.predicting.volume_inputs import (
    VolumeImages,
    shard_volume_input,
    volume_input,
)
from spatialdl.inference.predicting.volume_results import VolumeMaps
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
    if config.features is not None:
        from spatialdl.inference.predicting.bag_run import run as run_bags

        return run_bags(config, run_dir, world)
    check.enable(bool(config.comm.check))
    return _Batch(config, world.bcast(run_dir), world).run()


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


@dataclass(frozen=True)
class _Team:
    """A group of ranks that predicts one slide at a time.

    Attributes:
        number: index of the team, below `count`.
        ranks: communicator of the team.
        config: configuration of the command for these ranks.
    """

    number: int
    count: int
    ranks: Communicator
    config: DictConfig


class _Batch:
    def __init__(self, config: DictConfig, run_dir: Path, world: Communicator) -> None:
        self._config, self._run_dir, self._world = config, run_dir, world
        self._trained = trained = find_trained(str(config.ckpt_path), world)
        if trained.takes_bags:
            raise ValueError(
                f"the network of {trained.path} was trained on features of tiles (data=bags): give "
                "features=DIR, computed from these slides by the same encoder"
            )
        _check_maps(config, trained)
        self._shown = _shown(config, trained)
        jobs, single_images = self._jobs()
        team = _replica(config, trained, world) if single_images else _Team(0, 1, world, config)
        self._rounds = [
            jobs[first : first + team.count] for first in range(0, len(jobs), team.count)
        ]
        self._team, self._ranks = team, team.ranks
        self._runner = Runner(trained, team.config, team.ranks)

    def run(self) -> bool:
        """Teams synchronise after each slide, so no team waits longer than one slide takes."""
        trained = self._trained
        log.info("the network of %s, step %d, task=%s", trained.path, trained.step, trained.task)
        reports: list[SlideReport] = []
        records: list[PredictionRecord] = []
        for jobs in self._rounds:
            for report, record in self._round(jobs):
                _log_report(report, volume=trained.takes_volumes)
                reports.append(report)
                records += [] if record is None else [record]
        if self._world.rank == 0:
            classes, kind = trained.classes, str(self._config.table)
            volumes, task = trained.takes_volumes, trained.task
            paths = save_tables(
                self._run_dir, records, reports, classes, task, kind, volumes=volumes
            )
            print(table(reports, volumes=volumes))
            log.info("written: %s", ", ".join(map(str, paths)))
        return bool(self._world.bcast(not any(report.failed for report in reports)))

    def _round(self, jobs: Sequence[_Job]) -> list[tuple[SlideReport, PredictionRecord | None]]:
        """The results of one slide of each team, on rank 0."""
        results = [(self._team.number, self._one(one)) for one in jobs[self._team.number :][:1]]
        gathered = self._world.gather(results if self._ranks.rank == 0 else []) or []
        pairs = sorted(chain.from_iterable(gathered), key=itemgetter(0))
        return [result for _, result in pairs]

    # --- slides of the command

    def _jobs(self) -> tuple[list[_Job], bool]:
        """All slides, and whether any of them is a single image."""
        config, trained = self._config, self._trained
        if config.shards is not None:
            return self._of_shards(Path(config.shards).expanduser())
        if config.volumes is not None:
            _check_dims(trained, volumes=True, given=f"volumes={config.volumes}")
            volumes = volume_names(volume_paths(config.volumes)).items()
            return [
                _Job(name, self._key(None, path), partial(volume_input, path, name, trained))
                for path, name in volumes
            ], True
        _check_dims(trained, volumes=False, given=f"slides={config.slides}")
        cutting = cutting_of(config, trained)
        slides = slide_names(slide_paths(config.slides)).items()
        return [
            _Job(name, self._key(cutting, path), partial(slide_input, path, name, cutting))
            for path, name in slides
        ], cutting.whole

    def _of_shards(self, folder: Path) -> tuple[list[_Job], bool]:
        trained = self._trained
        dataset = ShardDataset(folder, self._config.split, whole=False)
        key = self._key(None, folder / "manifest.json")
        _check_dims(trained, volumes=dataset.kind == "volumes", given=f"shards={folder}")
        if dataset.kind == "volumes":
            return [
                _Job(name, key, partial(shard_volume_input, dataset, number, name, trained))
                for number, name in named_samples(dataset)
            ], True
        maps = trained.task == "segmentation"
        found = shard_inputs(dataset, trained.image_size, maps=maps)
        single_images = any(one.whole for one in found)
        return [_Job(one.name, key, partial(_known, one)) for one in found], single_images

    def _key(self, cutting: BatchCutting | None, path: Path) -> str:
        given: Any = OmegaConf.to_container(self._config, resolve=True)
        settings = {key: given[key] for key in _SETTINGS}
        try:
            how = None if cutting is None else cutting.key()
            return key_of([self._trained.digest, settings, how], path)
        except OSError as error:
            return f"{path}: {error.strerror}"  # reported when it is opened

    # --- one slide

    def _one(self, job: _Job) -> tuple[SlideReport, PredictionRecord | None]:
        """The result of a slide, on the first rank of its team."""
        record = problem = given = None
        if self._ranks.rank == 0:
            if not self._config.overwrite:
                record = PredictionRecord.load(self._run_dir, job.name, job.key)
            if record is None:
                try:
                    given = job.find()
                except (SlideError, OSError) as error:
                    problem = _in_keys(str(error))
        done, problem, given = self._ranks.bcast((record is not None, problem, given))
        if done:
            log.info("%s is already predicted; overwrite=true predicts it again", job.name)
        elif given is not None:
            try:
                record = self._predicted(given, job.key)
            except SlideError as error:  # the same on all ranks
                problem = str(error)
            finally:
                if isinstance(given.source, SlideImages):
                    given.source.close()
        if problem is not None or record is None:
            return SlideReport(job.name, problem=problem or "", failed=True), None
        return _report(record, self._trained, "" if given is None else given.remark), record

    def _predicted(self, given: Input, key: str) -> PredictionRecord | None:
        """The record of a slide, on the first rank of its team."""
        if given.remark and self._ranks.rank == 0:
            log.warning("%s: %s", given.name, given.remark)
        outcome = self._runner.run(given)
        classes = len(self._trained.classes)
        confusion = confusion_of(self._ranks, given, outcome.pieces, classes)
        files: Sequence[str] = []
        if self._config.maps and self._trained.task != "regression":
            words = self._run_dir, given, self._trained, self._shown, self._ranks
            if isinstance(given.source, VolumeImages):
                files = VolumeMaps(*words).save(outcome)
            else:
                ending, store = GEOJSON[self._config.geojson], bool(self._config.spatialdata)
                files = Maps(*words, ending, store).save(outcome)
        if outcome.values is None:
            return None
        record = _record(given, outcome, key, files, confusion)
        if outcome.problem:
            left_out = counted(record.left_out, "tile")
            log.warning("%s: %s could not be read: %s", given.name, left_out, outcome.problem)
        if given.slide is not None or not record.left_out:
            record.save(self._run_dir)
        return record


def _replica(config: DictConfig, trained: Trained, world: Communicator) -> _Team:
    """Whole images are predicted one at a time, so each data replica predicts other slides."""
    placement = placement_of(config.parallel, len(trained.image_size))
    if placement.data == 1:
        return _Team(0, 1, world, config)
    placement = placed_by_nodes(placement, Nodes(world).of)
    number = placement.positions(world.rank)[0].replica
    config = config.copy()
    config.parallel.data = 1
    return _Team(number, placement.data, world.subset(placement.replica_ranks(number)), config)


def _log_report(report: SlideReport, *, volume: bool) -> None:
    if report.problem:
        log.warning("%s", report.problem)
        return
    tiles = "" if volume else f"{counted(report.tiles, 'tile')}, "
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


def _report(record: PredictionRecord, trained: Trained, remark: str) -> SlideReport:
    means = record.values.mean(0)
    best = int(means.argmax())
    return SlideReport(
        record.name,
        len(record.values),
        trained.classes[best],
        float(means[best]),
        f"{counted(record.left_out, 'tile')} could not be read" if record.left_out else remark,
        failed=record.left_out > 0,
    )
