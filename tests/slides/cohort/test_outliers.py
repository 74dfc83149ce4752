"""Outliers: by robust scores, none where there is nothing to compare."""

from __future__ import annotations

from math import isnan

import numpy as np
import pytest

from spatialdl.slides.cohort.measuring import SlideMeasures
from spatialdl.slides.cohort.outliers import modified_z, outlying


def cohort(**columns: list[float]) -> list[SlideMeasures]:
    rows = zip(*columns.values(), strict=True)
    return [
        SlideMeasures(
            str(k), None, {n: v for n, v in zip(columns, row, strict=True) if not isnan(v)}
        )
        for k, row in enumerate(rows)
    ]


def test_scores_are_those_of_the_formula():
    values = np.array([1.0, 2, 3, 4, 100, np.nan])
    found = modified_z(values)
    np.testing.assert_allclose(found[:5], (values[:5] - 3) / 1.4826)
    assert np.isnan(found[5])


def test_one_slide_stands_out_and_the_others_do_not():
    blur = [0.3, 0.31, 0.29, 0.33, 0.7, 0.32, float("nan")]
    found = outlying(cohort(blur=blur, mpp=[0.5, 0.5, 0.5, 0.25, 0.5, 0.5, 0.5]))
    assert [list(scores) for scores in found] == [[], [], [], ["mpp"], ["blur"], [], []]
    assert found[4]["blur"] > 3.5
    assert found[3]["mpp"] < -3.5


def test_areas_are_compared_by_factors():
    areas = [1.0, 2, 4, 8, 16, 32, 64]
    assert outlying(cohort(tissue_mm2=areas)) == [{}] * 7
    assert list(outlying(cohort(brightness=[*areas[:6], 400.0]))[6]) == ["brightness"]


@pytest.mark.parametrize("values", [[0.5] * 6, [0.1, 0.2, 0.3, 9.0], [float("nan")] * 6])
def test_alike_few_or_unknown_values_have_no_outliers(values):
    assert outlying(cohort(mpp=values)) == [{}] * len(values)
