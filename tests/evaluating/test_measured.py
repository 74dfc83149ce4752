from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as known

from spatialdl.evaluating.levels import Level, Levels
from spatialdl.evaluating.measured import (
    ALL,
    Measured,
    measure,
    save_metrics,
    shown_name,
    shown_value,
)
from spatialdl.evaluating.resampling import Interval, Resampling

COUNT, FEW = 60, Resampling(50)
RNG = np.random.default_rng(0)
TRUTH = RNG.integers(0, 2, COUNT)
VALUES = np.stack([1 - TRUTH, TRUTH], 1) * 0.3 + RNG.dirichlet((1, 1), COUNT) * 0.7
FACTS = {f"s{n}": {"site": "ABC"[n % 3]} for n in range(COUNT)}


def levels() -> Levels:
    """Slides, each a separate resampling unit."""
    names = [f"s{n}" for n in range(COUNT)]
    each = Level("slide", "classification", names, VALUES, TRUTH, names, [[name] for name in names])
    return Levels([each], "slide", [])


def found(how: Resampling = FEW, columns: tuple[str, ...] = ()) -> list[Measured]:
    return measure(levels(), ["no", "yes"], how, FACTS, columns)


def test_intervals_are_those_of_scipy() -> None:
    """Independent draws: 1,000 resamples agree within a hundredth."""
    one = next(m for m in found(Resampling(1000)) if (m.metric, m.name) == ("auroc", "yes"))
    expected = stats.bootstrap(
        (VALUES[:, 1], TRUTH),
        lambda values, truth: known.roc_auc_score(truth, values),
        paired=True,
        vectorized=False,
        n_resamples=1000,
        method="percentile",
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert one.estimate == pytest.approx(known.roc_auc_score(TRUTH, VALUES[:, 1]), abs=1e-12)
    assert one.interval == pytest.approx((expected.low, expected.high), abs=1.2e-2)
    assert expected.high - expected.low > 0.05


def test_groups_have_the_metrics_of_their_samples() -> None:
    rows = [m for m in found(columns=("site",)) if m.group == "site"]
    assert [m.value for m in rows if m.metric == "accuracy"] == ["A", "B", "C"]
    assert {m.name for m in rows} == {""}
    chosen = np.arange(COUNT) % 3 == 1
    [accuracy] = [m for m in rows if (m.value, m.metric) == ("B", "accuracy")]
    assert accuracy.estimate == (VALUES.argmax(1) == TRUTH)[chosen].mean()
    assert (accuracy.samples, accuracy.units) == (20, 20)


def test_a_column_of_measurements_is_no_column_of_groups() -> None:
    facts = {name: {"age": str(n)} for n, name in enumerate(FACTS)}
    with pytest.raises(ValueError, match=r"subgroups=\[age\] has 60 values, more than 30"):
        measure(levels(), ["no", "yes"], Resampling(0), facts, ["age"])


def test_tables_have_every_metric(tmp_path: Path) -> None:
    rows = found(columns=("site",))
    save_metrics(tmp_path, rows, levels(), {"task": "classification"})
    with (tmp_path / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(rows)
    assert [float(row["estimate"]) for row in table] == [one.estimate for one in rows]
    tree = json.loads((tmp_path / "metrics.json").read_text())
    assert (tree["task"], tree["unit"]) == ("classification", "slide")
    by_slide = tree["levels"]["slide"]
    pairs = known.confusion_matrix(TRUTH, VALUES.argmax(1))
    assert by_slide["confusion_matrix"] == pairs.tolist()
    [recall] = [m for m in rows if (m.metric, m.name, m.group) == ("recall", "yes", ALL)]
    assert by_slide["per_class"]["recall"]["yes"] == {
        "estimate": recall.estimate,
        "low": recall.interval.low,
        "high": recall.interval.high,
    }
    assert set(tree["subgroups"]["site"]) == {"A", "B", "C"}


@pytest.mark.parametrize(
    ("metric", "estimate", "limits", "text"),
    [
        ("accuracy", 0.912, (0.88, 0.939), "91.2 % [88.0, 93.9]"),
        ("auroc", np.nan, (np.nan, np.nan), "- [-]"),
        ("mae", 3.14159, (2.5, 4.0), "3.142 [2.5, 4]"),
        ("mae", 3.14159, (np.nan, np.nan), "3.142 [-]"),
    ],
)
def test_values_are_shown_with_their_intervals(metric, estimate, limits, text) -> None:
    one = Measured("slide", ALL, "", metric, "", estimate, Interval(*limits), 9, 9)
    assert shown_value(one) == text
    assert shown_name("mean_dice") == "mean Dice"
