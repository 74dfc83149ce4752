from __future__ import annotations

import pytest

from spatialdl.training.report.curves import MOST_POINTS, curves, thinned


def rows(count: int) -> list[dict[str, float]]:
    return [
        {"step": n, "loss": 1 / n, "learning_rate": 0.1, "images_per_second": 5.0}
        for n in range(1, count + 1)
    ]


def test_few_steps_are_drawn_as_they_are():
    assert thinned(rows(3)) == rows(3)


def test_of_many_steps_means_are_drawn():
    few = thinned(rows(10 * MOST_POINTS))
    assert len(few) == MOST_POINTS
    assert few[0]["step"] == pytest.approx(5.5)
    assert few[0]["loss"] == pytest.approx(sum(1 / n for n in range(1, 11)) / 10)


def test_text_stays_text():
    drawing = curves(rows(2), [{"step": 2, "loss": 0.5, "rmse": 2.0}])
    assert drawing.startswith("<svg")
    assert ">learning rate</text>" in drawing
    assert ">RMSE</text>" in drawing


def test_metrics_without_a_value_are_not_in_the_legend():
    some, none = (
        {"accuracy": 0.5, "slide_accuracy": None},
        {"accuracy": None, "slide_accuracy": None},
    )
    drawing = curves(rows(2), [{"step": 1, "loss": 1.0, **none}, {"step": 2, "loss": 0.5, **some}])
    assert ">accuracy</text>" in drawing
    assert "slide accuracy" not in drawing
