from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from spatialdl.errors import SlideError
from spatialdl.slides.reading import plain_tiff
from spatialdl.slides.reading.reader import Slide

RGB = np.stack(
    [np.add.outer(np.arange(300) * a, np.arange(200) * b) for a, b in ((1, 2), (3, 1), (2, 5))], -1
).astype(np.uint8)


def whole(path: Path) -> np.ndarray:
    with Slide(path) as slide:
        part = slide.read_scaled(37, 111, (90, 60), 1.0)
        image = slide.read_scaled(0, 0, slide.size, 1.0)
    assert (part == image[111:201, 37:97]).all()
    return image


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"rowsperstrip": 32},
        {"rowsperstrip": 32, "compression": "zlib", "predictor": True},
        {"rowsperstrip": 50, "compression": "lzw", "bigtiff": True},
        {"rowsperstrip": 50, "compression": "zlib", "planarconfig": "separate"},
        {"planarconfig": "separate"},
        {"rowsperstrip": 32, "byteorder": ">"},
    ],
)
def test_strips(tmp_path: Path, more: dict[str, object]) -> None:
    image = RGB.transpose(2, 0, 1) if "planarconfig" in more else RGB
    tifffile.imwrite(tmp_path / "a.tif", image, photometric="rgb", **more)
    assert (whole(tmp_path / "a.tif") == RGB).all()


def test_strips_of_jpeg(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, RGB, photometric="rgb", compression="jpeg", rowsperstrip=32)
    assert (whole(path) == tifffile.imread(path)).all()


def test_kinds_of_colour(tmp_path: Path) -> None:
    path, grey = tmp_path / "a.tif", RGB[..., 0]
    tifffile.imwrite(path, grey, photometric="minisblack", rowsperstrip=16)
    assert (whole(path) == grey[..., None]).all()
    tifffile.imwrite(path, grey, photometric="miniswhite", rowsperstrip=16)
    assert (whole(path) == 255 - grey[..., None]).all()
    picture = Image.fromarray(RGB).quantize(50)
    picture.save(path)
    assert (whole(path) == np.asarray(picture.convert("RGB"))).all()


@pytest.mark.parametrize("premultiplied", [False, True])
def test_transparent_pixels_are_white(tmp_path: Path, premultiplied: bool) -> None:
    alpha = np.full((300, 200, 1), 255, np.uint8)
    alpha[100:] = 0
    colour = RGB.copy()
    if premultiplied:
        colour[100:] = 0
    tifffile.imwrite(
        tmp_path / "a.tif",
        np.concatenate([colour, alpha], -1),
        photometric="rgb",
        extrasamples=["assocalpha" if premultiplied else "unassalpha"],
        rowsperstrip=64,
    )
    got = whole(tmp_path / "a.tif")
    assert (got[:100] == RGB[:100]).all()
    assert (got[100:] == 255).all()


def test_resolution_is_that_of_its_tags(tmp_path: Path) -> None:
    for unit, per, mpp in [("CENTIMETER", 20_000, 0.5), ("INCH", 101_600, 0.25)]:
        path = tmp_path / f"{unit}.tif"
        tifffile.imwrite(path, RGB, resolution=(per, per), resolutionunit=unit)
        with Slide(path) as slide:
            assert slide.mpp == pytest.approx(mpp)
    tifffile.imwrite(path, RGB, resolution=(72, 72), resolutionunit="INCH")
    with Slide(path) as slide, pytest.raises(SlideError, match=r"has 352\.8 x 352\.8"):
        assert slide.mpp


def test_few_strips_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_tiff, "_CACHE", 3 * 32 * 200 * 3)
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, RGB, photometric="rgb", rowsperstrip=32, compression="zlib")
    pixels = plain_tiff.TiffPixels(path)
    for _ in range(2):
        assert (pixels.box(0, 300, 5, 9) == RGB[:, 5:9]).all()
        kept = [part for part in pixels._kept.values() if part is not None]
        assert pixels._bytes == sum(part.nbytes for part in kept) <= 3 * 32 * 200 * 3
        assert len(kept) >= 2
    pixels.close()


def test_what_is_not_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.tif"
    for image, photometric, says in [
        (RGB.astype(np.uint16), "rgb", "16 bits per channel, supported are 8"),
        (RGB.astype(np.float32), "rgb", "32 bits per channel"),
        (RGB[..., 0] > 3, "minisblack", "1 bits per channel"),
        (np.concatenate([RGB, RGB[..., :1]], -1), "separated", "SEPARATED with 4 channels"),
    ]:
        tifffile.imwrite(path, image, photometric=photometric)
        with pytest.raises(SlideError, match=re.escape(says)):
            Slide(path)
    tifffile.imwrite(path, RGB, photometric="rgb", compression="zlib", rowsperstrip=300)
    monkeypatch.setattr(plain_tiff, "_LARGEST_STRIP", 100_000)
    with pytest.raises(SlideError, match=r"strip of the TIFF needs 0\.0 GB .* tiled TIFF"):
        Slide(path)


def test_one_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, RGB, photometric="rgb", rowsperstrip=32)
    content = path.read_bytes()
    path.write_bytes(content[:-500])
    with pytest.raises(SlideError, match="cut short"):
        Slide(path)


def test_a_damaged_strip_does_not_spoil_the_others(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, RGB, photometric="rgb", rowsperstrip=100, compression="zlib")
    with tifffile.TiffFile(path) as tiff:
        place = tiff.pages.first.dataoffsets[1]
    content = bytearray(path.read_bytes())
    content[place : place + 40] = bytes(40)
    path.write_bytes(content)
    with Slide(path) as slide:
        assert (slide.read_scaled(0, 0, (100, 200), 1.0) == RGB[:100]).all()
        with pytest.raises(SlideError, match=r"at x=0, y=50: .*damaged there"):
            slide.read_scaled(0, 50, (100, 200), 1.0)
        assert (slide.read_scaled(0, 200, (100, 200), 1.0) == RGB[200:]).all()
