"""Volumes in files of NIfTI, NRRD, TIFF and OME-Zarr: voxels, boxes, spacings and places."""

from __future__ import annotations

import pickle
import sys

import nibabel
import nrrd
import numpy as np
import pytest
import tifffile
import zarr

from spatialdl.data.importing.volume_file import is_volume, open_volume, volume_name
from spatialdl.data.importing.volume_files.volume import affine_from, millimetres, numbers_of
from tests.data.importing.written import TO_LPS, check, described, oblique, save_zarr, voxels

SIZE = (4, 6, 5)
PIXELS = np.random.default_rng(0).integers(0, 999, (3, *SIZE)).astype(np.uint16)  # CZYX
MINI = {"photometric": "minisblack"}


def test_names_of_volumes(tmp_path):
    for name, stem in [
        *(("a.b.nii.gz", "a.b"), ("A.NII", "A"), ("a.ome.TIF", "a"), ("a.ome.zarr", "a")),
    ]:
        assert volume_name(tmp_path / name) == stem
    found = [is_volume(tmp_path / name) for name in ("A.Tiff", "a.zarr", ".a.nii", "a.gz")]
    assert found == [True, True, False, False]
    (tmp_path / "a.txt").write_text("no volume")
    for path in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(ValueError, match=r"it has 0 DICOM series \(none\), expected one"):
            open_volume(path)
    for name in ("a.nii", "a.nii.gz", "a.nrrd", "a.tif", "a.dcm"):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=r"it is an empty file \(0 bytes\)"):
            open_volume(tmp_path / name)


@pytest.mark.parametrize(
    ("package", "name"), [("nibabel", "a.nii"), ("nrrd", "a.nrrd"), ("zarr", "a.ome.zarr")]
)
def test_without_a_package_its_extra_is_named(package, name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).write_text("?")
    with pytest.raises(ValueError, match=rf"requires {package}: pip install 'spatialdl\[volumes"):
        open_volume(tmp_path / name)


def test_units_types_and_steps():
    for unit, length in [
        *(("mm", 1), ("\u00b5m", 1e-3), ("\u03bcm", 1e-3), ("nanometer", 1e-6), ("in", 25.4)),
        *(("pixel", None), ("", None), ("None", None), ("second", None)),
    ]:
        assert millimetres(unit) == length
    assert numbers_of(">i2") == np.dtype(np.int16)
    for dtype in (np.complex64, "U3", np.longdouble):
        with pytest.raises(ValueError, match="expected integers or floats"):
            numbers_of(dtype)
    spacing, affine = affine_from([(0, 0, 2), (0, 3, 0), (4, 0, 0)], (5, 6, 7))
    assert spacing == (2, 3, 4)
    assert affine.tolist() == [[0, 0, 4, 5], [0, 3, 0, 6], [2, 0, 0, 7]]
    for step in ((0, 3, 4), (0, 0, 0), (np.nan, 0, 0)):
        with pytest.raises(ValueError, match="lie in one plane"):
            affine_from([step, (0, 3, 0), (0, 0, 1)], (5, 6, 7))


def nifti(*more: int, dtype=np.int16, kind=nibabel.Nifti1Image, header=None):
    pixels = np.random.default_rng(0).integers(-999, 999, (5, 7, 4, *more)).astype(dtype)
    return kind(pixels, oblique(), header, dtype=dtype)


def with_slope():
    image = nifti()
    image.header.set_slope_inter(0.5, -3)
    return image


CASES = {
    "a.nii": nifti(),
    "a.nii.gz": nifti(),
    "big_endian.nii": nifti(header=nibabel.Nifti1Header(endianness=">")),
    "slope.nii.gz": with_slope(),
    "float64.nii": nifti(dtype=np.float64),
    "contrasts.nii.gz": nifti(3),
    "vector.nii": nifti(1, 2),
    "nifti2.nii": nifti(kind=nibabel.Nifti2Image),
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
    box = pickle.loads(pickle.dumps(found)).read((1, 4, 2, 5, 0, 3))
    assert (box == whole[1:4, 2:5, :3]).all()
    assert found.read((2, 2, 0, 7, 0, 5)).shape == (0, 7, 5, found.channels)
    where = np.array(found.affine) @ [3, 2, 1, 1]  # slice 3, row 2, column 1 is i 1, j 2, k 3
    assert where == pytest.approx((image.affine @ [1, 2, 3, 1])[:3])
    assert found.spacing == pytest.approx((2.5, 0.8, 0.7))


def with_header(**fields):
    def damage(path):
        stored = bytearray(path.read_bytes())
        header = nibabel.Nifti1Header(bytes(stored[:348]))
        for name, value in fields.items():
            header[name] = value
        path.write_bytes(header.binaryblock + bytes(stored[348:]))

    return damage


COLOURS = np.zeros((5, 7, 4), [("R", "u1"), ("G", "u1"), ("B", "u1")])
ONE_PLANE = "slices, rows and columns lie in one plane"


@pytest.mark.parametrize(
    ("pixels", "damage", "said"),
    [
        (np.zeros((5, 7), np.int16), None, r"\(5, 7\), expected a volume"),
        (np.zeros((5, 7, 4, 2, 3), np.int16), None, "expected a volume"),
        (COLOURS, None, "expected integers or floats"),
        (np.zeros((5, 7, 4), np.complex64), None, "expected integers or floats"),
        (voxels(), with_header(srow_x=(0, 0, 0, 0)), ONE_PLANE),
        (voxels(), with_header(srow_x=(np.nan, 0, 0, 0)), ONE_PLANE),
        (voxels(), with_header(srow_x=(0, 0.8, 0, 0), srow_y=(0, 0.8, 0, 0)), ONE_PLANE),
        (voxels(), with_header(xyzt_units=5), "it has xyzt_units 5"),
    ],
)
def test_nifti_that_is_no_volume_is_refused(pixels, damage, said, tmp_path):
    path = tmp_path / "a.nii"
    nibabel.save(nibabel.Nifti1Image(pixels, oblique()), path)
    if damage is not None:
        damage(path)
    with pytest.raises(ValueError, match=said):
        open_volume(path)


def test_nifti_that_was_copied_in_part_is_told_from_others(tmp_path):
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


def header(affine=None, space="left-posterior-superior", signs=TO_LPS, **more):
    affine = oblique() if affine is None else affine
    of_axes = affine[:3].T * signs
    return {"space": space, "space directions": of_axes[:3], "space origin": of_axes[3], **more}


@pytest.mark.parametrize(
    ("name", "how", "affine", "dtype"),
    [
        ("a.nrrd", {"encoding": "raw"}, oblique(), np.int16),
        ("a.nhdr", {"encoding": "gzip"}, np.diag([-0.5, 0.9, -3.0, 1.0]), np.int16),
        ("a.nrrd", {"encoding": "bzip2", "endian": "big"}, oblique(), np.uint16),
        ("a.nrrd", {"endian": "big"}, oblique(), np.int32),
        ("a.nrrd", {"endian": "little"}, oblique(), np.float64),
        ("a.nrrd", {"space": "RAS", "signs": (1, 1, 1)}, oblique(), np.int16),
        ("a.nrrd", {"space": "left-anterior-superior", "signs": (-1, 1, 1)}, oblique(), np.int16),
        ("a.nrrd", {"space": "LPS"}, oblique(), np.int16),
    ],
)
def test_nrrd_lies_where_nibabel_has_it(name, how, affine, dtype, tmp_path):
    nrrd.write(str(tmp_path / name), voxels(dtype), header(affine, **how))
    found = open_volume(tmp_path / name)
    assert found.dtype == dtype
    check(found, voxels(dtype), affine)
    check(pickle.loads(pickle.dumps(found)), voxels(dtype), affine)
    assert (found.read()[..., 0] == voxels(dtype).T).all()
    assert found.spacing == pytest.approx(np.linalg.norm(affine[:3, 2::-1], axis=0))


@pytest.mark.parametrize(("axis", "encoding"), [(0, "raw"), (1, "gzip"), (3, "raw"), (3, "gzip")])
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


@pytest.mark.parametrize(
    ("known", "spacing"),
    [
        ({"spacings": [0.7, 0.8, 2.5], "units": ["um"] * 3}, (2.5e-3, 0.8e-3, 0.7e-3)),
        ({}, None),
        (header(space="scanner-xyz", **{"space units": ["cm"] * 3}), (25.0, 8.0, 7.0)),
    ],
)
def test_nrrd_without_directions_of_a_patient_has_lengths_only(known, spacing, tmp_path):
    nrrd.write(str(tmp_path / "a.nrrd"), voxels(), known)
    found = open_volume(tmp_path / "a.nrrd")
    assert found.spacing == (None if spacing is None else pytest.approx(spacing))
    assert found.affine is None


@pytest.mark.parametrize(("lines", "skip"), [(2, 0), (0, 5), (1, 3), (0, -1)])
def test_what_lies_before_the_voxels_is_passed_over(lines, skip, tmp_path):
    before = b"a line\n" * lines + b"x" * (7 if skip < 0 else skip)
    (tmp_path / "a.raw").write_bytes(before + voxels().tobytes("F"))
    head = "NRRD0004\ntype: short\ndimension: 3\nsizes: 5 7 4\nencoding: raw\nendian: little\n"
    skips = f"line skip: {lines}\nbyte skip: {skip}\n"
    (tmp_path / "a.nhdr").write_text(f"{head}{skips}data file: a.raw\n")
    assert (open_volume(tmp_path / "a.nhdr").read()[..., 0] == voxels().T).all()
    (tmp_path / "b.nhdr").write_text(f"{head}data file: a%02d.raw 0 3 1\n")
    with pytest.raises(ValueError, match="several files"):
        open_volume(tmp_path / "b.nhdr")


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
def test_nrrd_that_is_no_volume_is_refused(shape, said, text, tmp_path):
    nrrd.write(str(tmp_path / "a.nrrd"), np.zeros(shape, np.int16), said)
    with pytest.raises(ValueError, match=text):
        open_volume(tmp_path / "a.nrrd")


@pytest.mark.parametrize("encoding", ["raw", "gzip"])
def test_a_cut_nrrd_is_refused_when_it_is_read(encoding, tmp_path):
    path = tmp_path / "a.nrrd"
    nrrd.write(str(path), voxels(), header(encoding=encoding))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(Exception, match=r"data|end-of-stream"):
        open_volume(path).read()


@pytest.mark.parametrize("kind", ["ome.tif", "0.4", "0.5"])
@pytest.mark.parametrize("axes", ["czyx", "zcyx", "zyx", "tczyx"])
def test_ome_in_any_order_of_axes(axes, kind, tmp_path):
    pixels = PIXELS if "c" in axes else PIXELS[:1]
    order = ["czyx".index(axis) for axis in axes if axis != "t"]
    full = {"t": 1, "c": 3, "z": 4, "y": 6, "x": 5}
    order += [] if "c" in axes else [0]
    written = pixels.transpose(order).reshape([full[axis] for axis in axes])
    if kind == "ome.tif":
        path = tmp_path / "a.ome.tif"
        lengths = {"PhysicalSizeX": 0.5, "PhysicalSizeY": 0.25, "PhysicalSizeZ": 2.0}
        tifffile.imwrite(path, written, metadata={"axes": axes.upper(), **lengths}, **MINI)
    else:
        path = tmp_path / "a.ome.zarr"
        save_zarr(path, {"0": written}, described(axes), kind)
    found = pickle.loads(pickle.dumps(open_volume(path)))
    assert (found.size, found.channels, found.dtype) == (SIZE, len(pixels), np.uint16)
    assert (found.read() == np.moveaxis(pixels, 0, -1)).all()
    assert (found.read((1, 3, 2, 6, 0, 2)) == found.read()[1:3, 2:6, :2]).all()
    assert found.spacing == pytest.approx((2e-3, 0.25e-3, 0.5e-3))
    assert found.affine is None


@pytest.mark.parametrize(
    "how",
    [
        *({"compression": "zlib"}, {"imagej": True}, {"metadata": {"axes": "ZYX"}}, {}),
        *({"tile": (16, 16)}, {"byteorder": ">"}, {"ome": True}),
    ],
)
def test_a_box_of_a_stack_is_that_of_the_whole_stack(how, tmp_path):
    whole = np.arange(6 * 8 * 9, dtype=np.uint16).reshape(6, 8, 9)
    tifffile.imwrite(tmp_path / "a.tif", whole, **MINI, **{"metadata": {"axes": "ZYX"}, **how})
    found = open_volume(tmp_path / "a.tif")
    assert (found.size, found.channels, found.dtype) == ((6, 8, 9), 1, np.uint16)
    assert (found.spacing, found.affine) == (None, None)
    assert (found.read()[..., 0] == whole).all()
    assert (found.read((1, 4, 2, 5, 0, 3))[..., 0] == whole[1:4, 2:5, :3]).all()
    assert found.read((3, 3, 0, 8, 0, 9)).shape == (0, 8, 9, 1)


@pytest.mark.parametrize(
    ("units", "spacing"),
    [
        ({}, (2e-3, 0.25e-3, 0.5e-3)),
        ({"PhysicalSizeZUnit": "nm"}, (2e-6, 0.25e-3, 0.5e-3)),
        ({f"PhysicalSize{axis}Unit": "mm" for axis in "XYZ"}, (2.0, 0.25, 0.5)),
        ({"PhysicalSizeXUnit": "pixel"}, None),
        ({"PhysicalSizeZ": 0}, None),
    ],
)
def test_units_of_tiff_are_those_of_each_axis(units, spacing, tmp_path):
    lengths = {"PhysicalSizeX": 0.5, "PhysicalSizeY": 0.25, "PhysicalSizeZ": 2.0}
    metadata = {"axes": "ZYX", **lengths, **units}
    tifffile.imwrite(tmp_path / "a.ome.tif", PIXELS[0], metadata=metadata)
    found = open_volume(tmp_path / "a.ome.tif").spacing
    assert found == (None if spacing is None else pytest.approx(spacing))


def test_pyramids_colours_hyperstacks_and_bits_of_tiff(tmp_path):
    path = tmp_path / "a.ome.tif"
    with tifffile.TiffWriter(path) as tiff:
        tiff.write(PIXELS[0], subifds=1, metadata={"axes": "ZYX"}, **MINI)
        tiff.write(PIXELS[0, :, ::2, ::2], subfiletype=1, **MINI)
    assert (open_volume(path).read()[..., 0] == PIXELS[0]).all()
    colours = np.moveaxis(PIXELS, 0, -1)
    tifffile.imwrite(path, colours, photometric="rgb", metadata={"axes": "ZYXS"})
    assert (open_volume(path).read() == colours).all()
    text = '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><BinaryOnly/></OME>'
    tifffile.imwrite(path, PIXELS[0], description=text, metadata=None, **MINI)  # XML elsewhere
    assert (open_volume(path).size, open_volume(path).spacing) == (SIZE, None)
    path = tmp_path / "a.tif"
    stack = PIXELS.transpose(1, 0, 2, 3)
    tifffile.imwrite(path, stack, imagej=True, metadata={"axes": "ZCYX"})
    assert (open_volume(path).read() == colours).all()
    tifffile.imwrite(path, stack, imagej=True, metadata={"axes": "TZYX"})
    with pytest.raises(ValueError, match=r"axes TZYX of \(4, 3, 6, 5\)"):
        open_volume(path)
    tifffile.imwrite(path, PIXELS[0] > 500, **MINI)
    found = open_volume(path)
    assert found.dtype == found.read().dtype == np.uint8
    assert (found.read()[..., 0] == (PIXELS[0] > 500)).all()


def test_tiff_that_is_no_volume_is_refused(tmp_path):
    with tifffile.TiffWriter(tmp_path / "a.ome.tif", ome=True) as tiff:
        for _ in range(2):
            tiff.write(PIXELS[0], metadata={"axes": "ZYX"}, **MINI)
    tifffile.imwrite(tmp_path / "one.tif", np.zeros((5, 7), np.uint8))
    path = tmp_path / "lost.tif"  # its last pages: no smaller volume
    tifffile.imwrite(path, np.tile(PIXELS[0], (2, 9, 9)), metadata=None, compression="zlib")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    for name, said in [
        ("a.ome.tif", "it has 2 images"),
        ("one.tif", "expected pages of grey"),
        ("lost.tif", r"it is damaged: .*invalid page offset"),
    ]:
        with pytest.raises(ValueError, match=said):
            open_volume(tmp_path / name)


@pytest.mark.parametrize("how", [{}, {"compression": "zlib"}, {"ome": True}, {"metadata": None}])
def test_a_cut_tiff_is_refused(how, tmp_path):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.tile(PIXELS[0], (2, 9, 9)), **MINI, **how)
    whole = path.read_bytes()
    for part in (0.4, 0.95):
        path.write_bytes(whole[: int(len(whole) * part)])
        with pytest.raises(Exception, match=r"."):
            open_volume(path).read()


def test_zarr_of_the_full_resolution_is_read_and_scales_multiply(tmp_path):
    more = {"type": "scale", "scale": [3.0, 3.0, 3.0]}
    levels = {"s1": PIXELS[0, :, ::2, ::2], "s0": PIXELS[0]}
    save_zarr(tmp_path / "a.zarr", levels, described("zyx", transforms=[more], levels=("s0", "s1")))
    found = open_volume(tmp_path / "a.zarr")
    assert (found.read()[..., 0] == PIXELS[0]).all()
    assert found.spacing == pytest.approx((6e-3, 0.75e-3, 1.5e-3))
    for how in ({"unit": None}, {"unit": "pixel"}, {"scale": 0.0}):
        save_zarr(tmp_path / "b.zarr", {"0": PIXELS[0]}, described("zyx", **how))
        assert open_volume(tmp_path / "b.zarr").spacing is None
    save_zarr(tmp_path / "c.zarr", {"0": PIXELS[0].T}, described("xyz"))
    assert (open_volume(tmp_path / "c.zarr").read()[..., 0] == PIXELS[0]).all()
    chunk = max((tmp_path / "c.zarr" / "0").rglob("*.*.*"))
    chunk.write_bytes(chunk.read_bytes()[:10])
    with pytest.raises(Exception, match=r"."):
        open_volume(tmp_path / "c.zarr").read()


def test_the_only_image_of_bioformats2raw_is_read(tmp_path):
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w", zarr_format=2)
    group.attrs["bioformats2raw.layout"] = 3
    save_zarr(tmp_path / "a.zarr" / "0", {"0": PIXELS[0]}, described("zyx"))
    assert (open_volume(tmp_path / "a.zarr").read()[..., 0] == PIXELS[0]).all()
    save_zarr(tmp_path / "a.zarr" / "1", {"0": PIXELS[0]}, described("zyx"))
    with pytest.raises(ValueError, match=r"or several \(attributes: bioformats2raw"):
        open_volume(tmp_path / "a.zarr")


def test_zarr_that_is_no_volume_is_refused(tmp_path):
    zarr.open_group(str(tmp_path / "plate.zarr"), mode="w").attrs["plate"] = {}
    old = [{**described("zyx")[0], "axes": ["z", "y", "x"]}]
    save_zarr(tmp_path / "old.zarr", {"0": PIXELS[0]}, old)
    save_zarr(tmp_path / "yx.zarr", {"0": PIXELS[0, 0]}, described("yx"))
    save_zarr(tmp_path / "tzyx.zarr", {"0": PIXELS[:2]}, described("tzyx"))
    (tmp_path / "empty.zarr").mkdir()
    for name, error, said in [
        ("plate", ValueError, r"no multiscale image, .*attributes: plate"),
        ("old", ValueError, "expected those of OME-Zarr 0.4 or 0.5"),
        ("yx", ValueError, "axes y, x of 6 x 5, expected z, y and x"),
        ("tzyx", ValueError, "axes t, z, y, x of 2 x 4 x 6 x 5"),
        ("empty", FileNotFoundError, r"."),
    ]:
        with pytest.raises(error, match=said):
            open_volume(tmp_path / f"{name}.zarr")
