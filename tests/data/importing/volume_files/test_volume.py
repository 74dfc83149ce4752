from __future__ import annotations

import sys

import numpy as np
import pytest

from spatialdl.data.importing.volume_file import open_volume
from spatialdl.data.importing.volume_files.volume import affine_from, millimetres, numbers_of


@pytest.mark.parametrize(
    ("package", "name"),
    [("nibabel", "a.nii"), ("nrrd", "a.nrrd"), ("zarr", "a.ome.zarr"), ("pydicom", "a.dcm")],
)
def test_without_a_package_its_extra_is_named(package, name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).write_text("?")
    with pytest.raises(
        ValueError, match=rf"it requires {package}: pip install 'spatialdl\[volumes"
    ):
        open_volume(tmp_path / name)


@pytest.mark.parametrize(
    ("unit", "length"),
    [("mm", 1), ("\u00b5m", 1e-3), ("\u03bcm", 1e-3), ("nanometer", 1e-6), ("in", 25.4)],
)
def test_units_have_lengths(unit, length):
    assert millimetres(unit) == length


@pytest.mark.parametrize("unit", ["pixel", "", "None", "second"])
def test_other_units_have_none(unit):
    assert millimetres(unit) is None


def test_steps_in_one_plane_are_refused():
    spacing, affine = affine_from([(0, 0, 2), (0, 3, 0), (4, 0, 0)], (5, 6, 7))
    assert spacing == (2, 3, 4)
    assert affine.tolist() == [[0, 0, 4, 5], [0, 3, 0, 6], [2, 0, 0, 7]]
    for step in ((0, 3, 4), (0, 0, 0), (np.nan, 0, 0)):
        with pytest.raises(ValueError, match="lie in one plane"):
            affine_from([step, (0, 3, 0), (0, 0, 1)], (5, 6, 7))


@pytest.mark.parametrize("dtype", [np.complex64, "U3", np.longdouble])
def test_voxels_that_are_no_numbers_are_refused(dtype):
    with pytest.raises(ValueError, match="expected integers or floats"):
        numbers_of(dtype)
    assert numbers_of(">i2") == np.dtype(np.int16)
