"""Tables of the nearest tiles of all tiles of a cohort, one per slide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spatialdl.analysis.cohort import Cohort
from spatialdl.analysis.neighbours import NearestNeighbors
from spatialdl.analysis.rows import FilePart, FileRows
from spatialdl.data.saving import save_table

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def place_of(cohort: Cohort, indices: npt.NDArray[Any]) -> tuple[Ints, Ints]:
    """Map indices among the tiles of all slides to slide indices and rows in them."""
    ends = np.cumsum([file.tiles for file in cohort.files])
    numbers = np.searchsorted(ends, indices, side="right")
    sizes = np.array([file.tiles for file in cohort.files])
    return numbers, indices - ends[numbers] + sizes[numbers]


def write_neighbours(
    folder: Path, cohort: Cohort, model: NearestNeighbors, wanted: int
) -> dict[str, float]:
    """Write SLIDE.csv for each slide, with a line per tile; collective.

    Args:
        folder: output folder.
        cohort: the slides.
        model: fitted on the tiles of all slides, in their order.
        wanted: number of neighbours per tile, without the tile itself.

    Returns:
        Share of neighbours from the tile's own slide, and its value by chance; on all ranks.
    """
    own = cohort.own_slides()
    parts = [FilePart(cohort.files[k], 0, cohort.files[k].tiles) for k in own]
    queries = FileRows(parts, cohort.width, keep=0)
    distances, indices = model.kneighbors(queries, min(wanted + 1, cohort.tiles))
    starts = np.cumsum([0, *(file.tiles for file in cohort.files)])
    of_tiles = [np.arange(starts[k], starts[k + 1]) for k in own]
    itself = np.concatenate([np.empty(0, np.int64), *of_tiles])
    distances, indices = _without_itself(distances, indices, itself)

    def work() -> int:
        folder.mkdir(parents=True, exist_ok=True)
        numbers, rows = place_of(cohort, indices)
        first = same = 0
        for k in own:
            place = slice(first, first := first + cohort.files[k].tiles)
            _write(folder, cohort, k, numbers[place], rows[place], distances[place])
            same += int((numbers[place] == k).sum())
        return same

    same = sum(cohort.ranks.comm.allgather(cohort.ranks.together(work)))
    sizes = np.array([file.tiles for file in cohort.files], np.float64)
    chance = float((sizes * (sizes - 1)).sum() / (cohort.tiles * max(1, cohort.tiles - 1)))
    share = same / (cohort.tiles * wanted)
    return {"neighbours_in_own_slide": share, "neighbours_in_own_slide_by_chance": chance}


def _without_itself(distances: Floats, indices: Ints, itself: Ints) -> tuple[Floats, Ints]:
    """Drop the column of the tile itself, or the last column if ties pushed the tile out."""
    dropped = indices == itself[:, None]
    dropped[~dropped.any(1), -1] = True
    shape = len(indices), max(0, indices.shape[1] - 1)
    return distances[~dropped].reshape(shape), indices[~dropped].reshape(shape)


def _write(
    folder: Path, cohort: Cohort, number: int, slides: Ints, rows: Ints, distances: Floats
) -> None:
    file = cohort.files[number]
    coords = file.coords().tolist() if file.has_coords else [()] * file.tiles
    names = [one.slide for one in cohort.files]
    head = ["row", *(("x", "y") if file.has_coords else ())]
    for k in range(1, distances.shape[1] + 1):
        head += [f"slide_{k}", f"row_{k}", f"distance_{k}"]
    lines = []
    for row in range(file.tiles):
        near = zip(slides[row].tolist(), rows[row].tolist(), distances[row].tolist(), strict=True)
        cells = [cell for k, at, d in near for cell in (names[k], at, f"{d:.6g}")]
        lines.append([row, *coords[row], *cells])
    save_table(folder / f"{file.slide}.csv", head, lines)
