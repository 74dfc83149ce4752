from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import ndimage

from spatialdl.slides.finding.tissue import _median, find_tissue
from spatialdl.slides.reading.reader import Slide, Thumbnail

RANDOM = np.random.default_rng(0)
GLASS, PINK = (244, 243, 245), (200, 120, 170)


def thumbnail(image: np.ndarray) -> Thumbnail:
    noisy = image + RANDOM.normal(0, 2, image.shape)
    pixels = np.clip(noisy, 0, 255).astype(np.uint8)
    return Thumbnail(pixels, np.zeros(image.shape[:2], bool), 16.0)


def plain(colour: tuple[int, int, int], size: tuple[int, int] = (120, 160)) -> np.ndarray:
    return np.full((*size, 3), colour, float)


def test_tissue_is_where_colour_is() -> None:
    image = plain(GLASS)
    image[30:90, 40:120] = PINK
    mask = find_tissue(thumbnail(image)).mask
    assert mask[31:89, 41:119].all()
    assert mask.sum() < 60 * 80 * 1.1


def test_glass_alone_has_no_tissue() -> None:
    for colour in (GLASS, (255, 255, 255), (230, 228, 224)):
        assert not find_tissue(thumbnail(plain(colour))).mask.any()
    whole = Thumbnail(np.full((9, 9, 3), 255, np.uint8), np.zeros((9, 9), bool), 1.0)
    assert not find_tissue(whole).mask.any()


def test_tissue_alone_is_not_split_into_pale_and_dark() -> None:
    image = plain((225, 180, 205))
    image[:, :80] = (120, 40, 130)
    assert find_tissue(thumbnail(image)).mask.mean() > 0.99


def test_black_is_not_tissue() -> None:
    image = plain(GLASS)
    image[:40] = 0
    image[60:100, 40:120] = PINK
    mask = find_tissue(thumbnail(image)).mask
    assert not mask[:40].any()
    assert mask[62:98, 42:118].all()


def test_specks_are_dropped() -> None:
    image = plain(GLASS)
    image[50:53, 50:53] = PINK
    assert not find_tissue(thumbnail(image)).mask.any()


def test_what_is_missing_is_not_looked_at() -> None:
    image = plain(GLASS)
    image[30:90, 40:120] = PINK
    seen = thumbnail(image)
    seen.missing[:60] = True
    seen.image[:60] = (255, 0, 0)
    mask = find_tissue(seen).mask
    assert not mask[:60].any()
    assert mask[62:88, 42:118].all()
    seen.missing[:] = True
    assert not find_tissue(seen).mask.any()


def test_part_of_an_image_that_is_tissue() -> None:
    image = plain(GLASS)
    image[30:90, 40:120] = PINK
    tissue = find_tissue(thumbnail(image))
    assert tissue.part_of(plain(PINK).astype(np.uint8)) == 1
    assert tissue.part_of(plain(GLASS).astype(np.uint8)) == 0


def test_real_slides(real: Path) -> None:
    for name, low, high in [
        ("CMU-1-Small-Region.svs", 0.3, 0.45),
        ("tcga-cr-7395-01a-01-ts1.svs", 0.5, 0.75),
        ("bad/all-white.svs", 0.0, 0.0),
    ]:
        with Slide(real / name) as slide:
            assert low <= find_tissue(slide.thumbnail(16.0)).mask.mean() <= high


def glowing(size: tuple[int, int] = (120, 160), cells: int = 40) -> np.ndarray:
    """Blue cells on a dark ground, a faint tissue around them."""
    image = np.zeros((*size, 3))
    image[20:100, 30:130] = (8, 10, 24)
    rows, cols = np.mgrid[: size[0], : size[1]]
    for row, col in RANDOM.uniform((24, 34), (96, 126), (cells, 2)):
        image[np.hypot(rows - row, cols - col) < 3] = (30, 60, 220)
    return image


def test_fluorescence_is_recognised() -> None:
    found = find_tissue(thumbnail(glowing()))
    assert found.dark
    assert found.mask[24:96, 34:126].mean() > 0.95
    assert found.mask[:18].sum() == 0
    assert found.part_of(np.full((9, 9, 3), 90, np.uint8)) == 1
    assert found.part_of(np.full((9, 9, 3), 3, np.uint8)) == 0
    assert not find_tissue(thumbnail(glowing()), "bright").dark


def test_a_bright_slide_in_a_wide_black_frame_is_not_fluorescence() -> None:
    image = plain((0, 0, 0))
    image[20:100, 40:140] = GLASS
    image[40:80, 60:110] = PINK
    found = find_tissue(thumbnail(image))
    assert not found.dark
    assert found.mask[42:78, 62:108].all()
    assert found.mask.sum() < 40 * 50 * 1.1
    assert find_tissue(thumbnail(image), "dark").mask[:, 42:138][22:98].all()


def test_one_colour_all_over_is_all_or_nothing() -> None:
    for colour, background, part in [
        ((0, 0, 0), "auto", 0),
        ((0, 0, 0), "dark", 0),
        ((255, 255, 255), "auto", 0),
        (PINK, "auto", 1),
        ((120, 40, 130), "auto", 1),
        ((90, 90, 200), "dark", 1),
    ]:
        for image in (plain(colour).astype(np.uint8), thumbnail(plain(colour)).image):
            seen = Thumbnail(image, np.zeros(image.shape[:2], bool), 1.0)
            assert find_tissue(seen, background).mask.mean() == part, (colour, background)


@pytest.mark.parametrize("zoom", [1, 4])
def test_holes_and_specks_are_judged_by_the_tissue_not_by_pixels(zoom: int) -> None:
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


def test_a_ring_around_glass_keeps_its_glass() -> None:
    image = plain(GLASS)
    image[20:100, 20:140] = PINK
    image[40:80, 40:120] = GLASS
    assert not find_tissue(thumbnail(image)).mask[44:76, 44:116].any()


def test_glass_at_the_edge_of_the_slide_is_no_hole() -> None:
    image = plain(PINK, (400, 600))
    image[100:112, :12] = GLASS
    image[100:112, 300:312] = GLASS
    mask = find_tissue(thumbnail(image)).mask
    assert not mask[103:109, :9].any()
    assert mask[100:112, 300:312].all()


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (2, 3), (40, 50)])
def test_the_median_is_the_median(size: tuple[int, int]) -> None:
    band = RANDOM.integers(0, 256, size, np.uint8)
    assert (_median(band) == ndimage.median_filter(band, 3, mode="nearest")).all()
