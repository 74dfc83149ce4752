"""Slides of one command in this process; see also tests/test_predict.py."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest

from spatialdl.comm.single_process import SingleProcess
from spatialdl.predicting.batch import _in_keys, run
from tests.predicting.runs import NETWORK, command, train, write_slide

ASKED = ("level=0", "min_tissue=0.8", "maps=false")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("batch")
    train(path / "run", *NETWORK, "trainer.ema=0.5", "seed=1")
    write_slide(path / "a.tiff", 203, 187)
    write_slide(path / "b.tiff", 190, 201, seed=1)
    return path


@pytest.fixture(scope="module")
def done(folder, tmp_path_factory) -> Path:
    """A run directory with both slides predicted."""
    path = tmp_path_factory.mktemp("done")
    predicted(folder, path)
    return path


def predicted(folder: Path, out: Path, *words: str) -> list[dict[str, str]]:
    """The rows of slides.csv."""
    out.mkdir(exist_ok=True)
    named = f"slides=[{folder / 'a.tiff'},{folder / 'b.tiff'}]"
    config = command(f"ckpt_path={folder / 'run'}", named, *ASKED, *words)
    assert run(config, out, SingleProcess())
    return rows(out)


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "slides.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


@pytest.mark.parametrize(
    "other",
    [
        *("average=false", "precision=float32", "min_tissue=0.2", "overlap=7", "tile_size=40"),
        *("slide_mpp=0.5 mpp=0.8 level=null", "whole=true"),
    ],
)
def test_slides_are_done_only_if_all_was_as_it_is(other, folder, done, tmp_path):
    """Otherwise a command with other settings would reuse the last predictions."""
    before = rows(shutil.copytree(done, tmp_path / "out"))
    after = predicted(folder, tmp_path / "out", *other.split())
    assert after == predicted(folder, tmp_path / "anew", *other.split())
    assert after != before


def test_another_network_of_the_same_name_and_step_is_another_one(folder, tmp_path):
    for name in ("a.tiff", "b.tiff"):
        shutil.copy2(folder / name, tmp_path / name)
    found = []
    for seed in (2, 3):  # trained anew into the same run directory
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        train(tmp_path / "run", *NETWORK, f"seed={seed}")
        found.append(predicted(tmp_path, tmp_path / "out"))
    assert found[1] != found[0]
    assert found[1] == predicted(tmp_path, tmp_path / "anew")


def test_slides_that_are_done_are_not_predicted_again(folder, done, tmp_path, caplog):
    before = rows(shutil.copytree(done, tmp_path / "out"))
    with caplog.at_level("INFO"):
        assert predicted(folder, tmp_path / "out") == before
        assert caplog.text.count("is already predicted") == 2
        caplog.clear()
        assert predicted(folder, tmp_path / "out", "overwrite=true") == before
        assert "is already predicted" not in caplog.text


def test_a_slide_that_was_changed_is_predicted_again(folder, tmp_path):
    for name in ("a.tiff", "b.tiff"):
        shutil.copy2(folder / name, tmp_path / name)
    shutil.copytree(folder / "run", tmp_path / "run")
    before = predicted(tmp_path, tmp_path / "out")
    write_slide(tmp_path / "b.tiff", 190, 201, seed=2)
    after = predicted(tmp_path, tmp_path / "out")
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_the_table_says_what_the_files_say(folder, tmp_path, capsys):
    found = predicted(folder, tmp_path)
    lines = capsys.readouterr().out.splitlines()[-2:]
    for row, line in zip(found, lines, strict=True):
        shares = [float(row[f"probability_{k}"]) for k in range(3)]
        best = int(np.argmax(shares))
        assert line.split() == [row["slide"], row["tiles"], str(best), f"{shares[best]:.3f}"]


def test_classes_that_the_network_does_not_know_are_refused(folder, tmp_path):
    words = (f"ckpt_path={folder / 'run'}", f"slides={folder / 'a.tiff'}", "classes=[1,3]")
    with pytest.raises(ValueError, match=r"the network has no class 3, only 0, 1, 2"):
        run(command(*words), tmp_path, SingleProcess())


def test_errors_of_the_tiling_command_name_keys():
    said = _in_keys("smaller than a tile; ask for a smaller mpp, or --edge pad; lower --min-tissue")
    assert said.endswith("a smaller mpp, or edge=pad; lower min_tissue=...")
