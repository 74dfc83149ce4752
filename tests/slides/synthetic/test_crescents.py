from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy import ndimage

from spatialdl.slides.reading.reader import Slide
from spatialdl.slides.synthetic.crescents import APART, Crescents
from spatialdl.slides.synthetic.drawing import ARRANGEMENTS, write_synthetic_slide

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
    for seed in range(20):
        for facing in (True, False):
            for _, col, lean in crescents(seed, facing):
                on_the_left = col < (SIDE - APART) / 2 + 260
                opens_right = lean < 0  # its mass is where it is closed
                assert opens_right == (on_the_left == facing)


def test_as_many_open_to_either_side():
    for facing in (True, False):
        leans = [lean for _, _, lean in crescents(0, facing)]
        assert len(leans) == 8
        assert sum(lean < 0 for lean in leans) == 4


def test_small_windows_look_alike(tmp_path: Path):
    """Colours, and where in a window of 256 pixels crescents of either side stand."""
    means = []
    for kind in ARRANGEMENTS:
        write_synthetic_slide(tmp_path / "slide.tif", kind, (SIDE, SIDE), seed=5)
        with Slide(tmp_path / "slide.tif") as slide:
            image = slide.read_scaled(0, 0, slide.size, 1.0).astype(float)
        means.append(image.mean((0, 1)))
        assert (image[:64].min(-1) < 235).mean() > 0.9  # no border tells where a window lies
    assert np.abs(means[0] - means[1]).max() < 1.5

    places: dict[tuple[bool, bool], list[float]] = {}
    for seed in range(150):
        for facing in (True, False):
            for _, col, lean in crescents(seed, facing):
                places.setdefault((facing, lean < 0), []).append((col + 52) % 256)
    for opens_right in (True, False):
        shares = [
            np.histogram(places[facing, opens_right], 4, (0, 256))[0] / 600
            for facing in (True, False)
        ]
        assert np.abs(shares[0] - shares[1]).max() < 0.1


def test_a_slide_of_any_size(tmp_path: Path):
    for size in ((300, 4000), (700, 900)):
        write_synthetic_slide(tmp_path / "slide.tif", "facing", size)
        with Slide(tmp_path / "slide.tif") as slide:
            assert slide.size == size[::-1] or slide.size == size
