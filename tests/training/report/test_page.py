from __future__ import annotations

import math
import re

import numpy as np
import pytest
from omegaconf import OmegaConf

from spatialdl.text import readable_bytes
from spatialdl.training.pictures.gallery import Example
from spatialdl.training.report.page import save_report, settings_lines

CONFIG = OmegaConf.create({"optimizer": {"lr": 0.1}, "note": "</pre><script>alert(1)</script>"})
SPLIT = {"seconds_per_step": 0.5, "compute": 0.5, "halo": 0.25, "hand_over": 0.0}
SUMMARY = {
    "images_per_second": 12.0,
    "peak_memory_mb": [100.0, 300.0],
    "time_split": {**SPLIT, "reduce": 0.125, "data": 0.125},
}


def step(number: int, loss: float = 1.0) -> dict[str, float]:
    return {"step": number, "loss": loss, "learning_rate": 0.1, "images_per_second": 10.0}


VALIDATION = {
    **{"step": 3, "loss": 0.5, "samples": 12, "accuracy": 0.75, "auroc": None},
    **{"recall_per_class": [0.5, 1.0], "confusion_matrix": [[3, 3], [0, 6]]},
}


def page(folder, **given) -> str:
    settings = {
        **{"title": "net, parallel=sp", "config": CONFIG, "overrides": ["optimizer.lr=0.1"]},
        **{"table": "layout: |0|", "names": ["benign", "<b>tumour"], "steps": [], "summary": {}},
        **{"validations": []},
    }
    save_report(folder / "report.html", **{**settings, **given})
    text = (folder / "report.html").read_text()
    shown = text.partition("</style>")[2]
    assert not re.search(r'(src|href)="(?!data:|#)', shown)  # nothing from elsewhere
    assert "url(http" not in text
    assert "<script" not in text
    assert len(text) < 3_000_000
    return text


def test_a_whole_run(tmp_path):
    picture = np.random.default_rng(0).integers(0, 256, (320, 320, 3), np.uint8)
    pictures = {"image": picture, "truth": picture, "predicted": picture}
    shown = [Example(n, f"slide {n}", f"is {n}", 0.5, pictures) for n in range(8)]
    text = page(
        tmp_path,
        steps=[step(1), step(2), step(3, 0.25)],
        validations=[VALIDATION, {**VALIDATION, "step": 6}],
        summary=SUMMARY,
        examples=shown,
    )
    for fact in ("75.0 %", "0.25", "314.6 MB", "layout: |0|", "&lt;b&gt;tumour", "is 7"):
        assert fact in text
    assert text.count("<figure>") == 8
    assert text.count("data:image/jpeg") == 24
    assert '<mark title="optimizer.lr=0.1">  lr: 0.1</mark>' in text
    assert re.findall(r"width: ([\d.]+)%\"></i>", text) == [
        *("50.00", "25.00", "0.00", "12.50", "12.50")
    ]
    assert 'rgba(31, 95, 168, 0.5)"' not in text
    assert "rgba(31, 95, 168, 0.5);" in text
    assert "<svg" in text


@pytest.mark.parametrize("loss", [1.0, math.nan, math.inf])
def test_one_step_and_nothing_else(tmp_path, loss):
    text = page(tmp_path, steps=[step(1, loss)])
    assert "<svg" in text
    for head in ("Validations", "Examples", "Time of a step", "Classes"):
        assert f"<h2>{head}" not in text


def test_a_run_that_was_stopped_before_its_first_step(tmp_path):
    text = page(tmp_path, ended="Stopped by SIGTERM after step 0 of 9.")
    assert '<p class="remarks">Stopped by SIGTERM after step 0 of 9.</p>' in text
    assert "<svg" not in text


def test_long_runs_stay_small(tmp_path):
    rows = [{**VALIDATION, "step": n} for n in range(1, 200)]
    page(tmp_path, steps=[step(n) for n in range(1, 200_001)], validations=rows)
    assert (tmp_path / "report.html").stat().st_size < 500_000
    # rows of step, loss and accuracy; of AUROC there is none
    assert (tmp_path / "report.html").read_text().count("<td>...</td>") == 3


def test_memory_that_a_device_says_is_in_use_stands_beside_the_peak(tmp_path):
    found = page(tmp_path, summary={**SUMMARY, "device_memory_mb": [700.0, 1024.0]})
    assert "device memory in use" in found
    assert readable_bytes(2**30) in found
    assert "device memory in use" not in page(
        tmp_path, summary=SUMMARY | {"device_memory_mb": [None]}
    )


def test_bytes_of_the_store_of_virtual_tiles_are_those_of_all_ranks(tmp_path):
    one = {"written": 1500.0, "read": 2500.0, "stored": 10.0}
    found = page(tmp_path, summary={**SUMMARY, "offloaded_mb": [one, one]})
    assert readable_bytes(3 * 10**9) in found
    assert readable_bytes(5 * 10**9) in found
    assert "off the device" not in page(tmp_path, summary={**SUMMARY, "offloaded_mb": [None]})


def test_lines_are_yaml_with_what_was_changed():
    config = {"parallel": {"name": "sp", "grid": [2, 1]}, "seed": 0, "weights": None, "data": {}}
    overrides = ["parallel=sp", "++parallel.grid=[2,1]", "~weights", "data/augment=none"]
    assert [tuple(line) for line in settings_lines(config, overrides)] == [
        ("parallel:", "parallel=sp"),
        ("  name: sp", ""),
        ("  grid: [2, 1]", "parallel.grid=[2,1]"),
        ("seed: 0", ""),
        ("weights: null", "~weights"),
        ("data: {}", ""),
    ]
