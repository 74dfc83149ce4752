"""Tables of predictions are read with the right task and kind."""

from __future__ import annotations

from spatialdl.evaluating.predicted import read_predictions
from tests.evaluating.cases import write_rows

HEAD = ("slide", "predicted", "probability_a", "probability_b")


def test_regions_name_their_slides(tmp_path):
    rows = [("s_1", "a", 1, 0, "s", 4), ("s_2", "b", 0, 1, "s", 6), ("t", "b", 0, 1, "", 7)]
    write_rows(tmp_path / "predictions.csv", (*HEAD, "region_of", "sample"), rows)
    found = read_predictions(tmp_path)
    assert (found.slides, found.names) == (["s", "s", "t"], ["s_1", "s_2", "t"])
    assert (found.samples, found.part, found.whole) == (["4", "6", "7"], "image", "slide")


def test_samples_without_slides_are_images(tmp_path):
    rows = [("", "a", 1, 0, 4), ("", "b", 0, 1, 6)]
    write_rows(tmp_path / "predictions.csv", (*HEAD, "sample"), rows)
    found = read_predictions(tmp_path)
    assert (found.slides, found.whole) == (["sample 4", "sample 6"], "image")


def test_risks_of_slides(tmp_path):
    rows = [("a", 1, 0.5), ("b", -2, 0.9)]
    write_rows(tmp_path / "slides.csv", ("slide", "risk", "survival_1"), rows)
    found = read_predictions(tmp_path)
    assert (found.task, found.slides, found.whole) == ("survival", ["a", "b"], "slide")
    assert found.values.tolist() == [[1], [-2]]
    assert found.targets is None
