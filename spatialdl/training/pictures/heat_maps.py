"""Where the predicted class lies in the worst and best predicted samples."""

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
"""Of maps over pictures."""


class HeatMap(NamedTuple):
    """The class activation map of a sample's most probable class; at most of a thumbnail's size.

    Attributes:
        label: of the class.
        values: float64 (rows, columns) of each section, see `thumbnails.Section`: the mean of what
            these places give to its logit.
    """

    label: int
    values: list[npt.NDArray[np.float64]]


class _Part(NamedTuple):
    """What a rank has of a sample's map of `size`."""

    error: float
    label: int
    size: tuple[int, ...]
    places: int
    patches: list[Patch | None]


class HeatMaps:
    """Class activation maps of a validation; a rank keeps its parts of those that may be shown."""

    def __init__(self, pipeline: PipelineRuntime) -> None:
        self._pipeline = pipeline
        self._parts: dict[int, _Part] = {}
        self._watch: Activations | None = None
        self._refusal = ""
        self._told = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Another validation; all ranks go through it."""
        self._parts = {}
        self._watch = watch = Activations(self._pipeline, all_classes=False)
        try:
            yield
        finally:
            watch.close()
            self._watch = None
            self._refusal = self._refusal or watch.refusal

    def note(self, samples: range, output: Tensor, errors: Tensor, mesh: Mesh) -> None:
        """The next samples that have been evaluated.

        Args:
            output: what left the network.
            errors: (n,), by which samples are chosen.
            mesh: over which they left.
        """
        assert self._watch is not None
        seen = self._watch.take(output)
        has = mesh.channels == 0 if seen is not None and seen.is_split else mesh.counts
        if seen is not None and max(seen.size) == 1:
            self._refusal = "its last map has but one place"
        elif seen is not None and seen.values.numel() and has:
            known = {sample: part.error for sample, part in self._parts.items()}
            known.update(zip(samples, errors.tolist(), strict=True))
            self._parts = {
                sample: self._parts.get(sample) or _part(seen, sample - samples.start, error)
                for sample, error in extremes(known.items())
            }

    def gathered(self, world: Communicator, samples: Sequence[int]) -> dict[int, HeatMap]:
        """Those of some samples, on rank 0; all ranks must call it."""
        own = {sample: self._parts[sample] for sample in samples if sample in self._parts}
        everybody = world.gather((own, self._refusal))
        if everybody is None:
            return {}
        refusals = [refusal for _, refusal in everybody if refusal]
        if refusals and samples and not self._told:
            self._told = True
            log.info("no heat maps over examples: they need %s, and %s", NEEDED, refusals[0])
        found = {}
        for sample in samples:
            parts = [own[sample] for own, _ in everybody if sample in own]
            # ranks choose alike, unless their hardware rounds differently
            if parts and sum(part.places for part in parts) == np.prod(parts[0].size):
                values = mean_sections([part.patches for part in parts], parts[0].size)
                found[sample] = HeatMap(parts[0].label, [one[..., 0] for one in values])
        return found


def _part(seen: Activation, place: int, error: float) -> _Part:
    values = seen.values[place].double().cpu().numpy()
    starts = zip(seen.start, values.shape, strict=True)
    box = tuple(bound for start, many in starts for bound in (start, start + many))
    patches = pixel_patches(lambda one: values[window_in(one, box)][..., None], box, seen.size)
    label = int(seen.logits[place].argmax())
    return _Part(error, label, seen.size, values.size, patches)


def heated(
    image: npt.NDArray[np.uint8], values: npt.NDArray[Any], most: float | None = None
) -> npt.NDArray[np.uint8]:
    """An image (rows, columns, 3) under a map.

    Args:
        values: (rows, columns), at most those of the image.
        most: of the last colour, the first one is 0; None takes the highest value.
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
    """(rows, columns), in grey and lighter, so that colours over it are those of the map."""
    return np.asarray(255 - (255 - image.mean(2)) * 0.6)
