"""Metrics of tables of predictions and labels, without a network; see also test_evaluate.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from sklearn import metrics as known

from spatialdl.comm.single_process import SingleProcess
from spatialdl.inference.evaluating.cases import config_of
from spatialdl.inference.evaluating.checks import check_evaluation
from spatialdl.inference.evaluating.evaluation import run
from spatialdl.inference.evaluating.levels import group_of, levels_of
from spatialdl.inference.evaluating.predicted import Predicted, read_predictions
from spatialdl.inference.evaluating.truth import find_truth
from spatialdl.training.checkpoints.folder import CONTENT
from tests.inference.evaluating.cases import (
    CLASSES,
    command,
    drawn,
    read_rows,
    write_predictions,
    write_rows,
)


def evaluated(tmp_path: Path, *words: str) -> dict[tuple[str, ...], dict[str, str]]:
    """Rows of metrics.csv by level, group, value, metric and class."""
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    asked = ("bootstrap=40", f"predictions={tmp_path / 'p'}", *words)
    assert run(command(*asked), out, SingleProcess())
    keys = ("level", "group", "value", "metric", "class")
    return {tuple(row[key] for key in keys): row for row in read_rows(out / "metrics.csv")}


def labels(tmp_path: Path, rows: list[tuple[str, ...]], head=("slide", "label")) -> str:
    return f"labels={write_rows(tmp_path / 'labels.csv', head, rows)}"


def number(found, *key: str) -> float:
    return float(found[key]["estimate"] or "nan")


def test_tiles_slides_and_patients_as_scikit_learn(tmp_path, capsys):
    slides, values, truth = drawn()
    write_predictions(tmp_path / "p", slides, values)
    names = [f"s{n}" for n in range(12)]
    rows = [(f"/x/{s}.svs", CLASSES[n % 3], f"P{n % 6}", "AB"[n % 2]) for n, s in enumerate(names)]
    given = labels(tmp_path, rows, ("slide_id", "label", "patient", "scanner"))
    found = evaluated(tmp_path, given, "subgroups=[scanner]", "cases=4")
    at = np.array([names.index(slide) for slide in slides])
    by_slide = np.stack([values[at == n].mean(0) for n in range(12)])
    by_patient = np.stack([by_slide[[n, n + 6]].mean(0) for n in range(6)])
    for level, scores, true in (
        ("tile", values, truth),
        ("slide", by_slide, np.arange(12) % 3),
        ("patient", by_patient, np.arange(6) % 3),
    ):
        told = scores.argmax(1)
        accuracy = known.accuracy_score(true, told)
        assert number(found, level, "all", "", "accuracy", "") == pytest.approx(accuracy, abs=1e-12)
        area = known.roc_auc_score(true == 1, scores[:, 1])
        key = (level, "all", "", "auroc", CLASSES[1])
        assert number(found, *key) == pytest.approx(area, abs=1e-12)
        row = found[key]
        assert (row["units"], row["unit"], row["samples"]) == ("6", "patient", str(len(true)))
    chosen = at % 2 == 0
    expected = known.balanced_accuracy_score(truth[chosen], values[chosen].argmax(1))
    key = ("tile", "scanner", "A", "balanced_accuracy", "")
    assert number(found, *key) == pytest.approx(expected, abs=1e-12)
    low, high = float(found[key]["low"]), float(found[key]["high"])
    assert low < expected < high
    _check_files(tmp_path / "out", values, truth, slides)
    said = capsys.readouterr().out
    assert "95 % intervals, 40 resamples by patient" in said
    assert re.search(r"samples +120 of 6 +12 of 6 +6\n", said)


def _check_files(out: Path, values, truth, slides) -> None:
    worst = [row for row in read_rows(out / "cases.csv") if row["level"] == "tile"]
    errors = 1 - values[np.arange(len(truth)), truth]
    assert [float(row["error"]) for row in worst] == pytest.approx(sorted(errors)[::-1][:4])
    n = int(float(worst[0]["x"]))
    assert (worst[0]["name"], worst[0]["label"]) == (slides[n], CLASSES[truth[n]])
    told = json.loads((out / "metrics.json").read_text())
    pairs = np.array(told["levels"]["tile"]["confusion_matrix"])
    assert (pairs == known.confusion_matrix(truth, values.argmax(1))).all()
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4


def test_labels_of_the_data_set_are_in_the_predictions(tmp_path):
    slides, values, truth = drawn()
    told = np.where(np.arange(120) < 5, -1, truth)
    told[-1] = (truth[-1] + 1) % 3  # another than the rest of its slide
    write_predictions(tmp_path / "p", slides, values, told)
    found = evaluated(tmp_path)
    accuracy = known.accuracy_score(told[5:], values[5:].argmax(1))
    assert number(found, "tile", "all", "", "accuracy", "") == pytest.approx(accuracy)
    remarks = json.loads((tmp_path / "out" / "metrics.json").read_text())["remarks"]
    assert any("without a label, left out" in one for one in remarks)
    assert "1 slide with tiles of different labels, left out by slide" in remarks
    assert found["slide", "all", "", "accuracy", ""]["samples"] == "11"


def test_what_is_missing_is_reported(tmp_path):
    slides, values, _ = drawn()
    values[[3, 4]] = np.nan
    write_predictions(tmp_path / "p", slides, values)
    rows = [(f"s{n}.tif", CLASSES[n % 3] if n else "") for n in range(11)] + [
        ("gone.tif", "tumour")
    ]
    evaluated(tmp_path, labels(tmp_path, rows))
    remarks = json.loads((tmp_path / "out" / "metrics.json").read_text())["remarks"]
    assert "1 slide of the labels without predictions: gone.tif" in remarks
    assert "1 slide without a row in labels.csv: s11" in remarks
    assert any(
        re.match(r"2 slides without a label, left out: s(0, s11|11, s0)", r) for r in remarks
    )
    assert any(r.startswith("2 predictions of ") and "not finite" in r for r in remarks)


@pytest.mark.parametrize("patients", [True, False])
def test_one_unit_has_no_intervals(patients, tmp_path, capsys):
    slides, values, _ = drawn(30, 3)
    write_predictions(tmp_path / "p", slides, values)
    rows = [(f"s{n}", CLASSES[n], "P") for n in range(3)]
    if not patients:
        rows, slides = rows[:1], ["s0"] * 30
        write_predictions(tmp_path / "p", slides, values)
    head = ("slide", "label", "patient" if patients else "site")
    found = evaluated(tmp_path, labels(tmp_path, rows, head))
    row = found["slide", "all", "", "accuracy", ""]
    assert row["low"] == row["high"] == ""
    assert (row["unit"], row["units"]) == (("patient", "1") if patients else ("tile", "1"))
    tiles = found["tile", "all", "", "accuracy", ""]
    assert bool(tiles["low"]) != patients
    assert "[-]" in capsys.readouterr().out
    if not patients:  # all labels are equal
        assert found["tile", "all", "", "auroc", ""]["estimate"] == ""
        assert not (tmp_path / "out" / "roc.png").exists()


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("mean", [0.5, 1 / 3]), ("median", [0.6, 0.2]), ("max", [0.9, 0.7]), ("vote", [2 / 3, 1 / 3])],
)
def test_tiles_are_put_together(aggregation, expected, tmp_path):
    values = np.array([[0.9, 0.1, 0.0], [0.6, 0.2, 0.2], [0.0, 0.7, 0.3], [0.1, 0.8, 0.1]])
    names = ["a", "a", "a", "b"]
    given = Predicted("classification", list(CLASSES), names, names, NONE, values)
    rows = [("a", "benign"), ("b", "in situ")]
    truth = find_truth(given, write_rows(tmp_path / "l.csv", ("slide", "label"), rows))
    _, slides = levels_of(given, truth, aggregation).levels
    assert slides.values[0][:2] == pytest.approx(expected)


def test_numbers_and_labels_of_several_targets(tmp_path):
    rng = np.random.default_rng(0)
    rows = [(f"s{n}", n, 0, 9, 9, *rng.random(2)) for n in range(10)]
    for what, cells in (("predicted", "{:.3f}"), ("probability", "{:.0f}")):
        head = ("slide", "x", "y", "width", "height", f"{what}_age", f"{what}_er")
        write_rows(tmp_path / "p" / "predictions.csv", head, rows)
        truth = [(r[0], cells.format(r[5]), "") for r in rows[:8]]
        found = evaluated(tmp_path, labels(tmp_path, truth, ("slide", "age", "er")))
        metric = "mae" if what == "predicted" else "accuracy"
        assert found["slide", "all", "", metric, ""]["samples"] == "8"
        assert number(found, "slide", "all", "", metric, "") == pytest.approx(
            0 if what == "predicted" else 1, abs=1e-3
        )
    rows = [("s0", "7", "1")]
    with pytest.raises(ValueError, match="has 7 as a label, expected 1, 0 or an empty cell"):
        evaluated(tmp_path, labels(tmp_path, rows, ("slide", "age", "er")))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([("s0", "cancer")], "the label 'cancer', but the network has the classes benign, in situ"),
        ([("x/s0", "tumour"), ("y/s0", "tumour")], "both match slide 's0'"),
        ([("t", "tumour")], "has no label for any of 12 slides that were predicted"),
        ([("s0", "")], "has no label for any of 12 slides"),
    ],
)
def test_labels_that_do_not_fit_are_refused(rows, said, tmp_path):
    slides, values, _ = drawn()
    write_predictions(tmp_path / "p", slides, values)
    with pytest.raises(ValueError, match=said):
        evaluated(tmp_path, labels(tmp_path, rows))
    assert list((tmp_path / "out").iterdir()) == []


@pytest.fixture
def folder(tmp_path):
    slides, values, truth = drawn()
    write_predictions(tmp_path / "p", slides, values, truth)
    (tmp_path / CONTENT).touch()  # a checkpoint, of which only the place matters here
    write_rows(tmp_path / "labels.csv", ("slide", "label", "site"), [("a", "b", "c")])
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("slides=a.svs", "features do not contain labels: give labels=FILE.csv"),
        ("features=f", "features do not contain labels: give labels=FILE.csv"),
        ("predictions=P slides=a.svs", "predictions=.* and slides=a.svs are exclusive"),
        ("predictions=P ckpt_path=run", "are exclusive"),
        ("predictions=P split=test", "split=test is for predicting, but predictions="),
        ("predictions=P maps=true", "maps=True is for predicting"),
        ("predictions=P/..", "slides.csv: give the directory of a run"),
        ("predictions=P parallel=sp", "parallel=sp needs 2 ranks, but evaluating"),
        ("predictions=P bootstrap=-1", "bootstrap=-1 must be a whole number of at least 0"),
        ("predictions=P confidence=95", "confidence=95 must lie between 0 and 1"),
        ("predictions=P aggregation=sum", "aggregation=sum"),
        ("predictions=P subgroups=[site]", "are columns of a table of labels: give labels="),
        ("predictions=P subgroups=site", "must be a list"),
        (
            "predictions=P labels=L subgroups=[scanner]",
            "has no column scanner; its columns",
        ),
        ("predictions=P labels=nowhere.csv", "cannot read nowhere.csv"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(words, said, folder):
    given = words.replace("=P", f"={folder / 'p'}").replace("=L", f"={folder / 'labels.csv'}")
    asked = given.split() if "predictions" in words else [f"ckpt_path={folder}", *given.split()]
    with pytest.raises(ValueError, match=said):
        check_evaluation(command(*asked))


HEAD = ("slide", "predicted", "probability_a", "probability_b")


def test_samples_without_slides_are_images(tmp_path):
    rows = [("", "a", 1, 0, 4), ("", "b", 0, 1, 6)]
    write_rows(tmp_path / "predictions.csv", (*HEAD, "sample"), rows)
    found = read_predictions(tmp_path)
    assert (found.slides, found.whole) == (["sample 4", "sample 6"], "image")
    assert found.samples == ["4", "6"]


def test_risks_of_slides(tmp_path):
    rows = [("a", 1, 0.5), ("b", -2, 0.9)]
    write_rows(tmp_path / "slides.csv", ("slide", "risk", "survival_1"), rows)
    found = read_predictions(tmp_path)
    assert (found.task, found.slides, found.whole) == ("survival", ["a", "b"], "slide")
    assert found.values.tolist() == [[1], [-2]]
    assert found.targets is None


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


def test_labels_by_sample_need_predictions_of_a_data_set(tmp_path):
    file = write_rows(tmp_path / "l.csv", ("sample", "label"), [("0", "no")])
    place, values = np.full((1, 4), np.nan), np.array([[0.6, 0.4]])
    given = Predicted("classification", ["no", "yes"], ["a"], ["a"], place, values)
    with pytest.raises(ValueError, match="by sample, but the predictions have no column sample"):
        find_truth(given, file)


def test_the_configuration_beside_predictions_is_not_resolved(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("slides: ${oc.env:HOME}\n")
    assert config_of(tmp_path).slides == "${oc.env:HOME}"
