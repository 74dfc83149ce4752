from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from spatialdl.data.jpeg import decode
from spatialdl.data.region_shard import region_path
from spatialdl.data.samples import RegionBand, RegionSample
from spatialdl.errors import SlideError
from spatialdl.slides.batch.band_part import BandPart, bands_of, native_region
from spatialdl.slides.batch.executors import SerialExecutor
from spatialdl.slides.batch.record import PartRecord, holds
from spatialdl.slides.cutting.whole import WholePlan
from spatialdl.slides.reading.reader import Slide
from tests.slides.batch.cuttings import cutting

PLAN = WholePlan(256, 256, (1100, 1301), 1.0)


@pytest.fixture
def slide(synthetic: dict[str, Path]) -> Iterator[Slide]:
    with Slide(synthetic["ring"]) as slide:
        yield slide


def sample(plan: WholePlan, bands: list[RegionBand]) -> RegionSample:
    rows, cols = plan.size
    striped = len(bands) > 1
    return RegionSample(
        "ab", rows, cols, 0.5, striped, tuple(bands), 1, "train", "a", plan.x, plan.y
    )


def test_bands_together_are_the_region(tmp_path: Path, slide: Slide) -> None:
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


def test_pieces_made_small_lie_below_each_other(tmp_path: Path, slide: Slide) -> None:
    plan = WholePlan(256, 256, (550, 650), 2.0)
    region, part = sample(plan, bands_of(plan, 1, 1, 512)), PartRecord()
    seen = BandPart(plan, region, 0).cut(slide, cutting(slide), tmp_path, part)
    assert [(s.x, s.y, s.small.rows, s.small.cols) for s in seen] == [
        (256, 256, 1024, 1300),
        (256, 1280, 76, 1300),
    ]


def test_native_bands_are_the_tiles_of_the_file(tmp_path: Path, slide: Slide) -> None:
    region, part = sample(PLAN, bands_of(PLAN, 3, 1, 256)), PartRecord()
    piece = BandPart(PLAN, region, 1)
    # their preview is of the whole slide
    assert piece.cut(slide, cutting(slide, codec="jpeg-native"), tmp_path, part) == []
    assert part.taken == []
    assert part.shard is not None
    grid = slide.jpeg_grid(1.0)
    assert grid is not None
    band = region.bands[1]
    assert band.row0 == 256
    with h5py.File(tmp_path / part.shard.file) as file:
        image = file[region_path(region, 1)]
        assert image.shape == (band.rows, 1301, 3)
        _, stream = image.id.read_direct_chunk((256, 512, 0))
        assert stream == grid.encoded(1 + 1 + 1, 1 + 2)
        theirs = slide.read_scaled(256 + 512, 256 + 256 + 256, (256, 256), 1.0)
        assert np.abs(decode(stream, (256, 256, 3)).astype(int) - theirs).max() <= 1


def test_a_native_region_begins_with_a_tile(slide: Slide) -> None:
    assert native_region(slide, PLAN).shape == (1100, 1301, 3)
    with pytest.raises(
        SlideError, match=r"region at x=257, y=256 is not aligned with its JPEG tiles"
    ):
        native_region(slide, WholePlan(257, 256, (100, 100), 1.0))


def test_what_cannot_be_read_leaves_no_shard(
    tmp_path: Path, slide: Slide, monkeypatch: pytest.MonkeyPatch
) -> None:
    region, part = sample(PLAN, bands_of(PLAN, 1, 1, 512)), PartRecord()

    def damaged(*_: object) -> None:
        raise SlideError("damaged")

    monkeypatch.setattr(Slide, "read_rows", damaged)
    with pytest.raises(SlideError, match="damaged"):
        BandPart(PLAN, region, 0).cut(slide, cutting(slide), tmp_path, part)
    assert (part.shard, part.taken) == (None, [])
    assert not list(tmp_path.glob("*.h5"))


@pytest.mark.parametrize(
    ("stripes", "size", "multiple", "rows"),
    [
        (1, 1, 512, [1100]),
        (2, 1, 512, [512, 588]),
        (3, 1, 512, [512, 512, 76]),
        (9, 1, 512, [512, 512, 76]),
        (2, 1, 256, [512, 588]),
        (None, 2**30, 512, [1100]),
        (None, 3 * 2**20, 512, [512, 512, 76]),  # 7 MB
    ],
)
def test_as_many_bands_as_asked_or_as_shards_may_be_large(
    stripes: int | None, size: int, multiple: int, rows: list[int]
) -> None:
    bands = bands_of(PLAN, stripes, size, multiple)
    assert [band.rows for band in bands] == rows
    assert [band.row0 for band in bands] == [sum(rows[:k]) for k in range(len(rows))]
    assert [band.shard for band in bands] == [*range(len(rows))]
