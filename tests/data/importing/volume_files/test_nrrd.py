from __future__ import annotations

import pickle

import nrrd
import numpy as np
import pytest

from spatialdl.data.importing.volume_file import open_volume
from tests.data.importing.volume_files.written import TO_LPS, check, oblique, voxels


def header(affine=None, space="left-posterior-superior", signs=TO_LPS, **more):
    affine = oblique() if affine is None else affine
    of_axes = affine[:3].T * signs
    return {"space": space, "space directions": of_axes[:3], "space origin": of_axes[3], **more}


@pytest.mark.parametrize("encoding", ["raw", "gzip", "bzip2"])
@pytest.mark.parametrize("name", ["a.nrrd", "a.nhdr"])
@pytest.mark.parametrize("affine", [oblique(), np.diag([-0.5, 0.9, -3.0, 1.0])])
def test_voxels_lie_where_nibabel_has_them(encoding, name, affine, tmp_path):
    nrrd.write(str(tmp_path / name), voxels(), header(affine, encoding=encoding))
    found = open_volume(tmp_path / name)
    check(found, voxels(), affine)
    check(pickle.loads(pickle.dumps(found)), voxels(), affine)
    assert (found.read()[..., 0] == voxels().T).all()
    assert found.spacing == pytest.approx(np.linalg.norm(affine[:3, 2::-1], axis=0))


@pytest.mark.parametrize(
    ("space", "signs"),
    [("RAS", (1, 1, 1)), ("left-anterior-superior", (-1, 1, 1)), ("LPS", TO_LPS)],
)
def test_spaces_of_patients_are_ras(space, signs, tmp_path):
    nrrd.write(str(tmp_path / "a.nrrd"), voxels(), header(space=space, signs=signs))
    check(open_volume(tmp_path / "a.nrrd"), voxels(), oblique())


@pytest.mark.parametrize(
    ("dtype", "endian"),
    [(np.uint8, "little"), (np.uint16, "big"), (np.int32, "big"), (np.float64, "little")],
)
def test_types_and_bytes_in_either_order(dtype, endian, tmp_path):
    nrrd.write(str(tmp_path / "a.nrrd"), voxels(dtype), header(endian=endian))
    found = open_volume(tmp_path / "a.nrrd")
    assert found.dtype == dtype
    check(found, voxels(dtype), None if dtype == np.uint8 else oblique())


@pytest.mark.parametrize("axis", [0, 1, 3])
@pytest.mark.parametrize("encoding", ["raw", "gzip"])
def test_an_axis_of_channels_may_be_anywhere(axis, encoding, tmp_path):
    channels = np.stack([voxels(), voxels() * 2 - 3], axis)
    said = header(kinds=[*["domain"] * axis, "vector", *["domain"] * (3 - axis)], encoding=encoding)
    said["space directions"] = np.insert(said["space directions"], axis, np.nan, 0)
    nrrd.write(str(tmp_path / "a.nrrd"), channels, said)
    found = open_volume(tmp_path / "a.nrrd")
    assert (found.size, found.channels) == ((4, 7, 5), 2)
    assert (found.read() == np.stack([voxels().T, voxels().T * 2 - 3], -1)).all()
    assert (found.read((1, 3, 2, 5, 1, 4)) == found.read()[1:3, 2:5, 1:4]).all()
    assert found.affine @ [3, 4, 1, 1] == pytest.approx((oblique() @ [1, 4, 3, 1])[:3])


def test_spacings_and_units_without_directions(tmp_path):
    known = {"spacings": [0.7, 0.8, 2.5], "units": ["um", "um", "um"]}
    nrrd.write(str(tmp_path / "a.nrrd"), voxels(), known)
    found = open_volume(tmp_path / "a.nrrd")
    assert found.spacing == pytest.approx((2.5e-3, 0.8e-3, 0.7e-3))
    assert found.affine is None
    nrrd.write(str(tmp_path / "b.nrrd"), voxels(), {})
    assert open_volume(tmp_path / "b.nrrd").spacing is None


def test_directions_of_no_patient_have_lengths_only(tmp_path):
    said = header(space="scanner-xyz", **{"space units": ["cm"] * 3})
    nrrd.write(str(tmp_path / "a.nrrd"), voxels(), said)
    found = open_volume(tmp_path / "a.nrrd")
    assert found.spacing == pytest.approx((25.0, 8.0, 7.0))
    assert found.affine is None


@pytest.mark.parametrize(("lines", "skip"), [(2, 0), (0, 5), (1, 3), (0, -1)])
def test_what_lies_before_the_voxels_is_passed_over(lines, skip, tmp_path):
    before = b"a line\n" * lines + b"x" * (7 if skip < 0 else skip)
    (tmp_path / "a.raw").write_bytes(before + voxels().tobytes("F"))
    (tmp_path / "a.nhdr").write_text(
        "NRRD0004\ntype: signed short int\ndimension: 3\nsizes: 5 7 4\nencoding: raw\n"
        f"endian: little\nline skip: {lines}\nbyte skip: {skip}\ndata file: a.raw\n"
    )
    assert (open_volume(tmp_path / "a.nhdr").read()[..., 0] == voxels().T).all()


@pytest.mark.parametrize("encoding", ["raw", "gzip"])
def test_a_cut_file_is_refused_when_it_is_read(encoding, tmp_path):
    path = tmp_path / "a.nrrd"
    nrrd.write(str(path), voxels(), header(encoding=encoding))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(Exception, match=r"data|end-of-stream"):
        open_volume(path).read()


@pytest.mark.parametrize(
    ("shape", "said", "text"),
    [
        ((5, 7), {}, r"sizes \(5, 7\).* three spatial axes"),
        ((5, 7, 4), {"kinds": ["domain", "domain", "time"]}, "three spatial axes"),
        ((5, 7, 4, 2), {"kinds": [*["domain"] * 3, "time"]}, "three spatial axes"),
        ((5, 7, 4, 2), {}, "three spatial axes"),
        ((5, 7, 4), {"encoding": "ascii"}, "encoding ascii"),
    ],
)
def test_what_is_no_volume_is_refused(shape, said, text, tmp_path):
    nrrd.write(str(tmp_path / "a.nrrd"), np.zeros(shape, np.int16), said)
    with pytest.raises(ValueError, match=text):
        open_volume(tmp_path / "a.nrrd")


def test_data_in_several_files_are_refused(tmp_path):
    (tmp_path / "a.nhdr").write_text(
        "NRRD0004\ntype: short\ndimension: 3\nsizes: 5 7 4\nencoding: raw\nendian: little\n"
        "data file: a%02d.raw 0 3 1\n"
    )
    with pytest.raises(ValueError, match="several files"):
        open_volume(tmp_path / "a.nhdr")
