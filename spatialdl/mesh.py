"""Ranks as axes: data, stage, grid rows, grid columns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from spatialdl.layout import Box, Layout

if TYPE_CHECKING:
    from mpi4py import MPI

    from spatialdl.comm.communicator import Communicator


class Position(NamedTuple):
    """Where a rank stands: its data replica, its stage, its part of the stage's grid."""

    replica: int
    stage: int
    part: int


@dataclass(frozen=True)
class Placement:
    """How many ranks each axis takes, for all stages.

    Ranks are numbered replica by replica, within it stage by stage, within it the grid row by
    row, so that ranks that talk most are neighbours.

    Args:
        data: data replicas, each with its own slice of every micro-batch.
        grids: (rows, columns) into which each stage cuts its images, one a stage.

    Raises:
        ValueError: if a degree is smaller than 1 or there is no stage.
    """

    data: int
    grids: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if self.data < 1 or not self.grids or any(min(grid) < 1 for grid in self.grids):
            raise ValueError(
                f"every degree of parallelism must be at least 1, got data={self.data} and "
                f"grids={list(self.grids)}"
            )

    @property
    def stages(self) -> int:
        return len(self.grids)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Ranks of each stage within one replica."""
        return tuple(prod(grid) for grid in self.grids)

    @cached_property
    def world_size(self) -> int:
        return self.data * sum(self.widths)

    def position(self, rank: int) -> Position:
        """The place of a world rank."""
        replica, offset = divmod(rank, sum(self.widths))
        for stage, end in enumerate(accumulate(self.widths)):
            if offset < end:
                return Position(replica, stage, offset - end + self.widths[stage])
        raise ValueError(f"rank {rank} is not in a world of {self.world_size}")

    def ranks(self, stage: int, replica: int) -> range:
        """World ranks of one stage of one replica, in the order of its parts."""
        start = replica * sum(self.widths) + sum(self.widths[:stage])
        return range(start, start + self.widths[stage])

    def describe(self) -> str:
        """The arithmetic: ``1 replica x (2x1 + 1x1) = 3 ranks``."""
        replicas = "1 replica" if self.data == 1 else f"{self.data} replicas"
        grids = " + ".join(f"{rows}x{cols}" for rows, cols in self.grids)
        if self.stages > 1:
            grids = f"({grids})"
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{replicas} x {grids} = {ranks}"


@dataclass(frozen=True, eq=False)
class Mesh:
    """The ranks that hold one image (and its data replicas), as this rank sees them.

    Attributes:
        grid: (rows, columns) into which an image is cut.
        data: data replicas.
        part: this rank's part of the layout, row by row.
        replica: this rank's data replica.
        comm: all ``data * rows * columns`` ranks, replica by replica.
        grid_comm: the ranks of this replica, in the order of the layout's parts.
        data_comm: the ranks with the same part of the other replicas.
    """

    grid: tuple[int, int]
    data: int
    part: int
    replica: int
    comm: Communicator
    grid_comm: Communicator
    data_comm: Communicator

    @property
    def size(self) -> int:
        """All ranks of the mesh."""
        return self.data * self.grid[0] * self.grid[1]

    def layout(self, size: tuple[int, int, int]) -> Layout:
        """The default layout of images of (samples, rows, columns) on this mesh."""
        return Layout.even(size, self.grid)

    def own_box(self, layout: Layout) -> Box:
        """This rank's box of a layout."""
        return layout.boxes[self.part]

    def box(self, size: tuple[int, int]) -> tuple[int, int, int, int]:
        """This rank's half-open box (row0, row1, col0, col1) of an image of `size` (H, W)."""
        own = self.own_box(self.layout((1, *size)))
        return own.row0, own.row1, own.col0, own.col1


def init_mesh(
    grid: tuple[int, int] = (1, 1),
    data: int = 1,
    comm: Communicator | MPI.Intracomm | None = None,
) -> Mesh:
    """Arrange the ranks of `comm` as data replicas x grid.

    Every rank of `comm` must call it.

    Args:
        grid: (rows, columns) into which an image is cut.
        data: number of data replicas.
        comm: the ranks; by default ``MPI.COMM_WORLD``, or all ranks of torch.distributed where
            the program has initialised that and no MPI launcher has started it.

    Raises:
        ValueError: if ``data * rows * columns`` is not the number of ranks.
    """
    from spatialdl.comm.communicator import as_communicator
    from spatialdl.comm.world import world as all_ranks

    if not isinstance(grid, tuple | list) or len(grid) != 2:
        raise ValueError(f"a grid is (rows, columns), got {grid!r}")
    rows, cols = grid
    placement = Placement(data, ((rows, cols),))
    world = all_ranks() if comm is None else as_communicator(comm)
    if placement.world_size != world.size:
        raise ValueError(
            f"the mesh needs {placement.describe()} (data {data} x rows {rows} x columns {cols}), "
            f"but this world has {world.size}: start it with `mpiexec -n {placement.world_size}` "
            "or change grid or data"
        )
    return split_mesh(placement, 0, world)


def split_mesh(placement: Placement, stage: int, stage_comm: Communicator) -> Mesh:
    """The mesh of one stage, whose ranks (replica by replica) are those of `stage_comm`."""
    replica, part = divmod(stage_comm.rank, placement.widths[stage])
    return Mesh(
        grid=placement.grids[stage],
        data=placement.data,
        part=part,
        replica=replica,
        comm=stage_comm.duplicate(),
        grid_comm=stage_comm.split(replica, part),
        data_comm=stage_comm.split(part, replica),
    )


def dry_mesh(grid: tuple[int, int]) -> Mesh:
    """A mesh on which nobody talks, to find out shapes and layouts on the ``meta`` device."""
    from spatialdl.comm.alone import Alone

    alone = Alone()
    return Mesh(grid, 1, 0, 0, alone, alone, alone)
