"""Metrics of torchmetrics: made from the configuration, with states of several ranks merged.

Merging is like torchmetrics' synchronisation, but for any communicator, with ranks without updates,
and with means weighted by updates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spatialdl.common.configuring.plugins import Plugin

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
        if isinstance(one, Metric):  # states of ranks are merged by `merge` instead
            one.sync_on_compute = one._to_sync = False


# --- merging of the states of several ranks


@dataclass(frozen=True)
class State:
    """State of a metric on one rank.

    Attributes:
        updates: number of updates.
        values: tensors or lists of tensors by name, on the CPU.
    """

    updates: int
    values: dict[str, Any]


def state_of(metric: Metric) -> list[State]:
    """States of a metric and of the metrics inside it, such as a wrapped one."""
    return [
        State(one.update_count, {key: _on_cpu(value) for key, value in one.metric_state.items()})
        for one in _with_inner(metric)
    ]


def irreducible(metric: Metric) -> str | None:
    """Name of the first state that cannot be merged: a tensor without a reduction."""
    for one in _with_inner(metric):
        for key, value in one.metric_state.items():
            if one._reductions[key] is None and isinstance(value, Tensor):
                return key
    return None


def merge(metric: Metric, ranks: Sequence[list[State]]) -> None:
    """Merge the states of several ranks into a metric; states without updates are ignored."""
    for number, one in enumerate(_with_inner(metric)):
        updated = [states[number] for states in ranks if states[number].updates]
        one._update_count = sum(state.updates for state in updated)
        for key in one.metric_state if updated else ():
            values = [state.values[key] for state in updated]
            updates = [state.updates for state in updated]
            setattr(one, key, _merged(one._reductions[key], values, updates))


def _merged(reduction: Any, values: list[Any], updates: list[int]) -> Any:
    from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean

    if isinstance(values[0], list):
        return [one for value in values for one in value]
    if len(values) == 1:
        return values[0]
    if reduction is dim_zero_cat:
        return torch.cat([value.reshape(-1) if value.dim() == 0 else value for value in values])
    stacked = torch.stack(values)
    if reduction is dim_zero_mean:
        shares = torch.tensor(updates, dtype=torch.float64) / sum(updates)
        return (stacked * shares.view(-1, *(1,) * (stacked.dim() - 1))).sum(0)
    return reduction(stacked)


def _with_inner(metric: Metric) -> list[Metric]:
    from torchmetrics import Metric

    return [one for one in metric.modules() if isinstance(one, Metric)]


def _on_cpu(value: Any) -> Any:
    if isinstance(value, list):
        return [_on_cpu(one) for one in value]
    return value.detach().cpu() if isinstance(value, Tensor) else value
