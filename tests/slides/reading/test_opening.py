from __future__ import annotations

from pathlib import Path

import imagecodecs
import numpy as np
import numpy.typing as npt
import pytest
import tifffile
from PIL import Image

from spatialdl.data import ShardDataset
from spatialdl.errors import SlideError
from spatialdl.slides.command import main
from spatialdl.slides.reading.opening import open_source
from spatialdl.slides.reading.openslide_file import OpenSlideFile
from spatialdl.slides.reading.plain_image import PlainImage
from spatialdl.slides.reading.reader import Slide
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


Bytes = npt.NDArray[np.uint8]


@pytest.fixture
def image() -> Bytes:
    random = np.random.default_rng(0).integers(0, 256, (70, 90, 3), np.uint8)
    return np.asarray(Image.fromarray(random).resize((900, 700), Image.Resampling.BICUBIC))


def test_boxes_are_those_of_the_image(tmp_path: Path, image: Bytes) -> None:
    path = tmp_path / "a photo é.png"
    path.write_bytes(imagecodecs.png_encode(image))
    with Slide(path) as slide:
        assert (slide.size, slide.downsamples) == ((700, 900), (1.0,))
        assert (slide.read_scaled(0, 0, (700, 900), 1.0) == image).all()
        assert (slide.read_scaled(13, 600, (100, 50), 1.0) == image[600:700, 13:63]).all()
        corner = slide.read_scaled(-5, -7, (20, 30), 1.0)
        assert (corner[7:, 5:] == image[:13, :25]).all()
        assert (corner[:7] == 255).all()
        assert (corner[:, :5] == 255).all()
        assert (slide.read_scaled(2000, 0, (20, 30), 1.0) == 255).all()
        thumbnail = slide.thumbnail(4.0)
        assert thumbnail.image.shape == (175, 225, 3)
        mean = image.reshape(175, 4, 225, 4, 3).mean((1, 3))
        assert np.abs(thumbnail.image - mean).mean() < 4
        with pytest.raises(SlideError, match="no micrometres per pixel"):
            assert slide.mpp


def test_transparent_pixels_are_white(tmp_path: Path, image: Bytes) -> None:
    alpha = np.zeros(image.shape[:2], np.uint8)
    alpha[:300], alpha[300:400] = 255, 128
    path = tmp_path / "a.png"
    path.write_bytes(imagecodecs.png_encode(np.dstack([image, alpha])))
    with Slide(path) as slide:
        got = slide.read_scaled(0, 0, image.shape[:2], 1.0)
    assert (got[:300] == image[:300]).all()
    assert (got[400:] == 255).all()
    half = image[300:400].astype(float) * 128 / 255 + 255 - 128
    assert np.abs(got[300:400] - half).max() <= 1


def test_it_is_opened_when_read_and_again_after_it_was_released(
    tmp_path: Path, image: Bytes
) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(imagecodecs.png_encode(image))
    source = open_source(path)
    assert isinstance(source, PlainImage)
    first = source.read(3, 4, 0, (10, 10), True)
    assert source.release()
    assert source._pixels is None
    assert (source.read(3, 4, 0, (10, 10), True) == first).all()
    source.close()


@pytest.mark.parametrize("suffix", ["png", "jpg", "tif"])
def test_the_command_cuts_plain_images(
    tmp_path: Path, image: Bytes, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"photo.{suffix}"
    Image.fromarray(image).save(path)
    options = ["--tile-size", "256", "--min-tissue", "0", "--skip-errors"]
    out = tmp_path / "set"
    arguments = [str(path), "--out", str(out), *options, "--mpp", "0.5"]
    assert main(arguments) == 1
    assert "--slide-mpp" in capsys.readouterr().err
    assert main([*arguments, "--slide-mpp", "0.5"]) == 0
    data = ShardDataset(out)
    assert len(data) == 6
    right = np.asarray(Image.open(path).convert("RGB"))
    for number, (tile, _) in enumerate(data):
        sample = data.sample(number)
        wanted = right[sample.y : sample.y + 256, sample.x : sample.x + 256]
        assert (np.asarray(tile) == wanted).all()
