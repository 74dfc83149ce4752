"""Who reads which file, what files say that nobody can read, and files that are let go."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import openslide
import pytest
import tifffile
from PIL import Image

from spatialdl.errors import SlideError
from spatialdl.slides.reading import opening, plain_image, source
from spatialdl.slides.reading.opening import OpenSlideFile, composited, open_source
from spatialdl.slides.reading.plain_image import PlainImage
from spatialdl.slides.reading.plain_tiff import missing_part
from spatialdl.slides.reading.reader import Slide
from tests.slides.dicom_series import uid, write_annotation, write_series
from tests.slides.tiled_tiffs import picture, write_tiff

IMAGE = np.zeros((300, 400, 3), np.uint8)
APERIO = "Aperio Image Library v11.2.1\r\n512x512 (256x256) JPEG/RGB Q=70|AppMag = 20|MPP = 0.5"


def test_openslide_is_asked_first(tmp_path):
    tifffile.imwrite(tmp_path / "tiled.tif", IMAGE, photometric="rgb", tile=(256, 256))
    tifffile.imwrite(tmp_path / "striped.tif", IMAGE, photometric="rgb", rowsperstrip=32)
    Image.fromarray(IMAGE).save(tmp_path / "a.svs", format="png")  # the suffix does not matter
    kinds = {"tiled.tif": OpenSlideFile, "striped.tif": PlainImage, "a.svs": PlainImage}
    for name, kind in kinds.items():
        source = open_source(tmp_path / name)
        assert isinstance(source, kind)
        assert source.size == (300, 400)
        first = source.read(3, 4, 0, (300, 390), True)
        assert (first == 0).mean() > 0.9
        assert source.release()  # it is opened when read, and again
        assert (source.read(3, 4, 0, (300, 390), True) == first).all()
        source.close()


def test_folders_are_slides_if_they_are_one_series(tmp_path):
    files = write_series(tmp_path / "one", picture(200, 150), uid("a"))
    source = open_source(tmp_path / "one")
    assert source.size == (200, 150)
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[: content.rindex(b"\xff\xd8")] + bytes(50))
    with pytest.raises(SlideError, match=f"cannot read slide {tmp_path / 'one'} at x=0, y=0"):
        open_source(tmp_path / "one").read(0, 0, 2, (60, 40), True)
    with pytest.raises(SlideError, match="it is a folder without slides"):
        open_source(tmp_path)
    for name in "bcde":
        write_series(tmp_path / "two", picture(200, 150), uid(name), 1, name=name + "{}.dcm")
    with pytest.raises(SlideError, match=r"it is a folder; give one of its slides: .* and 1 more"):
        open_source(tmp_path / "two")
    write_annotation(tmp_path / "note.dcm", uid("note"))
    with pytest.raises(SlideError, match="DICOM file, but not a whole-slide image"):
        open_source(tmp_path / "note.dcm")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("fichier à côté\n".encode(), "text file"),
        (bytes(range(256)), "does not support this format"),
        (b"II*\0" + bytes(60), "cut short or not supported"),
        ("bad/truncated-half.svs", "directory 0, at byte 1275950, is beyond the end"),
        ("osp-unopenable.tiff", "Unsupported TIFF compression"),
        (None, "no such file"),
    ],
)
def test_what_cannot_be_opened_says_why(tmp_path, real, content, says):
    path = real / content if isinstance(content, str) else tmp_path / "a b é.svs"
    if isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(SlideError, match=says) as caught:
        open_source(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_handle_that_failed_is_opened_again(synthetic, monkeypatch):
    source = OpenSlideFile(synthetic["ring"], native=False)
    right = source.read(500, 400, 0, (50, 60), True)
    failing, original = [1, 3, 4], openslide.OpenSlide.read_region
    calls = iter(range(100))

    def fails(self: openslide.OpenSlide, *place: object) -> object:
        if next(calls) in failing:
            raise openslide.OpenSlideError("a bad day")
        return original(self, *place)

    monkeypatch.setattr(openslide.OpenSlide, "read_region", fails)
    handles = []
    for _ in range(2):  # the second fails once, and is read again
        assert (source.read(500, 400, 0, (50, 60), True) == right).all()
        handles.append(source._handle)
    assert handles[0] is not handles[1]
    with pytest.raises(SlideError, match=r"x=500, y=400 \(level 0\): a bad day; .* damaged there"):
        source.read(500, 400, 0, (50, 60), True)
    assert (source.read(500, 400, 0, (50, 60), False) == right).all()
    source.close()


def test_it_is_not_released_while_it_is_read(synthetic):
    from threading import Thread

    source, answers = OpenSlideFile(synthetic["ring"]), []
    with source._lock:
        thread = Thread(target=lambda: answers.append(source.release()))
        thread.start()
        thread.join()
    assert answers == [False]
    assert source._handle is not None
    source.close()


def test_transparent_pixels_have_the_background(tmp_path):
    path, image = tmp_path / "a.tiff", np.zeros((300, 300, 4), np.uint8)
    image[:100, :, 3] = 255
    more = {"photometric": "rgb", "extrasamples": ["assocalpha"]}
    tifffile.imwrite(path, image, tile=(256, 256), **more)
    source = OpenSlideFile(path)
    got = source.read(0, 0, 0, (300, 400), True)
    assert (got[:100, :300] == 0).all()
    assert (got[100:] == 255).all()
    assert (got[:, 300:] == 255).all()
    source.close()
    with openslide.OpenSlide(path) as raw:
        blue = composited(raw.read_region((0, 0), 0, (300, 300)), (0, 0, 255))
    assert (blue[200, 200] == (0, 0, 255)).all()


def test_many_slides_are_read_with_few_files_open(synthetic, monkeypatch):
    handles = source.Handles(3)
    for module in (opening, plain_image, source):
        monkeypatch.setattr(module, "HANDLES", handles)
    before = open_files()
    slides = [Slide(synthetic["ring"]) for _ in range(20)]
    right = slides[0].read_scaled(600, 500, (100, 90), 1.0)
    for _ in range(2):
        for slide in slides:
            assert slide.is_native(1.0)
            assert (slide.read_scaled(600, 500, (100, 90), 1.0) == right).all()
            assert slide.read_scaled(0, 0, (40, 40), 1.5).shape == (40, 40, 3)  # by openslide
        assert len(handles) == 3
        assert open_files() <= before + 3 * 3
    for slide in slides:
        slide.close()
    assert len(handles) == 0
    assert open_files() == before


def open_files() -> int:
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        pytest.skip("open files are counted in /proc")
    return len(os.listdir(folder))


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


def test_a_slide_without_its_last_directory_is_refused(aperio):
    last, whole = directories(aperio)[-1], aperio.read_bytes()
    for end, how in ((last, "is"), (last + 20, "extends"), (last + 100, "extends")):
        aperio.write_bytes(whole[:end])
        with pytest.raises(openslide.OpenSlideUnsupportedFormatError):
            openslide.OpenSlide(aperio)
        says = f"directory 1, at byte {last}, {how} beyond the end of the file, at byte {end}"
        with pytest.raises(SlideError, match=says):
            Slide(aperio, 0.5)
    # with the tags of something else it is not a plain image
    other = bytearray(whole)
    other[last + 10 : last + 60] = bytes(50)
    aperio.write_bytes(other)
    with pytest.raises(SlideError, match="copy it again"):
        Slide(aperio, 0.5)


def test_a_tiff_whose_directories_or_images_are_not_in_it_is_refused(tmp_path):
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as tiff:
        for _ in range(2):
            tiff.write(picture(64, 64), photometric="rgb", rowsperstrip=8, metadata=None)
    assert missing_part(path) == ""
    with tifffile.TiffFile(path) as tiff:
        page = tiff.pages[1]
        start, end = page.offset, page.dataoffsets[-1] + page.databytecounts[-1]
    whole, circle = path.read_bytes(), bytearray(path.read_bytes())
    (tags,) = struct.unpack_from("<H", circle, start)
    struct.pack_into("<I", circle, start + 2 + 12 * tags, start)
    cut = f"image 1 ends at byte {end}, the file at byte {end - 1}"
    for content, says in ((circle, "form a cycle"), (whole[: end - 1], cut)):
        path.write_bytes(content)
        with pytest.raises(SlideError, match=says):
            Slide(path, 0.5)


def test_a_region_exported_by_imagescope_is_a_plain_image(tmp_path):
    path, image = tmp_path / "a.tif", picture(64, 64)
    more = {"photometric": "rgb", "rowsperstrip": 8, "metadata": None}
    tifffile.imwrite(path, image, description=APERIO, **more)
    with Slide(path, 0.5) as slide:
        assert (slide.read_scaled(0, 0, (64, 64), 1.0) == image).all()
        assert "has strips instead of tiles" in slide.remark
    tifffile.imwrite(path, image, **more)
    with Slide(path, 0.5) as slide:
        assert slide.remark == ""


def test_files_that_a_slide_names_lie_in_its_folder(tmp_path):
    """OpenSlide follows any name."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a.mrxs").touch()
    (tmp_path / "a/Slidedat.ini").write_text("[DATAFILE]\nFILE_COUNT = 1\nFILE_0 = ../secret\n")
    (tmp_path / "a/b.vms").write_text("[Virtual Microscope Specimen]\nImageFile=link\n")
    (tmp_path / "secret").touch()
    (tmp_path / "a/link").symlink_to(tmp_path / "secret")
    for name in ("a.mrxs", "a/b.vms"):
        with pytest.raises(SlideError, match="out of its folder, to"):
            open_source(tmp_path / name)


@pytest.mark.parametrize("tile", [None, (64, 64)])
@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [
        ((70, 90), np.uint16, "16 bits per channel, supported are 8"),
        ((70, 90, 5), np.uint8, "MINISBLACK with 5 channels"),
        ((3, 70, 90), np.uint8, "several pages of 70x90, such as channels"),
    ],
)
def test_channels_depth_and_pages_are_not_lost_in_silence(shape, dtype, said, tile, tmp_path):
    """OpenSlide makes RGB of 8 bits of the first channel of any tiled TIFF."""
    path, pixels = tmp_path / "a.tif", np.zeros(shape, dtype)
    one = {"planarconfig": "contig"} if shape[-1] == 5 else {}
    tifffile.imwrite(path, pixels, tile=tile, photometric="minisblack", **one)
    with pytest.raises(SlideError, match=said):
        open_source(path)


@pytest.mark.parametrize("tile", [None, (64, 64)])
def test_a_tiff_has_the_resolution_of_its_ome_xml(tile, tmp_path):
    path = tmp_path / "a.ome.tif"
    lengths = {"PhysicalSizeX": 250, "PhysicalSizeXUnit": "nm", "PhysicalSizeY": 0.25}
    pixels, about = np.zeros((70, 90, 3), np.uint8), {"axes": "YXS", **lengths}
    tifffile.imwrite(path, pixels, tile=tile, photometric="rgb", metadata=about)
    with Slide(path) as slide:
        assert slide.mpp == pytest.approx(0.25)
    path.rename(tmp_path / "a.vsi")
    with pytest.raises(SlideError, match=r"lie in \.ets files"):
        open_source(tmp_path / "a.vsi")
