from __future__ import annotations

import struct
from pathlib import Path

import openslide
import pytest
import tifffile

from spatialdl.errors import SlideError
from spatialdl.slides.reading.reader import Slide
from spatialdl.slides.reading.tiff_check import missing_part
from tests.slides.tiled_tiffs import picture, write_tiff

APERIO = "Aperio Image Library v11.2.1\r\n512x512 (256x256) JPEG/RGB Q=70|AppMag = 20|MPP = 0.5"


def directories(path: Path) -> list[int]:
    with tifffile.TiffFile(path) as tiff:
        return [page.offset for page in tiff.pages]


@pytest.fixture(params=[False, True], ids=["classic", "big"])
def aperio(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An Aperio slide of two levels, whose last directory is the end of the file."""
    levels = [picture(512, 512), picture(256, 256)]
    path = write_tiff(tmp_path / "a.svs", levels, description=APERIO, bigtiff=request.param)
    with openslide.OpenSlide(path) as slide:
        assert slide.properties["openslide.vendor"] == "aperio"
    assert missing_part(path) == ""
    return path


def test_a_slide_without_its_last_directory_is_refused(aperio: Path) -> None:
    last = directories(aperio)[-1]
    whole = aperio.read_bytes()
    for end, how in (
        (last, "is"),
        (last + 1, "is"),
        (last + 20, "extends"),
        (last + 100, "extends"),
    ):
        aperio.write_bytes(whole[:end])
        with pytest.raises(openslide.OpenSlideUnsupportedFormatError):
            openslide.OpenSlide(aperio)
        says = f"directory 1, at byte {last}, {how} beyond the end of the file, at byte {end}"
        with pytest.raises(SlideError, match=says):
            Slide(aperio, 0.5)


def test_a_slide_that_openslide_refuses_is_not_a_plain_image(aperio: Path) -> None:
    whole = bytearray(aperio.read_bytes())
    start = directories(aperio)[1]
    # the second directory has the tags of something else
    whole[start + 10 : start + 60] = bytes(50)
    aperio.write_bytes(whole)
    with pytest.raises(openslide.OpenSlideError):
        openslide.OpenSlide(aperio)
    with pytest.raises(SlideError, match="copy it again"):
        Slide(aperio, 0.5)


def test_directories_in_a_circle_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, picture(64, 64), photometric="rgb", rowsperstrip=8)
    raw = bytearray(path.read_bytes())
    (start,) = directories(path)
    (tags,) = struct.unpack_from("<H", raw, start)
    struct.pack_into("<I", raw, start + 2 + 12 * tags, start)
    path.write_bytes(raw)
    assert "form a cycle" in missing_part(path)
    with pytest.raises(SlideError, match="form a cycle"):
        Slide(path, 0.5)


def test_a_later_image_that_is_cut_short_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as tiff:
        for _ in range(2):
            tiff.write(picture(64, 64), photometric="rgb", rowsperstrip=8, metadata=None)
    assert missing_part(path) == ""
    with tifffile.TiffFile(path) as tiff:
        end = sum((tiff.pages[1].dataoffsets[-1], tiff.pages[1].databytecounts[-1]))
    path.write_bytes(path.read_bytes()[: end - 1])
    with pytest.raises(
        SlideError, match=rf"image 1 ends at byte {end}, the file at byte {end - 1}"
    ):
        Slide(path, 0.5)


def test_a_region_exported_by_imagescope_is_a_plain_image(tmp_path: Path) -> None:
    path, image = tmp_path / "a.tif", picture(64, 64)
    more = {"photometric": "rgb", "rowsperstrip": 8, "metadata": None}
    tifffile.imwrite(path, image, description=APERIO, **more)
    with Slide(path, 0.5) as slide:
        assert (slide.read_scaled(0, 0, (64, 64), 1.0) == image).all()
        assert "has strips instead of tiles" in slide.remark
    tifffile.imwrite(path, image, **more)
    with Slide(path, 0.5) as slide:
        assert slide.remark == ""


def test_a_real_slide_without_its_last_directory_is_refused(real: Path, tmp_path: Path) -> None:
    whole = real / "CMU-1-Small-Region.svs"
    last = directories(whole)[-1]
    (tmp_path / "a.svs").write_bytes(whole.read_bytes()[: last + 10])
    with pytest.raises(SlideError, match=f"directory 3, at byte {last}, extends beyond the end"):
        Slide(tmp_path / "a.svs", 0.5)
    with pytest.raises(SlideError, match="directory 0, at byte 1275950, is beyond the end"):
        Slide(real / "bad" / "truncated-half.svs", 0.5)
