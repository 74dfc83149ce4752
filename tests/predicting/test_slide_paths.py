from __future__ import annotations

from pathlib import Path

import pytest

from spatialdl.predicting.records import key_of
from spatialdl.predicting.slide_paths import slide_paths, volume_names, volume_paths
from tests.data.importing.written import oblique, save, slices, voxels
from tests.slides.dicom_series import uid, write_series
from tests.slides.tiled_tiffs import picture

A, B = uid("a"), uid("b")


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    """Two folders, one with a series and one with two."""
    write_series(tmp_path / "one", picture(200, 150), A)
    for series in (B, uid("c")):
        write_series(tmp_path / "two", picture(200, 150), series, 1, name=series + "{}.dcm")
    return tmp_path


def test_series_are_given_by_folders_uids_files_and_patterns(cases: Path) -> None:
    one, two = cases / "one", cases / "two"
    for given in (one, one / A, [one, one / "level-1.dcm"], one / "*.dcm", cases / "on*"):
        found = slide_paths([*map(str, given)] if isinstance(given, list) else str(given))
        assert [path.resolve() for path in found] in ([one], [one / A])
    assert slide_paths(str(two / B)) == [two / B]
    assert len(slide_paths(str(cases / "*"))) == 3
    with pytest.raises(ValueError, match="matches no file or folder"):
        slide_paths(str(two / uid("d")))


def test_a_series_is_predicted_anew_when_one_of_its_files_changes(cases: Path) -> None:
    before = key_of([], cases / "one")
    assert key_of([], cases / "one") == before == key_of([], cases / "one" / A)
    write_series(cases / "one", 255 - picture(200, 150), A, name="level-{}.dcm")
    assert key_of([], cases / "one") != before


def test_volumes_are_given_by_files_folders_and_patterns(tmp_path: Path) -> None:
    files = [tmp_path / case / name for case in "pq" for name in ("ct.nii.gz", "pet.nii")]
    for path in (*files, tmp_path / "p" / "notes.txt", tmp_path / "p" / ".hidden.nii"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert volume_paths(str(tmp_path / "p")) == files[:2]
    assert volume_paths([str(tmp_path / "q"), str(files[0]), str(files[0])]) == [
        *files[2:],
        files[0],
    ]
    assert volume_paths(str(tmp_path / "*" / "ct*")) == files[::2]
    save(slices(voxels(), oblique()), tmp_path / "d" / "ct1")
    (tmp_path / "d" / "a.ome.zarr").mkdir()
    given = [tmp_path / "d" / "a.ome.zarr", tmp_path / "d" / "ct1"]
    assert volume_paths(str(tmp_path / "d")) == given
    assert volume_paths([*map(str, given)]) == given
    assert list(volume_names(files[:2]).values()) == ["ct", "pet"]
    assert list(volume_names(files[::2]).values()) == ["p_ct.nii.gz", "q_ct.nii.gz"]
    (tmp_path / "empty").mkdir()
    for given, said in (
        ("none*", "matches no file or folder"),
        ("empty", r"empty contains no files of \.nii, \.nii\.gz"),
        ("p/notes.txt", r"notes\.txt is not a file of \.nii"),
    ):
        with pytest.raises(ValueError, match=said):
            volume_paths(str(tmp_path / given))
    with pytest.raises(ValueError, match=r"volumes=\[\] names no volume"):
        volume_paths([])
