"""Maps in pieces on the ranks, assembled band by band, and their confusion counts.

No rank holds a full map.
"""

from __future__ import annotations

import logging
import math
import mmap
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.plan import plan_for
from spatialdl.comm.repartition import move
from spatialdl.data.format import UNLABELLED
from spatialdl.data.image_source import Box, Pixels, Size, pairs, whole_box
from spatialdl.data.views import Views
from spatialdl.inference.predicting.inputs import Input
from spatialdl.inference.predicting.loop import agreeing
from spatialdl.layout.layout import Box as TileBox
from spatialdl.spatial.tensor import SpatialTensor
from spatialdl.training.validation import Evaluated

log = logging.getLogger("spatialdl.predict")

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64] | npt.NDArray[np.float32]
Part = tuple[tuple[int, ...], Floats]


@dataclass(frozen=True)
class MapPiece:
    """A piece of a map: its first slice, row and column, and values (classes, *spatial).

    Attributes:
        file: memory map that backs the values; None if they are in memory.
    """

    start: tuple[int, ...]
    values: Tensor
    file: mmap.mmap | None = None

    @property
    def box(self) -> Box:
        """First and last (exclusive) slice, row and column."""
        extents = zip(self.start, self.values.shape[1:], strict=True)
        return tuple(number for first, n in extents for number in (first, first + n))

    def release(self) -> None:
        """Advise the kernel to drop the file's pages from memory."""
        if self.file is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.file.madvise(mmap.MADV_DONTNEED)


def to_file(folder: Path, piece: MapPiece) -> MapPiece:
    """Move a piece to an anonymous, memory-mapped file."""
    values = piece.values
    with tempfile.TemporaryFile(dir=folder, prefix="spatialdl-map-") as file:
        file.truncate(values.nbytes)
        mapped = mmap.mmap(file.fileno(), values.nbytes)
    again = torch.frombuffer(mapped, dtype=values.dtype).view(values.shape).copy_(values)
    mapped.flush()
    stored = MapPiece(piece.start, again, mapped)
    stored.release()
    return stored


def own_pieces(local: Tensor, one: Evaluated) -> list[MapPiece]:
    """This rank's pieces of the map of one image; replicas are counted once.

    Args:
        local: (1, classes, *spatial), values on this rank.
        one: the evaluated micro-batch, which has their layout.
    """
    start = (0,) * (local.dim() - 2)
    if isinstance(one.output, SpatialTensor):
        if not one.has_tile:
            return []
        start = tuple(first for first, _ in one.mesh.own_box(one.output.spatial_layout).spatial)
    elif not one.counts:
        return []
    return [MapPiece(start, local[0].cpu())] if local.numel() else []


def joined(pieces: Sequence[MapPiece]) -> list[MapPiece]:
    """Merge pieces that tile a box into one piece."""
    if len(pieces) < 2:
        return list(pieces)
    starts = [one.start for one in pieces]
    ends = [tuple(map(sum, zip(one.start, one.values.shape[1:], strict=True))) for one in pieces]
    first, last = (
        tuple(map(f, zip(*some, strict=True))) for f, some in ((min, starts), (max, ends))
    )
    extents = [end - start for start, end in zip(first, last, strict=True)]
    values = pieces[0].values.new_empty((len(pieces[0].values), *extents))
    for one, start in zip(pieces, starts, strict=True):
        each = zip(start, first, one.values.shape[1:], strict=True)
        values[(slice(None), *(slice(a - b, a - b + n) for a, b, n in each))] = one.values
    return [MapPiece(first, values)]


class PiecedMap:
    """A map distributed over ranks; construction and iteration are collective.

    Attributes:
        size: of the spatial dims; bands are along the first.

    Args:
        pieces: pieces of this rank.
        region: size of the region that pieces cover.
        offset: origin of the region in the map.
        empty: value outside the region.
    """

    def __init__(
        self,
        world: Communicator,
        size: tuple[int, ...],
        pieces: Sequence[MapPiece],
        region: tuple[int, ...],
        offset: tuple[int, ...] | None = None,
        empty: float = math.nan,
    ) -> None:
        self._world, self.size, self._pieces = world, size, pieces
        self._region, self._offset = region, offset or (0,) * len(size)
        self._empty = empty

    def bands(self, column: int, rows: int) -> Iterator[Floats]:
        """Iterate over the map of a class, `rows` rows (slices) at a time, on rank 0.

        The other ranks must iterate as well, and get empty bands.
        """
        yield from self._bands(column, rows, (), np.float64)

    def blocks(self, columns: int, rows: int, dtype: npt.DTypeLike) -> Iterator[npt.NDArray[Any]]:
        """Iterate as `bands`, with all columns: (columns, rows, ...), in `dtype`."""
        yield from self._bands(slice(None), rows, (columns,), dtype)

    def _bands(
        self, column: int | slice, rows: int, leading: tuple[int, ...], dtype: npt.DTypeLike
    ) -> Iterator[npt.NDArray[Any]]:
        """Iterate over bands of shape (*leading, rows, ...)."""
        top, *inset = self._offset
        for first in range(0, self.size[0], rows):
            last = min(first + rows, self.size[0])
            gathered: list[list[Part]] | None = [] if self._world.rank == 0 else None
            if first < top + self._region[0] and top < last:  # the same on all ranks
                parts = (_cut(piece, column, first - top, last - top) for piece in self._pieces)
                gathered = self._world.gather([part for one in parts for part in one])
            if gathered is None:
                yield np.empty((*leading, last - first, *(0 for _ in inset)), dtype)
                continue
            band = np.full((*leading, last - first, *self.size[1:]), self._empty, dtype)
            for start, values in (part for one in gathered for part in one):
                at = (start[0] + top - first, *map(sum, zip(start[1:], inset, strict=True)))
                cut: tuple[Any, ...] = (..., *(slice(max(0, -one), None) for one in at))
                inside = values[cut]
                begins = [max(0, one) for one in at]
                ends = map(sum, zip(begins, inside.shape[len(leading) :], strict=True))
                place: tuple[Any, ...] = (..., *map(slice, begins, ends))
                under = band[place]
                place = (..., *map(slice, under.shape[len(leading) :]))
                under[...] = inside[place]  # clipped where the map ends
            for piece in self._pieces:
                piece.release()
            yield band


def _cut(piece: MapPiece, column: int | slice, first: int, last: int) -> Iterator[Part]:
    """The rows of a piece within a band of the region."""
    row = piece.start[0]
    begin, end = max(first, row), min(last, row + piece.values.shape[1])
    if begin < end:
        part = piece.values[:, begin - row : end - row][column]
        yield (begin, *piece.start[1:]), np.ascontiguousarray(part.numpy())


# --- confusion counts


def confusion_of(
    world: Communicator, given: Input, pieces: Sequence[MapPiece], classes: int
) -> Counts | None:
    """Count pixels, int64 (classes, classes), by true and predicted class.

    Collective; all ranks get the sum. Unlabelled pixels are ignored. A mask that is unreadable or
    has an unknown class is logged.

    Args:
        pieces: this rank's pieces of the probability map.

    Returns:
        The counts; None without a valid mask.
    """
    if given.read_mask is None:
        return None
    own = np.zeros((classes, classes), np.int64)
    try:
        with agreeing(world):
            for piece in pieces:
                own += _counted(given.read_mask, piece, classes)
    except ValueError as error:  # the same on all ranks
        if world.rank == 0:
            log.warning("%s: no confusion counts from its mask: %s", given.name, error)
        return None
    # float64 is exact for counts below 2**53
    total: torch.Tensor = world.all_reduce(torch.from_numpy(own).double())
    return np.asarray(total.numpy().round(), np.int64)


def _counted(read_mask: Callable[[Box], Pixels], piece: MapPiece, classes: int) -> Counts:
    mask = read_mask(piece.box)
    known = mask != UNLABELLED
    truth = mask[known].astype(np.int64)
    if truth.size and int(truth.max()) >= classes:
        raise ValueError(
            f"the mask has a pixel of class {int(truth.max())}, but the network has {classes} "
            "classes"
        )
    predicted = piece.values.argmax(0).numpy()[known]
    cells = np.bincount(truth * classes + predicted, minlength=classes * classes)
    return cells.reshape(classes, classes)


# --- test-time augmentation: mirrored and transposed images, predictions transformed back


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

    def box_before(self, box: Box, size: Sequence[int]) -> Box:
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

    def read(self, sample: int, box: Box | None = None) -> Pixels:
        """Read a box of a transformed image."""
        wanted = self._turn.box_before(whole_box(self._size) if box is None else box, self._size)
        return np.ascontiguousarray(self._turn.pixels(self._views.read(0, sample, wanted)))

    def read_mask(self, sample: int, box: Box | None = None) -> npt.NDArray[np.uint8]:
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
        self._boxes: tuple[TileBox, ...] = ()

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


def _box(pieces: Sequence[tuple[Sequence[int], Sequence[int]]], dims: int) -> TileBox:
    if not pieces:
        return TileBox(((0, 1), *((0, 0),) * dims))
    [(shape, start)] = pieces
    spans = ((first, first + n) for first, n in zip(start, shape[1:], strict=True))
    return TileBox(((0, 1), *spans))
