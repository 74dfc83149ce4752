"""Slides become data sets by one command."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import openslide
import pytest

from spatialdl.data import ShardDataset
from spatialdl.slides.reading.reader import Slide
from tests.slides.batch.batches import WHOLE, annotate, inside, places, polygon, rows, samples, tile

pytestmark = pytest.mark.usefixtures("quick")
TILES = ["--tile-size", "256", "--mpp", "0.5"]


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    path = tmp_path / "labels.csv"
    path.write_text("slide,label,split\nring,Ring,train\nstrand.tiff,Strand,val\n")
    return path


def test_slides_become_a_data_set(tmp_path, halves, labels, capsys):
    out, slides = tmp_path / "set", halves["ring"].parent
    assert tile(slides, "--out", out, "--tile-size", 128, "--mpp", 1, "--labels", labels) == 0
    data = ShardDataset(out)
    data.verify()
    assert data.classes == ["Ring", "Strand"]
    assert (data.splits, data.mpp, data.image_size(0)) == (["train", "val"], 1.0, (128, 128))
    for number, (image, label) in enumerate(data):
        sample = data.sample(number)
        assert (sample.slide, sample.split) == [("ring", "train"), ("strand", "val")][label]
        if number % 5 == 0:
            with openslide.OpenSlide(halves[sample.slide]) as slide:
                region = slide.read_region((sample.x, sample.y), 1, (128, 128))
            assert (image == np.asarray(region.convert("RGB"))).all()
    count = len(data)
    data.close()  # HDF5 opens a file once in a process with one kind of locking
    stored = []
    for shard in sorted(out.glob("shard-*.h5")):
        with h5py.File(shard) as file:
            stored += map(tuple, file["coords"][:].tolist())
    assert stored == places(out)
    assert inside(out / "pictures") == [
        *("ring.png", "ring.stitched.jpg", "strand.png", "strand.stitched.jpg")
    ]
    assert sum(int(row["written"]) for row in rows(out).values()) == count
    assert f"wrote {count} tiles of 2 slides" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("how", "packed"),
    [(TILES, "zstd"), ([*WHOLE, "--stripes", "2"], "lz4")],
    ids=["tiles", "whole"],
)
def test_with_any_codec_pixels_are_those_of_the_slide(tmp_path, halves, capsys, how, packed):
    sizes = []
    for codec, stored, most in (("raw", "raw", 0), (packed, packed, 0), ("jpeg-native", "jpeg", 1)):
        out, more = tmp_path / codec, ["--codec", codec, "--stripe-count", "2"]
        assert tile(halves["ring"], "--out", out, *how, *more) == 0
        assert "remark: stripes were not set" in capsys.readouterr().err
        data = ShardDataset(out)
        assert (data.codec, data.classes, data.splits) == (stored, [], [])
        with Slide(halves["ring"]) as slide:
            for number in range(len(data)):
                sample, size = data.sample(number), data.image_size(number)
                right = slide.read_scaled(sample.x, sample.y, size, 1.0).astype(int)
                assert np.abs(data.read(number) - right).max() <= most
        sizes.append(sum(path.stat().st_size for path in out.glob("*.h5")))
    assert sizes[0] > sizes[1] > sizes[2]


def test_a_data_set_is_not_replaced_by_accident(tmp_path, halves, capsys):
    out, strand = tmp_path / "set", halves["strand"]
    assert tile(halves["ring"], "--out", out, *TILES) == 0
    before = (out / "manifest.json").read_text()
    assert tile(strand, "--out", out, *TILES, "--min-tissue", 0.4) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (out / "manifest.json").read_text() == before
    # nothing to replace it with: the old one stays
    assert tile(strand, "--out", out, *TILES, "--overwrite", "--min-tissue", 1) == 1
    assert (out / "manifest.json").read_text() == before
    assert tile(strand, "--out", out, *TILES, "--overwrite") == 0
    assert {sample.slide for sample in samples(out)} == {"strand"}
    assert inside(tmp_path) == ["set"]


def test_mistakes_in_the_labels_write_nothing(tmp_path, halves, labels, capsys):
    labels.write_text("slide,label,split\nring,a,train\n")
    given = ("--out", tmp_path / "set", *TILES, "--labels", labels)
    assert tile(*halves.values(), *given) == 2
    error = capsys.readouterr().err
    assert "no line for strand.tiff" in error
    assert len(error.splitlines()) == 1
    assert inside(tmp_path) == ["labels.csv"]
    # those without a label may be left out
    skip = (*given, "--unlabelled", "skip", "--dry-run")
    assert tile(*halves.values(), *skip) == 0
    assert "remark: skipped 1 slide without a label: strand.tiff" in capsys.readouterr().err
    labels.write_text("slide,label,split\n")
    assert tile(*halves.values(), *skip) == 2
    assert "has no rows below its header" in capsys.readouterr().err
    assert tile(*halves.values(), *given[:-2], *skip[-3:]) == 2
    assert "--unlabelled skip requires --labels" in capsys.readouterr().err


def test_a_batch_goes_on_after_bad_slides(tmp_path, halves, real, capsys):
    out, good = tmp_path / "set", halves["ring"]
    assert tile(good, real / "bad", "--out", out, *TILES) == 1
    text = capsys.readouterr()
    assert {line.split()[0]: line.split()[-1] for line in text.out.splitlines()[1:-1]} == {
        **{"ring": "processed", "all-white": "tiles"},
        **{"corrupt-some-tiles": "damaged", "empty": "failed", "no-mpp": "failed"},
        **{"truncated-half": "failed"},
    }
    assert text.out.splitlines()[-1].startswith("wrote ")
    for says in ("empty.svs: the file is empty", "no-mpp.svs has no micrometres", "cut short"):
        assert says in text.err
    assert "all-white has no tiles: no tissue" in text.err
    assert "Traceback" not in text.err
    for row in rows(out).values():  # glass that the thumbnail could not show is no tissue
        assert int(row["with_tissue"]) == int(row["unreadable"]) + int(row["written"])
    again = (good, real / "bad" / "empty.svs", "--out", out, *TILES)
    for code, more in ((1, ()), (0, ("--skip-errors",))):
        assert tile(*again, *more) == code
        assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("bad/all-white.svs", "no tissue: none of 1 slides has a tile"),
        ("bad/empty.svs", "none of 1 slides could be read"),
    ],
)
def test_no_tile_at_all_is_an_error_and_leaves_reports_only(
    tmp_path, halves, real, capsys, name, says
):
    out, reports = tmp_path / "set", ["process_list.csv", "report.html", "settings.json"]
    assert tile(real / name, "--out", out, *TILES, "--skip-errors") == 1
    assert says in capsys.readouterr().err
    assert inside(tmp_path) == ["set"]
    assert [name for name in inside(out) if name not in ("pictures", "records")] == reports
    if name == "bad/empty.svs":  # which are in nobody's way
        assert tile(halves["ring"], "--out", out, *TILES, "--min-tissue", 0.4) == 0


def test_a_resolution_may_be_given_and_a_level_needs_none(tmp_path, real, capsys):
    given = (real / "bad" / "no-mpp.svs", "--out", tmp_path / "set", "--tile-size", 512)
    assert tile(*given, "--level", 0) == 0
    assert len(ShardDataset(tmp_path / "set")) == 6
    assert rows(tmp_path / "set")["no-mpp"]["mpp"] == ""
    again = (*given, "--overwrite", "--dry-run")
    assert tile(*again, "--mpp", 0.5, "--slide-mpp", 0.499) == 0
    assert "would write 6 tiles" in capsys.readouterr().out
    assert tile(*again, "--level", 1) == 1


def test_the_labels_may_say_resolutions(tmp_path, halves, labels, capsys):
    out, head = tmp_path / "set", "slide,label,split,mpp\n"
    labels.write_text(head + "ring,a,train,0.25\nstrand,b,val,\n")
    given = (*halves.values(), "--out", out, "--labels", labels, "--tile-size", 128, "--mag", 10)
    assert tile(*given, "--slide-mpp", 0.5) == 0
    found = rows(out)
    assert (found["ring"]["mpp"], found["strand"]["mpp"]) == ("0.25", "0.5")
    assert int(found["ring"]["in_grid"]) < int(found["strand"]["in_grid"])
    labels.write_text(head + "ring,a,train,353\nstrand,b,val,\n")
    assert tile(*given, "--overwrite") == 2
    assert "line 2: mpp is '353', expected" in capsys.readouterr().err


def test_annotations_become_the_masks_of_whole_regions(tmp_path, halves, labels):
    drawn, out, slides = tmp_path / "drawn", tmp_path / "set", halves["ring"].parent
    annotate(drawn, "ring", polygon(150, 160, 450, 500, "Tumour"))
    annotate(drawn, "strand")
    labels.write_text("slide,label,split\nring,,train\nstrand.tiff,Strand,val\n")
    how = "--whole --level 0 --stripes 2 --codec jpeg-native --annotations"
    given = (*how.split(), drawn)
    assert tile(slides, "--out", out, *given, "--labels", labels) == 0
    data = ShardDataset(out)
    data.verify()
    assert data.has_masks
    assert data.classes == ["background", "Tumour"]
    assert data.splits == ["train", "val"]
    assert data.labels.tolist() == [-1, -1]
    for number in range(2):
        sample, mask = data.sample(number), data.read_mask(number)
        assert mask.shape == data.image_size(number) == data.read(number).shape[:2]
        expected = np.zeros(mask.shape, np.uint8)
        if sample.slide == "ring":
            here = slice(max(0, 160 - sample.y), 500 - sample.y)
            expected[here, max(0, 150 - sample.x) : 450 - sample.x] = 1
            assert expected.any()
        assert np.array_equal(mask, expected)
    (drawn / "strand.geojson").unlink()
    assert tile(slides, "--out", tmp_path / "without", *given) == 1
    assert len(ShardDataset(tmp_path / "without")) == 1


def test_a_reader_that_closes_the_pipe_is_no_error():
    program = "import time; from spatialdl.common.text import print_lines; time.sleep(0.2); "
    program += "print_lines('x')"
    command = shlex.join([sys.executable, "-c", program])
    shell = ["bash", "-o", "pipefail", "-c", f"{command} | true"]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
