"""What is remembered of a slide on disk: its parts while it is cut, its record when it is done.

A part is what one worker cut in one go: at most a shard, and where the tiles in it lie. It counts
as done if it was made from the same slide with the same settings (`key`), and if its shard still
has the SHA-256 that was noted. ::

    parts/NAME/00000/part.json, shard-00000.h5, tiles.npy       each, in progress
    records/NAME.json                                           once all of them are done
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Self

from spatialdl.data import fields
from spatialdl.data.format import RegionSample, ShardInfo, parse_region, sha256_of, shard_status
from spatialdl.data.saving import load_json, save_json
from spatialdl.errors import ShardError
from spatialdl.slides.batch.report import TilingReport

RECORDS, PARTS = "records", "parts"
_PART = "part.json"
Place = tuple[int, int]


@dataclass
class PartRecord:
    """What became of some of the tiles of a slide, or of a band of rows of a region.

    The first band of a region counts as the one sample that it is.

    Attributes:
        shard: the file that it filled, None where no tile was left.
        taken: level-0 x, y and index of the class (None without) of each tile written, in order.
        dropped: level-0 x, y of the tiles that each filter dropped.
        unreadable: of those that could not be read; `problem` is what was said of the last.
        bare: tiles that turned out to have too little tissue.
        seconds: that it took.
    """

    shard: ShardInfo | None = None
    taken: list[tuple[int, int, int | None]] = field(default_factory=list)
    dropped: dict[str, list[Place]] = field(default_factory=dict)
    unreadable: list[Place] = field(default_factory=list)
    problem: str = ""
    bare: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """What JSON can hold; its lists may be long, and are not copied."""
        return {**vars(self), "shard": asdict(self.shard) if self.shard else None}

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        """From what `to_json` gave.

        Raises:
            TypeError, KeyError, ValueError, AttributeError: it was something else.
        """
        part = cls(**raw)
        part.shard = _file_of(raw["shard"]) if raw["shard"] else None
        part.taken = [
            (_whole(x), _whole(y), None if label is None else _whole(label))
            for x, y, label in raw["taken"]
        ]
        part.dropped = {name: _places(at) for name, at in raw["dropped"].items()}
        part.unreadable = _places(raw["unreadable"])
        part.problem, part.bare = fields.text(raw, "problem"), fields.whole(raw, "bare")
        part.seconds = float(raw["seconds"])
        return part


@dataclass
class SlideRecord:
    """A slide that is done.

    Attributes:
        key: of the slide and the settings; see `spatialdl.slides.batch.identity`.
        source: where the slide was.
        split: which it belongs to, None without labels.
        parts: in order; their shards are files of the data set.
        files: of the data set that the slide has to itself.
        region: where it is one whole region; bands are numbered by parts. None for tiles.
        report: what it gave, as `TilingReport.to_json` has it.
        content: of its files, see `slide_content`; empty in records of earlier versions.
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
        said = {**vars(self), "parts": parts, "files": files, "region": region}
        save_json(folder / RECORDS / f"{name}.json", said)

    @classmethod
    def load(cls, folder: Path, name: str) -> Self | None:
        """Read it back; None if there is none, or it is damaged."""
        raw = load_json(folder / RECORDS / f"{name}.json")
        try:
            record = cls(**raw) if raw else None
            if record is not None:
                TilingReport.from_json(record.report)
                record.parts = [PartRecord.of(part) for part in raw["parts"]]
                if raw["region"]:
                    record.region = parse_region(raw["region"])
                record.files = [_file_of(file) for file in raw["files"]]
                record.key, record.source = fields.text(raw, "key"), fields.text(raw, "source")
                fields.text(vars(record), "content")
                record.split = None if raw["split"] is None else fields.text(raw, "split")
        except (TypeError, KeyError, ValueError, AttributeError):
            return None
        return record

    def is_whole(self, folder: Path) -> bool:
        """Whether all its files are in `folder`, with the contents that were noted."""
        shards = [part.shard for part in self.parts if part.shard is not None]
        return all(holds(folder, file) for file in (*shards, *self.files))


def save_part(folder: Path, key: str, part: PartRecord) -> None:
    """Note in a part's folder that it is done."""
    save_json(folder / _PART, {"key": key, "part": part.to_json()})


def load_part(folder: Path, key: str) -> PartRecord | None:
    """A part that was done before, None if it has to be done (again)."""
    raw = load_json(folder / _PART)
    try:
        if not raw or raw["key"] != key:
            return None
        part = PartRecord.of(raw["part"])
    except (TypeError, KeyError, ValueError, AttributeError):
        return None
    whole = not part.unreadable and (part.shard is None or holds(folder, part.shard))
    return part if whole else None


def holds(folder: Path, shard: ShardInfo) -> bool:
    """Whether a shard has the contents that were noted."""
    try:
        size = shard_status(folder, shard).st_size
        return size == shard.bytes and sha256_of(folder / shard.file) == shard.sha256
    except (OSError, ShardError):
        return False


def _file_of(raw: Mapping[str, Any]) -> ShardInfo:
    """A file of the data set.

    Raises:
        ValueError: its path leads out of the data set.
    """
    name, digest = fields.text(raw, "file"), fields.text(raw, "sha256")
    inside = PurePosixPath(name)
    if not inside.parts or inside.is_absolute() or ".." in inside.parts or "\0" in name:
        raise ValueError(f"{name!r} is no file of the data set")
    return ShardInfo(name, fields.whole(raw, "bytes"), digest, fields.whole(raw, "samples"))


def _places(raw: Any) -> list[Place]:
    return [(_whole(x), _whole(y)) for x, y in raw]


def _whole(value: object) -> int:
    return fields.place({"a place": value}, "a place")
