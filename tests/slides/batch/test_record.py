from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spatialdl.data.format import sha256_of
from spatialdl.data.samples import RegionBand, RegionSample, ShardInfo
from spatialdl.slides.batch.record import PartRecord, SlideRecord, holds, load_part, save_part
from spatialdl.slides.batch.report import TilingReport


def shard(folder: Path, name: str = "shard-00000.h5") -> ShardInfo:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"0123456789")
    return ShardInfo(name, 10, sha256_of(path), 2)


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


def test_a_part_comes_back(tmp_path: Path) -> None:
    for part in (part_of(shard(tmp_path)), part_of(None), PartRecord()):
        save_part(tmp_path, "key", part)
        assert load_part(tmp_path, "key") == part


def test_a_part_is_done_again_where_something_is_not_as_noted(tmp_path: Path) -> None:
    part = part_of(shard(tmp_path))
    assert load_part(tmp_path, "key") is None
    save_part(tmp_path, "key", part)
    assert load_part(tmp_path, "other key") is None
    (tmp_path / "shard-00000.h5").write_bytes(b"0123456788")
    assert load_part(tmp_path, "key") is None
    shard(tmp_path)
    assert load_part(tmp_path, "key") == part
    # what could not be read may be read now
    save_part(tmp_path, "key", replace(part, unreadable=[(7, 8)], problem="cannot read"))
    assert load_part(tmp_path, "key") is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "{}", '{"key": "key"}', '{"key": "key", "part": {"shard": 3}}'],
)
def test_damage_means_that_it_is_not_done(tmp_path: Path, text: str) -> None:
    (tmp_path / "part.json").write_text(text)
    assert load_part(tmp_path, "key") is None
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "a.json").write_text(text)
    assert SlideRecord.load(tmp_path, "a") is None


def test_a_record_comes_back(tmp_path: Path) -> None:
    record = record_in(tmp_path)
    assert SlideRecord.load(tmp_path, "é") is None
    record.save(tmp_path, "é")
    assert SlideRecord.load(tmp_path, "é") == record
    assert record.is_whole(tmp_path)


def test_a_record_of_another_version_is_none(tmp_path: Path) -> None:
    record_in(tmp_path).save(tmp_path, "a")
    path = tmp_path / "records" / "a.json"
    known = json.loads(path.read_text())
    for other in (
        {**known, "more": 1},
        {k: v for k, v in known.items() if k != "files"},
        {**known, "report": {}},
        {**known, "region": {"id": 3}},
    ):
        path.write_text(json.dumps(other))
        assert SlideRecord.load(tmp_path, "a") is None


@pytest.mark.parametrize("name", ["shard-00000.h5", "coords/clam/patches/é.h5"])
def test_a_record_is_whole_only_with_all_its_files(tmp_path: Path, name: str) -> None:
    record = record_in(tmp_path)
    (tmp_path / name).write_bytes(b"012345678")
    assert not record.is_whole(tmp_path)
    (tmp_path / name).unlink()
    assert not record.is_whole(tmp_path)


def test_contents_count(tmp_path: Path) -> None:
    info = shard(tmp_path)
    assert holds(tmp_path, info)
    for other in (b"0123456788", b"01234567890", b""):
        (tmp_path / info.file).write_bytes(other)
        assert not holds(tmp_path, info)
    (tmp_path / info.file).unlink()
    assert not holds(tmp_path, info)


@pytest.mark.parametrize("name", ["../b.h5", "/etc/passwd", "a/../../b", "", ".", "a\0", 3])
def test_a_record_that_leads_out_of_the_data_set_is_none(tmp_path: Path, name: object) -> None:
    """Its files were linked from and to where their names said, wherever that was."""
    record = record_in(tmp_path)
    record.save(tmp_path, "a")
    path = tmp_path / "records" / "a.json"
    known = json.loads(path.read_text())
    for where in (known["files"], [part["shard"] for part in known["parts"] if part["shard"]]):
        before, where[0]["file"] = where[0]["file"], name
        path.write_text(json.dumps(known))
        assert SlideRecord.load(tmp_path, "a") is None
        where[0]["file"] = before
    path.write_text(json.dumps(known))
    assert SlideRecord.load(tmp_path, "a") == record


def test_a_link_out_of_the_data_set_is_no_file_of_it(tmp_path: Path) -> None:
    info = shard(tmp_path / "elsewhere")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / info.file).symlink_to(tmp_path / "elsewhere" / info.file)
    assert not holds(tmp_path / "set", info)


@pytest.mark.parametrize(
    ("key", "value"),
    [("written", "2"), ("failed", 0), ("slide", None), ("mpp", "0.5"), ("seconds", [])],
)
def test_a_record_with_a_report_of_other_types_is_none(
    tmp_path: Path, key: str, value: object
) -> None:
    record = record_in(tmp_path)
    record.report[key] = value
    record.save(tmp_path, "a")
    assert SlideRecord.load(tmp_path, "a") is None
