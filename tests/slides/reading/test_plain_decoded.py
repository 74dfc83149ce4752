from __future__ import annotations

import re
import shutil
import struct
import zlib
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from spatialdl.errors import SlideError
from spatialdl.slides.reading import plain_decoded
from spatialdl.slides.reading.reader import Slide

GREY = np.add.outer(np.arange(120), np.arange(200) // 2).astype(np.uint8)


def whole(path: Path) -> np.ndarray:
    with Slide(path) as slide:
        return slide.read_scaled(0, 0, slide.size, 1.0)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_kinds_of_png(tmp_path: Path, mode: str) -> None:
    picture = Image.fromarray(GREY).convert(mode)
    picture.save(tmp_path / "a.png")
    assert (whole(tmp_path / "a.png") == np.asarray(picture.convert("RGB"))).all()


def test_a_png_with_a_transparent_colour(tmp_path: Path) -> None:
    picture = Image.fromarray(GREY).convert("P")
    picture.save(tmp_path / "a.png", transparency=3)
    index = np.asarray(picture)
    right = np.asarray(picture.convert("RGB")).copy()
    right[index == 3] = 255
    assert (index == 3).any()
    assert (whole(tmp_path / "a.png") == right).all()


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("progressive", [False, True])
def test_kinds_of_jpeg(tmp_path: Path, mode: str, progressive: bool) -> None:
    path = tmp_path / "a.jpg"
    Image.fromarray(GREY).convert(mode).save(path, progressive=progressive, comment="x" * 1000)
    assert (whole(path) == np.asarray(Image.open(path).convert("RGB"))).all()


def test_large_ones_are_decoded_into_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = Image.fromarray(GREY).convert("RGB")
    picture.save(tmp_path / "a.png")
    monkeypatch.setattr(plain_decoded, "IN_MEMORY", GREY.size * 3 - 1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)  # nothing to do with it
    pixels = plain_decoded.DecodedPixels(tmp_path / "a.png", plain_decoded.PNG)
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


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    jpeg, cmyk, progressive = (tmp_path / f"{name}.jpg" for name in ("a", "cmyk", "prog"))
    Image.fromarray(GREY).save(jpeg)
    Image.fromarray(GREY).convert("CMYK").save(cmyk)
    Image.fromarray(GREY).convert("RGB").save(progressive, progressive=True)
    content = bytearray(progressive.read_bytes())
    frame = content.index(b"\xff\xc2")
    content[frame + 5 : frame + 9] = struct.pack(">HH", 60000, 60000)
    for name, data, says in [
        ("16.png", png_of(5, 5, bits=16), "16 bits per channel"),
        ("zero.png", png_of(0, 5), "0 x 5 pixels"),
        ("interlaced.png", png_of(60000, 60000, interlaced=1), "interlaced PNG needs 10.8 GB"),
        ("cut.png", png_of(5, 5)[:20], "cut short in its header"),
        ("huge.png", png_of(2**30, 2**30), "it needs 3458764513.8 GB when decoded"),
        ("cut.jpg", jpeg.read_bytes()[:-200], "cut short: its end is missing"),
        ("head.jpg", jpeg.read_bytes()[:30], "cut short"),
        ("cmyk.jpg", cmyk.read_bytes(), "4 channels (CMYK)"),
        ("prog.jpg", bytes(content), "progressive JPEG needs 21.6 GB of memory"),
    ]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(SlideError, match=re.escape(says)) as caught:
            Slide(tmp_path / name)
        assert name in str(caught.value)


def test_one_that_is_damaged_is_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(GREY).save(path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    opened: list[Path] = []
    original = plain_decoded.DecodedPixels

    def counted(path: Path, kind: plain_decoded.Kind) -> plain_decoded.DecodedPixels:
        opened.append(path)
        return original(path, kind)

    monkeypatch.setattr(plain_decoded, "DecodedPixels", counted)
    with Slide(path) as slide:
        assert slide.thumbnail(1.0).missing.all()
    assert len(opened) == 1


def test_damaged_pixels_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(GREY).save(path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    with Slide(path) as slide, pytest.raises(SlideError, match="the PNG is damaged"):
        slide.read_scaled(0, 0, (10, 10), 1.0)
