"""Segmentation: a class per pixel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.data.format import UNLABELLED
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.training.tasks.losses import (
    check_maps,
    check_masks,
    dice_loss,
    own_pixels,
    segmentation_loss,
    split_alike,
    weight_like,
)
from spatialdl.training.tasks.metrics import SHOW_UP_TO, Scores, from_pairs
from spatialdl.training.tasks.own_loss import OwnLoss


class Segmentation:
    """Cross entropy and soft Dice; accuracy, Dice and IoU from the confusion matrix.

    Pixels of the class `UNLABELLED` (255) are ignored. Metrics are over the pixels of all samples;
    those of a class that is neither in the masks nor predicted are undefined.

    Args:
        classes: number of classes.
        weight: (classes,), class weights of the cross entropy.
        label_smoothing: see `losses.segmentation_loss`.
        dice: weight of soft Dice, see `losses.segmentation_loss`.
        own: user's loss that replaces both, averaged over slices by their samples.
    """

    name = "segmentation"
    mixup = 0.0

    def __init__(
        self,
        classes: int,
        weight: Tensor | None = None,
        label_smoothing: float = 0.0,
        dice: float = 0.0,
        own: OwnLoss | None = None,
    ) -> None:
        self.classes, self.weight, self._own = classes, weight, own
        self.label_smoothing, self.dice = label_smoothing, dice
        self.tallied = 2 + classes * (classes + 1) + 2 * classes

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self._own is not None:
            check_masks(output, target, classes=self.classes)
            return self._own(*split_alike(output, target))
        return segmentation_loss(
            output, target, self.weight, self.label_smoothing, self.dice, self.classes
        )

    @property
    def has_own_loss(self) -> bool:
        return self._own is not None

    def check_output(self, output: Tensor, target: Tensor) -> None:
        check_maps(output, target, self.weight, self.classes)

    def weights(self, target: Tensor) -> Tensor | None:
        """None, since `training.layouts.check_task` keeps samples of a slice on one rank."""
        return None

    def tally(self, output: Tensor, target: Tensor, part: int) -> Tensor:
        """Sums over this rank's pixels, float64 (tallied,); each pixel counts on one rank only.

        Args:
            output: (N, classes, *spatial), logits.
            target: (N, *spatial), masks.
            part: this rank's part of the grid; of replicated maps, only part 0 counts.
        """
        check_maps(output, target, self.weight)
        output, target = split_alike(output, target)
        counts = isinstance(output, SpatialTensor) or part == 0
        samples = len(target) * (part == 0)
        own = self._own_of(output, target, counts=part == 0)
        output, target = own_pixels(output), own_pixels(target)
        if not counts or target.numel() == 0:
            return torch.tensor([own, samples] + [0.0] * (self.tallied - 2), dtype=torch.float64)
        check_masks(output, target, self.weight)
        output = output.double()
        if self._own is not None:
            loss = output.new_tensor(own)
        else:
            loss = F.cross_entropy(
                output,
                target,
                None if self.weight is None else weight_like(self.weight, output),
                ignore_index=UNLABELLED,
                reduction="sum",
                label_smoothing=self.label_smoothing,
            )
        head = torch.stack([loss, loss.new_tensor(samples)])
        return torch.cat([head, self._confusion(output, target), self._soft(output, target)]).cpu()

    def _own_of(self, output: Tensor, target: Tensor, counts: bool) -> float:
        """User's loss times the number of samples; collective over the grid."""
        if self._own is None:
            return 0.0
        check_masks(output, target)
        loss = float(self._own(output.double(), target))
        return loss * len(target) if counts else 0.0

    def _confusion(self, output: Tensor, target: Tensor) -> Tensor:
        """Pixels per (class, predicted class); the last column collects surplus channels."""
        known = target != UNLABELLED
        highest = int(target[known].max()) if known.any() else -1
        if highest >= self.classes:
            raise ValueError(
                f"a mask has a pixel of class {highest}, but there are {self.classes} classes: set "
                f"data.num_classes={highest + 1}"
            )
        predicted = output.argmax(1)[known].clamp(max=self.classes)
        cells = target[known] * (self.classes + 1) + predicted
        return torch.bincount(cells, minlength=self.classes * (self.classes + 1)).double()

    def _soft(self, output: Tensor, target: Tensor) -> Tensor:
        """Sums of probabilities of each class over its own and over all labelled pixels."""
        if not self.dice:
            return output.new_zeros(2 * self.classes)
        known = target != UNLABELLED
        shares = output.softmax(1)[:, : self.classes].movedim(1, -1)[known]
        is_class = F.one_hot(target[known], self.classes)
        return torch.cat([(shares * is_class).sum(0), shares.sum(0)])

    def metrics(self, sums: Sequence[float]) -> Scores:
        """Compute loss and metrics from the summed `tally` of all samples."""
        cells = self.classes * (self.classes + 1)
        totals = torch.tensor(sums, dtype=torch.float64)
        pairs = totals[2 : 2 + cells].view(self.classes, -1)
        counts = pairs.sum(1)
        weight = counts.sum() if self.weight is None else (counts * self.weight).sum()
        if self._own is not None:
            weight = totals[1]
        loss = totals[0] / weight if weight > 0 else torch.zeros(())
        if self.dice:
            overlap, predicted = totals[2 + cells :].view(2, -1)
            loss = loss + self.dice * dice_loss(overlap, predicted, counts)
        metrics = from_pairs(pairs)
        scores: Scores = {
            "loss": float(loss),
            "accuracy": metrics["accuracy"],
            "samples": int(sums[1]),
            **{name: metrics[name] for name in ("mean_dice", "mean_iou", "balanced_accuracy")},
            **{name: metrics[name] for name in ("dice", "iou")},
        }
        if self.classes <= SHOW_UP_TO:
            scores["confusion_matrix"] = pairs.long().tolist()
        return scores
