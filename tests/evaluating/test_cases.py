from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image

from spatialdl.data import ShardWriter
from spatialdl.evaluating.cases import CasePictures, config_of, save_cases, worst_cases
from spatialdl.evaluating.levels import Level
from spatialdl.evaluating.predicted import Predicted
from tests.evaluating.cases import read_rows

PLACES = np.array([[0, 0, 16, 16], [16, 0, 16, 16], [0, 16, 16, 16], [16, 16, 16, 16]], float)
NOTHING = CasePictures(None)


def level(task: str, values: np.ndarray, truth: np.ndarray, name: str = "tile") -> Level:
    names = ["s0", "s0", "s1", "s1"]
    keys = [[one] for one in names]
    return Level(name, task, names, values, truth, names, keys, np.arange(4))


def predicted(task: str, classes: list[str], values: np.ndarray) -> Predicted:
    names = ["s0", "s0", "s1", "s1"]
    return Predicted(task, classes, names, names, PLACES, values)


def test_the_least_probable_true_class_comes_first(tmp_path: Path) -> None:
    values = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.6, 0.4]])
    tiles = level("classification", values, np.array([0, 0, 1, 1]))
    found = worst_cases([tiles], predicted("classification", ["a", "b"], values), 3, NOTHING)
    assert [one.error for one in found] == pytest.approx([0.8, 0.6, 0.6])
    assert [one.place[:2] for one in found] == [(16, 0), (0, 16), (16, 16)]
    assert (found[0].label, found[0].predicted, found[0].picture) == ("a", "b 0.800", "")
    save_cases(tmp_path / "cases.csv", found)
    [first, *_] = read_rows(tmp_path / "cases.csv")
    assert (first["name"], first["x"], first["width"], first["label"]) == (
        "s0",
        "16.0",
        "16.0",
        "a",
    )


def test_errors_of_numbers_are_their_distances() -> None:
    values = np.array([[1.0, 5], [2, 5], [3, 5], [4, 5]])
    truth = np.array([[1.5, np.nan], [2, 8], [np.nan, np.nan], [4, 5.25]])
    found = worst_cases(
        [level("regression", values, truth)],
        predicted("regression", ["x", "y"], values),
        9,
        NOTHING,
    )
    assert [one.error for one in found] == [1.5, 0.5, 0.125, 0]
    assert (found[1].label, found[1].predicted) == ("x 1.5", "x 1")


def test_risks_have_no_worst_case_and_masks_the_least_dice() -> None:
    risks = np.zeros((4, 1))
    survival = level("survival", risks, np.ones((4, 2)))
    assert worst_cases([survival], predicted("survival", ["t", "e"], risks), 4, NOTHING) == []
    pixels = np.array([np.diag([9, 9]), [[5, 4], [4, 5]], [[0, 9], [9, 0]], np.diag([9, 0])])
    masks = level("segmentation", pixels, np.zeros(4), "image")
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
