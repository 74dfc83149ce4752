from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from spatialdl.data.format import UNLABELLED
from spatialdl.training.tasks.losses import (
    classification_loss,
    classification_weights,
    multilabel_loss,
    regression_loss,
    segmentation_loss,
)

WEIGHT = torch.tensor([0.5, 2.0, 1.0, 3.0])


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def masks(*size: int, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and masks with some pixels that have no class."""
    draw = torch.Generator().manual_seed(3)
    output = torch.randn(size[0], classes, *size[1:], dtype=torch.float64, generator=draw)
    target = torch.randint(classes, size, generator=draw)
    target[torch.rand(size, generator=draw) < 0.3] = UNLABELLED
    return output, target


def labelled(samples: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    output = torch.randn(samples, 4, dtype=torch.float64, generator=draw)
    return output, torch.randint(4, (samples,), generator=draw)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_classification_is_pytorch_s_cross_entropy(weight, smoothing):
    output, target = labelled()
    given = None if weight is None else weight.double()
    expected = F.cross_entropy(output, target, given, label_smoothing=smoothing)
    close(classification_loss(output, target, weight, smoothing), expected)
    shares = F.one_hot(target, 4).double()
    close(classification_loss(output, shares, weight, smoothing), expected)


def test_parts_of_a_slice_put_together_by_their_weights_are_the_whole():
    output, target = labelled()
    weights = classification_weights(target, WEIGHT)
    total = sum(
        classification_loss(output[part], target[part], WEIGHT) * weights[part].sum()
        for part in (slice(0, 2), slice(2, 7))
    )
    close(total / weights.sum(), classification_loss(output, target, WEIGHT))


def test_mixed_labels_are_the_mixed_losses():
    output, target = labelled()
    other = target.flip(0)
    shares = 0.3 * F.one_hot(target, 4).double() + 0.7 * F.one_hot(other, 4).double()
    expected = 0.3 * F.cross_entropy(output, target) + 0.7 * F.cross_entropy(output, other)
    close(classification_loss(output, shares), expected)
    apart = F.cross_entropy(output, target, WEIGHT.double(), reduction="none") * 0.3
    apart += F.cross_entropy(output, other, WEIGHT.double(), reduction="none") * 0.7
    weights = 0.3 * WEIGHT[target] + 0.7 * WEIGHT[other]
    close(classification_loss(output, shares, WEIGHT), apart.sum() / weights.sum().double())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_samples_of_no_weight_cost_nothing(smoothing):
    weight = torch.tensor([0.0, 1, 1, 1])
    output, target = labelled()
    assert classification_loss(output, torch.zeros_like(target), weight, smoothing) == 0
    maps = torch.randn(2, 4, 3, 3, requires_grad=True)
    loss = segmentation_loss(maps, torch.zeros(2, 3, 3, dtype=torch.int64), weight, smoothing)
    loss.backward()
    assert loss == 0
    assert maps.grad.abs().max() == 0


def test_unknown_labels_count_nowhere():
    draw = torch.Generator().manual_seed(0)
    output = torch.randn(5, 3, dtype=torch.float64, generator=draw).requires_grad_()
    target = torch.randint(2, (5, 3), generator=draw).double()
    target[1, 0] = target[4] = torch.nan
    known = ~target.isnan()
    expected = F.binary_cross_entropy_with_logits(output[known], target[known])
    found = multilabel_loss(output, target)
    close(found, expected)
    found.backward()
    assert (output.grad == 0).equal(~known)
    assert multilabel_loss(output, torch.full((5, 3), math.nan)) == 0
    weight = torch.tensor([2.0, 1.0, 0.5])
    plain = F.binary_cross_entropy_with_logits(
        output, target.nan_to_num(), pos_weight=weight.double(), reduction="none"
    )
    close(multilabel_loss(output, target, weight), plain[known].mean())
    smooth = F.binary_cross_entropy_with_logits(output[known], target[known] * 0.8 + 0.1)
    close(multilabel_loss(output, target, None, 0.2), smooth)


@pytest.mark.parametrize("distance", ["mse", "l1", "huber"])
def test_errors_are_those_of_the_known_targets(distance):
    draw = torch.Generator().manual_seed(0)
    output = torch.randn(6, 2, dtype=torch.float64, generator=draw)
    target = 3 * torch.randn(6, 2, dtype=torch.float64, generator=draw)
    target[2, 1] = torch.nan
    known = ~target.isnan()
    plain = {"mse": F.mse_loss, "l1": F.l1_loss}.get(distance)
    told, wanted = output[known], target[known]
    expected = plain(told, wanted) if plain else F.huber_loss(told, wanted, delta=0.7)
    close(regression_loss(output, target, distance, 0.7), expected)
    assert regression_loss(output, target * torch.nan, distance) == 0


def test_one_number_may_come_without_a_dim():
    output, target = torch.tensor([1.0, 2.0]), torch.tensor([[1.0], [4.0]])
    assert regression_loss(output, target) == 2


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


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weights_of_classes_over_pixels_are_pytorch_s(smoothing):
    output, target = masks(2, 9, 7)
    expected = F.cross_entropy(
        output, target, WEIGHT.double(), ignore_index=255, label_smoothing=smoothing
    )
    close(segmentation_loss(output, target, WEIGHT, smoothing), expected)


def test_soft_dice_is_that_of_all_pixels_with_a_class():
    output, target = masks(2, 9, 7)
    target[target == 2] = UNLABELLED  # a class that does not occur
    known = target != UNLABELLED
    shares = output.softmax(1).movedim(1, -1)[known]
    truth = F.one_hot(target[known], 4)
    dice = 2 * (shares * truth).sum(0) / (shares.sum(0) + truth.sum(0))
    expected = segmentation_loss(output, target) + 0.5 * (1 - dice[[0, 1, 3]].mean())
    close(segmentation_loss(output, target, dice=0.5), expected)
    assert segmentation_loss(output, torch.full_like(target, UNLABELLED), dice=1.0) == 0


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        (torch.zeros(1, 3), r"returns \(1, 3\) for 1 masks of 4x5.*needs \(1, classes, 4, 5\)"),
        (torch.zeros(1, 3, 2, 2), r"returns \(1, 3, 2, 2\)"),
        (torch.zeros(2, 3, 4, 5), r"returns \(2, 3, 4, 5\)"),
        ([1], "returns list for 1 masks"),
        (torch.zeros(1, 2, 4, 5), r"has 2 classes.*a pixel of class 2.*with 255"),
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
            r"returns \(2, 5, 1, 1\) for 2 .* needs \(2, classes\)",
        ),
        (torch.zeros(()), r"returns \(\) for 2 images"),
        (torch.zeros(3, 5), r"returns \(3, 5\) for 2 images"),
        ((torch.zeros(2, 5),), "returns tuple for 2 images"),
        (torch.zeros(2, 3), r"has 3 classes, but there is a label 4"),
    ],
)
def test_outputs_that_fit_no_labels_are_refused(output, sentence):
    with pytest.raises(ValueError, match=sentence):
        classification_loss(output, torch.tensor([0, 4]))


def test_other_outputs_that_do_not_fit_are_refused():
    target = torch.zeros(2, 3)
    for loss, what in ((multilabel_loss, "classes"), (regression_loss, "targets")):
        with pytest.raises(ValueError, match=rf"returns \(2, 4\) for 2 images with 3 {what} each"):
            loss(torch.zeros(2, 4), target)
    with pytest.raises(ValueError, match=r"class_weights has 4 weights, .* has 5 classes"):
        classification_loss(torch.zeros(2, 5), torch.tensor([0, 1]), WEIGHT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outputs_in_16_bits_are_counted_and_weighed_in_32(dtype):
    """More pixels than float16 has numbers, and weights that have no exact one in 16 bits."""
    weight = torch.tensor([0.1, 0.7, 1.3, 0.3], dtype=torch.float64)
    output, target = masks(2, 300, 300)
    output = output.to(dtype)
    found = segmentation_loss(output, target, weight, dice=0.5)
    expected = segmentation_loss(output.double(), target, weight, dice=0.5)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    output, target = labelled()
    found = classification_loss(output.to(dtype), target, weight)
    expected = classification_loss(output.to(dtype).double(), target, weight)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
