"""Class activation maps of all images of a slide, put together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spatialdl.comm.communicator import Communicator
from spatialdl.pipeline.runtime import Pipeline
from spatialdl.training.pictures.activation import NEEDED, Activations
from spatialdl.training.validation import Evaluated


class _Part(NamedTuple):
    """Of one box of some images, and the size of the whole maps."""

    samples: range
    size: tuple[int, ...]
    start: tuple[int, ...]
    values: npt.NDArray[np.float32]


class ActivationMaps:
    """Notes them while the network predicts; all ranks make it together."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._watch = Activations(pipeline, all_classes=True)
        self._parts: list[_Part] = []

    def note(self, one: Evaluated) -> None:
        """Keep what was seen of the images that have been evaluated, in the same order.

        Raises:
            ValueError: the network does not end with a mean over all places and a linear layer.
        """
        seen = self._watch.take(one.output)
        if seen is None:
            raise ValueError(
                f"activation=true needs {NEEDED}, and {self._watch.refusal}: leave it out"
            )
        if seen.is_split or one.counts:
            values = seen.values.float().cpu().numpy()
            self._parts.append(_Part(one.samples, seen.size, seen.start, values))

    def gathered(self, world: Communicator, images: int) -> npt.NDArray[np.float32] | None:
        """float32 (images, classes, *spatial) on rank 0; all ranks must ask, at the end."""
        self._watch.close()
        everybody = world.gather(self._parts)
        if everybody is None:
            return None
        parts = [part for one in everybody for part in one]
        found = np.zeros((images, parts[0].values.shape[1], *parts[0].size), np.float32)
        for part in parts:
            extents = zip(part.start, part.values.shape[2:], strict=True)
            place = [slice(first, first + many) for first, many in extents]
            found[part.samples.start : part.samples.stop, :, *place] = part.values
        return found
