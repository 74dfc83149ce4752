"""Losses beside PyTorch's, the settings that choose them, and mixed samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.data.format import UNLABELLED
from spatialdl.data.synthetic import SyntheticDataset, SyntheticTargets
from spatialdl.pipeline.stage_runtime import Microbatch
from spatialdl.training.tasks.losses import (
    classification_loss,
    multilabel_loss,
    regression_loss,
    segmentation_loss,
)
from spatialdl.training.tasks.mixup import mix_samples
from spatialdl.training.tasks.task import task_of
from tests.composing import composed

WEIGHT = torch.tensor([0.5, 2.0, 1.0, 3.0])


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def masks(*size: int) -> tuple[Tensor, Tensor]:
    """Scores and masks of four classes with some pixels that have none."""
    draw = torch.Generator().manual_seed(3)
    output = torch.randn(size[0], 4, *size[1:], dtype=torch.float64, generator=draw)
    target = torch.randint(4, size, generator=draw)
    target[torch.rand(size, generator=draw) < 0.3] = UNLABELLED
    return output, target


def labelled() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    output = torch.randn(7, 4, dtype=torch.float64, generator=draw)
    return output, torch.randint(4, (7,), generator=draw)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_classes_have_pytorch_s_cross_entropy(weight, smoothing):
    given = None if weight is None else weight.double()
    output, target = labelled()
    expected = F.cross_entropy(output, target, given, label_smoothing=smoothing)
    close(classification_loss(output, target, weight, smoothing), expected)
    shares = F.one_hot(target, 4).double()
    close(classification_loss(output, shares, weight, smoothing), expected)
    output, target = masks(2, 9, 7)  # the mean over pixels with a class
    expected = F.cross_entropy(output, target, given, ignore_index=255, label_smoothing=smoothing)
    close(segmentation_loss(output, target, weight, smoothing), expected)


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
    for of_pixels in (0, UNLABELLED):
        maps = torch.randn(2, 4, 3, 3, requires_grad=True)
        loss = segmentation_loss(maps, torch.full((2, 3, 3), of_pixels), weight, smoothing)
        loss.backward()
        assert loss == 0
        assert maps.grad.abs().max() == 0


def test_unknown_labels_count_nowhere():
    draw = torch.Generator().manual_seed(0)
    output = torch.randn(5, 3, dtype=torch.float64, generator=draw).requires_grad_()
    target = torch.randint(2, (5, 3), generator=draw).double()
    target[1, 0] = target[4] = torch.nan
    known = ~target.isnan()
    found = multilabel_loss(output, target)
    close(found, F.binary_cross_entropy_with_logits(output[known], target[known]))
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


@pytest.mark.parametrize(
    ("distance", "plain"),
    [
        ("mse", F.mse_loss),
        ("l1", F.l1_loss),
        ("huber", lambda told, wanted: F.huber_loss(told, wanted, delta=0.7)),
    ],
)
def test_errors_are_those_of_the_known_targets(distance, plain):
    draw = torch.Generator().manual_seed(0)
    output = torch.randn(6, 2, dtype=torch.float64, generator=draw)
    target = 3 * torch.randn(6, 2, dtype=torch.float64, generator=draw)
    target[2, 1] = torch.nan
    known = ~target.isnan()
    close(regression_loss(output, target, distance, 0.7), plain(output[known], target[known]))
    assert regression_loss(output, target * torch.nan, distance) == 0
    without_a_dim = torch.tensor([1.0, 2.0]), torch.tensor([[1.0], [2.0]])
    assert regression_loss(*without_a_dim, distance) == 0


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


PIXELS, LABELS, NUMBERS = torch.full((1, 4, 5), 2), torch.tensor([0, 4]), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("loss", "output", "target", "sentence"),
    [
        (
            *(segmentation_loss, torch.zeros(1, 3), PIXELS),
            r"returns \(1, 3\) for 1 masks of 4x5.*needs \(1, classes, 4, 5\)",
        ),
        (segmentation_loss, torch.zeros(1, 3, 2, 2), PIXELS, r"returns \(1, 3, 2, 2\)"),
        (segmentation_loss, torch.zeros(2, 3, 4, 5), PIXELS, r"returns \(2, 3, 4, 5\)"),
        (segmentation_loss, [1], PIXELS, "returns list for 1 masks"),
        (segmentation_loss, torch.zeros(1, 2, 4, 5), PIXELS, r"a pixel of class 2.*with 255"),
        (classification_loss, torch.zeros(2, 5, 1, 1), LABELS, r"\(2, 5, 1, 1\) .*\(2, classes\)"),
        (classification_loss, torch.zeros(()), LABELS, r"returns \(\) for 2 images"),
        (classification_loss, torch.zeros(3, 5), LABELS, r"returns \(3, 5\) for 2 images"),
        (classification_loss, (torch.zeros(2, 5),), LABELS, "returns tuple for 2 images"),
        (classification_loss, torch.zeros(2, 3), LABELS, "has 3 classes, but there is a label 4"),
        (multilabel_loss, torch.zeros(2, 4), NUMBERS, r"\(2, 4\) for 2 .* with 3 classes each"),
        (regression_loss, torch.zeros(2, 4), NUMBERS, r"\(2, 4\) for 2 .* with 3 targets each"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(loss, output, target, sentence):
    with pytest.raises(ValueError, match=sentence):
        loss(output, target)


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


# --- settings

LABELLED = SyntheticDataset(7, (8, 8), 3)
TARGETS = SyntheticTargets(7, (8, 8), 3, present=True)


def made(words: str = "", data=LABELLED):
    return task_of(composed("train", *words.split()).task, 3, data)


def test_a_task_s_loss_is_that_of_its_settings():
    draw = torch.Generator().manual_seed(0)
    output, target = torch.randn(2, 5, 3, generator=draw)
    labels, weight = torch.tensor([0, 1, 2, 2, 1]), torch.tensor([1, 2, 0.5])
    task = made("task.class_weights=[1,2,0.5] task.label_smoothing=0.1 task.mixup=0.2")
    assert task.loss(output, labels) == classification_loss(output, labels, weight, 0.1)
    assert task.weights(labels).tolist() == [1, 2, 0.5, 0.5, 2]
    assert (task.mixup, made().weights(labels)) == (0.2, None)
    task = made("task=regression task.loss=huber task.huber_delta=0.5")
    target[1, 1] = torch.nan
    assert task.loss(output, target) == regression_loss(output, target, "huber", 0.5)
    assert task.weights(target).tolist() == [3, 2, 3, 3, 3]


def test_balanced_weights_follow_the_training_labels():
    weight = made("task.class_weights=balanced").weight
    assert weight.tolist() == pytest.approx([7 / 9, 7 / 6, 7 / 6])
    labels = torch.from_numpy(TARGETS.labels)
    task = made("task=multilabel task.pos_weight=balanced", TARGETS)
    assert task.pos_weight.equal((labels == 0).sum(0) / (labels == 1).sum(0).double())
    with pytest.raises(ValueError, match="no training sample of the class 2: set a list"):
        made("task.class_weights=balanced", SyntheticDataset(2, (8, 8), 3))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("task.class_weights=[1,2]", r"task.class_weights has 2 weights for 3 classes"),
        ("task.class_weights=[1,2,-1]", "must be numbers of at least 0"),
        ("task.class_weights=[1,2,inf]", "must be numbers"),
        ("task.class_weights=[0,0,0]", "not all of them 0"),
        ("task.class_weights=even", "class_weights=even is unknown: use null, a list, or bal"),
        ("task.label_smoothing=1.5", "task.label_smoothing=1.5 must lie between 0 and 1"),
        ("task.mixup=-1", "task.mixup=-1 must be a number of at least 0"),
        ("task=regression task.loss=l2", "task.loss=l2 is unknown: use mse, l1 or huber"),
        ("task=regression task.huber_delta=0", "must be above 0"),
        ("task=segmentation task.class_weights=balanced", "balanced is unknown: use null or"),
        ("task=segmentation task.dice=much", "task.dice=much must be a number"),
    ],
)
def test_settings_that_make_no_sense_are_refused(words, sentence):
    with pytest.raises(ValueError, match=sentence):
        made(words)


# --- mixed samples


def slices(*samples: int) -> list[Microbatch]:
    draw = torch.Generator().manual_seed(0)
    return [
        Microbatch(n, 0.5, torch.randn(n, 3, 4, 4, generator=draw), torch.arange(n) % 3)
        for n in samples
    ]


def test_images_and_labels_are_mixed_by_one_share_with_one_partner():
    given = slices(5)
    assert mix_samples(given, 0.0, 3, 0, 0, 0, 1)[0] is given[0]
    (plain,), (one,) = given, mix_samples(slices(5), 0.4, 3, seed=1, step=7, replica=0, replicas=1)
    labels = F.one_hot(plain.target, 3).double()
    draw = np.random.default_rng([0x6D697875, 1, 7, 0])
    share, partners = draw.beta(0.4, 0.4), draw.permutation(5)
    assert 0 < share < 1
    torch.testing.assert_close(one.tile, share * plain.tile + (1 - share) * plain.tile[partners])
    torch.testing.assert_close(one.target, share * labels + (1 - share) * labels[partners])
    assert (one.samples, one.share) == (5, 0.5)


def test_replicas_draw_as_one_process_does_for_the_same_slices():
    plain = mix_samples(slices(2, 2, 2, 2), 1.0, 3, 0, 5, replica=0, replicas=1)
    given = slices(2, 2, 2, 2)
    for replica in range(2):
        own = mix_samples(given[replica::2], 1.0, 3, 0, 5, replica, replicas=2)
        for ours, theirs in zip(own, plain[replica::2], strict=True):
            assert ours.tile.equal(theirs.tile)
            assert ours.target.equal(theirs.target)


def test_ranks_without_images_or_labels_mix_what_they_have():
    whole, bare, numbers = mix_samples(slices(4), 1.0, 3, 0, 0, 0, 1)[0], *slices(4, 4)
    bare.tile = None
    found = mix_samples([bare, Microbatch(0, 0.0)], 1.0, 3, 0, 0, 0, 1)
    assert found[0].target.equal(whole.target)
    assert found[0].tile is found[1].tile is found[1].target is None
    numbers.target = torch.randn(4, 2)
    assert mix_samples([numbers], 1.0, 3, 0, 0, 0, 1)[0].target.shape == (4, 2)
