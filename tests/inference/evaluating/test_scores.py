"""Metrics and intervals equal those of scikit-learn, torchmetrics, scipy and training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from scipy import stats
from sklearn import metrics as known

from spatialdl.inference.evaluating import pictures
from spatialdl.inference.evaluating import scores as scores_module
from spatialdl.inference.evaluating.evaluation import evaluate
from spatialdl.inference.evaluating.levels import Level, Levels
from spatialdl.inference.evaluating.measured import (
    Measured,
    Resampling,
    intervals,
    measure,
    point,
)
from spatialdl.inference.evaluating.pictures import save_pictures
from spatialdl.inference.evaluating.scores import (
    ClassScores,
    LabelScores,
    NumberScores,
    PixelScores,
    Ranking,
    SurvivalScores,
)
from spatialdl.training.tasks.metrics import (
    from_pairs,
    multilabel_scores,
    regression_scores,
)
from spatialdl.training.tasks.survival import concordance
from tests.inference.evaluating.cases import command, drawn, read_rows


def test_classes_as_scikit_learn():
    _, values, truth = drawn()
    found = point(ClassScores(values, truth, np.arange(len(truth))))
    told = values.argmax(1)
    is_class = [truth == k for k in range(3)]
    expected = {
        "accuracy": known.accuracy_score(truth, told),
        "balanced_accuracy": known.balanced_accuracy_score(truth, told),
        "f1_per_class": known.f1_score(truth, told, average=None),
        "recall_per_class": known.recall_score(truth, told, average=None),
        "precision_per_class": known.precision_score(truth, told, average=None),
        "auroc_per_class": [known.roc_auc_score(is_class[k], values[:, k]) for k in range(3)],
        "average_precision_per_class": [
            known.average_precision_score(is_class[k], values[:, k]) for k in range(3)
        ],
    }
    for name, value in expected.items():
        assert np.allclose(found[name], value, rtol=0, atol=1e-12), name
    assert len(np.unique(values)) < values.size / 2  # there are ties


def test_calibration_as_torchmetrics():
    from torchmetrics.functional.classification import multiclass_calibration_error

    _, _, truth = drawn()
    values = np.random.default_rng(5).dirichlet((1, 1, 1), len(truth))  # none at an edge of bins
    values[:3] = np.eye(3)[truth[:3]]  # a confidence of 1
    given = torch.from_numpy(values), torch.from_numpy(truth)
    expected = float(multiclass_calibration_error(*given, 3, n_bins=15, norm="l1"))
    found = point(ClassScores(values, truth, np.arange(len(truth))))["calibration_error"]
    assert found == pytest.approx(expected, abs=1e-6)  # torchmetrics has float32 bins


def test_labels_as_in_training_and_scikit_learn():
    rng = np.random.default_rng(1)
    values, truth = rng.random((60, 3)).round(1), rng.integers(0, 2, (60, 3)).astype(float)
    truth[rng.random((60, 3)) < 0.2] = np.nan
    truth[:, 2] = np.where(np.isnan(truth[:, 2]), np.nan, 1)  # all alike
    ours = point(LabelScores(values, truth, np.arange(60)))
    compare(ours, multilabel_scores(torch.from_numpy(values), torch.from_numpy(truth)))
    there = ~np.isnan(truth[:, 0])
    expected = known.average_precision_score(truth[there, 0], values[there, 0])
    assert ours["average_precision_per_class"][0] == pytest.approx(expected, abs=1e-12)


def test_numbers_as_in_training_and_scikit_learn():
    rng = np.random.default_rng(2)
    truth = rng.normal(size=(50, 2))
    values = truth + rng.normal(size=(50, 2))
    truth[:5, 0] = np.nan
    ours = point(NumberScores(values, truth, np.arange(50)))
    compare(ours, regression_scores(torch.from_numpy(values), torch.from_numpy(truth)))
    far, told = 1e6 + truth, 1e6 + values  # whose squares have no digits left for their spread
    r2 = known.r2_score(far[:, 1], told[:, 1])
    found = point(NumberScores(told, far, np.arange(50)))
    assert found["r2_per_target"][1] == pytest.approx(r2, abs=1e-8)
    same = point(NumberScores(values[:, :1], np.ones((50, 1)), np.arange(50)))
    assert np.isnan(same["r2"])


def test_pixels_as_in_training():
    rng = np.random.default_rng(3)
    pairs = rng.integers(0, 90, (7, 3, 3))
    pairs[0, 2], pairs[0, :, 2] = 0, 0  # an image without a class
    ours = point(PixelScores(pairs, np.zeros(7), np.arange(7)))
    theirs = from_pairs(torch.from_numpy(pairs.sum(0)).double())
    compare(ours, {name: theirs[name] for name in ("accuracy", "mean_dice", "mean_iou")})
    of_images = [from_pairs(torch.from_numpy(one).double())["dice"] for one in pairs]
    column = [row[2] for row in of_images if row[2] is not None]
    assert len(column) == 6
    assert ours["image_dice_per_class"][2] == pytest.approx(np.mean(column), abs=1e-12)


def compare(ours, theirs, tolerance=1e-12):
    checked = 0
    for name, value in theirs.items():
        if name in ours:
            expected = np.array(value, np.float64)  # None is NaN
            equal = np.allclose(ours[name], expected, rtol=0, atol=tolerance, equal_nan=True)
            assert equal, (name, ours[name], value)
            checked += 1
    assert checked >= 3


def test_weights_are_copies_of_samples():
    """A unit that is drawn twice counts as two."""
    slides, values, truth = drawn(40, 5)
    unit = np.array([int(name[1:]) for name in slides])
    weights = np.array([[2, 0, 1, 3, 0], [1, 1, 1, 1, 1]], float)
    copies = np.repeat(np.arange(40), weights[0][unit].astype(int))
    pairs = np.random.default_rng(0).integers(0, 9, (40, 3, 3))
    makers = [
        lambda at: ClassScores(values[at], truth[at], unit[at]),
        lambda at: LabelScores(values[at], (np.eye(3)[truth])[at], unit[at]),
        lambda at: NumberScores(values[at], (np.eye(3)[truth])[at], unit[at]),
        lambda at: PixelScores(pairs[at], truth[at], unit[at]),
    ]
    for make in makers:
        whole, some = make(np.arange(40)), make(copies)
        found = whole.metrics(weights)
        expected = point(some)
        for name, value in expected.items():
            assert np.allclose(found[name][0], value, rtol=0, atol=1e-12, equal_nan=True), name
            assert np.allclose(found[name][1], point(whole)[name], atol=1e-12), name


def ranked(count: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores with many ties, labels, and units."""
    rng = np.random.default_rng(4)
    positive = rng.random(count) < 0.3
    return (rng.normal(size=count) + positive).round(1), positive, rng.integers(0, 25, count)


def test_curves_are_those_of_scikit_learn() -> None:
    scores, positive, unit = ranked()
    curve = Ranking(scores, positive, unit).curve()
    assert curve is not None
    wrong, right, _ = known.roc_curve(positive, scores, drop_intermediate=False)
    np.testing.assert_allclose(curve.false_positive, wrong, atol=1e-12)
    np.testing.assert_allclose(curve.recall, right, atol=1e-12)
    precision, recall, _ = known.precision_recall_curve(positive, scores)
    np.testing.assert_allclose(curve.precision, precision[::-1], atol=1e-12)
    np.testing.assert_allclose(curve.recall, recall[::-1], atol=1e-12)


def numbers(units: int) -> NumberScores:
    rng = np.random.default_rng(0)
    errors = rng.exponential(size=(units, 1))
    return NumberScores(errors, np.zeros((units, 1)), np.arange(units))


def test_intervals_are_near_those_of_scipy():
    scores = numbers(80)
    (found,) = intervals(scores, Resampling(2000))["mae"]
    given = (scores.values[:, 0],)
    theirs = stats.bootstrap(given, np.mean, n_resamples=2000, method="percentile", rng=1)
    width = theirs.confidence_interval.high - theirs.confidence_interval.low
    assert abs(found.low - theirs.confidence_interval.low) < 0.08 * width
    assert abs(found.high - theirs.confidence_interval.high) < 0.08 * width
    (narrow,) = intervals(scores, Resampling(2000, 0.5))["mae"]
    assert found.low < narrow.low < float(point(scores)["mae"]) < narrow.high < found.high


def test_units_are_drawn_as_a_whole():
    """Ten copies of each sample in one unit leave the interval unchanged."""
    scores = numbers(30)
    at = np.repeat(np.arange(30), 10)
    copies = NumberScores(scores.values[at], scores.truth[at], at)
    apart = NumberScores(scores.values[at], scores.truth[at], np.arange(300))
    (one,), (same,), (narrow,) = (
        intervals(s, Resampling(500))["mae"] for s in (scores, copies, apart)
    )
    assert np.allclose(one, same, rtol=0, atol=1e-12)
    assert narrow.high - narrow.low < 0.6 * (one.high - one.low)


def test_a_class_that_most_resamples_lack_has_no_interval():
    _, values, truth = drawn(40, 40)
    truth[:] = truth % 2
    found = intervals(ClassScores(values, truth, np.arange(40)), Resampling(200))
    assert np.isnan(found["auroc_per_class"][2]).all()
    assert np.isfinite(found["auroc_per_class"][0]).all()
    assert np.isfinite(found["auroc"][0]).all()


COUNT, FEW = 60, Resampling(50)
RNG = np.random.default_rng(0)
TRUTH = RNG.integers(0, 2, COUNT)
VALUES = np.stack([1 - TRUTH, TRUTH], 1) * 0.3 + RNG.dirichlet((1, 1), COUNT) * 0.7
FACTS = {f"s{n}": {"site": "ABC"[n % 3]} for n in range(COUNT)}


def measured_levels() -> Levels:
    """Slides, each a separate resampling unit."""
    names = [f"s{n}" for n in range(COUNT)]
    each = Level("slide", "classification", names, VALUES, TRUTH, names, [[name] for name in names])
    return Levels([each], "slide", [])


def measured(how: Resampling = FEW, columns: tuple[str, ...] = ()) -> list[Measured]:
    return measure(measured_levels(), ["no", "yes"], how, FACTS, columns)


def test_groups_have_the_metrics_of_their_samples() -> None:
    rows = [m for m in measured(columns=("site",)) if m.group == "site"]
    assert [m.value for m in rows if m.metric == "accuracy"] == ["A", "B", "C"]
    assert {m.name for m in rows} == {""}
    chosen = np.arange(COUNT) % 3 == 1
    [accuracy] = [m for m in rows if (m.value, m.metric) == ("B", "accuracy")]
    assert accuracy.estimate == (VALUES.argmax(1) == TRUTH)[chosen].mean()
    assert (accuracy.samples, accuracy.units) == (20, 20)
    one = next(m for m in measured() if (m.metric, m.name) == ("auroc", "yes"))
    scores = ClassScores(VALUES, TRUTH, np.arange(COUNT))
    assert one.interval == pytest.approx(intervals(scores, FEW)["auroc_per_class"][1])
    assert one.estimate == pytest.approx(known.roc_auc_score(TRUTH, VALUES[:, 1]), abs=1e-12)
    assert one.interval.high - one.interval.low > 0.05


def test_a_column_of_measurements_is_no_column_of_groups() -> None:
    facts = {name: {"age": str(n)} for n, name in enumerate(FACTS)}
    with pytest.raises(ValueError, match=r"subgroups=\[age\] has 60 values, more than 30"):
        measure(measured_levels(), ["no", "yes"], Resampling(0), facts, ["age"])


def survival_level(events: list[float]) -> Level:
    names = [f"s{k}" for k in range(4)]
    truth = np.stack([np.array([1.0, 2, 3, 4]), np.array(events)], 1)
    risks = np.array([[4.0], [3], [2], [1]])
    return Level("slide", "survival", names, risks, truth, names, [[n] for n in names])


def test_the_half_of_higher_risk_is_the_one_that_dies(tmp_path, monkeypatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(pictures, "save_figure", lambda path, figure: figures.append(figure))
    for events in ([1, 1, 0, 0], [0, 0, 0, 0]):
        save_pictures(tmp_path, [survival_level(events)], ["months", "dead"], [])
    panel, without_events = (figure.axes[0] for figure in figures)
    curves = {line.get_label(): line for line in panel.lines if line.get_linestyle() == "-"}
    high = curves["higher risk (2, 2 events)"]
    assert high.get_xdata().tolist() == [0, 1, 2]
    assert high.get_ydata().tolist() == pytest.approx([1, 0.5, 0])
    assert set(curves["lower risk (2, 0 events)"].get_ydata()) == {1}
    assert panel.get_xlabel() == "months"
    assert [text.get_text() for text in without_events.texts] == ["no event"]


def survival(count: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Risks (N, 1), times and events (N, 2), with ties."""
    draw = np.random.default_rng(0)
    risks = draw.integers(0, 9, (count, 1)) / 2.0
    return risks, np.stack([draw.integers(0, 12, count), draw.integers(0, 2, count)], 1) * 1.0


def test_the_index_is_that_of_training_also_of_samples_drawn_again(monkeypatch) -> None:
    monkeypatch.setattr(scores_module, "_CELLS", 200)
    risks, truth = survival()
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
    risks, truth = survival()
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
    [row] = read_rows(tmp_path / "metrics.csv")
    assert (row["level"], row["metric"], row["samples"]) == ("slide", "c_index", "40")
    expected = concordance(*map(torch.from_numpy, (risks[:, 0], truth[:, 0], truth[:, 1])))
    assert float(row["estimate"]) == pytest.approx(expected, abs=1e-12)
    assert float(row["low"]) < expected < float(row["high"])
    assert (tmp_path / "report.html").is_file()


def test_patients_whose_slides_have_several_times_are_left_out(tmp_path) -> None:
    """Regression: they counted as samples, with an event at an undefined time."""
    lines = [f"s{n},9,{n % 7},processed," for n in range(20)]
    (tmp_path / "slides.csv").write_text(
        "\n".join(["slide,tiles,risk,status,reason", *lines]) + "\n"
    )
    lines = [f"s{n},{5 + n // 2 + (n in (0, 2))},1,p{n // 2}" for n in range(20)]
    (tmp_path / "labels.csv").write_text("\n".join(["slide,time,event,patient", *lines]) + "\n")
    labels = f"labels={tmp_path / 'labels.csv'}"
    evaluate(command(f"predictions={tmp_path}", "bootstrap=5", labels), tmp_path)
    samples = {row["level"]: row["samples"] for row in read_rows(tmp_path / "metrics.csv")}
    assert samples == {"slide": "20", "patient": "8"}
    said = (tmp_path / "report.html").read_text()
    assert "2 patients with slides of different labels, left out by patient" in said
    assert (tmp_path / "survival.png").is_file()
