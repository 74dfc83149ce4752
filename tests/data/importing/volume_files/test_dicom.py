from __future__ import annotations

import pickle

import numpy as np
import pydicom
import pytest
from nibabel.nicom.dicomwrappers import wrapper_from_data
from pydicom.data import get_testdata_file
from pydicom.uid import JPEGLSLossless

from spatialdl.data.importing.volume_file import open_volume
from tests.data.importing.volume_files.written import (
    check,
    enhanced,
    oblique,
    save,
    slices,
    voxels,
)


@pytest.fixture
def series():
    return slices(voxels(), oblique())


@pytest.mark.parametrize("affine", [oblique(), np.diag([-0.5, 0.9, -3.0, 1.0])])
@pytest.mark.parametrize("suffix", [".dcm", ""])
def test_slices_are_ordered_by_place_and_lie_where_nibabel_has_them(affine, suffix, tmp_path):
    save(slices(voxels(), affine), tmp_path / "s", suffix)
    found = open_volume(tmp_path / "s")
    check(found, voxels(), affine)
    check(pickle.loads(pickle.dumps(found)), voxels(), affine)
    assert (found.size, found.dtype) == ((4, 7, 5), np.int16)
    assert found.spacing[1:] == pytest.approx(np.linalg.norm(affine[:3, 1::-1], axis=0), rel=1e-6)


@pytest.mark.parametrize("name", ["CT_small.dcm", "MR_small.dcm"])
def test_a_slice_of_a_scanner_lies_where_nibabel_has_it(name, tmp_path):
    first = get_testdata_file(name, read=True, download=False)
    second = get_testdata_file(name, read=True, download=False)
    normal = np.cross(*np.reshape(np.array(first.ImageOrientationPatient, float), (2, 3)))
    second.ImagePositionPatient = [*(np.array(first.ImagePositionPatient, float) + 2.5 * normal)]
    save([second, first], tmp_path / "s")
    found = open_volume(tmp_path / "s")
    to_ras = np.diag([-1, -1, 1, 1]) @ wrapper_from_data(first).affine
    for row, column in ((0, 0), (3, 50)):
        there = found.affine @ [0, row, column, 1]
        assert there == pytest.approx((to_ras @ [row, column, 0, 1])[:3], abs=1e-4)
    assert found.spacing[0] == pytest.approx(2.5, rel=1e-5)
    rescaled = first.pixel_array * first.get("RescaleSlope", 1) + first.get("RescaleIntercept", 0)
    assert (found.read()[0, ..., 0] == rescaled).all()


@pytest.mark.parametrize(
    ("slope", "intercept", "dtype"),
    [("1", "-1024", np.int16), ("2", "0", np.int16), ("0.5", "1", np.float32)],
)
def test_values_are_those_of_the_modality(series, slope, intercept, dtype, tmp_path):
    for one in series:
        one.BitsStored, one.HighBit = 12, 11
        one.RescaleSlope, one.RescaleIntercept = slope, intercept
    save(series, tmp_path / "s")
    found = open_volume(tmp_path / "s")
    assert found.dtype == dtype
    check(found, voxels() * float(slope) + float(intercept))


def test_a_slope_of_each_slice_is_applied(series, tmp_path):
    for k, one in enumerate(series):
        one.RescaleSlope, one.RescaleIntercept = f"{k + 0.5}", "0"
    save(series, tmp_path / "s")
    slopes = np.arange(4) + 0.5
    check(open_volume(tmp_path / "s"), voxels() * slopes)


def test_bits_that_are_not_stored_are_not_values(series, tmp_path):
    for one in series:
        one.BitsStored, one.HighBit, one.RescaleSlope, one.RescaleIntercept = 6, 5, "1000", "0"
    save(series, tmp_path / "s")
    found = open_volume(tmp_path / "s")
    assert found.dtype == np.int16
    assert sorted(found.read().ravel()) == sorted(((voxels() << 10 >> 10) * 1000).ravel())


@pytest.mark.parametrize("slope", [1.0, 0.5])
def test_an_enhanced_file_is_a_volume(slope, tmp_path):
    (path,) = save([enhanced(voxels(), oblique(), slope)], tmp_path)
    found = open_volume(path)
    check(found, voxels() * slope, oblique())
    assert found.dtype == (np.int16 if slope == 1 else np.float32)


def _set(name, value, numbers=(1,)):
    def change(series):
        for k in numbers:
            setattr(series[k], name, value)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda series: series.pop(2),
            r"not evenly spaced.* mostly 2.5 mm .* not from 30\.0169 to 35\.0169 mm",
        ),
        (lambda series: series.append(series[1].copy()), "two slices or more lie at"),
        (lambda series: series.__delitem__(slice(1, None)), "it has one slice"),
        (_set("ImageOrientationPatient", [1, 0, 0, 0, 1, 0]), "different orientations"),
        (_set("PixelSpacing", [3, 4]), "different spacings"),
        (_set("PhotometricInterpretation", "PALETTE COLOR"), "expected grey"),
        (_set("ModalityLUTSequence", [pydicom.Dataset()]), "modality LUT"),
        (_set("ImagePositionPatient", None), "no Image Position"),
        (_set("NumberOfFrames", 3), "3 frames of CT Image Storage without frame"),
    ],
)
def test_what_is_no_stack_is_refused(series, change, said, tmp_path):
    change(series)
    save(series, tmp_path / "s")
    with pytest.raises(ValueError, match=said):
        open_volume(tmp_path / "s" if len(series) > 1 else next((tmp_path / "s").iterdir()))


def test_mixed_sizes_are_refused_with_all_of_them(series, tmp_path):
    series[2] = slices(voxels()[:3], oblique())[2]
    save(series, tmp_path / "s")
    with pytest.raises(ValueError, match=r"different sizes: .*\(7, 3\)"):
        open_volume(tmp_path / "s")


def test_a_cut_file_is_named(series, tmp_path):
    paths = save(series, tmp_path / "s")
    paths[2].write_bytes(paths[2].read_bytes()[:-9])
    with pytest.raises(ValueError, match=f"{paths[2].name}: .*"):
        open_volume(tmp_path / "s").read()


def test_without_pixel_spacing_the_spacing_is_not_known(series, tmp_path):
    for one in series:
        del one.PixelSpacing
    save(series, tmp_path / "s")
    found = open_volume(tmp_path / "s")
    assert (found.spacing, found.affine) == (None, None)
    assert (found.read()[..., 0] == voxels().T).all() or (
        found.read()[..., 0] == voxels().T[::-1]
    ).all()


def test_without_a_decoder_pydicom_says_why(series, tmp_path):
    for one in series:
        one.PixelData = pydicom.encaps.encapsulate([b"\0\1"])
        one.file_meta.TransferSyntaxUID = JPEGLSLossless
        one["PixelData"].is_undefined_length = True
    save(series, tmp_path / "s")
    with pytest.raises(ValueError, match="Unable to decompress 'JPEG-LS Lossless"):
        open_volume(tmp_path / "s").read()


def test_compressed_slices_with_a_decoder_are_read(series, tmp_path):
    for one in series:
        one.compress(pydicom.uid.RLELossless)
    save(series, tmp_path / "s")
    check(open_volume(tmp_path / "s"), voxels(), oblique())
