"""Progress bars for one large image: reading, inference and maps, on rank 0."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn
from tqdm import tqdm

from spatialdl.data.format import VOLUME_CHUNK
from spatialdl.data.image_source import Box, ImageSource, Pixels, Size, extents, whole_box
from spatialdl.training.console.progress import has_terminal

BAND = 1024  # rows per read


def bar(name: str, what: str, total: int, unit: str, *, shows: bool = True) -> tqdm[Any]:
    """A progress bar that is erased when closed; it needs a terminal."""
    return tqdm(
        total=total,
        desc=f"{name}, {what}",
        unit=unit,
        disable=not (shows and has_terminal()),
        leave=False,
        file=sys.stderr,
        dynamic_ncols=True,
    )


@dataclass
class ReadInBands:
    """An image source that reads band by band and advances a bar; pixels are unchanged."""

    source: ImageSource
    name: str

    def __post_init__(self) -> None:
        self.labels: npt.NDArray[Any] = self.source.labels
        self.dtype: np.dtype[Any] = self.source.dtype  # type: ignore[attr-defined]

    @property
    def has_masks(self) -> bool:
        return self.source.has_masks

    @property
    def channels(self) -> int:
        return self.source.channels

    @property
    def classes(self) -> Sequence[str]:
        return self.source.classes

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
