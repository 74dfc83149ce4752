"""State of a slide on disk: its key, its parts while it is cut, its record when it is done.

A part is the output of one call of a worker: at most a shard, and the places of its tiles. It is
reused if it was cut from the same slide with the same settings (its key, a digest of both), and if
its shard still has the recorded SHA-256. Records are only added: a slide without one is cut. ::

    parts/NAME/00000/part.json, shard-00000.h5, tiles.npy       each, in progress
    records/NAME.json                                           once all of them are done
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Self

from spatialdl.common import fields
from spatialdl.common.files import link, load_json, save_json
from spatialdl.common.text import progress_bar
from spatialdl.data.format import sha256_of, shard_problem
from spatialdl.data.outcomes import result_key
from spatialdl.data.samples import RegionSample, ShardInfo, parse_region
from spatialdl.errors import ShardError, SlideError
from spatialdl.slides.batch.finding_slides import SlideLabel
from spatialdl.slides.batch.report import TilingReport
from spatialdl.slides.batch.report_page import preview_name
from spatialdl.slides.reading.paths import slide_bytes, slide_files, slide_source
from spatialdl.slides.reading.reader import Slide

RECORDS, PARTS, PICTURES = "records", "parts", "pictures"
_PART = "part.json"
Place = tuple[int, int]

CUTTING_VERSION = 2
"""To be incremented when the same settings give different tiles than before."""

_SAMPLES, _SAMPLE = 16, 2**20  # samples of a large file, and bytes of each
_MALFORMED = (TypeError, KeyError, ValueError, AttributeError)


def slide_key(
    slide: Slide,
    name: str,
    label: SlideLabel | None,
    settings: dict[str, object],
    beside: Iterable[Path] = (),
) -> str:
    """Compute a digest that differs if the tiles may differ.

    Slides are large: the digest covers the length and samples of the bytes of each file, and
    openslide's own hash, which includes companion files. It ignores path and modification time.

    Args:
        slide: open.
        name: in the data set.
        label: its class and split.
        settings: of the batch that determine the tiles.
        beside: small files that determine the tiles, such as a mask; all their bytes are hashed.
    """
    content = {
        "version": CUTTING_VERSION,
        "slide": slide_content(slide.path),
        "quickhash": slide.quickhash,
        "name": name,
        "label": label,
        "settings": settings,
        "beside": [sha256_of(path) for path in beside],
    }
    return result_key(content)


def slide_content(path: Path) -> str:
    """Return the length of the files of a slide and a digest of samples of their bytes."""
    digests = [sampled_digest(file) for file in slide_files(path)]
    return f"{slide_bytes(path)}-{hashlib.sha256(' '.join(digests).encode()).hexdigest()}"


def sampled_digest(path: Path) -> str:
    """Return the SHA-256 of a file's length and of 16 evenly spaced samples of 1 MiB.

    Files up to 16 MiB are hashed completely.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, 2)
        digest.update(str(size).encode())
        last = max(size, _SAMPLES * _SAMPLE) - _SAMPLE
        for k in range(_SAMPLES):
            file.seek(last * k // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


@dataclass
class PartRecord:
    """Results of a part: some of the tiles of a slide, or a band of rows of a region.

    A region is one sample, counted in its first band.

    Attributes:
        shard: its file, None if no tile was written.
        taken: level-0 x, y and class index (None without) of each tile written, in order.
        dropped: level-0 x, y of the tiles dropped by each filter.
        unreadable: level-0 x, y of the tiles that could not be read.
        problem: error message of the last of these.
        bare: number of tiles that, once read, had too little tissue.
        seconds: duration.
    """

    shard: ShardInfo | None = None
    taken: list[tuple[int, int, int | None]] = field(default_factory=list)
    dropped: dict[str, list[Place]] = field(default_factory=dict)
    unreadable: list[Place] = field(default_factory=list)
    problem: str = ""
    bare: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return its fields for JSON; lists may be long and are not copied."""
        return {**vars(self), "shard": asdict(self.shard) if self.shard else None}

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        """Create a record from the output of `to_json`.

        Raises:
            TypeError, KeyError, ValueError, AttributeError: `raw` is malformed.
        """
        part = cls(**raw)
        part.shard = _file_of(raw["shard"]) if raw["shard"] else None
        part.taken = [
            (_integer(x), _integer(y), None if label is None else _integer(label))
            for x, y, label in raw["taken"]
        ]
        part.dropped = {name: _places(at) for name, at in raw["dropped"].items()}
        part.unreadable = _places(raw["unreadable"])
        part.problem, part.bare = fields.text(raw, "problem"), fields.whole(raw, "bare")
        part.seconds = float(raw["seconds"])
        return part


@dataclass
class SlideRecord:
    """Record of a finished slide.

    Attributes:
        key: digest of the slide and the settings; see `slide_key`.
        source: resolved path of the slide.
        split: None without labels.
        parts: in order; their shards are files of the data set.
        files: other files of the data set for this slide alone.
        region: with --whole, its bands numbered like the parts; None for tiles.
        report: output of `TilingReport.to_json`.
        content: digest of its files, see `slide_content`; empty in records of earlier versions.
    """

    key: str
    source: str
    split: str | None
    parts: list[PartRecord]
    files: list[ShardInfo]
    region: RegionSample | None
    report: dict[str, Any]
    content: str = ""

    def save(self, folder: Path, name: str) -> None:
        """Write it to `folder/records/name.json`."""
        (folder / RECORDS).mkdir(exist_ok=True)
        region = asdict(self.region) if self.region else None
        parts, files = [part.to_json() for part in self.parts], [asdict(k) for k in self.files]
        values = {**vars(self), "parts": parts, "files": files, "region": region}
        save_json(folder / RECORDS / f"{name}.json", values)

    @classmethod
    def load(cls, folder: Path, name: str) -> Self | None:
        """Read a record; None if it is missing or damaged."""
        raw = load_json(folder / RECORDS / f"{name}.json")
        try:
            record = cls(**raw) if raw else None
            if record is not None:
                TilingReport.from_json(record.report)
                record.parts = [PartRecord.of(part) for part in raw["parts"]]
                record.region = parse_region(raw["region"]) if raw["region"] else None
                record.files = [_file_of(file) for file in raw["files"]]
                texts = ["key", "source", "content"] + ["split"] * (raw["split"] is not None)
                for key in texts:
                    fields.text(vars(record), key)
        except _MALFORMED:
            return None
        return record

    def is_whole(self, folder: Path) -> bool:
        """Whether all its files are in `folder`, with the recorded checksums."""
        shards = [part.shard for part in self.parts if part.shard is not None]
        return not any(shard_problem(folder, file) for file in (*shards, *self.files))

    def link_into(self, folder: Path, before: Path, name: str) -> Self:
        """Link the files of a slide of an earlier batch into the batch being built."""

        def linked(file: ShardInfo, inside: str) -> ShardInfo:
            there = Path(inside, Path(file.file).name)
            (folder / inside).mkdir(parents=True, exist_ok=True)
            link(before / file.file, folder / there)
            return replace(file, file=str(there))

        for number, part in enumerate(self.parts):
            if part.shard is not None:
                part.shard = linked(part.shard, f"{PARTS}/{name}/{number:05d}")
        self.files = [linked(file, str(Path(file.file).parent)) for file in self.files]
        (folder / PICTURES).mkdir(exist_ok=True)
        for picture in (f"{name}.png", preview_name(name)):
            if (before / PICTURES / picture).exists():
                link(before / PICTURES / picture, folder / PICTURES / picture)
        self.save(folder, name)
        return self


def save_part(folder: Path, key: str, part: PartRecord) -> None:
    """Write the record of a part, which marks it as done."""
    save_json(folder / _PART, {"key": key, "part": part.to_json()})


def load_part(folder: Path, key: str) -> PartRecord | None:
    """Read the record of a part; None if the part must be cut (again)."""
    raw = load_json(folder / _PART)
    try:
        if not raw or raw["key"] != key:
            return None
        part = PartRecord.of(raw["part"])
    except _MALFORMED:
        return None
    is_damaged = part.shard is not None and shard_problem(folder, part.shard)
    return None if part.unreadable or is_damaged else part


def _file_of(raw: Mapping[str, Any]) -> ShardInfo:
    """Parse the record of a file of the data set.

    Raises:
        ValueError: its path leads out of the data set.
    """
    name, digest = fields.text(raw, "file"), fields.text(raw, "sha256")
    inside = PurePosixPath(name)
    if not inside.parts or inside.is_absolute() or ".." in inside.parts or "\0" in name:
        raise ValueError(f"{name!r} is not a file in the data set")
    return ShardInfo(name, fields.whole(raw, "bytes"), digest, fields.whole(raw, "samples"))


def _places(raw: Any) -> list[Place]:
    return [(_integer(x), _integer(y)) for x, y in raw]


def _integer(value: object) -> int:
    return fields.place({"a place": value}, "a place")


# --- slides that were done before, by an interrupted run or an earlier batch


def find_done(
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
                return record.link_into(folder, place, name)
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
    for name in progress_bar(names_in(before), "checking", "slide"):
        record = None if name in slides else SlideRecord.load(before, name)
        if name in slides or (record is not None and record.source in sources):
            continue
        if record is None or not record.is_whole(before):
            where = f" ({record.source})" if record else ""
            raise ShardError(
                f"{before} has slide {name} in it, with missing or damaged files; add that "
                f"slide{where} to the command, or write to another folder"
            )
        record.link_into(folder, before, name)
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
        if before is None:
            break
        record = SlideRecord.load(before, name)
        if record is None or not record.is_whole(before):
            continue
        record.link_into(folder, before, name)
        kept[name] = None
        if record.source in slide_sources(Path(report.file)):
            report.written = record.report["written"]
            report.note += f"; kept its {report.written} samples of an earlier run"
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
