from __future__ import annotations

from pathlib import Path

import numpy as np
import openslide
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spatialdl.errors import SlideError
from spatialdl.slides.reader import Slide
from spatialdl.slides.tiling import _fractions, cut_tiles, plan_tiles


def test_tiles_are_those_of_openslide_at_their_places(synthetic: dict[str, Path]) -> None:
    path = synthetic["ring"]
    with Slide(path) as slide, openslide.OpenSlide(path) as raw:
        plan = plan_tiles(slide, 128, 1.0)
        assert plan.step == 256
        assert plan.grid == (6, 9)
        assert plan.in_grid == 54
        assert 10 < len(plan.places) < 54
        assert all(x % 256 == 0 and y % 256 == 0 for x, y in plan.places)
        tiles = list(cut_tiles(slide, plan))
        assert [(tile.x, tile.y) for tile in tiles] == plan.places
        for tile in tiles:
            region = raw.read_region((tile.x, tile.y), 1, (128, 128))
            assert (tile.image == np.asarray(region.convert("RGB"))).all()


def test_kept_tiles_have_the_tissue_and_others_do_not(synthetic: dict[str, Path]) -> None:
    with Slide(synthetic["strand"]) as slide:
        whole = slide.read_scaled(0, 0, slide.size, 1.0).astype(int)
        plan = plan_tiles(slide, 256, 0.5, 0.5)
        every = plan_tiles(slide, 256, 0.5, 0.0)
        none = plan_tiles(slide, 256, 0.5, 1.0)
    assert len(every.places) == every.in_grid == 54
    assert set(none.places) <= set(plan.places) < set(every.places)
    colour = np.ptp(whole, axis=-1) > 30
    for x, y in every.places:
        part = colour[y : y + 256, x : x + 256].mean()
        if abs(part - 0.5) > 0.15:
            assert ((x, y) in plan.places) == (part > 0.5)


def test_native_tiles_of_a_real_slide(real: Path) -> None:
    path = real / "CMU-1-Small-Region.svs"
    with Slide(path) as slide, openslide.OpenSlide(path) as raw:
        for mpp in (0.499, 0.5):  # within 1 % of the slide's own: its own pixels
            plan = plan_tiles(slide, 256, mpp)
            assert plan.grid == (11, 8)
            tiles = list(cut_tiles(slide, plan))
            assert len(tiles) == 32
            for tile in tiles:
                region = raw.read_region((tile.x, tile.y), 0, (256, 256))
                assert (tile.image == np.asarray(region.convert("RGB"))).all()


def test_an_odd_resolution_has_tiles_side_by_side(real: Path) -> None:
    with Slide(real / "CMU-1-Small-Region.svs") as slide:
        plan = plan_tiles(slide, 100, 0.8, 0.0)
        step = 100 * 0.8 / 0.499
        assert plan.grid == (int(2967 / step), int(2220 / step))
        assert plan.places[1] == (round(step), 0)
        tile = next(cut_tiles(slide, plan))
        assert tile.image is not None
        assert tile.image.shape == (100, 100, 3)


def test_why_no_tile_is_kept(real: Path) -> None:
    with Slide(real / "bad" / "all-white.svs") as slide:
        assert "no tissue found in any of 64 tiles" in plan_tiles(slide, 256, 0.5).reason
    with Slide(real / "CMU-1-Small-Region.svs") as slide:
        small = plan_tiles(slide, 4096, 0.5)
        assert small.in_grid == 0
        assert "2967 x 2220 pixels, a tile spans 4096" in small.reason
        picky = plan_tiles(slide, 1024, 0.5, 0.99)
        assert "none of 4 tiles has 99% tissue, the best has" in picky.reason


def test_a_resolution_finer_than_the_slide_is_refused(real: Path) -> None:
    with (
        Slide(real / "CMU-1-Small-Region.svs") as slide,
        pytest.raises(SlideError, match=r"has 0.499 .* cannot give 0.25; .* 0.499 or more"),
    ):
        plan_tiles(slide, 256, 0.25)


def test_a_damaged_slide_gives_what_can_be_read(real: Path) -> None:
    with Slide(real / "bad" / "corrupt-some-tiles.svs") as slide:
        tiles = list(cut_tiles(slide, plan_tiles(slide, 256, 0.5)))
    with Slide(real / "CMU-1-Small-Region.svs") as slide:
        whole = set(plan_tiles(slide, 256, 0.5).places)
        for tile in tiles:
            if tile.image is not None:
                assert (tile.image == slide.read(tile.x, tile.y, (256, 256), 0.5)).all()
    good = {(tile.x, tile.y) for tile in tiles if tile.image is not None}
    bad = [tile for tile in tiles if tile.problem]
    assert len(good) > 8
    assert len(bad) > 15
    assert all("damaged" in tile.problem for tile in bad)
    # glass where the thumbnail was missing is found out
    assert len(good - whole) < 3


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.3, 15), st.integers(0, 2**32 - 1))
def test_fractions_are_means_over_tiles(rows: int, cols: int, step: float, seed: int) -> None:
    mask = np.random.default_rng(seed).random((rows, cols)) < 0.5
    grid = int(rows / step + 0.01), int(cols / step + 0.01)
    fractions = _fractions(mask, grid, step)
    assert fractions.shape == grid
    for i in range(grid[0]):
        for j in range(grid[1]):
            r0, c0 = min(round(i * step), rows - 1), min(round(j * step), cols - 1)
            r1, c1 = min(round((i + 1) * step), rows), min(round((j + 1) * step), cols)
            part = mask[r0 : max(r1, r0 + 1), c0 : max(c1, c0 + 1)]
            assert fractions[i, j] == pytest.approx(part.mean())
