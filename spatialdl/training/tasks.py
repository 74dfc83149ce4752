"""What a network learns: a class for every image, or for every pixel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.data.format import UNLABELLED
from spatialdl.spatial.tensor import SpatialTensor, redistribute


class Task(Protocol):
    """A loss to train with, and what is told of the validation samples.

    Attributes:
        tallied: numbers in a tally.
    """

    tallied: int

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean over what has a label, the same on every rank of an image."""
        ...

    def tally(self, output: Tensor, target: Tensor, part: int) -> Tensor:
        """float64 sums over what this rank holds; over all ranks every sample counts once.

        Args:
            part: this rank's part of the grid; of equal copies, that of part 0 counts.
        """
        ...

    def metrics(self, sums: Sequence[float]) -> dict[str, Any]:
        """What the tallies of all samples, added up, come to: by name, a number or one a class."""
        ...


def task_of(name: str, classes: int) -> Task:
    """The task of a configuration, for data with so many classes."""
    return Segmentation(classes) if name == "segmentation" else Classification()


class Classification:
    """Cross entropy and accuracy."""

    tallied = 3

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return classification_loss(output, target)

    def tally(self, output: Tensor, target: Tensor, part: int) -> Tensor:
        loss = classification_loss(output, target, "sum").item()
        correct = (output.argmax(1) == target).sum().item()
        return torch.tensor([loss, correct, len(target)], dtype=torch.float64) * (part == 0)

    def metrics(self, sums: Sequence[float]) -> dict[str, Any]:
        loss, correct, samples = sums
        return {"loss": loss / samples, "accuracy": correct / samples, "samples": int(samples)}


class Segmentation:
    """Cross entropy over pixels; pixel accuracy, Dice coefficient and IoU of every class.

    Pixels of the class `UNLABELLED` (255) count nowhere. Accuracy, Dice and IoU are those of the
    pixels of all samples together; a class that is neither in the masks nor predicted has none.

    Args:
        classes: how many there are.
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.tallied = 2 + classes * (classes + 1)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return segmentation_loss(output, target)

    def tally(self, output: Tensor, target: Tensor, part: int) -> Tensor:
        is_split = isinstance(output, SpatialTensor)
        counts = is_split or part == 0
        samples = len(target) * (part == 0)
        if isinstance(output, SpatialTensor) and isinstance(target, SpatialTensor):
            target = redistribute(target, output.spatial_layout, output.mesh)
        output, target = _own_pixels(output), _own_pixels(target)
        if not counts or target.numel() == 0:
            return torch.tensor([0.0, samples] + [0.0] * (self.tallied - 2), dtype=torch.float64)
        _check_segmentation(output, target)
        loss = F.cross_entropy(output, target, ignore_index=UNLABELLED, reduction="sum")
        found = torch.cat([loss.double().view(1), loss.new_tensor([samples]).double()])
        return torch.cat([found, self._confusion(output, target)]).cpu()

    def _confusion(self, output: Tensor, target: Tensor) -> Tensor:
        """Pixels per (class, predicted class); the last column is for channels without a class."""
        known = target != UNLABELLED
        predicted = output.argmax(1)[known].clamp(max=self.classes)
        cells = target[known] * (self.classes + 1) + predicted
        return torch.bincount(cells, minlength=self.classes * (self.classes + 1)).double()

    def metrics(self, sums: Sequence[float]) -> dict[str, Any]:
        pairs = torch.tensor(sums[2:], dtype=torch.float64).view(self.classes, -1)
        right = pairs.diagonal()
        either = pairs.sum(1) + pairs[:, : self.classes].sum(0)
        pixels = max(float(pairs.sum()), 1.0)
        occurs = either > 0
        dice, iou = 2 * right / either, right / (either - right)
        return {
            "loss": sums[0] / pixels,
            "accuracy": float(right.sum()) / pixels,
            "samples": int(sums[1]),
            "mean_dice": float(dice[occurs].mean()) if occurs.any() else 0.0,
            "mean_iou": float(iou[occurs].mean()) if occurs.any() else 0.0,
            "dice": dice.tolist(),
            "iou": iou.tolist(),
        }


def _own_pixels(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, SpatialTensor) else x


def classification_loss(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy.

    Args:
        output: (N, classes), what the network gives.
        target: (N,), labels.

    Raises:
        ValueError: if the network gives anything else, or has too few classes.
    """
    shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != len(target):
        raise ValueError(
            f"the network gives {shape} for {len(target)} images: to classify, it must give "
            f"({len(target)}, classes); a network that tells a class for every pixel trains with "
            "task=segmentation"
        )
    highest = int(target.max())
    if highest >= output.shape[1]:
        raise ValueError(
            f"the network tells {output.shape[1]} classes apart, but there is a label {highest}: "
            "leave model.num_classes out, or set data.num_classes"
        )
    return F.cross_entropy(output, target, reduction=reduction)


def segmentation_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy, the mean over the pixels with a class; 0 if there are none.

    Args:
        output: (N, classes, H, W), what the network gives; may be split.
        target: (N, H, W), the class of every pixel, or `UNLABELLED`; split if `output` is.

    Raises:
        ValueError: if the network gives anything else, or has too few classes.
    """
    _check_segmentation(output, target)
    total = F.cross_entropy(output, target, ignore_index=UNLABELLED, reduction="sum")
    return total / (target != UNLABELLED).sum().clamp(min=1)


def _check_segmentation(output: Tensor, target: Tensor) -> None:
    samples, *size = target.shape
    shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    fits = isinstance(output, Tensor) and output.dim() == 4 and output.shape[0] == samples
    if not fits or tuple(output.shape[2:]) != tuple(size):
        raise ValueError(
            f"the network gives {shape} for {samples} masks of {size[0]}x{size[1]}: to segment, "
            f"it must give ({samples}, classes, {size[0]}, {size[1]}); a network that tells one "
            "class an image trains with task=classification"
        )
    labels = _own_pixels(target)
    labels = labels[labels != UNLABELLED]
    highest = int(labels.max()) if labels.numel() else -1
    if highest >= output.shape[1]:
        raise ValueError(
            f"the network tells {output.shape[1]} classes apart, but a mask has a pixel of class "
            f"{highest}: leave model.num_classes out, set data.num_classes, or mark pixels without "
            f"a class by {UNLABELLED}"
        )
