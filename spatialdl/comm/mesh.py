"""Ranks as axes: data, stage, the spatial axes of the grid, and tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from torch import nn

from spatialdl.comm.agreement import Agreement
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import choose_device_path, current_device
from spatialdl.comm.dry import Dry
from spatialdl.comm.gradients import Replicated
from spatialdl.comm.launch import check_mpi_world
from spatialdl.comm.limit import check_timeout
from spatialdl.comm.processes import Nodes
from spatialdl.comm.protection import (
    Timeout,
    check_same_arguments,
    limit_program,
    protect,
)
from spatialdl.comm.single_process import SingleProcess
from spatialdl.comm.world import as_communicator
from spatialdl.comm.world import world as all_ranks
from spatialdl.parallel.axes import Axes
from spatialdl.parallel.layout import Box, Layout, finer_grid
from spatialdl.parallel.node_order import placed_by_nodes
from spatialdl.parallel.placement import Placement, Position

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True, eq=False)
class Mesh:
    """The ranks that hold one image (and its data replicas), as this rank sees them.

    Attributes:
        axes: how many ranks each axis has.
        part: this rank's part of the layout, in row-major order.
        replica: this rank's data replica.
        comm: all ranks with this rank's channels, replica by replica: all of the mesh where the
            tensor axis has one.
        grid_comm: those of this replica, in the order of the layout's parts.
        agreement: compares what ranks must have alike; None where nothing is compared.
        tensor_comm: the ranks that divide the channels of this rank's part.
        stream: into how many virtual tiles this rank cuts its part along each spatial dim, to work
            on one after the other; () for none.
    """

    axes: Axes
    part: int
    replica: int
    comm: Communicator
    grid_comm: Communicator
    agreement: Agreement | None = None
    tensor_comm: Communicator = field(default_factory=SingleProcess)
    stream: tuple[int, ...] = ()

    def __deepcopy__(self, memo: dict[int, object]) -> Mesh:
        """Itself: ranks cannot be copied."""
        return self

    @property
    def grid(self) -> tuple[int, ...]:
        """Into how many parts each spatial dim of an image is cut, one to three numbers."""
        return self.axes.spatial

    @property
    def tile_grid(self) -> tuple[int, ...]:
        """As `grid`, but counting virtual tiles."""
        return finer_grid(self.grid, self.stream)

    @property
    def data(self) -> int:
        """Data replicas."""
        return self.axes.data

    @property
    def batch(self) -> int:
        """Ranks of a replica that divide its samples instead of its images."""
        return self.axes.batch

    @property
    def parts(self) -> int:
        """Into how many tiles an image is cut."""
        return self.axes.parts

    @property
    def tensor(self) -> int:
        """Ranks that divide the channels of a part."""
        return self.axes.tensor

    @property
    def channels(self) -> int:
        """Which part of the channels this rank has."""
        return self.tensor_comm.rank

    @property
    def counts(self) -> bool:
        """Whether no other rank has what is whole here, or this is the first that has."""
        return self.channels == 0 and (self.part == 0 or self.batch > 1)

    @property
    def size(self) -> int:
        """All ranks that have this rank's channels."""
        return self.axes.size // self.axes.tensor

    def replicated(self, module: nn.Module, sharded: bool = False) -> Replicated:
        """A module on this mesh; if `sharded`, data replicas hold a part of its parameters each."""
        axes = self.axes.replicated(sharded)
        comm = self.grid_comm if sharded else self.comm
        return Replicated(module, axes, comm, prod(self.axes.degrees[axis] for axis in axes))

    def layout(self, samples: int, size: Sequence[int]) -> Layout:
        """The default layout on this mesh of images whose spatial dims have `size`."""
        return Layout.of_ranks(samples, size, self.grid, self.stream)

    def own_box(self, layout: Layout) -> Box:
        """This rank's box of a layout."""
        return layout.boxes[self.part]

    def box(self, size: Sequence[int]) -> tuple[int, ...]:
        """This rank's half-open box of an image: (row0, row1, col0, col1) of one of size (H, W).

        Of a volume (d0, d1, row0, row1, col0, col1), of a signal (start, stop).

        Args:
            size: of the spatial dims of the whole image, in pixels, one for each number of the
                grid; where there are fewer than parts, some boxes are empty.

        Raises:
            ValueError: if there are more sizes, or fewer, than numbers of the grid.
        """
        if isinstance(size, int) or len(size) != len(self.grid):
            raise ValueError(
                f"mesh.box takes a size for each spatial dim: the grid is {self.grid}, got {size}"
            )
        own = self.own_box(self.layout(1, size))
        return tuple(bound for interval in own.spatial for bound in interval)


def init_mesh(
    grid: Sequence[int] = (1, 1),
    data: int = 1,
    comm: Communicator | MPI.Intracomm | None = None,
    timeout: Timeout = "default",
    check: bool | None = None,
    *,
    tensor: int = 1,
) -> Mesh:
    """Arrange the ranks of `comm` as data replicas x grid.

    Every rank of `comm` must call it. All ranks are arranged so that a grid lies within a node
    where it fits, whatever order the launcher has dealt them out in; those of a `comm` as they are.

    From then on one rank that fails ends all, instead of leaving the others to wait for it: after
    an uncaught exception, when a rank ends its program while others wait for it, and when one
    waits longer than `timeout`, all say where they are. Of one rank nothing is ended.

    Args:
        grid: into how many parts each spatial dim is cut: one number for signals, two (rows,
            columns) for images, three for volumes.
        data: number of data replicas.
        comm: the ranks; by default ``MPI.COMM_WORLD``, or all ranks of torch.distributed where
            the program has initialised that and no MPI launcher has started it.
        timeout: seconds that a rank may wait for others within a communication before the job ends;
            None for ever. By default 1800, as of torch.distributed, or what an earlier mesh has
            set: longer than validation on one rank takes. Not watched if `comm` has not all ranks.
        check: by default images, labels and weights that ranks of a mesh must have alike are
            compared in the first steps, and then at growing intervals; False compares nothing.
            True also compares what ranks are about to do before each communication, at the cost of
            a small message more, and names both sides of a difference, as does
            ``SPATIALDL_COMM_CHECK=1`` in the environment.
        tensor: ranks that divide the channels of weights and activations of a network in
            `spatialdl.SpatialParallel`.

    Raises:
        ValueError: if ``data * prod(grid) * tensor`` is not the number of ranks, ranks call it with
            different arguments, or MPI does not see those that were started together.
    """
    if timeout != "default":
        check_timeout(timeout, by_command=False)
    if not isinstance(grid, tuple | list):
        raise ValueError(
            f"a grid has one to three numbers, as (rows, columns) for images, got {grid!r}"
        )
    axes = Axes(data, spatial=tuple(grid), tensor=tensor)
    placement = Placement(data, (axes.spatial,), tensor=(axes.tensor,))
    arguments = {"grid": axes.spatial, "data": data, "timeout": timeout, "check": check}
    arguments["tensor"] = tensor
    world, placement = start_placement(
        placement, comm, timeout, check, "the mesh", "init_mesh", arguments
    )
    mesh = stage_mesh(placement, placement.positions(world.rank)[0], world)
    if axes.size > 1 and check is not False:
        alike = mesh.grid_comm
        if mesh.tensor > 1:
            alike = world.subset(placement.replica_ranks(mesh.replica))
        agreement = Agreement(mesh.comm, alike, mesh.tensor_comm, mesh.grid_comm)
        mesh = replace(mesh, agreement=agreement)
    return mesh


def start_placement(
    placement: Placement,
    comm: Communicator | MPI.Intracomm | None,
    timeout: Timeout,
    check: bool | None,
    what: str,
    function: str,
    arguments: dict[str, object],
) -> tuple[Communicator, Placement]:
    """The ranks of a placement in a program of the user's own, protected; all must call it.

    Args:
        comm: as of `init_mesh`, as are
        timeout: and
        check: are.
        what: needs the placement, for messages.
        function: that the user calls.
        arguments: of it, which all ranks must have alike.

    Returns:
        The ranks, and the placement arranged by nodes.

    Raises:
        ValueError: if the world has another size, or ranks have different arguments.
    """
    if comm is None:
        limit_program(timeout)  # before torch.distributed makes groups, which have timeouts too
    world = all_ranks() if comm is None else as_communicator(comm)
    if comm is None:
        check_mpi_world(world.size)
    placement.check_world(world.size, what, "data")
    check_same_arguments(world, function, arguments)
    protect(world, timeout, check)
    choose_device_path(world, current_device())
    if comm is None:
        placement = placed_by_nodes(placement, Nodes(world).of)
    return world, placement


def stage_mesh(placement: Placement, position: Position, comm: Communicator) -> Mesh:
    """The mesh of one stage of one copy; its ranks, and no others, must call it together.

    Args:
        comm: all ranks of the placement.
    """
    replica, stage, part, copy, tensor = position
    ranks = [placement.ranks(stage, n, copy, tensor) for n in range(placement.data)]
    return Mesh(
        axes=placement.axes(stage),
        part=part,
        replica=replica,
        comm=comm.subset([rank for one in ranks for rank in one]),
        grid_comm=comm.subset(ranks[replica]),
        tensor_comm=comm.subset(placement.tensor_ranks(position))
        if placement.tensor_parts(stage) > 1
        else SingleProcess(),
        stream=placement.stream,
    )


def dry_mesh(grid: tuple[int, ...], part: int = 0, processes: Sequence[Sequence[int]] = ()) -> Mesh:
    """A mesh on which nobody talks, to find out shapes and layouts on the ``meta`` device.

    Args:
        part: as which rank.
        processes: see `Dry`.
    """
    axes = Axes(spatial=grid)
    comm = Dry(part, axes.size, processes=processes)
    return Mesh(axes, part, 0, comm, comm)
