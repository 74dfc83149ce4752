from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from spatialdl.errors import SlideError
from spatialdl.slides.reading.opening import open_source
from spatialdl.slides.reading.openslide_file import OpenSlideFile
from spatialdl.slides.reading.plain_image import PlainImage
from tests.slides.dicom_series import uid, write_annotation, write_series
from tests.slides.tiled_tiffs import picture

IMAGE = np.zeros((300, 400, 3), np.uint8)


def test_openslide_is_asked_first(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "tiled.tif", IMAGE, photometric="rgb", tile=(256, 256))
    tifffile.imwrite(tmp_path / "striped.tif", IMAGE, photometric="rgb", rowsperstrip=32)
    Image.fromarray(IMAGE).save(tmp_path / "a.png")
    for name, kind in [
        ("tiled.tif", OpenSlideFile),
        ("striped.tif", PlainImage),
        ("a.png", PlainImage),
    ]:
        source = open_source(tmp_path / name)
        assert isinstance(source, kind)
        assert source.size == (300, 400)
        assert (source.read(0, 0, 0, (300, 400), True) == 0).all()
        source.close()


def test_the_suffix_does_not_matter(tmp_path: Path) -> None:
    Image.fromarray(IMAGE).save(tmp_path / "a.svs", format="png")
    assert open_source(tmp_path / "a.svs").size == (300, 400)


def test_folders_are_slides_if_they_are_one_series(tmp_path: Path) -> None:
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
    with pytest.raises(SlideError, match="DICOM file, but not of a whole-slide image"):
        open_source(tmp_path / "note.dcm")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("fichier à côté\n".encode(), "text file"),
        (bytes(range(256)), "does not read this format"),
        (b"II*\0" + bytes(60), "cut short or of a kind"),
        (b"\x89PNG\r\n\x1a\n", "PNG is cut short"),
        (b"\xff\xd8\xff", "JPEG is cut short"),
    ],
)
def test_what_cannot_be_opened_says_why(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "a b é.svs"
    path.write_bytes(content)
    with pytest.raises(SlideError, match=says) as caught:
        open_source(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
