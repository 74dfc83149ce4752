from __future__ import annotations

import pickle

import numpy as np
import pytest
import tifffile

from spatialdl.data.importing.volume_file import open_volume, volume_name

SIZE = (4, 6, 5)
PIXELS = np.random.default_rng(0).integers(0, 999, (3, *SIZE)).astype(np.uint16)  # CZYX
MILLI = {f"PhysicalSize{axis}Unit": "mm" for axis in "XYZ"}
LENGTHS = {"PhysicalSizeX": 0.5, "PhysicalSizeY": 0.25, "PhysicalSizeZ": 2.0}


@pytest.mark.parametrize("axes", ["CZYX", "ZCYX", "ZYXS", "ZYX", "TCZYX"])
@pytest.mark.parametrize(
    "how", [{}, {"compression": "zlib"}, {"tile": (16, 16)}, {"byteorder": ">"}]
)
def test_ome_tiff_in_any_order_of_axes(axes, how, tmp_path):
    pixels = PIXELS if "C" in axes or "S" in axes else PIXELS[:1]
    order = [("CZYX".index(axis)) for axis in axes.replace("S", "C").replace("T", "")]
    written = pixels.transpose(order) if len(order) == 4 else pixels[0]
    written = written[None] if axes[0] == "T" else written
    colour = "rgb" if "S" in axes else "minisblack"
    byteorder = how.get("byteorder")
    more = {key: value for key, value in how.items() if key != "byteorder"}
    path = tmp_path / "a.ome.tif"
    with tifffile.TiffWriter(path, ome=True, byteorder=byteorder) as tiff:
        tiff.write(written, photometric=colour, metadata={"axes": axes, **LENGTHS, **MILLI}, **more)
    found = pickle.loads(pickle.dumps(open_volume(path)))
    assert (found.size, found.channels, found.dtype) == (SIZE, len(pixels), np.uint16)
    assert (found.read() == np.moveaxis(pixels, 0, -1)).all()
    assert (found.read((1, 3, 2, 6, 0, 2)) == found.read()[1:3, 2:6, :2]).all()
    assert (found.spacing, found.affine) == ((2.0, 0.25, 0.5), None)
    assert volume_name(path) == "a"


@pytest.mark.parametrize(
    ("units", "spacing"),
    [
        ({}, (2e-3, 0.25e-3, 0.5e-3)),
        ({"PhysicalSizeZUnit": "nm"}, (2e-6, 0.25e-3, 0.5e-3)),
        ({"PhysicalSizeXUnit": "pixel"}, None),
        ({"PhysicalSizeZ": 0}, None),
    ],
)
def test_units_are_those_of_each_axis(units, spacing, tmp_path):
    metadata = {"axes": "ZYX", **LENGTHS, **units}
    tifffile.imwrite(tmp_path / "a.ome.tif", PIXELS[0], metadata=metadata)
    found = open_volume(tmp_path / "a.ome.tif").spacing
    assert found == (None if spacing is None else pytest.approx(spacing))


def test_the_full_resolution_of_a_pyramid_is_read(tmp_path):
    path = tmp_path / "a.ome.tif"
    with tifffile.TiffWriter(path) as tiff:
        tiff.write(PIXELS[0], subifds=1, metadata={"axes": "ZYX"}, photometric="minisblack")
        tiff.write(PIXELS[0, :, ::2, ::2], subfiletype=1, photometric="minisblack")
    assert (open_volume(path).read()[..., 0] == PIXELS[0]).all()


@pytest.mark.parametrize("axes", ["TZYX", "ZCYX"])
def test_hyperstacks_of_imagej(axes, tmp_path):
    written = PIXELS.transpose(1, 0, 2, 3)
    metadata = {"axes": axes}
    tifffile.imwrite(tmp_path / "a.tif", written, imagej=True, metadata=metadata)
    if axes[0] == "T":
        with pytest.raises(ValueError, match=r"axes TZYX of \(4, 3, 6, 5\)"):
            open_volume(tmp_path / "a.tif")
    else:
        assert (open_volume(tmp_path / "a.tif").read() == np.moveaxis(PIXELS, 0, -1)).all()


def test_true_and_false_are_1_and_0(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", PIXELS[0] > 500, photometric="minisblack")
    found = open_volume(tmp_path / "a.tif")
    assert found.dtype == found.read().dtype == np.uint8
    assert (found.read()[..., 0] == (PIXELS[0] > 500)).all()


def test_ome_tiff_whose_xml_lies_elsewhere_has_no_spacing(tmp_path):
    text = '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><BinaryOnly/></OME>'
    path = tmp_path / "a.ome.tif"
    tifffile.imwrite(path, PIXELS[0], description=text, metadata=None, photometric="minisblack")
    found = open_volume(path)
    assert (found.size, found.spacing) == (SIZE, None)


def test_several_images_are_refused(tmp_path):
    with tifffile.TiffWriter(tmp_path / "a.ome.tif", ome=True) as tiff:
        for _ in range(2):
            tiff.write(PIXELS[0], metadata={"axes": "ZYX"}, photometric="minisblack")
    with pytest.raises(ValueError, match="it has 2 images"):
        open_volume(tmp_path / "a.ome.tif")


def test_a_file_of_which_the_last_pages_are_lost_is_no_smaller_volume(tmp_path):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.tile(PIXELS[0], (2, 9, 9)), metadata=None, compression="zlib")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"it is damaged: .*invalid page offset"):
        open_volume(path)


@pytest.mark.parametrize("how", [{}, {"compression": "zlib"}, {"ome": True}, {"metadata": None}])
@pytest.mark.parametrize("part", [0.4, 0.95])
def test_a_cut_file_is_refused(how, part, tmp_path):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.tile(PIXELS[0], (2, 9, 9)), photometric="minisblack", **how)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    with pytest.raises(Exception, match=r"."):
        open_volume(path).read()


@pytest.mark.parametrize("how", [{}, {"compression": "zlib"}, {"imagej": True}])
def test_a_box_of_a_stack_is_that_of_the_whole_stack(how, tmp_path):
    whole = np.arange(6 * 8 * 9, dtype=np.uint16).reshape(6, 8, 9)
    axes = {"metadata": {"axes": "ZYX"}}
    tifffile.imwrite(tmp_path / "a.tif", whole, photometric="minisblack", **axes, **how)
    found = open_volume(tmp_path / "a.tif")
    assert (found.size, found.channels, found.dtype) == ((6, 8, 9), 1, np.uint16)
    assert (found.spacing, found.affine) == (None, None)
    assert (found.read()[..., 0] == whole).all()
    assert (found.read((1, 4, 2, 5, 0, 3))[..., 0] == whole[1:4, 2:5, :3]).all()
    assert found.read((3, 3, 0, 8, 0, 9)).shape == (0, 8, 9, 1)


def test_one_image_is_no_stack(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((5, 7), np.uint8))
    with pytest.raises(ValueError, match="expected pages of grey"):
        open_volume(tmp_path / "a.tif")
