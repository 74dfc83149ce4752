from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from PIL import Image

from spatialdl.evaluating.cases import Case
from spatialdl.evaluating.levels import Level, Levels
from spatialdl.evaluating.measured import measure
from spatialdl.evaluating.page import save_evaluation
from spatialdl.evaluating.resampling import Resampling

NAMES = [f"s{n}" for n in range(12)]
TOLD = {
    "task": "classification",
    "classes": ["a<b", "c"],
    "of": {"predictions": "here & there"},
    "aggregation": "mean",
    "bootstrap": 9,
    "confidence": 0.9,
    "seed": 3,
    "remarks": ["<one> slide is missing"],
}


def page(tmp_path: Path) -> str:
    truth = np.arange(12) % 2
    values = np.stack([0.7 - 0.4 * truth, 0.3 + 0.4 * truth], 1)
    keys = [[name] for name in NAMES]
    slides = Level("slide", "classification", NAMES, values, truth, NAMES, keys)
    levels = Levels([slides], "slide", [])
    facts = {name: {"site": "XY"[n // 6]} for n, name in enumerate(NAMES)}
    found = measure(levels, TOLD["classes"], Resampling(9), facts, ["site"])
    Image.new("RGB", (3, 3)).save(tmp_path / "roc.png")
    place = (float("nan"),) * 4
    cases = [Case("slide", "s<1>", place, "a<b", "c 0.7", 0.25, "QUJD")]
    save_evaluation(
        tmp_path / "report.html", found, levels, cases, {"ROC curves": tmp_path / "roc.png"}, TOLD
    )
    return (tmp_path / "report.html").read_text()


def test_the_page_has_metrics_classes_groups_pictures_and_cases(tmp_path: Path) -> None:
    text = page(tmp_path)
    flat = re.sub(r">\s+<", "><", text)
    assert "<dt>accuracy by slide</dt><dd>100.0 % [100.0, 100.0]</dd>" in flat
    assert "<dt>slides</dt><dd>12</dd>" in flat
    assert "<tr><th>metric</th><th>by slide</th></tr>" in flat
    heads = re.findall(r"<h[23]>(.*?)</h[23]>", text)
    assert heads == [
        *("Metrics", "Classes", "By slide", "ROC curves", "Subgroups", "site, by slide"),
        *("Worst slides", "Evaluated data"),
    ]
    assert "<tr><td>X</td><td>6</td><td>100.0 % [100.0, 100.0]</td>" in flat
    assert "90 % intervals, percentiles of 9 resamples by slide, seed 3" in text
    assert 'src="data:image/png;base64,' in text
    assert 'src="data:image/jpeg;base64,QUJD"' in text
    assert "error 0.250" in text


def test_what_is_given_is_escaped_and_nothing_comes_from_elsewhere(tmp_path: Path) -> None:
    text = page(tmp_path)
    for given in ("a&lt;b", "s&lt;1&gt;", "&lt;one&gt; slide is missing", "here &amp; there"):
        assert given in text
    assert not re.findall(r'(?:src|href)="(?!data:)', text)
    assert [path.name for path in tmp_path.iterdir()].count("report.html") == 1
