"""Heat maps of the predicted class in the worst and best predicted samples."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.mesh import Mesh
from spatialdl.pipeline.runtime import PipelineRuntime
from spatialdl.training.pictures.activation import NEEDED, Activation, Activations
from spatialdl.training.pictures.thumbnails import (
    Patch,
    mean_sections,
    pixel_patches,
    window_in,
)
from spatialdl.training.tasks.predictions import extremes

log = logging.getLogger("spatialdl.trainer")

COLOURS, OPACITY = "turbo", 0.65
"""Colour map and opacity of heat maps over pictures."""


class HeatMap(NamedTuple):
    """Class activation map of a sample's most probable class, at most as large as a thumbnail.

    Attributes:
        label: number of the class.
        values: float64 (rows, columns) per section, see `thumbnails.Section`: mean contributions
            to the logit.
    """

    label: int
    values: list[npt.NDArray[np.float64]]


class _Part(NamedTuple):
    """A rank's part of a sample's map of `size`."""

    error: float
    label: int
    size: tuple[int, ...]
    places: int
    patches: list[Patch | None]


class HeatMaps:
    """Class activation maps of a validation; each rank keeps its parts of likely examples."""

    def __init__(self, pipeline: PipelineRuntime) -> None:
        self._pipeline = pipeline
        self._parts: dict[int, _Part] = {}
        self._watch: Activations | None = None
        self._refusal = ""
        self._logged = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context of a validation; collective."""
        self._parts = {}
        self._watch = watch = Activations(self._pipeline, all_classes=False)
        try:
            yield
        finally:
            watch.close()
            self._watch = None
            self._refusal = self._refusal or watch.refusal

    def note(self, samples: range, output: Tensor, errors: Tensor, mesh: Mesh) -> None:
        """Record the maps of the next evaluated samples.

        Args:
            samples: numbers of the samples.
            output: output of the network.
            errors: (n,), errors by which examples are selected.
            mesh: ranks over which the output is split.
        """
        assert self._watch is not None
        maps = self._watch.take(output)
        has_part = mesh.channels == 0 if maps is not None and maps.is_split else mesh.counts
        if maps is not None and max(maps.size) == 1:
            self._refusal = "its last map has only one position"
        elif maps is not None and maps.values.numel() and has_part:
            known = {sample: part.error for sample, part in self._parts.items()}
            known.update(zip(samples, errors.tolist(), strict=True))
            self._parts = {
                sample: self._parts.get(sample) or _part(maps, sample - samples.start, error)
                for sample, error in extremes(known.items())
            }

    def gathered(self, world: Communicator, samples: Sequence[int]) -> dict[int, HeatMap]:
        """Gather the maps of some samples on rank 0; collective, all ranks must call it."""
        own = {sample: self._parts[sample] for sample in samples if sample in self._parts}
        gathered = world.gather((own, self._refusal))
        if gathered is None:
            return {}
        refusals = [refusal for _, refusal in gathered if refusal]
        if refusals and samples and not self._logged:
            self._logged = True
            log.info("no heat maps of examples: they need %s, but %s", NEEDED, refusals[0])
        heat_maps = {}
        for sample in samples:
            parts = [own[sample] for own, _ in gathered if sample in own]
            # ranks select different samples only if their hardware rounds differently
            if parts and sum(part.places for part in parts) == np.prod(parts[0].size):
                values = mean_sections([part.patches for part in parts], parts[0].size)
                heat_maps[sample] = HeatMap(parts[0].label, [one[..., 0] for one in values])
        return heat_maps


def _part(maps: Activation, place: int, error: float) -> _Part:
    values = maps.values[place].double().cpu().numpy()
    starts = zip(maps.start, values.shape, strict=True)
    box = tuple(bound for start, count in starts for bound in (start, start + count))
    patches = pixel_patches(lambda one: values[window_in(one, box)][..., None], box, maps.size)
    label = int(maps.logits[place].argmax())
    return _Part(error, label, maps.size, values.size, patches)


def heated(
    image: npt.NDArray[np.uint8], values: npt.NDArray[Any], most: float | None = None
) -> npt.NDArray[np.uint8]:
    """Overlay an image with a heat map.

    Args:
        image: (rows, columns, 3).
        values: (rows, columns), at most those of the image.
        most: value of the last colour, the first is 0; None uses the maximum.
    """
    from matplotlib import colormaps

    rows, cols = (
        (2 * np.arange(many) + 1) * few // (2 * many)
        for many, few in zip(image.shape[:2], values.shape, strict=True)
    )
    most = values.max() if most is None else most
    shares = (values / (most if most > 0 else 1.0)).clip(0, 1)
    colours = 255 * colormaps[COLOURS](shares)[rows[:, None], cols[None, :], :3]
    mixed = (1 - OPACITY) * faint(image)[..., None] + OPACITY * colours
    return np.asarray(mixed.round(), np.uint8)


def faint(image: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Convert an image to light grey (rows, columns), so that overlaid colours stay true."""
    return np.asarray(255 - (255 - image.mean(2)) * 0.6)
