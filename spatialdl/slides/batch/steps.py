"""The steps in which a slide is cut: planned, its parts cut, finished. Each may be done elsewhere.

What comes out depends on the slide and on the options alone: a part is as large as a shard may be,
whoever cuts it.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from spatialdl.data.format import stored_bytes
from spatialdl.slides.batch.choosing import Choosing
from spatialdl.slides.batch.coords import save_coords
from spatialdl.slides.batch.identity import slide_key
from spatialdl.slides.batch.keeping import PICTURES, taken_over
from spatialdl.slides.batch.labels import SlideLabel
from spatialdl.slides.batch.parts import Cutting, cut_part, small_tiles
from spatialdl.slides.batch.picture import save_overview, save_picture
from spatialdl.slides.batch.preview import Preview, preview_name
from spatialdl.slides.batch.record import PARTS, Part, Record, load_part
from spatialdl.slides.batch.report import Report
from spatialdl.slides.cutting.stains import Colours
from spatialdl.slides.cutting.tiling import TilePlan, plan_tiles
from spatialdl.slides.reading.reader import Slide
from spatialdl.slides.reading.resolution import Wanted

_OVERVIEW = "overview.png"
_PLACES = 4096  # in a part of which nothing is written
_LOOKED_AT = 64  # pixels along a side, where only the places of tiles are wanted


@dataclass(frozen=True)
class Task:
    """A slide to be cut: where it is, what it is called, what is known of it, and its length."""

    path: Path
    name: str
    label: SlideLabel | None
    bytes: int


@dataclass(frozen=True)
class Batch:
    """What is asked of all slides.

    Attributes:
        options: of the command.
        choosing: what they mean for a slide.
        settings: those that decide on tiles.
        classes: that labels are indices into.
        folder: where the batch is built; None where nothing is to be written.
        target: where it will be.
        before: an earlier one, made with the same settings, from which slides are taken over.
        native: tiles are read without openslide where that gives the same pixels.
    """

    options: argparse.Namespace
    choosing: Choosing
    settings: dict[str, object]
    classes: list[str]
    folder: Path | None
    target: Path
    before: Path | None
    native: bool = True


@dataclass
class Planned:
    """A slide that was looked at.

    Attributes:
        key: by which it is known again.
        report: what is known so far.
        size: rows and columns at level 0.
        plan: of its tiles, without them; None where the slide was done before.
        parts: the tiles, in parts.
        own: colours of the slide; see `Choosing.own_colours`.
        zoom: pixels of its picture per level-0 pixel.
    """

    key: str
    report: Report
    size: tuple[int, int]
    plan: TilePlan | None = None
    parts: list[TilePlan] = field(default_factory=list)
    own: Colours | str | None = None
    zoom: float = 1.0

    @property
    def tiles(self) -> int:
        """Tiles to be looked at."""
        return sum(len(part.places) for part in self.parts)

    def outline(self) -> Planned:
        """The same without the tiles, small enough to be sent around."""
        return replace(self, parts=[])


def plan_slide(batch: Batch, task: Task) -> Planned:
    """Look at a slide: whether it is done, else which tiles are to be cut.

    Raises:
        SlideError: it cannot be used.
    """
    started, options = time.monotonic(), batch.options
    with _opened(batch, task) as slide:
        beside = batch.choosing.beside(task.path)
        key = slide_key(slide, task.name, task.label, batch.settings, beside)
        record = taken_over(batch.folder, batch.before, task.name, task.path, key)
        if record is not None:
            return Planned(key, Report.from_json(record.report), slide.size)
        regions = batch.choosing.regions(slide)
        plan = plan_tiles(
            slide,
            options.tile_size,
            Wanted(options.mpp, options.mag, options.level),
            options.min_tissue,
            overlap=options.overlap,
            finder=batch.choosing.finder(slide),
            regions=regions,
        )
        report = Report(task.name, file=str(task.path), mpp=slide.known_mpp, remark=slide.remark)
        report.in_grid, report.with_tissue = plan.in_grid, plan.with_tissue
        report.unannotated, report.note = plan.unannotated, plan.reason
        planned = Planned(key, report, slide.size, plan.part(0, 0))
        planned.own = batch.choosing.own_colours(slide, plan)
        at_once = _places_in_a_part(options)
        for first in range(0, len(plan.places), at_once):
            planned.parts.append(plan.part(first, first + at_once))
        if batch.folder is not None:
            folder = batch.folder / PARTS / task.name
            folder.mkdir(parents=True, exist_ok=True)
            planned.zoom = save_overview(
                folder / _OVERVIEW, plan.thumbnail, plan.tissue, regions or ()
            )
    report.seconds = time.monotonic() - started
    return planned


def cut_slide(batch: Batch, task: Task, planned: Planned, number: int, tiles: TilePlan) -> Part:
    """Cut part `number` of a slide, unless that was done before.

    Raises:
        SlideError: its stains are to be normalised and cannot be.
    """
    assert batch.folder is not None
    folder = _at(batch.folder / PARTS / task.name, number)
    part = load_part(folder, planned.key)
    if part is not None:
        return part
    cutting = Cutting(
        batch.choosing,
        batch.classes,
        task.name,
        task.label,
        planned.own,
        Preview(planned.size),
        _side(batch.options),
    )
    with _opened(batch, task) as slide:
        return cut_part(slide, tiles, cutting, folder, planned.key)


def finish_slide(batch: Batch, task: Task, planned: Planned, parts: list[Part]) -> Report:
    """Draw the pictures of a slide, and note that it is done."""
    assert batch.folder is not None
    assert planned.plan is not None
    started, report, folder = time.monotonic(), planned.report, batch.folder
    cut = folder / PARTS / task.name
    dropped = [place for part in parts for at in part.dropped.values() for place in at]
    unreadable = [place for part in parts for place in part.unreadable]
    taken = [(x, y) for part in parts for x, y, _ in part.taken]
    for part in parts:
        report.with_tissue -= part.bare
        for name, at in part.dropped.items():
            setattr(report, name, getattr(report, name) + len(at))
        if part.unreadable:
            report.failed, report.note = True, part.problem
        report.seconds += part.seconds
    report.written, report.unreadable = len(taken), len(unreadable)
    if not taken and not report.note:
        report.note = "filters dropped every tile" if dropped else "no tissue found"
    (folder / PICTURES).mkdir(exist_ok=True)
    picture = folder / PICTURES / f"{task.name}.png"
    step = planned.plan.step
    save_picture(picture, cut / _OVERVIEW, planned.zoom, (step, step), taken, unreadable, dropped)
    if taken:
        preview = Preview(planned.size)
        for number, part in enumerate(parts):
            if part.taken:
                tiles = small_tiles(_at(cut, number), step)
                for (x, y, _), small in zip(part.taken, tiles, strict=True):
                    preview.paste(x, y, small)
        preview.save(folder / PICTURES / preview_name(task.name))
    files = []
    if batch.options.format == "coords" and taken:
        with _opened(batch, task) as slide:
            files = save_coords(folder, batch.target, slide, task.name, planned.plan, taken)
    for number, part in enumerate(parts):
        if part.shard is not None:
            path = _at(Path(PARTS, task.name), number) / part.shard.file
            part.shard = replace(part.shard, file=str(path))
    report.seconds += time.monotonic() - started
    split = task.label.split if task.label else None
    source = str(task.path.resolve())
    Record(planned.key, source, split, parts, files, None, report.to_json()).save(folder, task.name)
    return report


def _opened(batch: Batch, task: Task) -> Slide:
    given = task.label.mpp if task.label else None
    return Slide(task.path, given or batch.options.slide_mpp, native=batch.native)


def _at(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}"


def _side(options: argparse.Namespace) -> int | None:
    """How many pixels tiles are looked at with where they are not written; all if filtered."""
    if options.format != "coords":
        return None
    side: int = options.tile_size
    return side if options.filter else min(side, _LOOKED_AT)


def _places_in_a_part(options: argparse.Namespace) -> int:
    if options.format == "coords":
        return _PLACES
    side = options.tile_size
    return max(1, int(options.shard_size) // stored_bytes(side, side, 3))
