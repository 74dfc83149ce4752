from __future__ import annotations

from pathlib import Path

import numpy as np

from spatialdl.slides.reader import Slide, Thumbnail
from spatialdl.slides.tissue import find_tissue

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
