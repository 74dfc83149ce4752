"""DICOM series through the tiling command: one slide each, in one split, done once."""

from __future__ import annotations

import csv
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import openslide
import pytest

from spatialdl.data import ShardDataset
from spatialdl.slides.batch.finding_slides import find_slides, slide_names
from spatialdl.slides.inspecting import inspect
from spatialdl.slides.reading.reader import Slide
from tests.slides.batch.batches import rows, tile
from tests.slides.dicom_series import uid, write_annotation, write_series

TILES = ["--tile-size", "64", "--mpp", "0.5"]
A, B = uid("a"), uid("b")


@pytest.fixture
def pictures(small: Path) -> dict[str, np.ndarray]:
    """The pixels of the two small slides."""
    found = {}
    for name in "ab":
        with Slide(small / f"{name}.tiff") as slide:
            found[name] = slide.read_scaled(0, 0, slide.size, 1.0)
    return found


@pytest.fixture
def cases(tmp_path: Path, pictures: dict[str, np.ndarray]) -> Path:
    """Two folders, a series of four files in each."""
    for name, series in (("a", A), ("b", B)):
        write_series(tmp_path / "cases" / f"case.{name}", pictures[name], series)
    return tmp_path / "cases"


@pytest.fixture
def flat(tmp_path: Path, pictures: dict[str, np.ndarray]) -> Path:
    """One folder with both series."""
    for name, series in (("a", A), ("b", B)):
        write_series(tmp_path / "flat", pictures[name], series, name=name + "{}.dcm")
    return tmp_path / "flat"


def labelled(path: Path, *names: str) -> Path:
    """A table of labels: the first slide is in train, the second in val."""
    lines = [
        f"{name},{split},{split}\n" for name, split in zip(names, ("train", "val"), strict=True)
    ]
    path.write_text("slide,label,split\n" + "".join(lines))
    return path


def splits(folder: Path) -> dict[str, set[str | None]]:
    """The splits of the samples of each slide."""
    data = ShardDataset(folder)
    found: dict[str, set[str | None]] = {}
    for number in range(len(data)):
        sample = data.sample(number)
        found.setdefault(str(sample.slide), set()).add(sample.split)
    return found


def test_openslide_takes_every_file_for_the_same_slide(cases: Path) -> None:
    files = sorted((cases / "case.a").iterdir())
    assert len(files) == 4
    slides = [openslide.OpenSlide(file) for file in files]
    assert {slide.properties["openslide.vendor"] for slide in slides} == {"dicom"}
    assert {slide.level_count for slide in slides} == {3}
    assert len({slide.properties["openslide.quickhash-1"] for slide in slides}) == 1


def test_folders_are_found(cases: Path, flat: Path) -> None:
    a, b = cases / "case.a", cases / "case.b"
    assert find_slides([cases], recursive=True) == find_slides([a, b]) == [a, b]
    with pytest.raises(ValueError, match=r"has no slides in it .* --recursive"):
        find_slides([cases])
    given = [*a.iterdir(), a, a / A, cases / ".." / "cases" / "case.a"]
    assert find_slides(given) == [a]
    assert find_slides([flat]) == sorted([flat / A, flat / B])
    assert find_slides([flat / "b1.dcm", flat / B]) == [flat / B]
    with pytest.raises(ValueError, match="cannot find slide"):
        find_slides([flat / uid("c")])
    assert list(slide_names([a, b, flat / A]).values()) == ["case.a", "case.b", A]


def test_one_series_in_two_folders_is_refused(cases: Path, flat: Path) -> None:
    with pytest.raises(ValueError, match=f"{A} is in .*case.a and in .*flat"):
        find_slides([cases / "case.a", flat])


def test_what_is_no_slide_is_passed_over_in_folders(
    cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_annotation(cases / "case.a" / "note.dcm", uid("note"))
    assert find_slides([cases / "case.a"]) == [cases / "case.a"]
    (tmp_path / "notes").mkdir()
    note = write_annotation(tmp_path / "notes" / "note.dcm", uid("note"))
    with pytest.raises(ValueError, match="has no slides"):
        find_slides([tmp_path / "notes"])
    assert tile(note, "--out", tmp_path / "set", *TILES) == 1
    assert "DICOM file, but not a whole-slide image" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("names", [("case.a", B), (A, "cases/case.b"), ("case.a/level-2.dcm", B)])
def test_a_series_is_one_slide_of_one_split(
    tmp_path: Path, cases: Path, small: Path, names: tuple[str, str]
) -> None:
    labels = labelled(tmp_path / "labels.csv", *names)
    out = tmp_path / "set"
    assert tile(cases, "--recursive", "--out", out, *TILES, "--labels", labels) == 0
    assert splits(out) == {"case.a": {"train"}, "case.b": {"val"}}
    assert sorted(rows(out)) == ["case.a", "case.b"]
    assert rows(out)["case.a"]["slide_id"] == "case.a"
    # the tiles of the same picture as TIFF
    assert tile(small, "--out", tmp_path / "tiff", *TILES) == 0
    places = []
    for made in (out, tmp_path / "tiff"):
        data = ShardDataset(made)
        places.append(Counter((s.x, s.y) for s in map(data.sample, range(len(data)))))
    assert places[0] == places[1]


def test_labels_must_tell_series_apart(
    tmp_path: Path, cases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [cases, "--recursive", "--out", tmp_path / "set", *TILES, "--labels"]
    assert tile(*words, labelled(tmp_path / "labels.csv", "case.a", A)) == 2
    assert f"slide '{A}' is a duplicate" in capsys.readouterr().err
    assert tile(*words, labelled(tmp_path / "labels.csv", "level-0.dcm", B)) == 2
    assert "is ambiguous: " in capsys.readouterr().err
    assert tile(*words, labelled(tmp_path / "labels.csv", "case", B)) == 2
    assert "names case, which is not among" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_a_batch_goes_on_where_it_was(
    tmp_path: Path,
    cases: Path,
    flat: Path,
    pictures: dict[str, np.ndarray],
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "set"
    assert tile(cases / "case.a", "--out", out, *TILES) == 0
    before = len(ShardDataset(out))
    assert tile(*(cases / "case.a").iterdir(), "--out", out, *TILES) == 0
    assert "nothing to do" in capsys.readouterr().out
    # a slide more; the first is not cut again
    shutil.rmtree(cases / "case.a")
    assert tile(cases / "case.b", "--out", out, *TILES) == 0
    assert sorted(splits(out)) == ["case.a", "case.b"]
    # one file of a series with other contents is another slide
    write_series(cases / "case.b", 255 - pictures["b"], B, 1, label=False)
    assert tile(cases / "case.b", "--out", out, *TILES) in (0, 1)
    assert "nothing to do" not in capsys.readouterr().out
    # the same series, called by its UID once another lies beside it
    fresh = tmp_path / "other"
    assert tile(flat / A, "--out", fresh, *TILES) == 0
    assert len(ShardDataset(fresh)) == before
    for file in flat.glob("b*"):
        file.unlink()
    assert tile(flat, "--out", fresh, *TILES) == 0
    assert list(splits(fresh)) == ["flat"]


@pytest.mark.usefixtures("quick")
def test_a_data_set_with_a_slide_per_file_is_mended(tmp_path: Path, cases: Path) -> None:
    """Earlier versions made one slide of every file."""
    out = tmp_path / "set"
    assert tile(cases / "case.a", "--out", out, *TILES) == 0
    record = out / "records" / "case.a.json"
    old = record.read_text().replace(f"case.a/{A}", "case.a/level-1.dcm")
    (out / "records" / "level-1.json").write_text(old)
    record.unlink()
    assert tile(cases / "case.a", "--out", out, *TILES) == 0
    assert list(splits(out)) == ["case.a"]


@pytest.mark.usefixtures("quick")
def test_masks_and_annotations_have_either_name(tmp_path: Path, cases: Path) -> None:
    ring = [[0, 0], [256, 0], [256, 256], [0, 256], [0, 0]]
    text = (
        '{"type": "FeatureCollection", "features": [{"type": "Feature", "properties": '
        '{"classification": {"name": "x"}}, "geometry": {"type": "Polygon", "coordinates": '
        f"[{ring}]}}}}]}}"
    )
    (tmp_path / "notes").mkdir()
    for name in ("case.a", B):
        (tmp_path / "notes" / f"{name}.geojson").write_text(text)
    words = ["--recursive", "--out", tmp_path / "set", *TILES, "--annotations", tmp_path / "notes"]
    assert tile(cases, *words) == 0
    assert ShardDataset(tmp_path / "set").classes == ["x"]
    assert sorted(splits(tmp_path / "set")) == ["case.a", "case.b"]


@pytest.mark.usefixtures("quick")
def test_jobs_and_damaged_files(tmp_path: Path, flat: Path) -> None:
    (flat / "damaged.dcm").write_bytes((flat / "a0.dcm").read_bytes()[:400])
    out = tmp_path / "set"
    assert tile(flat, "--out", out, *TILES, "--jobs", 2) == 1
    with (out / "process_list.csv").open(newline="") as file:
        found = {row["slide_id"]: row["status"] for row in csv.DictReader(file)}
    assert found == {A: "processed", B: "processed", "damaged.dcm": "failed"}


def test_series_are_inspected(cases: Path, flat: Path) -> None:
    one = inspect(cases / "case.a")
    assert "format      dicom" in one
    assert "in 4 files" in one
    assert inspect(flat / A).splitlines()[2:] == [
        line.replace(str(flat / "a0.dcm"), str(flat / A))
        for line in inspect(flat / "a0.dcm").splitlines()[2:]
    ]
    lines = inspect(flat).splitlines()
    assert [line.split()[0] for line in lines] == ["slide", *sorted([A, B])]
