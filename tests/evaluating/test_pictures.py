from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from spatialdl.evaluating.levels import Level, Levels
from spatialdl.evaluating.measured import measure
from spatialdl.evaluating.pictures import draw_pairs, image_errors, save_pictures
from spatialdl.evaluating.resampling import Resampling

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
    draw_pairs(panel, np.array([[3, 1], [0, 20_000]]), ["a", "b"])
    assert [text.get_text() for text in panel.texts] == [
        *("3\n75 %", "1\n25 %", "0\n0 %", "20 k\n100 %")
    ]
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("predicted", "true (%: of its row)")


def test_long_names_can_be_told_apart() -> None:
    names = [f"carcinoma of the {side} colon, moderately differentiated" for side in ("l", "r")]
    panel = Figure().subplots()
    draw_pairs(panel, np.eye(2, dtype=int), names)
    shown = [label.get_text() for label in panel.get_xticklabels()]
    assert len(set(shown)) == 2
    assert max(map(len, shown)) <= 24


def test_classes_that_have_no_curve_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    titles: list[str] = []
    monkeypatch.setattr(
        "matplotlib.axes.Axes.set_title", lambda self, text, **_: titles.append(text)
    )
    saved(tmp_path, level("classification", 12), [str(k) for k in range(12)])
    assert titles[:3] == ["by slide, n = 40, 8 of 12 classes"] * 2 + ["by slide, n = 40"]


def test_a_curve_of_few_slides_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    texts: list[str] = []
    monkeypatch.setattr(
        "matplotlib.axes.Axes.text", lambda self, x, y, text, **_: texts.append(text)
    )
    each = level("classification", 2, count=6)
    each = replace(each, truth=np.arange(6) % 3 // 2)
    assert "ROC curves" in saved(tmp_path, each, ["a", "b"])
    curve = "2 slides of the class, 4 of others:\nnot drawn with fewer than 5 of each"
    assert texts[:3] == [curve, curve, "6 slides:\nnot drawn with fewer than 10"]


def test_the_error_of_a_mask_is_what_its_dice_lacks() -> None:
    pixels = np.array([[[8, 2], [2, 8]], [[4, 0], [0, 0]]])
    assert image_errors(pixels) == pytest.approx([1 - 16 / 20, 0])
