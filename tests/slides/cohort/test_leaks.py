"""The tiling command refuses slides that show the same in two splits, before it begins."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile

from spatialdl.slides.batch.labels import SlideLabel
from spatialdl.slides.cohort import likeness
from spatialdl.slides.cohort.leaks import check_pictures
from spatialdl.slides.cohort.likeness import same_pictures
from spatialdl.slides.command import main
from spatialdl.slides.synthetic.drawing import write_synthetic_slide

TILES = ("--tile-size", "64", "--mpp", "0.5")


@pytest.fixture
def slides(tmp_path: Path) -> dict[str, Path]:
    """Two slides, and the first turned and compressed anew."""
    folder = tmp_path / "slides"
    folder.mkdir()
    found = {name: folder / f"{name}.tiff" for name in ("one", "other", "again")}
    for name, kind in (("one", "ring"), ("other", "strand")):
        write_synthetic_slide(found[name], kind, size=(256, 320), seed=3)
    with tifffile.TiffFile(found["one"]) as tiff:
        turned = np.ascontiguousarray(np.rot90(tiff.pages[0].asarray()))
    scanned = {"resolution": (20000, 20000), "resolutionunit": "CENTIMETER"}
    tifffile.imwrite(
        found["again"], turned, tile=(64, 64), photometric="rgb", compression="jpeg", **scanned
    )
    return found


def run(out: Path, labels: Path, text: str, slides: list[Path], *more: str) -> int:
    labels.write_text("slide,label,split\n" + text)
    given = [*map(str, slides), "--out", str(out), "--labels", str(labels), *TILES, *more]
    return main(given)


def test_a_slide_stored_again_in_another_split_is_refused(
    tmp_path: Path, slides: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out, labels, paths = tmp_path / "set", tmp_path / "labels.csv", list(slides.values())
    leak = "one,x,train\nother,x,val\nagain,x,test\n"
    for jobs in ("1", "3"):
        assert run(out, labels, leak, paths, "--jobs", jobs) == 2
        said = capsys.readouterr().err
        one, other, again = (str(path) for path in paths)
        assert f"have the same image: {one} (train) and {again} (test); assign both" in said
        assert other not in said
    assert not out.exists()
    assert run(out, labels, leak, paths, "--dry-run") == 2
    assert run(out, labels, leak.replace("test", "train"), paths, "--dry-run") == 0
    assert run(out, labels, leak, paths, "--allow-leaks") == 0


def test_slides_of_the_data_set_that_is_added_to_count(
    tmp_path: Path, slides: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out, labels = tmp_path / "set", tmp_path / "labels.csv"
    assert run(out, labels, "one,x,train\n", [slides["one"]]) == 0
    assert run(out, labels, "again,x,val\n", [slides["again"]]) == 2
    assert f"{slides['again']} (val) and {slides['one']} (train)" in capsys.readouterr().err
    assert run(out, labels, "other,x,val\n", [slides["other"]]) == 0
    # corrected, the slide counts as it is now
    assert run(out, labels, "one,x,val\n", [slides["one"]]) == 0
    assert run(out, labels, "again,x,val\n", [slides["again"]]) == 0


def test_slides_are_read_only_where_there_are_two_splits(
    slides: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = list(slides.values())
    assert same_pictures(paths, "aab") == [(0, 2)]
    assert same_pictures(paths, "aba") == []
    check_pictures({})

    def refuse(path: Path) -> None:
        raise AssertionError(path)

    monkeypatch.setattr(likeness, "look_at", refuse)
    check_pictures({path: SlideLabel("x", "train") for path in paths})
    with pytest.raises(AssertionError):
        check_pictures(
            {path: SlideLabel("x", split) for path, split in zip(paths, "aab", strict=True)}
        )
