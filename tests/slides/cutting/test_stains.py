from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import nnls

from spatialdl.errors import SlideError
from spatialdl.slides.cutting.stains import (
    METHODS,
    LabColours,
    Method,
    StainColours,
    colours_of,
    concentrations,
    recoloured,
)

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


@pytest.mark.parametrize("method", ["macenko", "vahadane"])
@pytest.mark.parametrize("stains", [TRUE, OTHER])
def test_known_mixtures_are_taken_apart(method: Method, stains: np.ndarray) -> None:
    found = colours_of(image(1.0, stains).reshape(-1, 3), method)
    assert isinstance(found, StainColours)
    cosines = (found.stains * stains).sum(1)
    assert np.degrees(np.arccos(np.minimum(cosines, 1))).max() < 3.5
    apart = concentrations(-np.log(light(amounts(1), stains) / 255), found.stains)
    assert np.corrcoef(apart[:, 0], amounts(1)[:, 0])[0, 1] > 0.98
    assert np.corrcoef(apart[:, 1], amounts(1)[:, 1])[0, 1] > 0.98


@pytest.mark.parametrize("method", METHODS)
def test_the_reference_stays_as_it_is(method: Method) -> None:
    own = colours_of(image().reshape(-1, 3), method)
    difference = np.abs(recoloured(image(), own, own).astype(int) - image())
    assert difference.mean() < 1.5
    assert np.quantile(difference, 0.99) <= 10


@pytest.mark.parametrize("method", METHODS)
def test_a_slide_gets_the_colours_of_the_reference(method: Method) -> None:
    pale, strong = image(0.35, OTHER), image(0.7, TRUE)
    own, reference = (colours_of(k.reshape(-1, 3), method) for k in (pale, strong))
    moved = recoloured(pale, own, reference)
    before = np.abs(pale.astype(int) - strong).mean()
    after = np.abs(moved.astype(int) - strong).mean()
    # the same amounts of stain at every place; Reinhard does not know of stains
    assert after < (0.6 if method == "reinhard" else 0.35) * before
    if method != "reinhard":
        again = colours_of(moved.reshape(-1, 3), method)
        assert isinstance(again, StainColours)
        assert isinstance(reference, StainColours)
        assert np.abs(again.stains - reference.stains).max() < 0.05
        assert again.strength == pytest.approx(reference.strength, rel=0.1)


@pytest.mark.parametrize("method", METHODS)
def test_glass_stays_white(method: Method) -> None:
    own = colours_of(image(0.35, OTHER).reshape(-1, 3), method)
    reference = colours_of(image(0.7).reshape(-1, 3), method)
    white = np.full((3, 5, 3), 255, np.uint8)
    assert (recoloured(white, own, reference) == 255).all()
    glass = np.full((3, 5, 3), 245, np.uint8)
    assert np.abs(recoloured(glass, own, reference).astype(int) - 245).max() <= 12


def test_reinhard_moves_mean_and_spread() -> None:
    random = np.random.default_rng(1)
    slides = [
        np.clip(random.normal(mean, spread, (80, 90, 3)), 0, 255).astype(np.uint8)
        for mean, spread in [((150, 90, 160), 12), ((120, 80, 120), 8)]
    ]
    own, reference = (colours_of(k.reshape(-1, 3), "reinhard") for k in slides)
    again = colours_of(recoloured(slides[0], own, reference).reshape(-1, 3), "reinhard")
    assert isinstance(again, LabColours)
    assert isinstance(reference, LabColours)
    assert again.mean == pytest.approx(reference.mean, abs=0.3)
    assert again.spread == pytest.approx(reference.spread, rel=0.05)


def test_concentrations_are_the_best_that_are_not_negative() -> None:
    density = np.random.default_rng(2).normal(0.2, 0.5, (300, 3))
    found = concentrations(density, TRUE)
    expected = np.array([nnls(TRUE.T, row)[0] for row in density])
    assert found == pytest.approx(expected, abs=1e-9)
    sparse = concentrations(density, TRUE, 0.1)

    def cost(amount: np.ndarray) -> np.ndarray:
        return ((density - amount @ TRUE) ** 2).sum(1) / 2 + 0.1 * amount.sum(1)

    for change in ([0.01, 0], [0, 0.01], [-0.01, 0], [0, -0.01], [0.01, -0.01], [-0.01, 0.01]):
        assert (cost(sparse) <= cost(np.maximum(sparse + change, 0)) + 1e-12).all()


@pytest.mark.parametrize("method", METHODS)
def test_too_little_tissue_is_refused(method: Method) -> None:
    pixels = np.full((5000, 3), 250, np.uint8)
    pixels[:99] = (150, 60, 140)
    with pytest.raises(SlideError, match="99 of 5000 sampled pixels are stained, too few"):
        colours_of(pixels, method)
    with pytest.raises(SlideError, match="0 of 0 sampled pixels"):
        colours_of(pixels[:0], method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("colour", [(150, 60, 140), (90, 90, 90), (0, 0, 0)])
def test_one_colour_alone_gives_numbers(method: Method, colour: tuple[int, int, int]) -> None:
    own = colours_of(np.full((500, 3), colour, np.uint8), method)
    assert all(np.isfinite(value).all() for value in vars(own).values())
    with np.errstate(all="raise"):
        recoloured(np.full((9, 9, 3), colour, np.uint8), own, own)


def test_two_kinds_of_colours_do_not_mix() -> None:
    pixels = image().reshape(-1, 3)
    with pytest.raises(TypeError, match="cannot convert colours"):
        recoloured(image(), colours_of(pixels, "macenko"), colours_of(pixels, "reinhard"))
