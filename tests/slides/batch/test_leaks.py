"""The tiling command refuses slides that show the same, or one patient, in two splits."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tifffile

from spatialdl.data import ShardDataset
from tests.slides.batch.batches import TILES, tile


@pytest.fixture
def three(tmp_path: Path, small: Path) -> list[Path]:
    """Two slides that are the same, and another one."""
    paths = [tmp_path / f"{name}.tiff" for name in ("one", "two", "other")]
    for path, name in zip(paths, "aab", strict=True):
        shutil.copy(small / f"{name}.tiff", path)
    return paths


pytestmark = pytest.mark.usefixtures("quick")


def run(out: Path, slides: Sequence[Path], text: str, *more: str) -> int:
    """The command with a table of labels."""
    labels = out.parent / "labels.csv"
    labels.write_text(text if text.startswith("slide") else f"slide,label,split\n{text}")
    return tile(*slides, "--out", out, *TILES, "--labels", labels, *more)


def test_the_same_slide_added_later_is_refused(tmp_path, three, capsys):
    one, two, other = three
    out = tmp_path / "set"
    assert run(out, [one], "one,x,train\n") == 0
    count = len(ShardDataset(out))
    assert run(out, [two, other], "two,x,val\nother,x,val\n") == 2
    said = capsys.readouterr().err
    assert f"slide one of the data set (train) and {two} (val)" in said
    assert len(ShardDataset(out)) == count
    assert run(out, [two, other], "two,x,train\nother,x,val\n") == 0
    assert f"warning: slide one of the data set and {two} are the same" in capsys.readouterr().err
    # moved, and called as it was: no other slide
    (tmp_path / "moved").mkdir()
    fresh = tmp_path / "fresh"
    assert run(fresh, [one.rename(tmp_path / "moved" / "one.tiff")], "one,x,train\n") == 0
    assert run(fresh, [shutil.copy(tmp_path / "moved" / "one.tiff", one)], "one,x,train\n") == 0
    assert "are the same" not in capsys.readouterr().err


def test_copies_or_a_patient_in_two_splits_write_nothing(tmp_path, three, capsys):
    one, two, other = three
    out = tmp_path / "set"
    assert run(out, three, "one,x,train\ntwo,x,val\nother,x,val\n", "--dry-run") == 2
    assert "the same slide is in different splits" in capsys.readouterr().err
    patients = "slide,label,split,patient\none,x,train,p\nother,x,val,p\n"
    assert run(out, [one, other], patients) == 2
    assert "patient p is in train and val" in capsys.readouterr().err
    assert not out.exists()
    assert run(out, [one, other], patients, "--allow-leaks") == 0
    copies = "one,x,train\ntwo,x,val\n"
    assert run(tmp_path / "copies", [one, two], copies) == 2
    assert run(tmp_path / "copies", [one, two], copies, "--allow-leaks") == 0
    assert "are the same slide" in capsys.readouterr().err


@pytest.fixture
def turned(three: list[Path]) -> list[Path]:
    """Two slides, and the first turned and compressed anew."""
    with tifffile.TiffFile(three[0]) as tiff:
        pixels = np.ascontiguousarray(np.rot90(tiff.pages[0].asarray()))
    scanned = {"resolution": (20000, 20000), "resolutionunit": "CENTIMETER"}
    more = {"tile": (64, 64), "photometric": "rgb", "compression": "jpeg", **scanned}
    tifffile.imwrite(three[1], pixels, **more)
    return three


def test_a_slide_stored_again_in_another_split_is_refused(tmp_path, turned, capsys):
    out, leak = tmp_path / "set", "one,x,train\nother,x,val\ntwo,x,test\n"
    for more in (["--jobs", "3"], ["--dry-run"]):
        assert run(out, turned, leak, *more) == 2
        said = capsys.readouterr().err
        one, two, other = turned
        assert f"have the same image: {one} (train) and {two} (test); assign both" in said
        assert str(other) not in said
    assert not out.exists()
    assert run(out, turned, leak.replace("test", "train"), "--dry-run") == 0
    assert run(out, turned, leak, "--allow-leaks") == 0


def test_slides_of_the_data_set_that_is_added_to_count(tmp_path, turned, capsys):
    out, (one, two, other) = tmp_path / "set", turned
    assert run(out, [one], "one,x,train\n") == 0
    assert run(out, [two], "two,x,val\n") == 2
    assert f"{two} (val) and {one} (train)" in capsys.readouterr().err
    assert run(out, [other], "other,x,val\n") == 0
    # corrected, the slide counts as it is now
    assert run(out, [one], "one,x,val\n") == 0
    assert run(out, [two], "two,x,val\n") == 0
