from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch

from spatialdl.data import ShardDataset, ShardWriter
from spatialdl.data.synthetic import SyntheticDataset, SyntheticTargets
from spatialdl.training.parts import RunParts
from spatialdl.training.tasks.predictions import Predictions, to_slides
from spatialdl.training.tasks.task import Classification, MultiLabel, Regression
from tests.fitting import make_parts, validated
from tests.training.checkpoints.runs import table as rows


@pytest.fixture
def tiles(tmp_path):
    """Tiles of three slides; those of the last have several labels."""
    with ShardWriter(tmp_path / "set", ("benign", "tumour, large")) as shards:
        for number, (slide, label) in enumerate(
            [("a", 0), ("b", 1), ("a", 0), ("c", 0), ("b", 1), ("c", 1)]
        ):
            image = np.zeros((4, 4, 3), np.uint8)
            shards.add(image, label, "val", slide=f"{slide}.svs", xy=(number, 2 * number))
    return ShardDataset(tmp_path / "set", "val")


OUTPUTS = torch.tensor([[2, 0], [0, 1], [0, 1], [1, 0], [0, 3], [1, 0]], dtype=torch.float64)


def test_classes_of_tiles_and_slides(tiles, tmp_path):
    found = Predictions(Classification(), OUTPUTS, tiles, tiles.classes, [4, 5, 6, 7, 8, 9])
    scores = found.scores()
    assert (scores["samples"], scores["slides"]) == (6, 2)
    assert scores["accuracy"] == 4 / 6
    assert scores["slide_accuracy"] == 1
    assert scores["slide_vote_accuracy"] == 1  # one vote each; the mean decides
    assert scores["slide_auroc"] == 1
    found.write(tmp_path)
    table = rows(tmp_path / "predictions.csv")
    shares = OUTPUTS.softmax(1)
    assert table[4] == {
        **{"sample": "8", "slide": "b.svs", "x": "4", "y": "8", "split": "val"},
        **{"label": "tumour, large", "predicted": "tumour, large"},
        "probability_benign": repr(shares[4, 0].item()),
        "probability_tumour, large": repr(shares[4, 1].item()),
    }
    slides = rows(tmp_path / "slides.csv")
    assert [row["slide"] for row in slides] == ["a.svs", "b.svs", "c.svs"]
    assert [row["label"] for row in slides] == ["benign", "tumour, large", ""]
    assert [row["tiles"] for row in slides] == ["2"] * 3
    assert float(slides[0]["probability_benign"]) == shares[[0, 2], 0].mean()
    assert not list(tmp_path.glob(".*"))
    tiles.labels[:] = [0, 0, 1, 0, 1, 1]  # of no slide alike
    scores = Predictions(Classification(), OUTPUTS, tiles, tiles.classes).scores()
    assert scores["slides"] == 0
    assert scores["slide_accuracy"] is scores["slide_auroc"] is None
    assert scores["slide_vote_accuracy"] is None


def test_several_labels_and_numbers(tmp_path):
    source = SyntheticTargets(4, (8, 8), 2, present=True)
    source.labels[1, 1] = torch.nan
    outputs = torch.tensor([[1, -1], [2, 0], [0, 3], [-1, 1]], dtype=torch.float64)
    found = Predictions(MultiLabel(), outputs, source, ["er", "pr"])
    found.write(tmp_path)
    first, second, *_ = rows(tmp_path / "predictions.csv")
    assert list(first)[5:] == ["label_er", "label_pr", "probability_er", "probability_pr"]
    assert (second["label_pr"], second["slide"]) == ("", "")
    assert float(first["probability_er"]) == outputs[0, 0].sigmoid()
    assert not (tmp_path / "slides.csv").exists()
    assert "slides" not in found.scores()
    Predictions(Regression(), outputs, source, ["er", "pr"]).write(tmp_path)
    assert rows(tmp_path / "predictions.csv")[2]["predicted_pr"] == "3.0"


def test_slides_of_numbers(tiles, tmp_path):
    tiles.labels = np.array([[1.0], [3], [1], [2], [3], [2]])
    found = Predictions(Regression(), OUTPUTS[:, :1], tiles, ["age"])
    scores = found.scores()
    assert scores["slides"] == 3
    assert scores["slide_mae"] == pytest.approx((0 + 3 + 1) / 3)
    found.write(tmp_path)
    assert rows(tmp_path / "slides.csv")[1] == {
        **{"slide": "b.svs", "tiles": "2", "label_age": "3.0", "predicted_age": "0.0"}
    }


def test_a_network_may_tell_more_classes_apart_than_there_are(tmp_path):
    source = SyntheticDataset(2, (8, 8), 2)
    Predictions(Classification(), torch.eye(3)[1:].double(), source, ["a", "b"]).write(tmp_path)
    table = rows(tmp_path / "predictions.csv")
    assert [row["predicted"] for row in table] == ["b", "2"]
    assert list(table[0])[-1] == "probability_2"


def test_most_tiles_win_and_of_equally_many_the_larger_mean():
    told = torch.tensor([[0.4, 0.6]] * 2 + [[1.0, 0.0]] + [[0.9, 0.1], [0.3, 0.7]]).double()
    found = to_slides(told, torch.zeros(5).long(), ["a", "a", "a", "tie", "tie"])
    assert found.votes.tolist() == [1, 0]
    assert found.means.argmax(1).tolist() == [0, 0]  # not what the vote of the first says


def test_labels_that_are_not_known_agree():
    told, labels = torch.rand(4, 2), torch.tensor([[1, torch.nan]] * 3 + [[1, 0.0]])
    assert to_slides(told, labels, ["a", "a", "b", "b"]).agree.tolist() == [True, False]


def parts(*words: str) -> RunParts:
    given = ("data.image_size=[40,36]", "data.num_classes=3", "data.samples=3", "device=cpu")
    network = ["++model._target_=tests.mpi.training.small.small", "~model.width"]
    network = ["++model.width=2", *words] if "model=unet" in words else [*network, *words]
    return make_parts(*given, "data.batch_size=3", "trainer.max_steps=1", *network)


def test_a_class_without_auroc_is_named_once(tmp_path, caplog):
    ours = parts("data.validation_samples=2")
    with caplog.at_level(logging.WARNING):
        validated(ours)
        validated(ours)
    assert [one.message[:15] for one in caplog.records] == ["no AUROC for 2:"]


def test_samples_that_are_met_twice_are_noticed():
    ours = parts("data.validation_samples=4")
    assert validated(ours)["samples"] == 4
    loader = ours.validation_loader
    first = ours.validation.own([loader.microbatches(next(loader.batches()))])
    with pytest.raises(RuntimeError, match="got 3 outputs for 4 samples"):
        ours.validation.scores(first)


@pytest.mark.parametrize("task", ["classification", "multilabel", "regression", "segmentation"])
def test_outputs_that_are_no_numbers_have_no_metrics(task):
    unet = ["model=unet", "++model.depth=1"] if task == "segmentation" else []
    ours = parts(*unet, f"task={task}", "data.validation_samples=4")
    with torch.no_grad():
        next(ours.pipeline.parameters()).fill_(torch.nan)
    found = validated(ours)
    assert math.isnan(found.pop("loss"))
    assert found.pop("samples") == 4
    assert all(value in (None, []) for value in found.values())
