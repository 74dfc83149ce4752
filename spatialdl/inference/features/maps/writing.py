"""Files of a region's map, written by rank 0 in bands of rows. ::

maps/NAME.h5        features (width, rows, columns)
maps/NAME.png       the region, and three principal components as colours
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.common.files import unfinished
from spatialdl.common.text import fitted
from spatialdl.data.feature_file import FEATURES
from spatialdl.errors import SlideError
from spatialdl.inference.features.maps.regions import SlideRegion
from spatialdl.inference.features.results import ResultFolders
from spatialdl.inference.predicting.loop import agreeing
from spatialdl.inference.predicting.pictures import new_figure, save_figure
from spatialdl.inference.predicting.pieces import MapPiece, PiecedMap
from spatialdl.slides.reading.reader import Slide, Thumbnail

COUNT = 3
"""Components of a map that are shown."""
LONGEST = 1600
"""Cells or pixels of a side at most; larger maps are subsampled."""
_PANEL_INCHES, _LEAST_INCHES = 6.0, 1.6
_LIMITS = (1, 99)  # percentiles of the darkest and the brightest colour
_ROWS = 2**16  # cells converted to float64 at a time
Colours = npt.NDArray[np.uint8]
_CHUNK_BYTES, _BAND_BYTES = 2**20, 2**26


@dataclass(frozen=True)
class FoundMap:
    """The map of a region, distributed over ranks.

    Attributes:
        size: rows and columns of the map.
        width: features per cell.
        pieces: pieces of this rank.
    """

    region: SlideRegion
    size: tuple[int, int]
    width: int
    pieces: Sequence[MapPiece]

    def stored(self, dtype: str, world: Communicator) -> FoundMap:
        """Convert the map to the dtype in which it is stored.

        Raises:
            SlideError: features are not finite in `dtype`; on all ranks.
        """
        pieces, bad, infinite = [], 0, 0
        for piece in self.pieces:
            values = piece.values.to(getattr(torch, dtype))
            bad += int((~values.isfinite()).any(0).sum())
            infinite += int((~piece.values.isfinite()).sum())
            pieces.append(MapPiece(piece.start, values))
        counts = world.allgather((bad, infinite))
        bad, infinite = (sum(column) for column in zip(*counts, strict=True))
        if bad:
            large = infinite == 0
            remedy = "use --dtype float32" if large else "use --precision float32 or bf16"
            raise SlideError(
                f"slide {self.region.images.path}: {bad} of {self.size[0] * self.size[1]} cells "
                f"have features that are not finite{f' in {dtype}' if large else ''}; {remedy}"
            )
        return FoundMap(self.region, self.size, self.width, pieces)


def save_map(
    layout: ResultFolders,
    found: FoundMap,
    attributes: Mapping[str, Any],
    slide_mpp: float | None,
    world: Communicator,
) -> None:
    """Write the picture, then the map; collective over `world`.

    Args:
        layout: folders of the run.
        found: the map in its stored dtype.
        attributes: attributes of the features.

    Raises:
        OSError, AgreedError: a file cannot be written; on all ranks.
    """
    name = found.region.name
    components = components_of(found.pieces, found.width, world)
    count = len(components.directions)
    pieces = [components.of(piece) for piece in found.pieces]
    step = -(-max(found.size) // LONGEST)
    shown = [
        band[:, ::step, ::step]
        for band in PiecedMap(world, found.size, pieces, found.size).blocks(
            count, step * LONGEST, np.float32
        )
    ]
    with agreeing(world):
        if world.rank == 0:
            picture, colours = layout.picture_of(name), as_colours(np.concatenate(shown, 1))
            save_picture(picture, found.region, colours, components.parts.numpy(), slide_mpp)
    _write(layout.features_of(name), found, attributes, world)


def _write(path: Path, found: FoundMap, attributes: Mapping[str, Any], world: Communicator) -> None:
    dtype = found.pieces[0].values.numpy().dtype if found.pieces else None
    dtype = next(one for one in world.allgather(dtype) if one is not None)
    each = found.width * dtype.itemsize
    side = max(1, int((_CHUNK_BYTES / each) ** 0.5))
    chunk = found.width, min(side, found.size[0]), min(side, found.size[1])
    rows = max(1, _BAND_BYTES // (each * found.size[1]) // chunk[1]) * chunk[1]
    bands = PiecedMap(world, found.size, found.pieces, found.size).blocks(found.width, rows, dtype)
    with agreeing(world):
        try:
            if world.rank == 0:
                with unfinished(path) as temporary, h5py.File(temporary, "w") as h5:
                    shape = (found.width, *found.size)
                    features = h5.create_dataset(FEATURES, shape, dtype, chunks=chunk)
                    features.attrs.update(dict(attributes))
                    _fill(features, bands)
        finally:
            for _ in bands:  # iteration is collective, also after an error on rank 0
                pass


def _fill(features: h5py.Dataset, bands: Any) -> None:
    first = 0
    for band in bands:
        if np.isnan(band).any():
            raise RuntimeError(f"rows from {first} of a map are missing: this is a bug")
        features[:, first : first + band.shape[1]] = band
        first += band.shape[1]


# --- the picture


def as_colours(components: npt.NDArray[Any]) -> Colours:
    """Colours uint8 (rows, columns, 3) of components (found, rows, columns).

    Each component is stretched between its percentiles; missing ones are grey.
    """
    found = np.full((*components.shape[1:], COUNT), 127, np.uint8)
    for number, values in enumerate(components[:COUNT]):
        low, high = np.percentile(values, _LIMITS)
        if high > low:
            share = np.clip((values - low) / (high - low), 0, 1)
            found[..., number] = np.rint(255 * share)
    return found


def save_picture(
    path: Path,
    region: SlideRegion,
    colours: Colours,
    parts: npt.NDArray[Any],
    slide_mpp: float | None,
) -> None:
    """Draw a region beside its map.

    Args:
        colours: colours of the map, uint8 (rows, columns, 3).
        parts: share of variance of each component.
        slide_mpp: micrometres per level-0 pixel, overrides the slide's metadata.

    Raises:
        OSError: the file cannot be written.
    """
    height, width = region.size
    long = _PANEL_INCHES / max(height, width)
    wide, high = (max(_LEAST_INCHES, long * side) for side in (width, height))
    figure = new_figure(2 * wide + 0.6, high + 0.9)
    axes = figure.subplots(1, 2)
    place = (0, width, height, 0)
    thumbnail = _thumbnail(region, slide_mpp)
    if thumbnail is not None:
        rows, columns = (thumbnail.scale * side for side in thumbnail.missing.shape)
        [(x, y)], scale = region.images.places, region.images.scale
        whole = (-x / scale, (columns - x) / scale, (rows - y) / scale, -y / scale)
        axes[0].imshow(thumbnail.image, extent=whole)
    axes[1].imshow(colours, extent=place, interpolation="nearest")
    named = zip(("red", "green", "blue"), parts, strict=False)
    shares = ", ".join(f"{colour} {part:.0%}" for colour, part in named)
    for panel, title in zip(
        axes, ("region", f"principal components ({shares} of variance)"), strict=True
    ):
        panel.set_axis_off()
        panel.set(xlim=(0, width), ylim=(height, 0))
        panel.set_title(title, fontsize=9)
    figure.suptitle(fitted(region.name, int(14 * wide)), fontsize=10)
    save_figure(path, figure)


def _thumbnail(region: SlideRegion, slide_mpp: float | None) -> Thumbnail | None:
    """Thumbnail of the slide, with about `LONGEST` pixels of the region; None if unreadable."""
    span = max(region.size) * region.images.scale
    try:
        with Slide(region.images.path, slide_mpp) as slide:
            return slide.thumbnail(max(1.0, span / LONGEST))
    except SlideError:  # the map is written without it
        return None


# --- principal components


class Components(NamedTuple):
    """Principal components over all cells.

    Attributes:
        mean: float64 (width,).
        directions: float64 (found, width), unit vectors, at most `COUNT`; the largest entry of each
            is positive, so that they are the same for any number of ranks.
        parts: (found,), share of variance of each.
    """

    mean: Tensor
    directions: Tensor
    parts: Tensor

    def of(self, piece: MapPiece) -> MapPiece:
        """Project a piece of the map on the components, float32 (found, rows, columns)."""
        rows, columns = piece.values.shape[1:]
        projected = [(cells - self.mean) @ self.directions.T for cells in _cells(piece)]
        values = torch.cat(projected).T.float().reshape(len(self.directions), rows, columns)
        return MapPiece(piece.start, values.contiguous())


def components_of(pieces: Sequence[MapPiece], width: int, world: Communicator) -> Components:
    """Compute the components of a map; collective over `world`.

    Args:
        pieces: pieces of this rank.
        width: features per cell.
    """
    sums = torch.zeros(width + 1, dtype=torch.float64)
    for cells in _all_cells(pieces):
        sums[:-1] += cells.sum(0)
        sums[-1] += len(cells)
    sums = world.all_reduce(sums)
    mean = sums[:-1] / sums[-1]
    products = torch.zeros(width, width, dtype=torch.float64)
    for cells in _all_cells(pieces):  # a second pass, which avoids cancellation
        centred = cells - mean
        products += centred.T @ centred
    products = world.all_reduce(products)
    variances, vectors = torch.linalg.eigh(products)
    order = variances.argsort(descending=True)[:COUNT]
    directions = vectors[:, order].T
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    whole = variances.clamp(min=0).sum().clamp(min=torch.finfo(torch.float64).tiny)
    parts = variances[order].clamp(min=0) / whole
    return Components(mean, directions * largest.sign(), parts)


def _all_cells(pieces: Sequence[MapPiece]) -> Iterator[Tensor]:
    for piece in pieces:
        yield from _cells(piece)


def _cells(piece: MapPiece) -> Iterator[Tensor]:
    """Iterate over cells of a piece, float64 (cells, width), in row-major order."""
    for some in torch.split(piece.values.flatten(1), _ROWS, 1):
        yield some.T.double()
