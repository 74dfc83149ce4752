from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pydicom
import pytest
from pydicom.data import get_testdata_file
from pydicom.uid import SegmentationStorage

from spatialdl.data.importing.volume_file import open_volume
from spatialdl.data.importing.volume_files.dicom_folder import find_series
from tests.data.importing.volume_files.written import (
    check,
    dataset,
    enhanced,
    oblique,
    save,
    set_pixels,
    slices,
    voxels,
)


def copied(name, folder):
    folder.mkdir(parents=True, exist_ok=True)
    with open(get_testdata_file(name, download=False), "rb") as file:
        (folder / name).write_bytes(file.read())


def test_series_have_the_names_of_their_folders_and_of_their_files(tmp_path):
    save(slices(voxels(), oblique(), series="1.1"), tmp_path / "a" / "ct", suffix="")
    save(slices(voxels(), oblique(), series="1.2"), tmp_path / "b" / "x")
    save(slices(voxels() + 1, oblique(), series="1.3"), tmp_path / "b" / "x", suffix=".ima")
    (path,) = save([enhanced(voxels(), oblique())], tmp_path)
    (tmp_path / "a" / "notes.txt").write_text("no DICOM")
    (tmp_path / "a" / "ct" / "._000").write_bytes(b"\0" * 200)
    found = find_series(tmp_path, [*tmp_path.iterdir()]).series
    assert list(found) == [path.stem, "a_ct", "b_x_1.2", "b_x_1.3"]
    check(found["b_x_1.3"].open(), voxels() + 1, oblique())
    with pytest.raises(ValueError, match=r"2 DICOM series \(1.2, 1.3\)"):
        open_volume(tmp_path / "b" / "x")


def test_a_series_in_two_folders_is_one(tmp_path):
    made = slices(voxels(), oblique())
    save(made[:2], tmp_path / "p" / "1")
    save(made[2:], tmp_path / "p" / "2")
    found = find_series(tmp_path, [*tmp_path.iterdir()]).series
    assert list(found) == ["p"]
    check(found["p"].open(), voxels(), oblique())


def test_the_folder_itself_may_be_a_series(tmp_path):
    save(slices(voxels(), oblique()), tmp_path / "scan")
    folder = tmp_path / "scan"
    assert list(find_series(folder, [*folder.iterdir()]).series) == ["scan"]


def test_objects_that_are_no_images_are_counted(tmp_path):
    save(slices(voxels(), oblique()), tmp_path)
    for name in ("rtplan.dcm", "rtdose.dcm", "rtstruct.dcm", "test-SR.dcm", "reportsi.dcm"):
        copied(name, tmp_path)
    made = dataset(SegmentationStorage)
    set_pixels(made, np.zeros((4, 4), np.uint8))
    made.save_as(tmp_path / "seg.dcm", enforce_file_format=True)
    found = find_series(tmp_path, [*tmp_path.iterdir()])
    assert [len(one.files) for one in found.series.values()] == [4]
    assert found.segmentation == tmp_path / "seg.dcm"
    assert found.others["RT Dose Storage"] == found.others["Segmentation Storage"] == 1
    assert sum(found.others.values()) == 6


@pytest.mark.parametrize("length", [0, 100, 300, 600])
def test_a_damaged_file_is_not_left_out_of_its_series(length, tmp_path):
    paths = save(slices(voxels(), oblique()), tmp_path / "s")
    paths[3].write_bytes(paths[3].read_bytes()[:length])
    (found,) = find_series(tmp_path, [tmp_path / "s"]).series.values()
    with pytest.raises(ValueError, match=f"1 file .* cannot be read: {paths[3].name}: "):
        found.open()


def test_damaged_files_of_a_folder_are_one_series(tmp_path):
    for name in "abc":
        (tmp_path / "s").mkdir(exist_ok=True)
        (tmp_path / "s" / f"{name}.dcm").write_text("no DICOM")
    found = find_series(tmp_path, [tmp_path / "s"]).series
    assert list(found) == ["s"]
    with pytest.raises(ValueError, match=r"3 files .* cannot be read: a\.dcm"):
        found["s"].open()


def test_a_disc_with_its_directory(tmp_path):
    disc = Path(pydicom.data.__file__).parent / "test_files" / "dicomdirtests"
    shutil.copytree(disc / "98892001" / "CT5N", tmp_path / "CT5N")
    shutil.copy(disc / "DICOMDIR", tmp_path / "CT5N")
    found = find_series(tmp_path, [*tmp_path.iterdir()])
    assert dict(found.others) == {"Media Storage Directory Storage": 1}
    volume = found.series["CT5N"].open()
    assert volume.size[0] == 5
    slices = [pydicom.dcmread(path) for path, _ in found.series["CT5N"].files]
    for one in slices:
        x, y, z = map(float, one.ImagePositionPatient)
        place = np.linalg.solve(volume.affine[:, :3], [-x, -y, z] - volume.affine[:, 3])
        assert place[1:] == pytest.approx([0, 0], abs=1e-6)
        k = round(place[0])
        assert place[0] == pytest.approx(k, abs=1e-3)
        stored = one.pixel_array * one.RescaleSlope + one.RescaleIntercept
        assert (volume.read()[k, ..., 0] == stored).all()


def test_a_damaged_file_alone_has_a_sentence(tmp_path):
    (tmp_path / "a.dcm").write_text("no DICOM")
    with pytest.raises(ValueError, match=r"a\.dcm: it has no SOP Class"):
        open_volume(tmp_path / "a.dcm")
