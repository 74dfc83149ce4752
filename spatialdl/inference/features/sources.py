"""Tiles of slides and data sets, slide by slide, in pieces read by threads."""

from __future__ import annotations

import hashlib
import json
import time
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from spatialdl.data.shards import ShardDataset
from spatialdl.errors import ShardError, SlideError
from spatialdl.inference.predicting.inputs import Input, shard_inputs
from spatialdl.slides.batch.choosing import Choosing
from spatialdl.slides.batch.coords import tile_attributes
from spatialdl.slides.batch.record import PartRecord, slide_key
from spatialdl.slides.batch.report import TilingReport
from spatialdl.slides.batch.steps import Task, initial_report
from spatialdl.slides.cutting.stains import Colours
from spatialdl.slides.cutting.tiling import TilePlan, cut_tiles, plan_tiles
from spatialdl.slides.reading.reader import Slide
from spatialdl.slides.reading.wanted import Wanted

_MOST_TILES, _MOST_BYTES = 32, 8 * 2**20  # limits of a piece

Tiles = npt.NDArray[np.uint8]


@dataclass
class TilePiece:
    """A piece of a slide's tiles.

    Attributes:
        tiles: uint8 (tiles, rows, cols, 3).
        part: positions of the tiles, and why other tiles of the piece were left out.
    """

    tiles: Tiles
    part: PartRecord


@dataclass
class SlideTiles:
    """The tiles of one slide.

    Attributes:
        name: name of the slide.
        key: digest of the inputs of its features.
        report: its report so far.
        attributes: attributes of its coordinates.
        side: rows and columns of a tile.
        count: number of tiles to read.
        open_files: opens the files; the result is used by one thread at a time.
        read_tiles: reads some tiles from open files, and notes what became of each.
        idle: open files that no thread uses.
    """

    name: str
    key: str
    report: TilingReport
    attributes: Mapping[str, object]
    side: int
    count: int
    open_files: Callable[[], Any]
    read_tiles: Callable[[Any, slice, PartRecord], list[Tiles]]
    idle: SimpleQueue[Any] = field(default_factory=SimpleQueue)

    def read(self, first: int, last: int) -> TilePiece:
        """Read tiles `first` up to `last` (exclusive); thread-safe."""
        try:
            opened = self.idle.get_nowait()
        except Empty:
            opened = self.open_files()
        part, started = PartRecord(), time.monotonic()
        try:
            images = self.read_tiles(opened, slice(first, last), part)
        finally:
            self.idle.put(opened)
        part.seconds = time.monotonic() - started
        empty = np.empty((0, self.side, self.side, 3), np.uint8)
        return TilePiece(np.stack(images) if images else empty, part)

    def close(self) -> None:
        """Close files."""
        while not self.idle.empty():
            self.idle.get_nowait().close()

    def pieces(self) -> list[tuple[int, int]]:
        """First and last tile of each piece."""
        step = max(1, min(_MOST_TILES, _MOST_BYTES // (3 * self.side**2)))
        return [(k, min(k + step, self.count)) for k in range(0, self.count, step)]


class TileSource(ABC):
    """All slides of a run; cheap to pickle.

    Attributes:
        tasks: the slides, largest first.
    """

    tasks: Sequence[Task]

    @abstractmethod
    def key(self, task: Task) -> str:
        """Digest of the inputs of a slide's features.

        Raises:
            SlideError, ShardError, OSError: the slide cannot be read.
        """

    @abstractmethod
    def open(self, task: Task, key: str) -> SlideTiles:
        """Select the tiles of a slide.

        Raises:
            SlideError, ShardError, OSError: the slide is unusable.
        """


@dataclass
class SlideSource(TileSource):
    """Slides, cut as by `spatialdl-tile`.

    Attributes:
        options: options of `spatialdl-tile`.
        settings: settings on which features depend.
    """

    tasks: Sequence[Task]
    options: Namespace
    choosing: Choosing
    settings: dict[str, object]

    def key(self, task: Task) -> str:
        with self._opened(task) as slide:
            return slide_key(slide, task.name, None, self.settings, self.choosing.beside(task.path))

    def open(self, task: Task, key: str) -> SlideTiles:
        started, options = time.monotonic(), self.options
        with self._opened(task) as slide:
            plan = plan_tiles(
                slide,
                options.tile_size,
                Wanted(options.mpp, options.mag, options.level),
                options.min_tissue,
                overlap=options.overlap,
                edge=options.edge,
                finder=self.choosing.finder(slide),
                regions=self.choosing.regions(slide),
            )
            report = initial_report(task, slide, plan, options)
            report.in_grid, report.with_tissue = plan.in_grid, plan.with_tissue
            report.unannotated, report.note = plan.unannotated, plan.reason
            own = self.choosing.own_colours(slide, plan)
            if isinstance(own, str):
                raise SlideError(own)
            attributes = {**tile_attributes(slide, plan), "name": task.name}
        report.seconds = time.monotonic() - started
        return SlideTiles(
            task.name,
            key,
            report,
            attributes,
            plan.tile_size,
            len(plan.places),
            partial(self._opened, task),
            partial(_read_slide, self.choosing, plan.part(0, len(plan.places)), own),
        )

    def _opened(self, task: Task) -> Slide:
        return Slide(task.path, self.options.slide_mpp)


def _read_slide(
    choosing: Choosing,
    plan: TilePlan,
    own: Colours | None,
    opened: Slide,
    tiles: slice,
    part: PartRecord,
) -> list[Tiles]:
    images = []
    for tile in cut_tiles(opened, plan.part(tiles.start, tiles.stop)):
        place = tile.x, tile.y
        if tile.image is None:
            if tile.bare:
                part.bare += 1
            else:
                part.unreadable.append(place)
                part.problem = tile.problem
        elif refused := choosing.refused(tile.image):
            part.dropped.setdefault(refused, []).append(place)
        else:
            images.append(choosing.finished(tile.image, own))
            part.taken.append((*place, None))
    return images


@dataclass
class ShardSource(TileSource):
    """The tiles of a data set, grouped by slide.

    Attributes:
        folder: folder of the data set.
        split: split to use; None for all samples.
        settings: settings on which features depend.
    """

    folder: Path
    split: str | None
    settings: dict[str, object]
    tasks: Sequence[Task] = ()

    def __post_init__(self) -> None:
        dataset = ShardDataset(self.folder, self.split, whole=False)
        _check(dataset)
        self._dataset = dataset
        self._inputs = {one.name: one for one in shard_inputs(dataset, self._size, maps=False)}
        tasks = [
            Task(self.folder, name, None, len(one.places)) for name, one in self._inputs.items()
        ]
        self.tasks = sorted(tasks, key=lambda task: (-task.bytes, task.name))

    @property
    def side(self) -> int:
        """Rows and columns of a tile."""
        return self._size[0]

    @property
    def _size(self) -> tuple[int, int]:
        size = self._dataset.manifest.tile_size
        assert size is not None  # data sets of tiles have one
        return size

    def key(self, task: Task) -> str:
        shards = self._dataset.manifest.shards
        samples: Any = map(self._dataset.sample, self.numbers(task.name))  # tiles, as checked
        where = [(shards[one.shard].sha256, one.index, one.x, one.y) for one in samples]
        text = json.dumps([task.name, where, self.settings], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def open(self, task: Task, key: str) -> SlideTiles:
        found = self._inputs[task.name]
        count = len(found.places)
        report = TilingReport(task.name, in_grid=count, with_tissue=count, mpp=found.mpp)
        report.file = str(self.folder)
        attributes = _set_attributes(found, self._dataset.manifest.made_with, self.side)
        return SlideTiles(
            task.name,
            key,
            report,
            attributes,
            self.side,
            count,
            partial(ShardDataset, self.folder, self.split, whole=False),
            partial(_read_shards, self.numbers(task.name)),
        )

    def numbers(self, name: str) -> Sequence[int]:
        """Sample indices of a slide."""
        found: Sequence[int] = self._inputs[name].source.numbers  # type: ignore[attr-defined]
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardSource, (self.folder, self.split, self.settings)


def _read_shards(
    numbers: Sequence[int], opened: ShardDataset, tiles: slice, part: PartRecord
) -> list[Tiles]:
    images = []
    for number in numbers[tiles]:
        sample = opened.sample(number)
        place = sample.x, sample.y
        try:
            images.append(opened.read(number))
        except ShardError as error:
            part.unreadable.append(place)
            part.problem = str(error)
        else:
            part.taken.append((*place, None))
    return images


def _check(dataset: ShardDataset) -> None:
    """Check that encoders support a data set.

    Raises:
        ValueError: its samples are not square RGB tiles of uint8.
    """
    if dataset.kind != "tiles":
        raise ValueError(
            f"data set {dataset.path} has {dataset.kind}, but features need tiles: cut slides by "
            "spatialdl-tile --tile-size N, or give the slides"
        )
    if dataset.channels != 3 or dataset.dtype != np.uint8:
        raise ValueError(
            f"data set {dataset.path} has {dataset.channels} channels of {dataset.dtype}, but "
            "encoders take 3 of uint8"
        )
    rows, cols = dataset.manifest.tile_size or (0, 0)
    if rows != cols:
        raise ValueError(f"data set {dataset.path} has tiles of {rows} x {cols}, expected squares")


def _set_attributes(found: Input, made_with: Mapping[str, Any], side: int) -> dict[str, object]:
    """Attributes of the coordinates of a data set's tiles."""
    attributes: dict[str, object] = {"patch_size": side, "name": found.name}
    if found.span is not None:
        attributes["patch_size_level0"] = round(found.span[0])
    for key, name, kinds in (
        ("overlap", "overlap", int),
        ("level", "patch_level", int),
        ("mag", "target_magnification", (int, float)),
    ):
        if isinstance(made_with.get(key), kinds):
            attributes[name] = made_with[key]
    return attributes
