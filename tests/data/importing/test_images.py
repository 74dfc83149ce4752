from __future__ import annotations

from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import tifffile
from PIL import Image

from spatialdl.data.importing.images import (
    BrokenImageError,
    class_names,
    find_images,
    image_size,
    load_image,
)

RANDOM = np.random.default_rng(0)
COLOURS = RANDOM.integers(0, 256, (20, 30, 4), np.uint8)


def put(path: Path, pixels: np.ndarray | None = None, **more: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(COLOURS[..., :3] if pixels is None else pixels).save(path, **more)
    return path


def test_classes_are_folders(tmp_path: Path) -> None:
    for name in ("b/2.png", "b/1.JPG", "a/deep/er/3.tif", "b/.hidden.png"):
        put(tmp_path / name)
    (tmp_path / "b" / "notes.txt").write_text("x")
    (tmp_path / "b" / "patches.h5").write_text("x")
    (tmp_path / "readme.md").write_text("x")
    images = find_images(tmp_path)
    assert [(image.name, image.label, image.split) for image in images] == [
        ("a/deep/er/3.tif", "a", None),
        ("b/1.JPG", "b", None),
        ("b/2.png", "b", None),
    ]
    assert class_names(images) == ["a", "b"]


def test_splits_lie_above_classes(tmp_path: Path) -> None:
    for name in ("Train/x/1.png", "valid/y/1.png", "test/x/2.png"):
        put(tmp_path / name)
    images = find_images(tmp_path)
    assert {(image.split, image.label) for image in images} == {
        ("train", "x"),
        ("val", "y"),
        ("test", "x"),
    }


def test_images_need_no_classes(tmp_path: Path) -> None:
    put(tmp_path / "1.png")
    assert [(image.name, image.label) for image in find_images(tmp_path)] == [("1.png", None)]
    put(tmp_path / "a" / "2.png")
    with pytest.raises(ValueError, match=r"1\.png lies beside folders; move it"):
        find_images(tmp_path)


def test_folders_without_images_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match="contains no images"):
        find_images(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        find_images(tmp_path / "none")


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_bytes_stay_as_they_are(tmp_path: Path, channels: int) -> None:
    pixels = COLOURS[..., :channels].squeeze()
    path = put(tmp_path / "a.png", pixels)
    assert (load_image(path) == COLOURS[..., :channels]).all()
    assert image_size(path) == (20, 30)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(20, 30), (20, 30, 3), (20, 30, 5)])
@pytest.mark.parametrize("planar", [False, True])
def test_tiff_stays_as_it_is(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], planar: bool
) -> None:
    pixels = (RANDOM.random(shape) * 1000).astype(dtype)
    path = tmp_path / "a.tif"
    given = np.moveaxis(pixels, -1, 0) if planar and len(shape) == 3 else pixels
    config = {"planarconfig": "separate" if planar else "contig"} if len(shape) == 3 else {}
    kind = "rgb" if shape[2:] == (3,) else "minisblack"
    tifffile.imwrite(path, given, photometric=kind, compression="zlib", **config)
    found = load_image(path)
    assert found.dtype == dtype
    assert (found == pixels.reshape(20, 30, -1)).all()
    assert image_size(path) == (20, 30)


def test_words_of_png_stay_words(tmp_path: Path) -> None:
    for shape in ((20, 30), (20, 30, 3)):
        pixels = RANDOM.integers(0, 2**16, shape, np.uint16)
        (tmp_path / "a.png").write_bytes(imagecodecs.png_encode(pixels))
        found = load_image(tmp_path / "a.png")
        assert found.dtype == np.uint16
        assert (found == pixels.reshape(20, 30, -1)).all()
        rgb = load_image(tmp_path / "a.png", rgb=True)
        assert (rgb == np.broadcast_to(pixels.reshape(20, 30, -1) >> 8, (20, 30, 3))).all()


def test_what_is_no_colour_becomes_one(tmp_path: Path) -> None:
    image = Image.fromarray(COLOURS[..., :3])
    for name, made in [
        ("palette.png", image.quantize(16)),
        ("bits.png", image.convert("1")),
        ("cmyk.tif", image.convert("CMYK")),
    ]:
        made.save(tmp_path / name)
    assert load_image(tmp_path / "palette.png").shape == (20, 30, 3)
    assert set(np.unique(load_image(tmp_path / "bits.png"))) == {0, 255}
    assert load_image(tmp_path / "bits.png").shape == (20, 30, 1)
    assert load_image(tmp_path / "bits.png", rgb=True).shape == (20, 30, 3)
    assert load_image(tmp_path / "cmyk.tif").shape == (20, 30, 3)


def test_images_are_turned_as_their_camera_says(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = 6
    path = put(tmp_path / "a.png", exif=exif)
    assert image_size(path) == (30, 20)
    assert (load_image(path) == np.rot90(COLOURS[..., :3], -1)).all()


def cut(path: Path, part: float) -> Path:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    return path


def test_broken_images_are_named(tmp_path: Path) -> None:
    for suffix in ("png", "jpg", "tif", "bmp", "webp"):
        path = cut(put(tmp_path / f"a.{suffix}"), 0.6)
        with pytest.raises(BrokenImageError, match=rf"a\.{suffix}: ."):
            load_image(path)
    empty = tmp_path / "empty.png"
    empty.touch()
    for path in (empty, tmp_path / "none.tif", cut(put(tmp_path / "b.tif"), 0.01)):
        for call in (load_image, image_size):
            with pytest.raises(BrokenImageError, match=rf"{path.name}: ."):
                call(path)


def test_what_cannot_be_an_image_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.zeros((4, 20, 30), np.uint8), photometric="minisblack")
    with pytest.raises(BrokenImageError, match="it has several pages"):
        load_image(path)
    tifffile.imwrite(path, np.zeros((20, 30), np.int32))
    with pytest.raises(BrokenImageError, match="image has type int32, expected one of"):
        load_image(path)
    tifffile.imwrite(path, np.zeros((20, 30), np.float32))
    with pytest.raises(BrokenImageError, match="1 channels of float32, expected colours"):
        load_image(path, rgb=True)
