"""Slides are planned, cut and finished, one step after the other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from spatialdl.errors import SlideError
from spatialdl.slides.batch import running
from spatialdl.slides.batch.executors import SerialExecutor
from spatialdl.slides.batch.record import PartRecord, SlideRecord
from spatialdl.slides.batch.running import BatchRun
from spatialdl.slides.batch.steps import BatchRequest, Task, cut_slide, finish_slide, plan_slide
from tests.slides.batch.batches import COORDS, TILES, request, task

pytestmark = pytest.mark.usefixtures("quick")


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


def test_coordinates_are_files_of_the_slide_and_where_tiles_went_is_summed_up(tmp_path, small):
    asked, work = request(tmp_path, small, COORDS), task(small / "a.tiff")
    record, parts = done(asked, work)
    assert [part.shard for part in parts] == [None]
    assert record.is_whole(tmp_path)
    for file in record.files:
        with h5py.File(tmp_path / file.file) as opened:
            assert len(opened["coords"]) == 12
            assert opened["coords"].attrs["save_path"].startswith("/data/set/coords/")
    places = [(x, y) for x, y, _ in parts[0].taken]
    planned = plan_slide(replace(asked, settings={}), work)
    parts = [
        PartRecord(None, parts[0].taken[:4], {"pen": places[4:6]}, places[6:9], "no 8", 3),
        PartRecord(None, [], {"pen": [], "blur": places[9:10]}),
    ]
    report = finish_slide(asked, work, planned, parts)
    assert (report.with_tissue, report.written, report.unreadable) == (12 - 3, 4, 3)
    assert (report.pen, report.blur, report.dropped) == (2, 1, 3)
    assert (report.status, report.note) == ("damaged", "no 8")


def test_what_is_odd_about_the_tissue_of_a_slide_is_remarked(tmp_path):
    def remark(colour: tuple[int, int, int], cols: slice, *more: str) -> str:
        image = np.full((300, 300, 3), 245, np.uint8)
        image[:, cols] = colour
        Image.fromarray(image).save(tmp_path / "a.png")
        path = tmp_path / "a.png"
        how = ["--tile-size", "256", "--level", "0", "--min-tissue", "0", *more]
        return plan_slide(request(None, path, how), task(path)).report.remark

    assert "100% of it was classified as tissue" in remark((200, 90, 150), slice(0, 300))
    assert "0% of it was classified as tissue" in remark((245, 245, 245), slice(0, 300))
    outside = remark((200, 90, 150), slice(200, 300), "--edge", "drop")
    assert outside.startswith("52% of its tissue is in no tile")
    assert "--edge pad or --edge shift" in outside
    assert remark((200, 90, 150), slice(200, 300), "--edge", "pad") == ""
    assert remark((200, 90, 150), slice(0, 150)) != ""  # its last rows


def test_pictures_of_dark_slides_are_stretched(tmp_path):
    image = np.zeros((256, 256, 3), np.uint8)
    image[64:192, 64:256, 2] = 40
    image[100:150, 100:150, 2] = 60
    Image.fromarray(image).save(tmp_path / "a.png")
    how = ["--tile-size", "64", "--level", "0"]
    done(request(tmp_path, tmp_path / "a.png", how), task(tmp_path / "a.png"))
    for name in ("a.stitched.jpg", "a.png"):
        with Image.open(tmp_path / "pictures" / name) as picture:
            middle = picture.getpixel((picture.width * 3 // 7, picture.height * 3 // 7))
            assert middle[2] > 240, name
            assert max(middle[:2]) < 40


@pytest.fixture
def tasks(small: Path) -> list[Task]:
    return [task(small / "a.tiff"), replace(task(small / "b.tiff"), bytes=10**9)]


def run(asked: BatchRequest, tasks: list[Task], *, dry: bool = False) -> BatchRun:
    made = BatchRun(asked, tasks, dry=dry)
    made.go(SerialExecutor(made.watch))
    return made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done, in order."""
    noted: list[str] = []

    def counted(name: str, call: Callable[..., Any], *given: Any) -> Any:
        number = f" {given[3]}" if name == "cut_slide" else ""
        noted.append(f"{name.split('_', maxsplit=1)[0]} {given[1].name}{number}")
        return call(*given)

    for name in ("plan_slide", "cut_slide", "finish_slide"):
        monkeypatch.setattr(running, name, partial(counted, name, getattr(running, name)))
    return noted


def test_the_largest_goes_first_and_what_is_begun_is_ended(tmp_path, small, tasks, calls):
    dry = run(request(None, small, TILES), tasks, dry=True)
    assert calls == ["plan b", "plan a"]
    assert dry.bytes == 21 * 64 * 64 * 3
    calls.clear()
    made = run(request(tmp_path, small, TILES), tasks)
    assert calls == [
        *("plan b", "cut b 0", "cut b 1", "finish b"),
        *("plan a", "cut a 0", "cut a 1", "cut a 2", "finish a"),
    ]
    for one in (dry, made):
        assert {name: report.written for name, report in one.reports.items()} == {"a": 12, "b": 9}
    assert (made.finished, made.before) == (["b", "a"], [])
    again = run(request(tmp_path, small, TILES), tasks)
    assert (again.finished, again.before) == ([], ["b", "a"])
    assert again.reports == made.reports


@pytest.mark.parametrize(
    ("where", "error", "says"),
    [
        ("plan_slide", SlideError("slide x is damaged"), "slide x is damaged"),
        ("cut_slide", OSError(28, "No space", "/out/x"), "No space (/out/x)"),
        ("finish_slide", OSError("Can't write data"), "Can't write data"),
        ("plan_slide", BrokenExecutor(), "the process that worked on it died (killed, perhaps"),
        ("cut_slide", BrokenExecutor(), "the process that worked on it died (killed, perhaps"),
        ("finish_slide", RuntimeError("unexpected"), "RuntimeError: unexpected"),
    ],
)
def test_a_slide_that_fails_does_not_end_the_others(
    tmp_path, small, tasks, monkeypatch, capsys, where, error, says
):
    call = getattr(running, where)

    def failing(asked: BatchRequest, work: Task, *more: Any) -> Any:
        if work.name == "b" and (where != "cut_slide" or more[1] == 1):
            raise error
        return call(asked, work, *more)

    monkeypatch.setattr(running, where, failing)
    made = run(request(tmp_path, small, TILES), tasks)
    assert made.finished == ["a"]
    assert made.reports["a"].written == 12
    report = made.reports["b"]
    assert (report.status, report.written, report.file) == ("failed", 0, str(small / "b.tiff"))
    assert says in report.note
    # where the fault is ours, it is shown
    assert ("Traceback" in capsys.readouterr().err) == (type(error) is RuntimeError)
