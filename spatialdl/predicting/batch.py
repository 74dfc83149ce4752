"""All slides of a command, one after the other: predicted, written, or reported as failed."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from omegaconf import DictConfig, OmegaConf

from spatialdl.comm import check
from spatialdl.comm.communicator import Communicator
from spatialdl.data.shards import ShardDataset
from spatialdl.errors import SlideError
from spatialdl.parallel.layout import by
from spatialdl.predicting.checks import check_whole
from spatialdl.predicting.cutting import Cutting, cutting_of
from spatialdl.predicting.given import given_slides, given_volumes, volume_names
from spatialdl.predicting.inputs import Input, SlideImages, named_samples, shard_inputs, slide_input
from spatialdl.predicting.records import Record, key_of
from spatialdl.predicting.report import Report, table
from spatialdl.predicting.results import Maps
from spatialdl.predicting.running import Outcome, Runner
from spatialdl.predicting.tables import save_tables
from spatialdl.predicting.trained import Trained, find_trained
from spatialdl.predicting.volume_inputs import (
    VolumeImages,
    shard_volume_input,
    volume_input,
)
from spatialdl.predicting.volume_results import VolumeMaps
from spatialdl.slides.batch.finding_slides import slide_names
from spatialdl.text import counted
from spatialdl.training.layouts import placement_of

log = logging.getLogger("spatialdl.predict")


def run(config: DictConfig, run_dir: Path, world: Communicator) -> bool:
    """Predict all slides; every rank of the world calls it.

    Returns:
        Whether there are predictions for all of them.

    Raises:
        ValueError: if the configuration does not fit the checkpoint or the data.
    """
    check.enable(bool(config.comm.check))
    return _Batch(config, world.bcast(run_dir), world).run()


@dataclass(frozen=True)
class _Todo:
    """A slide, how its images are found on rank 0, and what they are made of."""

    name: str
    key: str
    find: Callable[[], Input]


class _Batch:
    def __init__(self, config: DictConfig, run_dir: Path, world: Communicator) -> None:
        self._config, self._run_dir, self._world = config, run_dir, world
        self._trained = trained = find_trained(str(config.ckpt_path), world)
        _check_drawn(config, trained)
        self._shown = _shown(config, trained)
        self._runner = Runner(trained, config, world)
        self._reports: list[Report] = []
        self._records: list[Record] = []

    def run(self) -> bool:
        trained = self._trained
        log.info("the network of %s, step %d, task=%s", trained.path, trained.step, trained.task)
        for todo in self._todo():
            self._one(todo)
        if self._world.rank == 0:
            classes, kind = trained.classes, str(self._config.table)
            paths = save_tables(
                self._run_dir, self._records, self._reports, classes, trained.task, kind
            )
            print(table(self._reports))
            log.info("written: %s", ", ".join(map(str, paths)))
        return not any(report.failed for report in self._reports)

    # --- what there is to do

    def _todo(self) -> Iterator[_Todo]:
        config, trained = self._config, self._trained
        if config.shards is not None:
            yield from self._of_shards(Path(config.shards).expanduser())
            return
        if config.volumes is not None:
            _check_dims(trained, volumes=True, given=f"volumes={config.volumes}")
            self._check_whole()
            for path, name in volume_names(given_volumes(config.volumes)).items():
                yield _Todo(name, self._key(None, path), partial(volume_input, path, name, trained))
            return
        _check_dims(trained, volumes=False, given=f"slides={config.slides}")
        cutting = cutting_of(config, trained)
        if cutting.whole:
            self._check_whole()
        slides = given_slides(config.slides)
        for path, name in slide_names(slides).items():
            yield _Todo(name, self._key(cutting, path), partial(slide_input, path, name, cutting))

    def _of_shards(self, folder: Path) -> Iterator[_Todo]:
        trained = self._trained
        dataset = ShardDataset(folder, self._config.split, whole=False)
        key = self._key(None, folder / "manifest.json")
        _check_dims(trained, volumes=dataset.kind == "volumes", given=f"shards={folder}")
        if dataset.kind == "volumes":
            self._check_whole()
            for number, name in named_samples(dataset):
                yield _Todo(name, key, partial(shard_volume_input, dataset, number, name, trained))
            return
        maps = trained.task == "segmentation"
        found = shard_inputs(dataset, trained.image_size, maps=maps)
        if any(one.whole for one in found):
            self._check_whole()
        for one in found:
            yield _Todo(one.name, key, partial(_known, one))

    def _check_whole(self) -> None:
        parallel = self._config.parallel
        check_whole(placement_of(parallel), int(parallel.microbatches))

    def _key(self, cutting: Cutting | None, path: Path) -> str:
        config = self._config
        chosen = ("average", "maps", "activation", "classes", "precision", "split")
        asked = {key: OmegaConf.to_container(config, resolve=True)[key] for key in chosen}  # type: ignore[call-overload,index]
        try:
            how = None if cutting is None else cutting.key()
            return key_of([self._trained.digest, asked, how], path)
        except OSError as error:
            return f"{path}: {error.strerror}"  # told when it is opened

    # --- one slide

    def _one(self, todo: _Todo) -> None:
        record = problem = given = None
        if self._world.rank == 0:
            if not self._config.overwrite:
                record = Record.load(self._run_dir, todo.name, todo.key)
            if record is None:
                try:
                    given = todo.find()
                except (SlideError, OSError) as error:
                    problem = _in_keys(str(error))
        done, problem, given = self._world.bcast((record is not None, problem, given))
        if done:
            log.info("%s is done already; overwrite=true predicts it again", todo.name)
        elif given is not None:
            try:
                record = self._predicted(given, todo.key)
            except SlideError as error:  # the same on all ranks
                problem = str(error)
            finally:
                if isinstance(given.source, SlideImages):
                    given.source.close()
        if problem is not None:
            if self._world.rank == 0:
                log.warning("%s", problem)
            self._reports.append(Report(todo.name, problem=problem, failed=True))
        elif record is not None:
            report = _report(record, self._trained, "" if given is None else given.remark)
            self._records.append(record)
            self._reports.append(report)
            told = counted(report.tiles, "tile"), report.predicted, report.value
            log.info("%s: %s, %s %.3f", todo.name, *told)

    def _predicted(self, given: Input, key: str) -> Record | None:
        """What is known of a slide in the end, on rank 0."""
        if given.remark and self._world.rank == 0:
            log.warning("%s: %s", given.name, given.remark)
        outcome = self._runner.run(given)
        files: Sequence[str] = []
        if self._config.maps and self._trained.task != "regression":
            of_volumes = isinstance(given.source, VolumeImages)
            writer = VolumeMaps if of_volumes else Maps
            if self._trained.task == "segmentation" or not of_volumes:
                maps = writer(self._run_dir, given, self._trained, self._shown, self._world)
                files = maps.save(outcome)
        if outcome.values is None:
            return None
        record = _record(given, outcome, key, files)
        if outcome.problem:
            left_out = counted(record.left_out, "tile")
            log.warning("%s: %s could not be read: %s", given.name, left_out, outcome.problem)
        if given.slide is not None or not record.left_out:
            record.save(self._run_dir)
        return record


def _in_keys(text: str) -> str:
    """An error of the tiling command, with the keys of this one in place of its options."""
    text = text.replace(", or a column mpp of the labels", "").replace("--edge pad", "edge=pad")
    return re.sub(r"--([a-z]+(?:-[a-z]+)*)", lambda m: m[1].replace("-", "_") + "=...", text)


def _known(given: Input) -> Input:
    return given


def _check_dims(trained: Trained, *, volumes: bool, given: str) -> None:
    """Refuse images of other dims than the network takes.

    Raises:
        ValueError: naming both.
    """
    if volumes == trained.takes_volumes:
        return
    has, takes = ("volumes", "images") if volumes else ("images", "volumes")
    remedy = "volumes=" if trained.takes_volumes else "slides="
    raise ValueError(
        f"{given} has {has}, but the network of {trained.path} was trained on {takes} of "
        f"{by(trained.image_size)}: give {takes} by {remedy}..., or a data set of them"
    )


def _check_drawn(config: DictConfig, trained: Trained) -> None:
    """Refuse pictures that there are none of.

    Raises:
        ValueError: if they are asked for.
    """
    if config.activation and trained.takes_volumes:
        raise ValueError(
            f"activation=true draws maps over images, but the network of {trained.path} was "
            f"trained on volumes of {by(trained.image_size)}: leave it out"
        )
    if config.activation and trained.task not in ("classification", "multilabel"):
        raise ValueError(
            "activation=true shows what places give to a class of the image, but the network of "
            f"{trained.path} was trained with task={trained.task}: leave it out"
        )
    if config.maps and trained.task == "regression":
        log.info("numbers are told in tables only, task=regression has no maps")


def _shown(config: DictConfig, trained: Trained) -> list[int]:
    """The classes of which maps are drawn.

    Raises:
        ValueError: there is no such class.
    """
    if config.classes is None:
        return list(range(len(trained.classes)))
    for name in config.classes:
        if str(name) not in trained.classes:
            raise ValueError(
                f"classes={list(config.classes)}: the network knows no {name}, but "
                f"{', '.join(trained.classes)}"
            )
    return [trained.classes.index(str(name)) for name in config.classes]


def _record(given: Input, outcome: Outcome, key: str, files: Sequence[str]) -> Record:
    assert outcome.values is not None
    kept = np.asarray(outcome.kept, np.int64)
    places = np.asarray(given.places, np.int64)[kept]
    values = outcome.values.numpy()
    left_out = len(given.places) - len(kept)
    return Record(given.name, key, places, given.span, values, left_out, files)


def _report(record: Record, trained: Trained, remark: str) -> Report:
    means = record.values.mean(0)
    best = int(means.argmax())
    return Report(
        record.name,
        len(record.values),
        trained.classes[best],
        float(means[best]),
        f"{counted(record.left_out, 'tile')} could not be read" if record.left_out else remark,
        failed=record.left_out > 0,
    )
