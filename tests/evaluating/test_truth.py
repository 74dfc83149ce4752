"""Matching of label rows with predictions."""

from __future__ import annotations

import numpy as np
import pytest

from spatialdl.data.slide_table import read_table
from spatialdl.evaluating.predicted import Predicted
from spatialdl.evaluating.truth import find_truth, match_slides
from tests.evaluating.cases import write_rows


def test_names_may_have_suffixes_and_folders(tmp_path):
    rows = [("/x/a.svs",), ("b.nii.gz",), ("d/c.tif",), ("other",)]
    file = write_rows(tmp_path / "l.csv", ("slide",), rows)
    found, unknown = match_slides(read_table(file), ["a", "b", "d_c.tif"], file)
    assert {name: row["slide"] for name, row in found.items()} == {
        **{"a": "/x/a.svs", "b": "b.nii.gz", "d_c.tif": "d/c.tif"},
    }
    assert unknown == ["other"]


def test_labels_by_sample_need_predictions_of_a_data_set(tmp_path):
    file = write_rows(tmp_path / "l.csv", ("sample", "label"), [("0", "no")])
    place, values = np.full((1, 4), np.nan), np.array([[0.6, 0.4]])
    given = Predicted("classification", ["no", "yes"], ["a"], ["a"], place, values)
    with pytest.raises(ValueError, match="by sample, but the predictions have no column sample"):
        find_truth(given, file)
