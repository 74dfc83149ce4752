from __future__ import annotations

import pickle

import numpy as np
import pytest
import zarr

from spatialdl.data.importing.volume_file import open_volume, volume_name

SIZE = (4, 6, 5)
PIXELS = np.random.default_rng(0).integers(0, 999, (3, *SIZE)).astype(np.uint16)  # CZYX
TYPES = {"t": "time", "c": "channel"}


def described(axes, unit="micrometer", scale=0.5, transforms=(), levels=("0",), **more):
    """`multiscales` of a store."""
    units = {} if unit is None else {"unit": unit}
    made = [
        {"name": axis, "type": TYPES.get(axis, "space")} | (units if axis in "zyx" else {})
        for axis in axes
    ]
    step = {"z": 2.0, "y": 0.25, "x": scale}
    sets = [
        {
            "path": level,
            "coordinateTransformations": [
                {"type": "scale", "scale": [step.get(axis, 1.0) for axis in axes]},
                {"type": "translation", "translation": [0.0] * len(axes)},
            ],
        }
        for level in levels
    ]
    return [{"axes": made, "datasets": sets, "coordinateTransformations": [*transforms], **more}]


def save(path, arrays, multiscales, version="0.4"):
    group = zarr.open_group(str(path), mode="w", zarr_format=2 if version == "0.4" else 3)
    for name, array in arrays.items():
        chunks = tuple(min(n, 3) for n in array.shape)
        made = group.create_array(name, shape=array.shape, dtype=array.dtype, chunks=chunks)
        made[...] = array
    if version == "0.4":
        group.attrs["multiscales"] = [{"version": version, **one} for one in multiscales]
    else:
        group.attrs["ome"] = {"version": version, "multiscales": multiscales}


@pytest.mark.parametrize("version", ["0.4", "0.5"])
@pytest.mark.parametrize("axes", ["zyx", "czyx", "tczyx", "zcyx", "xyz"])
def test_stores_of_either_version_in_any_order_of_axes(version, axes, tmp_path):
    full = {"t": 1, "c": 3, "z": 4, "y": 6, "x": 5}
    pixels = PIXELS if "c" in axes else PIXELS[:1]
    order = ["czyx".index(axis) for axis in axes if axis != "t"]
    order += [] if "c" in axes else [0]
    written = pixels.transpose(order).reshape([full[axis] for axis in axes])
    save(tmp_path / "a.ome.zarr", {"0": written}, described(axes), version)
    found = pickle.loads(pickle.dumps(open_volume(tmp_path / "a.ome.zarr")))
    assert (found.size, found.channels, found.dtype) == (SIZE, len(pixels), np.uint16)
    assert (found.read() == np.moveaxis(pixels, 0, -1)).all()
    assert (found.read((1, 3, 2, 6, 0, 2)) == found.read()[1:3, 2:6, :2]).all()
    assert found.spacing == pytest.approx((2e-3, 0.25e-3, 0.5e-3))
    assert found.affine is None
    assert volume_name(tmp_path / "a.ome.zarr") == "a"


def test_the_full_resolution_is_read_and_scales_multiply(tmp_path):
    more = {"type": "scale", "scale": [3.0, 3.0, 3.0]}
    levels = {"s1": PIXELS[0, :, ::2, ::2], "s0": PIXELS[0]}
    save(tmp_path / "a.zarr", levels, described("zyx", transforms=[more], levels=("s0", "s1")))
    found = open_volume(tmp_path / "a.zarr")
    assert (found.read()[..., 0] == PIXELS[0]).all()
    assert found.spacing == pytest.approx((6e-3, 0.75e-3, 1.5e-3))


@pytest.mark.parametrize("how", [{"unit": None}, {"unit": "pixel"}, {"scale": 0.0}])
def test_without_units_the_spacing_is_not_known(how, tmp_path):
    save(tmp_path / "a.zarr", {"0": PIXELS[0]}, described("zyx", **how))
    assert open_volume(tmp_path / "a.zarr").spacing is None


@pytest.mark.parametrize(
    ("axes", "shape", "said"),
    [
        ("yx", (6, 5), "axes y, x of 6 x 5, expected z, y and x"),
        ("tzyx", (2, 4, 6, 5), "axes t, z, y, x of 2 x 4 x 6 x 5"),
    ],
)
def test_other_axes_are_refused(axes, shape, said, tmp_path):
    save(tmp_path / "a.zarr", {"0": np.zeros(shape, np.uint8)}, described(axes))
    with pytest.raises(ValueError, match=said):
        open_volume(tmp_path / "a.zarr")


@pytest.mark.parametrize("images", [1, 2])
def test_the_only_image_of_bioformats2raw_is_read(images, tmp_path):
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w", zarr_format=2)
    group.attrs["bioformats2raw.layout"] = 3
    for number in range(images):
        save(tmp_path / "a.zarr" / str(number), {"0": PIXELS[0]}, described("zyx"))
    if images == 1:
        found = open_volume(tmp_path / "a.zarr")
        assert (found.read()[..., 0] == PIXELS[0]).all()
        assert found.spacing == pytest.approx((2e-3, 0.25e-3, 0.5e-3))
    else:
        with pytest.raises(ValueError, match=r"or several \(attributes: bioformats2raw"):
            open_volume(tmp_path / "a.zarr")


def test_stores_that_are_no_image_are_refused(tmp_path):
    zarr.open_group(str(tmp_path / "a.zarr"), mode="w").attrs["plate"] = {}
    with pytest.raises(ValueError, match=r"no multiscale image, .*attributes: plate"):
        open_volume(tmp_path / "a.zarr")
    save(tmp_path / "b.zarr", {"0": PIXELS[0]}, [{**described("zyx")[0], "axes": ["z", "y", "x"]}])
    with pytest.raises(ValueError, match=r"expected those of OME-Zarr 0.4 or 0.5"):
        open_volume(tmp_path / "b.zarr")
    (tmp_path / "c.zarr").mkdir()
    with pytest.raises(FileNotFoundError):
        open_volume(tmp_path / "c.zarr")


def test_a_damaged_chunk_is_refused(tmp_path):
    save(tmp_path / "a.zarr", {"0": PIXELS[0]}, described("zyx"))
    chunk = max((tmp_path / "a.zarr" / "0").rglob("*.*.*"))
    chunk.write_bytes(chunk.read_bytes()[:10])
    with pytest.raises(Exception, match=r"."):
        open_volume(tmp_path / "a.zarr").read()
