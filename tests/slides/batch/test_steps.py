from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from spatialdl.errors import SlideError
from spatialdl.slides.batch.choosing import Choosing
from spatialdl.slides.batch.labels import SlideLabel
from spatialdl.slides.batch.options import parsed, settings_of
from spatialdl.slides.batch.record import PartRecord, SlideRecord
from spatialdl.slides.batch.steps import BatchRequest, Task, cut_slide, finish_slide, plan_slide
from spatialdl.slides.cutting.tiling import plan_tiles
from spatialdl.slides.reading.reader import Slide
from tests.slides.batch.batches import COORDS, TILES, WHOLE
from tests.slides.batch.test_resume import batch as finished_batch

pytestmark = pytest.mark.usefixtures("quick")


def batch(
    folder: Path | None, path: Path, how: list[str], classes: tuple[str, ...] = ()
) -> BatchRequest:
    options = parsed([str(path), "--out", "set", *how])
    settings = settings_of(options, classes)
    choosing = Choosing(options, [path])
    return BatchRequest(options, choosing, settings, [*classes], folder, Path("/data/set"), None)


def task(path: Path, label: SlideLabel | None = None) -> Task:
    return Task(path, path.stem, label, path.stat().st_size)


def done(asked: BatchRequest, work: Task) -> tuple[SlideRecord, list[PartRecord]]:
    planned = plan_slide(asked, work)
    parts = [
        cut_slide(asked, work, planned.outline(), k, piece) for k, piece in enumerate(planned.parts)
    ]
    finish_slide(asked, work, planned.outline(), parts)
    assert asked.folder is not None
    record = SlideRecord.load(asked.folder, work.name)
    assert record is not None
    return record, parts


def test_tiles_are_planned_in_parts_as_large_as_shards(tmp_path: Path, small: Path) -> None:
    planned = plan_slide(batch(tmp_path, small, TILES), task(small / "a.tiff"))
    with Slide(small / "a.tiff") as slide:
        plan = plan_tiles(slide, 64, 0.5)
    assert [part.count for part in planned.parts] == [4, 4, 4]
    assert [place for part in planned.parts for place in part.plan.places] == plan.places
    assert (planned.pieces, planned.bytes) == (12, 12 * 64 * 64 * 3)
    assert (planned.report.in_grid, planned.report.with_tissue) == (20, 12)
    assert (tmp_path / "parts" / "a" / "overview.bmp").exists()
    # what is sent to who cuts a part is small
    assert len(pickle.dumps(planned.outline())) < 5_000
    assert len(pickle.dumps(planned.parts[0])) < 5_000


def test_to_count_nothing_is_written(tmp_path: Path, small: Path) -> None:
    planned = plan_slide(batch(None, small, TILES), task(small / "a.tiff"))
    assert planned.pieces == 12
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_is_done_is_not_cut_again(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, work = batch(tmp_path, small, TILES), task(small / "a.tiff")
    planned = plan_slide(asked, work)
    part = cut_slide(asked, work, planned, 1, planned.parts[1])
    with monkeypatch.context() as patch:
        patch.delattr("spatialdl.slides.batch.steps.cut_part")
        assert cut_slide(asked, work, planned, 1, planned.parts[1]) == part
    # of another key it is
    other = cut_slide(asked, work, replace(planned, key="other"), 1, planned.parts[1])
    assert replace(other, seconds=0) == replace(part, seconds=0)


def test_a_finished_slide_is_recorded(tmp_path: Path, small: Path) -> None:
    label = SlideLabel("y", "val")
    asked, work = batch(tmp_path, small, TILES, ("x", "y")), task(small / "a.tiff", label)
    record, parts = done(asked, work)
    assert record.is_whole(tmp_path)
    assert [part.shard and part.shard.file for part in record.parts] == [
        f"parts/a/0000{k}/shard-00000.h5" for k in range(3)
    ]
    assert [len(part.taken) for part in record.parts] == [4, 4, 4]
    assert {at[2] for part in record.parts for at in part.taken} == {1}
    assert (record.split, record.region, record.files) == ("val", None, [])
    assert record.source == str((small / "a.tiff").resolve())
    assert (record.report["written"], record.report["file"]) == (12, str(small / "a.tiff"))
    assert record.report["seconds"] >= sum(part.seconds for part in parts)
    pictures = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert pictures == ["a.png", "a.stitched.jpg"]
    # and known again
    planned = plan_slide(asked, work)
    assert (planned.plan, planned.parts) == (None, [])
    assert planned.report.to_json() == record.report


def test_a_region_is_one_sample(tmp_path: Path, synthetic: dict[str, Path]) -> None:
    path = synthetic["ring"]
    asked = batch(tmp_path, path, [*WHOLE, "--stripes", "3"], ("x",))
    record, _ = done(asked, task(path, SlideLabel("x", "train")))
    region = record.region
    assert region is not None
    assert (region.mpp, region.label, region.split, region.slide) == (0.5, 0, "train", "ring")
    assert region.striped
    assert len(region.bands) == len(record.parts) == 3
    assert [len(part.taken) for part in record.parts] == [1, 0, 0]
    assert (record.report["in_grid"], record.report["written"]) == (1, 1)
    assert record.is_whole(tmp_path)


def test_coordinates_are_files_of_the_slide(tmp_path: Path, small: Path) -> None:
    asked = batch(tmp_path, small, COORDS)
    record, parts = done(asked, task(small / "a.tiff"))
    assert [part.shard for part in parts] == [None]
    assert record.is_whole(tmp_path)
    for file in record.files:
        with h5py.File(tmp_path / file.file) as opened:
            assert len(opened["coords"]) == 12
            assert opened["coords"].attrs["save_path"].startswith("/data/set/coords/")


def test_where_tiles_went_is_summed_up(tmp_path: Path, small: Path) -> None:
    asked, work = batch(tmp_path, small, COORDS), task(small / "a.tiff")
    planned = plan_slide(asked, work)
    parts = [cut_slide(asked, work, planned, number, planned.parts[0]) for number in range(2)]
    places = [(x, y) for x, y, _ in parts[0].taken]
    parts[0] = PartRecord(None, parts[0].taken[:4], {"pen": places[4:6]}, places[6:9], "no 8", 3)
    parts[1] = PartRecord(None, [], {"pen": [], "blur": places[9:10]})
    report = finish_slide(asked, work, planned, parts)
    assert (report.with_tissue, report.written, report.unreadable) == (12 - 3, 4, 3)
    assert (report.pen, report.blur, report.dropped) == (2, 1, 3)
    assert (report.status, report.note) == ("damaged", "no 8")


def test_why_nothing_is_left(tmp_path: Path, small: Path) -> None:
    asked, work = batch(tmp_path, small, [*TILES, "--filter", "blur=0"]), task(small / "a.tiff")
    record, parts = done(asked, work)
    assert record.report["note"] == "filters dropped every tile"
    assert not (tmp_path / "pictures" / "a.stitched.jpg").exists()
    assert [part.shard for part in parts] == [None] * 3
    large = ["--tile-size", "256", "--mpp", "0.5", "--min-tissue", "1"]
    asked = batch(tmp_path, small, large)
    record, parts = done(asked, task(small / "b.tiff"))
    assert parts == []
    assert record.report["note"].startswith("none of 1 tiles has 100% tissue, the best has")


def test_a_slide_of_an_earlier_batch_is_taken_over_or_refused(tmp_path: Path, small: Path) -> None:
    before, folder = tmp_path / "set", tmp_path / "new"
    folder.mkdir()
    before.mkdir()
    record, _ = done(batch(before, small, TILES), task(small / "a.tiff"))
    asked = replace(batch(folder, small, TILES), before=before)
    planned = plan_slide(asked, task(small / "a.tiff"))
    assert (planned.plan, planned.key) == (None, record.key)
    assert SlideRecord.load(folder, "a") is not None
    finished_batch(tmp_path / "other", "b")
    asked = replace(asked, before=tmp_path / "other")
    with pytest.raises(SlideError, match="another slide named b"):
        plan_slide(asked, task(small / "b.tiff"))


def test_a_resolution_is_that_of_the_labels_else_of_the_option(small: Path) -> None:
    asked = batch(None, small, [*TILES, "--slide-mpp", "0.25"])
    assert plan_slide(asked, task(small / "a.tiff")).report.mpp == 0.25
    label = SlideLabel("x", "train", 0.2)
    assert plan_slide(asked, task(small / "a.tiff", label)).report.mpp == 0.2


def test_what_is_odd_about_the_tissue_of_a_slide_is_remarked(tmp_path: Path) -> None:
    def remark(colour: tuple[int, int, int], cols: slice, *more: str) -> str:
        image = np.full((300, 300, 3), 245, np.uint8)
        image[:, cols] = colour
        Image.fromarray(image).save(tmp_path / "a.png")
        path = tmp_path / "a.png"
        how = ["--tile-size", "256", "--level", "0", "--min-tissue", "0", *more]
        return plan_slide(batch(None, path, how), task(path)).report.remark

    assert "100% of it was classified as tissue" in remark((200, 90, 150), slice(0, 300))
    assert "0% of it was classified as tissue" in remark((245, 245, 245), slice(0, 300))
    outside = remark((200, 90, 150), slice(200, 300), "--edge", "drop")
    assert outside.startswith("52% of its tissue is in no tile")
    assert "--edge pad or --edge shift" in outside
    assert remark((200, 90, 150), slice(200, 300), "--edge", "pad") == ""
    assert remark((200, 90, 150), slice(0, 150)) != ""  # its last rows


def test_the_edge_is_part_of_what_a_slide_is_known_by(small: Path) -> None:
    work = task(small / "a.tiff")
    keys = {
        plan_slide(batch(None, small, [*TILES, "--edge", edge]), work).key
        for edge in ("drop", "pad", "shift")
    }
    assert len(keys) == 3


def test_pictures_of_dark_slides_are_stretched(tmp_path: Path) -> None:
    image = np.zeros((256, 256, 3), np.uint8)
    image[64:192, 64:256, 2] = 40
    image[100:150, 100:150, 2] = 60
    Image.fromarray(image).save(tmp_path / "a.png")
    how = ["--tile-size", "64", "--level", "0"]
    done(batch(tmp_path, tmp_path / "a.png", how), task(tmp_path / "a.png"))
    for name in ("a.stitched.jpg", "a.png"):
        with Image.open(tmp_path / "pictures" / name) as picture:
            middle = picture.getpixel((picture.width * 3 // 7, picture.height * 3 // 7))
            assert middle[2] > 240, name
            assert max(middle[:2]) < 40
