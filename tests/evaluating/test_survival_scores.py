from __future__ import annotations

import csv

import numpy as np
import pytest
import torch

from spatialdl.evaluating import survival_scores
from spatialdl.evaluating.resampling import point
from spatialdl.evaluating.survival_scores import SurvivalScores
from spatialdl.training.tasks.concordance import concordance
from tests.evaluating.cases import command


def drawn(count: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Risks (N, 1), times and events (N, 2), with ties."""
    draw = np.random.default_rng(0)
    risks = draw.integers(0, 9, (count, 1)) / 2.0
    return risks, np.stack([draw.integers(0, 12, count), draw.integers(0, 2, count)], 1) * 1.0


def test_the_index_is_that_of_training_also_of_samples_drawn_again(monkeypatch) -> None:
    monkeypatch.setattr(survival_scores, "_CELLS", 200)
    risks, truth = drawn()
    scores = SurvivalScores(risks, truth, np.arange(40))
    counts = np.random.default_rng(1).integers(0, 3, (2, 40))
    found = scores.metrics(counts.astype(np.float64))["c_index"]
    for value, times in zip(found, counts, strict=True):
        again = np.repeat(np.arange(40), times)
        given = (risks[again, 0], truth[again, 0], truth[again, 1])
        assert value == pytest.approx(concordance(*map(torch.from_numpy, given)), abs=1e-12)
    none = SurvivalScores(risks, truth * [1, 0], np.arange(40))
    assert np.isnan(point(none)["c_index"])


@pytest.mark.parametrize("is_trained", [True, False])
def test_risks_of_runs_are_evaluated(tmp_path, is_trained) -> None:
    from spatialdl.evaluating.evaluation import evaluate

    risks, truth = drawn()
    names, labels = [f"s{n}" for n in range(40)], "months,dead" if is_trained else "time,event"
    rows = list(zip(names, truth.tolist(), risks[:, 0].tolist(), strict=True))
    if is_trained:
        head = f"sample,slide,x,y,split,{labels},risk"
        lines = [f"{n},{name},,,val,{t},{e},{r}" for n, (name, (t, e), r) in enumerate(rows)]
        (tmp_path / "predictions.csv").write_text("\n".join([head, *lines]) + "\n")
        words = []
    else:
        lines = [f"{name},9,{r},0.4,processed," for name, _, r in rows]
        lines.append("bad,0,,,failed,it has no tiles")
        head = "slide,tiles,risk,survival_1,status,reason"
        (tmp_path / "slides.csv").write_text("\n".join([head, *lines]) + "\n")
        lines = [f"{name}.svs,{t},{e}" for name, (t, e), _ in rows]
        (tmp_path / "labels.csv").write_text("\n".join(["slide,time,event", *lines, "x,,"]) + "\n")
        words = [f"labels={tmp_path / 'labels.csv'}"]
    evaluate(command(f"predictions={tmp_path}", "bootstrap=50", *words), tmp_path)
    with (tmp_path / "metrics.csv").open() as file:
        [row] = csv.DictReader(file)
    assert (row["level"], row["metric"], row["samples"]) == ("slide", "c_index", "40")
    expected = concordance(*map(torch.from_numpy, (risks[:, 0], truth[:, 0], truth[:, 1])))
    assert float(row["estimate"]) == pytest.approx(expected, abs=1e-12)
    assert float(row["low"]) < expected < float(row["high"])
    assert (tmp_path / "report.html").is_file()


def test_patients_whose_slides_have_several_times_are_left_out(tmp_path) -> None:
    """Regression: they counted as samples, with an event at an undefined time."""
    from spatialdl.evaluating.evaluation import evaluate

    lines = [f"s{n},9,{n % 7},processed," for n in range(20)]
    (tmp_path / "slides.csv").write_text(
        "\n".join(["slide,tiles,risk,status,reason", *lines]) + "\n"
    )
    lines = [f"s{n},{5 + n // 2 + (n in (0, 2))},1,p{n // 2}" for n in range(20)]
    (tmp_path / "labels.csv").write_text("\n".join(["slide,time,event,patient", *lines]) + "\n")
    labels = f"labels={tmp_path / 'labels.csv'}"
    evaluate(command(f"predictions={tmp_path}", "bootstrap=5", labels), tmp_path)
    with (tmp_path / "metrics.csv").open() as file:
        samples = {row["level"]: row["samples"] for row in csv.DictReader(file)}
    assert samples == {"slide": "20", "patient": "8"}
    said = (tmp_path / "report.html").read_text()
    assert "2 patients with slides of different labels, left out by patient" in said
    assert (tmp_path / "survival.png").is_file()
