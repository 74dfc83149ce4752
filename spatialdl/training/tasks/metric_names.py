"""Names in ``task.metrics``, checked before ranks start without importing PyTorch."""

from __future__ import annotations

from omegaconf import DictConfig

from spatialdl.common.configuring.plugins import Plugin, check_names, plugins_of
from spatialdl.training.progress import COUNTS, METRICS

_EXAMPLE = "{_target_: torchmetrics.classification.MulticlassF1Score, num_classes: 3}"
_LISTS = ("confusion_matrix", "recall", "dice", "iou", "step")
_OF_CLASSES = ("_per_class", "_per_target")


def own_metric_plugins(task: DictConfig) -> list[Plugin]:
    """Parse ``task.metrics`` without importing anything.

    Args:
        task: group ``task`` of the configuration.

    Raises:
        ValueError: if it is not a list of metrics, or a name is already used.
    """
    plugins = plugins_of(task.get("metrics"), "task.metrics", _EXAMPLE)
    check_names(plugins, {"loss", *COUNTS, *METRICS[task.name], *_LISTS})
    for one in plugins:
        if one.name.startswith("slide_") or one.name.endswith(_OF_CLASSES):
            raise ValueError(
                f"task.metrics: name={one.name} is reserved for built-in metrics: use another"
            )
    return plugins
