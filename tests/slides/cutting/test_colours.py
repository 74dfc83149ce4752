"""What tiles look like: filters that refuse them, stains that are normalised."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage
from scipy.optimize import nnls

from spatialdl.errors import SlideError
from spatialdl.slides.cutting.filters import (
    FILTERS,
    blur,
    parse_filters,
    refused_by,
)
from spatialdl.slides.cutting.stains import (
    METHODS,
    StainColours,
    colours_of,
    concentrations,
    recoloured,
    reference_colours,
    sampled,
)
from spatialdl.slides.cutting.tiling import cut_tiles, plan_tiles
from spatialdl.slides.reading.reader import Slide

ALL = {name: most for name, (_, most) in FILTERS.items()}
PINK, GLASS, VIOLET, BROWN = (200, 120, 170), (244, 243, 245), (90, 60, 140), (120, 80, 50)
INKS = ((30, 60, 180), (60, 90, 200), (20, 120, 60), (0, 160, 150), (40, 40, 45), (20, 4, 10))
NO_INKS = (PINK, GLASS, VIOLET, BROWN, (140, 150, 190), (170, 20, 30))


def plain(colour: tuple[int, int, int]) -> np.ndarray:
    return np.full((64, 64, 3), colour, np.uint8)


def tissue(side: int = 64) -> np.ndarray:
    """Sharp dots of nuclei in pink."""
    dots = np.random.default_rng(0).random((side, side, 1)) < 0.1
    dots = ndimage.binary_dilation(dots, np.ones((2, 2, 1)))
    return np.where(dots, VIOLET, PINK).astype(np.uint8)


def half(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.concatenate([one[:32], other[32:]])


def test_blur_is_that_of_the_focus_not_of_the_contrast():
    sharp = tissue(200)
    soft = ndimage.gaussian_filter(sharp.astype(float), (5, 5, 0)).astype(np.uint8)
    pale = (200 + sharp * 0.2).astype(np.uint8)
    assert blur(sharp) < blur(pale) + 0.01 < 0.4
    assert blur(soft) > 0.6
    assert blur(plain(PINK)) == blur(sharp[:2, :2]) == 1


def test_the_filter_that_refuses_is_named():
    black = plain((0, 0, 0))
    for tile, filters, name in [
        (tissue(), ALL, None),
        (plain(PINK), ALL, "blur"),
        (plain(GLASS), ALL, "white"),
        (half(plain((220, 255, 230)), plain((219, 255, 255))), {"white": 0.5}, None),
        (black, ALL, "black"),
        (black, {}, None),
        (half(plain((0, 20, 25)), plain((0, 0, 26))), {"black": 0.5}, None),
        (half(black, tissue()), {"black": 0.4}, "black"),
        # ink is told from stains
        *((plain(colour), {"pen": 0.9}, "pen") for colour in INKS),
        *((half(plain(colour), tissue()), {"pen": 0.6}, None) for colour in INKS),
        *((plain(colour), {"pen": 0.0}, None) for colour in NO_INKS),
    ]:
        assert refused_by(tile, filters) == name


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("blur", {"blur": FILTERS["blur"].most}),
        (" pen = 0.2, white,black=1", {"pen": 0.2, "white": 0.9, "black": 1}),
        ("blur,", "unknown filter '', expected one of black, white, pen, blur"),
        ("pen,blur,pen=1", "filter pen is repeated"),
        ("pen=nan", "filter pen has 'nan', expected a number between 0 and 1"),
    ],
)
def test_filters_are_read(text, found):
    if isinstance(found, dict):
        assert parse_filters(text) == found
    else:
        with pytest.raises(ValueError, match=found):
            parse_filters(text)


def test_good_tiles_of_real_slides_pass(real):
    for name, mpp in [("CMU-1-Small-Region.svs", None), ("tcga-cr-7395-01a-01-ts1.svs", 0.25)]:
        with Slide(real / name, mpp) as slide:
            plan = plan_tiles(slide, 256, 0.5)
            some = replace(plan, places=plan.places[::16], labels=plan.labels[::16])
            for tile in cut_tiles(slide, some):
                assert tile.image is not None
                assert refused_by(tile.image, ALL) is None
                smooth = ndimage.gaussian_filter(tile.image, (4, 4, 0))
                assert refused_by(smooth, ALL) == "blur"


def never(image: np.ndarray) -> bool:
    return False


def test_the_sample_is_spread_over_the_tiles(halves, real):
    with Slide(halves["ring"]) as slide:
        plan = plan_tiles(slide, 128, 0.5)
        pixels = sampled(slide, plan, never)
        assert 24 * 3000 < len(pixels) < 24 * 5500
        assert (pixels == sampled(slide, plan, never)).all()
        asked: list[int] = []
        assert len(sampled(slide, plan, lambda image: asked.append(1) or True)) == 0
        assert len(asked) == len(plan.places)
        few = replace(plan, places=plan.places[:3], labels=plan.labels[:3])
        assert len(sampled(slide, few, never)) == len(pixels) // 8
    with Slide(real / "bad" / "corrupt-some-tiles.svs") as slide:  # damaged tiles are left out
        pixels = sampled(slide, plan_tiles(slide, 256, 0.5), never)
    assert 3 * 3800 < len(pixels) < 20 * 3900


def test_a_reference_that_is_none_is_refused(tmp_path):
    (tmp_path / "text.png").write_text("hello")
    Image.new("RGB", (50, 50), "white").save(tmp_path / "white.png")
    for name, says in [
        ("none.png", "cannot read stain reference .*none.png"),
        ("text.png", "cannot read stain reference .*text.png: cannot identify"),
        ("white.png", "stain reference .*white.png cannot be used: 0 of 2500 sampled pixels"),
    ]:
        with pytest.raises(ValueError, match=says):
            reference_colours("macenko", tmp_path / name)


# hematoxylin and eosin of A. Ruifrok, "Quantification of histochemical staining", 2001
TRUE = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11]])
TRUE /= np.linalg.norm(TRUE, axis=1, keepdims=True)
OTHER = np.array([[0.55, 0.76, 0.35], [0.15, 0.90, 0.40]])
OTHER /= np.linalg.norm(OTHER, axis=1, keepdims=True)


def amounts(strength: float = 0.5) -> np.ndarray:
    """Nuclei, cytoplasm, both and glass."""
    random = np.random.default_rng(0)
    present = random.random((20_000, 2)) < [0.5, 0.7]
    return strength * random.gamma(3, 1 / 3, (20_000, 2)) * present


def light(amount: np.ndarray, stains: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(255 * np.exp(-amount @ stains)), 0, 255).astype(np.uint8)


def image(strength: float = 0.5, stains: np.ndarray = TRUE) -> np.ndarray:
    return light(amounts(strength), stains).reshape(100, 200, 3)


@pytest.mark.parametrize(("method", "stains"), [("macenko", TRUE), ("vahadane", OTHER)])
def test_known_mixtures_are_taken_apart(method, stains):
    pixels = np.append(image(1.0, stains).reshape(-1, 3), INKS, 0).astype(np.uint8)
    found = colours_of(pixels, method)
    assert isinstance(found, StainColours)
    cosines = (found.stains * stains).sum(1)
    assert np.degrees(np.arccos(np.minimum(cosines, 1))).max() < 3.5
    apart = concentrations(-np.log(light(amounts(1), stains) / 255), found.stains)
    for stain in (0, 1):
        assert np.corrcoef(apart[:, stain], amounts(1)[:, stain])[0, 1] > 0.98


@pytest.mark.parametrize("method", METHODS)
def test_a_slide_gets_the_colours_of_the_reference(method):
    pale, strong = image(0.35, OTHER), image(0.7, TRUE)
    own, reference = (colours_of(k.reshape(-1, 3), method) for k in (pale, strong))
    moved = recoloured(pale, own, reference)
    before = np.abs(pale.astype(int) - strong).mean()
    after = np.abs(moved.astype(int) - strong).mean()
    # the same amounts of stain at every place; Reinhard does not know of stains
    assert after < (0.6 if method == "reinhard" else 0.35) * before
    again = colours_of(moved.reshape(-1, 3), method)
    if isinstance(again, StainColours):
        assert np.abs(again.stains - reference.stains).max() < 0.05
        assert again.strength == pytest.approx(reference.strength, rel=0.1)
    # glass stays white, and the reference as it is
    white = np.full((3, 5, 3), 255, np.uint8)
    assert (recoloured(white, own, reference) == 255).all()
    difference = np.abs(recoloured(strong, reference, reference).astype(int) - strong)
    assert difference.mean() < 1.5
    assert np.quantile(difference, 0.99) <= 10


def test_reinhard_moves_mean_and_spread():
    random = np.random.default_rng(1)
    slides = [
        np.clip(random.normal(mean, spread, (80, 90, 3)), 0, 255).astype(np.uint8)
        for mean, spread in [((150, 90, 160), 12), ((120, 80, 120), 8)]
    ]
    own, reference = (colours_of(k.reshape(-1, 3), "reinhard") for k in slides)
    again = colours_of(recoloured(slides[0], own, reference).reshape(-1, 3), "reinhard")
    assert again.mean == pytest.approx(reference.mean, abs=0.3)
    assert again.spread == pytest.approx(reference.spread, rel=0.05)


def test_concentrations_are_the_best_that_are_not_negative():
    density = np.random.default_rng(2).normal(0.2, 0.5, (300, 3))
    expected = np.array([nnls(TRUE.T, row)[0] for row in density])
    assert concentrations(density, TRUE) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_too_little_tissue_is_refused_and_one_colour_alone_gives_numbers(method):
    pixels = np.full((5000, 3), 250, np.uint8)
    pixels[:99] = (150, 60, 140)
    for given, says in ((pixels, "99 of 5000 sampled pixels are stained"), (pixels[:0], "0 of 0")):
        with pytest.raises(SlideError, match=says):
            colours_of(given, method)
    for colour in ((150, 60, 140), (90, 90, 90), (0, 0, 0)):
        own = colours_of(np.full((500, 3), colour, np.uint8), method)
        assert all(np.isfinite(value).all() for value in vars(own).values())
        with np.errstate(all="raise"):
            recoloured(np.full((9, 9, 3), colour, np.uint8), own, own)
    other = colours_of(image().reshape(-1, 3), "macenko" if method == "reinhard" else "reinhard")
    with pytest.raises(TypeError, match="cannot convert colours"):
        recoloured(image(), own, other)
