from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from spatialdl.data.jpeg import decode
from spatialdl.errors import SlideError
from spatialdl.slides.batch import tile_part
from spatialdl.slides.batch.executors import SerialExecutor
from spatialdl.slides.batch.labels import SlideLabel
from spatialdl.slides.batch.record import PartRecord, holds
from spatialdl.slides.batch.tile_part import TilePart, native_grid
from spatialdl.slides.cutting.tiling import CutTile, plan_tiles
from spatialdl.slides.reading.reader import Slide
from tests.slides.batch.cuttings import cutting


@pytest.fixture
def slide(synthetic: dict[str, Path]) -> Iterator[Slide]:
    with Slide(synthetic["ring"]) as slide:
        yield slide


def test_tiles_are_written_in_order_and_told(tmp_path: Path, slide: Slide) -> None:
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


def test_what_filters_drop_is_noted(tmp_path: Path, slide: Slide) -> None:
    plan, part = plan_tiles(slide, 64, 0.5, 0.0).part(0, 100), PartRecord()
    how = cutting(slide, "--filter", "white=0.4")
    seen = TilePart(plan, True).cut(slide, how, tmp_path, part)
    assert list(part.dropped) == ["white"]
    taken = [(x, y) for x, y, _ in part.taken]
    assert sorted(taken + part.dropped["white"]) == sorted(plan.places)
    assert len(part.dropped["white"]) > 5
    assert len(seen) == len(taken) > 5


def test_classes_of_regions_are_indices(tmp_path: Path, slide: Slide) -> None:
    plan = replace(plan_tiles(slide, 256, 0.5).part(0, 3), labels=["b", None, "a"])
    part = PartRecord()
    TilePart(plan, False).cut(slide, cutting(slide, classes=["a", "b"]), tmp_path, part)
    assert [label for _, _, label in part.taken] == [1, None, 0]


def test_tiles_that_cannot_be_read_are_left_out(
    tmp_path: Path, slide: Slide, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, part = plan_tiles(slide, 256, 0.5).part(0, 4), PartRecord()
    cut_tiles = tile_part.cut_tiles

    def damaged(*given: Any, read: bool) -> Iterator[CutTile]:
        for number, tile in enumerate(cut_tiles(*given, read=read)):
            if number == 2:
                yield tile._replace(image=None, bare=True)  # has too little tissue after all
            else:
                yield tile._replace(image=None, problem=f"no {number}") if number % 2 else tile

    monkeypatch.setattr(tile_part, "cut_tiles", damaged)
    TilePart(plan, False).cut(slide, cutting(slide), tmp_path, part)
    assert part.unreadable == [plan.places[1], plan.places[3]]
    assert (part.problem, part.bare) == ("no 3", 1)
    assert [(x, y) for x, y, _ in part.taken] == [plan.places[0]]
    assert part.shard is not None
    assert part.shard.samples == 1


def test_no_tile_is_no_shard(tmp_path: Path, slide: Slide) -> None:
    plan, part = plan_tiles(slide, 256, 0.5).part(0, 3), PartRecord()
    how = cutting(slide, "--filter", "white=0")
    assert TilePart(plan, True).cut(slide, how, tmp_path, part) == []
    assert (part.shard, len(part.dropped["white"])) == (None, 3)
    assert list(tmp_path.iterdir()) == []


def test_places_alone_are_no_shard_either(
    tmp_path: Path, slide: Slide, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, cut_tiles = [], tile_part.cut_tiles

    def noted(*given: Any, read: bool) -> Iterator[CutTile]:
        asked.append(read)
        return cut_tiles(*given, read=read)

    monkeypatch.setattr(tile_part, "cut_tiles", noted)
    plan = plan_tiles(slide, 256, 0.5).part(0, 3)
    for filtered in (False, True):  # filters look at all pixels
        part = PartRecord()
        seen = TilePart(plan, filtered).cut(slide, cutting(slide, codec=None), tmp_path, part)
        assert part.shard is None
        assert part.taken == [(x, y, None) for x, y in plan.places]
        assert (len(seen), asked.pop()) == (3 * filtered, filtered)
    assert list(tmp_path.iterdir()) == []


def test_native_tiles_are_those_of_the_file(tmp_path: Path, slide: Slide) -> None:
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


def test_a_native_grid_has_to_fit(slide: Slide) -> None:
    for side, overlap in ((128, 0), (512, 128), (300, 44)):
        with pytest.raises(SlideError, match=rf"256 x 256; .*--tile-size {side} and --overlap"):
            native_grid(slide, plan_tiles(slide, side, 0.5, overlap=overlap))
    with pytest.raises(SlideError, match=r"no JPEG tiles at 1\.6 level-0"):
        native_grid(slide, plan_tiles(slide, 256, 0.8))
    assert native_grid(slide, plan_tiles(slide, 512, 0.5, overlap=256)).chunk == (256, 256)


def test_what_cannot_be_written_leaves_no_shard_open(
    tmp_path: Path, slide: Slide, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("disk full")

    plan, part = plan_tiles(slide, 256, 0.5).part(0, 3), PartRecord()
    with monkeypatch.context() as patch:
        patch.setattr("spatialdl.data.chunks.Chunks.write", full)
        with pytest.raises(OSError, match="disk full"):
            TilePart(plan, False).cut(slide, cutting(slide), tmp_path, part)
    assert not list(tmp_path.glob("*.h5"))
    TilePart(plan, False).cut(slide, cutting(slide), tmp_path, PartRecord())  # the same file again
