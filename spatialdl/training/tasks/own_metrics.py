"""Metrics of the user, set by ``task.metrics``: any `torchmetrics.Metric`.

For whole images, a metric gets all validation samples in one update on rank 0. For maps, each rank
updates a copy with its own pixels, sample by sample. The states of all copies are reduced by the
`dist_reduce_fx` of `add_state`, so any reduction over pixels equals that of a single process.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.data.format import UNLABELLED
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.training.tasks.foreign_metrics import (
    State,
    irreducible,
    is_random,
    made_metrics,
    merge,
    state_of,
)
from spatialdl.training.tasks.losses import own_pixels, split_alike
from spatialdl.training.tasks.metric_names import own_metric_plugins
from spatialdl.training.tasks.metrics import Scores

if TYPE_CHECKING:
    from torchmetrics import Metric

UNKNOWN = -1
"""Value of unknown labels of multi-label tasks in metrics."""

_TRIED, _TRIED_SIDE, _CUT = 24, 12, 5  # samples, pixels along a dim, position of the cut
_SAME = 1e-9


class OwnMetrics:
    """Configured metrics before any update.

    Args:
        task: group ``task`` of the configuration.

    Raises:
        ValueError: if one cannot be created, or is not a metric.
    """

    def __init__(self, task: DictConfig) -> None:
        self._task = str(task.name)
        with _in_float64():
            self._metrics = made_metrics(own_metric_plugins(task))

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def is_smaller_better(self, metric: str | None, key: str) -> bool | None:
        """Whether smaller values of a metric are better; None if it is not one of these.

        Args:
            metric: name as in ``validation.csv``.
            key: key of the configuration, for messages.

        Raises:
            ValueError: if the metric does not define it.
        """
        plain = (metric or "").removeprefix("slide_")
        names = [name for name in self._metrics if plain == name or plain.startswith(f"{name}_")]
        if not names:
            return None
        higher = self._metrics[max(names, key=len)].higher_is_better
        if higher is None:
            raise ValueError(
                f"{key}={metric}: higher_is_better of its class is None: set it in a derived class"
            )
        return not higher

    def of_samples(self, predictions: Tensor, labels: Tensor) -> Scores:
        """Compute metrics of whole images; None without samples.

        Args:
            predictions: float64 (N, columns), probabilities or values.
            labels: (N,) or (N, columns), NaN if unknown.

        Raises:
            ValueError: if a metric rejects them, or does not return numbers.
        """
        scores: Scores = {}
        values, targets = _metric_inputs(self._task, predictions, labels)
        for name, metric in self._metrics.items():
            if not len(targets) or not values.isfinite().all():
                scores[name] = None
                continue
            with _naming(name, values, targets), _in_float64(), _same_draws():
                own = deepcopy(metric)
                own.update(values, targets)
                value = own.compute()
            scores |= _numbers(name, value)
        return scores

    def of_maps(self, device: torch.device) -> MapMetrics:
        """Copies of the metrics for updates with maps on a device."""
        return MapMetrics({name: deepcopy(one).to(device) for name, one in self._metrics.items()})

    def try_out(
        self, columns: int | None, classes: int, dims: int, copies: int, parts: int
    ) -> None:
        """Try the metrics on random predictions, to fail before training.

        Args:
            columns: columns of the network's output; None if unknown.
            classes: classes or targets of the data.
            dims: spatial dims of the images.
            copies: ranks that update copies with maps.
            parts: number of tiles of a map.

        Raises:
            ValueError: if a metric rejects them, or cannot be reduced over tiles.
        """
        if not self._metrics:
            return
        draw = torch.Generator().manual_seed(0)
        maps = self._task == "segmentation"
        if maps:
            self._check_repeatable()
        if maps and copies > 1:
            self._check_reducible(copies)
        if columns is None:
            return
        columns, classes = max(columns, 1), max(classes, 1)
        sizes = (_TRIED_SIDE,) * dims if maps else ()
        samples = 2 if maps else _TRIED
        predictions = torch.randn(*(samples, columns, *sizes), generator=draw, dtype=torch.float64)
        if not maps:
            labels = _random_labels(self._task, samples, min(classes, columns), draw)
            if self._task != "regression":
                is_one = self._task == "classification"
                predictions = predictions.softmax(1) if is_one else predictions.sigmoid()
            self.of_samples(predictions, labels)
            return
        target = torch.randint(min(classes, columns), (samples, *sizes), generator=draw)
        for name, metric in self._metrics.items():
            whole = MapMetrics({name: deepcopy(metric)})
            whole.update_own(predictions, target)
            expected = whole.merged([whole.states()])
            if parts > 1:
                self._check_tiles(name, predictions, target, expected)

    def _check_repeatable(self) -> None:
        for name, metric in self._metrics.items():
            if is_random(metric):
                raise ValueError(
                    f"task.metrics: {name} draws random samples (BootStrapper), which differ "
                    "between ranks for maps: use the wrapped metric"
                )

    def _check_reducible(self, copies: int) -> None:
        for name, metric in self._metrics.items():
            state = irreducible(metric)
            if state is not None:
                raise ValueError(
                    f"task.metrics: {name} cannot be reduced over {copies} ranks, because its "
                    f"state '{state}' has dist_reduce_fx=None: pass sum, mean, min, max or cat to "
                    "add_state, or use a layout in which one rank has the outputs"
                )

    def _check_tiles(
        self, name: str, predictions: Tensor, target: Tensor, expected: Scores
    ) -> None:
        """Check that a metric of two tiles equals that of the whole map."""
        states = []
        for cut in (slice(None, _CUT), slice(_CUT, None)):
            tile = MapMetrics({name: deepcopy(self._metrics[name])})
            tile.update_own(predictions[..., cut], target[..., cut])
            states.append(tile.states())
        actual = MapMetrics({name: deepcopy(self._metrics[name])}).merged(states)
        if not _are_close(expected, actual):
            raise ValueError(
                f"task.metrics: {name} needs whole maps, but this layout splits them into tiles: "
                f"it is {_shown(expected)} for random maps, but {_shown(actual)} for the same maps "
                "in two tiles; use a metric that counts pixels (such as those of "
                "torchmetrics.classification), or a layout whose last stage does not split images"
            )


class MapMetrics:
    """Metrics of one validation, updated with this rank's pixels.

    Args:
        metrics: metrics by name, without updates.
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics

    def update(self, output: Tensor, target: Tensor, part: int) -> None:
        """Update with some samples; collective over the grid.

        Args:
            output: (N, classes, *spatial), logits.
            target: (N, *spatial), classes.
            part: this rank's part of the grid; of replicated maps, only part 0 counts.
        """
        if not self._metrics:
            return
        output, target = split_alike(output, target)
        if isinstance(output, SpatialTensor) or part == 0:
            self.update_own(own_pixels(output), own_pixels(target))

    def update_own(self, output: Tensor, target: Tensor) -> None:
        """Update sample by sample, so that results do not depend on the batch size."""
        if not target.numel() or not output.isfinite().all():  # the loss shows NaN, too
            return
        for sample in range(len(target)):
            own = slice(sample, sample + 1)
            shares, targets = output[own].double().softmax(1), target[own]
            for name, metric in self._metrics.items():
                with _naming(name, shares, targets), _in_float64():
                    metric.update(shares, targets)

    def states(self) -> list[list[State]]:
        """States of this rank's metrics, and of the metrics inside each, on the CPU."""
        return [state_of(metric) for metric in self._metrics.values()]

    def scores(self, world: Communicator) -> Scores:
        """Compute the metrics of the pixels of all ranks; collective, returned on every rank.

        Raises:
            ValueError: if a metric does not return numbers.
        """
        if not self._metrics:
            return {}
        gathered = world.gather(self.states())
        scores: Scores = world.bcast({} if gathered is None else self.merged(gathered))
        return scores

    def merged(self, ranks: Sequence[list[list[State]]]) -> Scores:
        """Merge the states of some ranks into these metrics and compute their values."""
        scores: Scores = {}
        for number, (name, metric) in enumerate(self._metrics.items()):
            metric.to("cpu")
            states = [one[number] for one in ranks]
            if not any(one.updates for state in states for one in state):  # wrappers count none
                scores[name] = None
                continue
            with _naming(name), _in_float64():
                merge(metric, states)
                value = metric.compute()
            scores |= _numbers(name, value)
        return scores


def _metric_inputs(task: str, predictions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if task == "multilabel":
        return predictions, labels.nan_to_num(UNKNOWN).long()
    if task == "regression":
        known = ~labels.isnan().any(1)
        predictions, labels = predictions[known], labels[known].double()
        if labels.shape[1] == 1:
            return predictions[:, 0], labels[:, 0]
    return predictions, labels


def _random_labels(task: str, samples: int, classes: int, draw: torch.Generator) -> Tensor:
    if task == "classification":
        return torch.randint(classes, (samples,), generator=draw)
    if task == "multilabel":
        return torch.randint(2, (samples, classes), generator=draw).double()
    return torch.randn(samples, classes, generator=draw, dtype=torch.float64)


@contextmanager
def _in_float64() -> Iterator[None]:
    """Context with float64 as default dtype and without torchmetrics' warnings."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _same_draws() -> Iterator[None]:
    """Fix the seed of metrics that draw samples, without changing the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@contextmanager
def _naming(name: str, *given: Tensor) -> Iterator[None]:
    """Add the metric's name, and its predictions and targets if given, to errors."""
    try:
        yield
    except Exception as error:
        what = "cannot compute its value"
        if given:
            what = f"rejects predictions {_kind(given[0])} and targets {_kind(given[1])}"
        text = " ".join(str(error).split()) + "".join(map(_unknown, given[1:]))
        raise ValueError(f"task.metrics: {name} {what}: {text}") from error


def _unknown(target: Tensor) -> str:
    """Advice on ignore_index if targets have unknown or unlabelled elements."""
    names = {UNKNOWN: "unknown labels", UNLABELLED: "unlabelled pixels"}
    for number, kind in names.items():
        if not target.is_floating_point() and bool((target == number).any()):
            return f"; {kind} are {number}: set ignore_index: {number}"
    return ""


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


def _numbers(name: str, value: Any) -> Scores:
    """Convert a metric's value to numbers or lists of numbers by name; None for NaN.

    Raises:
        ValueError: if it is anything else.
    """
    if isinstance(value, Mapping):
        scores: Scores = {}
        for key, one in value.items():
            scores |= _numbers(f"{name}_{key}", one)
        return scores
    if isinstance(value, Tensor) and value.dim() == 1 and value.numel() != 1:
        return {name: [_number(one) for one in value.tolist()]}
    if isinstance(value, Tensor) and value.numel() == 1:
        return {name: _number(value.item())}
    if isinstance(value, int | float):
        return {name: _number(value)}
    kind = tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ValueError(
        f"task.metrics: {name} returns {kind}, expected a number, one number per class, or a dict "
        "of these"
    )


def _number(value: float) -> float | None:
    return None if value != value else float(value)  # noqa: PLR0124


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _are_close(one: Scores, other: Scores) -> bool:
    flat = [
        (a, b)
        for name in one
        for a, b in zip(_as_list(one[name]), _as_list(other.get(name)), strict=False)
    ]
    return all(
        a == b or (a is not None and b is not None and abs(a - b) <= _SAME * max(1, abs(a)))
        for a, b in flat
    )


def _shown(scores: Scores) -> str:
    value = next(iter(scores.values()))
    value = value[0] if isinstance(value, list) else value
    return "none" if value is None else f"{value:.6g}"
