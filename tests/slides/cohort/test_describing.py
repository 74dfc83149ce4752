"""spatialdl-cohort as a user calls it."""

from __future__ import annotations

import csv

import pytest

from spatialdl.slides.cohort.describing import main
from spatialdl.slides.command import main as tile


def test_slides_labels_tiles_and_predictions_meet(tmp_path, synthetic, capsys):
    slides = synthetic["ring"].parent
    labels = tmp_path / "labels.csv"
    labels.write_text("slide,label,split,patient\nring.tiff,ring,train,p\nstrand,strand,val,q\n")
    tiles = tmp_path / "set"
    words = ["--tile-size", "256", "--level", "0", "--labels", str(labels)]
    assert tile([str(slides), "--out", str(tiles), *words]) == 0
    (tmp_path / "predictions").mkdir()
    (tmp_path / "predictions" / "slides.csv").write_text(
        "slide,tiles,predicted,probability_ring\nring,3,strand,0.123456\nstrand,4,strand,0.2\n"
    )
    more = ["--tiles", str(tiles), "--predictions", str(tmp_path / "predictions")]
    out = tmp_path / "new" / "cohort"
    assert main([str(slides), "--labels", str(labels), *more, "--out", str(out)]) == 0
    assert "ring: predicted strand, the label is ring" in capsys.readouterr().out
    with (out / "cohort.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["slide"] for row in rows] == ["ring", "strand"]
    assert rows[0]["probability_ring"] == "0.1235"
    assert rows[0]["patient"] == "p"
    assert float(rows[0]["tiles"]) > 10
    assert (out / "cohort.html").stat().st_size > 5000


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--labels", "/nowhere.csv"], "cannot read /nowhere.csv"),
        (
            ["--predictions", "/nowhere"],
            "cannot read /nowhere/slides.csv as a prediction table",
        ),
        (["--tiles", "/nowhere"], "/nowhere"),
    ],
)
def test_misuse_is_refused_before_slides_are_measured(tmp_path, synthetic, capsys, more, message):
    out = tmp_path / "out"
    assert main([str(synthetic["ring"]), *more, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
