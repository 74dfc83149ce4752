from __future__ import annotations

import pytest

from spatialdl.data.importing.volume_file import is_volume, open_volume, volume_name


def test_names_of_volumes(tmp_path):
    assert volume_name(tmp_path / "a.b.nii.gz") == "a.b"
    assert volume_name(tmp_path / "A.NII") == "A"
    assert volume_name(tmp_path / "a.ome.TIF") == "a"
    assert is_volume(tmp_path / "A.Tiff")
    assert is_volume(tmp_path / "a.zarr")
    assert not is_volume(tmp_path / ".a.nii")
    assert not is_volume(tmp_path / "a.gz")


def test_what_is_no_volume_by_its_name_or_content_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("no volume")
    for path in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(ValueError, match=r"it has 0 DICOM series \(none\), expected one"):
            open_volume(path)


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz", "a.nrrd", "a.tif", "a.dcm"])
def test_an_empty_file_is_refused_as_such(name, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"it is an empty file \(0 bytes\)"):
        open_volume(tmp_path / name)
