from __future__ import annotations

from pathlib import Path

import numpy as np
import openslide
import pytest
from scipy import ndimage

from spatialdl.slides.reading.reader import Slide
from spatialdl.slides.synthetic.drawing import (
    APART,
    ARRANGEMENTS,
    KINDS,
    Crescents,
    write_synthetic_slide,
)


def pixels(path: Path) -> np.ndarray:
    with Slide(path) as slide:
        return slide.read_scaled(0, 0, slide.size, 1.0)


def test_openslide_reads_levels_and_resolution(synthetic: dict[str, Path]) -> None:
    for path in synthetic.values():
        with openslide.OpenSlide(path) as slide:
            assert slide.level_dimensions == ((2304, 1600), (1152, 800), (576, 400), (288, 200))
            assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(0.5)
            assert float(slide.properties["openslide.mpp-y"]) == pytest.approx(0.5)
            assert slide.properties["openslide.level[0].tile-width"] == "256"


def test_a_slide_follows_from_its_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_synthetic_slide(tmp_path / name, "ring", size=(600, 500), seed=seed)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


def test_blocks_meet_without_a_seam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "spatialdl.slides.synthetic.drawing._BLOCK"
    for kind in KINDS:
        seen = []
        for block in ((768, 1024), (256, 512)):
            monkeypatch.setattr(module, block)
            write_synthetic_slide(tmp_path / "slide", kind, size=(600, 800), seed=2)
            seen.append(pixels(tmp_path / "slide").astype(int))
        # sums of waves are rounded differently in blocks of another size
        assert np.abs(seen[0] - seen[1]).mean() < 0.05


def test_half_to_most_of_it_is_tissue(synthetic: dict[str, Path]) -> None:
    for path in synthetic.values():
        image = pixels(path).astype(int)
        glass = (image.min(-1) > 235) & (np.ptp(image, axis=-1) < 8)
        assert 0.25 < glass.mean() < 0.5  # lumens are a little pink
        assert glass[0].all()


def test_kinds_have_the_same_colours(synthetic: dict[str, Path]) -> None:
    means, spreads = [], []
    for path in synthetic.values():
        image = pixels(path).reshape(-1, 3).astype(float)
        tissue = image[image[:, 1] < 215]
        means.append(tissue.mean(0))
        spreads.append(tissue.std(0))
    np.testing.assert_allclose(*means, atol=6)
    np.testing.assert_allclose(*spreads, atol=6)


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


def test_kinds_differ_in_structure(synthetic: dict[str, Path]) -> None:
    assert 80 < longest_lumen(synthetic["ring"]) < 220
    assert longest_lumen(synthetic["strand"]) > 350


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"kind": "cube"}, "expected one of ring, strand"),
        ({"kind": "ring", "size": (0, 5)}, "must be positive"),
        ({"kind": "ring", "mpp": 0.0}, "must be positive"),
    ],
)
def test_wrong_arguments_are_refused(
    tmp_path: Path, arguments: dict[str, object], says: str
) -> None:
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
