"""Drawn slides: the same for a seed, of tissue that has kinds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openslide
import pytest
from scipy import ndimage

from spatialdl.slides.reading.reader import Slide
from spatialdl.slides.synthetic.drawing import (
    APART,
    KINDS,
    Crescents,
    write_synthetic_slide,
)


def pixels(path: Path) -> np.ndarray:
    with Slide(path) as slide:
        return slide.read_scaled(0, 0, slide.size, 1.0)


def test_openslide_reads_levels_and_resolution(synthetic):
    for path in synthetic.values():
        with openslide.OpenSlide(path) as slide:
            assert slide.level_dimensions == ((2304, 1600), (1152, 800), (576, 400), (288, 200))
            assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(0.5)
            assert float(slide.properties["openslide.mpp-y"]) == pytest.approx(0.5)
            assert slide.properties["openslide.level[0].tile-width"] == "256"


def test_a_slide_follows_from_its_seed_and_blocks_meet_without_a_seam(tmp_path, monkeypatch):
    for kind in KINDS:
        for name, seed in (("a", 3), ("b", 3), ("c", 4)):
            write_synthetic_slide(tmp_path / name, kind, size=(600, 500), seed=seed)
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
        assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr("spatialdl.slides.synthetic.drawing._BLOCK", (256, 512))
            write_synthetic_slide(tmp_path / "b", kind, size=(600, 500), seed=3)
        # sums of waves are rounded differently in blocks of another size
        one, other = (pixels(tmp_path / name).astype(int) for name in "ab")
        assert np.abs(one - other).mean() < 0.05


def test_kinds_have_the_same_colours_and_other_structures(synthetic):
    means, spreads = [], []
    for path in synthetic.values():
        image = pixels(path)
        glass = (image.min(-1) > 235) & (np.ptp(image, axis=-1) < 8)
        assert 0.25 < glass.mean() < 0.5  # lumens are a little pink
        assert glass[0].all()
        tissue = image[image[..., 1] < 215].astype(float)
        means.append(tissue.mean(0))
        spreads.append(tissue.std(0))
    np.testing.assert_allclose(*means, atol=6)
    np.testing.assert_allclose(*spreads, atol=6)
    assert 80 < longest_lumen(synthetic["ring"]) < 220
    assert longest_lumen(synthetic["strand"]) > 350


def longest_lumen(path: Path) -> float:
    """How far a pale opening in the tissue reaches from its middle, at most, in pixels."""
    image = ndimage.uniform_filter(pixels(path)[::4, ::4].astype(float), (3, 3, 1))
    pale = (image.min(-1) > 215) & (np.ptp(image, axis=-1) > 6)
    pieces, count = ndimage.label(ndimage.binary_opening(pale, iterations=2))
    reach = 0.0
    for number in range(1, count + 1):
        rows, cols = np.nonzero(pieces == number)
        reach = max(reach, np.hypot(rows - rows.mean(), cols - cols.mean()).max() * 4)
    return reach


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"kind": "cube"}, "expected one of ring, strand"),
        ({"kind": "ring", "size": (0, 5)}, "must be positive"),
        ({"kind": "ring", "mpp": 0.0}, "must be positive"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, arguments, says):
    with pytest.raises(ValueError, match=says):
        write_synthetic_slide(tmp_path / "a.tiff", **arguments)
    assert list(tmp_path.iterdir()) == []


SIDE = 2048
AXIS = np.arange(2.0, SIDE, 4.0)


def crescents(seed: int, facing: bool) -> list[tuple[float, float, float]]:
    """Row and column of the middle of each, and how far its mass lies to the right of that."""
    inside = Crescents(np.random.default_rng(seed), (SIDE, SIDE), facing)(AXIS, AXIS)
    labels, count = ndimage.label(inside)
    found = []
    for part in ndimage.find_objects(labels):
        rows, cols = part
        here = labels[part] > 0
        mass = float((here.sum(0) * np.arange(here.shape[1])).sum() / here.sum())
        middle = (here.shape[1] - 1) / 2
        found.append((rows.start * 4.0, cols.start * 4.0, mass - middle))
    assert count == len(found)
    return found


def test_pairs_face_each_other_or_look_away():
    for seed in range(5):
        for facing in (True, False):
            found = crescents(seed, facing)
            for _, col, lean in found:
                on_the_left = col < (SIDE - APART) / 2 + 260
                opens_right = lean < 0  # its mass is where it is closed
                assert opens_right == (on_the_left == facing)
            # as many open to either side
            assert (len(found), sum(lean < 0 for _, _, lean in found)) == (8, 4)
