"""Batches from the first slide to the last file, whoever does the work."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from spatialdl.data import ShardDataset
from spatialdl.data.folder import ResumableFolder
from spatialdl.data.format import Manifest
from spatialdl.slides.batch import report_page, run, steps
from spatialdl.slides.batch.record import PartRecord
from tests.inference.evaluating.cases import read_rows
from tests.slides.batch.batches import (
    COORDS,
    TILES,
    WHOLE,
    contents,
    forked,
    in_python,
    inside,
    leftovers,
    rows,
    samples,
    tile,
)

STRIPES = [*WHOLE, "--stripes", "3"]
COMMAND = ("-m", "spatialdl.slides.tile_cli")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, small: Path) -> Path:
    """A data set of both slides."""
    out = tmp_path_factory.mktemp("finished") / "set"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_page, "_SHORTEST", 64)  # as `quick` has it
        assert tile(small, "--out", out, *TILES) == 0
    return out


@pytest.fixture
def out(tmp_path: Path, finished: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "set"))


@pytest.mark.parametrize(
    ("how", "who", "files"),
    [
        (TILES, "ranks", 5),
        pytest.param(STRIPES, "processes", 6, marks=pytest.mark.slow),
        pytest.param(COORDS, "ranks", 4, marks=pytest.mark.slow),
    ],
)
def test_the_result_does_not_depend_on_who_does_the_work(
    tmp_path, small, synthetic, how, who, files
):
    slides = synthetic["ring"].parent if how is STRIPES else small
    out = tmp_path / "set"
    assert tile(slides, "--out", out, *how) == 0
    expected = contents(out)
    assert sum(name.startswith(("shard", "coords")) for name in expected) == files
    shutil.rmtree(out)
    if who == "ranks":
        done = in_python(*COMMAND, slides, "--out", out, *how, ranks=3)
        assert done.returncode == 0, done.stderr
    else:
        assert tile(slides, "--out", out, *how, "--jobs", 2) == 0
    assert contents(out) == expected
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_it_with_its_code_and_says_what_is_kept(
    tmp_path, small, cut, capsys, monkeypatch, number, code
):
    out, cut_part = tmp_path / "set", steps.cut_part

    def signalled(*given: Any) -> PartRecord:
        part = cut_part(*given)
        if len(cut) == 2:
            signal.raise_signal(number)
        return part

    with monkeypatch.context() as patch:
        patch.setattr(steps, "cut_part", signalled)
        assert tile(small, "--out", out, *TILES) == code
    kept = tmp_path / ".set.partial"
    said = f"interrupted; partial results are in {kept}; run the same command again to resume"
    assert capsys.readouterr().err.splitlines()[-1] == said
    assert len(list(kept.glob("parts/*/*/part.json"))) == 2
    assert tile(small, "--out", out, *TILES) == 0
    assert inside(tmp_path) == ["set"]


def changed(path: Path) -> None:
    """Change one byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()  # it may have a second name
    path.write_bytes(content)


def test_a_finished_shard_that_was_changed_is_cut_again(small, finished, out, cut, capsys):
    changed(out / "shard-00004.h5")
    assert tile(small, "--out", out, *TILES) == 0
    assert sorted(cut) == ["b/00000", "b/00001"]
    assert contents(out) == contents(finished)
    ShardDataset(out).verify()
    # and a slide that is not given cannot be
    changed(out / "shard-00004.h5")
    damaged = contents(out)
    assert tile(small / "a.tiff", "--out", out, *TILES) == 2
    assert "has slide b in it, with missing or damaged files" in capsys.readouterr().err
    assert contents(out) == damaged


def test_two_at_once(tmp_path, small, capsys):
    out = tmp_path / "set"
    one = ResumableFolder(out)
    (one.path / "shard-00000.h5").write_text("half")
    before = contents(one.path)
    assert tile(small, "--out", out, *TILES) == 2
    error = capsys.readouterr().err
    assert f"error: {out} is being written by process {os.getpid()} on" in error
    assert contents(one.path) == before
    one.leave()
    assert tile(small, "--out", out, *TILES) == 0
    ShardDataset(out).verify()
    assert inside(tmp_path) == ["set"]


def test_slides_are_added(tmp_path, small, finished, cut, capsys):
    out = tmp_path / "set"
    assert tile(small / "b.tiff", "--out", out, *TILES) == 0
    cut.clear()
    assert tile(small, "--out", out, *TILES) == 0
    assert sorted(cut) == ["a/00000", "a/00001", "a/00002"]
    assert contents(out) == contents(finished)
    # nothing to do: nothing is touched, wherever the slides are
    cut.clear()
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    (tmp_path / "moved").mkdir()
    shutil.copy(small / "a.tiff", tmp_path / "moved")
    for slides in (small, small / "a.tiff", tmp_path / "moved"):
        assert tile(slides, "--out", out, *TILES) == 0
        assert f"nothing to do: {out} is complete" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == stamps
    assert cut == []
    assert inside(tmp_path) == ["moved", "set"]


def test_another_slide_of_the_same_name_is_refused(tmp_path, small, out, capsys):
    before, other = Manifest.load(out), tmp_path / "other"
    other.mkdir()
    for name in ("a", "c"):
        shutil.copy(small / "b.tiff", other / f"{name}.tiff")
    assert tile(other, "--out", out, *TILES) == 1
    error = capsys.readouterr().err
    assert f"has another slide named a, from {small / 'a.tiff'}; rename {other / 'a.tiff'}" in error
    # that which was there stays, and the other new one is there
    after = Manifest.load(out)
    ShardDataset(out).verify()
    assert after.samples[: len(before.samples)] == before.samples
    assert after.shards[: len(before.shards)] == before.shards
    assert {s.slide for s in after.samples} == {"a", "b", "c"}
    found = [(row["slide"], row["status"]) for row in read_rows(out / "process_list.csv")]
    assert found == [("a", "failed"), *((name, "processed") for name in "abc")]


def test_a_slide_that_cannot_be_read_any_more_keeps_its_tiles(tmp_path, small, quick, capsys):
    out, slides = tmp_path / "set", Path(shutil.copytree(small, tmp_path / "slides"))
    assert tile(slides, "--out", out, *TILES) == 0
    before = contents(out)
    (slides / "a.tiff").write_bytes(b"")
    assert tile(slides, "--out", out, *TILES) == 1
    assert "a.tiff: the file is empty; copy it again; kept its 12 samples of an earlier run" in (
        capsys.readouterr().err
    )
    assert contents(out) == before
    shutil.copy(small / "a.tiff", slides / "c.tiff")
    assert tile(slides, "--out", out, *TILES) == 1
    assert {s.slide for s in samples(out)} == {"a", "b", "c"}
    assert (rows(out)["a"]["written"], rows(out)["a"]["status"]) == ("12", "damaged")


def test_other_labels_are_cut_again(tmp_path, small, cut):
    out, labels = tmp_path / "set", tmp_path / "labels.csv"
    for text in ("a,x,train\nb,y,val\n", "a,x,train\nb,y,test\n"):
        labels.write_text("slide,label,split\n" + text)
        cut.clear()
        assert tile(small, "--out", out, *TILES, "--labels", labels) == 0
    assert sorted(cut) == ["b/00000", "b/00001"]
    assert Manifest.load(out).splits == ["train", "test"]
    # classes are settings: the data set is another one
    labels.write_text("slide,label,split\na,x,train\nb,z,test\n")
    assert tile(small, "--out", out, *TILES, "--labels", labels) == 2
    assert tile(small, "--out", out, *TILES, "--labels", labels, "--overwrite") == 0
    assert Manifest.load(out).classes == ["x", "z"]


def test_the_largest_slide_goes_first_and_what_is_begun_is_ended(tmp_path, small, cut):
    (tmp_path / "slides").mkdir()
    by_size = sorted(small.iterdir(), key=lambda path: path.stat().st_size)
    for name, slide in zip("ab", by_size, strict=True):
        os.link(slide, tmp_path / "slides" / f"{name}.tiff")
    assert tile(tmp_path / "slides", "--out", tmp_path / "set", *TILES) == 0
    names = [part[0] for part in cut]
    assert names == sorted(names, reverse=True)


@pytest.mark.parametrize(
    ("where", "error", "says"),
    [
        ("cut_slide", OSError(28, "No space", "/out/x"), "No space (/out/x)"),
        ("cut_slide", BrokenExecutor(), "the process that worked on it died (killed, perhaps"),
        ("finish_slide", RuntimeError("unexpected"), "RuntimeError: unexpected"),
    ],
)
def test_a_slide_that_fails_does_not_end_the_others(
    tmp_path, small, quick, monkeypatch, capsys, where, error, says
):
    call = getattr(run, where)

    def failing(asked: Any, work: Any, *more: Any) -> Any:
        if work.name == "b" and (where != "cut_slide" or more[1] == 1):
            raise error
        return call(asked, work, *more)

    monkeypatch.setattr(run, where, failing)
    assert tile(small, "--out", tmp_path / "set", *TILES) == 1
    good, bad = rows(tmp_path / "set").values()
    assert (good["slide"], good["status"], good["written"]) == ("a", "processed", "12")
    assert (bad["slide"], bad["status"], bad["written"]) == ("b", "failed", "0")
    assert says in bad["reason"]
    # where the fault is ours, it is shown
    assert ("Traceback" in capsys.readouterr().err) == (type(error) is RuntimeError)


def test_what_is_odd_about_the_tissue_of_a_slide_is_remarked(tmp_path, quick):
    path, out = tmp_path / "a.png", tmp_path / "set"

    def remark(colour: tuple[int, int, int], cols: slice, edge: str = "drop") -> str:
        image = np.full((300, 300, 3), 245, np.uint8)
        image[:, cols] = colour
        Image.fromarray(image).save(path)
        how = ["--tile-size", 256, "--level", 0, "--min-tissue", 0, "--edge", edge, "--overwrite"]
        assert tile(path, "--out", out, *how) == 0
        return rows(out)["a"]["remark"]

    assert "100% of it was classified as tissue" in remark((200, 90, 150), slice(0, 300))
    outside = remark((200, 90, 150), slice(200, 300))
    assert outside.startswith("52% of its tissue is in no tile")
    assert "--edge pad or --edge shift" in outside
    assert remark((200, 90, 150), slice(200, 300), "pad") == ""


ODD = [
    *("å é 切片", "a#1%20?&", "-a", "a.b.c", "'\"<b>$(x)`", "new\nline"),
    *("x" * 200, "é" * 125, os.fsdecode(b"latin\xe9"), ".."),
]


def test_odd_names(tmp_path, small, quick):
    out, slides = tmp_path / "set", tmp_path / "slides"
    slides.mkdir()
    for name in ODD:
        os.link(small / "b.tiff", slides / f"{name}.tif")
    done = in_python(*COMMAND, slides, "--out", out, *TILES)  # which prints them
    assert done.returncode == 0, done.stderr
    assert len({sample.slide for sample in samples(out)}) == len(ODD)
    found = rows(out)
    assert len(found) == len(ODD)
    assert {row["written"] for row in found.values()} == {"8"}
    assert {"å é 切片", "-a", "...tif", "x" * 200} <= set(found)
    assert len(list((out / "pictures").iterdir())) == 2 * len(ODD)
    assert leftovers(tmp_path) == []
    assert tile(slides, "--out", out, *TILES) == 0  # and they are found again
    assert inside(tmp_path) == ["set", "slides"]


def on_a_disk_of(limit: int, *arguments: object) -> Callable[[], int]:
    """The command, where no file may have more bytes than that."""

    def call() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        return tile(*arguments)

    return call


@pytest.mark.parametrize(
    ("how", "limit"),
    [
        (TILES[:4], 90_000),  # eight tiles are more, and pictures less
        pytest.param(COORDS, 30_000, marks=pytest.mark.slow),
        pytest.param(WHOLE, 100_000, marks=pytest.mark.slow),
    ],
    ids=["tiles", "coords", "whole"],
)
def test_a_full_disk(tmp_path, small, how, limit):
    out = tmp_path / "set"
    code, error = forked(on_a_disk_of(limit, small, "--out", out, *how))
    assert code == 1, error
    assert "Traceback" not in error
    assert leftovers(out) == []
    for row in rows(out).values():
        assert row["status"] == "failed"
        assert "File too large" in row["reason"]
    assert inside(tmp_path) == ["set"]
    assert not list(out.glob("shard*"))
    assert tile(small, "--out", out, *how) == 0  # there is room again


def test_a_disk_too_full_for_reports(tmp_path, small):
    arguments = (small, "--out", tmp_path / "set", *COORDS)
    code, error = forked(on_a_disk_of(4_000, *arguments))
    assert (code, error.splitlines()[-1]) == (1, "error: File too large")
    assert inside(tmp_path) == []  # there are no results to keep
    assert forked(on_a_disk_of(10, *arguments))[0] == 1
    assert inside(tmp_path) == []


def test_a_dry_run_counts_and_writes_nothing(tmp_path, small, capsys):
    out = tmp_path / "set"
    assert tile(small, "--out", out, *TILES, "--dry-run") == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"would write 20 tiles of 2 slides, 245.8 kB, to {out}"
    assert inside(tmp_path) == []
    assert tile(small / "a.tiff", "--out", out, *TILES) == 0
    assert tile(small, "--out", out, *TILES, "--dry-run") == 0
    assert "would write 8 tiles of 1 slides" in capsys.readouterr().out
