from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile

from spatialdl.slides.cutting.tiling import TilePlan, plan_tiles
from spatialdl.slides.cutting.whole import WholeImage, WholePlan, plan_whole
from spatialdl.slides.reading.reader import Slide
from spatialdl.slides.reading.wanted import Wanted


def with_mask(plan: TilePlan, box: tuple[int, int, int, int]) -> TilePlan:
    """The plan with tissue in a box of level-0 pixels: rows, then columns."""
    scale = plan.thumbnail.scale
    mask = np.zeros(plan.tissue.mask.shape, bool)
    row0, row1, col0, col1 = (int(n / scale) for n in box)
    mask[row0:row1, col0:col1] = True
    return replace(plan, tissue=plan.tissue._replace(mask=mask))


@pytest.fixture
def plain(tmp_path: Path) -> Callable[[], Slide]:
    """A slide that is not made of JPEG tiles, 777 x 1003 pixels."""
    image = np.random.default_rng(0).integers(0, 256, (777, 1003, 3), np.uint8)
    path = tmp_path / "a.tiff"
    scanned = {"resolution": (20000, 20000), "resolutionunit": "CENTIMETER"}
    tifffile.imwrite(path, image, tile=(128, 128), **scanned)
    return lambda: Slide(path)


@pytest.mark.parametrize("mpp", [0.5, 1.0, 0.8])
def test_the_region_holds_all_tissue_and_little_more(
    synthetic: dict[str, Path], mpp: float
) -> None:
    with Slide(synthetic["ring"]) as slide:
        plan = plan_tiles(slide, 512, mpp)
        whole = plan_whole(slide, plan)
        assert whole is not None
        rows, cols = np.nonzero(plan.tissue.mask)
        scale, tile = plan.thumbnail.scale, 256 * slide.downsamples[slide.level(plan.scale)]
        for first, span, seen, size in (
            (whole.y, whole.span[0], rows, slide.size[0]),
            (whole.x, whole.span[1], cols, slide.size[1]),
        ):
            assert seen.min() * scale - tile <= first <= seen.min() * scale
            end = min((seen.max() + 1) * scale, size)
            assert end - whole.scale < first + span <= end


def test_it_begins_with_a_tile_where_there_are_jpegs(synthetic: dict[str, Path]) -> None:
    with Slide(synthetic["ring"]) as slide:
        for mpp, unit in ((0.5, 256), (1.0, 512)):
            plan = with_mask(plan_tiles(slide, 512, mpp), (600, 900, 1100, 1500))
            whole = plan_whole(slide, plan)
            assert whole is not None
            assert (whole.y, whole.x) == (600 // unit * unit, 1100 // unit * unit)
            assert slide.jpeg_grid(plan.scale).at(whole.x, whole.y, whole.size) is not None


def test_else_with_a_pixel(plain: Callable[[], Slide]) -> None:
    with plain() as slide:
        plan = with_mask(plan_tiles(slide, 64, 0.5, 0.0), (101, 203, 97, 333))
        whole = plan_whole(slide, plan)
        assert whole is not None
        rows, cols = np.nonzero(plan.tissue.mask)
        scale = plan.thumbnail.scale
        assert (whole.y, whole.x) == (int(rows.min() * scale), int(cols.min() * scale))


def test_tissue_at_the_edge_ends_with_the_slide(plain: Callable[[], Slide]) -> None:
    with plain() as slide:
        for wanted in (0.5, 1.1):
            plan = plan_tiles(slide, 64, Wanted(mpp=wanted), 0.0)
            everything = np.ones_like(plan.tissue.mask)
            plan = replace(plan, tissue=plan.tissue._replace(mask=everything))
            whole = plan_whole(slide, plan)
            assert whole is not None
            assert (whole.x, whole.y) == (0, 0)
            assert whole.size == (int(777 / plan.scale), int(1003 / plan.scale))


def test_without_tissue_there_is_none(plain: Callable[[], Slide]) -> None:
    with plain() as slide:
        plan = plan_tiles(slide, 64, 0.5, 0.0)
        nothing = np.zeros_like(plan.tissue.mask)
        assert plan_whole(slide, replace(plan, tissue=plan.tissue._replace(mask=nothing))) is None


@pytest.mark.parametrize("scale", [1.0, 1.7, 3.0])
def test_rows_are_those_of_the_whole(plain: Callable[[], Slide], scale: float) -> None:
    with plain() as slide:
        plan = WholePlan(31, 17, (int(700 / scale), int(900 / scale)), scale)
        image = WholeImage(slide, plan)
        assert image.shape == (*plan.size, 3)
        all_of_it = image[:]
        assert all_of_it.shape == image.shape
        assert (all_of_it == slide.read_scaled(31, 17, plan.size, scale)).all()
        for first, last in ((0, 1), (5, 101), (100, image.shape[0])):
            apart = np.abs(image[first:last].astype(int) - all_of_it[first:last])
            assert apart.max() <= (scale % 1 > 0)  # resampled elsewhere, it may be rounded
        assert len(image[image.shape[0] - 3 : 10**6]) == 3


def test_a_region_of_a_coarser_level_begins_with_one_of_its_tiles(
    synthetic: dict[str, Path],
) -> None:
    # at multiples of a tile in pixels of level 0 it would begin within one, every second time
    with Slide(synthetic["ring"]) as slide:
        plan = with_mask(plan_tiles(slide, 256, 1.0), (900, 1500, 850, 2000))
        whole = plan_whole(slide, plan)
        assert whole is not None
        assert (whole.x, whole.y) == (512, 512)
        grid = slide.jpeg_grid(whole.scale)
        assert grid is not None
        assert grid.at(whole.x, whole.y, whole.size) is not None


@pytest.mark.parametrize("levels", [1, 2])
def test_dark_slides_of_all_sizes_have_the_tissue_that_is_in_them(
    tmp_path: Path, levels: int
) -> None:
    """The last pixels of a thumbnail lie beyond the slide by a part that its size decides."""
    random = np.random.default_rng(0)
    drawn = random.integers(0, 4, (320, 320, 3), np.uint8)
    drawn[100:200, 90:220] += 60
    path, scanned = tmp_path / "a.tiff", {"resolution": (80000, 80000)}
    scanned |= {"resolutionunit": "CENTIMETER", "tile": (64, 64), "photometric": "rgb"}
    for more in range(9):
        size = 300 + more, 310 + 5 * more % 9
        image = drawn[: size[0], : size[1]]
        with tifffile.TiffWriter(path) as file:
            file.write(image, **scanned)
            if levels == 2:
                small = image[: size[0] // 2 * 2 : 2, : size[1] // 2 * 2 : 2]
                file.write(small, subfiletype=1, **scanned)
        with Slide(path) as slide:  # 0.125 micrometres: a pixel of the thumbnail has 8
            plan = plan_tiles(slide, 64, Wanted(level=0))
            assert plan.thumbnail.scale == 8
            assert plan.thumbnail.missing.shape == tuple(-(-length // 8) for length in size)
            whole = plan_whole(slide, plan)
        assert plan.tissue.dark, size
        assert whole is not None
        assert (whole.x, whole.y, whole.size) == (88, 96, (104, 136)), size
