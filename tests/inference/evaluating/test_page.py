"""The page of an evaluation, its pictures and its worst cases."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from PIL import Image

from spatialdl.data import ShardWriter
from spatialdl.inference.evaluating.cases import (
    Case,
    CasePictures,
    config_of,
    save_cases,
    worst_cases,
)
from spatialdl.inference.evaluating.evaluation import save_evaluation
from spatialdl.inference.evaluating.levels import Level, Levels
from spatialdl.inference.evaluating.measured import Resampling, measure
from spatialdl.inference.evaluating.pictures import save_pictures
from spatialdl.inference.evaluating.predicted import Predicted
from spatialdl.inference.predicting.pictures import draw_confusion
from tests.inference.evaluating.cases import read_rows

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


def test_the_page_has_what_was_found_escaped_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    truth = np.arange(12) % 2
    values = np.stack([0.7 - 0.4 * truth, 0.3 + 0.4 * truth], 1)
    keys = [[name] for name in NAMES]
    levels = Levels([Level("slide", TOLD["task"], NAMES, values, truth, NAMES, keys)], "slide", [])
    facts = {name: {"site": "XY"[n // 6]} for n, name in enumerate(NAMES)}
    found = measure(levels, TOLD["classes"], Resampling(9), facts, ["site"])
    Image.new("RGB", (3, 3)).save(tmp_path / "roc.png")
    cases = [Case("slide", "s<1>", (float("nan"),) * 4, "a<b", "c 0.7", 0.25, "QUJD")]
    pictures = {"ROC curves": tmp_path / "roc.png"}
    save_evaluation(tmp_path / "report.html", found, levels, cases, pictures, TOLD)
    text = (tmp_path / "report.html").read_text()
    flat = re.sub(r">\s+<", "><", text)
    assert re.findall(r"<h[23]>(.*?)</h[23]>", text) == [
        *("Metrics", "Classes", "By slide", "ROC curves", "Subgroups", "site, by slide"),
        *("Worst slides", "Evaluated data"),
    ]
    for part in (
        "<dt>accuracy by slide</dt><dd>100.0 % [100.0, 100.0]</dd>",
        "<dt>slides</dt><dd>12</dd>",
        "<tr><th>metric</th><th>by slide</th></tr>",
        "<tr><td>X</td><td>6</td><td>100.0 % [100.0, 100.0]</td>",
        "90 % intervals, percentiles of 9 resamples by slide, seed 3",
        'src="data:image/png;base64,',
        'src="data:image/jpeg;base64,QUJD"',
        "error 0.250",
        *("a&lt;b", "s&lt;1&gt;", "&lt;one&gt; slide is missing", "here &amp; there"),
    ):
        assert part in flat
    assert not re.findall(r'(?:src|href)="(?!data:)', text)


RNG = np.random.default_rng(0)


def level(task: str, classes: int, count: int = 40, name: str = "slide") -> Level:
    names = [f"s{n}" for n in range(count)]
    truth: np.ndarray = RNG.integers(0, classes, count)
    values: np.ndarray = RNG.dirichlet(np.ones(classes), count)
    if task == "segmentation":
        values = RNG.integers(1, 99, (count, classes, classes))
    elif task == "multilabel":
        truth = RNG.integers(0, 2, values.shape).astype(float)
    elif task == "regression":
        truth = values + 0.1
    elif task == "survival":
        values, truth = values[:, :1], np.stack([RNG.random(count), np.arange(count) % 2], 1)
    return Level(name, task, names, values, truth, names, [[one] for one in names])


def saved(folder: Path, each: Level, classes: list[str]) -> dict[str, Path]:
    found = measure(Levels([each], "slide", []), classes, Resampling(5), {}, [])
    return save_pictures(folder, [each], classes, found)


@pytest.mark.parametrize(
    ("task", "classes", "files"),
    [
        ("classification", 3, "roc precision-recall calibration confusion"),
        ("classification", 21, "roc precision-recall calibration"),
        ("multilabel", 2, "roc precision-recall calibration"),
        ("regression", 2, "regression"),
        ("segmentation", 3, "confusion dice"),
        ("survival", 2, "survival"),
    ],
)
def test_each_task_has_its_pictures(task: str, classes: int, files: str, tmp_path: Path) -> None:
    found = saved(tmp_path, level(task, classes), [f"class {k}" for k in range(classes)])
    assert [path.name for path in found.values()] == [f"{name}.png" for name in files.split()]
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in found.values()}
    for path in found.values():
        with Image.open(path) as picture:
            assert np.asarray(picture.convert("L")).std() > 5


def test_a_picture_of_an_evaluation_before_is_removed(tmp_path: Path) -> None:
    (tmp_path / "roc.png").touch()
    each = level("classification", 2)
    alone = each.some(each.truth == 1)
    assert "ROC curves" not in saved(tmp_path, alone, ["a", "b"])
    assert not (tmp_path / "roc.png").exists()


def test_a_matrix_shows_counts_and_shares_of_its_rows() -> None:
    panel = Figure().subplots()
    draw_confusion(panel, np.array([[3, 1], [0, 20_000]]), ["a", "b"])
    assert [text.get_text() for text in panel.texts] == [
        *("3\n75 %", "1\n25 %", "0\n0 %", "20 k\n100 %")
    ]
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("predicted", "true (%: of its row)")


PLACES = np.array([[0, 0, 16, 16], [16, 0, 16, 16], [0, 16, 16, 16], [16, 16, 16, 16]], float)
NOTHING = CasePictures(None)


def case_level(task: str, values: np.ndarray, truth: np.ndarray, name: str = "tile") -> Level:
    names = ["s0", "s0", "s1", "s1"]
    keys = [[one] for one in names]
    return Level(name, task, names, values, truth, names, keys, np.arange(4))


def predicted(task: str, classes: list[str], values: np.ndarray) -> Predicted:
    names = ["s0", "s0", "s1", "s1"]
    return Predicted(task, classes, names, names, PLACES, values)


def test_the_least_probable_true_class_comes_first(tmp_path: Path) -> None:
    values = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.6, 0.4]])
    tiles = case_level("classification", values, np.array([0, 0, 1, 1]))
    found = worst_cases([tiles], predicted("classification", ["a", "b"], values), 3, NOTHING)
    assert [one.error for one in found] == pytest.approx([0.8, 0.6, 0.6])
    assert [one.place[:2] for one in found] == [(16, 0), (0, 16), (16, 16)]
    assert (found[0].label, found[0].predicted, found[0].picture) == ("a", "b 0.800", "")
    save_cases(tmp_path / "cases.csv", found)
    [first, *_] = read_rows(tmp_path / "cases.csv")
    assert [first[key] for key in ("name", "x", "width", "label")] == ["s0", "16.0", "16.0", "a"]


def test_errors_of_numbers_are_their_distances() -> None:
    values = np.array([[1.0, 5], [2, 5], [3, 5], [4, 5]])
    truth = np.array([[1.5, np.nan], [2, 8], [np.nan, np.nan], [4, 5.25]])
    given = predicted("regression", ["x", "y"], values)
    found = worst_cases([case_level("regression", values, truth)], given, 9, NOTHING)
    assert [one.error for one in found] == [1.5, 0.5, 0.125, 0]
    assert (found[1].label, found[1].predicted) == ("x 1.5", "x 1")


def test_risks_have_no_worst_case_and_masks_the_least_dice() -> None:
    risks = np.zeros((4, 1))
    survival = case_level("survival", risks, np.ones((4, 2)))
    assert worst_cases([survival], predicted("survival", ["t", "e"], risks), 4, NOTHING) == []
    pixels = np.array([np.diag([9, 9]), [[5, 4], [4, 5]], [[0, 9], [9, 0]], np.diag([9, 0])])
    masks = case_level("segmentation", pixels, np.zeros(4), "image")
    found = worst_cases([masks], predicted("segmentation", ["a", "b"], risks), 4, NOTHING)
    assert [one.error for one in found] == pytest.approx([1, 4 / 9, 0, 0])


def test_pictures_are_the_pixels_of_the_place(tmp_path: Path) -> None:
    colours = [(250, 10, 10), (10, 250, 10), (10, 10, 250)]
    with ShardWriter(tmp_path / "set", classes=["a"]) as writer:
        for number, colour in enumerate(colours):
            image = np.full((32, 32, 3), colour, np.uint8)
            writer.add(image, "a", "test", slide="s0", xy=(32 * number, 0))
    pixels = CasePictures(OmegaConf.create({"shards": str(tmp_path / "set"), "split": "test"}))
    for number, colour in enumerate(colours):
        data = pixels.picture("s0", np.array([32.0 * number, 0, 32, 32]))
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            assert np.abs(np.asarray(image)[16, 16].astype(int) - colour).max() < 12
    assert pixels.picture("other", np.full(4, np.nan)) == ""
    gone = CasePictures(OmegaConf.create({"shards": str(tmp_path / "gone"), "split": None}))
    assert gone.picture("s0", PLACES[0]) == ""


def test_how_predictions_were_made_is_read_if_it_is_there(tmp_path: Path) -> None:
    assert config_of(tmp_path) is None
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("slides: [a]\n")
    assert config_of(tmp_path) == {"slides": ["a"]}
    (tmp_path / ".hydra" / "config.yaml").write_text("a: [")
    assert config_of(tmp_path) is None
