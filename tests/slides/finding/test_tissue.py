"""Where tissue is: found, or drawn in a mask."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import tifffile
from PIL import Image

from spatialdl.errors import SlideError
from spatialdl.slides.finding import tissue as tissue_module
from spatialdl.slides.finding.tissue import Mask, find_tissue, read_mask
from spatialdl.slides.reading.reader import Slide, Thumbnail

RANDOM = np.random.default_rng(0)
GLASS, PINK = (244, 243, 245), (200, 120, 170)


def thumbnail(image: np.ndarray) -> Thumbnail:
    noisy = image + RANDOM.normal(0, 2, image.shape)
    pixels = np.clip(noisy, 0, 255).astype(np.uint8)
    return Thumbnail(pixels, np.zeros(image.shape[:2], bool), 16.0)


def plain(colour: tuple[int, int, int], size: tuple[int, int] = (120, 160)) -> np.ndarray:
    return np.full((*size, 3), colour, float)


def test_tissue_is_where_colour_is():
    image = plain(GLASS)
    image[30:90, 40:120] = PINK
    image[50:53, 5:8] = PINK  # specks are dropped
    tissue = find_tissue(thumbnail(image))
    assert tissue.mask[31:89, 41:119].all()
    assert tissue.mask.sum() < 60 * 80 * 1.1
    assert not tissue.mask[:, :20].any()
    assert tissue.part_of(plain(PINK).astype(np.uint8)) == 1
    assert tissue.part_of(plain(GLASS).astype(np.uint8)) == 0
    # what is missing is not looked at
    seen = thumbnail(image)
    seen.missing[:60] = True
    seen.image[:60] = (255, 0, 0)
    mask = find_tissue(seen).mask
    assert not mask[:60].any()
    assert mask[62:88, 42:118].all()
    seen.missing[:] = True
    assert not find_tissue(seen).mask.any()


def test_tissue_alone_is_not_split_into_pale_and_dark():
    image = plain((225, 180, 205))
    image[:, :80] = (120, 40, 130)
    assert find_tissue(thumbnail(image)).mask.mean() > 0.99


def test_fluorescence_is_recognised():
    image = np.zeros((120, 160, 3))  # blue cells on a dark ground, a faint tissue around them
    image[20:100, 30:130] = (8, 10, 24)
    rows, cols = np.mgrid[:120, :160]
    for row, col in RANDOM.uniform((24, 34), (96, 126), (40, 2)):
        image[np.hypot(rows - row, cols - col) < 3] = (30, 60, 220)
    found = find_tissue(thumbnail(image))
    assert found.dark
    assert found.mask[24:96, 34:126].mean() > 0.95
    assert found.mask[:18].sum() == 0
    assert found.part_of(np.full((9, 9, 3), 90, np.uint8)) == 1
    assert found.part_of(np.full((9, 9, 3), 3, np.uint8)) == 0
    assert not find_tissue(thumbnail(image), "bright").dark


def test_a_bright_slide_in_a_wide_black_frame_is_not_fluorescence():
    image = plain((0, 0, 0))
    image[20:100, 40:140] = GLASS
    image[40:80, 60:110] = PINK
    found = find_tissue(thumbnail(image))
    assert not found.dark
    assert found.mask[42:78, 62:108].all()
    assert found.mask.sum() < 40 * 50 * 1.1
    assert find_tissue(thumbnail(image), "dark").mask[:, 42:138][22:98].all()


@pytest.mark.parametrize(
    ("colour", "background", "part"),
    [
        *(((0, 0, 0), "auto", 0), ((255, 255, 255), "auto", 0), (PINK, "auto", 1)),
        *(((230, 228, 224), "auto", 0), ((90, 90, 200), "dark", 1)),
    ],
)
def test_one_colour_all_over_is_all_or_nothing(colour, background, part):
    for image in (plain(colour).astype(np.uint8), thumbnail(plain(colour)).image):
        seen = Thumbnail(image, np.zeros(image.shape[:2], bool), 1.0)
        assert find_tissue(seen, background).mask.mean() == part


@pytest.mark.parametrize("zoom", [1, 2])
def test_holes_and_specks_are_judged_by_the_tissue_not_by_pixels(zoom):
    image = plain(GLASS, (400, 600))
    image[50:350, 100:400] = PINK
    image[100:112, 150:162] = GLASS  # 0.16 % of the tissue: filled
    image[200:220, 200:220] = GLASS  # 0.4 %: left open
    image[100:106, 500:506] = PINK  # 0.04 %: dropped
    image[200:220, 500:520] = PINK  # 0.4 %: kept
    large = image.repeat(zoom, 0).repeat(zoom, 1)
    mask = find_tissue(thumbnail(large)).mask[::zoom, ::zoom]
    assert mask[100:112, 150:162].all()
    assert not mask[204:216, 204:216].any()
    assert not mask[95:110, 495:510].any()
    assert mask[202:218, 502:518].all()


def test_glass_at_the_edge_of_the_slide_is_no_hole():
    image = plain(PINK, (400, 600))
    image[100:112, :12] = GLASS
    image[100:112, 300:312] = GLASS
    mask = find_tissue(thumbnail(image)).mask
    assert not mask[103:109, :9].any()
    assert mask[100:112, 300:312].all()


SLIDE = cast(Slide, SimpleNamespace(path=Path("a.svs"), size=(1000, 2000)))
SEEN = Thumbnail(np.zeros((50, 100, 3), np.uint8), np.ones((50, 100), bool), 20.0)


def read(path: Path) -> Mask:
    tissue = read_mask(path, SLIDE, SEEN)
    assert not tissue.unknown.any()
    return tissue.mask


def drawn(size: tuple[int, int] = (50, 100)) -> np.ndarray:
    """The left half of a slide is tissue."""
    mask = np.zeros(size, np.uint8)
    mask[:, : size[1] // 2] = 1
    return mask


@pytest.mark.parametrize("size", [(333, 667), (2, 4)])
def test_a_mask_of_any_size(tmp_path, size):
    Image.fromarray(drawn(size)).save(tmp_path / "a.png")
    mask = read(tmp_path / "a.png")
    assert mask.shape == (50, 100)
    assert mask[:, :49].all()
    assert not mask[:, 51:].any()
    # a pixel is tissue from a half
    fine = drawn((100, 200))
    fine[:2, :2] = ((0, 1), (0, 0))
    fine[98:, 198:] = ((1, 0), (0, 1))
    Image.fromarray(fine).save(tmp_path / "a.png")
    mask = read(tmp_path / "a.png")
    assert not mask[0, 0]
    assert mask[-1, -1]


def test_a_thumbnail_that_ends_beyond_the_slide_is_not_drawn_together(tmp_path):
    slide = cast(Slide, SimpleNamespace(path=Path("a.svs"), size=(989, 1990)))
    fine = np.zeros((989, 1990), np.uint8)
    fine[:, 1968:] = 1  # 12 columns of the last pixel but one
    fine[971:] = 1  # less than a half of the last row but one
    Image.fromarray(fine).save(tmp_path / "a.png")
    mask = read_mask(tmp_path / "a.png", slide, SEEN).mask
    assert mask[:, 98:].all()
    assert not mask[:49, :98].any()
    assert mask[49].all()


def test_all_ways_to_store_a_mask(tmp_path):
    mask = drawn()
    colour = np.zeros((50, 100, 3), np.uint8)
    colour[..., 2] = mask
    alpha = np.full((50, 100, 4), 255, np.uint8)
    alpha[..., 3] = mask * 255
    palette = Image.fromarray(1 - mask).convert("P")
    palette.putpalette([0, 200, 0, 0, 0, 0])  # number 0 is green
    for image in (
        *(Image.fromarray(mask * 255), Image.fromarray(mask.astype(bool)), palette),
        *(Image.fromarray(colour), Image.fromarray(alpha), Image.fromarray(mask.astype(np.uint16))),
        *(Image.fromarray(np.stack([mask * 9, mask * 0 + 255], -1), "LA"),),
    ):
        image.save(tmp_path / "a.png")
        assert (read(tmp_path / "a.png") == (mask > 0)).all(), image.mode
    for values in (mask * np.float32(0.5), mask.astype(bool), mask * np.int32(0), colour):
        tifffile.imwrite(tmp_path / "a.tif", values)
        assert (read(tmp_path / "a.tif") == (values != 0).reshape(50, 100, -1).any(-1)).all()


def test_of_a_pyramid_the_level_that_is_fine_enough(tmp_path):
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as file:
        file.write(drawn((400, 800)), subifds=2, tile=(16, 16))
        file.write(drawn((100, 200)), subfiletype=1, tile=(16, 16))
        file.write(np.ones((25, 50), np.uint8), subfiletype=1, tile=(16, 16))
    assert (read(path) == (drawn() > 0)).all()


def test_what_is_no_mask_of_the_slide_is_refused(tmp_path, monkeypatch):
    for name, size in (("whole.png", (50, 100)), ("a.png", (100, 200)), ("a.tif", (100, 200))):
        Image.fromarray(drawn(size)).save(tmp_path / name)
    whole = (tmp_path / "whole.png").read_bytes()
    tifffile.imwrite(tmp_path / "deep.tif", np.zeros((7, 50, 100, 5), np.uint8))
    bad = {"empty.png": b"", "text.tif": b"hello", "cut.png": whole[:60], "named.tif": whole}
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    for name in (*bad, "deep.tif"):
        with pytest.raises(SlideError, match=f"cannot read mask .*{name} of slide a.svs: "):
            read(tmp_path / name)
    for size in [(100, 50), (50, 110), (8, 8)]:  # of another shape
        Image.fromarray(drawn(size)).save(tmp_path / "other.png")
        with pytest.raises(SlideError, match=f"has {size[0]} x {size[1]} pixels, but slide a.svs"):
            read(tmp_path / "other.png")
    # too large to read
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 9_000)
    monkeypatch.setattr(tissue_module, "_MOST_PIXELS", 9_000)
    for name, says in (
        ("a.png", r"a.png of slide a.svs has too many pixels \(.*20000"),
        ("a.tif", r"a.tif .* level has \(100, 200\) pixels, too many to read; make it"),
    ):
        with pytest.raises(SlideError, match=says):
            read(tmp_path / name)
