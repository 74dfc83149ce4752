"""Losses of the tasks: weighted means over the labelled elements of one slice of a batch.

A slice is a micro-batch of a replica; numerator and denominator are those of the whole slice.
Slices are weighted by their samples, as in gradient accumulation on a single process.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.data.format import UNLABELLED
from spatialdl.layout.layout import by
from spatialdl.spatial.autocast import wide
from spatialdl.spatial.constants import on
from spatialdl.spatial.losses import split_as_target
from spatialdl.spatial.tensor import SpatialTensor, redistribute

Distance = Literal["mse", "l1", "huber"]


def classification_loss(
    output: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    classes: int | None = None,
    *,
    over_samples: bool = False,
) -> Tensor:
    """Cross entropy, averaged over samples by the weights of their classes.

    Args:
        output: (N, classes), logits of the network.
        target: (N,), labels, or (N, classes), shares of mixed labels.
        weight: (classes,), class weights, at least 0.
        label_smoothing: share of every label that is spread over all classes.
        classes: classes of the data; None accepts any number above the labels.
        over_samples: divide by the number of samples instead of their weights, which would cancel
            for a single sample.

    Raises:
        ValueError: if the output has another shape or number of classes.
    """
    check_classes(output, target, weight, classes)
    output = wide(output)
    if target.is_floating_point():
        target = F.pad(target.to(output), (0, output.shape[1] - target.shape[1]))
    total = F.cross_entropy(
        output,
        target,
        _optional_like(weight, output),
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    if weight is None or over_samples:
        return total / len(target)
    return _over(total, classification_weights(target, weight).sum())


def classification_weights(target: Tensor, weight: Tensor) -> Tensor:
    """Weights of samples by their classes, (N,)."""
    if not target.is_floating_point():
        return on(weight, target.device)[target]
    return target @ weight_like(weight, target)[: target.shape[1]]


def multilabel_loss(
    output: Tensor, target: Tensor, pos_weight: Tensor | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """Binary cross entropy, averaged over the known labels; 0 if there are none.

    Args:
        output: (N, classes), logits of the network.
        target: (N, classes), 1 if a class is present, 0 if not, NaN if unknown.
        pos_weight: (classes,), weight of labels that are 1.
        label_smoothing: s changes 1 to 1 - s / 2 and 0 to s / 2.

    Raises:
        ValueError: if the output has another shape.
    """
    check_columns(output, target, "classes")
    output = wide(output)
    known = known_labels(target)
    labels = target.nan_to_num(0.0).to(output) * (1 - label_smoothing) + label_smoothing / 2
    losses = F.binary_cross_entropy_with_logits(
        output, labels, reduction="none", pos_weight=_optional_like(pos_weight, output)
    )
    return _over((losses * known).sum(), known.sum())


def regression_loss(
    output: Tensor, target: Tensor, distance: Distance = "mse", huber_delta: float = 1.0
) -> Tensor:
    """Squared, absolute or Huber error, averaged over the known targets; 0 if there are none.

    Args:
        output: (N, targets), values of the network; or (N,) for one target.
        target: (N, targets), NaN if unknown.
        distance: "mse", "l1" or "huber".
        huber_delta: error from which Huber is linear.

    Raises:
        ValueError: if the output has another shape.
    """
    output = as_columns(output, target)
    check_columns(output, target, "targets")
    output = wide(output)
    known = known_labels(target)
    values = target.nan_to_num(0.0).to(output)
    if distance == "mse":
        losses = F.mse_loss(output, values, reduction="none")
    elif distance == "l1":
        losses = F.l1_loss(output, values, reduction="none")
    else:
        losses = F.huber_loss(output, values, reduction="none", delta=huber_delta)
    return _over((losses * known).sum(), known.sum())


def known_labels(target: Tensor) -> Tensor:
    """Mask of targets that are not NaN."""
    return ~target.isnan()


def segmentation_loss(
    output: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    dice: float = 0.0,
    classes: int | None = None,
) -> Tensor:
    """Cross entropy, averaged over the labelled pixels, plus `dice` times (1 - soft Dice).

    Soft Dice (Milletari et al., "V-Net", 2016, section 3, without its squares) is 2 |pt| / (|p| +
    |t|) of probabilities p and classes t over all pixels of all samples, averaged over the classes
    that occur. Both terms are 0 without labelled pixels.

    Args:
        output: (N, classes, H, W), logits of the network; may be split.
        target: (N, H, W), the class of every pixel, or `UNLABELLED`; split if `output` is, and
            may be split if `output` is full.
        weight: (classes,), class weights of the cross entropy, at least 0.
        label_smoothing: share of every label that the cross entropy spreads over all classes.
        dice: weight of the Dice term.
        classes: classes of the data; None accepts any number above the masks.

    Raises:
        ValueError: if the output has another shape or number of classes.
    """
    check_masks(output, target, weight, classes)
    output, target = split_alike(output, target)
    output = wide(output)
    total = F.cross_entropy(
        output,
        target,
        _optional_like(weight, output),
        ignore_index=UNLABELLED,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    if weight is None and not dice:
        return total / (target != UNLABELLED).sum().clamp(min=1)
    spatial, over = (1,) * (output.dim() - 2), (0, *range(2, output.dim()))
    numbers = torch.arange(output.shape[1], device=output.device).view(1, -1, *spatial)
    is_class = (target.unsqueeze(1) == numbers).to(output.dtype)
    counts = is_class.sum(over)
    weighted = counts if weight is None else counts * weight_like(weight, counts)
    loss = _over(total, weighted.sum())
    if not dice:
        return loss
    shares = output.softmax(1) * (target != UNLABELLED).unsqueeze(1)
    overlap, predicted = (shares * is_class).sum(over), shares.sum(over)
    return loss + dice * dice_loss(overlap, predicted, counts)


def dice_loss(overlap: Tensor, predicted: Tensor, counts: Tensor) -> Tensor:
    """1 - mean soft Dice of the classes that occur.

    Args:
        overlap: (classes,), sum of a class's probabilities over the pixels of that class.
        predicted: (classes,), sum of a class's probabilities over all labelled pixels.
        counts: (classes,), number of pixels per class.
    """
    occurs = counts > 0
    coefficients = 2 * overlap / (predicted + counts).clamp(min=torch.finfo(predicted.dtype).tiny)
    return ((1 - coefficients) * occurs).sum() / occurs.sum().clamp(min=1)


def _over(total: Tensor, weight: Tensor) -> Tensor:
    """Total divided by weight; 0 for weight 0, where smoothed labels still add to the total."""
    weight = weight.to(total)
    counts = weight > 0
    return total * counts / torch.where(counts, weight, torch.ones_like(weight))


def weight_like(weight: Tensor, other: Tensor) -> Tensor:
    """Class weights with dtype and device of another tensor; the copy is cached."""
    return on(weight, other.device).to(other.dtype)


def _optional_like(weight: Tensor | None, output: Tensor) -> Tensor | None:
    return None if weight is None else weight_like(weight, output)


# --- checks before the computation


def _shape(output: object) -> object:
    if isinstance(output, Tensor):
        return tuple(output.shape)
    name = type(output).__name__
    if isinstance(getattr(output, "logits", None), Tensor):  # of transformers
        return f"{name} (wrap it in a module whose forward returns only .logits)"
    return name


def as_columns(output: Tensor, target: Tensor) -> Tensor:
    """Reshape the (N,) of networks with one output to (N, 1)."""
    is_flat = isinstance(output, Tensor) and output.dim() == 1 and target.shape[1] == 1
    return output.unsqueeze(1) if is_flat else output


def check_classes(
    output: Tensor, target: Tensor, weight: Tensor | None = None, classes: int | None = None
) -> None:
    """Check that an output is (N, classes); without `classes`, more than the highest label."""
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != len(target):
        raise ValueError(
            f"the network returns {_shape(output)} for {len(target)} images, but "
            f"task=classification needs ({len(target)}, classes); use task=segmentation for a "
            "class per pixel"
        )
    if classes is not None:
        _check_number(output, classes)
    else:
        _check_labels(output, target)
    _check_weight(weight, output.shape[1], "class_weights")


def _check_labels(output: Tensor, target: Tensor) -> None:
    highest = target.shape[1] - 1 if target.dim() == 2 else int(target.max())
    if highest >= output.shape[1]:
        raise ValueError(
            f"the network has {output.shape[1]} classes, but there is a label {highest}: "
            "leave model.num_classes out, or set data.num_classes"
        )


def _check_number(output: Tensor, classes: int) -> None:
    """Check that the output has as many classes as the data."""
    outputs = output.shape[1]
    if outputs != classes:
        raise ValueError(
            f"the network has {outputs} outputs for the {classes} classes of the data: set its "
            f"argument for them, such as model.num_classes={classes}, or data.num_classes={outputs}"
        )


def check_columns(output: Tensor, target: Tensor, unit: str) -> None:
    """Check that an output has the shape of the targets; `unit` names the columns."""
    if not isinstance(output, Tensor) or output.shape != target.shape:
        samples, columns = target.shape
        raise ValueError(
            f"the network returns {_shape(output)} for {samples} images with {columns} {unit} "
            f"each, expected ({samples}, {columns}); leave model.num_classes out"
        )


def check_maps(
    output: Tensor, target: Tensor, weight: Tensor | None = None, classes: int | None = None
) -> None:
    """Check by its shape that an output is (N, classes, *spatial)."""
    samples, *size = target.shape
    fits = isinstance(output, Tensor) and output.dim() == 2 + len(size)
    fits = fits and output.shape[0] == samples
    if not fits or tuple(output.shape[2:]) != tuple(size):
        raise ValueError(
            f"the network returns {_shape(output)} for {samples} masks of {by(size)}, but "
            f"task=segmentation needs ({samples}, classes, {', '.join(map(str, size))}); use "
            "task=classification for a class per image"
        )
    if classes is not None:
        _check_number(output, classes)
    _check_weight(weight, output.shape[1], "class_weights")


def check_masks(
    output: Tensor, target: Tensor, weight: Tensor | None = None, classes: int | None = None
) -> None:
    """Check that an output is (N, classes, *spatial) with enough classes for the masks.

    Args:
        output: (N, classes, *spatial), logits of the network.
        target: (N, *spatial), masks.
        weight: (classes,), class weights.
        classes: classes of the data; then masks on an accelerator are not checked again, see
            `check_pixels`.
    """
    check_maps(output, target, weight, classes)
    labels = own_pixels(target)
    if classes is None or labels.device.type == "cpu":
        check_pixels(labels, output.shape[1])


def check_pixels(labels: Tensor, classes: int) -> None:
    """Check that masks have no class that the network lacks.

    Args:
        labels: (N, *spatial), masks, which the host waits for.
        classes: classes of the network.
    """
    highest = int(labels.where(labels != UNLABELLED, 0).max()) if labels.numel() else 0
    if highest >= classes:
        raise ValueError(
            f"the network has {classes} classes, but a mask has a pixel of class "
            f"{highest}: leave model.num_classes out, set data.num_classes, or mark unlabelled "
            f"pixels with {UNLABELLED}"
        )


def _check_weight(weight: Tensor | None, classes: int, key: str) -> None:
    if weight is not None and len(weight) != classes:
        raise ValueError(
            f"task.{key} has {len(weight)} weights, but the network has {classes} classes: set one "
            "per class"
        )


def split_alike(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Bring a map and split masks to one layout; collective over the grid.

    Masks are redistributed to the layout of a split map. Of a full map, which every rank of the
    grid has after `gather_before`, each rank takes the box of its masks.

    Args:
        output: (N, classes, H, W), logits.
        target: (N, H, W), masks.
    """
    if not isinstance(target, SpatialTensor):
        return output, target
    if isinstance(output, SpatialTensor):
        return output, redistribute(target, output.spatial_layout, output.mesh)
    return split_as_target(F.cross_entropy, output, target), target


def own_pixels(x: Tensor) -> Tensor:
    """This rank's part of a map."""
    return x.to_local() if isinstance(x, SpatialTensor) else x
