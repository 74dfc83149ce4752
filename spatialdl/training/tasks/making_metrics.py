"""Creation of configured torchmetrics: single metrics, wrappers and collections."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from spatialdl.configuring.plugins import Plugin

if TYPE_CHECKING:
    from torchmetrics import Metric


def made_metrics(plugins: Iterable[Plugin]) -> dict[str, Metric]:
    """Create metrics by name; a metric of a collection has the name COLLECTION_KEY.

    Raises:
        ValueError: if one cannot be created, is not a metric, or is not supported, or if names
            are not unique.
    """
    metrics: dict[str, Metric] = {}
    for plugin in plugins:
        for name, metric in _named(plugin):
            if name in metrics:
                raise ValueError(f"task.metrics: two metrics have the name {name}: rename one")
            _check(name, metric)
            metrics[name] = metric
    return metrics


def is_random(metric: Metric) -> bool:
    """Whether updates of a metric draw random numbers."""
    from torchmetrics.wrappers import BootStrapper

    return any(isinstance(one, BootStrapper) for one in metric.modules())


def _named(plugin: Plugin) -> Iterator[tuple[str, Metric]]:
    from torchmetrics import Metric, MetricCollection

    made: Any = plugin.make()
    if isinstance(made, Metric):
        yield plugin.name, made
    elif isinstance(made, MetricCollection):
        if not len(made):
            raise ValueError(f"task.metrics: {plugin.name} has no metrics")
        for key, one in made.items():
            # a copy, because metrics of a collection share their states
            yield f"{plugin.name}_{re.sub('[^0-9A-Za-z_]', '_', key)}", deepcopy(one)
    else:
        raise ValueError(
            f"task.metrics: {plugin.target} creates a {type(made).__name__}, expected a "
            "torchmetrics.Metric or MetricCollection"
        )


def _check(name: str, metric: Metric) -> None:
    from torchmetrics import Metric
    from torchmetrics.wrappers import MinMaxMetric, Running

    for one in metric.modules():
        if isinstance(one, MinMaxMetric | Running):
            raise ValueError(
                f"task.metrics: {name} is a {type(one).__name__}, which combines several "
                "validations, but each validation resets it: use the wrapped metric; "
                "validation.csv has its values"
            )
        if isinstance(one, Metric):  # states of ranks are merged by `states.merge` instead
            one.sync_on_compute = one._to_sync = False
