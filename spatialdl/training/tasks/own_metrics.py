"""Metrics of the user's own, named by ``task.metrics``: any `torchmetrics.Metric`.

Of whole images a metric gets all validation samples in one update, on rank 0. Of maps each rank
updates a copy with its own pixels, sample by sample, and the states of all copies are reduced as
`dist_reduce_fx` of `add_state` says: so whatever is a reduction over pixels equals one process.
"""

from __future__ import annotations

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
from spatialdl.training.tasks.losses import own_pixels, split_alike
from spatialdl.training.tasks.making_metrics import is_random, made_metrics
from spatialdl.training.tasks.metric_names import own_metric_plugins
from spatialdl.training.tasks.metrics import Scores, in_float64
from spatialdl.training.tasks.states import State, irreducible, merge, state_of

if TYPE_CHECKING:
    from torchmetrics import Metric

UNKNOWN = -1
"""Labels of several classes that are not known, as metrics get them."""

_TRIED, _TRIED_SIDE, _CUT = 24, 12, 5  # samples, pixels of a side, where it is cut
_SAME = 1e-9


class OwnMetrics:
    """The metrics that a configuration names, as they are before any update.

    Args:
        task: the group ``task`` of the configuration.

    Raises:
        ValueError: if one cannot be made, or is no metric.
    """

    def __init__(self, task: DictConfig) -> None:
        self._task = str(task.name)
        with in_float64():
            self._metrics = made_metrics(own_metric_plugins(task))

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def is_smaller_better(self, metric: str | None, key: str) -> bool | None:
        """Whether the smallest value of a metric is the best; None if it is none of these.

        Args:
            metric: as a validation names it.
            key: of the configuration that names it, for messages.

        Raises:
            ValueError: if the metric does not say.
        """
        plain = (metric or "").removeprefix("slide_")
        found = [name for name in self._metrics if plain == name or plain.startswith(f"{name}_")]
        if not found:
            return None
        higher = self._metrics[max(found, key=len)].higher_is_better
        if higher is None:
            raise ValueError(
                f"{key}={metric}: whether larger or smaller values are better is not known, as "
                "higher_is_better of its class is None: set it in a class of yours derived from it"
            )
        return not higher

    def of_samples(self, predictions: Tensor, labels: Tensor) -> Scores:
        """Of whole images; None of all if there are none.

        Args:
            predictions: float64 (N, columns), probabilities or values.
            labels: (N,) or (N, columns), NaN where not known.

        Raises:
            ValueError: if a metric refuses them, or gives no numbers.
        """
        found: Scores = {}
        given, wanted = _as_metrics_take(self._task, predictions, labels)
        for name, metric in self._metrics.items():
            if not len(wanted) or not given.isfinite().all():
                found[name] = None
                continue
            with _naming(name, given, wanted), in_float64(), _same_draws():
                own = deepcopy(metric)
                own.update(given, wanted)
                value = own.compute()
            found |= _numbers(name, value)
        return found

    def of_maps(self, device: torch.device) -> MapMetrics:
        """New copies, to be updated with maps on a device."""
        return MapMetrics({name: deepcopy(one).to(device) for name, one in self._metrics.items()})

    def try_out(
        self, columns: int | None, classes: int, dims: int, copies: int, parts: int
    ) -> None:
        """Hand random predictions to the metrics, so that what cannot work is refused at once.

        Args:
            columns: that the network gives; None if that is not known.
            classes: of the data, or targets.
            dims: spatial dims of the images.
            copies: ranks that update copies with maps.
            parts: into how many tiles maps are cut.

        Raises:
            ValueError: if a metric refuses them, or cannot be put together from maps in parts.
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
                    f"task.metrics: {name} draws samples at random (BootStrapper), which cannot be "
                    "repeated on maps, as each rank gets its own: name the metric inside of it"
                )

    def _check_reducible(self, copies: int) -> None:
        for name, metric in self._metrics.items():
            state = irreducible(metric)
            if state is not None:
                raise ValueError(
                    f"task.metrics: {name} cannot be put together from {copies} ranks, as its "
                    f"state '{state}' has dist_reduce_fx=None: give add_state sum, mean, min, max "
                    "or cat, or take a layout in which one rank has the outputs"
                )

    def _check_tiles(
        self, name: str, predictions: Tensor, target: Tensor, expected: Scores
    ) -> None:
        """What gives something else for two tiles than for the map needs whole maps."""
        states = []
        for cut in (slice(None, _CUT), slice(_CUT, None)):
            tile = MapMetrics({name: deepcopy(self._metrics[name])})
            tile.update_own(predictions[..., cut], target[..., cut])
            states.append(tile.states())
        found = MapMetrics({name: deepcopy(self._metrics[name])}).merged(states)
        if not _alike(expected, found):
            raise ValueError(
                f"task.metrics: {name} needs whole maps, but this layout cuts them into tiles: of "
                f"random maps it gives {_shown(expected)}, of the same ones in two tiles "
                f"{_shown(found)}; take a metric that counts pixels (such as those of "
                "torchmetrics.classification), or a layout whose last stage cuts no images"
            )


class MapMetrics:
    """Copies of metrics that this rank updates with its pixels, for one validation.

    Args:
        metrics: by name, not updated yet.
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics

    def update(self, output: Tensor, target: Tensor, part: int) -> None:
        """Take note of some samples; all ranks of the grid call it.

        Args:
            output: (N, classes, *spatial), logits.
            target: (N, *spatial), classes.
            part: this rank's part of the grid; of equal copies, that of part 0 counts.
        """
        if not self._metrics:
            return
        output, target = split_alike(output, target)
        if isinstance(output, SpatialTensor) or part == 0:
            self.update_own(own_pixels(output), own_pixels(target))

    def update_own(self, output: Tensor, target: Tensor) -> None:
        """Sample by sample, so that it does not matter how batches are cut."""
        if not target.numel() or not output.isfinite().all():  # the loss says that, too
            return
        for sample in range(len(target)):
            own = slice(sample, sample + 1)
            shares, wanted = output[own].double().softmax(1), target[own]
            for name, metric in self._metrics.items():
                with _naming(name, shares, wanted), in_float64():
                    metric.update(shares, wanted)

    def states(self) -> list[list[State]]:
        """Of this rank's copies, and of the metrics inside of each, on the CPU."""
        return [state_of(metric) for metric in self._metrics.values()]

    def scores(self, world: Communicator) -> Scores:
        """Of the pixels of all ranks; every rank must call it, and gets them.

        Raises:
            ValueError: if a metric gives no numbers.
        """
        if not self._metrics:
            return {}
        everybody = world.gather(self.states())
        found: Scores = world.bcast({} if everybody is None else self.merged(everybody))
        return found

    def merged(self, everybody: Sequence[list[list[State]]]) -> Scores:
        """The values of the states of some ranks together, which the copies take."""
        found: Scores = {}
        for number, (name, metric) in enumerate(self._metrics.items()):
            metric.to("cpu")
            states = [one[number] for one in everybody]
            if not any(one.updates for state in states for one in state):  # wrappers count none
                found[name] = None
                continue
            with _computing(name), in_float64():
                merge(metric, states)
                value = metric.compute()
            found |= _numbers(name, value)
        return found


def _as_metrics_take(task: str, predictions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
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
def _same_draws() -> Iterator[None]:
    """Metrics that draw samples give one value in every layout, and shift no other draws."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@contextmanager
def _naming(name: str, predictions: Tensor, target: Tensor) -> Iterator[None]:
    """Errors of a metric name it, and what it was given."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"task.metrics: {name} refuses predictions {_kind(predictions)} and targets "
            f"{_kind(target)}: {' '.join(str(error).split())}{_unknown(target)}"
        ) from error


@contextmanager
def _computing(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        said = " ".join(str(error).split())
        raise ValueError(f"task.metrics: {name} cannot compute its value: {said}") from error


def _unknown(target: Tensor) -> str:
    """What the numbers of targets without a class are, if there are any."""
    names = {UNKNOWN: "labels that are not known", UNLABELLED: "pixels of no class"}
    for number, what in names.items():
        if not target.is_floating_point() and bool((target == number).any()):
            return f"; {what} are {number}: give it ignore_index: {number}"
    return ""


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


def _numbers(name: str, value: Any) -> Scores:
    """A number, None where it is not defined, or a list of these; of several, by their names.

    Raises:
        ValueError: if it is anything else.
    """
    if isinstance(value, Mapping):
        found: Scores = {}
        for key, one in value.items():
            found |= _numbers(f"{name}_{key}", one)
        return found
    if isinstance(value, Tensor) and value.dim() == 1 and value.numel() != 1:
        return {name: [_number(one) for one in value.tolist()]}
    if isinstance(value, Tensor) and value.numel() == 1:
        return {name: _number(value.item())}
    if isinstance(value, int | float):
        return {name: _number(value)}
    what = tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ValueError(
        f"task.metrics: {name} gives {what}: take one that gives a number, a number for each "
        "class, or a dict of these"
    )


def _number(value: float) -> float | None:
    return None if value != value else float(value)  # noqa: PLR0124


def _as_list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found]


def _alike(one: Scores, other: Scores) -> bool:
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
