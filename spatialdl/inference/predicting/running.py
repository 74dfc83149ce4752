"""Inference on a slide in any layout, and collection of predictions and activation maps."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from spatialdl.comm.communicator import Communicator
from spatialdl.common.text import progress_bar
from spatialdl.data.format import VOLUME_CHUNK
from spatialdl.data.image_source import Box, ImageSource, Pixels, Size, extents, whole_box
from spatialdl.data.views import Views
from spatialdl.errors import CheckpointError, SlideError
from spatialdl.inference.predicting.activation import NEEDED, Activations
from spatialdl.inference.predicting.inputs import Input
from spatialdl.inference.predicting.network import Network
from spatialdl.inference.predicting.pieces import (
    MapPiece,
    MapTurn,
    TurnMean,
    joined,
    own_pieces,
    to_file,
    turned_views,
    turns,
)
from spatialdl.inference.predicting.trained import Trained
from spatialdl.layout.layout import by
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.training.console.progress import has_terminal
from spatialdl.training.rank_loader import RankLoader
from spatialdl.training.tasks.losses import own_pixels
from spatialdl.training.tasks.task import Classification, MultiLabel, Regression, SampleTask
from spatialdl.training.validation import Evaluated, evaluated

if TYPE_CHECKING:
    from tqdm import tqdm

log = logging.getLogger("spatialdl.predict")

BAND = 1024  # rows per read
TASKS: Mapping[str, type[Any]] = {
    "classification": Classification,
    "multilabel": MultiLabel,
    "regression": Regression,
}


@dataclass
class SlideOutput:
    """The predictions for a slide.

    Attributes:
        values: float64 (N, columns), probabilities or values of the images, or the mean of a
            segmentation map; on rank 0 only.
        kept: indices of the images that were readable, and so predicted; on rank 0 only.
        problem: the read error of one of the other images.
        pieces: this rank's pieces of a segmentation's probability map.
        activation: float32 (images, classes, rows, columns) of all images, on rank 0 only, if
            enabled by `activation=true`.
    """

    values: Tensor | None = None
    kept: Sequence[int] = ()
    problem: str = ""
    pieces: Sequence[MapPiece] = ()
    activation: npt.NDArray[np.float32] | None = None


class Runner:
    """Predictor of one slide after another; construction and calls are collective.

    Args:
        config: configuration of the command.
    """

    def __init__(self, trained: Trained, config: DictConfig, world: Communicator) -> None:
        self._trained, self._config, self._world = trained, config, world
        self._network = Network(trained, config, world)
        self._turns = turns(config.tta, len(trained.image_size))

    def run(self, given: Input) -> SlideOutput:
        """Predict all images of a slide.

        Raises:
            SlideError: no image is readable, or the network does not take images of this size.
            ValueError: the network's channels or outputs do not match the data or the task.
        """
        if given.source.channels != self._trained.channels:
            raise ValueError(
                f"{given.name} has {given.source.channels} channels, the network was trained on "
                f"{self._trained.channels}"
            )
        normalisation = self._trained.normalisation
        views = Views(given.source, given.size, self._trained.background, white=normalisation.scale)
        self._trained.check_pixels(given.name, views.dtype)
        if given.whole and self._world.rank == 0 and not self._network.placement.stream:
            views = replace(views, source=ReadInBands(given.source, given.name))
        outcome, mean = SlideOutput(), TurnMean(self._world)
        for turn in self._turns:
            outcome = self._turned(given, views, turn)
            if len(self._turns) > 1:
                mean.add(outcome.values, joined(outcome.pieces), len(given.size))
        if len(self._turns) > 1:
            pieces = mean.pieces(self._network.precision.dtype)
            outcome = SlideOutput(mean.values(), pieces=pieces)
        outcome.kept, outcome.problem = self._kept(given)
        if outcome.values is not None and self._trained.task != "segmentation":
            outcome.values = outcome.values[outcome.kept]
        return outcome

    def _turned(self, given: Input, views: Views, turn: MapTurn) -> SlideOutput:
        """Predict all images of a slide under one test-time transform."""
        size = turn.size(given.size)
        try:
            pipeline = self._network.pipeline(size)
        except CheckpointError:
            raise
        except ValueError as error:  # the same on all ranks
            raise SlideError(f"{given.name}: {error}") from error
        reports, name = given.whole and self._world.rank == 0, self._name(given, turn)
        if reports:
            log.info("%s: predicting an image of %s", name, " x ".join(map(str, size)))
        loader = RankLoader(
            OmegaConf.create({"workers": 0}),
            turned_views(views, turn),
            pipeline,
            batch_size=1 if given.whole else int(self._config.batch_size),
            masks=False,
            normalisation=self._trained.normalisation,
            dtype=self._network.precision.dtype,
        )
        stages = list(pipeline.stages.values())
        with closing(loader), layer_progress(name, stages) if reports else nullcontext():
            microbatches = self._microbatches(loader, given, name)
            if self._trained.task == "segmentation":
                return self._map(pipeline, loader, microbatches, size, turn)
            return self._samples(pipeline, loader, microbatches, len(given.places))

    def _name(self, given: Input, turn: MapTurn) -> str:
        many = len(self._turns)
        return f"{given.name} {self._turns.index(turn) + 1}/{many}" if many > 1 else given.name

    def _samples(
        self,
        pipeline: PipelineRuntime,
        loader: RankLoader,
        microbatches: Iterator[Any],
        images: int,
    ) -> SlideOutput:
        task: SampleTask = TASKS[self._trained.task]()
        own: list[tuple[range, Tensor]] = []
        columns = len(self._trained.classes)
        recorder = ActivationMaps(pipeline) if self._config.activation else None
        for one in evaluated(pipeline, loader, microbatches):
            if recorder is not None:
                recorder.record(one)
            if one.output.dim() > 2 or one.output.numel() != len(one.samples) * columns:
                raise ValueError(
                    f"the network returns {list(one.output.shape)} for {len(one.samples)} images, "
                    f"but task={self._trained.task} of the checkpoint has {columns} columns"
                )
            if one.counts:
                own.append((one.samples, one.output.double().cpu().view(-1, columns)))
        activation = recorder.gathered(self._world, images) if recorder is not None else None
        gathered = self._world.gather(own)
        if gathered is None:
            return SlideOutput()
        outputs = torch.empty(images, columns, dtype=torch.float64)
        missing = set(range(images))
        for samples, output in (piece for one_rank in gathered for piece in one_rank):
            outputs[samples.start : samples.stop] = output
            missing -= set(samples)
        if missing:
            raise RuntimeError(f"{len(missing)} images have no output: this is a bug")
        return SlideOutput(task.predictions(outputs), activation=activation)

    def _map(
        self,
        pipeline: PipelineRuntime,
        loader: RankLoader,
        microbatches: Iterator[Any],
        size: Size,
        turn: MapTurn,
    ) -> SlideOutput:
        """Predict one image; each rank keeps its piece of the map, transformed back."""
        columns = len(self._trained.classes)
        own: list[MapPiece] = []
        sums = torch.zeros(columns, dtype=torch.float64)
        memory = pipeline.memory
        store = None if memory is None or memory.store is None else memory.store.folder
        for one in evaluated(pipeline, loader, microbatches):
            self._check_map(one.output, size, columns)
            for piece in own_pieces(own_pixels(one.output).softmax(1), one):
                sums += piece.values.double().flatten(1).sum(1)
                own.append(piece if store is None else to_file(store, piece))
        means = self._world.all_reduce(sums) / prod(size)
        own = [turn.piece_before(piece, size) for piece in own]
        return SlideOutput(means[None] if self._world.rank == 0 else None, pieces=own)

    def _check_map(self, output: Tensor, size: Size, columns: int) -> None:
        if tuple(output.shape) != (1, columns, *size):
            raise ValueError(
                f"the network returns {list(output.shape)} for an image of {by(size)}, but "
                f"task=segmentation needs {[1, columns, *size]}"
            )

    def _microbatches(self, loader: RankLoader, given: Input, name: str) -> Iterator[Any]:
        reports = self._world.rank == 0 and not given.whole
        with bar(name, "tiles", len(loader), "batch", shows=reports) as done:
            for batch in loader.batches():
                yield loader.microbatches(batch)
                done.update()

    def _kept(self, given: Input) -> tuple[list[int], str]:
        """Images readable on all ranks, and the read error of the first unreadable one.

        Raises:
            SlideError: no image is readable.
        """
        own: Mapping[int, str] = getattr(given.source, "unreadable", {})
        bad = {
            number: why for one in self._world.allgather(dict(own)) for number, why in one.items()
        }
        kept = [number for number in range(len(given.places)) if number not in bad]
        first = bad[min(bad)] if bad else ""
        if not kept:
            raise SlideError(first)
        return kept, first


class _Part(NamedTuple):
    """The activation of one box of some images; `size` is that of the full maps."""

    samples: range
    size: tuple[int, ...]
    start: tuple[int, ...]
    values: npt.NDArray[np.float32]


class ActivationMaps:
    """Recorder of class activation maps during inference; construction is collective."""

    def __init__(self, pipeline: PipelineRuntime) -> None:
        self._activations = Activations(pipeline)
        self._parts: list[_Part] = []

    def record(self, one: Evaluated) -> None:
        """Store the activation of the images just evaluated, in the same order.

        Raises:
            ValueError: the network does not end with a global mean and a linear layer.
        """
        activation = self._activations.take(one.output)
        if activation is None:
            raise ValueError(
                f"activation=true needs {NEEDED}, and {self._activations.refusal}: leave it out"
            )
        if one.has_tile if activation.is_split else one.counts:
            values = activation.values.float().cpu().numpy()
            self._parts.append(_Part(one.samples, activation.size, activation.start, values))

    def gathered(self, world: Communicator, images: int) -> npt.NDArray[np.float32] | None:
        """Gather float32 (images, classes, *spatial) on rank 0; collective, ends recording."""
        self._activations.close()
        gathered = world.gather(self._parts)
        if gathered is None:
            return None
        parts = [part for one in gathered for part in one]
        maps = np.zeros((images, parts[0].values.shape[1], *parts[0].size), np.float32)
        for part in parts:
            extents = zip(part.start, part.values.shape[2:], strict=True)
            place = [slice(first, first + many) for first, many in extents]
            maps[part.samples.start : part.samples.stop, :, *place] = part.values
        return maps


# --- progress bars: reading, inference and maps, on rank 0


def bar(name: str, what: str, total: int, unit: str, *, shows: bool = True) -> tqdm[Any]:
    """A progress bar that is erased when closed; it needs a terminal."""
    hidden = not (shows and has_terminal())
    return progress_bar(None, f"{name}, {what}", unit, total=total, disable=hidden)


@dataclass
class ReadInBands:
    """An image source that reads band by band and advances a bar; pixels are unchanged."""

    source: ImageSource
    name: str

    def __post_init__(self) -> None:
        source: Any = self.source
        self.labels: npt.NDArray[Any] = source.labels
        self.dtype: np.dtype[Any] = source.dtype
        self.has_masks, self.channels = bool(source.has_masks), int(source.channels)
        self.classes: Sequence[str] = source.classes

    def __len__(self) -> int:
        return len(self.source)

    def image_size(self, sample: int) -> Size:
        return self.source.image_size(sample)

    def read(self, sample: int, box: Box | None = None) -> Pixels:
        size = self.image_size(sample)
        row0, row1, *rest = box or whole_box(size)
        found = np.empty((*extents((row0, row1, *rest)), self.channels), self.dtype)
        unit, step = ("row", BAND) if len(size) == 2 else ("slice", VOLUME_CHUNK)
        with bar(self.name, "reading", row1 - row0, unit) as rows_read:
            for first in range(row0 // step * step, row1, step):
                top, end = max(first, row0), min(first + step, row1)
                band = self.source.read(sample, (top, end, *rest))
                found[top - row0 : end - row0] = band
                rows_read.update(end - top)
        return found

    def read_mask(self, sample: int, box: Box | None = None) -> npt.NDArray[np.uint8]:
        return self.source.read_mask(sample, box)


@contextmanager
def layer_progress(name: str, stages: Sequence[nn.Module]) -> Iterator[None]:
    """Show a progress bar of the layers that this rank executes."""
    layers = [one for stage in stages for one in stage.modules() if not list(one.children())]
    with bar(name, "network", len(layers), "layer") as done:
        hooks = [one.register_forward_hook(lambda *_: _advance(done)) for one in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _advance(done: tqdm[Any]) -> None:
    if done.n < done.total:  # a layer may be called more than once
        done.update()
