"""Parts of a slide as files: tiles, bands of a region, coordinates for other tools.

Coordinates are read back by the rules of the tools that they are for. CLAM: `Whole_Slide_Bag_FP`
(dataset_modules/dataset_h5.py), `extract_features_fp.py`. TRIDENT: `read_coords`, `coords_to_h5`
(trident/IO.py), `WSIPatcher` (trident/wsi_objects/WSIPatcher.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import openslide
import pytest

from spatialdl.data.jpeg import decode
from spatialdl.data.region_shard import region_path
from spatialdl.data.samples import RegionBand, RegionSample, ShardInfo
from spatialdl.errors import SlideError
from spatialdl.slides.batch import tile_part
from spatialdl.slides.batch.band_part import BandPart, bands_of, native_region
from spatialdl.slides.batch.coords import save_coords
from spatialdl.slides.batch.executors import SerialExecutor
from spatialdl.slides.batch.labels import SlideLabel
from spatialdl.slides.batch.parts import Seen, cut_part, load_seen, native_tiles
from spatialdl.slides.batch.preview import Small
from spatialdl.slides.batch.record import PartRecord, holds, load_part
from spatialdl.slides.batch.tile_part import TilePart, native_grid
from spatialdl.slides.cutting.tiling import CutTile, TilePlan, cut_tiles, plan_tiles
from spatialdl.slides.cutting.whole import WholePlan
from spatialdl.slides.reading.reader import Slide
from spatialdl.slides.reading.wanted import Wanted
from tests.slides.batch.batches import cutting, inside, shard
from tests.slides.tiled_tiffs import jpeg, picture, write_tiff


@pytest.fixture
def slide(synthetic: dict[str, Path]) -> Iterator[Slide]:
    with Slide(synthetic["ring"]) as slide:
        yield slide


class Pieces:
    """Fills a shard, or raises what it is told to."""

    count = 2

    def __init__(self, error: BaseException | None = None, seen: list[Seen] | None = None) -> None:
        self.error = error
        self.seen = seen or []

    def cut(self, slide: Slide, how: Any, folder: Path, part: PartRecord) -> list[Seen]:
        part.shard = shard(folder)
        part.taken.append((1, 2, None))
        if self.error:
            raise self.error
        return self.seen


def seen(rows: int, cols: int) -> Seen:
    pixels = np.random.default_rng(rows).integers(0, 256, (rows, cols, 3), np.uint8)
    return Seen(1.5, 2.0, Small(pixels, rows * 2.5, cols * 2.5))


@pytest.mark.parametrize("error", [SlideError("damaged"), OSError("full"), KeyboardInterrupt()])
def test_a_part_is_there_whole_or_not_at_all(tmp_path, slide, error):
    folder, how = tmp_path / "00003", cutting(slide)
    with pytest.raises(type(error)):
        cut_part(slide, Pieces(error), how, folder, "key")
    assert inside(tmp_path) == []
    part = cut_part(slide, Pieces(), how, folder, "old key")
    assert part.seconds > 0
    with pytest.raises(type(error)):
        cut_part(slide, Pieces(error), how, folder, "key")
    assert load_part(folder, "old key") == part
    cut_part(slide, Pieces(), how, folder, "key")
    assert load_part(folder, "old key") is None
    assert load_part(folder, "key") is not None
    assert inside(folder) == ["part.json", "shard-00000.h5", "small.npz"]
    assert inside(tmp_path) == ["00003"]


def test_what_was_made_small_comes_back(tmp_path, slide):
    for pieces in ([], [seen(3, 5), seen(1, 1), seen(7, 2)]):
        cut_part(slide, Pieces(seen=pieces), cutting(slide), tmp_path / "0", "key")
        found = load_seen(tmp_path / "0")
        assert len(found) == len(pieces)
        for ours, given in zip(found, pieces, strict=True):
            assert (ours[:2], ours.small[1:]) == (given[:2], given.small[1:])
            assert (ours.small.pixels == given.small.pixels).all()


@pytest.mark.parametrize(
    ("label", "found", "split"),
    [
        (None, [0, 1, None], None),
        (SlideLabel("y", "val"), [1, 1, 1], "val"),  # goes before that of a region
        (SlideLabel("", "val"), [0, 1, None], "val"),
    ],
)
def test_the_label_of_a_slide_goes_before_that_of_a_region(slide, label, found, split):
    how = cutting(slide, classes=["x", "y"], label=label)
    assert [how.class_index(name) for name in ("x", "y", None)] == found
    assert how.split == split


def test_tiles_are_written_in_order_and_told(tmp_path, slide):
    plan, counts = plan_tiles(slide, 64, 0.5).part(3, 40), []
    label, part, crew = SlideLabel("y", "val"), PartRecord(), SerialExecutor(counts.append)
    pieces = TilePart(plan, False)
    how = cutting(slide, label=label, classes=["x", "y"])
    seen = crew.submit(lambda: pieces.cut(slide, how, tmp_path, part)).result()
    assert pieces.count == 37
    assert counts == [16, 32, 37]
    assert part.taken == [(x, y, 1) for x, y in plan.places]
    assert part.shard is not None
    assert holds(tmp_path, part.shard)
    assert part.shard.samples == 37
    with h5py.File(tmp_path / part.shard.file) as file:
        assert file["coords"][:].tolist() == [list(place) for place in plan.places]
        for number in (0, 36):
            image = slide.read_scaled(*plan.places[number], (64, 64), 1.0)
            assert (file["images"][number] == image).all()
    assert [(x, y) for x, y, _ in seen] == plan.places
    assert seen[0].small.pixels.shape == (57, 57, 3)  # 2304 pixels wide, the preview 2048


def test_tiles_that_filters_drop_or_that_cannot_be_read_are_noted(tmp_path, slide, monkeypatch):
    plan, part = plan_tiles(slide, 64, 0.5, 0.0).part(0, 100), PartRecord()
    how = cutting(slide, "--filter", "white=0.4")
    seen = TilePart(plan, True).cut(slide, how, tmp_path, part)
    assert list(part.dropped) == ["white"]
    taken = [(x, y) for x, y, _ in part.taken]
    assert sorted(taken + part.dropped["white"]) == sorted(plan.places)
    assert len(part.dropped["white"]) > 5
    assert len(seen) == len(taken) > 5

    def damaged(*given: Any, read: bool) -> Iterator[CutTile]:
        no, bare, problem, good = cut_tiles(*given, read=read)
        yield no._replace(image=None, problem="no 0")
        yield bare._replace(image=None, bare=True)  # has too little tissue after all
        yield problem._replace(image=None, problem="no 2")
        yield good

    plan, part = plan_tiles(slide, 256, 0.5).part(0, 4), PartRecord()
    with monkeypatch.context() as patch:
        patch.setattr(tile_part, "cut_tiles", damaged)
        TilePart(plan, False).cut(slide, cutting(slide), tmp_path, part)
    assert part.unreadable == [plan.places[0], plan.places[2]]
    assert (part.problem, part.bare) == ("no 2", 1)
    assert [(x, y) for x, y, _ in part.taken] == plan.places[3:]
    assert part.shard is not None
    assert part.shard.samples == 1


def test_native_tiles_are_those_of_the_file(tmp_path, slide):
    plan, part = plan_tiles(slide, 512, 0.5, beyond=False).part(0, 2), PartRecord()
    TilePart(plan, False).cut(slide, cutting(slide, codec="jpeg-native"), tmp_path, part)
    grid = slide.jpeg_grid(1.0)
    assert grid is not None
    assert part.shard is not None
    with h5py.File(tmp_path / part.shard.file) as file:
        images = file["images"]
        assert images.chunks == (1, 256, 256, 3)
        for number, (x, y) in enumerate(plan.places):
            _, stream = images.id.read_direct_chunk((number, 256, 0, 0))
            assert stream == grid.encoded(y // 256 + 1, x // 256)
            assert (
                np.abs(
                    decode(stream, (256, 256, 3)).astype(int)
                    - slide.read_scaled(x, y + 256, (256, 256), 1.0)
                ).max()
                <= 1
            )


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
    failing = "spatialdl.slides.reading.reader.Slide.read_rows"
    if kind == "tiles":
        pieces = TilePart(plan_tiles(slide, 256, 0.5).part(0, 3), False)
        failing = "spatialdl.data.chunks.Chunks.write"
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


def test_bands_together_are_the_region(tmp_path, slide):
    region = sample(PLAN, bands_of(PLAN, 2, 1, 512))
    rows, counts, taken = [], [], []
    for number in range(2):
        folder, part = tmp_path / str(number), PartRecord()
        folder.mkdir()
        piece, crew = BandPart(PLAN, region, number), SerialExecutor(counts.append)
        seen = crew.submit(lambda p=piece, f=folder, q=part: p.cut(slide, cutting(slide), f, q))
        assert crew.counted() == piece.count == len(seen.result())
        assert part.shard is not None
        assert holds(folder, part.shard)
        with h5py.File(folder / part.shard.file) as file:
            assert dict(file["regions/ab"].attrs)["width"] == 1301
            rows.append(file[region_path(region, number)][:])
            assert file[region_path(region, number)].attrs["row0"] == number * 512
        taken += part.taken
    assert [len(band) for band in rows] == [512, 588]
    assert (np.concatenate(rows) == slide.read_scaled(256, 256, (1100, 1301), 1.0)).all()
    assert taken == [(256, 256, 1)]  # it is one sample


def test_native_bands_are_the_tiles_of_the_file(tmp_path, slide):
    region, part = sample(PLAN, bands_of(PLAN, 3, 1, 256)), PartRecord()
    how = cutting(slide, codec="jpeg-native")
    # their preview is of the whole slide
    assert BandPart(PLAN, region, 1).cut(slide, how, tmp_path, part) == []
    assert part.taken == []
    assert part.shard is not None
    grid = slide.jpeg_grid(1.0)
    assert grid is not None
    assert region.bands[1].row0 == 256
    with h5py.File(tmp_path / part.shard.file) as file:
        image = file[region_path(region, 1)]
        assert image.shape == (region.bands[1].rows, 1301, 3)
        _, stream = image.id.read_direct_chunk((256, 512, 0))
        assert stream == grid.encoded(1 + 1 + 1, 1 + 2)


@pytest.mark.parametrize(
    ("stripes", "size", "multiple", "rows"),
    [
        (1, 1, 512, [1100]),
        (2, 1, 256, [512, 588]),
        (3, 1, 512, [512, 512, 76]),
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


def test_both_describe_the_tiles(tmp_path, synthetic):
    plan, infos = saved(tmp_path, synthetic["ring"], Wanted(mpp=1.0), overlap=16)
    files = ["coords/clam/patches/ring.h5", "coords/trident/patches/ring_patches.h5"]
    assert [info.file for info in infos] == files
    assert all(holds(tmp_path, info) for info in infos)
    for file, needed in zip(files, (CLAM, TRIDENT | POWERS), strict=True):
        said, coords = read(tmp_path / file)
        assert coords.dtype == np.int64
        assert coords.tolist() == [list(place) for place in plan.places]
        assert said.keys() >= needed | {"name"}
        assert said["name"] == "ring"
        where = f"/data/set/{Path(file).parent}"
        assert said["savetodir"] == said["save_path"] == where


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


@pytest.mark.parametrize(
    ("wanted", "overlap"), [(Wanted(mpp=1.0), 16), (Wanted(mag=10), 0), (Wanted(mpp=0.8), 8)]
)
def test_trident_finds_the_span_of_the_tiles(tmp_path, synthetic, wanted, overlap):
    plan, _ = saved(tmp_path, synthetic["ring"], wanted, overlap)
    said, _ = read(tmp_path / "coords/trident/patches/ring_patches.h5")
    assert (said["level0_height"], said["level0_width"]) == (1600, 2304)
    # as WSIPatcher has it
    source, target = 10 / said["level0_magnification"], 10 / said["target_magnification"]
    assert said["patch_size"] == plan.tile_size
    assert round(said["patch_size"] * target / source) == said["patch_size_level0"]
    assert said["patch_size_level0"] == round(plan.step)
    assert round(said["overlap"] * target / source) == round(plan.step - plan.stride)
    if wanted.mpp:
        assert target == pytest.approx(wanted.mpp, rel=0.01)


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
