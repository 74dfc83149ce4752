"""Aggregation of predictions by tile, slide and patient."""

from __future__ import annotations

import numpy as np

from spatialdl.evaluating.levels import group_of, levels_of
from spatialdl.evaluating.predicted import Predicted
from spatialdl.evaluating.truth import find_truth
from tests.evaluating.cases import write_rows

NONE = np.full((4, 4), np.nan)


def test_regions_are_of_their_slides_and_these_of_patients(tmp_path):
    pixels = np.arange(1, 17).reshape(4, 2, 2)
    names, slides = ["a_1", "a_2", "b", "c"], ["a", "a", "b", "c"]
    given = Predicted(
        *("segmentation", ["no", "yes"], slides, names, NONE, np.empty((4, 2))), pixels=pixels
    )
    rows = [("a.svs", "p", "A"), ("b", "p", "B"), ("c", "", "B")]
    file = write_rows(tmp_path / "l.csv", ("slide", "patient", "scanner"), rows)
    truth = find_truth(given, file)
    assert truth.patients == ["p", "p", "p", "slide c"]
    found = levels_of(given, truth, "mean")
    images, wholes, patients = found.levels
    assert [one.name for one in found.levels] == ["image", "slide", "patient"]
    assert images.names == names
    assert (wholes.values == np.stack([pixels[:2].sum(0), pixels[2], pixels[3]])).all()
    assert (patients.values == np.stack([pixels[:3].sum(0), pixels[3]])).all()
    assert found.unit == "patient"
    assert images.units == ["p", "p", "p", "slide c"]
    assert group_of(images, truth.facts, "scanner") == ["A", "A", "B", "B"]
    assert group_of(patients, truth.facts, "scanner") == ["(mixed)", "B"]


def test_a_slide_of_several_patients_is_no_level(tmp_path):
    values = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.1, 0.9]])
    given = Predicted(
        *("classification", ["no", "yes"], ["set"] * 4, ["set"] * 4, NONE, values),
        samples=["7", "8", "2", "3"],
    )
    rows = [("2", "yes", "p"), ("3", "yes", "p"), ("7", "no", "q"), ("8", "no", "q"), ("9", "", "")]
    file = write_rows(tmp_path / "l.csv", ("sample", "label", "patient"), rows)
    truth = find_truth(given, file)
    assert truth.labels.tolist() == [0, 0, 1, 1]
    assert list(truth.remarks) == ["1 sample of the labels without predictions: 9"]
    tiles, patients = levels_of(given, truth, "mean").levels
    assert (tiles.name, patients.name) == ("tile", "patient")
    assert patients.names == ["q", "p"]
    assert np.allclose(patients.values, [[0.85, 0.15], [0.2, 0.8]])
