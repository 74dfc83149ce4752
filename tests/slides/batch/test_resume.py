from __future__ import annotations

import errno
from pathlib import Path

import pytest

from spatialdl.errors import ShardError, SlideError
from spatialdl.slides.batch.record import PartRecord, SlideRecord
from spatialdl.slides.batch.report import TilingReport
from spatialdl.slides.batch.resume import (
    holds_work,
    keep_failed,
    keep_others,
    link,
    moved_in,
    names_in,
    taken_over,
)
from tests.slides.batch.test_record import shard


def batch(folder: Path, *names: str) -> Path:
    """A finished batch that has slides /in/NAME.svs, whose key is "key of NAME"."""
    (folder / "pictures").mkdir(parents=True)
    for number, name in enumerate(names):
        info = shard(folder, f"shard-{number:05d}.h5")
        report = TilingReport(name, written=2, file=f"/in/{name}.svs").to_json()
        files = [shard(folder, f"coords/clam/patches/{name}.h5")]
        record = SlideRecord(
            f"key of {name}",
            f"/in/{name}.svs",
            None,
            [PartRecord(), PartRecord(info)],
            files,
            None,
            report,
        )
        record.save(folder, name)
        (folder / "pictures" / f"{name}.png").write_text(name)
    return folder


def test_a_slide_that_is_as_it_was_is_taken_over(tmp_path: Path) -> None:
    before, folder = batch(tmp_path / "set", "a", "b"), tmp_path / "new"
    folder.mkdir()
    record = taken_over(folder, before, "b", Path("/in/b.svs"), "key of b")
    assert record is not None
    assert [part.shard and part.shard.file for part in record.parts] == [
        None,
        "parts/b/00001/shard-00001.h5",
    ]
    assert record.is_whole(folder)
    assert SlideRecord.load(folder, "b") == record
    assert names_in(folder) == ["b"]
    assert (folder / "pictures" / "b.png").read_text() == "b"
    assert (folder / "coords/clam/patches/b.h5").samefile(before / "coords/clam/patches/b.h5")
    # and from there
    assert taken_over(folder, None, "b", Path("/in/b.svs"), "key of b") == record
    # moved, it is the same
    assert taken_over(folder, before, "a", Path("/elsewhere/a.svs"), "key of a") is not None


def test_to_know_takes_no_folder(tmp_path: Path) -> None:
    before = batch(tmp_path / "set", "a")
    record = taken_over(None, before, "a", Path("/in/a.svs"), "key of a")
    assert record == SlideRecord.load(before, "a")
    assert taken_over(None, before, "b", Path("/in/b.svs"), "key of b") is None
    assert taken_over(None, None, "a", Path("/in/a.svs"), "key of a") is None


def test_a_slide_that_is_not_as_it_was_is_not(tmp_path: Path) -> None:
    before = batch(tmp_path / "set", "a", "b", "c")
    assert taken_over(None, before, "a", Path("/in/a.svs"), "another key") is None
    (before / "shard-00001.h5").write_bytes(b"damaged")
    assert taken_over(None, before, "b", Path("/in/b.svs"), "key of b") is None
    record = SlideRecord.load(before, "c")
    assert record is not None
    record.report["failed"] = True
    record.save(before, "c")
    assert taken_over(None, before, "c", Path("/in/c.svs"), "key of c") is None


def test_another_slide_of_that_name_is_refused(tmp_path: Path) -> None:
    before = batch(tmp_path / "set", "a")
    with pytest.raises(SlideError, match=r"another slide named a, from /in/a\.svs; rename /x/a"):
        taken_over(None, before, "a", Path("/x/a.svs"), "another key")
    # in the folder that is being built there is only what this batch was given
    assert taken_over(before, None, "a", Path("/x/a.svs"), "another key") is None


def test_slides_that_are_not_given_are_kept(tmp_path: Path) -> None:
    before, folder = batch(tmp_path / "set", "a", "b", "renamed"), tmp_path / "new"
    folder.mkdir()
    given = {"a": Path("/in/a.svs"), "other": Path("/in/renamed.svs")}
    (report,) = keep_others(folder, before, given)
    assert (report.slide, report.written) == ("b", 2)
    assert names_in(folder) == ["b"]
    assert keep_others(folder, None, given) == []


def test_slides_that_are_not_given_have_to_be_whole(tmp_path: Path) -> None:
    before, folder = batch(tmp_path / "set", "a", "b"), tmp_path / "new"
    folder.mkdir()
    (before / "coords/clam/patches/b.h5").unlink()
    with pytest.raises(ShardError, match=r"slide b in it, with .*add that slide \(/in/b.svs"):
        keep_others(folder, before, {"a": Path("/in/a.svs")})
    (before / "records" / "b.json").write_text("")
    with pytest.raises(ShardError, match="add that slide to"):
        keep_others(folder, before, {"a": Path("/in/a.svs")})
    assert keep_others(folder, before, {"b": Path("/in/b.svs")})[0].slide == "a"


def test_slides_that_fail_keep_what_there_was(tmp_path: Path) -> None:
    before, folder = batch(tmp_path / "set", "a", "b", "c"), tmp_path / "new"
    folder.mkdir()
    (before / "shard-00002.h5").unlink()
    failed = {
        name: TilingReport(name, failed=True, note="no", file=f"/{where}/{name}.svs")
        for where, name in (("in", "a"), ("other", "b"), ("in", "c"), ("in", "new"))
    }
    kept = keep_failed(folder, before, failed)
    assert list(kept) == names_in(folder) == ["a", "b"]
    assert kept["a"] is None
    assert (failed["a"].written, failed["a"].status) == (2, "damaged")
    assert failed["a"].note == "no; kept its 2 samples of an earlier run"
    assert kept["b"] == TilingReport("b", written=2, file="/in/b.svs")
    assert failed["b"].note == failed["c"].note == "no"
    assert keep_failed(folder, None, failed) == {}


def test_whether_there_is_work_worth_keeping(tmp_path: Path) -> None:
    (tmp_path / "parts" / "a" / "00000.x1").mkdir(parents=True)
    (tmp_path / "parts" / "a" / "overview.bmp").touch()
    assert not holds_work(tmp_path)
    (tmp_path / "parts" / "a" / "00000").mkdir()
    (tmp_path / "parts" / "a" / "00000" / "part.json").touch()
    assert holds_work(tmp_path)
    assert holds_work(batch(tmp_path / "set", "a"))


def test_files_are_copied_where_there_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EXDEV, "no links")

    before, folder = batch(tmp_path / "set", "a"), tmp_path / "new"
    folder.mkdir()
    record = SlideRecord.load(before, "a")
    assert record is not None
    monkeypatch.setattr("os.link", refused)
    moved_in(record, folder, before, "a")
    assert record.is_whole(folder)
    there = folder / "parts/a/00001/shard-00000.h5"
    assert not there.samefile(before / "shard-00000.h5")
    assert [path.name for path in there.parent.iterdir()] == [there.name]


def test_a_link_takes_the_place_of_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("new")
    (tmp_path / "b").write_text("old")
    for _ in range(2):
        link(tmp_path / "a", tmp_path / "b")
        assert (tmp_path / "b").read_text() == "new"
