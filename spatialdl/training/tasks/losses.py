"""The losses of the tasks: means over what has a label, by weight, within one slice of a batch.

Numerator and denominator are those of the whole slice. Slices count by their samples, as one
process counts them that accumulates over the same slices.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl.data.format import UNLABELLED
from spatialdl.parallel.layout import by
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
    """Cross entropy, the mean over the samples by the weights of their classes.

    Args:
        output: (N, classes), what the network gives.
        target: (N,), labels, or (N, classes), the shares of mixed ones.
        weight: (classes,), at least 0.
        label_smoothing: share of every label that is spread over all classes.
        classes: of the data; None takes any number that the labels do not exceed.
        over_samples: divide by the samples, not by their weights, which one sample alone would
            cancel out.

    Raises:
        ValueError: if the network gives anything else, or another number of classes.
    """
    check_classes(output, target, weight, classes)
    output = wide(output)
    if target.is_floating_point():
        target = F.pad(target.to(output), (0, output.shape[1] - target.shape[1]))
    total = F.cross_entropy(
        output,
        target,
        _given_like(weight, output),
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    if weight is None or over_samples:
        return total / len(target)
    return _over(total, classification_weights(target, weight).sum())


def classification_weights(target: Tensor, weight: Tensor) -> Tensor:
    """(N,): what the samples weigh, by their classes."""
    if not target.is_floating_point():
        return on(weight, target.device)[target]
    return target @ weight_like(weight, target)[: target.shape[1]]


def multilabel_loss(
    output: Tensor, target: Tensor, pos_weight: Tensor | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """Binary cross entropy of the logits, the mean over the known labels; 0 if there are none.

    Args:
        output: (N, classes), what the network gives.
        target: (N, classes), 1 where a class is present, 0 where not, NaN where nobody knows.
        pos_weight: (classes,), what a label counts where it is 1.
        label_smoothing: s makes 1 - s / 2 of 1 and s / 2 of 0.

    Raises:
        ValueError: if the network gives anything else.
    """
    check_columns(output, target, "classes")
    output = wide(output)
    known = known_labels(target)
    labels = target.nan_to_num(0.0).to(output) * (1 - label_smoothing) + label_smoothing / 2
    losses = F.binary_cross_entropy_with_logits(
        output, labels, reduction="none", pos_weight=_given_like(pos_weight, output)
    )
    return _over((losses * known).sum(), known.sum())


def regression_loss(
    output: Tensor, target: Tensor, distance: Distance = "mse", huber_delta: float = 1.0
) -> Tensor:
    """Squared, absolute or Huber errors, the mean over the known targets; 0 if there are none.

    Args:
        output: (N, targets), what the network gives; or (N,) where there is one.
        target: (N, targets), NaN where nobody knows.

    Raises:
        ValueError: if the network gives anything else.
    """
    output = as_columns(output, target)
    check_columns(output, target, "targets")
    output = wide(output)
    known = known_labels(target)
    wanted = target.nan_to_num(0.0).to(output)
    if distance == "mse":
        losses = F.mse_loss(output, wanted, reduction="none")
    elif distance == "l1":
        losses = F.l1_loss(output, wanted, reduction="none")
    else:
        losses = F.huber_loss(output, wanted, reduction="none", delta=huber_delta)
    return _over((losses * known).sum(), known.sum())


def known_labels(target: Tensor) -> Tensor:
    """Where a target is no NaN."""
    return ~target.isnan()


def segmentation_loss(
    output: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    dice: float = 0.0,
    classes: int | None = None,
) -> Tensor:
    """Cross entropy, the mean over the pixels with a class, and `dice` times one less soft Dice.

    Soft Dice (Milletari et al., "V-Net", 2016, section 3, without its squares) is 2 |pt| / (|p| +
    |t|) of probabilities p and classes t over all pixels of all samples, the mean over the classes
    that occur. Both are 0 where no pixel has a class.

    Args:
        output: (N, classes, H, W), what the network gives; may be split.
        target: (N, H, W), the class of every pixel, or `UNLABELLED`; split if `output` is, and
            it may be split where `output` is full.
        weight: (classes,), at least 0, in the cross entropy.
        label_smoothing: share of every label that is spread over all classes, likewise.
        classes: of the data; None takes any number that the masks do not exceed.

    Raises:
        ValueError: if the network gives anything else, or another number of classes.
    """
    check_masks(output, target, weight, classes)
    output, target = split_alike(output, target)
    output = wide(output)
    total = F.cross_entropy(
        output,
        target,
        _given_like(weight, output),
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
    overlap, told = (shares * is_class).sum(over), shares.sum(over)
    return loss + dice * dice_loss(overlap, told, counts)


def dice_loss(overlap: Tensor, told: Tensor, counts: Tensor) -> Tensor:
    """One less the mean soft Dice of the classes that occur.

    Args:
        overlap: (classes,), the sum of the probabilities of a class over its own pixels.
        told: (classes,), that over all pixels with a class.
        counts: (classes,), pixels of each.
    """
    occurs = counts > 0
    coefficients = 2 * overlap / (told + counts).clamp(min=torch.finfo(told.dtype).tiny)
    return ((1 - coefficients) * occurs).sum() / occurs.sum().clamp(min=1)


def _over(total: Tensor, weight: Tensor) -> Tensor:
    """Their quotient; 0 where nothing weighs anything, though smoothed labels cost something."""
    weight = weight.to(total)
    counts = weight > 0
    return total * counts / torch.where(counts, weight, torch.ones_like(weight))


def weight_like(weight: Tensor, other: Tensor) -> Tensor:
    """Weights of classes in the dtype and on the device of another tensor, copied there once."""
    return on(weight, other.device).to(other.dtype)


def _given_like(weight: Tensor | None, output: Tensor) -> Tensor | None:
    return None if weight is None else weight_like(weight, output)


# --- what does not fit is told before anything is computed


def _shape(output: object) -> object:
    if isinstance(output, Tensor):
        return tuple(output.shape)
    name = type(output).__name__
    if isinstance(getattr(output, "logits", None), Tensor):  # of transformers
        return f"{name} (wrap it in a module whose forward returns the .logits alone)"
    return name


def as_columns(output: Tensor, target: Tensor) -> Tensor:
    """(N, 1) of (N,), which networks with one output give."""
    alone = isinstance(output, Tensor) and output.dim() == 1 and target.shape[1] == 1
    return output.unsqueeze(1) if alone else output


def check_classes(
    output: Tensor, target: Tensor, weight: Tensor | None = None, classes: int | None = None
) -> None:
    """Refuse what is no (N, classes); without `classes` the labels say how many there are."""
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != len(target):
        raise ValueError(
            f"the network gives {_shape(output)} for {len(target)} images: to classify, it must "
            f"give ({len(target)}, classes); a network that tells a class for every pixel trains "
            "with task=segmentation"
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
            f"the network tells {output.shape[1]} classes apart, but there is a label {highest}: "
            "leave model.num_classes out, or set data.num_classes"
        )


def _check_number(output: Tensor, classes: int) -> None:
    """Refuse outputs of another number of classes than the data has."""
    outputs = output.shape[1]
    if outputs != classes:
        raise ValueError(
            f"the network has {outputs} outputs for the {classes} classes of the data: set its "
            f"argument for them, such as model.num_classes={classes}, or data.num_classes={outputs}"
        )


def check_columns(output: Tensor, target: Tensor, what: str) -> None:
    """Refuse what has not the shape of the targets."""
    if not isinstance(output, Tensor) or output.shape != target.shape:
        samples, columns = target.shape
        raise ValueError(
            f"the network gives {_shape(output)} for {samples} images with {columns} {what} each: "
            f"it must give ({samples}, {columns}); leave model.num_classes out"
        )


def check_maps(
    output: Tensor, target: Tensor, weight: Tensor | None = None, classes: int | None = None
) -> None:
    """Refuse what is no (N, classes, *spatial), by its shape."""
    samples, *size = target.shape
    fits = isinstance(output, Tensor) and output.dim() == 2 + len(size)
    fits = fits and output.shape[0] == samples
    if not fits or tuple(output.shape[2:]) != tuple(size):
        raise ValueError(
            f"the network gives {_shape(output)} for {samples} masks of {by(size)}: to segment, it "
            f"must give ({samples}, classes, {', '.join(map(str, size))}); a network that tells "
            "one class an image trains with task=classification"
        )
    if classes is not None:
        _check_number(output, classes)
    _check_weight(weight, output.shape[1], "class_weights")


def check_masks(
    output: Tensor, target: Tensor, weight: Tensor | None = None, classes: int | None = None
) -> None:
    """Refuse what is no (N, classes, *spatial) of enough classes for the masks.

    Args:
        classes: of the data; masks on an accelerator then have been looked at before, on the host,
            see `check_pixels`.
    """
    check_maps(output, target, weight, classes)
    labels = own_pixels(target)
    if classes is None or labels.device.type == "cpu":
        check_pixels(labels, output.shape[1])


def check_pixels(labels: Tensor, classes: int) -> None:
    """Refuse masks with a class that the network does not tell.

    Args:
        labels: (N, *spatial), any number of them; the host waits for these.
        classes: that it tells apart.
    """
    highest = int(labels.where(labels != UNLABELLED, 0).max()) if labels.numel() else 0
    if highest >= classes:
        raise ValueError(
            f"the network tells {classes} classes apart, but a mask has a pixel of class "
            f"{highest}: leave model.num_classes out, set data.num_classes, or mark pixels without "
            f"a class by {UNLABELLED}"
        )


def _check_weight(weight: Tensor | None, classes: int, key: str) -> None:
    if weight is not None and len(weight) != classes:
        raise ValueError(
            f"task.{key} has {len(weight)} weights, but the network tells {classes} classes apart: "
            "give one for each"
        )


def split_alike(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A map and its masks on one layout, if the masks are split; all ranks of the grid call it.

    Masks move to the layout of a split map. Of a full map, which every rank of the grid has after
    `gather_before`, each rank takes the box of its masks.

    Args:
        output: (N, classes, H, W).
        target: (N, H, W).
    """
    if not isinstance(target, SpatialTensor):
        return output, target
    if isinstance(output, SpatialTensor):
        return output, redistribute(target, output.spatial_layout, output.mesh)
    return split_as_target(F.cross_entropy, output, target), target


def own_pixels(x: Tensor) -> Tensor:
    """What this rank holds of a map."""
    return x.to_local() if isinstance(x, SpatialTensor) else x
