from __future__ import annotations

from pathlib import Path

import numpy as np
import openslide
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spatialdl.errors import SlideError
from spatialdl.slides.cutting.tiling import _fitting, _Tiles, cut_tiles, plan_tiles
from spatialdl.slides.finding.regions import Region
from spatialdl.slides.finding.tissue import Tissue
from spatialdl.slides.reading.reader import Slide, Thumbnail


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
    fractions = _Tiles(grid, step, step).fractions(mask)
    assert fractions.shape == grid
    for i in range(grid[0]):
        for j in range(grid[1]):
            r0, c0 = min(round(i * step), rows - 1), min(round(j * step), cols - 1)
            r1, c1 = min(round(i * step + step), rows), min(round(j * step + step), cols)
            part = mask[r0 : max(r1, r0 + 1), c0 : max(c1, c0 + 1)]
            assert fractions[i, j] == pytest.approx(part.mean())


@given(st.integers(20, 900), st.integers(1, 64), st.integers(0, 63), st.floats(1, 5))
def test_tiles_that_overlap_fit_as_often_as_they_can(
    length: int, tile: int, overlap: int, scale: float
) -> None:
    overlap = min(overlap, tile - 1)
    step, stride = tile * scale, (tile - overlap) * scale
    count = _fitting(length, step * 0.99, stride)  # a hundredth may lie beyond the edge
    if count:
        assert (count - 1) * stride + step <= length + 0.011 * step
    assert count * stride + step > length + 0.009 * step


def test_tiles_overlap_by_their_own_pixels(synthetic: dict[str, Path]) -> None:
    with Slide(synthetic["ring"]) as slide:
        plan = plan_tiles(slide, 256, 1.0, 0.0, overlap=64)
        assert (plan.step, plan.stride, plan.grid) == (512, 384, (3, 5))
        assert plan.places[:2] == [(0, 0), (384, 0)]
        tiles = list(cut_tiles(slide, plan))
        first, second = tiles[0].image, tiles[1].image
        assert first is not None
        assert second is not None
        assert (first[:, -64:] == second[:, :64]).all()
        with pytest.raises(ValueError, match="overlap is 256, expected 0 to 255"):
            plan_tiles(slide, 256, 1.0, overlap=256)


def box(x0: float, y0: float, x1: float, y1: float, label: str | None = None) -> Region:
    return Region(np.array([(x0, y0), (x1, y0), (x1, y1), (x0, y1)]), label=label)


def test_regions_say_where_tiles_are_and_what_they_are(synthetic: dict[str, Path]) -> None:
    regions = [
        box(-100, -100, 512, 512, "a"),  # 2 x 2 tiles, and more outside of the slide
        box(512, 0, 640, 256, "b"),  # half a tile
        box(640, 0, 700, 256, "a"),  # another part of it, too small
        box(1024, 0, 1024 + 100, 256, "c"),  # less than half a tile
        box(1536, 0, 1664, 256, "b"),  # as much as the next: the first by name
        box(1664, 0, 1792, 256, "a"),
        box(256, 256, 512, 512, "b"),  # in the first: counts, for it is smaller
    ]
    with Slide(synthetic["ring"]) as slide:
        plan = plan_tiles(slide, 256, 0.5, 0.5, regions=regions, finder=all_tissue)
        assert dict(zip(plan.places, plan.labels, strict=True)) == {
            **{(0, 0): "a", (256, 0): "a", (0, 256): "a", (256, 256): "b"},
            **{(512, 0): "b", (1536, 0): "a"},
        }
        assert (plan.with_tissue, plan.unannotated, plan.reason) == (54, 48, "")
        assert [tile.label for tile in cut_tiles(slide, plan)] == plan.labels
        every = plan_tiles(slide, 256, 0.5, 0.0, regions=regions)
        assert every.labels[-1] == "b"
        assert (1024, 0) in every.places
        assert len(every.places) == 7


def all_tissue(thumbnail: Thumbnail) -> Tissue:
    return Tissue(~thumbnail.missing, thumbnail.missing, 0)


def test_tissue_is_asked_for_in_regions_too(synthetic: dict[str, Path]) -> None:
    with Slide(synthetic["ring"]) as slide:
        free = plan_tiles(slide, 256, 0.5)
        plan = plan_tiles(slide, 256, 0.5, regions=[box(0, 0, 2304, 1600)])
    assert plan.places == free.places
    assert set(plan.labels) == {None}
    assert plan.with_tissue == len(free.places) < 54


def test_why_no_tile_is_kept_in_regions(synthetic: dict[str, Path]) -> None:
    with Slide(synthetic["ring"]) as slide:
        for regions, says in [
            ([], "its annotations are empty"),
            ([box(9000, 0, 9500, 500), box(-9, -9, -5, -5)], "none of its 2 annotated regions"),
            ([box(600, 600, 700, 700)], "lies in an annotated region by 50%, the best tile by 15%"),
        ]:
            plan = plan_tiles(slide, 256, 0.5, regions=regions)
            assert says in plan.reason
            assert (plan.places, plan.unannotated) == ([], plan.with_tissue)
