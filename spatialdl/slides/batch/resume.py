"""Reuse of slides that were done before, by an interrupted run or an earlier batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from spatialdl.common.files import link
from spatialdl.data.samples import ShardInfo
from spatialdl.errors import ShardError, SlideError
from spatialdl.slides.batch.picture import preview_name
from spatialdl.slides.batch.record import PARTS, RECORDS, SlideRecord
from spatialdl.slides.batch.report import TilingReport
from spatialdl.slides.reading.paths import slide_files, slide_source

PICTURES = "pictures"


def taken_over(
    folder: Path | None, before: Path | None, name: str, path: Path, key: str
) -> SlideRecord | None:
    """Return the record of a slide that was done before and is unchanged, else None.

    Args:
        folder: where the batch is built; files of the earlier batch are linked there. None only
            searches the earlier batch.
        before: the earlier batch, if there is one.
        name: of the slide.
        path: of the slide.
        key: digest of its contents and the settings.

    Raises:
        SlideError: the earlier batch has a different slide of that name.
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


def keep_others(
    folder: Path, before: Path | None, slides: Mapping[str, Path]
) -> list[TilingReport]:
    """Copy slides of an earlier batch that are not in this run into the batch.

    Args:
        folder: where the batch is built.
        before: the earlier batch, if there is one.
        slides: of this run, by name; a slide that had another name before is not kept twice.

    Returns:
        The reports of the copied slides.

    Raises:
        ShardError: the record or files of such a slide are missing or damaged.
    """
    if before is None:
        return []
    sources = {source for path in slides.values() for source in slide_sources(path)}
    reports = []
    for name in tqdm(names_in(before), "checking", unit="slide", disable=None, leave=False):
        if name in slides:
            continue
        record = SlideRecord.load(before, name)
        if record is not None and record.source in sources:
            continue
        if record is None or not record.is_whole(before):
            where = f" ({record.source})" if record else ""
            raise ShardError(
                f"{before} has slide {name} in it, with missing or damaged files; add that "
                f"slide{where} to the command, or write to another folder"
            )
        moved_in(record, folder, before, name)
        reports.append(TilingReport.from_json(record.report))
    return reports


def keep_failed(
    folder: Path, before: Path | None, failed: Mapping[str, TilingReport]
) -> dict[str, TilingReport | None]:
    """Copy slides of an earlier batch whose names are those of slides that failed in this run.

    Args:
        folder: where the batch is built.
        before: the earlier batch, if there is one.
        failed: reports by name; where the slide is the same, its number of samples is set and a
            note added.

    Returns:
        The names of the copied slides; None for the same slide, else the report of the other.
    """
    kept: dict[str, TilingReport | None] = {}
    for name, report in failed.items():
        record = None if before is None else SlideRecord.load(before, name)
        if before is None or record is None or not record.is_whole(before):
            continue
        moved_in(record, folder, before, name)
        if record.source in slide_sources(Path(report.file)):
            report.written = record.report["written"]
            report.note += f"; kept its {report.written} samples of an earlier run"
            kept[name] = None
        else:
            kept[name] = TilingReport.from_json(record.report)
    return kept


def slide_sources(path: Path) -> set[str]:
    """Possible `source` values in records of a slide, all files of a series included."""
    return {str(slide_source(path)), *(str(file.resolve()) for file in slide_files(path))}


def names_in(folder: Path) -> list[str]:
    """Names of the slides of a batch."""
    return sorted(path.name.removesuffix(".json") for path in (folder / RECORDS).glob("*.json"))


def holds_work(folder: Path) -> bool:
    """Whether an unfinished batch has results that the next run can reuse."""
    return bool(names_in(folder)) or any((folder / PARTS).glob("*/*/part.json"))


def moved_in(record: SlideRecord, folder: Path, before: Path, name: str) -> SlideRecord:
    """Link the files of a slide of an earlier batch into the batch being built."""
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
