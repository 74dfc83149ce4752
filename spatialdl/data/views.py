"""Images as the network sees them: cropped to one size, padded, and augmented while training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from spatialdl.data.augmentation.blur import blur, with_margin
from spatialdl.data.augmentation.color import recolour, value_range
from spatialdl.data.augmentation.drawing import Draw, draw
from spatialdl.data.augmentation.geometry import read_padded, window_of
from spatialdl.data.augmentation.settings import Augmentation
from spatialdl.data.format import UNLABELLED
from spatialdl.data.image_source import Box, ImageSource, Pixels


@dataclass(frozen=True)
class Views:
    """One view of `size` of every image, another one each epoch if augmented; read box by box.

    A box of a view is that box of the whole view, bit for bit, and only what lies under it is read
    (a blur needs some pixels around it).

    Attributes:
        source: the stored images.
        size: (H, W) of the views. Smaller images lie in the middle of the background.
        background: what lies beyond an image, in its own units; None is white.
        augmentation: None takes the centre and changes nothing.
        seed: of what is drawn.
        white: the largest pixel value, `data.scale`; None is that of an integer type, 1 for floats.
    """

    source: ImageSource
    size: tuple[int, int]
    background: float | None = None
    augmentation: Augmentation | None = None
    seed: int = 0
    white: float | None = None

    def __post_init__(self) -> None:
        if self.augmentation is not None:
            self.augmentation.check_channels(self.source.channels)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def labels(self) -> npt.NDArray[Any]:
        """Of all samples, int64 (N,) or float64 (N, targets)."""
        return self.source.labels

    @property
    def moves(self) -> bool:
        """Whether a box of a view lies elsewhere in the stored image another epoch."""
        return self.augmentation is not None and self.augmentation.moves

    def read(self, epoch: int, sample: int, box: Box) -> Pixels:
        """A box (row0, row1, col0, col1) of a view: (rows, cols, channels) of the source's type.

        Raises:
            ValueError: the box is not inside.
        """
        self._check(box)
        drawn = self._draw(epoch, sample)
        wanted = with_margin(box, self.size, drawn.sigma)
        pixels = self._place(drawn, sample, wanted, masks=False)
        changed = recolour(pixels, drawn, self.white)
        return blur(changed, box, self.size, drawn.sigma, self.white)

    def read_mask(self, epoch: int, sample: int, box: Box) -> Pixels:
        """The same box of the mask: (rows, cols); beyond the image no pixel has a class.

        Raises:
            ValueError: the box is not inside.
        """
        self._check(box)
        drawn = self._draw(epoch, sample)
        return self._place(drawn, sample, box, masks=True)

    def stored_box(self, epoch: int, sample: int, box: Box) -> Box:
        """The part of the stored image that lies under a box of a view; may be empty."""
        drawn, stored = self._draw(epoch, sample), self.source.image_size(sample)
        wanted = with_margin(box, self.size, drawn.sigma)
        row0, row1, col0, col1 = window_of(drawn, stored, self.size).source_box(wanted)
        return max(row0, 0), min(row1, stored[0]), max(col0, 0), min(col1, stored[1])

    def _check(self, box: Box) -> None:
        row0, row1, col0, col1 = box
        if not (0 <= row0 <= row1 <= self.size[0] and 0 <= col0 <= col1 <= self.size[1]):
            raise ValueError(
                f"box rows {row0}:{row1}, columns {col0}:{col1} is not inside a view of "
                f"{self.size[0]} x {self.size[1]}"
            )

    def _draw(self, epoch: int, sample: int) -> Draw:
        if self.augmentation is None:
            return Draw()
        return draw(self.augmentation, self.seed, epoch, sample)

    def _place(self, drawn: Draw, sample: int, box: Box, masks: bool) -> Pixels:
        stored = self.source.image_size(sample)
        window = window_of(drawn, stored, self.size)
        under = window.source_box(box)
        read = partial(self.source.read_mask if masks else self.source.read, sample)
        pixels = read_padded(read, stored, under, partial(self._empty, under, masks))
        return np.ascontiguousarray(window.arrange(pixels))

    def _empty(self, box: Box, masks: bool) -> Pixels:
        shape = box[1] - box[0], box[3] - box[2]
        if masks:
            return np.full(shape, UNLABELLED, np.uint8)
        return np.full((*shape, self.source.channels), self._fill, self.dtype)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Of the pixels of the source."""
        known = getattr(self.source, "dtype", None)  # of a `ShardDataset`
        return self.source.read(0, (0, 1, 0, 1)).dtype if known is None else np.dtype(known)

    @cached_property
    def _fill(self) -> float:
        return self.check_background()

    def check_background(self) -> float:
        """What lies beyond the images.

        Raises:
            ValueError: it is no value of such images.
        """
        white = value_range(self.dtype) if self.white is None else self.white
        if self.background is None:
            return white
        fill = self.background
        whole = float(fill).is_integer() or not np.issubdtype(self.dtype, np.integer)
        if not (0 <= fill <= white and whole):
            raise ValueError(
                f"data.background={fill} is no value of {self.dtype} images: take 0 to {white:g}, "
                f"or null for {white:g}"
            )
        return fill
