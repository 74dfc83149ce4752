from __future__ import annotations

import math

import pytest
from matplotlib.figure import Figure
from PIL import Image

from spatialdl.training.pictures.loss_curve import draw, draw_metrics


@pytest.mark.parametrize("steps", [1, 2, 50])
@pytest.mark.parametrize(
    "validated",
    [{}, {"accuracy": 0.75, "auroc": None, "slide_accuracy": 0.5}, {"rmse": 2.5, "mae": 2.0}],
)
def test_picture_of_the_loss(tmp_path, steps, validated):
    rows = [{"step": step + 1, "loss": 1 / (step + 1)} for step in range(steps)]
    validations = [{"step": steps, "loss": 0.5, "samples": 8, **validated}] if validated else []
    draw(tmp_path / "loss.png", "a run", rows, validations)
    with Image.open(tmp_path / "loss.png") as picture:
        assert picture.size == (1200, 900 if validated else 600)
        assert len(picture.convert("RGB").getcolors(100_000)) > 5


def test_lines_at_100_percent_are_whole_and_few_slides_are_named_not_drawn():
    row = {"accuracy": 1.0, "slide_auroc": 1.0, "samples": 99, "slides": 2}
    rows = [{"step": n, **row} for n in (1, 2)]
    panel = Figure().subplots()
    draw_metrics(panel, rows)
    low, high = panel.get_ylim()
    assert low < 0
    assert high > 100
    shown = ["accuracy", "2 slides: too few to draw their metrics"]
    assert panel.get_legend_handles_labels()[1] == shown
    for counts, shown in (
        ({"slides": 10}, ["accuracy", "slide AUROC"]),
        ({"samples": 2}, ["2 validation samples: too few to draw their metrics"]),
        ({"samples": 2, "mean_dice": 0.5, "slides": None}, ["accuracy", "Dice", "slide AUROC"]),
    ):
        panel = Figure().subplots()
        draw_metrics(panel, [row | counts for row in rows])
        assert panel.get_legend_handles_labels()[1] == shown


def test_a_loss_that_is_no_number_leaves_a_gap(tmp_path):
    rows = [{"step": step, "loss": math.nan if step == 5 else 1.0} for step in range(1, 60)]
    draw(tmp_path / "loss.png", "a run", rows, [])
    assert (tmp_path / "loss.png").stat().st_size > 0
