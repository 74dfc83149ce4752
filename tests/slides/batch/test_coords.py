"""Read back by the rules of the tools that the files are for.

CLAM: `Whole_Slide_Bag_FP` (dataset_modules/dataset_h5.py), `extract_features_fp.py`. TRIDENT:
`read_coords`, `coords_to_h5` (trident/IO.py), `WSIPatcher` (trident/wsi_objects/WSIPatcher.py).
"""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import openslide
import pytest

from spatialdl.data.samples import ShardInfo
from spatialdl.slides.batch.coords import save_coords
from spatialdl.slides.batch.record import holds
from spatialdl.slides.cutting.tiling import TilePlan, cut_tiles, plan_tiles
from spatialdl.slides.reading.reader import Slide
from spatialdl.slides.reading.wanted import Wanted

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


def test_both_describe_the_tiles(tmp_path: Path, synthetic: dict[str, Path]) -> None:
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


@pytest.mark.parametrize("wanted", [Wanted(mpp=0.5), Wanted(mpp=1.0), Wanted(level=1)])
def test_clam_reads_the_pixels_of_the_tiles(
    tmp_path: Path, synthetic: dict[str, Path], wanted: Wanted
) -> None:
    path = synthetic["ring"]
    plan, _ = saved(tmp_path, path, wanted)
    said, coords = read(tmp_path / "coords/clam/patches/ring.h5")
    size, level = said["patch_size"], said["patch_level"]
    with Slide(path) as ours, openslide.open_slide(path) as wsi:
        assert tuple(said["level_dim"]) == wsi.level_dimensions[level]
        assert tuple(said["downsample"]) == (wsi.level_downsamples[level],) * 2
        for tile, coord in zip(cut_tiles(ours, plan.part(0, 3)), coords, strict=False):
            theirs = np.array(wsi.read_region(coord, level, (size, size)).convert("RGB"))
            assert (theirs == tile.image).all()


@pytest.mark.parametrize(
    ("wanted", "overlap"),
    [(Wanted(mpp=0.5), 0), (Wanted(mpp=1.0), 16), (Wanted(mag=10), 0), (Wanted(mpp=0.8), 8)],
)
def test_trident_finds_the_span_of_the_tiles(
    tmp_path: Path, synthetic: dict[str, Path], wanted: Wanted, overlap: int
) -> None:
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


def test_between_two_levels_clam_is_told_of_the_finer_one(
    tmp_path: Path, synthetic: dict[str, Path]
) -> None:
    plan, _ = saved(tmp_path, synthetic["ring"], Wanted(mpp=1.6))
    said, _ = read(tmp_path / "coords/clam/patches/ring.h5")
    with openslide.open_slide(synthetic["ring"]) as wsi:
        assert said["patch_level"] == wsi.get_best_level_for_downsample(3.2)
        spans = said["patch_size"] * wsi.level_downsamples[said["patch_level"]]
    assert spans == pytest.approx(plan.step, rel=0.01)
    assert said["patch_size"] > plan.tile_size


def test_without_a_resolution_powers_are_left_out(tmp_path: Path) -> None:
    import tifffile

    image = np.full((256, 256, 3), (200, 60, 160), np.uint8)
    tifffile.imwrite(tmp_path / "a.tiff", image, tile=(256, 256))
    with Slide(tmp_path / "a.tiff") as slide:
        plan = plan_tiles(slide, 64, Wanted(level=0), 0)
        save_coords(tmp_path, tmp_path, slide, "a", plan, plan.places)
    for file in ("clam/patches/a.h5", "trident/patches/a_patches.h5"):
        said, coords = read(tmp_path / "coords" / file)
        assert len(coords) == 16
        assert not POWERS & said.keys()
        assert said["patch_size_level0"] == 64


def test_none_are_none(tmp_path: Path, synthetic: dict[str, Path]) -> None:
    with Slide(synthetic["ring"]) as slide:
        plan = plan_tiles(slide, 64, 0.5)
        save_coords(tmp_path, tmp_path, slide, "é", plan, [])
    _, coords = read(tmp_path / "coords/clam/patches/é.h5")
    assert (coords.shape, coords.dtype) == ((0, 2), np.int64)
