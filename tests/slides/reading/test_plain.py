"""PNG, JPEG and striped TIFF as slides."""

from __future__ import annotations

import re
import shutil
import struct
import zlib
from collections import namedtuple
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import tifffile
from PIL import Image

from spatialdl.errors import SlideError
from spatialdl.slides.reading import plain_image, plain_tiff
from spatialdl.slides.reading.reader import Slide

Bytes = npt.NDArray[np.uint8]
GREY = np.add.outer(np.arange(120), np.arange(200) // 2).astype(np.uint8)
RGB = np.stack(
    [np.add.outer(np.arange(300) * a, np.arange(200) * b) for a, b in ((1, 2), (3, 1), (2, 5))], -1
).astype(np.uint8)


def whole(path: Path) -> np.ndarray:
    with Slide(path) as slide:
        part = slide.read_scaled(37, 11, (90, 60), 1.0)
        image = slide.read_scaled(0, 0, slide.size, 1.0)
        rows, cols = slide.size
        around = slide.read_scaled(-4, -6, (rows + 16, cols + 9), 1.0)
        beyond = slide.read_scaled(cols, 3, (9, 9), 1.0)
    assert (part == image[11:101, 37:97]).all()
    assert (around == np.pad(image, ((6, 10), (4, 5), (0, 0)), constant_values=255)).all()
    assert (beyond == 255).all()
    return image


@pytest.mark.parametrize("mode", ["1", "LA", "P", "RGBA"])
def test_kinds_of_png(tmp_path, mode):
    picture = Image.fromarray(GREY).convert(mode)
    right = np.array(picture.convert("RGB"))
    if mode[-1] == "A":  # lies over white
        picture.putalpha(Image.fromarray(RGB[:120, :, 0]))
        alpha = RGB[:120, :, :1] / 255
        right = (right * alpha + 255 * (1 - alpha)).round()
    picture.save(tmp_path / "a.png")
    assert np.abs(whole(tmp_path / "a.png") - right).max() <= (mode[-1] == "A")
    if mode == "P":  # a transparent colour
        picture.save(tmp_path / "a.png", transparency=3)
        right[np.asarray(picture) == 3] = 255
        assert (whole(tmp_path / "a.png") == right).all()


@pytest.mark.parametrize(("mode", "progressive"), [("L", True), ("RGB", False)])
def test_kinds_of_jpeg(tmp_path, mode, progressive):
    path = tmp_path / "a.jpg"
    Image.fromarray(GREY).convert(mode).save(path, progressive=progressive, comment="x" * 1000)
    assert (whole(path) == np.asarray(Image.open(path).convert("RGB"))).all()


def test_large_ones_are_decoded_into_a_file(tmp_path, monkeypatch):
    picture = Image.fromarray(GREY).convert("RGB")
    picture.save(tmp_path / "a.png")
    monkeypatch.setattr(plain_image, "IN_MEMORY", GREY.size * 3 - 1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)  # nothing to do with it
    pixels = plain_image.DecodedPixels(tmp_path / "a.png", plain_image.PNG)
    assert pixels._spool is not None
    assert (pixels.box(5, 50, 6, 70) == np.asarray(picture)[5:50, 6:70]).all()
    pixels.close()
    assert (whole(tmp_path / "a.png") == np.asarray(picture)).all()
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 0, 1000))
    with pytest.raises(
        SlideError, match=r"needs 0\.0 GB when decoded, and the temporary folder .*TMPDIR"
    ):
        Slide(tmp_path / "a.png")


def png_of(rows: int, cols: int, bits: int = 8, colour: int = 2, interlaced: int = 0) -> bytes:
    """A PNG of a header alone."""
    header = struct.pack(">IIBBBBB", cols, rows, bits, colour, 0, 0, interlaced)
    parts = [(b"IHDR", header), (b"IDAT", b""), (b"IEND", b"")]
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_what_is_not_read_is_named(tmp_path):
    jpeg, cmyk, progressive = (tmp_path / f"{name}.jpg" for name in ("a", "cmyk", "prog"))
    Image.fromarray(GREY).save(jpeg)
    Image.fromarray(GREY).convert("CMYK").save(cmyk)
    Image.fromarray(GREY).convert("RGB").save(progressive, progressive=True)
    content = bytearray(progressive.read_bytes())
    frame = content.index(b"\xff\xc2")
    content[frame + 5 : frame + 9] = struct.pack(">HH", 60000, 60000)
    for name, data, says in [
        ("16.png", png_of(5, 5, bits=16), "16 bits per channel"),
        ("lines.png", png_of(60000, 60000, interlaced=1), "decoding it needs 10.8 GB of memory"),
        ("cut.png", png_of(5, 5)[:20], "cut short in its header"),
        ("cut.jpg", jpeg.read_bytes()[:-200], "cut short: its end is missing"),
        ("cmyk.jpg", cmyk.read_bytes(), "has the colours CMYK"),
        ("prog.jpg", bytes(content), "decoding it needs 21.6 GB of memory"),
    ]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(SlideError, match=re.escape(says)) as caught:
            Slide(tmp_path / name)
        assert name in str(caught.value)


def test_damaged_pixels_are_named_and_decoded_once(tmp_path, monkeypatch):
    path, opened = tmp_path / "a.png", []
    Image.fromarray(GREY).save(path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    original = plain_image.DecodedPixels

    def counted(path: Path, kind: plain_image.Kind) -> plain_image.DecodedPixels:
        opened.append(path)
        return original(path, kind)

    monkeypatch.setattr(plain_image, "DecodedPixels", counted)
    with Slide(path) as slide:
        assert slide.thumbnail(1.0).missing.all()
        with pytest.raises(SlideError, match="the PNG is damaged"):
            slide.read_scaled(0, 0, (10, 10), 1.0)
        with pytest.raises(SlideError, match="no micrometres per pixel"):
            assert slide.mpp
    assert len(opened) == 1


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"rowsperstrip": 32, "compression": "zlib", "predictor": True},
        {"rowsperstrip": 50, "compression": "zlib", "planarconfig": "separate"},
        {"rowsperstrip": 32, "byteorder": ">"},
        {"rowsperstrip": 32, "compression": "jpeg"},
    ],
)
def test_strips(tmp_path, more):
    path, image = tmp_path / "a.tif", RGB.transpose(2, 0, 1) if "planarconfig" in more else RGB
    tifffile.imwrite(path, image, photometric="rgb", **more)
    right = tifffile.imread(path) if more.get("compression") == "jpeg" else RGB
    assert (whole(path) == right).all()


def test_kinds_of_colour(tmp_path):
    path, grey = tmp_path / "a.tif", RGB[..., 0]
    for kind, values in (("minisblack", grey), ("miniswhite", 255 - grey)):
        tifffile.imwrite(path, grey, photometric=kind, rowsperstrip=16)
        assert (whole(path) == values[..., None]).all()
    picture = Image.fromarray(RGB).quantize(50)
    picture.save(path)
    assert (whole(path) == np.asarray(picture.convert("RGB"))).all()
    alpha = np.full((300, 200, 1), 255, np.uint8)
    alpha[100:200], alpha[200:] = 0, 102
    weighted = RGB * (alpha / 255)
    for kind, colours in (("assocalpha", weighted.round().astype(np.uint8)), ("unassalpha", RGB)):
        more = {"photometric": "rgb", "extrasamples": [kind], "rowsperstrip": 64}
        tifffile.imwrite(path, np.concatenate([colours, alpha], -1), **more)
        got = whole(path)
        assert (got[:100] == RGB[:100]).all()
        assert np.abs(got - (weighted + 255 - alpha)).max() <= 1


def test_resolution_is_that_of_its_tags(tmp_path):
    for unit, per, mpp in [("CENTIMETER", 20_000, 0.5), ("INCH", 101_600, 0.25)]:
        path = tmp_path / f"{unit}.tif"
        tifffile.imwrite(path, RGB, resolution=(per, per), resolutionunit=unit)
        with Slide(path) as slide:
            assert slide.mpp == pytest.approx(mpp)
    tifffile.imwrite(path, RGB, resolution=(72, 72), resolutionunit="INCH")
    with Slide(path) as slide, pytest.raises(SlideError, match=r"has 352\.8 x 352\.8"):
        assert slide.mpp


def test_tiffs_that_are_not_read_are_named(tmp_path, monkeypatch):
    path = tmp_path / "a.tif"
    for image, photometric, says in [
        (RGB.astype(np.uint16), "rgb", "16 bits per channel, supported are 8"),
        (np.concatenate([RGB, RGB[..., :1]], -1), "separated", "SEPARATED with 4 channels"),
    ]:
        tifffile.imwrite(path, image, photometric=photometric)
        with pytest.raises(SlideError, match=re.escape(says)):
            Slide(path)
    tifffile.imwrite(path, RGB, photometric="rgb", compression="zlib", rowsperstrip=300)
    monkeypatch.setattr(plain_tiff, "_LARGEST_STRIP", 100_000)
    with pytest.raises(SlideError, match=r"strip of the TIFF needs 0\.0 GB .* tiled TIFF"):
        Slide(path)


def test_a_damaged_strip_does_not_spoil_the_others(tmp_path):
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
    path.write_bytes(content[:-500])
    with pytest.raises(SlideError, match="cut short"):
        Slide(path)
