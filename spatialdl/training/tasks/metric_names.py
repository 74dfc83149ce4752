"""What ``task.metrics`` names, read before ranks start: no PyTorch here."""

from __future__ import annotations

from omegaconf import DictConfig

from spatialdl.configuring.plugins import Plugin, check_names, plugins_of
from spatialdl.training.best import COUNTS, METRICS

_EXAMPLE = "{_target_: torchmetrics.classification.MulticlassF1Score, num_classes: 3}"
_LISTS = ("confusion_matrix", "recall", "dice", "iou", "step")
_OF_CLASSES = ("_per_class", "_per_target")


def own_metric_plugins(task: DictConfig) -> list[Plugin]:
    """The metrics of the user's own; nothing is imported.

    Args:
        task: the group ``task`` of a configuration.

    Raises:
        ValueError: if it is no list of these, or a name is taken.
    """
    found = plugins_of(task.get("metrics"), "task.metrics", _EXAMPLE)
    check_names(found, {"loss", *COUNTS, *METRICS[task.name], *_LISTS})
    for one in found:
        if one.name.startswith("slide_") or one.name.endswith(_OF_CLASSES):
            raise ValueError(
                f"task.metrics: name={one.name} stands for metrics that come along: take another"
            )
    return found
