"""Images as the network sees them: cropped, padded, and augmented for training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from spatialdl.data.augmentation.geometry import Draw, clipped, draw, read_padded, window_of
from spatialdl.data.augmentation.pixel_changes import blur, recolour, value_range, with_margin
from spatialdl.data.augmentation.settings import Augmentation
from spatialdl.data.dataset_source import DatasetSource
from spatialdl.data.format import UNLABELLED
from spatialdl.data.image_source import Box, ImageSource, Pixels, Size, check_box, extents


@dataclass(frozen=True)
class Views:
    """One view of `size` per image, another one each epoch if augmented; read box by box.

    A box of a view equals that box of the whole view bit for bit, and only the pixels under it are
    read (a blur needs a margin).

    Attributes:
        source: the stored images.
        size: (H, W) of the views, (D, H, W) of volumes, (L,) of signals. Smaller images are
            centred on the background.
        background: value beyond an image, in its own units; None is white, or 0 for volumes and
            signals.
        augmentation: None takes the centre without changes.
        seed: seed of the augmentation.
        white: the largest pixel value, `data.scale`; None is that of an integer type, 1 for floats.
    """

    source: ImageSource
    size: Size
    background: float | None = None
    augmentation: Augmentation | None = None
    seed: int = 0
    white: float | None = None

    def __post_init__(self) -> None:
        if self.augmentation is not None:
            self.augmentation.check_values(len(self.size), self.dtype)
            self.augmentation.check_channels(self.source.channels)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def labels(self) -> npt.NDArray[Any]:
        """Labels of all samples, int64 (N,) or float64 (N, targets)."""
        return self.source.labels

    @property
    def no_labels(self) -> npt.NDArray[Any]:
        """An empty array with the type and shape of labels."""
        known = getattr(self.source, "no_labels", None)  # of a `DatasetSource`
        return self.source.labels[:0] if known is None else np.asarray(known)

    def label(self, epoch: int, sample: int) -> npt.NDArray[Any]:
        """Label of a sample: class, int64 (), or values, float64 (targets,)."""
        if isinstance(self.source, DatasetSource):
            return self.source.target(epoch, sample)
        return np.asarray(self.source.labels[sample])

    @property
    def varies(self) -> bool:
        """Whether views differ in size."""
        return False

    def size_of(self, sample: int) -> Size:
        """The size of the view of an image."""
        return self.size

    @property
    def moves(self) -> bool:
        """Whether a box of a view moves within the stored image between epochs."""
        return self.augmentation is not None and self.augmentation.moves

    def read(self, epoch: int, sample: int, box: Box) -> Pixels:
        """A box of a view: ([slices,] rows, cols, channels) of the source's type.

        Raises:
            ValueError: the box is not inside.
        """
        self._check(box)
        drawn = self._draw(epoch, sample)
        if not self._is_image:
            return self._place(drawn, epoch, sample, box, masks=False)
        wanted = with_margin(box, self.size, drawn.sigma)
        pixels = self._place(drawn, epoch, sample, wanted, masks=False)
        changed = recolour(pixels, drawn, self.white)
        return blur(changed, box, self.size, drawn.sigma, self.white)

    def read_mask(self, epoch: int, sample: int, box: Box) -> Pixels:
        """The same box of the mask, without channels; 255 (no class) beyond the image.

        Raises:
            ValueError: the box is not inside.
        """
        self._check(box)
        drawn = self._draw(epoch, sample)
        return self._place(drawn, epoch, sample, box, masks=True)

    def stored_box(self, epoch: int, sample: int, box: Box) -> Box:
        """The part of the stored image under a box of a view; may be empty."""
        drawn, stored = self._draw(epoch, sample), self.source.image_size(sample)
        wanted = with_margin(box, self.size, drawn.sigma) if self._is_image else box
        return clipped(window_of(drawn, stored, self.size).source_box(wanted), stored)

    @property
    def _is_image(self) -> bool:
        return len(self.size) == 2

    def _check(self, box: Box) -> None:
        check_box(box, self.size, "a view")

    def _draw(self, epoch: int, sample: int) -> Draw:
        if self.augmentation is None:
            return Draw()
        return draw(self.augmentation, self.seed, epoch, sample)

    def _place(self, drawn: Draw, epoch: int, sample: int, box: Box, masks: bool) -> Pixels:
        source: Any = self.source
        more = {"epoch": epoch} if isinstance(source, DatasetSource) else {}
        stored = source.image_size(sample, **more)
        window = window_of(drawn, stored, self.size)
        under = window.source_box(box)
        read = partial(source.read_mask if masks else source.read, sample, **more)
        pixels = read_padded(read, stored, under, partial(self._empty, under, masks))
        return np.ascontiguousarray(window.arrange(pixels))

    def _empty(self, box: Box, masks: bool) -> Pixels:
        shape = extents(box)
        if masks:
            return np.full(shape, UNLABELLED, np.uint8)
        return np.full((*shape, self.source.channels), self._fill, self.dtype)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Type of the source's pixels."""
        known = getattr(self.source, "dtype", None)  # of a `ShardDataset`
        return (
            self.source.read(0, (0, 1) * len(self.size)).dtype if known is None else np.dtype(known)
        )

    @cached_property
    def _fill(self) -> float:
        return self.check_background()

    def check_background(self) -> float:
        """The value beyond the images.

        Raises:
            ValueError: `background` is not a value of such images.
        """
        white = value_range(self.dtype) if self.white is None else self.white
        usual = white if self._is_image else 0
        if self.background is None:
            return usual
        fill, least = self.background, np.iinfo(self.dtype).min if self.dtype.kind == "i" else 0
        whole = float(fill).is_integer() or not np.issubdtype(self.dtype, np.integer)
        if not (least <= fill <= white and whole):
            raise ValueError(
                f"data.background={fill} is not a value of {self.dtype} images: use {least:g} to "
                f"{white:g}, or null for {usual:g}"
            )
        return fill
