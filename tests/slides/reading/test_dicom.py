"""DICOM series: found among files, one slide each, in one split, cut once."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from spatialdl.errors import SlideError
from spatialdl.slides.batch.finding_slides import find_slides, slide_names
from spatialdl.slides.finding.annotations import find_annotations
from spatialdl.slides.reading.paths import (
    grouped,
    series_at,
    slide_addresses,
    slide_aliases,
    slide_bytes,
    slide_files,
    slide_name,
    slide_path,
    slide_source,
    slides_among,
)
from spatialdl.slides.reading.reader import Slide
from tests.slides.batch.batches import rows, samples, tile
from tests.slides.dicom_series import uid, write_annotation, write_series
from tests.slides.tiled_tiffs import picture

SIZE = ["--tile-size", "64", "--mpp", "0.5"]
A, B = sorted([uid("a"), uid("b")])


def test_files_are_grouped_by_series(tmp_path):
    a = write_series(tmp_path, picture(200, 150), A, 2, name="a{}.dcm")
    b = write_series(tmp_path, picture(200, 150), B, 1, label=False, name="1.2.{}")
    write_annotation(tmp_path / "note.dcm", uid("note"))
    (tmp_path / "broken.dcm").write_bytes(a[0].read_bytes()[:200])
    for name in ("text.dcm", "README", "empty.dcm"):
        (tmp_path / name).write_text("" if name == "empty.dcm" else "no slide")
    path = write_annotation(tmp_path / "path.dcm", "1.2.3.4")  # a path for a UID
    path.write_bytes(path.read_bytes().replace(b"1.2.3.4\0", b"../../x\0"))
    found = grouped(tmp_path.iterdir())
    slides = [(k.uid, list(k.files)) for k in found if k.is_slide]
    assert slides == [(A, sorted(a)), (B, b)]
    assert [k.uid for k in found if not k.is_slide] == [uid("note")]
    # a file that is written anew is read anew
    write_annotation(tmp_path / "note.dcm", uid("other note"))
    assert uid("other note") in [k.uid for k in grouped(tmp_path.iterdir())]


def test_without_pydicom_only_dicom_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydicom.filereader", None)
    (tmp_path / "IM0001").write_text("no slide")
    assert grouped(tmp_path.iterdir()) == []
    write_annotation(tmp_path / "a.dcm", uid("note"))
    with pytest.raises(SlideError, match=r"a\.dcm is a DICOM file.*pip install .spatialdl\[dicom"):
        grouped(tmp_path.iterdir())


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """A folder with one series in it, and what is no slide."""
    folder = tmp_path / "case.1"
    write_series(folder, picture(300, 200), A)
    write_annotation(folder / "note.dcm", uid("note"))
    (folder / "notes.txt").touch()
    return folder


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """A folder with two series in it."""
    write_series(tmp_path / "flat", picture(300, 200), A, name="a{}.dcm")
    write_series(tmp_path / "flat", picture(300, 200), B, 2, name="b{}.dcm")
    return tmp_path / "flat"


def test_a_series_alone_in_its_folder_is_the_folder(alone):
    assert slides_among(alone, alone.iterdir()) == [alone]
    files = sorted(alone.glob("level-*"))
    assert {slide_path(file) for file in files} == {alone}
    assert list(slide_files(alone)) == files
    assert slide_bytes(alone) == sum(file.stat().st_size for file in files)
    assert slide_name(alone) == "case.1"
    assert list(slide_aliases(alone)) == ["case.1", A]
    assert slide_source(alone) == alone / A == slide_source(alone / A) == slide_source(files[0])
    assert slide_addresses(alone) == [alone, alone / A, *files]
    with Slide(alone) as slide:
        assert (slide.name, slide.size, slide.downsamples) == ("case.1", (300, 200), (1, 2, 4))
        assert slide.mpp == pytest.approx(0.5)


def test_series_beside_others_have_their_uid(flat):
    assert slides_among(flat, flat.iterdir()) == [flat / A, flat / B]
    assert series_at(flat) is series_at(flat / uid("c")) is None
    assert slide_path(flat / "b1.dcm") == flat / B
    assert list(slide_files(flat / B)) == sorted(flat.glob("b*"))
    assert slide_name(flat / B) == B
    assert slide_source(flat / "b0.dcm") == flat / B
    assert flat not in slide_addresses(flat / B)
    for name in ("case.a", B):  # a mask or annotations have its name
        (flat / f"{name}.xml").touch()
    assert find_annotations(flat, flat / B) == flat / f"{B}.xml"
    with Slide(flat / B) as slide:
        assert (slide.name, slide.downsamples) == (B, (1, 2))


def test_what_else_lies_in_a_folder_of_a_series(alone, monkeypatch):
    with monkeypatch.context() as patch:  # the folder in which one is has its name
        patch.chdir(alone)
        assert slide_name(Path()) == "case.1"
        assert slide_source(Path("level-1.dcm")) == alone / A
    damaged = alone / "damaged.dcm"  # is a slide of its own
    damaged.write_bytes((alone / "level-0.dcm").read_bytes()[:300])
    assert slides_among(alone, alone.iterdir()) == [alone, damaged]
    damaged.unlink()
    (alone / "x.svs").touch()  # another slide keeps the folder from being one
    assert slides_among(alone, alone.iterdir()) == [alone / A, alone / "x.svs"]
    assert series_at(alone) is None


def test_a_series_of_one_file_is_a_file_or_its_folder(tmp_path):
    (file,) = write_series(tmp_path / "one", picture(300, 200), A, 1, label=False)
    assert slide_path(file) == file
    assert slide_name(file) == "level-0"
    assert list(slide_aliases(file)) == ["level-0", "level-0.dcm", A]
    assert slides_among(tmp_path / "one", [file]) == [tmp_path / "one"]
    assert slide_source(file) == slide_source(tmp_path / "one")
    (other,) = write_series(tmp_path / "one", picture(300, 200), B, 1, label=False, name="b{}.dcm")
    assert slides_among(tmp_path / "one", [file, other]) == sorted([file, other])


def test_a_folder_is_read_again_once_it_has_changed(alone):
    long_ago = time.time() - 1000
    os.utime(alone, (long_ago, long_ago))
    for _ in range(2):
        assert slide_name(slide_path(alone / "level-0.dcm")) == "case.1"
    write_series(alone, picture(300, 200), B, name="b{}.dcm")
    assert slide_path(alone / "level-0.dcm") == alone / A
    os.utime(alone, (long_ago + 1, long_ago + 1))
    assert [slide_name(slide_path(alone / f"{k}0.dcm")) for k in ("level-", "b")] == [A, B]


@pytest.fixture(scope="module")
def pictures(small: Path) -> dict[str, np.ndarray]:
    """The pixels of the two small slides."""
    found = {}
    for name in "ab":
        with Slide(small / f"{name}.tiff") as slide:
            found[name] = slide.read_scaled(0, 0, slide.size, 1.0)
    return found


@pytest.fixture
def cases(tmp_path: Path, pictures: dict[str, np.ndarray], quick: None) -> Path:
    """Two folders, a series of four files in each."""
    for name, series in (("a", A), ("b", B)):
        write_series(tmp_path / "cases" / f"case.{name}", pictures[name], series)
    return tmp_path / "cases"


def labelled(path: Path, *names: str) -> Path:
    """A table of labels: the first slide is in train, the second in val."""
    lines = (f"{name},{k},{k}\n" for name, k in zip(names, ("train", "val"), strict=True))
    path.write_text("slide,label,split\n" + "".join(lines))
    return path


def splits(folder: Path) -> dict[str, set[str | None]]:
    """The splits of the samples of each slide."""
    found: dict[str, set[str | None]] = {}
    for sample in samples(folder):
        found.setdefault(str(sample.slide), set()).add(sample.split)
    return found


def test_folders_are_found(cases, flat):
    a, b = cases / "case.a", cases / "case.b"
    assert find_slides([cases], recursive=True) == find_slides([a, b]) == [a, b]
    given = [*a.iterdir(), a, a / A, cases / ".." / "cases" / "case.a"]
    assert find_slides(given) == [a]
    assert find_slides([flat]) == [flat / A, flat / B]
    assert find_slides([flat / "b1.dcm", flat / B]) == [flat / B]
    assert list(slide_names([a, b, flat / A]).values()) == ["case.a", "case.b", A]
    for paths, says in [
        ([cases], r"has no slides in it .* --recursive"),
        ([flat / uid("c")], "cannot find slide"),
        ([a, flat], f"{A} is in .*case.a and in .*flat"),
    ]:
        with pytest.raises(ValueError, match=says):
            find_slides(paths)


def test_a_series_is_one_slide_of_one_split(tmp_path, cases):
    labels, out = labelled(tmp_path / "labels.csv", "case.a/level-2.dcm", B), tmp_path / "set"
    assert tile(cases, "--recursive", "--out", out, *SIZE, "--labels", labels) == 0
    assert splits(out) == {"case.a": {"train"}, "case.b": {"val"}}
    found = {name: row["slide_id"] for name, row in rows(out).items()}
    assert found == {"case.a": "case.a", "case.b": "case.b"}


def test_labels_must_tell_series_apart(tmp_path, cases, capsys):
    words = [cases, "--recursive", "--out", tmp_path / "set", *SIZE, "--labels"]
    for names, says in [
        (("case.a", A), f"slide '{A}' is a duplicate"),
        (("level-0.dcm", B), "is ambiguous: "),
        (("case", B), "names case, not among"),
    ]:
        assert tile(*words, labelled(tmp_path / "labels.csv", *names)) == 2
        assert says in capsys.readouterr().err


def test_a_batch_goes_on_where_it_was(tmp_path, cases, pictures, capsys):
    out = tmp_path / "set"
    assert tile(cases / "case.a", "--out", out, *SIZE) == 0
    assert tile(*(cases / "case.a").iterdir(), "--out", out, *SIZE) == 0
    assert "nothing to do" in capsys.readouterr().out
    # one file of a series with other contents is another slide
    write_series(cases / "case.a", 255 - pictures["b"], A, 1, label=False)
    assert tile(cases / "case.a", "--out", out, *SIZE) in (0, 1)
    assert "nothing to do" not in capsys.readouterr().out


def test_a_data_set_with_a_slide_per_file_is_mended(tmp_path, cases):
    """Earlier versions made one slide of every file."""
    out = tmp_path / "set"
    assert tile(cases / "case.a", "--out", out, *SIZE) == 0
    record = out / "records" / "case.a.json"
    old = record.read_text().replace(f"case.a/{A}", "case.a/level-1.dcm")
    (out / "records" / "level-1.json").write_text(old)
    record.unlink()
    assert tile(cases / "case.a", "--out", out, *SIZE) == 0
    assert list(splits(out)) == ["case.a"]


def test_damaged_files_are_slides_that_failed(tmp_path, cases):
    a, out = cases / "case.a", tmp_path / "set"
    (a / "damaged.dcm").write_bytes((a / "level-0.dcm").read_bytes()[:400])
    assert tile(a, "--out", out, *SIZE) == 1
    found = {row["slide_id"]: row["status"] for row in rows(out).values()}
    assert found == {"case.a": "processed", "damaged.dcm": "failed"}
