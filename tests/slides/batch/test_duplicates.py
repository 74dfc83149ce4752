from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from spatialdl.data import ShardDataset
from spatialdl.slides.batch.duplicates import check_duplicates
from spatialdl.slides.batch.labels import SlideLabel
from tests.slides.batch.batches import TILES, tile

TRAIN, VAL = SlideLabel("x", "train"), SlideLabel("x", "val")


@pytest.fixture
def three(tmp_path: Path, small: Path) -> list[Path]:
    """Two slides that are the same, and another one."""
    paths = [tmp_path / f"{name}.tiff" for name in ("one", "two", "other")]
    for path, name in zip(paths, "aab", strict=True):
        shutil.copy(small / f"{name}.tiff", path)
    return paths


def test_the_same_slide_in_two_splits_is_refused(three: list[Path]) -> None:
    one, two, other = three
    with pytest.raises(ValueError, match=r"one\.tiff \(train\) and .*two\.tiff \(val\); remove"):
        check_duplicates(three, {one: TRAIN, two: VAL, other: VAL}, None)
    for labels in ({}, {one: TRAIN, two: TRAIN, other: VAL}):
        (line,) = check_duplicates(three, labels, None)
        assert line == f"{one} and {two} are the same slide; its tiles count twice"
    assert check_duplicates([one, other], {}, None) == []


def test_one_other_byte_is_another_slide(three: list[Path]) -> None:
    content = bytearray(three[1].read_bytes())
    content[len(content) // 2] ^= 1
    three[1].write_bytes(content)
    assert check_duplicates(three, {three[0]: TRAIN, three[1]: VAL, three[2]: VAL}, None) == []


def test_what_is_no_slide_is_not_compared(tmp_path: Path) -> None:
    paths = [tmp_path / "a.svs", tmp_path / "b.svs"]
    for path in paths:
        path.touch()
    assert check_duplicates(paths, {paths[0]: TRAIN, paths[1]: VAL}, None) == []


@pytest.mark.usefixtures("quick")
def test_the_same_slide_added_later_is_refused(
    tmp_path: Path, three: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, other = three
    out, labels = tmp_path / "set", tmp_path / "labels.csv"
    words = ["--out", out, *TILES, "--labels", labels]
    labels.write_text("slide,label,split\none,x,train\n")
    assert tile(one, *words) == 0
    count = len(ShardDataset(out))
    labels.write_text("slide,label,split\ntwo,x,val\nother,x,val\n")
    assert tile(two, other, *words) == 2
    said = capsys.readouterr().err
    assert f"slide one of the data set (train) and {two} (val)" in said
    assert len(ShardDataset(out)) == count
    labels.write_text("slide,label,split\ntwo,x,train\nother,x,val\n")
    assert tile(two, other, *words) == 0
    assert f"warning: slide one of the data set and {two} are the same" in capsys.readouterr().err
    # moved, and called as it was: no other slide
    (tmp_path / "moved").mkdir()
    one = one.rename(tmp_path / "moved" / "one.tiff")
    labels.write_text("slide,label,split\none,x,train\n")
    assert tile(one, "--out", tmp_path / "fresh", *TILES, "--labels", labels) == 0
    moved = shutil.copy(one, tmp_path / "one.tiff")
    assert tile(moved, "--out", tmp_path / "fresh", *TILES, "--labels", labels) == 0
    assert "are the same" not in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_copies_in_two_splits_write_nothing(
    tmp_path: Path, three: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    labels = tmp_path / "labels.csv"
    labels.write_text("slide,label,split\none,x,train\ntwo,x,val\nother,x,val\n")
    words = ["--out", tmp_path / "set", *TILES, "--labels", labels]
    for more in ([], ["--dry-run"]):
        assert tile(*three, *words, *more) == 2
        assert "the same slide is in different splits" in capsys.readouterr().err
    assert not (tmp_path / "set").exists()


@pytest.mark.usefixtures("quick")
def test_a_patient_in_two_splits_is_refused(
    tmp_path: Path, three: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    labels, out = tmp_path / "labels.csv", tmp_path / "set"
    labels.write_text("slide,label,split,patient\none,x,train,p\nother,x,val,p\n")
    words = [three[0], three[2], "--out", out, *TILES, "--labels", labels]
    assert tile(*words) == 2
    assert "patient p is in train and val" in capsys.readouterr().err
    assert not out.exists()
    assert tile(*words, "--allow-leaks") == 0
    labels.write_text("slide,label,split,patient\none,x,train,p\ntwo,x,val,q\n")
    words = [*three[:2], "--out", tmp_path / "copies", *TILES, "--labels", labels]
    assert tile(*words) == 2
    assert tile(*words, "--allow-leaks") == 0
    assert "are the same slide" in capsys.readouterr().err
