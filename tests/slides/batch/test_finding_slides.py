from __future__ import annotations

from pathlib import Path

import pytest

from spatialdl.slides.batch.finding_slides import find_slides, slide_names, storable


def test_slides_are_found_in_folders(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "folder.svs").mkdir()
    for name in ("b.SVS", "a.tiff", "notes.txt", "more/a.tiff", "more/c"):
        (tmp_path / name).touch()
    assert find_slides([tmp_path, tmp_path / "a.tiff", tmp_path / "more" / "c"]) == [
        tmp_path / "a.tiff",
        tmp_path / "b.SVS",
        tmp_path / "more" / "c",
    ]
    found = find_slides([tmp_path], recursive=True)
    assert found == [tmp_path / "a.tiff", tmp_path / "b.SVS", tmp_path / "more" / "a.tiff"]


def test_what_is_given_twice_is_cut_once(tmp_path: Path) -> None:
    (tmp_path / "a.svs").touch()
    (tmp_path / "link.svs").symlink_to(tmp_path / "a.svs")
    given = [tmp_path / "a.svs", tmp_path / "link.svs", tmp_path / ".." / tmp_path.name / "a.svs"]
    assert find_slides(given) == [tmp_path / "a.svs"]


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot find slide .*none\.svs: there is no such file"):
        find_slides([tmp_path / "none.svs"])
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.svs").touch()
    with pytest.raises(ValueError, match=r"has no slides in it .* --recursive"):
        find_slides([tmp_path])


def test_names_are_as_short_as_tells_them_apart(tmp_path: Path) -> None:
    paths = [tmp_path / k for k in ("x/a.svs", "x/b.svs", "x/b.tiff", "y/b.tiff", "y/A.svs")]
    names = slide_names(paths)
    assert list(names.values()) == ["x_a.svs", "b.svs", "x_b.tiff", "y_b.tiff", "y_A.svs"]


def test_names_that_differ_by_capitals_only_are_two(tmp_path: Path) -> None:
    names = slide_names([tmp_path / "a.svs", tmp_path / "A.svs"])
    assert len({name.casefold() for name in names.values()}) == 2


def test_a_name_made_up_is_nobody_elses(tmp_path: Path) -> None:
    names = slide_names([tmp_path / k for k in ("x/a.svs", "y/a.svs", "z/x_a.svs.tiff")])
    assert len(set(names.values())) == 3


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/passwd", "a/b", "..", ".", "a\0b", "x" * 300, "\ud800", "é"]
)
def test_a_name_is_that_of_one_file(tmp_path: Path, name: str) -> None:
    stored = storable(name)
    (tmp_path / f"{stored}.json").touch()
    assert [path.name for path in tmp_path.iterdir()] == [f"{stored}.json"]
    assert storable(stored) == stored


def test_names_that_are_changed_stay_apart() -> None:
    names = ["a/b", "a_b", "a\0b", "/a/b", "../a", ".", ".."]
    assert len({storable(name) for name in names}) == len(names)
    assert storable("a_b") == "a_b"
