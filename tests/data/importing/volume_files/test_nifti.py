from __future__ import annotations

import pickle

import nibabel
import numpy as np
import pytest

from spatialdl.data.importing.volume_file import open_volume

RANDOM = np.random.default_rng(0)
AFFINE = np.array([[-0.7, 0, 0.1, 3], [0, 0.8, 0, -4.5], [0.1, 0, 2.5, 7], [0, 0, 0, 1.0]])
BOX = (1, 4, 2, 5, 0, 3)


def voxels(*more: int, dtype=np.int16):
    return RANDOM.integers(-1000, 1000, (5, 7, 4, *more)).astype(dtype)


def with_slope(pixels):
    image = nibabel.Nifti1Image(pixels, AFFINE)
    image.header.set_slope_inter(0.5, -3)
    return image


CASES = {
    "a.nii": nibabel.Nifti1Image(voxels(), AFFINE),
    "a.nii.gz": nibabel.Nifti1Image(voxels(), AFFINE),
    "big_endian.nii": nibabel.Nifti1Image(
        voxels(), AFFINE, nibabel.Nifti1Header(endianness=">"), dtype=np.int16
    ),
    "slope.nii.gz": with_slope(voxels()),
    "float64.nii": nibabel.Nifti1Image(voxels(dtype=np.float64), AFFINE),
    "contrasts.nii.gz": nibabel.Nifti1Image(voxels(3), AFFINE),
    "vector.nii": nibabel.Nifti1Image(voxels(1, 2), AFFINE),
    "nifti2.nii": nibabel.Nifti2Image(voxels(), AFFINE),
}


@pytest.mark.parametrize("name", CASES)
def test_a_box_of_nifti_is_that_of_the_whole_volume(name, tmp_path):
    nibabel.save(CASES[name], tmp_path / name)
    found = open_volume(tmp_path / name)
    image = nibabel.load(tmp_path / name)
    whole = np.asarray(image.dataobj).reshape(5, 7, 4, -1).transpose(2, 1, 0, 3)
    assert (*found.size, found.channels) == whole.shape
    assert (found.read() == whole).all()
    assert found.read().dtype == found.dtype
    assert found.dtype.isnative
    expected = {"slope.nii.gz": np.float32, "float64.nii": np.float64}.get(name, np.int16)
    assert found.dtype == expected
    assert (pickle.loads(pickle.dumps(found)).read(BOX) == whole[1:4, 2:5, :3]).all()
    assert found.read((2, 2, 0, 7, 0, 5)).shape == (0, 7, 5, found.channels)
    where = np.array(found.affine) @ [3, 2, 1, 1]  # slice 3, row 2, column 1 is i 1, j 2, k 3
    assert where == pytest.approx((image.affine @ [1, 2, 3, 1])[:3])
    assert found.spacing == pytest.approx((np.hypot(0.1, 2.5), 0.8, np.hypot(0.7, 0.1)))


@pytest.mark.parametrize(
    ("shape", "said"),
    [((5, 7), r"\(5, 7\), expected a volume"), ((5, 7, 4, 2, 3), "expected a volume")],
)
def test_other_shapes_are_refused(shape, said, tmp_path):
    nibabel.save(nibabel.Nifti1Image(np.zeros(shape, np.int16), AFFINE), tmp_path / "a.nii")
    with pytest.raises(ValueError, match=said):
        open_volume(tmp_path / "a.nii")


def test_voxels_that_are_no_numbers_are_refused(tmp_path):
    colours = np.zeros((5, 7, 4), [("R", "u1"), ("G", "u1"), ("B", "u1")])
    nibabel.save(nibabel.Nifti1Image(colours, AFFINE), tmp_path / "rgb.nii")
    nibabel.save(nibabel.Nifti1Image(np.zeros((5, 7, 4), np.complex64), AFFINE), tmp_path / "c.nii")
    for name in ("rgb.nii", "c.nii"):
        with pytest.raises(ValueError, match="expected integers or floats"):
            open_volume(tmp_path / name)


def _with_header(path, **fields):
    nibabel.save(nibabel.Nifti1Image(voxels(), AFFINE), path)
    stored = bytearray(path.read_bytes())
    header = nibabel.Nifti1Header(bytes(stored[:348]))
    for name, value in fields.items():
        header[name] = value
    path.write_bytes(header.binaryblock + bytes(stored[348:]))
    return path


@pytest.mark.parametrize("row", [(0, 0, 0, 0), (np.nan, 0, 0, 0), (0, 0.8, 0, 0)])
def test_an_affine_that_spans_no_volume_is_refused(row, tmp_path):
    path = _with_header(tmp_path / "a.nii", srow_x=row)
    with pytest.raises(ValueError, match="slices, rows and columns lie in one plane"):
        open_volume(path)


def test_a_unit_that_is_none_of_nifti_is_refused(tmp_path):
    path = _with_header(tmp_path / "a.nii", xyzt_units=5)
    with pytest.raises(ValueError, match="it has xyzt_units 5"):
        open_volume(path)


def test_a_file_that_was_copied_in_part_is_told_from_others(tmp_path):
    path = tmp_path / "a.nii.gz"
    pixels = np.random.default_rng(0).integers(-1000, 1000, (40, 30, 20)).astype(np.int16)
    nibabel.save(nibabel.Nifti1Image(pixels, np.eye(4)), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(EOFError, match=r"it is damaged or incomplete \(.*\): copy it again"):
        open_volume(path).read()
    path.write_bytes(whole[:20])
    with pytest.raises(ValueError, match="it is damaged, or not a NIfTI file"):
        open_volume(path)
