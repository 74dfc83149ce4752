"""Metrics as a configuration names them: single ones, wrappers, and those of collections."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from spatialdl.configuring.plugins import Plugin

if TYPE_CHECKING:
    from torchmetrics import Metric


def made_metrics(plugins: Iterable[Plugin]) -> dict[str, Metric]:
    """Metrics by name, not updated yet; one of a collection has the name COLLECTION_KEY.

    Raises:
        ValueError: one cannot be made, is no metric, or needs what a validation does not have; or
            two have one name.
    """
    found: dict[str, Metric] = {}
    for plugin in plugins:
        for name, metric in _named(plugin):
            if name in found:
                raise ValueError(
                    f"task.metrics: there are two called {name}: give one another name"
                )
            _check(name, metric)
            found[name] = metric
    return found


def is_random(metric: Metric) -> bool:
    """Whether a metric draws random numbers when it is updated."""
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
            # of its own, as metrics of a collection share their states
            yield f"{plugin.name}_{re.sub('[^0-9A-Za-z_]', '_', key)}", deepcopy(one)
    else:
        raise ValueError(
            f"task.metrics: {plugin.target} gives a {type(made).__name__}, no torchmetrics.Metric "
            "or MetricCollection"
        )


def _check(name: str, metric: Metric) -> None:
    from torchmetrics import Metric
    from torchmetrics.wrappers import MinMaxMetric, Running

    for one in metric.modules():
        if isinstance(one, MinMaxMetric | Running):
            raise ValueError(
                f"task.metrics: {name} is a {type(one).__name__}, which keeps what earlier updates "
                "gave, but each validation begins anew: name the metric inside of it; "
                "validation.csv has its value of every validation"
            )
        if isinstance(one, Metric):  # states of ranks are put together here, on one of them
            one.sync_on_compute = one._to_sync = False
