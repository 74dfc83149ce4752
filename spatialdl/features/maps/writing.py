"""Files of a region's map, written by rank 0 in bands of rows. ::

maps/NAME.h5        features (width, rows, columns)
maps/NAME.png       the region, and three principal components as colours
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from spatialdl.comm.communicator import Communicator
from spatialdl.data.feature_file import FEATURES
from spatialdl.data.saving import unfinished
from spatialdl.errors import SlideError
from spatialdl.features.maps.picture import LONGEST, as_colours, components_of, save_picture
from spatialdl.features.maps.regions import SlideRegion
from spatialdl.features.results import ResultFolders
from spatialdl.predicting.agreed_errors import agreeing
from spatialdl.predicting.pieces import MapPiece, PiecedMap

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
