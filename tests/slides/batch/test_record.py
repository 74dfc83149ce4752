"""Records of what is done: kept, taken over, and assembled to a data set."""

from __future__ import annotations

import errno
import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spatialdl.data.samples import RegionBand, RegionSample, ShardInfo
from spatialdl.slides.batch.assembling import load_settings
from spatialdl.slides.batch.record import PartRecord, SlideRecord, holds, load_part, save_part
from spatialdl.slides.batch.report import TilingReport
from spatialdl.slides.batch.resume import (
    names_in,
    taken_over,
)
from tests.slides.batch.batches import shard


def part_of(info: ShardInfo | None) -> PartRecord:
    return PartRecord(
        info,
        [(1, 2, None), (3, 2**40, 1)],
        {"pen": [(5, 6)], "blur": []},
        bare=4,
        seconds=0.5,
    )


def record_in(folder: Path) -> SlideRecord:
    bands = (RegionBand(0, 0, 512), RegionBand(1, 512, 88))
    region = RegionSample("ab", 600, 700, 0.5, True, bands, 1, "train", "é", 3, 4)
    report = TilingReport("é", 9, 8, written=2, file="é.svs")
    return SlideRecord(
        "key",
        "/in/é.svs",
        "train",
        [part_of(shard(folder)), part_of(None)],
        [shard(folder, "coords/clam/patches/é.h5")],
        region,
        report.to_json(),
    )


def test_a_part_is_done_again_where_something_is_not_as_noted(tmp_path):
    for part in (PartRecord(), part_of(None), part_of(shard(tmp_path))):
        assert load_part(tmp_path, "key") is None
        save_part(tmp_path, "key", part)
        assert load_part(tmp_path, "key") == part
        assert load_part(tmp_path, "other key") is None
        if part.shard:
            for other in (b"0123456788", b"01234567890", b"", None):  # contents count
                path = tmp_path / part.shard.file
                path.unlink() if other is None else path.write_bytes(other)
                assert not holds(tmp_path, part.shard)
                assert load_part(tmp_path, "key") is None
            shard(tmp_path)
            assert load_part(tmp_path, "key") == part
        # what could not be read may be read now
        save_part(tmp_path, "key", replace(part, unreadable=[(7, 8)], problem="cannot read"))


def test_a_record_comes_back_and_is_whole_only_with_all_its_files(tmp_path):
    record = record_in(tmp_path)
    assert SlideRecord.load(tmp_path, "é") is None
    record.save(tmp_path, "é")
    assert SlideRecord.load(tmp_path, "é") == record
    for name in ("shard-00000.h5", "coords/clam/patches/é.h5"):
        assert record.is_whole(tmp_path)
        (tmp_path / name).write_bytes(b"012345678")
        assert not record.is_whole(tmp_path)
        (tmp_path / name).unlink()
        assert not record.is_whole(tmp_path)
        shard(tmp_path, name)
    (tmp_path / "set").mkdir()
    for file in ("shard-00000.h5",):  # a link out of the data set is no file of it
        (tmp_path / "set" / file).symlink_to(tmp_path / file)
    assert not holds(tmp_path / "set", shard(tmp_path))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "{}", '{"key": "key"}', '{"key": "key", "part": {"shard": 3}}'],
)
def test_damage_means_that_it_is_not_done(tmp_path, text):
    (tmp_path / "records").mkdir()
    for name in ("part.json", "records/a.json", "settings.json"):
        (tmp_path / name).write_text(text)
    assert load_part(tmp_path, "key") is None
    assert SlideRecord.load(tmp_path, "a") is None
    if text in ("", "{"):
        assert load_settings(tmp_path) is None


def change(known: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy of which one value, at names with dots between, is another."""
    *above, last = path.split(".")
    known = inner = deepcopy(known)
    for name in above:
        inner = inner[int(name) if name.isdigit() else name]
    inner[last] = value
    return known


@pytest.mark.parametrize(
    ("path", "value"),
    [
        # of another version
        *(("more", 1), ("report", {}), ("region", {"id": 3})),
        # with a report of other types
        *(("report.written", "2"), ("report.failed", 0), ("report.slide", None)),
        *(("report.mpp", "0.5"), ("report.seconds", [])),
        # its files were linked from and to where their names said, wherever that was
        *(("files.0.file", "../b.h5"), ("files.0.file", "a/../../b"), ("files.0.file", 3)),
        *(("files.0.file", "/etc/passwd"), ("files.0.file", ""), ("files.0.file", ".")),
        *(("parts.0.shard.file", "../b.h5"), ("parts.0.shard.file", "a\0")),
    ],
)
def test_a_record_that_cannot_be_ours_is_none(tmp_path, path, value):
    record = record_in(tmp_path)
    record.save(tmp_path, "a")
    file = tmp_path / "records" / "a.json"
    known = json.loads(file.read_text())
    file.write_text(json.dumps(change(known, path, value)))
    assert SlideRecord.load(tmp_path, "a") is None
    file.write_text(json.dumps(known))
    assert SlideRecord.load(tmp_path, "a") == record


def batch(folder: Path, *names: str) -> Path:
    """A finished batch that has slides /in/NAME.svs, whose key is "key of NAME"."""
    (folder / "pictures").mkdir(parents=True)
    for number, name in enumerate(names):
        parts = [PartRecord(), PartRecord(shard(folder, f"shard-{number:05d}.h5"))]
        files = [shard(folder, f"coords/clam/patches/{name}.h5")]
        source = f"/in/{name}.svs"
        report = TilingReport(name, written=2, file=source).to_json()
        SlideRecord(f"key of {name}", source, None, parts, files, None, report).save(folder, name)
        (folder / "pictures" / f"{name}.png").write_text(name)
    return folder


def taken(folder: Path | None, before: Path | None, name: str) -> SlideRecord | None:
    return taken_over(folder, before, name, Path(f"/in/{name}.svs"), f"key of {name}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder of a batch."""
    (tmp_path / "new").mkdir()
    return tmp_path / "new"


@pytest.mark.parametrize("links", [True, False])
def test_a_slide_that_is_as_it_was_is_taken_over(tmp_path, folder, monkeypatch, links):
    def refused(*_: object) -> None:
        raise OSError(errno.EXDEV, "no links")

    before = batch(tmp_path / "set", "a", "b")
    if not links:
        monkeypatch.setattr("os.link", refused)
    record = taken(folder, before, "b")
    assert record is not None
    assert [part.shard and part.shard.file for part in record.parts] == [
        None,
        "parts/b/00001/shard-00001.h5",
    ]
    assert record.is_whole(folder)
    assert SlideRecord.load(folder, "b") == record
    assert names_in(folder) == ["b"]
    assert (folder / "pictures" / "b.png").read_text() == "b"
    there = folder / "parts/b/00001/shard-00001.h5"
    assert there.samefile(before / "shard-00001.h5") == links
    assert [path.name for path in there.parent.iterdir()] == [there.name]
    # and from there
    assert taken(folder, None, "b") == record
    # moved, it is the same
    assert taken_over(folder, before, "a", Path("/elsewhere/a.svs"), "key of a") is not None
