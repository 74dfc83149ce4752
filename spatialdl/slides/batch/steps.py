"""The three steps of cutting a slide: plan it, cut its parts, finish it.

Each step may run in another process. The output depends on the slide and the options alone, not on
the number of processes: a part is at most as large as a shard.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import floor
from pathlib import Path

from spatialdl.data.format import CHUNK, stored_bytes
from spatialdl.data.samples import RegionSample
from spatialdl.slides.batch.assembly import save_coords
from spatialdl.slides.batch.choosing import NATIVE, Choosing
from spatialdl.slides.batch.finding_slides import SlideLabel
from spatialdl.slides.batch.parts import (
    BandPart,
    Cutting,
    PartPieces,
    TilePart,
    bands_of,
    cut_part,
    native_grid,
    native_region,
)
from spatialdl.slides.batch.record import (
    PARTS,
    PICTURES,
    PartRecord,
    SlideRecord,
    find_done,
    load_part,
    slide_content,
    slide_key,
)
from spatialdl.slides.batch.report import TilingReport
from spatialdl.slides.batch.report_page import (
    PREVIEW,
    preview_name,
    save_overview,
    save_picture,
    save_preview,
)
from spatialdl.slides.cutting.stains import Colours
from spatialdl.slides.cutting.tiling import TilePlan, outside_remark, plan_whole
from spatialdl.slides.reading.paths import slide_source
from spatialdl.slides.reading.reader import Slide

_OVERVIEW = "overview.bmp"  # temporary, so not compressed
_ALL = 99.5  # percent of tissue from which a slide counts as all tissue
_PLACES, _PLACE = 4096, 16  # tiles of a part with --format coords, and bytes of each


@dataclass(frozen=True)
class Task:
    """A slide to be cut: its path, name and label, and the length of its files."""

    path: Path
    name: str
    label: SlideLabel | None
    bytes: int


@dataclass(frozen=True)
class BatchRequest:
    """Parameters of a batch, the same for all slides.

    Attributes:
        options: of the command line.
        choosing: applies the options to a slide.
        settings: options that determine the tiles.
        classes: class names; labels are indices into them.
        target: the final folder.
        before: an earlier batch with the same settings, whose slides are reused.
        built_in: where the batch is built; None for a dry run.
    """

    options: argparse.Namespace
    choosing: Choosing
    settings: dict[str, object]
    classes: list[str]
    target: Path
    before: Path | None
    built_in: Path | None = None

    @property
    def folder(self) -> Path:
        """Where the batch is built, if this is not a dry run."""
        assert self.built_in is not None
        return self.built_in


@dataclass
class Planned:
    """The plan of a slide.

    Attributes:
        key: digest of its contents and settings.
        report: so far.
        size: rows and columns at level 0.
        plan: of its tiles, without their places.
        region: with --whole.
        parts: to be cut.
        own: colours of the slide; see `Choosing.own_colours`.
        zoom: pixels of its picture per level-0 pixel.
        bytes: to be written, before compression.
    """

    key: str
    report: TilingReport
    size: tuple[int, int]
    plan: TilePlan
    region: RegionSample | None = None
    parts: Sequence[PartPieces] = field(default_factory=list)
    own: Colours | str | None = None
    zoom: float = 1.0
    bytes: int = 0

    @property
    def pieces(self) -> int:
        """Number of pieces to cut: tiles, or rows of chunks of a region."""
        return sum(part.count for part in self.parts)

    def outline(self) -> Planned:
        """Return a copy without the parts, small enough to send to workers."""
        return replace(self, parts=[])


def plan_slide(batch: BatchRequest, task: Task) -> Planned | TilingReport:
    """Plan the tiles or the region of a slide; return its report if it was done before.

    Raises:
        SlideError: the slide cannot be used.
    """
    started, options = time.monotonic(), batch.options
    with _opened(batch, task) as slide:
        beside = batch.choosing.beside(task.path)
        key = slide_key(slide, task.name, task.label, batch.settings, beside)
        record = find_done(batch.built_in, batch.before, task.name, task.path, key)
        if record is not None:
            return TilingReport.from_json(record.report)
        regions = batch.choosing.regions(slide)
        plan = batch.choosing.plan(slide, regions)
        report = initial_report(task, slide, plan, whole=options.whole)
        planned = Planned(key, report, slide.size, plan.part(0, 0))
        planned.own = batch.choosing.own_colours(slide, plan)
        (_plan_region if options.whole else _plan_tiles)(batch, task, slide, plan, planned)
        if batch.built_in is not None:
            folder = batch.folder / PARTS / task.name
            folder.mkdir(parents=True, exist_ok=True)
            overview = folder / _OVERVIEW
            planned.zoom = save_overview(overview, plan.thumbnail, plan.tissue, regions or ())
    report.seconds = time.monotonic() - started
    return planned


def initial_report(task: Task, slide: Slide, plan: TilePlan, *, whole: bool) -> TilingReport:
    """Create the report of a slide from its plan, before its tiles or its region are cut."""
    tissue = 100 * plan.tissue_part
    report = TilingReport(
        task.name,
        file=str(task.path),
        mpp=slide.known_mpp,
        tissue_percent=round(tissue, 2),
        in_grid=1,
    )
    remarks = []
    if tissue == 0 or tissue >= _ALL:
        remarks.append(
            f"{tissue:.0f}% of it was classified as tissue; if its picture shows otherwise, "
            "set --background or --mask-dir"
        )
    if not whole:
        report.in_grid, report.with_tissue = plan.in_grid, plan.with_tissue
        report.unannotated, report.note = plan.unannotated, plan.reason
        report.outside_percent = round(100 * plan.outside, 2)
        remarks.append(outside_remark(plan))
    report.remark = "; ".join(filter(None, [slide.remark, *remarks]))
    return report


def _plan_tiles(
    batch: BatchRequest, task: Task, slide: Slide, plan: TilePlan, planned: Planned
) -> None:
    options = batch.options
    each = stored_bytes((plan.tile_size, plan.tile_size), 3)
    at_once = max(1, int(options.shard_size) // each)
    if options.format == "coords":
        each, at_once = _PLACE, _PLACES
    elif options.codec == NATIVE and plan.places:
        native_grid(slide, plan)
    planned.bytes = each * len(plan.places)
    # the fewest parts that hold all tiles, of equal size, to balance the load of workers
    count = -(-len(plan.places) // at_once)
    bounds = [len(plan.places) * k // count for k in range(count + 1)] if count else []
    planned.parts = [
        TilePart(plan.part(first, last), bool(options.filter)) for first, last in pairwise(bounds)
    ]


def _plan_region(
    batch: BatchRequest, task: Task, slide: Slide, plan: TilePlan, planned: Planned
) -> None:
    options, report = batch.options, planned.report
    whole = plan_whole(slide, plan)
    if whole is None:
        report.note = "no tissue found"
        return
    report.with_tissue = 1
    multiple = CHUNK
    if options.codec == NATIVE:
        multiple = native_region(slide, whole).chunk[0]
    bands = bands_of(whole, options.stripes, options.shard_size, multiple)
    label = (task.label.label if task.label else "") or None
    planned.region = RegionSample(
        id=planned.key[:12],
        height=whole.size[0],
        width=whole.size[1],
        mpp=None if slide.known_mpp is None else slide.known_mpp * whole.scale,
        striped=len(bands) > 1,
        bands=tuple(bands),
        label=None if label is None else batch.classes.index(label),
        split=task.label.split if task.label else None,
        slide=task.name,
        x=whole.x,
        y=whole.y,
    )
    planned.bytes = stored_bytes(whole.size, 3)
    planned.parts = [BandPart(whole, planned.region, k) for k in range(len(bands))]


def cut_slide(
    batch: BatchRequest, task: Task, planned: Planned, number: int, pieces: PartPieces
) -> PartRecord:
    """Cut part `number` of a slide, unless that was done before.

    Raises:
        SlideError: its stains cannot be normalised as requested.
    """
    folder = batch.folder / PARTS / task.name / f"{number:05d}"
    part = load_part(folder, planned.key)
    if part is not None:
        return part
    options = batch.options
    cutting = Cutting(
        batch.choosing,
        batch.classes,
        task.name,
        task.label,
        planned.own,
        None if options.format == "coords" else options.codec,
        options.quality,
    )
    with _opened(batch, task) as slide:
        return cut_part(slide, pieces, cutting, folder, planned.key)


def finish_slide(
    batch: BatchRequest, task: Task, planned: Planned, parts: list[PartRecord]
) -> TilingReport:
    """Draw the pictures of a slide and save its record, which marks it as done."""
    started, report, folder = time.monotonic(), planned.report, batch.folder
    sum_up(report, parts)
    _save_pictures(batch, task, planned, parts)
    files = []
    if batch.options.format == "coords" and report.written:
        taken = [(x, y) for part in parts for x, y, _ in part.taken]
        with _opened(batch, task) as slide:
            files = save_coords(folder, batch.target, slide, task.name, planned.plan, taken)
    for number, part in enumerate(parts):
        if part.shard is not None:
            path = Path(PARTS, task.name, f"{number:05d}", part.shard.file)
            part.shard = replace(part.shard, file=str(path))
    report.seconds += time.monotonic() - started
    record = SlideRecord(
        planned.key,
        str(slide_source(task.path)),
        task.label.split if task.label else None,
        parts,
        files,
        planned.region,
        report.to_json(),
        slide_content(task.path),
    )
    record.save(folder, task.name)
    return report


def sum_up(report: TilingReport, parts: Sequence[PartRecord]) -> None:
    """Add the tile counts of all parts to the report of a slide."""
    for part in parts:
        report.with_tissue -= part.bare
        for name, at in part.dropped.items():
            setattr(report, name, getattr(report, name) + len(at))
        if part.unreadable:
            report.failed, report.note = True, part.problem
        report.seconds += part.seconds
        report.written += len(part.taken)
        report.unreadable += len(part.unreadable)
    if not report.written and not report.note:
        report.note = "filters dropped every tile" if report.dropped else "no tissue found"


def _save_pictures(
    batch: BatchRequest, task: Task, planned: Planned, parts: Sequence[PartRecord]
) -> None:
    """Draw the tiles on the overview, and those written on a thumbnail in their own colours."""
    pictures, plan = batch.folder / PICTURES, planned.plan
    pictures.mkdir(exist_ok=True)
    span = (plan.step, plan.step)
    if planned.region is not None:
        span = planned.region.height * plan.scale, planned.region.width * plan.scale
    taken = [(x, y) for part in parts for x, y, _ in part.taken]
    save_picture(
        pictures / f"{task.name}.png",
        batch.folder / PARTS / task.name / _OVERVIEW,
        planned.zoom,
        span,
        taken,
        [place for part in parts for place in part.unreadable],
        [place for part in parts for at in part.dropped.values() for place in at],
    )
    if not taken:
        return
    zoom = min(1.0, PREVIEW / max(planned.size))
    height, width = (max(1, floor(length * zoom + 0.5)) for length in planned.size)
    with _opened(batch, task) as slide:
        image = slide.thumbnail(1 / zoom).image
    # cropped: the last pixels of a thumbnail may be mostly beyond the slide
    image = plan.tissue.shown(image[:height, :width])
    image = batch.choosing.finished(image, planned.own)
    save_preview(pictures / preview_name(task.name), image, zoom, span, taken)


def _opened(batch: BatchRequest, task: Task) -> Slide:
    mpp = task.label.mpp if task.label else None
    return Slide(task.path, mpp or batch.options.slide_mpp)
