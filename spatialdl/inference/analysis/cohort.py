"""Feature files of a cohort, divided over ranks: by rows for fits, by slides for output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from spatialdl.comm.communicator import Communicator
from spatialdl.common.files import save_table
from spatialdl.data.feature_file import FeatureFile, list_features
from spatialdl.data.tables import read_table
from spatialdl.inference.analysis.rows import FilePart, FileRows, share, total
from spatialdl.inference.predicting.loop import agreeing

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
        comm: all ranks.

    Attributes:
        files: feature files of all slides, sorted by name.
        tiles: number of tiles of all slides.

    Raises:
        ValueError: on all ranks, see `list_features`.
    """

    def __init__(self, paths: Sequence[Path], comm: Communicator) -> None:
        self.comm = comm
        with agreeing(comm):
            files = list_features(paths) if comm.rank == 0 else None
        self.files: list[FeatureFile] = comm.bcast(files)
        self.slides = [file.slide for file in self.files]
        self.tiles = sum(file.tiles for file in self.files)
        self.width = self.files[0].width
        if not self.tiles:
            raise ValueError(f"the {len(self.files)} feature files have no tiles")

    @contextmanager
    def rows(self, files: Sequence[FeatureFile] | None = None) -> Iterator[FileRows]:
        """This rank's share of the rows of `files` (all if None), with a progress bar on rank 0."""
        parts = self.parts(self.files if files is None else files)
        with tqdm(
            desc="rank 0 reads",
            unit=" tiles",
            unit_scale=True,
            mininterval=0.5,
            disable=self.comm.rank != 0,
        ) as bar:  # without a total, as the number of passes is not known in advance
            yield FileRows(parts, self.width, progress=bar.update)

    def parts(self, files: Sequence[FeatureFile]) -> list[FilePart]:
        """Parts of the files that `rows` reads on this rank."""
        return share(files, self.comm.rank, self.comm.size)

    def own_slides(self) -> list[int]:
        """Indices of the slides whose results this rank writes, balanced by tiles."""
        filled, owned = [0] * self.comm.size, []
        for number in sorted(range(len(self.files)), key=lambda k: (-self.files[k].tiles, k)):
            rank = filled.index(min(filled))
            filled[rank] += self.files[number].tiles + 1
            if rank == self.comm.rank:
                owned.append(number)
        return sorted(owned)

    def write_tables(
        self,
        folder: Path,
        columns: Callable[[FileRows], Columns],
        each: Callable[[int, Sampled], Sampled | None] = lambda _, rows: None,
    ) -> list[Sampled]:
        """Write a CSV file per slide with a line per tile; collective.

        Args:
            folder: output folder.
            columns: computes the columns of the rows of a slide.
            each: called with the index and the rows of each slide; returns those to collect.

        Returns:
            Collected rows on rank 0, in the order of slides; empty on all other ranks.
        """
        kept = []
        with agreeing(self.comm):
            folder.mkdir(parents=True, exist_ok=True)
            bar = tqdm(self.own_slides(), "writing", unit="slide", disable=self.comm.rank != 0)
            for number in bar:
                rows = each(number, self._write(folder, number, columns))
                kept += [] if rows is None else [rows]
        gathered = chain.from_iterable(self.comm.gather(kept) or [])
        return sorted(gathered, key=lambda sampled: sampled.slide)

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
        parts = self.parts(files)
        places = [files.index(part.file) for part in parts for _ in range(part.tiles)]
        numbers = torch.tensor(places, dtype=torch.int64)

        def work(sums: list[torch.Tensor]) -> None:
            for place, block in rows.blocks():
                sums[0].index_add_(0, numbers[place], block)

        [sums] = total(self.comm, [(len(files), self.width)], work)
        counts = np.array([file.tiles for file in files])[:, None]
        return np.asarray(sums.numpy() / np.maximum(counts, 1))

    def read_columns(self, path: Path, columns: Sequence[str]) -> dict[str, dict[str, str]]:
        """Read values of slides from a table, by slide and column; empty values are omitted.

        Raises:
            ValueError: the file cannot be read, lacks a column, lists a slide twice, or lists none
                of the slides.
        """
        found, _ = read_table(path, required=columns).match(self.slides)
        if not found:
            raise ValueError(
                f"{path} has none of the {len(self.files)} slides with features, such as "
                f"{self.slides[0]!r}"
            )
        return {
            slide: {name: row.cells[name] for name in columns if row.cells[name]}
            for slide, row in found.items()
        }


def _texts(column: npt.NDArray[Any]) -> list[object]:
    if column.dtype.kind == "f":
        return [f"{value:.{_DECIMALS}g}" for value in column.tolist()]
    return list(column.tolist())
