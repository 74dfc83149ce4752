"""Gallery of the worst and best predicted validation samples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.mesh import Mesh
from spatialdl.data.format import UNLABELLED
from spatialdl.data.image_source import ImageSource, whole_box
from spatialdl.data.samples import VolumeSample
from spatialdl.data.shards import ShardDataset
from spatialdl.data.targets import sample_numbers
from spatialdl.data.views import Views
from spatialdl.parallel.placement import Placement
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.training.pictures.heat_maps import HeatMaps, heated
from spatialdl.training.pictures.orthogonal_slices import draw_sections
from spatialdl.training.pictures.thumbnails import (
    Patch,
    as_rgb,
    drawn_signal,
    gather_thumbnails,
    joined_sections,
    mask_patches,
    overlaid,
)
from spatialdl.training.tasks.losses import own_pixels, split_alike
from spatialdl.training.tasks.predictions import Predictions, errors_of, extremes

Picture = npt.NDArray[np.uint8]
Thumbnails = list[npt.NDArray[Any]]
"""One thumbnail per section of a sample."""

CANDIDATES = 64
"""Number of samples, spread over the data set, that are candidates if outputs are maps."""

_VOLUME = 200  # pixels of the longest edge of a volume in a picture
_PIXELS = {1: "positions", 2: "pixels", 3: "voxels"}
_GAP = 4  # pixels between stacked pictures
_WIDTH, _LINE = 320, 16  # minimum width and height of a title, in pixels


class Example(NamedTuple):
    """A sample with its prediction and pictures.

    Attributes:
        sample: index of the sample.
        name: slide and level-0 corner, or the number of the sample as in ``predictions.csv``.
        title: label and prediction.
        error: 0 for a perfect prediction.
        pictures: RGB pictures (rows, columns, 3) by name.
    """

    sample: int
    name: str
    title: str
    error: float
    pictures: dict[str, Picture]


class _MapPart(NamedTuple):
    """A rank's part of a sample's masks, with its numbers of correct and labelled pixels."""

    sample: int
    predicted: list[Patch | None]
    truth: list[Patch | None]
    correct: int
    known: int


class Gallery:
    """Worst and best predicted samples of the last validation.

    Args:
        world: all ranks.
        placement: the layout.
        views: validation images.
        names: class or target names.
    """

    def __init__(
        self, world: Communicator, placement: Placement, views: Views, names: Sequence[str]
    ) -> None:
        self._world, self._placement, self._views, self._names = world, placement, views, names
        count = min(len(views), CANDIDATES)
        self._candidates = {n * len(views) // count for n in range(count)} if count else set()
        self._maps: list[_MapPart] = []

    def begin(self) -> None:
        """Start a new validation."""
        self._maps = []

    def note(self, samples: range, output: Tensor, target: Tensor, mesh: Mesh) -> None:
        """Record maps (n, classes, *spatial) and masks of samples; collective over the grid."""
        wanted = [place for place, sample in enumerate(samples) if sample in self._candidates]
        if not wanted:
            return
        box = whole_box(self._views.size)
        output, target = split_alike(output, target)
        if isinstance(output, SpatialTensor):
            own = mesh.own_box(output.spatial_layout)
            box = tuple(bound for interval in own.spatial for bound in interval)
        elif mesh.part > 0:  # a replicated map
            return
        scores, truth = own_pixels(output)[wanted], own_pixels(target)[wanted]
        if not truth.numel():
            return
        predicted = scores.argmax(1)
        correct, known = predicted == truth, truth != UNLABELLED
        for place, number in enumerate(wanted):
            self._maps.append(
                _MapPart(
                    samples[number],
                    mask_patches(predicted[place], box, self._views.size),
                    mask_patches(truth[place], box, self._views.size),
                    int((correct & known)[place].sum()),
                    int(known[place].sum()),
                )
            )

    def examples(
        self, predictions: Predictions | None, heat_maps: HeatMaps | None = None
    ) -> list[Example] | None:
        """Create the examples on rank 0, worst first; collective, all ranks must call it.

        Args:
            predictions: predictions of all samples, on rank 0, unless outputs are maps.
            heat_maps: heat maps of the samples, if available.
        """
        gathered = self._world.gather(self._maps)
        chosen: list[tuple[int, float]] = []
        if gathered is not None:
            maps = [part for one in gathered for part in one]
            chosen = _by_map(maps) if maps else _by_prediction(predictions)
            chosen = extremes(chosen)
        numbers = self._world.bcast([sample for sample, _ in chosen])
        images = gather_thumbnails(self._world, self._placement, self._views, numbers)
        heat = heat_maps.gathered(self._world, numbers) if heat_maps is not None else {}
        if gathered is None or images is None:
            return None
        examples = []
        for (sample, error), pixels in zip(chosen, images, strict=True):
            parts = [part for part in maps if part.sample == sample]
            if parts:
                examples.append(self._example_of_map(sample, error, pixels, parts))
            elif predictions is not None:
                pictures = {"image": self._drawn(sample, pixels)}
                if sample in heat:
                    name = _named(predictions.names, heat[sample].label)
                    values = heat[sample].values
                    pictures[f"heat map of {name}"] = self._drawn(sample, pixels, heat=values)
                title, name = _title(predictions, sample), _name_of(self._views.source, sample)
                examples.append(Example(sample, name, title, error, pictures))
        return examples

    def _example_of_map(
        self, sample: int, error: float, pixels: Thumbnails, parts: Sequence[_MapPart]
    ) -> Example:
        size = self._views.size
        truth = joined_sections([part.truth for part in parts], size)
        predicted = joined_sections([part.predicted for part in parts], size)
        pictures = {
            "image": self._drawn(sample, pixels),
            "truth": self._drawn(sample, pixels, truth),
            "predicted": self._drawn(sample, pixels, predicted),
        }
        name, unit = _name_of(self._views.source, sample), _PIXELS[len(size)]
        return Example(sample, name, f"{1 - error:.1%} of {unit} correct", error, pictures)

    def _drawn(
        self,
        sample: int,
        pixels: Thumbnails,
        classes: Thumbnails | None = None,
        heat: Thumbnails | None = None,
    ) -> Picture:
        """Draw thumbnails of a sample's sections, with classes or a heat map as overlay."""
        size = self._views.size
        if len(size) == 3:
            spacing, affine = _geometry(self._views.source, sample)
            return draw_sections(size, pixels, spacing, affine, classes, heat, side=_VOLUME)
        if len(size) == 1:
            image = drawn_signal(pixels[0][0], None if classes is None else classes[0][0])
        else:
            image = as_rgb(pixels[0])
            image = image if classes is None else overlaid(image, classes[0])
        return image if heat is None else heated(image, heat[0])


def stacked(example: Example) -> bool:
    """Whether pictures are stacked, because they are wide (three slices, or line plots)."""
    return any(one.shape[1] > 2 * one.shape[0] for one in example.pictures.values())


def labelled(example: Example) -> Picture:
    """Compose the pictures of an example below its title, side by side or stacked."""
    pictures = list(example.pictures.values())
    if stacked(example):
        gap = np.full((_GAP, pictures[0].shape[1], 3), 255, np.uint8)
        pictures = [part for one in pictures for part in (one, gap)][:-1]
    strip = np.concatenate(pictures, axis=0 if stacked(example) else 1)
    canvas = Image.new("RGB", (max(strip.shape[1], _WIDTH), strip.shape[0] + _LINE), "white")
    canvas.paste(Image.fromarray(strip), (0, _LINE))
    text = f"{example.name}: {example.title}"
    ImageDraw.Draw(canvas).text(
        (2, 2), text.encode("latin-1", "replace").decode("latin-1"), "black"
    )
    return np.asarray(canvas)


def _geometry(source: ImageSource, sample: int) -> tuple[Any, Any]:
    """Spacing and affine of a volume; None if unknown."""
    known = source.sample(sample) if isinstance(source, ShardDataset) else None
    return (known.spacing, known.affine) if isinstance(known, VolumeSample) else (None, None)


def _name_of(source: ImageSource, sample: int) -> str:
    if not isinstance(source, ShardDataset):
        return f"sample {sample}"
    known = source.sample(sample)
    if not known.slide:
        return f"sample {sample_numbers(source)[sample]}"
    if isinstance(known, VolumeSample):
        return known.slide
    return f"{known.slide}, x={known.x}, y={known.y}"


def _by_map(parts: Sequence[_MapPart]) -> list[tuple[int, float]]:
    """Samples and their share of wrong pixels."""
    correct: dict[int, int] = {}
    known: dict[int, int] = {}
    for part in parts:
        correct[part.sample] = correct.get(part.sample, 0) + part.correct
        known[part.sample] = known.get(part.sample, 0) + part.known
    return [
        (sample, 1 - correct[sample] / known[sample]) for sample in sorted(known) if known[sample]
    ]


def _by_prediction(predictions: Predictions | None) -> list[tuple[int, float]]:
    """Samples and their errors."""
    if predictions is None:
        return []
    errors = errors_of(predictions.task, predictions.values, predictions.labels)
    return list(enumerate(errors.tolist()))


def _named(names: Sequence[str], number: int) -> str:
    return names[number] if number < len(names) else str(number)


def _title(predictions: Predictions, sample: int) -> str:
    row, named = predictions.values[sample], partial(_named, predictions.names)
    label = predictions.labels[sample]
    if predictions.task.name == "classification":
        best = int(row.argmax())
        return f"true {named(int(label))}, predicted {named(best)} ({row[best]:.0%})"
    if predictions.task.name == "multilabel":
        true = [named(n) for n, one in enumerate(label.tolist()) if one > 0.5]
        predicted = [f"{named(n)} ({row[n]:.0%})" for n in range(len(row)) if row[n] >= 0.5]
        return f"true {', '.join(true) or 'none'}, predicted {', '.join(predicted) or 'none'}"
    pairs = zip(label.tolist(), row.tolist(), strict=True)
    return ", ".join(
        f"{named(n)}: true {a:.3g}, predicted {b:.3g}" for n, (a, b) in enumerate(pairs)
    )
