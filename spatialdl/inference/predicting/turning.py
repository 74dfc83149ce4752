"""Test-time augmentation: mirrored and transposed images, predictions transformed back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.plan import plan_for
from spatialdl.comm.repartition import move
from spatialdl.data import image_source
from spatialdl.data.image_source import Pixels, Size, pairs, whole_box
from spatialdl.data.views import Views
from spatialdl.inference.predicting.pieces import MapPiece
from spatialdl.layout.layout import Box


@dataclass(frozen=True)
class MapTurn:
    """A symmetry of images: optionally swap rows and columns, then mirror some dims.

    Attributes:
        mirrored: whether each spatial dim is mirrored.
        swapped: whether the last two dims are swapped.
    """

    mirrored: tuple[bool, ...]
    swapped: bool = False

    @property
    def is_identity(self) -> bool:
        """Whether images are unchanged."""
        return not (self.swapped or any(self.mirrored))

    def size(self, size: Sequence[int]) -> Size:
        """The size of the transformed image."""
        return self._in_order(size)

    def pixels(self, image: Pixels) -> Pixels:
        """Transform an image ([slices,] rows, columns, channels)."""
        dims = len(self.mirrored)
        if self.swapped:
            image = image.swapaxes(dims - 2, dims - 1)
        return np.flip(image, tuple(dim for dim in range(dims) if self.mirrored[dim]))

    def box_before(self, box: image_source.Box, size: Sequence[int]) -> image_source.Box:
        """Map a box of the transformed image of `size` to the original image."""
        found = [
            (length - stop, length - start) if mirrored else (start, stop)
            for (start, stop), length, mirrored in zip(pairs(box), size, self.mirrored, strict=True)
        ]
        return tuple(number for pair in self._in_order(found) for number in pair)

    def piece_before(self, piece: MapPiece, size: Sequence[int]) -> MapPiece:
        """Map a piece of the transformed image's map of `size` back to the original image."""
        if not any(self.mirrored) and not self.swapped:
            return piece
        values, start = piece.values, []
        for dim, mirrored in enumerate(self.mirrored):
            first, extent = piece.start[dim], values.shape[dim + 1]
            start.append(size[dim] - first - extent if mirrored else first)
        values = values.flip([dim + 1 for dim, one in enumerate(self.mirrored) if one])
        if self.swapped:
            values = values.transpose(-1, -2)
        return MapPiece(self._in_order(start), values)

    def _in_order(self, of_dims: Sequence[Any]) -> tuple[Any, ...]:
        if not self.swapped:
            return tuple(of_dims)
        *rest, rows, cols = of_dims
        return (*rest, cols, rows)


def turns(name: str | None, dims: int) -> list[MapTurn]:
    """The symmetries of a value of `tta`; those that change the size come last.

    Args:
        name: None, the identity; "flips", all combinations of mirrored dims; "d4", all eight
            symmetries of rows and columns.
        dims: spatial dims of the images.
    """
    if name is None:
        return [MapTurn((False,) * dims)]
    if name == "flips":
        return [MapTurn(mirrored) for mirrored in product((False, True), repeat=dims)]
    rest = (False,) * (dims - 2)
    return [
        MapTurn((*rest, *mirrored), swapped)
        for swapped in (False, True)
        for mirrored in product((False, True), repeat=2)
    ]


class TurnedSource:
    """An `ImageSource` of the transformed views of a data set."""

    has_masks = False

    def __init__(self, views: Views, turn: MapTurn) -> None:
        self._views, self._turn = views, turn
        self._size = turn.size(views.size)
        self.labels: npt.NDArray[Any] = views.labels
        self.channels: int = views.source.channels
        self.classes: Sequence[str] = views.source.classes
        self.dtype = views.dtype

    def __len__(self) -> int:
        return len(self._views)

    def image_size(self, sample: int) -> Size:
        return self._size

    def read(self, sample: int, box: image_source.Box | None = None) -> Pixels:
        """Read a box of a transformed image."""
        wanted = self._turn.box_before(whole_box(self._size) if box is None else box, self._size)
        return np.ascontiguousarray(self._turn.pixels(self._views.read(0, sample, wanted)))

    def read_mask(self, sample: int, box: image_source.Box | None = None) -> npt.NDArray[np.uint8]:
        raise ValueError("transformed images have no masks")


def turned_views(views: Views, turn: MapTurn) -> Views:
    """The transformed images."""
    if turn.is_identity:
        return views
    source = TurnedSource(views, turn)
    return Views(source, turn.size(views.size), views.background, white=views.white)


class TurnMean:
    """The mean of predictions over transforms; calls are collective over `world`.

    Map pieces are redistributed to the boxes that ranks have of the first, untransformed image, so
    a rank holds at most its piece of the mean and of one other map.
    """

    def __init__(self, world: Communicator) -> None:
        self._world, self._count = world, 0
        self._values: Tensor | None = None
        self._map: Tensor | None = None
        self._boxes: tuple[Box, ...] = ()

    def add(self, values: Tensor | None, pieces: Sequence[MapPiece], dims: int) -> None:
        """Add the predictions of one transform.

        Args:
            values: (N, columns); None if this rank has none.
            pieces: this rank's piece of the map, transformed back: one or none.
            dims: spatial dims of the image.
        """
        self._count += 1
        if values is not None:
            self._values = values if self._values is None else self._values + values
        known = self._world.allgather([(one.values.shape, one.start) for one in pieces])
        columns = next((shape[0] for one in known for shape, _ in one), None)
        if columns is None:  # the task has no maps
            return
        boxes = tuple(_box(one, dims) for one in known)
        tile = torch.empty(1, columns, *(0,) * dims, dtype=torch.float64)
        if pieces:
            tile = pieces[0].values[None].double().contiguous()
        if self._map is None:
            self._map, self._boxes = tile, boxes
            return
        plan = plan_for(boxes, self._boxes, self._world.rank)
        self._map += move(self._world, plan, tile, name="turned map")

    def values(self) -> Tensor | None:
        """The mean (N, columns); None if this rank has none."""
        return None if self._values is None else self._values / self._count

    def pieces(self, dtype: torch.dtype) -> list[MapPiece]:
        """This rank's piece of the mean map."""
        box = self._boxes[self._world.rank] if self._boxes else None
        if self._map is None or box is None or box.is_empty:
            return []
        start = tuple(first for first, _ in box.spatial)
        return [MapPiece(start, (self._map[0] / self._count).to(dtype))]


def _box(pieces: Sequence[tuple[Sequence[int], Sequence[int]]], dims: int) -> Box:
    if not pieces:
        return Box(((0, 1), *((0, 0),) * dims))
    [(shape, start)] = pieces
    spans = ((first, first + n) for first, n in zip(start, shape[1:], strict=True))
    return Box(((0, 1), *spans))
