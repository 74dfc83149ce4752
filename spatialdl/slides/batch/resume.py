"""Taking over slides that were done before, in an interrupted batch or in an earlier one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from spatialdl.data.format import ShardInfo
from spatialdl.data.saving import link
from spatialdl.errors import ShardError, SlideError
from spatialdl.slides.batch.preview import preview_name
from spatialdl.slides.batch.record import PARTS, RECORDS, SlideRecord
from spatialdl.slides.batch.report import TilingReport
from spatialdl.slides.reading.paths import slide_files, slide_source

PICTURES = "pictures"


def taken_over(
    folder: Path | None, before: Path | None, name: str, path: Path, key: str
) -> SlideRecord | None:
    """The record of a slide that was done before and is as it was.

    Args:
        folder: where the batch is built; files of the earlier batch are put there. None looks
            for slides only.
        before: the earlier batch, if there is one.
        name: of the slide.
        path: where it is.
        key: of its contents and the settings.

    Raises:
        SlideError: the earlier batch has another slide of that name.
    """
    for place in (folder, before):
        record = SlideRecord.load(place, name) if place is not None else None
        if place is None or record is None:
            continue
        if record.key == key and not record.report["failed"] and record.is_whole(place):
            if place == before and folder is not None:
                record = moved_in(record, folder, place, name)
            return record
        if place == before and record.key != key and record.source not in slide_sources(path):
            raise SlideError(
                f"the data set has another slide named {name}, from {record.source}; rename "
                f"{path}, or write to another folder"
            )
    return None


def keep_others(folder: Path, before: Path | None, given: Mapping[str, Path]) -> list[TilingReport]:
    """Take over the slides of an earlier batch that are not given any more.

    Args:
        folder: where the batch is built.
        before: the earlier one, if there is one.
        given: the slides that are, by name; one that had another name then is not kept twice.

    Returns:
        Their reports.

    Raises:
        ShardError: the record or files of such a slide are missing or damaged.
    """
    if before is None:
        return []
    sources = {source for path in given.values() for source in slide_sources(path)}
    reports = []
    for name in tqdm(names_in(before), "checking", unit="slide", disable=None, leave=False):
        if name in given:
            continue
        record = SlideRecord.load(before, name)
        if record is not None and record.source in sources:
            continue
        if record is None or not record.is_whole(before):
            where = f" ({record.source})" if record else ""
            raise ShardError(
                f"{before} has slide {name} in it, files of which are missing or damaged; give "
                f"that slide{where}, too, or write to another folder"
            )
        moved_in(record, folder, before, name)
        reports.append(TilingReport.from_json(record.report))
    return reports


def keep_failed(
    folder: Path, before: Path | None, failed: Mapping[str, TilingReport]
) -> dict[str, TilingReport | None]:
    """Take over what an earlier batch has of slides that were given and could not be used.

    Args:
        folder: where the batch is built.
        before: the earlier one, if there is one.
        failed: their reports, by name; where the slide is the same, it is told there that its
            samples were kept.

    Returns:
        The names of those that were kept; with the report where it is another slide.
    """
    kept: dict[str, TilingReport | None] = {}
    for name, report in failed.items():
        record = None if before is None else SlideRecord.load(before, name)
        if before is None or record is None or not record.is_whole(before):
            continue
        moved_in(record, folder, before, name)
        if record.source in slide_sources(Path(report.file)):
            report.written = record.report["written"]
            report.note += f"; its {report.written} samples of an earlier run are kept"
            kept[name] = None
        else:
            kept[name] = TilingReport.from_json(record.report)
    return kept


def slide_sources(path: Path) -> set[str]:
    """What a record of a slide may have as its source: a series may have been several slides."""
    return {str(slide_source(path)), *(str(file.resolve()) for file in slide_files(path))}


def names_in(folder: Path) -> list[str]:
    """The slides that a batch has, by name."""
    return sorted(path.name.removesuffix(".json") for path in (folder / RECORDS).glob("*.json"))


def holds_work(folder: Path) -> bool:
    """Whether a batch that is being built has something that the next run need not do again."""
    return bool(names_in(folder)) or any((folder / PARTS).glob("*/*/part.json"))


def moved_in(record: SlideRecord, folder: Path, before: Path, name: str) -> SlideRecord:
    """Put the files of a slide of an earlier batch into the one being built."""
    for number, part in enumerate(record.parts):
        if part.shard is not None:
            part.shard = _linked(part.shard, before, folder, f"{PARTS}/{name}/{number:05d}")
    record.files = [
        _linked(file, before, folder, str(Path(file.file).parent)) for file in record.files
    ]
    (folder / PICTURES).mkdir(exist_ok=True)
    for picture in (f"{name}.png", preview_name(name)):
        if (before / PICTURES / picture).exists():
            link(before / PICTURES / picture, folder / PICTURES / picture)
    record.save(folder, name)
    return record


def _linked(file: ShardInfo, before: Path, folder: Path, inside: str) -> ShardInfo:
    there = Path(inside, Path(file.file).name)
    (folder / inside).mkdir(parents=True, exist_ok=True)
    link(before / file.file, folder / there)
    return replace(file, file=str(there))
