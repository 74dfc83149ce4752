"""Pyramids that openslide reads, dark pictures made bright, and drawn slides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openslide
import pytest
from scipy import ndimage

from spatialdl.slides.finding.tissue import stretched
from spatialdl.slides.pyramid import level_sizes, write_pyramid
from spatialdl.slides.reading.reader import Slide
from spatialdl.slides.synthetic import KINDS, write_synthetic_slide


def smooth(rows: int, cols: int) -> np.ndarray:
    """A picture that JPEG keeps well."""
    y, x = np.mgrid[:rows, :cols]
    parts = (128 + 100 * np.sin(y / 90), 128 + 100 * np.cos(x / 70), 40 + (x + y) / 40)
    return np.stack(parts, -1).clip(0, 255).astype(np.uint8)


def bands(image: np.ndarray, rows: int) -> Iterator[np.ndarray]:
    for row in range(0, len(image), rows):
        yield image[row : row + rows]


@pytest.mark.parametrize("size", [(1100, 1301), (513, 1), (1, 5)])
def test_openslide_reads_what_was_written(tmp_path, size):
    image = smooth(*size)
    write_pyramid(tmp_path / "a.tiff", bands(image, 512), size, mpp=0.25)
    assert [path.name for path in tmp_path.iterdir()] == ["a.tiff"]
    with openslide.OpenSlide(tmp_path / "a.tiff") as slide:
        assert [level[::-1] for level in slide.level_dimensions] == level_sizes(size)
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(0.25)
        for level, (rows, cols) in enumerate(level_sizes(size)):
            got = np.asarray(slide.read_region((0, 0), level, (cols, rows)).convert("RGB"))
            step = 2**level
            even = image[: rows * step, : cols * step].reshape(rows, step, cols, step, 3)
            assert np.abs(got - even.mean((1, 3))).mean() < 2.5


def test_grey_values_are_kept_as_they_are(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (1030, 700), np.uint8)
    write_pyramid(
        tmp_path / "a.tif", bands(image, 512), (1030, 700), None, grey=True, description="b"
    )
    with openslide.OpenSlide(tmp_path / "a.tif") as slide:
        assert slide.properties["openslide.vendor"] == "generic-tiff"
        assert slide.properties["tiff.ImageDescription"] == "b"
        assert [level[::-1] for level in slide.level_dimensions] == level_sizes((1030, 700))
        got = np.asarray(slide.read_region((0, 0), 0, (700, 1030)).convert("RGB"))
        assert np.array_equal(got, np.repeat(image[..., None], 3, 2))
        small = np.asarray(slide.read_region((0, 0), 1, (350, 515)).convert("L")).astype(float)
    assert np.abs(small - image.reshape(515, 2, 350, 2).mean((1, 3))).max() <= 0.5


def test_places_without_a_value_have_no_part_in_reduced_levels(tmp_path):
    image = np.random.default_rng(0).integers(1, 256, (1030, 701), np.uint8)
    image[400:, 333:] = 0
    image[::3, ::2] = 0
    path = tmp_path / "a.tif"
    write_pyramid(path, bands(image, 512), image.shape, None, grey=True, empty=True)
    with openslide.OpenSlide(path) as slide:
        small = np.asarray(slide.read_region((0, 0), 1, (350, 515)).convert("L")).astype(float)
    values = np.where(image[:, :700] > 0, image[:, :700], np.nan).reshape(515, 2, 350, 2)
    known = np.isfinite(values).any((1, 3))
    assert ((small > 0) == known).all()
    counts = np.isfinite(values).sum((1, 3)).clip(1)
    assert np.abs(small - np.nansum(values, (1, 3)) / counts)[known].max() <= 0.5


def dark() -> np.ndarray:
    """A ground of noise, and one bright cell in a thousand."""
    image = np.random.default_rng(0).integers(0, 4, (200, 200, 3), np.uint8)
    image[50:56, 60:66] = (10, 20, 80)
    return image


def test_dark_pictures_are_made_bright_in_their_own_colours():
    image = dark()
    shown = image.max(-1) > 50
    assert stretched(image, shown)[52, 62, 2] == 255  # few cells are bright if they are shown
    assert stretched(image, np.zeros_like(shown)).max() == 255  # of noise by 16 at most
    assert stretched(image)[:40].max() <= 48
    image[100:150] = (10, 20, 80)
    found = stretched(image)
    assert found[120, 0].tolist() == [32, 64, 255]
    assert found[:50].max() < 15
    # bright ones and those of one colour are left
    bright = np.random.default_rng(0).integers(0, 256, (50, 50, 3), np.uint8)
    for other in (bright, np.full((9, 9, 3), 7, np.uint8)):
        assert np.abs(stretched(other).astype(int) - other).max() <= 3


def pixels(path: Path) -> np.ndarray:
    with Slide(path) as slide:
        return slide.read_scaled(0, 0, slide.size, 1.0)


def test_a_slide_follows_from_its_seed_and_blocks_meet_without_a_seam(tmp_path, monkeypatch):
    for kind in KINDS:
        for name, seed in (("a", 3), ("b", 3), ("c", 4)):
            write_synthetic_slide(tmp_path / name, kind, size=(400, 300), seed=seed)
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
        assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr("spatialdl.slides.synthetic._BLOCK", (256, 256))
            write_synthetic_slide(tmp_path / "b", kind, size=(400, 300), seed=3)
        # sums of waves are rounded differently in blocks of another size
        one, other = (pixels(tmp_path / name).astype(int) for name in "ab")
        assert np.abs(one - other).mean() < 0.05


def test_wrong_arguments_are_refused(tmp_path):
    for arguments, says in (
        ({"kind": "cube"}, "expected one of ring, strand"),
        ({"kind": "ring", "mpp": 0.0}, "must be positive"),
    ):
        with pytest.raises(ValueError, match=says):
            write_synthetic_slide(tmp_path / "a.tiff", **arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("facing", [True, False])
def test_pairs_of_crescents_face_each_other_or_look_away(tmp_path, facing):
    # the pale lumen is where it is open
    path = tmp_path / "a.tiff"
    write_synthetic_slide(path, "facing" if facing else "averted", (1024, 2048))
    red = pixels(path)[..., 1].astype(float)
    pale = ndimage.binary_opening(ndimage.uniform_filter(red, 9) > 205, iterations=9)
    pieces, _ = ndimage.label(pale)
    for part in ndimage.find_objects(pieces):
        here = pieces[part] > 0
        if here.sum() > 20_000 and part[0].start > 0 and part[0].stop < 1024:
            mass = (here.sum(0) * np.arange(here.shape[1])).sum() / here.sum()
            opens_right = mass < (here.shape[1] - 1) / 2
            assert opens_right == (facing == (part[1].start < 1024))
