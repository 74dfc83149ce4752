"""Volumes in files of NIfTI, NRRD, TIFF and OME-Zarr: voxels, boxes, spacings and places."""

from __future__ import annotations

import os
import pickle
import sys

import nibabel
import nrrd
import numpy as np
import pytest
import tifffile
import zarr

from spatialdl.data.importing.volume_file import is_volume, open_volume, volume_name
from spatialdl.data.importing.volume_files.volume import millimetres, numbers_of
from tests.data.importing.written import TO_LPS, described, oblique, save_zarr, voxels

SIZE = (4, 6, 5)
PIXELS = np.random.default_rng(0).integers(0, 999, (3, *SIZE)).astype(np.uint16)  # CZYX
MINI = {"photometric": "minisblack"}
TWO = np.stack([voxels(), voxels() * 2 - 3], -1)
PLAIN = np.diag([-0.5, 0.9, -3.0, 1.0])
LENGTHS = {"PhysicalSizeX": 0.5, "PhysicalSizeY": 0.25, "PhysicalSizeZ": 2.0}
"""In micrometres, as those of `described`."""


def nifti(pixels, kind=nibabel.Nifti1Image, header=None, slope=None):
    """A function that writes the voxels (i, j, k)."""

    def write(path):
        image = kind(pixels, oblique(), header, dtype=pixels.dtype)
        if slope is not None:
            image.header.set_slope_inter(*slope)
        nibabel.save(image, path)

    return write


def header(affine=None, space="left-posterior-superior", signs=TO_LPS, **more):
    of_axes = (oblique() if affine is None else affine)[:3].T * signs
    return {"space": space, "space directions": of_axes[:3], "space origin": of_axes[3], **more}


def as_nrrd(pixels, axis=None, **known):
    def write(path):
        said = header(**known)
        if axis is not None:
            said["kinds"] = [*["domain"] * axis, "vector", *["domain"] * (3 - axis)]
            said["space directions"] = np.insert(said["space directions"], axis, np.nan, 0)
        nrrd.write(str(path), pixels if axis is None else np.moveaxis(pixels, -1, axis), said)

    return write


def as_tiff(pixels, axes="ZYX", known=None, **how):
    def write(path):
        metadata = {"axes": axes, **(known or {})}
        tifffile.imwrite(path, pixels, **MINI | {"metadata": metadata} | how)

    return write


def as_zarr(pixels, axes, version="0.4"):
    return lambda path: save_zarr(path, {"0": pixels}, described(axes), version)


def pyramid(path):
    with tifffile.TiffWriter(path) as tiff:
        tiff.write(PIXELS[0], subifds=1, metadata={"axes": "ZYX"}, **MINI)
        tiff.write(PIXELS[0, :, ::2, ::2], subfiletype=1, **MINI)


XML_ELSEWHERE = '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><BinaryOnly/></OME>'
LAST = np.moveaxis(PIXELS, 0, -1)
ONE, OF_OME = PIXELS[0][..., None], (2e-3, 0.25e-3, 0.5e-3)
ZCYX = PIXELS.transpose(1, 0, 2, 3)
FILES = [  # name, writer, voxels (i, j, k) or (slices, rows, columns, channels), affine or spacing
    ("a.nii", nifti(voxels()), voxels(), oblique()),
    ("a.nii.gz", nifti(voxels()), voxels(), oblique()),
    (
        *("a.nii", nifti(voxels(), header=nibabel.Nifti1Header(endianness=">"))),
        *(voxels(), oblique()),
    ),
    ("a.nii", nifti(voxels(), slope=(0.5, -3)), voxels(np.float32) * 0.5 - 3, oblique()),
    ("a.nii", nifti(TWO), TWO, oblique()),
    ("a.nii.gz", nifti(TWO[..., None, :]), TWO, oblique()),
    ("a.nii", nifti(voxels(), nibabel.Nifti2Image), voxels(), oblique()),
    ("a.nrrd", as_nrrd(voxels(), encoding="raw"), voxels(), oblique()),
    ("a.nhdr", as_nrrd(voxels(), encoding="gzip", affine=PLAIN), voxels(), PLAIN),
    (
        *("a.nrrd", as_nrrd(voxels(np.uint16), encoding="bzip2", endian="big")),
        *(voxels(np.uint16), oblique()),
    ),
    ("a.nrrd", as_nrrd(voxels(np.float64)), voxels(np.float64), oblique()),
    ("a.nrrd", as_nrrd(voxels(), space="RAS", signs=(1, 1, 1)), voxels(), oblique()),
    (
        *("a.nrrd", as_nrrd(voxels(), space="left-anterior-superior", signs=(-1, 1, 1))),
        *(voxels(), oblique()),
    ),
    ("a.nrrd", as_nrrd(voxels(), space="LPS"), voxels(), oblique()),
    *(("a.nrrd", as_nrrd(TWO, axis, encoding="raw"), TWO, oblique()) for axis in (0, 1, 3)),
    *(
        ("a.tif", as_tiff(PIXELS[0], **how), ONE, None)
        for how in (
            *({}, {"compression": "zlib"}, {"imagej": True}, {"metadata": None}, {"ome": True}),
            *({"tile": (16, 16)}, {"byteorder": ">"}),
        )
    ),
    ("a.tif", as_tiff(ZCYX, "ZCYX", imagej=True), LAST, None),
    ("a.tif", as_tiff(PIXELS[0] > 500), (ONE > 500).astype(np.uint8), None),
    ("a.ome.tif", pyramid, ONE, None),
    ("a.ome.tif", as_tiff(LAST, "ZYXS", photometric="rgb"), LAST, None),
    ("a.ome.tif", as_tiff(PIXELS[0], description=XML_ELSEWHERE, metadata=None), ONE, None),
    ("a.ome.tif", as_tiff(PIXELS, "CZYX", LENGTHS), LAST, OF_OME),
    ("a.ome.tif", as_tiff(ZCYX, "ZCYX", LENGTHS), LAST, OF_OME),
    ("a.ome.tif", as_tiff(PIXELS[0], "ZYX", LENGTHS, compression="zlib"), ONE, OF_OME),
    ("a.ome.tif", as_tiff(PIXELS[None], "TCZYX", LENGTHS), LAST, OF_OME),
    *(
        ("a.ome.zarr", as_zarr(pixels, axes, version), LAST if "c" in axes else ONE, OF_OME)
        for version in ("0.4", "0.5")
        for pixels, axes in (
            *((PIXELS[0], "zyx"), (PIXELS, "czyx"), (PIXELS[None], "tczyx"), (ZCYX, "zcyx")),
            (PIXELS[0].T, "xyz"),
        )
    ),
]


@pytest.mark.parametrize(("name", "write", "expected", "place"), FILES)
def test_a_box_of_any_file_is_that_of_its_voxels(name, write, expected, place, tmp_path):
    write(tmp_path / name)
    found = pickle.loads(pickle.dumps(open_volume(tmp_path / name)))
    whole = expected
    if expected.shape[:3] == voxels().shape:
        whole = expected.reshape(*voxels().shape, -1).transpose(2, 1, 0, 3)
    assert (*found.size, found.channels) == whole.shape
    assert found.dtype == found.read().dtype == whole.dtype
    assert found.dtype.isnative
    assert (found.read() == whole).all()
    assert (found.read((1, 3, 2, 5, 0, 3)) == whole[1:3, 2:5, :3]).all()
    assert found.read((2, 2, 0, 4, 0, 5)).shape == (0, 4, 5, found.channels)
    if isinstance(place, np.ndarray):
        where = np.array(found.affine) @ [3, 2, 1, 1]  # slice 3, row 2, column 1 is i 1, j 2, k 3
        assert where == pytest.approx((place @ [1, 2, 3, 1])[:3])
        assert found.spacing == pytest.approx(np.linalg.norm(place[:3, 2::-1], axis=0))
    else:
        assert found.spacing == (None if place is None else pytest.approx(place))
        assert found.affine is None
    assert is_volume(tmp_path / name)
    assert volume_name(tmp_path / name) == "a"


def test_names_of_volumes(tmp_path):
    names = ("a.b.nii.gz", "A.NII", "a.ome.TIF")
    assert [volume_name(tmp_path / name) for name in names] == ["a.b", "A", "a"]
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
    ("package", "name"),
    [("nibabel", "a.nii"), ("nrrd", "a.nrrd"), ("zarr", "a.ome.zarr"), ("pydicom", "a.dcm")],
)
def test_without_a_package_its_extra_is_named(package, name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).write_text("?")
    with pytest.raises(ValueError, match=rf"requires {package}: pip install 'spatialdl\[volumes"):
        open_volume(tmp_path / name)


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
    nifti(pixels)(path)
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
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1  # a bit made hundreds of voxels wrong
    path.write_bytes(flipped)
    with pytest.raises(EOFError, match="it is damaged or incomplete"):
        open_volume(path).read()
    path.write_bytes(whole[:20])
    with pytest.raises(ValueError, match="it is damaged, or not a NIfTI file"):
        open_volume(path)


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


@pytest.mark.parametrize(
    ("shape", "said", "text"),
    [
        ((5, 7), {}, r"sizes \(5, 7\).* three spatial axes"),
        ((5, 7, 4), {"kinds": ["domain", "domain", "time"]}, "three spatial axes"),
        ((5, 7, 4, 2), {"kinds": [*["domain"] * 3, "time"]}, "three spatial axes"),
        ((5, 7, 4, 2), {}, "three spatial axes"),
    ],
)
def test_nrrd_that_is_no_volume_is_refused(shape, said, text, tmp_path):
    path = tmp_path / "a.nrrd"
    nrrd.write(str(path), np.zeros(shape, np.int16), said)
    with pytest.raises(ValueError, match=text):
        open_volume(path)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        *(("a.nrrd", as_nrrd(voxels(), encoding=encoding)) for encoding in ("raw", "gzip")),
        *(
            ("a.tif", as_tiff(np.tile(PIXELS[0], (2, 9, 9)), **how))
            for how in ({}, {"compression": "zlib"}, {"ome": True}, {"metadata": None})
        ),
    ],
)
def test_a_cut_file_is_refused(name, write, tmp_path):
    path = tmp_path / name
    write(path)
    whole = path.read_bytes()
    for size in (int(len(whole) * 0.4), int(len(whole) * 0.95)):
        path.write_bytes(whole[:size])
        with pytest.raises(Exception, match=r"."):
            open_volume(path).read()


@pytest.mark.parametrize(
    ("units", "spacing"),
    [
        ({"PhysicalSizeZUnit": "nm"}, (2e-6, 0.25e-3, 0.5e-3)),
        ({f"PhysicalSize{axis}Unit": "mm" for axis in "XYZ"}, (2.0, 0.25, 0.5)),
        ({"PhysicalSizeXUnit": "pixel"}, None),
        ({"PhysicalSizeZ": 0}, None),
    ],
)
def test_units_of_tiff_are_those_of_each_axis(units, spacing, tmp_path):
    as_tiff(PIXELS[0], "ZYX", LENGTHS | units)(tmp_path / "a.ome.tif")
    found = open_volume(tmp_path / "a.ome.tif").spacing
    assert found == (None if spacing is None else pytest.approx(spacing))


def test_tiff_that_is_no_volume_is_refused(tmp_path):
    with tifffile.TiffWriter(tmp_path / "a.ome.tif", ome=True) as tiff:
        for _ in range(2):
            tiff.write(PIXELS[0], metadata={"axes": "ZYX"}, **MINI)
    tifffile.imwrite(tmp_path / "one.tif", np.zeros((5, 7), np.uint8))
    as_tiff(ZCYX, "TZYX", imagej=True)(tmp_path / "time.tif")
    path = tmp_path / "lost.tif"  # its last pages: no smaller volume
    tifffile.imwrite(path, np.tile(PIXELS[0], (2, 9, 9)), metadata=None, compression="zlib")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    for name, said in [
        ("a.ome.tif", "it has 2 images"),
        ("one.tif", "expected pages of grey"),
        ("time.tif", r"axes TZYX of \(4, 3, 6, 5\)"),
        ("lost.tif", r"it is damaged: .*invalid page offset"),
    ]:
        with pytest.raises(ValueError, match=said):
            open_volume(tmp_path / name)


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
    chunk = max((tmp_path / "b.zarr" / "0").rglob("*.*.*"))
    chunk.write_bytes(chunk.read_bytes()[:10])
    with pytest.raises(Exception, match=r"."):
        open_volume(tmp_path / "b.zarr").read()


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


def test_units_and_types():
    for unit, length in [
        *(("mm", 1), ("\u00b5m", 1e-3), ("\u03bcm", 1e-3), ("nanometer", 1e-6), ("in", 25.4)),
        *(("pixel", None), ("", None), ("None", None), ("second", None)),
    ]:
        assert millimetres(unit) == length
    with pytest.raises(ValueError, match="expected integers or floats"):
        numbers_of(np.longdouble)


HEAD = "NRRD0004\ntype: short\ndimension: 3\nsizes: 5 7 4\nencoding: raw\nendian: little\n"


@pytest.mark.parametrize(("lines", "skip"), [(2, 0), (0, 5), (1, 3), (0, -1)])
def test_what_lies_before_the_voxels_is_passed_over(lines, skip, tmp_path):
    before = b"a line\n" * lines + b"x" * (7 if skip < 0 else skip)
    (tmp_path / "a.raw").write_bytes(before + voxels().tobytes("F"))
    skips = f"line skip: {lines}\nbyte skip: {skip}\n"
    (tmp_path / "a.nhdr").write_text(f"{HEAD}{skips}data file: a.raw\n")
    assert (open_volume(tmp_path / "a.nhdr").read()[..., 0] == voxels().T).all()
    (tmp_path / "b.nhdr").write_text(f"{HEAD}data file: a%02d.raw 0 3 1\n")
    with pytest.raises(ValueError, match="several files"):
        open_volume(tmp_path / "b.nhdr")


OME = "http://www.openmicroscopy.org/Schemas/OME/2016-06"


def nrrd_header(path, name):
    path.with_suffix(".nhdr").write_text(f"{HEAD}data file: {name}\n")
    return path.with_suffix(".nhdr")


def ome_tiff(path, name):
    sizes = 'SizeX="5" SizeY="6" SizeZ="2" SizeC="1" SizeT="1"'
    pages = "".join(
        f'<TiffData FirstZ="{z}" IFD="0" PlaneCount="1"><UUID FileName="{file}">{uuid}</UUID>'
        "</TiffData>"
        for z, file, uuid in ((0, path.name, "urn:uuid:a"), (1, name, "urn:uuid:b"))
    )
    xml = (
        f'<OME xmlns="{OME}" UUID="urn:uuid:a"><Image ID="Image:0"><Pixels ID="Pixels:0" '
        f'DimensionOrder="XYZCT" Type="uint16" {sizes}>{pages}</Pixels></Image></OME>'
    )
    tifffile.imwrite(path, PIXELS[0, 0], description=xml, metadata=None, **MINI)
    return path


def chunk(path, name):
    store = path.with_suffix(".zarr")
    save_zarr(store, {"0": PIXELS[0]}, described("zyx"))
    of_array = [
        one for one in (store / "0").rglob("*") if one.is_file() and one.name[0] not in ".z"
    ]
    of_array[0].unlink()
    of_array[0].symlink_to(os.path.join(store.parent, name))
    return store


@pytest.mark.parametrize("write", [nrrd_header, ome_tiff, chunk])
@pytest.mark.parametrize("name", ["../secret", "{folder}/secret", "link", "pipe"])
def test_what_a_file_names_lies_in_its_folder(name, write, tmp_path):
    """Any file that can be read became voxels, and a pipe blocked for ever."""
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret").write_bytes(voxels().tobytes("F"))
    (inside / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(inside / "pipe")
    path = write(inside / "a.ome.tif", name.format(folder=tmp_path))
    said = "not a regular file|out of its folder" if name == "pipe" else "out of its folder, to"
    with pytest.raises(ValueError, match=said):
        open_volume(path)
