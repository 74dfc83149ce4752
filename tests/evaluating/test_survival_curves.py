from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from spatialdl.evaluating.levels import Level
from spatialdl.evaluating.survival_curves import draw_survival, kaplan_meier


def test_the_treated_of_the_remission_data_survive_as_published() -> None:
    """6-mercaptopurine: Freireich et al., Blood 21, 1963; computed by hand."""
    weeks = [
        "6",
        "6",
        "6",
        "6+",
        "7",
        "9+",
        "10",
        "10+",
        "11+",
        "13",
        "16",
        "17+",
        "19+",
        "20+",
        "22",
        "23",
        "25+",
        "32+",
        "32+",
        "34+",
        "35+",
    ]
    times = np.array([float(one.rstrip("+")) for one in weeks])
    at, survived = kaplan_meier(times, np.array(["+" not in one for one in weeks]))
    assert at.tolist() == [6, 7, 10, 13, 16, 22, 23]
    expected = np.cumprod([18 / 21, 16 / 17, 14 / 15, 11 / 12, 10 / 11, 6 / 7, 5 / 6])
    np.testing.assert_allclose(survived, expected, rtol=1e-14)


def level(events: list[float]) -> Level:
    names = [f"s{k}" for k in range(4)]
    truth = np.stack([np.array([1.0, 2, 3, 4]), np.array(events)], 1)
    risks = np.array([[4.0], [3], [2], [1]])
    return Level("slide", "survival", names, risks, truth, names, [[n] for n in names])


def test_the_half_of_higher_risk_is_the_one_that_dies() -> None:
    panel = Figure().subplots()
    assert draw_survival(panel, level([1, 1, 0, 0]), ["months", "dead"], []) == ""
    curves = {line.get_label(): line for line in panel.lines if line.get_linestyle() == "-"}
    high = curves["higher risk (2, 2 events)"]
    assert high.get_xdata().tolist() == [0, 1, 2, 2]
    assert high.get_ydata().tolist() == pytest.approx([1, 0.5, 0, 0])
    assert curves["lower risk (2, 0 events)"].get_ydata().tolist() == [1, 1]
    assert panel.get_xlabel() == "months"


def test_there_is_no_picture_without_events() -> None:
    said = draw_survival(Figure().subplots(), level([0, 0, 0, 0]), ["months", "dead"], [])
    assert said == "no event"
