from __future__ import annotations

import logging
import math
import re

import pytest
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from spatialdl.common.pages import as_svg
from spatialdl.common.text import readable_bytes
from spatialdl.training.pictures.curves import MOST_POINTS, draw_curves, draw_metrics, thinned
from spatialdl.training.report import save_report
from spatialdl.training.reporter import Reporter
from tests.composing import composed
from tests.fitting import without_pictures
from tests.training.checkpoints.runs import table

STEP = {"step": 1, "epoch": 0, "loss": 1.0, "learning_rate": 0.1, "halo": 0.5}
STEP |= {"images_per_second": 5.0, "data_wait": 0.25}
SUMMARY = {"world_size": 1, "peak_memory_mb": [100.0], "time_split": {}}


def reporter(run_dir, *overrides: str) -> Reporter:
    config = composed("train", "logger=tensorboard", *overrides)
    more = {"table": "layout: 1 replica", "names": ["a", "b"], "columns": ["halo"]}
    return Reporter(config, run_dir, steps=3, resumed=None, **more)


@pytest.fixture
def undrawn():
    with without_pictures():
        yield


@pytest.mark.usefixtures("undrawn")
def test_the_table_and_validations_are_said(tmp_path, caplog):
    with caplog.at_level(logging.INFO), reporter(tmp_path) as ours:
        for step in (1, 2, 3):
            ours.step({**STEP, "step": step}, memory_mb=9.0)
        ours.validated(3, {"loss": 0.5, "samples": 4, "accuracy": 0.25})
        ours.finish(SUMMARY)
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "layout: 1 replica"
    assert [text for text in said if text.startswith("validation after step 3, 4 samples")]
    assert said[-1] == f"report:        {tmp_path / 'report.html'}"
    assert [row["halo"] for row in table(tmp_path / "metrics.csv")] == ["0.5"] * 3


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_a_run_ends_well_without_its_report(wanted, stops, tmp_path, caplog):
    """It is not wanted, or cannot be written."""
    given = f"trainer.report={wanted}".lower()
    with caplog.at_level(logging.INFO), reporter(tmp_path, given) as ours:
        (tmp_path / "report.html" / "folder").mkdir(parents=True)
        ours.step(STEP, memory_mb=9.0)
        if stops:
            ours.stopped(SUMMARY, "Stopped.")
        else:
            ours.finish(SUMMARY)
    assert (tmp_path / "report.html").is_dir()
    assert (tmp_path / "summary.json").exists() != stops
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert [text.partition(": ")[0] for text in warnings] == ["cannot write the report"] * wanted
    assert "report:        " not in caplog.text


def test_the_timeline_of_an_earlier_run_is_not_told_as_that_of_this_one(tmp_path):
    Image.new("RGB", (30, 20), "red").save(tmp_path / "timeline.png")
    with reporter(tmp_path) as ours:
        ours.step(STEP, memory_mb=9.0)
        ours.finish(SUMMARY)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert found.Tags()["images"] == ["run/loss"]
    assert "data:image/png" not in (tmp_path / "report.html").read_text()


def test_no_password_of_an_address_is_in_the_report(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("['logger.mlflow.tracking_uri=a://b:c@d']")
    with reporter(tmp_path, "+store='https://me:secret@host:5000'") as ours:
        ours.finish(SUMMARY)
    text = (tmp_path / "report.html").read_text()
    assert "https://***@host:5000" in text
    assert "a://***@d" in text
    assert "secret" not in text


CONFIG = OmegaConf.create({"optimizer": {"lr": 0.1}, "note": "</pre><script>alert(1)</script>"})
SPLIT = {"seconds_per_step": 0.5, "compute": 0.5, "halo": 0.25, "hand_over": 0.0}
PAGE_SUMMARY = {
    "images_per_second": 12.0,
    "peak_memory_mb": [100.0, 300.0],
    "time_split": {**SPLIT, "reduce": 0.125, "data": 0.125},
}


def step_row(number: int, loss: float = 1.0) -> dict[str, float]:
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
    text = page(
        tmp_path,
        steps=[step_row(1), step_row(2), step_row(3, 0.25)],
        validations=[VALIDATION, {**VALIDATION, "step": 6}],
        summary=PAGE_SUMMARY,
    )
    for fact in ("75.0 %", "0.25", "314.6 MB", "layout: |0|", "&lt;b&gt;tumour"):
        assert fact in text
    assert "optimizer:\n  lr: 0.1\n" in text
    assert re.findall(r"width: ([\d.]+)%\"></i>", text) == [
        *("50.00", "25.00", "0.00", "12.50", "12.50")
    ]
    assert 'rgba(31, 95, 168, 0.5)"' not in text
    assert "rgba(31, 95, 168, 0.5);" in text
    assert "<svg" in text


@pytest.mark.parametrize("loss", [1.0, math.nan])
def test_one_step_and_nothing_else(tmp_path, loss):
    text = page(tmp_path, steps=[step_row(1, loss)])
    assert "<svg" in text
    for head in ("Validations", "Time of a step", "Classes"):
        assert f"<h2>{head}" not in text
    text = page(tmp_path, ended="Stopped by SIGTERM after step 0 of 9.")
    assert '<p class="remarks">Stopped by SIGTERM after step 0 of 9.</p>' in text
    assert "<svg" not in text


def test_long_runs_stay_small(tmp_path):
    rows = [{**VALIDATION, "step": n} for n in range(1, 200)]
    page(tmp_path, steps=[step_row(n) for n in range(1, 20_001)], validations=rows)
    assert (tmp_path / "report.html").stat().st_size < 500_000
    # rows of step, loss and accuracy; of AUROC there is none
    assert (tmp_path / "report.html").read_text().count("<td>...</td>") == 3


@pytest.mark.parametrize(
    ("given", "none", "words"),
    [
        (
            *({"device_memory_mb": [700.0, 1024.0]}, {"device_memory_mb": [None]}),
            ("device memory in use", readable_bytes(2**30)),
        ),
        (
            {"offloaded_mb": [{"written": 1500.0, "read": 2500.0, "stored": 10.0}] * 2},
            {"offloaded_mb": [None]},
            ("off the device", readable_bytes(3 * 10**9), readable_bytes(5 * 10**9)),
        ),
    ],
)
def test_memory_in_use_and_bytes_of_all_ranks_stores_are_shown(given, none, words, tmp_path):
    found = page(tmp_path, summary=PAGE_SUMMARY | given)
    assert all(word in found for word in words)
    assert words[0] not in page(tmp_path, summary=PAGE_SUMMARY | none)


def curve_rows(count: int) -> list[dict[str, float]]:
    return [step_row(n, 1 / n) for n in range(1, count + 1)]


def test_of_many_steps_means_are_drawn():
    assert thinned(curve_rows(3)) == curve_rows(3)
    few = thinned(curve_rows(10 * MOST_POINTS))
    assert len(few) == MOST_POINTS
    assert few[0]["step"] == pytest.approx(5.5)
    assert few[0]["loss"] == pytest.approx(sum(1 / n for n in range(1, 11)) / 10)


def test_metrics_without_a_value_are_not_in_the_legend():
    some, none = ({"accuracy": one, "slide_accuracy": None} for one in (0.5, None))
    rows = [{"step": 1, "loss": 1.0, **none}, {"step": 2, "loss": 0.5, **some}]
    drawing = as_svg(draw_curves("", curve_rows(2), rows))
    assert ">accuracy</text>" in drawing
    assert "slide accuracy" not in drawing
    assert drawing.startswith("<svg")
    assert ">learning rate</text>" in drawing, "text stays text"


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
