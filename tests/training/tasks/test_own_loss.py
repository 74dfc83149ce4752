"""User losses: configuration, required result, and settings that conflict."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spatialdl.common.configuring.overrides import check_overrides
from spatialdl.common.configuring.own_keys import rewritten
from spatialdl.data.synthetic import SyntheticDataset
from spatialdl.training.tasks.own_loss import OwnLoss
from spatialdl.training.tasks.segmentation import Segmentation
from spatialdl.training.tasks.task import task_of
from tests.composing import composed

HERE = "task.loss._target_=tests.training.tasks.test_own_loss"
GIVEN = "task.loss.weights=[1,2,0.5]"
WEIGHTS = torch.tensor([1, 2, 0.5])


def squared(output, target, power=2.0):
    return (output.softmax(1) - F.one_hot(target, output.shape[1])).abs().pow(power).mean()


def listed(output, target, weights):
    assert type(weights) is list
    return F.cross_entropy(output, target, torch.tensor(weights))


class Weighted(nn.Module):
    def __init__(self, weights):
        assert type(weights) is list
        super().__init__()
        self.register_buffer("weights", torch.tensor(weights))

    def forward(self, output, target):
        return F.cross_entropy(output, target, self.weights, ignore_index=255)


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


def made(*words):
    overrides = [rewritten(word) for word in words]
    return task_of(composed("train", *overrides).task, 3, SyntheticDataset(7, (8, 8), 3))


def test_functions_and_classes_are_the_loss_and_metrics_stay():
    output, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 2, 1])
    task = made(f"{HERE}.squared", "task.loss.power=3", "task.mixup=0.2")
    assert (task.name, task.mixup) == ("classification", 0.2)
    assert task.loss(output, labels) == squared(output, labels, 3)
    assert task.weights(labels) is None
    assert task.predictions(output).equal(output.softmax(1))
    assert task.scores(output.softmax(1), labels)["accuracy"] >= 0
    task = made(f"{HERE}.Weighted", GIVEN)
    for dtype in (torch.float64, torch.float32):  # validation and training have types of their own
        expected = F.cross_entropy(output.to(dtype), labels, WEIGHTS.to(dtype))
        assert task.loss(output.to(dtype), labels) == expected
    half = F.cross_entropy(output.bfloat16().float(), labels, WEIGHTS)
    assert task.loss(output.bfloat16(), labels) == half
    task = made(f"{HERE}.listed", GIVEN)
    assert task.loss(output, labels) == F.cross_entropy(output, labels, WEIGHTS)
    smooth = ("task=regression", "task.loss._target_=torch.nn.SmoothL1Loss", "task.loss.beta=2")
    assert made(*smooth).loss(output, output + 1) == pytest.approx(0.25)


def test_that_of_maps_is_the_mean_over_the_slices_by_their_samples():
    task = made("task=segmentation", f"{HERE}.Weighted", GIVEN)
    assert isinstance(task, Segmentation)
    slices = [(torch.randn(n, 3, 4, 5), torch.randint(0, 3, (n, 4, 5))) for n in (1, 3)]
    sums = sum(task.tally(*one, part=0) for one in slices)
    losses = [task.loss(output.double(), target) for output, target in slices]
    found = task.metrics(sums.tolist())
    assert found["loss"] == pytest.approx(float(losses[0] + 3 * losses[1]) / 4)
    assert found["samples"] == 4
    assert sum(map(sum, found["confusion_matrix"])) == 4 * 20
    assert not task.tally(*slices[0], part=1).any(), "of equal outputs one counts"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("task.loss=focal", "task.loss=focal is unknown for task=classification"),
        ("task=regression task.loss=l2", "or your own loss, task.loss._target_=package.Loss"),
        ("task.loss._target_=no.such.Loss", "task.loss._target_=no.such.Loss cannot be created"),
        (f"{HERE}.Weighted", "cannot be created: .*weights"),
        (f"{HERE}.Learned", "has parameters, but only those of the network"),
        (f"{HERE}.HERE", "cannot be created"),
        (
            f"{HERE}.squared task.class_weights=[1,2,3]",
            "task.class_weights=.* is a setting of the loss of task=classification",
        ),
        (f"task=segmentation {HERE}.squared task.dice=1", "dice=1 is a setting"),
    ],
)
def test_what_cannot_be_is_told(words, sentence):
    with pytest.raises(ValueError, match=sentence):
        made(*words.split())


def test_arguments_are_those_of_the_loss_that_is_set():
    words = [f"{HERE}.squared", "task.loss.power=3", "task.mixup=0.2"]
    check_overrides([rewritten(word) for word in words])
    words[1] = "task.loss.powr=2"
    with pytest.raises(ValueError, match=r"nearest: task\.loss\.power"):
        check_overrides([rewritten(word) for word in words])
    with pytest.raises(ValueError, match=r"not set: add task\.loss\._target_=package\.Class"):
        check_overrides([rewritten("task.loss.power=2")])


@pytest.mark.parametrize("wrong", [lambda output, _: output.sum(1), lambda *_: 1.0])
def test_a_loss_is_one_number(wrong):
    with pytest.raises(ValueError, match=r"task.loss=mine returns .*, expected a scalar"):
        OwnLoss("mine", wrong)(torch.randn(2, 3), torch.tensor([0, 1]))
