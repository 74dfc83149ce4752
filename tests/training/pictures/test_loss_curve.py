from __future__ import annotations

import math

import pytest
from PIL import Image

from spatialdl.training.pictures.loss_curve import draw


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


def test_a_loss_that_is_no_number_leaves_a_gap(tmp_path):
    rows = [{"step": step, "loss": math.nan if step == 5 else 1.0} for step in range(1, 60)]
    draw(tmp_path / "loss.png", "a run", rows, [])
    assert (tmp_path / "loss.png").stat().st_size > 0
