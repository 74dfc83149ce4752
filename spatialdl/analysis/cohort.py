"""Feature files of a cohort, divided over ranks: by rows for fits, by slides for output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from spatialdl.analysis.ranks import Ranks
from spatialdl.analysis.rows import FilePart, FileRows, share
from spatialdl.comm.communicator import Communicator
from spatialdl.data.feature_file import FeatureFile, list_features
from spatialdl.data.saving import save_table

Columns = Mapping[str, npt.NDArray[Any]]
_DECIMALS = 6


class Sampled(NamedTuple):
    """Rows of a slide shown in pictures.

    Attributes:
        slide: index of the slide.
        coords: (rows, 2), or None if the file has none.
        values: result columns of the same rows.
    """

    slide: int
    coords: npt.NDArray[np.int64] | None
    values: dict[str, npt.NDArray[Any]]


class Cohort:
    """Feature files of slides, identical on all ranks; construction is collective.

    Args:
        paths: see `list_features`.
        world: all ranks.

    Attributes:
        files: feature files of all slides, sorted by name.
        tiles: number of tiles of all slides.

    Raises:
        ValueError: on all ranks, see `list_features`.
    """

    def __init__(self, paths: Sequence[Path], world: Communicator) -> None:
        self.ranks = Ranks(world)
        is_first = world.rank == 0
        files = self.ranks.together(lambda: list_features(paths) if is_first else None)
        self.files: list[FeatureFile] = world.bcast(files)
        self.tiles = sum(file.tiles for file in self.files)
        if not self.tiles:
            raise ValueError(f"the {len(self.files)} feature files have no tiles")

    @property
    def width(self) -> int:
        return self.files[0].width

    @contextmanager
    def rows(self, files: Sequence[FeatureFile] | None = None) -> Iterator[FileRows]:
        """This rank's share of the rows of `files` (all if None), with a progress bar on rank 0."""
        parts = self.parts(self.files if files is None else files)
        with tqdm(
            desc="rank 0 reads",
            unit=" tiles",
            unit_scale=True,
            mininterval=0.5,
            disable=self.ranks.rank != 0,
        ) as bar:  # without a total, as the number of passes is not known in advance
            yield FileRows(parts, self.width, progress=bar.update)

    def parts(self, files: Sequence[FeatureFile]) -> list[FilePart]:
        """Parts of the files that `rows` reads on this rank."""
        return share(files, self.ranks.rank, self.ranks.size)

    def own_slides(self) -> list[int]:
        """Indices of the slides whose results this rank writes, balanced by tiles."""
        filled, mine = [0] * self.ranks.size, []
        for number in sorted(range(len(self.files)), key=lambda k: (-self.files[k].tiles, k)):
            rank = filled.index(min(filled))
            filled[rank] += self.files[number].tiles + 1
            if rank == self.ranks.rank:
                mine.append(number)
        return sorted(mine)

    def write_tables(
        self,
        folder: Path,
        columns: Callable[[FileRows], Columns],
        *,
        whole: Iterable[int] = (),
        samples: int = 0,
        also: Callable[[FeatureFile, Sampled], object] | None = None,
    ) -> list[Sampled]:
        """Write a CSV file per slide with a line per tile; collective.

        Args:
            folder: output folder.
            columns: computes the columns of the rows of a slide.
            whole: indices of slides whose rows are all returned.
            samples: number of evenly spaced tiles of all slides to return.
            also: called with all rows of each slide.

        Returns:
            Rows for pictures on rank 0, in the order of slides; empty on all other ranks.
        """
        wanted, step = set(whole), max(1, -(-self.tiles // samples)) if samples else 0
        firsts = list(accumulate((file.tiles for file in self.files), initial=0))

        def work() -> list[Sampled]:
            folder.mkdir(parents=True, exist_ok=True)
            kept = []
            bar = tqdm(self.own_slides(), "writing", unit="slide", disable=self.ranks.rank != 0)
            for number in bar:
                file = self.files[number]
                every = self._write(folder, number, columns)
                if also is not None:
                    also(file, every)
                if number in wanted:
                    kept.append(every)
                elif step:
                    kept.append(_thinned(every, -firsts[number] % step, step))
            return kept

        gathered = self.ranks.comm.gather(self.ranks.together(work))
        rows = (sampled for of_rank in gathered or [] for sampled in of_rank)
        return sorted(rows, key=lambda sampled: sampled.slide)

    def _write(self, folder: Path, number: int, columns: Callable[[FileRows], Columns]) -> Sampled:
        file = self.files[number]
        rows = FileRows([FilePart(file, 0, file.tiles)], file.width, keep=0)
        coords = file.coords() if file.has_coords else None
        values = dict(columns(rows))
        shown: dict[str, npt.NDArray[Any]] = {"row": np.arange(file.tiles)}
        if coords is not None:
            shown |= {"x": coords[:, 0], "y": coords[:, 1]}
        shown |= values
        table = zip(*(_texts(column) for column in shown.values()), strict=True)
        save_table(folder / f"{file.slide}.csv", shown, table)
        return Sampled(number, coords, values)

    def slide_means(self, rows: FileRows, files: Sequence[FeatureFile]) -> npt.NDArray[Any]:
        """Mean features of each file, (files, width); `rows` is this rank's share of them."""
        places = np.repeat(
            [files.index(part.file) for part in self.parts(files)],
            [part.tiles for part in self.parts(files)],
        )
        numbers = torch.from_numpy(places.astype(np.int64))
        cpu = torch.device("cpu")

        def work(sums: list[torch.Tensor]) -> None:
            for place, block in rows.blocks(cpu):
                sums[0].index_add_(0, numbers[place], block)

        [total] = self.ranks.total([(len(files), self.width)], work, cpu)
        counts = np.array([file.tiles for file in files])[:, None]
        return np.asarray(total.numpy() / np.maximum(counts, 1))


def _thinned(every: Sampled, first: int, step: int) -> Sampled:
    coords = None if every.coords is None else every.coords[first::step]
    return Sampled(every.slide, coords, {k: v[first::step] for k, v in every.values.items()})


def _texts(column: npt.NDArray[Any]) -> list[object]:
    if column.dtype.kind == "f":
        return [f"{value:.{_DECIMALS}g}" for value in column.tolist()]
    return list(column.tolist())


def tile_span(file: FeatureFile, coords: npt.NDArray[np.int64]) -> float:
    """Side of a tile in level-0 pixels: from the file, else the smallest distance of two tiles."""
    attributes = file.attributes
    for key in ("patch_size_level0", "patch_size_lv0"):
        if key in attributes:
            return float(np.ravel(attributes[key])[0])
    if "patch_size" in attributes:
        down = np.ravel(attributes.get("downsample", 1.0))
        return float(np.ravel(attributes["patch_size"])[0]) * float(down[0])
    steps = np.concatenate([np.diff(np.unique(coords[:, k])) for k in (0, 1)])
    return float(steps.min()) if len(steps) else 256.0
