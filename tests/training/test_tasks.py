from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from spatialdl.data.format import UNLABELLED
from spatialdl.training.tasks import (
    Classification,
    Segmentation,
    classification_loss,
    segmentation_loss,
    task_of,
)


def test_a_task_has_a_name():
    assert isinstance(task_of("classification", 3), Classification)
    assert isinstance(task_of("segmentation", 3), Segmentation)


def masks(*size: int, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and masks with some pixels that have no class."""
    draw = torch.Generator().manual_seed(3)
    output = torch.randn(size[0], classes, *size[1:], dtype=torch.float64, generator=draw)
    target = torch.randint(classes, size, generator=draw)
    target[torch.rand(size, generator=draw) < 0.3] = UNLABELLED
    return output, target


def test_the_loss_is_the_mean_over_pixels_with_a_class():
    output, target = masks(2, 9, 7)
    expected = F.cross_entropy(output, target, ignore_index=255)
    torch.testing.assert_close(segmentation_loss(output, target), expected, rtol=0, atol=1e-14)


def test_a_mask_without_any_class_costs_nothing():
    output = torch.randn(1, 3, 4, 4, requires_grad=True)
    loss = segmentation_loss(output, torch.full((1, 4, 4), UNLABELLED))
    loss.backward()
    assert loss.item() == 0
    assert output.grad.abs().max() == 0


def test_tallies_of_parts_add_up_to_that_of_the_whole():
    task = Segmentation(4)
    output, target = masks(3, 9, 7)
    whole = task.tally(output, target, part=0)
    parts = task.tally(output[:1], target[:1], 0) + task.tally(output[1:], target[1:], 0)
    torch.testing.assert_close(parts, whole)
    assert len(whole) == task.tallied


def test_copies_on_other_parts_do_not_count():
    assert Segmentation(4).tally(*masks(3, 9, 7), part=1).abs().max() == 0
    found = Classification().tally(torch.rand(2, 3), torch.tensor([0, 1]), part=1)
    assert found.abs().max() == 0


def test_metrics_of_a_segmentation():
    target = torch.tensor([[[0, 0, 1, 1, 255, 255]]])
    told = torch.tensor([[[0, 1, 1, 1, 1, 2]]])
    output = F.one_hot(told, 4).permute(0, 3, 1, 2).double()
    task = Segmentation(4)
    found = task.metrics(task.tally(output, target, 0).tolist())
    assert found["accuracy"] == 3 / 4
    assert found["dice"][:2] == pytest.approx([2 / 3, 4 / 5])
    assert found["iou"][:2] == pytest.approx([1 / 2, 2 / 3])
    assert all(math.isnan(value) for value in found["dice"][2:] + found["iou"][2:])
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


def test_metrics_of_a_classification():
    task = Classification()
    output, target = torch.tensor([[1.0, 0], [1, 0], [0, 1]]), torch.tensor([0, 1, 1])
    found = task.metrics(task.tally(output, target, 0).tolist())
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["loss"] == pytest.approx(F.cross_entropy(output, target).item())
    assert found["samples"] == 3


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        (torch.zeros(1, 3), r"gives \(1, 3\) for 1 masks of 4x5.*must give \(1, classes, 4, 5\)"),
        (torch.zeros(1, 3, 2, 2), r"gives \(1, 3, 2, 2\)"),
        (torch.zeros(2, 3, 4, 5), r"gives \(2, 3, 4, 5\)"),
        ([1], "gives list for 1 masks"),
        (torch.zeros(1, 2, 4, 5), r"tells 2 classes apart.*a pixel of class 2.*by 255"),
    ],
)
def test_outputs_that_fit_no_masks_are_refused(output, sentence):
    target = torch.full((1, 4, 5), 2)
    with pytest.raises(ValueError, match=sentence):
        segmentation_loss(output, target)


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        (
            torch.zeros(2, 5, 1, 1),
            r"gives \(2, 5, 1, 1\) for 2 .* must give \(2, classes\)",
        ),
        (torch.zeros(()), r"gives \(\) for 2 images"),
        (torch.zeros(3, 5), r"gives \(3, 5\) for 2 images"),
        ((torch.zeros(2, 5),), "gives tuple for 2 images"),
        (torch.zeros(2, 3), r"tells 3 classes apart, but there is a label 4"),
    ],
)
def test_outputs_that_fit_no_labels_are_refused(output, sentence):
    with pytest.raises(ValueError, match=sentence):
        classification_loss(output, torch.tensor([0, 4]))
