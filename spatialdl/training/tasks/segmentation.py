"""A class for every pixel."""

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
    """Cross entropy over pixels, and soft Dice; accuracy, Dice and IoU from what was confused.

    Pixels of the class `UNLABELLED` (255) count nowhere. All metrics are those of the pixels of all
    samples together; a class that is neither in the masks nor predicted has none.

    Args:
        classes: how many there are.
        weight: (classes,), what they count in the cross entropy.
        dice: what soft Dice counts beside it, see `losses.segmentation_loss`.
        own: a loss in place of both, which is the mean over the slices by their samples.
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
        """None: `training.layouts.check_task` keeps samples of a slice together."""
        return None

    def tally(self, output: Tensor, target: Tensor, part: int) -> Tensor:
        """float64 (tallied,): sums over what this rank holds; over all ranks a pixel counts once.

        Args:
            part: this rank's part of the grid; of equal copies, that of part 0 counts.
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
        """What the user's loss adds to the sum over samples; all ranks of the grid compute it."""
        if self._own is None:
            return 0.0
        check_masks(output, target)
        loss = float(self._own(output.double(), target))
        return loss * len(target) if counts else 0.0

    def _confusion(self, output: Tensor, target: Tensor) -> Tensor:
        """Pixels per (class, predicted class); the last column is for channels without a class."""
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
        """Probabilities of a class over its own pixels, and over all with a class."""
        if not self.dice:
            return output.new_zeros(2 * self.classes)
        known = target != UNLABELLED
        shares = output.softmax(1)[:, : self.classes].movedim(1, -1)[known]
        is_class = F.one_hot(target[known], self.classes)
        return torch.cat([(shares * is_class).sum(0), shares.sum(0)])

    def metrics(self, sums: Sequence[float]) -> Scores:
        """What the tallies of all samples, added up, come to."""
        cells = self.classes * (self.classes + 1)
        given = torch.tensor(sums, dtype=torch.float64)
        pairs = given[2 : 2 + cells].view(self.classes, -1)
        counts = pairs.sum(1)
        weight = counts.sum() if self.weight is None else (counts * self.weight).sum()
        if self._own is not None:
            weight = given[1]
        loss = given[0] / weight if weight > 0 else torch.zeros(())
        if self.dice:
            overlap, told = given[2 + cells :].view(2, -1)
            loss = loss + self.dice * dice_loss(overlap, told, counts)
        found = from_pairs(pairs)
        scores: Scores = {
            "loss": float(loss),
            "accuracy": found["accuracy"],
            "samples": int(sums[1]),
            **{name: found[name] for name in ("mean_dice", "mean_iou", "balanced_accuracy")},
            **{name: found[name] for name in ("dice", "iou")},
        }
        if self.classes <= SHOW_UP_TO:
            scores["confusion_matrix"] = pairs.long().tolist()
        return scores
