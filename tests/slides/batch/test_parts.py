"""Parts of a slide that cannot be cut, bands of a region, coordinates for other tools, pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import openslide
import pytest
from PIL import Image

from spatialdl.data.format import shard_problem
from spatialdl.data.samples import RegionBand, RegionSample, ShardInfo
from spatialdl.errors import SlideError
from spatialdl.slides.batch.assembly import save_coords
from spatialdl.slides.batch.parts import (
    BandPart,
    TilePart,
    bands_of,
    native_grid,
    native_region,
    native_tiles,
)
from spatialdl.slides.batch.record import PartRecord
from spatialdl.slides.batch.report_page import save_overview, save_picture, save_preview
from spatialdl.slides.cutting.grid import Wanted
from spatialdl.slides.cutting.tiling import TilePlan, WholePlan, cut_tiles, plan_tiles
from spatialdl.slides.finding.annotations import Region
from spatialdl.slides.finding.tissue import Tissue
from spatialdl.slides.reading.reader import Slide, Thumbnail
from tests.slides.batch.batches import cutting
from tests.slides.tiled_tiffs import jpeg, picture, write_tiff


@pytest.fixture
def slide(synthetic: dict[str, Path]) -> Iterator[Slide]:
    with Slide(synthetic["ring"]) as slide:
        yield slide


def test_native_tiles_have_to_fit_and_to_have_colours(tmp_path, slide):
    for side, overlap in ((128, 0), (512, 128), (300, 44)):
        with pytest.raises(SlideError, match=rf"256 x 256; .*--tile-size {side} and --overlap"):
            native_grid(slide, plan_tiles(slide, side, 0.5, overlap=overlap))
    with pytest.raises(SlideError, match=r"no JPEG tiles at 1\.6 level-0 .*or --codec jpeg"):
        native_grid(slide, plan_tiles(slide, 256, 0.8))
    assert native_grid(slide, plan_tiles(slide, 512, 0.5, overlap=256)).chunk == (256, 256)
    grey = [picture(512, 512)[..., 0]]
    path = write_tiff(tmp_path / "a.tiff", grey, jpeg, photometric="minisblack")
    with Slide(path) as other, pytest.raises(SlideError, match="has grey JPEG tiles at 1 level-0"):
        native_tiles(other, 1.0)
    assert native_region(slide, PLAN).shape == (1100, 1301, 3)
    odd = WholePlan(257, 256, (100, 100), 1.0)
    with pytest.raises(SlideError, match=r"region at x=257, y=256 is not aligned with its JPEG"):
        native_region(slide, odd)


@pytest.mark.parametrize("kind", ["tiles", "bands"])
def test_what_fails_leaves_no_shard_open(tmp_path, slide, monkeypatch, kind):
    def full(*_: object, **__: object) -> None:
        raise OSError("disk full")

    pieces: Any = BandPart(PLAN, sample(PLAN, bands_of(PLAN, 1, 1, 512)), 0)
    failing = "spatialdl.slides.reading.reader.Slide.read_box"
    if kind == "tiles":
        pieces = TilePart(plan_tiles(slide, 256, 0.5).part(0, 3), False)
        failing = "spatialdl.data.shard_file.Chunks.write"
    part = PartRecord()
    with monkeypatch.context() as patch:
        patch.setattr(failing, full)
        with pytest.raises(OSError, match="disk full"):
            pieces.cut(slide, cutting(slide), tmp_path, part)
    assert part.shard is None
    assert not list(tmp_path.glob("*.h5"))
    pieces.cut(slide, cutting(slide), tmp_path, PartRecord())  # the same file again


PLAN = WholePlan(256, 256, (1100, 1301), 1.0)


def sample(plan: WholePlan, bands: list[RegionBand]) -> RegionSample:
    rows, cols = plan.size
    striped = len(bands) > 1
    return RegionSample(
        "ab", rows, cols, 0.5, striped, tuple(bands), 1, "train", "a", plan.x, plan.y
    )


@pytest.mark.parametrize(
    ("stripes", "size", "multiple", "rows"),
    [
        (2, 1, 256, [512, 588]),
        (9, 1, 512, [512, 512, 76]),
        (None, 2**30, 512, [1100]),
        (None, 3 * 2**20, 512, [512, 512, 76]),  # 7 MB
    ],
)
def test_as_many_bands_as_asked_or_as_shards_may_be_large(stripes, size, multiple, rows):
    bands = bands_of(PLAN, stripes, size, multiple)
    assert [band.rows for band in bands] == rows
    assert [band.row0 for band in bands] == [sum(rows[:k]) for k in range(len(rows))]
    assert [band.shard for band in bands] == [*range(len(rows))]


CLAM = {"patch_size", "patch_level", "downsample", "downsampled_level_dim", "level_dim"}
TRIDENT = {"patch_size", "patch_size_level0", "overlap", "level0_width", "level0_height"}
POWERS = {"level0_magnification", "target_magnification"}


def saved(
    folder: Path, path: Path, wanted: Wanted, overlap: int = 0, mpp: float | None = None
) -> tuple[TilePlan, list[ShardInfo]]:
    with Slide(path, mpp) as slide:
        plan = plan_tiles(slide, 64, wanted, overlap=overlap)
        infos = save_coords(folder, Path("/data/set"), slide, "ring", plan, plan.places)
    return plan, infos


def read(path: Path) -> tuple[dict[str, object], np.ndarray]:
    with h5py.File(path) as file:
        assert list(file) == ["coords"]
        return dict(file["coords"].attrs), file["coords"][:]


@pytest.mark.parametrize(
    ("wanted", "overlap"), [(Wanted(mpp=1.0), 16), (Wanted(mag=10), 0), (Wanted(mpp=0.8), 8)]
)
def test_both_describe_the_tiles(tmp_path, synthetic, wanted, overlap):
    plan, infos = saved(tmp_path, synthetic["ring"], wanted, overlap)
    files = ["coords/clam/patches/ring.h5", "coords/trident/patches/ring_patches.h5"]
    assert [info.file for info in infos] == files
    assert not any(shard_problem(tmp_path, info) for info in infos)
    for file, needed in zip(files, (CLAM, TRIDENT | POWERS), strict=True):
        said, coords = read(tmp_path / file)
        assert coords.dtype == np.int64
        assert coords.tolist() == [list(place) for place in plan.places]
        assert said.keys() >= needed | {"name"}
        assert said["name"] == "ring"
        where = f"/data/set/{Path(file).parent}"
        assert said["savetodir"] == said["save_path"] == where
    # of the last, as TRIDENT's WSIPatcher has it
    assert (said["level0_height"], said["level0_width"]) == (1600, 2304)
    source, target = 10 / said["level0_magnification"], 10 / said["target_magnification"]
    assert said["patch_size"] == plan.tile_size
    assert round(said["patch_size"] * target / source) == said["patch_size_level0"]
    assert said["patch_size_level0"] == round(plan.step)
    assert round(said["overlap"] * target / source) == round(plan.step - plan.stride)
    assert target == pytest.approx(wanted.mpp or 1.0, rel=0.01)


@pytest.mark.parametrize("wanted", [Wanted(mpp=0.5), Wanted(level=1), Wanted(mpp=1.6)])
def test_clam_reads_the_pixels_of_the_tiles(tmp_path, synthetic, wanted):
    path = synthetic["ring"]
    plan, _ = saved(tmp_path, path, wanted)
    said, coords = read(tmp_path / "coords/clam/patches/ring.h5")
    size, level = said["patch_size"], said["patch_level"]
    with Slide(path) as ours, openslide.open_slide(path) as wsi:
        assert tuple(said["level_dim"]) == wsi.level_dimensions[level]
        assert tuple(said["downsample"]) == (wsi.level_downsamples[level],) * 2
        if wanted.mpp == 1.6:  # between two levels it is told of the finer one
            assert level == wsi.get_best_level_for_downsample(3.2)
            assert size * wsi.level_downsamples[level] == pytest.approx(plan.step, rel=0.01)
            return
        for tile, coord in zip(cut_tiles(ours, plan.part(0, 3)), coords, strict=False):
            theirs = np.array(wsi.read_region(coord, level, (size, size)).convert("RGB"))
            assert (theirs == tile.image).all()


def test_without_a_resolution_powers_are_left_out(tmp_path):
    write_tiff(tmp_path / "a.tiff", [np.full((256, 256, 3), (200, 60, 160), np.uint8)])
    for places in (16, 0):
        with Slide(tmp_path / "a.tiff") as slide:
            plan = plan_tiles(slide, 64, Wanted(level=0), 0)
            save_coords(tmp_path, tmp_path, slide, "é", plan, plan.places[:places])
        for file in ("clam/patches/é.h5", "trident/patches/é_patches.h5"):
            said, coords = read(tmp_path / "coords" / file)
            assert (coords.shape, coords.dtype) == ((places, 2), np.int64)
            assert not POWERS & said.keys()
            assert said["patch_size_level0"] == 64


BLUE, RED, ORANGE, GREEN = (30, 80, 220), (220, 30, 30), (240, 150, 0), (0, 150, 60)


def test_tiles_and_outline_are_drawn(tmp_path, synthetic):
    with Slide(synthetic["ring"]) as slide:
        plan = plan_tiles(slide, 256, 0.5)
    path, overview = tmp_path / "a.png", tmp_path / "b.png"
    zoom = save_overview(overview, plan.thumbnail, plan.tissue)
    assert zoom == pytest.approx(1152 / 2304)
    places = plan.places
    save_picture(path, overview, zoom, (256, 256), places[2:], places[:1], places[1:2])
    pixels = np.asarray(Image.open(path)).astype(int)
    height, width, _ = plan.thumbnail.image.shape
    assert pixels.shape == (height, width, 3) == (800, 1152, 3)
    frame = 4 * 2 * 256 * zoom
    for colour, frames in [(BLUE, len(plan.places) - 2), (RED, 1), (ORANGE, 1)]:
        count = (pixels == colour).all(-1).sum()
        assert 0.8 * frames * frame < count < 1.1 * frames * frame
    assert (pixels == GREEN).all(-1).sum() > 100
    x, y = (int(n * zoom) + 1 for n in plan.places[0])
    assert pixels[y, x].tolist() == list(RED)


def test_annotations_are_drawn_and_small_pictures_enlarged(tmp_path, synthetic):
    with Slide(synthetic["ring"]) as slide:
        plan = plan_tiles(slide, 256, 0.5)
    inner, outer = (np.array([(a, a), (b, a), (b, b)], float) for a, b in [(900, 990), (288, 1440)])
    regions = [Region(outer, (inner,)), Region(outer * 9)]
    save_overview(tmp_path / "a.png", plan.thumbnail, plan.tissue, regions)
    purple = (np.asarray(Image.open(tmp_path / "a.png")) == (140, 0, 200)).all(-1)
    assert purple[144, 150:710].all()  # a pixel spans 2
    assert purple[150:710, 719:721].any(1).all()
    assert purple[450, 455:490].all()
    thumbnail = Thumbnail(np.zeros((30, 40, 3), np.uint8), np.zeros((30, 40), bool), 2.0)
    tissue = Tissue(thumbnail.missing, thumbnail.missing, 0.0)
    assert save_overview(tmp_path / "a.png", thumbnail, tissue) == pytest.approx(800 / 80)
    assert Image.open(tmp_path / "a.png").size == (800, 600)


def test_a_preview_shows_the_tiles_that_were_written_without_gaps(tmp_path):
    step, zoom = 37.3, 300 / 1003
    places = [(x * step, y * step) for y in range(27) for x in range(21)]
    image = np.full((300, 232, 3), 77, np.uint8)
    save_preview(tmp_path / "a.jpg", image, zoom, (step, step), places)
    assert (np.asarray(Image.open(tmp_path / "a.jpg")) == 77).all()
    # tiles smaller than a pixel, and beyond the picture; the others are missing
    save_preview(tmp_path / "a.jpg", image, 0.1, (4, 4), [(160, 160), (162, 160), (9000, 9000)])
    pixels = np.asarray(Image.open(tmp_path / "a.jpg")).astype(int)
    assert abs(pixels[16, 16] - 77).max() < 9
    assert abs(pixels[40:] - 208).max() == 0
