"""Batches from the first slide to the last file, whoever does the work."""

from __future__ import annotations

import csv
import errno
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from spatialdl.comm.launch import mpiexec_command
from spatialdl.data import ShardDataset
from spatialdl.data.folder import ResumableFolder
from spatialdl.data.format import Manifest
from spatialdl.slides import command
from spatialdl.slides.batch import running, steps
from spatialdl.slides.batch.parts import Cutting, PartPieces
from spatialdl.slides.batch.record import PartRecord
from spatialdl.slides.reading.reader import Slide
from tests.slides.batch.batches import (
    COORDS,
    TILES,
    contents,
    ended,
    in_python,
    inside,
    leftovers,
    rows,
    started,
    tile,
)

WHOLE = ["--whole", "--mpp", "0.5", "--stripes", "3"]
FILES = {"tiles": 5, "whole": 6, "coords": 4}


@pytest.mark.parametrize("kind", FILES)
def test_the_result_does_not_depend_on_who_does_the_work(
    tmp_path: Path, small: Path, synthetic: dict[str, Path], kind: str
) -> None:
    how = {"tiles": TILES, "whole": WHOLE, "coords": COORDS}[kind]
    slides = synthetic["ring"].parent if kind == "whole" else small
    found = []
    for who in ("this process", "processes", "ranks"):
        out = tmp_path / "set"  # files of coordinates tell the path
        if who == "ranks":
            launcher = tuple(mpiexec_command(3))
            code, _, err = ended(started(slides, "--out", out, *how, launcher=launcher))
            assert code == 0, err
        else:
            assert tile(slides, "--out", out, *how, "--jobs", 1 + (who == "processes")) == 0
        found.append(contents(out))
        assert leftovers(tmp_path) == []
        shutil.rmtree(out)
    assert found[1] == found[0]
    assert found[2] == found[0]
    assert sum(name.startswith(("shard", "coords")) for name in found[0]) == FILES[kind]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_it_with_its_code_and_says_what_is_kept(
    tmp_path: Path, small: Path, number: signal.Signals, code: int
) -> None:
    out = tmp_path / "set"
    program = RAISES.format(number=int(number), arguments=[str(small), "--out", str(out), *TILES])
    done = in_python("-c", program)
    assert done.returncode == code, done.stderr
    kept = tmp_path / ".set.partial"
    said = f"interrupted; partial results are in {kept}; run the same command again to resume"
    assert done.stderr.splitlines()[-1] == said
    assert "Traceback" not in done.stderr
    assert len(list(kept.glob("parts/*/*/part.json"))) == 2
    assert tile(small, "--out", out, *TILES) == 0
    assert inside(tmp_path) == ["set"]


RAISES = """
import signal, sys
from spatialdl.slides.batch import steps
from spatialdl.slides.command import main

cut_part, cut = steps.cut_part, []

def third(*arguments):
    cut.append(cut_part(*arguments))
    if len(cut) == 2:
        signal.raise_signal({number})
    return cut[-1]

steps.cut_part = third
sys.exit(main({arguments}))
"""


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_batch_that_was_killed_goes_on(tmp_path: Path, small: Path, jobs: int) -> None:
    expected, out = tmp_path / "expected", tmp_path / "set"
    assert tile(small, "--out", expected, *TILES) == 0
    (tmp_path / "killed.py").write_text(
        KILLED.format(arguments=[str(small), "--out", str(out), *TILES, "--jobs", str(jobs)])
    )
    done = in_python(tmp_path / "killed.py")  # up to the end of all that it started
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(tmp_path.glob(".set.partial/parts/*/*/part.json"))
    assert not out.exists()
    assert tile(small, "--out", out, *TILES) == 0
    assert contents(out) == contents(expected)
    assert inside(tmp_path) == ["expected", "killed.py", "set"]


KILLED = """
import os, signal
from spatialdl.slides.batch.running import BatchRun
from spatialdl.slides.command import main

def killed(self, order, planned, parts, number, part):
    assert not isinstance(part, Exception), part
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    BatchRun._cut = killed
    main({arguments})
"""


def changed(path: Path) -> None:
    """Change one byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()  # it may have a second name
    path.write_bytes(content)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch, quick: None) -> list[str]:
    """The parts that are cut from now on."""
    cut_part, parts = steps.cut_part, []

    def noted(
        slide: Slide, pieces: PartPieces, cutting: Cutting, folder: Path, key: str
    ) -> PartRecord:
        parts.append(f"{folder.parent.name}/{folder.name}")
        return cut_part(slide, pieces, cutting, folder, key)

    monkeypatch.setattr(steps, "cut_part", noted)
    return parts


def test_a_part_that_was_changed_meanwhile_is_cut_again(
    tmp_path: Path, small: Path, cut: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, out = tmp_path / "expected", tmp_path / "set"
    assert tile(small, "--out", expected, *TILES) == 0

    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(running, "finish_slide", pressed)
        assert tile(small / "a.tiff", "--out", out, *TILES) == 130
    changed(tmp_path / ".set.partial" / "parts" / "a" / "00001" / "shard-00000.h5")
    cut.clear()
    assert tile(small, "--out", out, *TILES) == 0
    assert sorted(cut) == ["a/00001", "b/00000", "b/00001"]
    assert contents(out) == contents(expected)


def test_a_finished_shard_that_was_changed_is_cut_again(
    tmp_path: Path, small: Path, cut: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "set"
    assert tile(small, "--out", out, *TILES) == 0
    expected = contents(out)
    cut.clear()
    changed(out / "shard-00004.h5")
    assert tile(small, "--out", out, *TILES) == 0
    assert sorted(cut) == ["b/00000", "b/00001"]
    assert contents(out) == expected
    ShardDataset(out).verify()
    # and a slide that is not given cannot be
    changed(out / "shard-00004.h5")
    damaged = contents(out)
    assert tile(small / "a.tiff", "--out", out, *TILES) == 2
    assert "has slide b in it, with missing or damaged files" in capsys.readouterr().err
    assert contents(out) == damaged
    (out / "records" / "b.json").write_text("{")
    assert tile(small / "a.tiff", "--out", out, *TILES) == 2
    assert "has slide b in it, with missing or damaged" in capsys.readouterr().err


def test_two_at_once(tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_slides_are_added(
    tmp_path: Path, small: Path, cut: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    expected, out = tmp_path / "expected", tmp_path / "set"
    assert tile(small, "--out", expected, *TILES) == 0
    assert tile(small / "b.tiff", "--out", out, *TILES) == 0
    cut.clear()
    assert tile(small, "--out", out, *TILES) == 0
    assert sorted(cut) == ["a/00000", "a/00001", "a/00002"]
    assert contents(out) == contents(expected)
    assert list(rows(out)) == ["a", "b"]
    # nothing to do: nothing is touched
    cut.clear()
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    for slides in (small, small / "a.tiff"):
        assert tile(slides, "--out", out, *TILES) == 0
        assert f"nothing to do: {out} is complete" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == stamps
    assert cut == []
    assert inside(tmp_path) == ["expected", "set"]


def test_a_slide_that_was_moved_is_known_again(
    tmp_path: Path, small: Path, cut: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "set"
    assert tile(small / "a.tiff", "--out", out, *TILES) == 0
    (tmp_path / "moved").mkdir()
    shutil.copy(small / "a.tiff", tmp_path / "moved")
    cut.clear()
    assert tile(tmp_path / "moved", "--out", out, *TILES) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert cut == []


def test_another_slide_of_the_same_name_is_refused(
    tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, other = tmp_path / "set", tmp_path / "other"
    assert tile(small / "a.tiff", "--out", out, *TILES) == 0
    before = Manifest.load(out)
    other.mkdir()
    shutil.copy(small / "b.tiff", other / "a.tiff")
    shutil.copy(small / "b.tiff", other / "c.tiff")
    assert tile(other, "--out", out, *TILES) == 1
    error = capsys.readouterr().err
    assert f"has another slide named a, from {small / 'a.tiff'}; rename {other / 'a.tiff'}" in error
    after = Manifest.load(out)
    ShardDataset(out).verify()
    # that which was there stays, and the other new one is there
    assert [s for s in after.samples if s.slide == "a"] == before.samples
    assert after.shards[: len(before.shards)] == before.shards
    assert {s.slide for s in after.samples} == {"a", "c"}
    with (out / "process_list.csv").open() as file:
        assert [(r["slide"], r["status"]) for r in csv.DictReader(file)] == [
            ("a", "failed"),
            ("a", "processed"),
            ("c", "processed"),
        ]


def test_a_slide_that_cannot_be_read_any_more_keeps_its_tiles(
    tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, slides = tmp_path / "set", tmp_path / "slides"
    shutil.copytree(small, slides)
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
    assert {s.slide for s in Manifest.load(out).samples} == {"a", "b", "c"}
    assert rows(out)["a"]["written"] == "12"
    assert rows(out)["a"]["status"] == "damaged"


def test_other_labels_are_cut_again(tmp_path: Path, small: Path, cut: list[str]) -> None:
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


def test_one_name_in_several_folders(tmp_path: Path, small: Path) -> None:
    out = tmp_path / "set"
    for folder, name in (("one", "a"), ("two", "b")):
        (tmp_path / folder).mkdir()
        shutil.copy(small / f"{name}.tiff", tmp_path / folder / "a.tiff")
    given = [tmp_path / "one", tmp_path / "two"]
    assert tile(*given, "--out", out, *TILES) == 0
    assert {name: row["written"] for name, row in rows(out).items()} == {
        "one_a.tiff": "12",
        "two_a.tiff": "9",
    }
    assert {s.slide for s in Manifest.load(out).samples} == {"one_a.tiff", "two_a.tiff"}


ODD = [
    *(
        "a b",
        "å é 切片",
        "a#1%20?&",
        "-a",
        ".a",
        "a.b.c",
        "'\"<b>$(x)`",
        "new\nline",
        "tab\t",
        "CON",
    ),
    *("x" * 200, "y" * 250, "é" * 125, os.fsdecode(b"latin\xe9"), ".", ".."),
]


@pytest.mark.parametrize("form", [TILES, COORDS], ids=["tiles", "coords"])
def test_odd_names(tmp_path: Path, small: Path, quick: None, form: list[str]) -> None:
    out, slides = tmp_path / "set", tmp_path / "slides"
    slides.mkdir()
    for name in ODD:
        os.link(small / "b.tiff", slides / f"{name}.tif")
    code, _, err = ended(started(slides, "--out", out, *form))
    assert code == 0, err
    found = rows(out)
    assert len(found) == len(ODD)
    assert {row["written"] for row in found.values()} == {"9"}
    assert {"a b", "å é 切片", "-a", ".a", "..tif", "...tif", "x" * 200} <= set(found)
    assert len(list((out / "pictures").iterdir())) == 2 * len(ODD)
    assert leftovers(tmp_path) == []
    if form is TILES:
        data = ShardDataset(out)
        data.verify()
        assert len({data.sample(k).slide for k in range(len(data))}) == len(ODD)
    assert tile(slides, "--out", out, *form) == 0  # and they are found again
    assert inside(tmp_path) == ["set", "slides"]


@pytest.fixture
def bad(tmp_path: Path, small: Path) -> Path:
    """A folder of slides that cannot be used, and one that can."""
    folder = tmp_path / "slides"
    folder.mkdir()
    white = np.full((256, 320, 3), 255, np.uint8)
    scanned = {"resolution": (20000, 20000), "resolutionunit": "CENTIMETER"}
    shutil.copy(small / "a.tiff", folder / "good.tiff")
    (folder / "empty.svs").touch()
    (folder / "text.svs").write_text("not a slide\n" * 50)
    (folder / "pointer.svs").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 12345\n"
    )
    (folder / "noise.svs").write_bytes(bytes(range(256)) * 9)
    whole = (small / "b.tiff").read_bytes()
    (folder / "cut.tiff").write_bytes(whole[: len(whole) // 2])
    Image.fromarray(white).save(folder / "image.svs", "PNG")
    tifffile.imwrite(folder / "white.tiff", white, tile=(256, 256), **scanned)
    tifffile.imwrite(folder / "tiny.tiff", white[:40, :50], tile=(16, 16), **scanned)
    tifffile.imwrite(folder / "mpp0.svs", white, tile=(256, 256), description=APERIO + "0")
    tifffile.imwrite(folder / "mpp353.tiff", white, tile=(256, 256))
    return folder


APERIO = "Aperio Image Library v1\n320x256 (256x256) JPEG/RGB Q=70|AppMag = 20|MPP = "
WHY = {
    "empty": ("failed", "the file is empty; copy it again"),
    "text": ("failed", "it is a text file; give the slide itself"),
    "pointer": ("failed", "it is a Git LFS pointer, not the slide; fetch it"),
    "noise": ("failed", "openslide does not support this format"),
    "cut": ("failed", "slide"),
    "image": ("failed", "has no micrometres per pixel"),
    "white": ("no tiles", "no tissue found in any of 20 tiles (0 of 20"),
    "tiny": ("no tiles", "smaller than a tile: it has 40 x 50 pixels, a tile spans 64"),
    "mpp0": ("failed", "micrometres per pixel"),
    "mpp353": ("failed", "micrometres per pixel"),
    "good": ("processed", ""),
}


@pytest.mark.parametrize("more", [[], ["--jobs", "2"]])
def test_bad_slides_do_not_end_a_batch(
    tmp_path: Path, bad: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "set"
    assert tile(bad, "--out", out, *TILES, *more) == 1
    text = capsys.readouterr()
    assert "Traceback" not in text.err
    found = rows(out)
    assert found.keys() == WHY.keys()
    for name, (status, why) in WHY.items():
        assert found[name]["status"] == status, found[name]
        assert why in found[name]["reason"], found[name]
        assert name in text.err or name == "good"
    assert len(ShardDataset(out)) == 12
    assert leftovers(tmp_path) == []
    # they are looked at again, and nothing else
    assert tile(bad, "--out", out, *TILES, *more) == 1
    assert "nothing to do" in capsys.readouterr().out
    assert tile(bad, "--out", out, *TILES, *more, "--skip-errors") == 0
    assert inside(tmp_path) == ["set", "slides"]


def test_a_level_that_is_missing(tmp_path: Path, small: Path) -> None:
    out = tmp_path / "set"
    assert tile(small, "--out", out, "--tile-size", 64, "--level", 7) == 1
    for row in rows(out).values():
        assert row["status"] == "failed"
        assert "and no level 7; set one of them, or an mpp" in row["reason"]
    assert not (out / "manifest.json").exists()
    assert leftovers(tmp_path) == []


FULL = """
import resource, signal, sys
from spatialdl.slides.command import main

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
sys.exit(main({arguments}))
"""


@pytest.mark.parametrize(
    ("how", "limit"),
    [
        (["--tile-size", "64", "--mpp", "0.5"], 100_000),  # nine tiles are more, and pictures less
        (["--tile-size", "64", "--mpp", "0.5", "--jobs", "2"], 100_000),
        (["--whole", "--mpp", "0.5"], 100_000),
        (["--tile-size", "64", "--mpp", "0.5", "--codec", "jpeg"], 20_000),
        (["--tile-size", "64", "--mpp", "0.5", "--format", "coords"], 30_000),
    ],
)
def test_a_full_disk(tmp_path: Path, small: Path, how: list[str], limit: int) -> None:
    out = tmp_path / "set"
    arguments = [str(small), "--out", str(out), *how]
    done = in_python("-c", FULL.format(limit=limit, arguments=arguments))
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert leftovers(out) == []
    for row in rows(out).values():
        assert row["status"] == "failed"
        assert "File too large" in row["reason"]
    assert inside(tmp_path) == ["set"]
    assert not list(out.glob("shard*"))
    assert tile(*arguments) == 0  # there is room again


def test_a_disk_too_full_for_reports(tmp_path: Path, small: Path) -> None:
    out = tmp_path / "set"
    arguments = [str(small), "--out", str(out), *COORDS]
    done = in_python("-c", FULL.format(limit=4_000, arguments=arguments))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: [Errno 27] File too large"
    assert inside(tmp_path) == []  # there are no results to keep
    done = in_python("-c", FULL.format(limit=10, arguments=arguments))
    assert (done.returncode, inside(tmp_path)) == (1, [])


def test_a_disk_that_is_full_in_the_end(
    tmp_path: Path,
    small: Path,
    cut: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "set"
    with monkeypatch.context() as patch:
        patch.setattr(command, "save_batch", full)
        assert tile(small, "--out", out, *TILES) == 1
    kept = f"No space left on device; partial results are in {tmp_path / '.set.partial'}"
    assert kept in capsys.readouterr().err
    cut.clear()
    assert tile(small, "--out", out, *TILES) == 0
    assert cut == []


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "set", Path("/proc/set")):
        assert tile(small, "--out", out, *TILES) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: cannot write beside {out}: ")
        assert error.count("\n") == 1
    assert inside(tmp_path) == ["file"]


def test_labels_without_a_column(
    tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = tmp_path / "labels.csv"
    for text, says in (("slide,label\na,x\n", "split"), ("a;b\n", "slide, label, split"), ("", "")):
        labels.write_text(text)
        assert tile(small, "--out", tmp_path / "set", *TILES, "--labels", labels) == 2
        assert f"has no column {says}" in capsys.readouterr().err
    assert inside(tmp_path) == ["labels.csv"]


def test_a_dry_run_counts_and_writes_nothing(
    tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "set"
    assert tile(small, "--out", out, *TILES, "--dry-run") == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"would write 21 tiles of 2 slides, 258.0 kB, to {out}"
    assert inside(tmp_path) == []
    assert tile(small / "a.tiff", "--out", out, *TILES) == 0
    assert tile(small, "--out", out, *TILES, "--dry-run") == 0
    assert "would write 9 tiles of 1 slides" in capsys.readouterr().out
