from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spatialdl.errors import SlideError
from spatialdl.slides.batch.labels import SlideLabel
from spatialdl.slides.batch.parts import Seen, cut_part, load_seen, native_tiles
from spatialdl.slides.batch.preview import Small
from spatialdl.slides.batch.record import PartRecord, load_part
from spatialdl.slides.reading.reader import Slide
from tests.slides.batch.cuttings import cutting
from tests.slides.batch.test_record import shard
from tests.slides.tiled_tiffs import jpeg, picture, write_tiff


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


@pytest.fixture
def slide(small: Path) -> Any:
    with Slide(small / "a.tiff") as slide:
        yield slide


def test_a_part_is_there_whole(tmp_path: Path, slide: Slide) -> None:
    folder = tmp_path / "00003"
    part = cut_part(slide, Pieces(), cutting(slide), folder, "key")
    assert part.seconds > 0
    assert load_part(folder, "key") == part
    assert sorted(path.name for path in folder.iterdir()) == [
        *("part.json", "shard-00000.h5", "small.npz")
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["00003"]


@pytest.mark.parametrize("error", [SlideError("damaged"), OSError("full"), KeyboardInterrupt()])
def test_or_not_at_all(tmp_path: Path, slide: Slide, error: BaseException) -> None:
    with pytest.raises(type(error)):
        cut_part(slide, Pieces(error), cutting(slide), tmp_path / "00003", "key")
    assert list(tmp_path.iterdir()) == []


def test_a_part_takes_the_place_of_an_older_one(tmp_path: Path, slide: Slide) -> None:
    folder = tmp_path / "00003"
    cut_part(slide, Pieces(), cutting(slide), folder, "old key")
    with pytest.raises(SlideError):
        cut_part(slide, Pieces(SlideError()), cutting(slide), folder, "key")
    assert load_part(folder, "old key") is not None
    cut_part(slide, Pieces(), cutting(slide), folder, "key")
    assert load_part(folder, "old key") is None
    assert load_part(folder, "key") is not None


@pytest.mark.parametrize("pieces", [[], [seen(3, 5)], [seen(3, 5), seen(1, 1), seen(7, 2)]])
def test_what_was_made_small_comes_back(tmp_path: Path, slide: Slide, pieces: list[Seen]) -> None:
    cut_part(slide, Pieces(seen=pieces), cutting(slide), tmp_path / "0", "key")
    found = load_seen(tmp_path / "0")
    assert len(found) == len(pieces)
    for ours, given in zip(found, pieces, strict=True):
        assert ours[:2] == given[:2]
        assert ours.small[1:] == given.small[1:]
        assert (ours.small.pixels == given.small.pixels).all()


def test_the_label_of_a_slide_goes_before_that_of_a_region(slide: Slide) -> None:
    plain = cutting(slide, classes=["x", "y"])
    assert [plain.class_index(name) for name in ("x", "y", None)] == [0, 1, None]
    assert plain.split is None
    labelled = cutting(slide, classes=["x", "y"], label=SlideLabel("y", "val"))
    assert [labelled.class_index(name) for name in ("x", None)] == [1, 1]
    assert labelled.split == "val"
    split = cutting(slide, classes=["x", "y"], label=SlideLabel("", "val"))
    assert [split.class_index(name) for name in ("x", None)] == [0, None]


def test_native_tiles_have_colours(tmp_path: Path, slide: Slide) -> None:
    assert native_tiles(slide, 1.0).chunk == (256, 256)
    with pytest.raises(SlideError, match=r"no JPEG tiles at 1\.5 level-0 .*or --codec jpeg"):
        native_tiles(slide, 1.5)
    grey = [picture(512, 512)[..., 0]]
    path = write_tiff(tmp_path / "a.tiff", grey, jpeg, photometric="minisblack")
    with Slide(path) as other, pytest.raises(SlideError, match="has grey JPEG tiles at 1 level-0"):
        native_tiles(other, 1.0)
