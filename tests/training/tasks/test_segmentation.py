from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torchmetrics.functional.classification import multiclass_jaccard_index
from torchmetrics.functional.segmentation import dice_score

from spatialdl.data.format import UNLABELLED
from spatialdl.training.tasks.losses import segmentation_loss
from spatialdl.training.tasks.segmentation import Segmentation

TASKS = [
    Segmentation(4),
    Segmentation(4, torch.tensor([0.5, 2.0, 1.0, 3.0]), 0.1, 0.7),
]


def masks(*size: int, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and masks with some pixels that have no class."""
    draw = torch.Generator().manual_seed(3)
    output = torch.randn(size[0], classes, *size[1:], dtype=torch.float64, generator=draw)
    target = torch.randint(classes, size, generator=draw)
    target[torch.rand(size, generator=draw) < 0.3] = UNLABELLED
    return output, target


@pytest.mark.parametrize("task", TASKS)
def test_tallies_of_parts_add_up_to_that_of_the_whole(task):
    output, target = masks(3, 9, 7)
    whole = task.tally(output, target, part=0)
    parts = task.tally(output[:1], target[:1], 0) + task.tally(output[1:], target[1:], 0)
    torch.testing.assert_close(parts, whole)
    assert len(whole) == task.tallied
    found = task.metrics(whole.tolist())
    assert found["loss"] == pytest.approx(task.loss(output, target).item(), abs=1e-13)


def test_pixels_of_no_weight_cost_nothing():
    task = Segmentation(4, torch.tensor([0.0, 1.0, 1.0, 1.0]), 0.1)
    output, target = masks(3, 9, 7)
    assert task.metrics(task.tally(output, target * 0, 0).tolist())["loss"] == 0


def test_copies_on_other_parts_do_not_count():
    assert Segmentation(4).tally(*masks(3, 9, 7), part=1).abs().max() == 0


def test_dice_and_iou_are_torchmetrics_on_the_whole():
    task = Segmentation(4)
    output, target = masks(3, 19, 17)
    found = task.metrics(task.tally(output, target, 0).tolist())
    known = target != UNLABELLED
    told, truth = output.argmax(1)[known], target[known]
    iou = multiclass_jaccard_index(told, truth, 4, average=None)
    assert found["iou"] == pytest.approx(iou.tolist(), abs=1e-6)
    dice = dice_score(told[None], truth[None], 4, average=None, input_format="index")
    assert found["dice"] == pytest.approx(dice[0].tolist(), abs=1e-6)
    assert found["mean_dice"] == pytest.approx(dice.mean().item(), abs=1e-6)


def test_metrics_of_a_segmentation():
    target = torch.tensor([[[0, 0, 1, 1, 255, 255]]])
    told = torch.tensor([[[0, 1, 1, 1, 1, 2]]])
    output = F.one_hot(told, 4).permute(0, 3, 1, 2).double()
    task = Segmentation(4)
    found = task.metrics(task.tally(output, target, 0).tolist())
    assert found["accuracy"] == 3 / 4
    assert found["dice"][:2] == pytest.approx([2 / 3, 4 / 5])
    assert found["iou"][:2] == pytest.approx([1 / 2, 2 / 3])
    assert found["dice"][2:] == found["iou"][2:] == [None, None]
    assert found["confusion_matrix"][:2] == [[1, 1, 0, 0, 0], [0, 2, 0, 0, 0]]
    assert found["mean_dice"] == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert found["mean_iou"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert found["loss"] == pytest.approx(segmentation_loss(output, target).item())
    assert found["samples"] == 1


def test_a_channel_without_a_class_is_a_wrong_prediction():
    output = torch.zeros(1, 3, 1, 2)
    output[:, 2] = 1
    task = Segmentation(2)
    found = task.metrics(task.tally(output, torch.tensor([[[0, 1]]]), 0).tolist())
    assert (found["accuracy"], found["mean_dice"], found["mean_iou"]) == (0, 0, 0)


def test_a_class_beyond_those_of_the_data_is_refused():
    with pytest.raises(ValueError, match="a pixel of class 2, but there are 2 classes: set data"):
        Segmentation(2).tally(torch.zeros(1, 3, 1, 2), torch.tensor([[[0, 2]]]), 0)
