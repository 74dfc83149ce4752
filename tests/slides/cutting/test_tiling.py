"""Where tiles lie and what they show; regions cut whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from spatialdl.slides.cutting.grid import EDGES, TileGrid, Wanted, tile_starts
from spatialdl.slides.cutting.tiling import (
    TilePlan,
    WholeImage,
    WholePlan,
    cut_tiles,
    plan_tiles,
    plan_whole,
)
from spatialdl.slides.finding.annotations import Region
from spatialdl.slides.finding.tissue import Tissue
from spatialdl.slides.reading.reader import Slide, Thumbnail


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.3, 15), st.integers(0, 2**32 - 1))
def test_fractions_are_exact_parts_of_tiles(rows, cols, step, seed):
    random = np.random.default_rng(seed)
    mask = random.random((rows, cols)) < 0.5
    extent = rows - random.uniform(0, 0.9), cols - random.uniform(0, 0.9)
    starts = tuple(np.sort(random.uniform(0, length, 4)) for length in extent)
    fractions = TileGrid((starts[0], starts[1]), step, extent).fractions(mask)
    for i, row in enumerate(starts[0]):
        for j, col in enumerate(starts[1]):
            down, across = (
                np.clip(np.minimum(first + step, most) - np.arange(count), 0, 1)
                - np.clip(first - np.arange(count), 0, 1)
                for first, count, most in ((row, rows, extent[0]), (col, cols, extent[1]))
            )
            area = [step if side < 0.99 * step else side for side in (down.sum(), across.sum())]
            assert fractions[i, j] == pytest.approx(down @ mask @ across / np.prod(area), abs=2e-6)


@given(
    st.integers(20, 900),
    st.integers(1, 64),
    st.integers(0, 63),
    st.sampled_from([1.0, 2.0, 4.0, 1.37, 3.9997]),
)
def test_padded_and_moved_tiles_reach_the_edge(length, tile, overlap, scale):
    step, stride = tile * scale, (tile - min(overlap, tile - 1)) * scale
    spans, needed = (step, stride, scale), 0.99 * step
    drop, pad, shift = (tile_starts(length, needed, spans, edge) for edge in EDGES)
    assert drop.tolist() == pad[: len(drop)].tolist() == shift[: len(drop)].tolist()
    assert len(pad) - len(drop) in (0, 1)
    assert pad[-1] < length
    assert length - (pad[-1] + step) < max(scale, 0.01 * step + 1e-6)
    if len(drop):
        assert shift[-1] + step <= length + 0.01 * step + 1e-6
        assert length - (shift[-1] + step) < max(scale, 1.0)
        assert (np.diff(shift) > 0).all()
        assert (np.diff(shift) <= stride + 1e-6).all()
        if scale in (1, 2, 4):
            assert (shift % scale == 0).all()
    else:
        assert len(shift) == 0
    assert length - (drop[-1] + step if len(drop) else 0) >= scale or len(pad) == len(drop)


def test_a_tile_of_nothing_but_tissue_has_all_of_it():
    starts = np.arange(30) * 7.3
    tiles = TileGrid((starts, starts), 7.3, (219.0, 218.95))
    assert (tiles.fractions(np.ones((219, 219), bool)) == 1).all()


def test_why_no_tile_is_kept(synthetic):
    with Slide(synthetic["ring"]) as slide:
        none = plan_tiles(slide, 256, 0.5, finder=no_tissue)
        assert "no tissue found in any of 54 tiles" in none.reason
        small = plan_tiles(slide, 4096, 0.5)
        assert small.in_grid == 0
        assert "1600 x 2304 pixels, a tile spans 4096" in small.reason
        picky = plan_tiles(slide, 1024, 0.5, 0.999)
        assert "none of 2 tiles has 100% tissue, the best has" in picky.reason
        for regions, says in [
            ([], "its annotations are empty"),
            ([box(9000, 0, 9500, 500), box(-9, -9, -5, -5)], "none of its 2 annotated regions"),
            ([box(600, 600, 700, 700)], "50% of its area in an annotated region, the best has 15%"),
        ]:
            plan = plan_tiles(slide, 256, 0.5, regions=regions)
            assert says in plan.reason
            assert (plan.places, plan.unannotated) == ([], plan.with_tissue)


def test_tiles_overlap_by_their_own_pixels(synthetic):
    with Slide(synthetic["ring"]) as slide:
        plan = plan_tiles(slide, 256, 1.0, 0.0, overlap=64)
        assert (plan.step, plan.stride, plan.grid) == (512, 384, (3, 5))
        assert plan.places[:2] == [(0, 0), (384, 0)]
        tiles = list(cut_tiles(slide, plan))
        first, second = tiles[0].image, tiles[1].image
        assert first is not None
        assert second is not None
        assert (first[:, -64:] == second[:, :64]).all()
        assert plan_tiles(slide, 1610, 0.5, 0.0).grid == (1, 1)  # by 0.6 % too large
        assert plan_tiles(slide, 1610, 0.5, 0.0, beyond=False).grid == (0, 1)
        with pytest.raises(ValueError, match="overlap is 256, expected 0 to 255"):
            plan_tiles(slide, 256, 1.0, overlap=256)


def box(x0: float, y0: float, x1: float, y1: float, label: str | None = None) -> Region:
    return Region(np.array([(x0, y0), (x1, y0), (x1, y1), (x0, y1)]), label=label)


def all_tissue(thumbnail: Thumbnail) -> Tissue:
    return Tissue(~thumbnail.missing, thumbnail.missing, 0)


def no_tissue(thumbnail: Thumbnail) -> Tissue:
    return Tissue(thumbnail.missing, thumbnail.missing, 0)


def test_regions_say_where_tiles_are_and_what_they_are(halves):
    regions = [
        box(-50, -50, 256, 256, "a"),  # 2 x 2 tiles, and more outside of the slide
        box(256, 0, 320, 128, "b"),  # half a tile
        box(320, 0, 350, 128, "a"),  # another part of it, too small
        box(512, 0, 512 + 50, 128, "c"),  # less than half a tile
        box(768, 0, 832, 128, "b"),  # as much as the next: the first by name
        box(832, 0, 896, 128, "a"),
        box(128, 128, 256, 256, "b"),  # in the first: counts, for it is smaller
    ]
    with Slide(halves["ring"]) as slide:
        plan = plan_tiles(slide, 128, 0.5, 0.5, regions=regions, finder=all_tissue)
        assert dict(zip(plan.places, plan.labels, strict=True)) == {
            **{(0, 0): "a", (128, 0): "a", (0, 128): "a", (128, 128): "b"},
            **{(256, 0): "b", (768, 0): "a"},
        }
        assert (plan.with_tissue, plan.unannotated, plan.reason) == (54, 48, "")
        assert [tile.label for tile in cut_tiles(slide, plan)] == plan.labels
        assert len(plan_tiles(slide, 128, 0.5, 0.0, regions=regions).places) == 7


def test_tiles_in_no_region_may_have_a_class_of_their_own(halves):
    regions = [
        box(-50, -50, 256, 256, "a"),
        box(256, 0, 320, 128, "b"),  # half a tile: the class of a region comes first
        box(512, 0, 512 + 50, 128, "c"),  # less than half: the rest is in no region
        box(768, 0, 768 + 100, 128, "a"),
        box(896, 0, 896 + 50, 128, "a"),  # with the next, no class has half, nor has none
        box(946, 0, 996, 128, "b"),
        box(1024, 0, 1152, 128),  # nobody knows what that is
    ]
    with Slide(halves["ring"]) as slide:
        kept, every, whole = (
            plan_tiles(
                slide, 128, 0.5, part, regions=regions, finder=all_tissue, outside_class=name
            )
            for part, name in ((0.5, None), (0.5, "none"), (0.9, "none"))
        )
    before = dict(zip(kept.places, kept.labels, strict=True))
    after = dict(zip(every.places, every.labels, strict=True))
    added = {place: after[place] for place in after.keys() - before.keys()}
    assert after == {**before, **added}
    assert set(added.values()) == {"none"}
    assert (512, 0) in added
    assert (896, 0) not in after
    assert after[(1024, 0)] is None
    assert (every.with_tissue, every.unannotated, len(added)) == (54, 1, 54 - 1 - len(before))
    assert every.places == sorted(every.places, key=lambda place: place[::-1])
    assert not {(256, 0), (512, 0), (768, 0), (896, 0)} & set(whole.places)
    assert whole.unannotated == 4


def stained_faintly(path: Path) -> Path:
    """Pale tissue with nuclei in weak blue and some in brown, as antibodies stain it."""
    random = np.random.default_rng(0)
    image = np.full((2048, 2048, 3), (241, 240, 242), np.int16)
    rows, cols = np.mgrid[-10:11, -10:11]
    disc = rows**2 + cols**2 < 81
    for row, col in random.integers(512, 1536, (2048, 2)):
        place = image[row - 10 : row + 11, col - 10 : col + 11]
        place[disc] = (190, 160, 130) if random.random() < 0.2 else (165, 175, 205)
    image += random.integers(-3, 4, image.shape).astype(np.int16)
    return scanned(path, np.clip(image, 0, 255).astype(np.uint8), 0.25)


def scanned(path: Path, image: np.ndarray, mpp: float = 0.5, **more: object) -> Path:
    """A slide that is not made of JPEG tiles."""
    per = {"resolution": (1e4 / mpp, 1e4 / mpp), "resolutionunit": "CENTIMETER"}
    tifffile.imwrite(path, image, photometric="rgb", **{"tile": (128, 128), **per, **more})
    return path


def test_tissue_depends_on_the_slide_and_not_on_the_tiles(tmp_path):
    # a mask as coarse as the tiles found this tissue by small ones, and not by large ones
    with Slide(stained_faintly(tmp_path / "a.tiff")) as slide:
        plans = [plan_tiles(slide, side, Wanted(level=0), 0.001) for side in (32, 256)]
        plans.append(plan_tiles(slide, 100, 1.3, 0.5, overlap=10))
    masks = [plan.tissue.mask for plan in plans]
    assert all((mask == masks[0]).all() for mask in masks)
    assert 0.05 < masks[0].mean() < 0.3


def test_where_a_slide_has_no_pixels_there_is_no_tissue(tmp_path):
    path, image = tmp_path / "a.tiff", np.zeros((1024, 1024, 3), np.uint8)
    image[300:700, 300:700] = (10, 20, 120)

    def tiles() -> Any:  # with none in the last row and column of them
        for row in range(0, 1024, 256):
            for col in range(0, 1024, 256):
                yield image[row : row + 256, col : col + 256] if max(row, col) < 768 else None

    scanned(path, tiles(), shape=image.shape, dtype=np.uint8, tile=(256, 256))
    with Slide(path) as slide:
        assert slide.background == (255, 255, 255)
        plan = plan_tiles(slide, 128, 0.5, 0.1)
        assert plan.tissue.dark
        assert plan.tissue.mask.mean() == pytest.approx(0.16, abs=0.01)
        assert max(max(place) for place in plan.places) == 640
        assert plan.background == (0, 0, 0)
        (tile,) = cut_tiles(slide, replace(plan, places=[(960, 960)], labels=[None]))
        assert (tile.image == 0).all()  # not white


def test_tiles_beyond_a_dark_slide_are_dark(tmp_path):
    image = np.zeros((300, 300, 3), np.uint8)
    image[100:200, 100:200, 2] = 150
    scanned(tmp_path / "a.tiff", image)
    Image.fromarray(image).save(tmp_path / "a.png")
    for name in ("a.tiff", "a.png"):
        with Slide(tmp_path / name, 0.5) as slide:
            (tile,) = cut_tiles(slide, plan_tiles(slide, 302, 0.5, 0.0))
            assert tile.image[300:].max() == tile.image[:, 300:].max() == 0
            *_, last = cut_tiles(slide, plan_tiles(slide, 256, 0.5, 0.0, edge="pad"))
            assert (last.x, last.y, last.image.max()) == (256, 256, 0)


def test_tissue_outside_of_the_grid_is_measured(tmp_path):
    image = np.full((300, 310, 3), 245, np.uint8)
    image[100:300, 100:200] = (200, 90, 150)
    with Slide(scanned(tmp_path / "a.tiff", image, tile=(64, 64))) as slide:
        plan = partial(plan_tiles, slide, wanted=Wanted(level=0))
        drop, pad, shift = (plan(tile_size=128, min_tissue=0.2, edge=edge) for edge in EDGES)
        assert drop.tissue_part == pytest.approx(20000 / 93000, abs=0.01)
        assert plan(tile_size=64, finder=no_tissue).outside == 0
        assert drop.outside == pytest.approx(44 / 200, abs=0.01)
        # of the tile's own pixels, those beyond the slide count as no tissue: 44 of 128 rows
        assert drop.places == pad.places == [(0, 128), (128, 128)]
        assert shift.places == [(0, 128), (128, 128), (0, 172), (128, 172)]
        assert (128, 256) in plan(tile_size=128, min_tissue=0.15, edge="pad").places
        assert plan(tile_size=512, min_tissue=0.1, edge="pad").places == []
        large = plan(tile_size=512, min_tissue=0.05, edge="pad")
        assert (large.places, large.grid) == ([(0, 0)], (1, 1))
        for edge in ("drop", "shift"):
            none = plan(tile_size=512, min_tissue=0.05, edge=edge)
            assert (none.places, none.outside) == ([], 1)
            assert "or --edge pad" in none.reason


def test_regions_reach_into_edge_tiles(synthetic):
    with Slide(synthetic["ring"]) as slide:  # 1600 rows: 64 in the last row of tiles
        regions = [box(0, 1500, 256, 1600, "a")]
        for edge, places in (("drop", []), ("pad", []), ("shift", [(0, 1344)])):
            plan = plan_tiles(slide, 256, 0.5, 0.39, regions=regions, finder=all_tissue, edge=edge)
            assert plan.places == places
        plan = plan_tiles(slide, 256, 0.5, 0.2, regions=regions, finder=all_tissue, edge="pad")
        assert (0, 1536) in plan.places


def with_mask(plan: TilePlan, box: tuple[int, int, int, int]) -> TilePlan:
    """The plan with tissue in a box of level-0 pixels: rows, then columns."""
    scale = plan.thumbnail.scale
    mask = np.zeros(plan.tissue.mask.shape, bool)
    row0, row1, col0, col1 = (int(n / scale) for n in box)
    mask[row0:row1, col0:col1] = True
    return replace(plan, tissue=plan.tissue._replace(mask=mask))


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Slide]:
    """A slide of 777 x 1003 pixels."""
    image = np.random.default_rng(0).integers(0, 256, (777, 1003, 3), np.uint8)
    with Slide(scanned(tmp_path / "a.tiff", image)) as slide:
        yield slide


@pytest.mark.parametrize(
    ("mpp", "mask", "start"),
    [
        (0.5, (600, 900, 1100, 1500), (512, 1024)),
        # at multiples of a tile in pixels of level 0 it would begin within one, every second time
        (1.0, (900, 1500, 850, 2000), (512, 512)),
    ],
)
def test_it_begins_with_a_tile_where_there_are_jpegs(synthetic, mpp, mask, start):
    with Slide(synthetic["ring"]) as slide:
        plan = with_mask(plan_tiles(slide, 256, mpp), mask)
        whole = plan_whole(slide, plan)
        assert whole is not None
        assert (whole.y, whole.x) == start
        assert slide.jpeg_grid(whole.scale).at(whole.x, whole.y, whole.size) is not None


def test_else_with_a_pixel_and_ends_with_the_slide(plain):
    plan = with_mask(plan_tiles(plain, 64, 0.5, 0.0), (101, 203, 97, 333))
    whole = plan_whole(plain, plan)
    assert whole is not None
    rows, cols = np.nonzero(plan.tissue.mask)
    scale = plan.thumbnail.scale
    assert (whole.y, whole.x) == (int(rows.min() * scale), int(cols.min() * scale))
    plan = with_mask(plan_tiles(plain, 64, Wanted(mpp=1.1), 0.0), (0, 9999, 0, 9999))
    whole = plan_whole(plain, plan)
    assert whole is not None
    assert (whole.x, whole.y) == (0, 0)
    assert whole.size == (int(777 / plan.scale), int(1003 / plan.scale))
    assert plan_whole(plain, with_mask(plan, (0, 0, 0, 0))) is None
    image = WholeImage(plain, WholePlan(31, 17, (410, 530), 1.7))
    assert image[:].shape == image.shape == (410, 530, 3)
    assert (image[:] == plain.read_scaled(31, 17, (410, 530), 1.7)).all()
    assert len(image[image.shape[0] - 3 : 10**6]) == 3


@pytest.mark.parametrize("levels", [1, 2])
def test_dark_slides_of_all_sizes_have_the_tissue_that_is_in_them(tmp_path, levels):
    """The last pixels of a thumbnail lie beyond the slide by a part that its size decides."""
    random = np.random.default_rng(0)
    drawn = random.integers(0, 4, (320, 320, 3), np.uint8)
    drawn[100:200, 90:220] += 60
    path, tags = tmp_path / "a.tiff", {"resolution": (80000, 80000)}
    tags |= {"resolutionunit": "CENTIMETER", "tile": (64, 64), "photometric": "rgb"}
    for more in range(0, 9, 4):
        size = 300 + more, 310 + 5 * more % 9
        image = drawn[: size[0], : size[1]]
        with tifffile.TiffWriter(path) as file:
            file.write(image, **tags)
            if levels == 2:
                small = image[: size[0] // 2 * 2 : 2, : size[1] // 2 * 2 : 2]
                file.write(small, subfiletype=1, **tags)
        with Slide(path) as slide:  # 0.125 micrometres: a pixel of the thumbnail has 8
            plan = plan_tiles(slide, 64, Wanted(level=0))
            assert plan.thumbnail.scale == 8
            assert plan.thumbnail.missing.shape == tuple(-(-length // 8) for length in size)
            whole = plan_whole(slide, plan)
        assert plan.tissue.dark, size
        assert whole is not None
        assert (whole.x, whole.y, whole.size) == (88, 96, (104, 136)), size
