from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import pytest
import tifffile
from PIL import Image

from spatialdl.errors import SlideError
from spatialdl.slides.cutting.grid import EDGES
from spatialdl.slides.cutting.tiling import (
    TilePlan,
    _thumbnail_scale,
    cut_tiles,
    plan_tiles,
)
from spatialdl.slides.finding.regions import Region
from spatialdl.slides.finding.tissue import Tissue
from spatialdl.slides.reading.reader import Slide, Thumbnail
from spatialdl.slides.reading.wanted import Wanted


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
            assert len(tiles) == 33
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


def test_tiles_may_have_to_be_whole(synthetic: dict[str, Path]) -> None:
    with Slide(synthetic["ring"]) as slide:  # 1600 x 2304
        assert plan_tiles(slide, 1610, 0.5, 0.0).grid == (1, 1)
        assert plan_tiles(slide, 1610, 0.5, 0.0, beyond=False).grid == (0, 1)


def test_tiles_that_nobody_looks_at_are_not_read(
    synthetic: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Slide(synthetic["ring"]) as slide:
        plan = plan_tiles(slide, 256, 0.5)
        doubtful = frozenset(plan.places[1:3])
        read: list[tuple[int, int]] = []
        whole = slide.read_scaled

        def counted(x: int, y: int, *more: Any) -> Any:
            read.append((x, y))
            return whole(x, y, *more)

        monkeypatch.setattr(slide, "read_scaled", counted)
        tiles = list(cut_tiles(slide, replace(plan, doubtful=doubtful), read=False))
    assert [(tile.x, tile.y) for tile in tiles] == plan.places
    assert read == plan.places[1:3]
    assert [tile.image is None for tile in tiles[:4]] == [True, False, False, True]
    assert not any(tile.bare or tile.problem for tile in tiles)


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


def test_tiles_in_no_region_may_have_a_class_of_their_own(synthetic: dict[str, Path]) -> None:
    regions = [
        box(-100, -100, 512, 512, "a"),
        box(512, 0, 640, 256, "b"),  # half a tile: the class of a region comes first
        box(1024, 0, 1024 + 100, 256, "c"),  # less than half: the rest is in no region
        box(1536, 0, 1536 + 200, 256, "a"),
        box(1792, 0, 1792 + 100, 256, "a"),  # with the next, no class has half, nor has none
        box(1892, 0, 1992, 256, "b"),
        box(2048, 0, 2304, 256),  # nobody knows what that is
    ]
    with Slide(synthetic["ring"]) as slide:
        kept, every, whole = (
            plan_tiles(
                slide, 256, 0.5, part, regions=regions, finder=all_tissue, outside_class=name
            )
            for part, name in ((0.5, None), (0.5, "none"), (0.9, "none"))
        )
    before = dict(zip(kept.places, kept.labels, strict=True))
    after = dict(zip(every.places, every.labels, strict=True))
    added = {place: after[place] for place in after.keys() - before.keys()}
    assert after == {**before, **added}
    assert set(added.values()) == {"none"}
    assert (1024, 0) in added
    assert (1792, 0) not in after
    assert after[(2048, 0)] is None
    assert (every.with_tissue, every.unannotated, len(added)) == (54, 1, 54 - 1 - len(before))
    assert every.places == sorted(every.places, key=lambda place: place[::-1])
    assert not {(512, 0), (1024, 0), (1536, 0), (1792, 0)} & set(whole.places)
    assert whole.unannotated == 4


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
            ([box(600, 600, 700, 700)], "50% of its area in an annotated region, the best has 15%"),
        ]:
            plan = plan_tiles(slide, 256, 0.5, regions=regions)
            assert says in plan.reason
            assert (plan.places, plan.unannotated) == ([], plan.with_tissue)


def stained_faintly(path: Path, side: int = 2048) -> Path:
    """Pale tissue with nuclei in weak blue and some in brown, as antibodies stain it."""
    random = np.random.default_rng(0)
    image = np.full((side, side, 3), (241, 240, 242), np.int16)
    rows, cols = np.mgrid[-10:11, -10:11]
    disc = rows**2 + cols**2 < 81
    for row, col in random.integers(side // 4, 3 * side // 4, (side, 2)):
        place = image[row - 10 : row + 11, col - 10 : col + 11]
        place[disc] = (190, 160, 130) if random.random() < 0.2 else (165, 175, 205)
    image += random.integers(-3, 4, image.shape).astype(np.int16)
    scanned = {"resolution": (40000, 40000), "resolutionunit": "CENTIMETER"}
    pixels = np.clip(image, 0, 255).astype(np.uint8)
    tifffile.imwrite(path, pixels, tile=(256, 256), photometric="rgb", **scanned)
    return path


def test_tissue_depends_on_the_slide_and_not_on_the_tiles(tmp_path: Path) -> None:
    # a mask as coarse as the tiles found this tissue by small ones, and not by large ones
    with Slide(stained_faintly(tmp_path / "a.tiff")) as slide:
        plans = [plan_tiles(slide, side, Wanted(level=0), 0.001) for side in (32, 64, 256, 512)]
        plans.append(plan_tiles(slide, 100, 1.3, 0.5, overlap=10))
    masks = [plan.tissue.mask for plan in plans]
    assert all((mask == masks[0]).all() for mask in masks)
    assert 0.05 < masks[0].mean() < 0.3
    parts = [np.sum([slide_part(plan, x, y) for x, y in plan.places]) for plan in plans[:4]]
    assert parts == pytest.approx([1.0] * 4, abs=2e-3)


def slide_part(plan: TilePlan, x: int, y: int) -> float:
    """Part of the tissue of a slide that lies in a tile."""
    scale, mask = plan.thumbnail.scale, plan.tissue.mask
    first, last = int(y / scale), int((y + plan.step) / scale)
    left, right = int(x / scale), int((x + plan.step) / scale)
    return float(mask[first:last, left:right].sum() / mask.sum())


def test_thumbnails_are_fine_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tifffile.imwrite(tmp_path / "a.tiff", np.zeros((64, 64, 3), np.uint8), tile=(64, 64))
    for side, mpp, scale in [
        (2000, None, 1),
        (8192, None, 4),
        (8192, 0.25, 4),
        (4096, 0.25, 4),  # a micrometre
        (20480, 0.5, 10),
        (60000, 0.5, 16),  # 8 micrometres
        (163840, 0.5, 40),  # 4096 pixels
    ]:
        with Slide(tmp_path / "a.tiff", mpp) as slide:
            monkeypatch.setattr(slide, "_size", (side // 2, side))
            assert _thumbnail_scale(slide) == pytest.approx(scale)


def test_where_a_slide_has_no_pixels_there_is_no_tissue(tmp_path: Path) -> None:
    path = tmp_path / "a.tiff"
    image = np.zeros((1024, 1024, 3), np.uint8)
    image[300:700, 300:700] = (10, 20, 120)

    def tiles() -> Any:  # with none in the last row and column of them
        for row in range(0, 1024, 256):
            for col in range(0, 1024, 256):
                yield image[row : row + 256, col : col + 256] if max(row, col) < 768 else None

    scanned = {"resolution": (20000, 20000), "resolutionunit": "CENTIMETER"}
    tifffile.imwrite(path, tiles(), shape=image.shape, dtype=np.uint8, tile=(256, 256), **scanned)
    with Slide(path) as slide:
        assert slide.background == (255, 255, 255)
        plan = plan_tiles(slide, 128, 0.5, 0.1)
        assert plan.tissue.dark
        assert plan.tissue.mask.mean() == pytest.approx(0.16, abs=0.01)
        assert max(max(place) for place in plan.places) == 640
        assert plan.background == (0, 0, 0)
        (tile,) = cut_tiles(slide, replace(plan, places=[(960, 960)], labels=[None]))
        assert tile.image is not None
        assert (tile.image == 0).all()  # not white


def test_tiles_beyond_a_dark_slide_are_dark(tmp_path: Path) -> None:
    scanned = {"resolution": (20000, 20000), "resolutionunit": "CENTIMETER"}
    image = np.zeros((300, 300, 3), np.uint8)
    image[100:200, 100:200, 2] = 150
    tifffile.imwrite(tmp_path / "a.tiff", image, tile=(128, 128), **scanned)
    image[200:250, 100:200, 2] = 150
    Image.fromarray(image).save(tmp_path / "a.png")
    for name in ("a.tiff", "a.png"):
        with Slide(tmp_path / name, 0.5) as slide:
            plan = plan_tiles(slide, 302, 0.5, 0.0)
            (tile,) = cut_tiles(slide, plan)
            assert tile.image is not None
            assert tile.image[300:].max() == tile.image[:, 300:].max() == 0


@pytest.mark.parametrize("overlap", [0, 64])
@pytest.mark.parametrize(("wanted", "down"), [(0.5, 1), (1.0, 2)])
def test_edge_tiles_are_padded_or_moved(
    synthetic: dict[str, Path], wanted: float, down: int, overlap: int
) -> None:
    with Slide(synthetic["ring"]) as slide, openslide.OpenSlide(synthetic["ring"]) as raw:
        every, (height, width) = {}, slide.size
        for edge in EDGES:
            plan = plan_tiles(slide, 192, wanted, 0.0, overlap=overlap, edge=edge)
            every[edge] = plan
            assert plan.in_grid == len(plan.places)
            for tile in [*cut_tiles(slide, plan)][-2:]:
                region = raw.read_region((tile.x, tile.y), int(np.log2(down)), (192, 192))
                canvas = Image.new("RGB", region.size, "white")
                canvas.paste(region, mask=region.getchannel("A"))
                assert (tile.image == np.asarray(canvas)).all()
    step = 192 * down
    drop, pad, shift = (set(every[edge].places) for edge in EDGES)
    assert drop < pad
    assert drop < shift
    assert len(pad) == len(shift)
    assert max(x for x, _ in shift) == width - step
    assert max(y for _, y in shift) == height - step
    for corner in (pad, shift):
        covered = max(x for x, _ in corner) + step, max(y for _, y in corner) + step
        assert covered[0] >= width
        assert covered[1] >= height
    assert every["pad"].outside == every["shift"].outside == 0


def test_tissue_outside_of_the_grid_is_measured(tmp_path: Path) -> None:
    image = np.full((300, 310, 3), 245, np.uint8)
    image[100:300, 100:200] = (200, 90, 150)
    tifffile.imwrite(tmp_path / "a.tiff", image, tile=(64, 64), photometric="rgb")
    found = {}
    with Slide(tmp_path / "a.tiff") as slide:
        for edge in EDGES:
            found[edge] = plan_tiles(slide, 128, Wanted(level=0), 0.2, edge=edge)
        assert found["drop"].tissue_part == pytest.approx(20000 / 93000, abs=0.01)
        assert found["drop"].outside == pytest.approx(44 / 200, abs=0.01)
        # of the tile's own pixels, those beyond the slide count as no tissue: 44 of 128 rows
        assert found["drop"].places == [(0, 128), (128, 128)]
        assert found["pad"].places == found["drop"].places
        assert found["shift"].places == [(0, 128), (128, 128), (0, 172), (128, 172)]
        low = plan_tiles(slide, 128, Wanted(level=0), 0.15, edge="pad")
        assert (128, 256) in low.places
        assert plan_tiles(slide, 512, Wanted(level=0), 0.1, edge="pad").places == []
        large = plan_tiles(slide, 512, Wanted(level=0), 0.05, edge="pad")
        assert (large.places, large.grid) == ([(0, 0)], (1, 1))
        for edge in ("drop", "shift"):
            none = plan_tiles(slide, 512, Wanted(level=0), 0.05, edge=edge)
            assert none.places == []
            assert "or --edge pad" in none.reason
            assert none.outside == 1


def test_regions_reach_into_edge_tiles(synthetic: dict[str, Path]) -> None:
    with Slide(synthetic["ring"]) as slide:  # 1600 rows: 64 in the last row of tiles
        regions = [box(0, 1500, 256, 1600, "a")]
        for edge, places in (("drop", []), ("pad", []), ("shift", [(0, 1344)])):
            plan = plan_tiles(slide, 256, 0.5, 0.39, regions=regions, finder=all_tissue, edge=edge)
            assert plan.places == places
        plan = plan_tiles(slide, 256, 0.5, 0.2, regions=regions, finder=all_tissue, edge="pad")
        assert (0, 1536) in plan.places


def test_a_dark_slide_is_padded_darkly(tmp_path: Path) -> None:
    image = np.zeros((300, 300, 3), np.uint8)
    image[100:300, 100:300, 2] = 150
    image[250:, 250:] = 0
    tifffile.imwrite(tmp_path / "a.tiff", image, tile=(64, 64), photometric="rgb")
    with Slide(tmp_path / "a.tiff") as slide:
        plan = plan_tiles(slide, 256, Wanted(level=0), 0.0, edge="pad")
        last = list(cut_tiles(slide, plan))[-1]
    assert plan.tissue.dark
    assert (last.x, last.y) == (256, 256)
    assert last.image is not None
    assert last.image.max() == 0
