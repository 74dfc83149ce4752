from __future__ import annotations

import pytest
import torch
from hydra import compose, initialize_config_module

from spatialdl.data.synthetic import SyntheticDataset
from spatialdl.data.synthetic_targets import SyntheticTargets
from spatialdl.training.tasks.losses import classification_loss, regression_loss
from spatialdl.training.tasks.task import task_of

LABELLED = SyntheticDataset(7, (8, 8), 3)
TARGETS = SyntheticTargets(7, (8, 8), 3, present=True)


def made(*overrides: str, data=LABELLED):
    with initialize_config_module("spatialdl.conf", version_base="1.3"):
        return task_of(compose("train", list(overrides)).task, 3, data)


def test_a_task_s_loss_is_that_of_its_settings():
    draw = torch.Generator().manual_seed(0)
    output = torch.randn(5, 3, generator=draw)
    labels = torch.tensor([0, 1, 2, 2, 1])
    task = made("task.class_weights=[1,2,0.5]", "task.label_smoothing=0.1", "task.mixup=0.2")
    weight = torch.tensor([1, 2, 0.5])
    assert task.loss(output, labels) == classification_loss(output, labels, weight, 0.1)
    assert task.weights(labels).tolist() == [1, 2, 0.5, 0.5, 2]
    assert task.mixup == 0.2
    assert made().weights(labels) is None
    regression = made("task=regression", "task.loss=huber", "task.huber_delta=0.5")
    target = torch.randn(5, 3, generator=draw)
    target[1, 1] = torch.nan
    assert regression.loss(output, target) == regression_loss(output, target, "huber", 0.5)
    assert regression.weights(target).tolist() == [3, 2, 3, 3, 3]


def test_balanced_weights_follow_the_training_labels():
    assert made("task.class_weights=balanced").weight.tolist() == pytest.approx(
        [7 / 9, 7 / 6, 7 / 6]
    )
    labels = torch.from_numpy(TARGETS.labels)
    task = made("task=multilabel", "task.pos_weight=balanced", data=TARGETS)
    assert task.pos_weight.equal((labels == 0).sum(0) / (labels == 1).sum(0).double())


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["task.class_weights=[1,2]"], r"task.class_weights has 2 weights for 3 classes"),
        (["task.class_weights=[1,2,-1]"], "must be numbers of at least 0"),
        (["task.class_weights=[0,0,0]"], "not all of them 0"),
        (["task.class_weights=even"], "class_weights=even is unknown: use null, a list, or bal"),
        (["task.label_smoothing=1.5"], "task.label_smoothing=1.5 must lie between 0 and 1"),
        (["task.mixup=-1"], "task.mixup=-1 must be a number of at least 0"),
        (["task=regression", "task.loss=l2"], "task.loss=l2 is unknown: use mse, l1 or huber"),
        (["task=regression", "task.huber_delta=0"], "must be above 0"),
        (["task=segmentation", "task.class_weights=balanced"], "balanced is unknown: use null or"),
        (["task=segmentation", "task.dice=much"], "task.dice=much must be a number"),
    ],
)
def test_settings_that_make_no_sense_are_refused(overrides, sentence):
    with pytest.raises(ValueError, match=sentence):
        made(*overrides)


def test_classes_that_do_not_occur_cannot_be_balanced():
    few = SyntheticDataset(2, (8, 8), 3)
    with pytest.raises(ValueError, match="no training sample of the class 2: set a list"):
        made("task.class_weights=balanced", data=few)
