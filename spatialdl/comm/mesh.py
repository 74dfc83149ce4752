"""`Mesh`: ranks arranged along the axes data, stage, spatial and tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from torch import nn

from spatialdl.comm import check as comm_check
from spatialdl.comm.abort import end_job_on_errors
from spatialdl.comm.agreement import Agreement, check_same
from spatialdl.comm.communicator import Communicator
from spatialdl.comm.device_path import choose_device_path, current_device
from spatialdl.comm.dry import Dry
from spatialdl.comm.gradients import Replicated
from spatialdl.comm.launch import check_mpi_world, program_command
from spatialdl.comm.processes import Nodes
from spatialdl.comm.single_process import SingleProcess
from spatialdl.comm.waiting import Timeout, check_timeout, limit_program
from spatialdl.comm.watchdog import start_watchdog
from spatialdl.comm.world import as_communicator
from spatialdl.comm.world import world as all_ranks
from spatialdl.layout.layout import Box, Layout, finer_grid
from spatialdl.layout.node_order import placed_by_nodes
from spatialdl.layout.placement import Axes, Placement, Position

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True, eq=False)
class Mesh:
    """The ranks that hold one image and its data replicas, from the view of this rank.

    Attributes:
        axes: number of ranks on each axis.
        part: index of this rank's part in the layout, in row-major order.
        replica: index of this rank's data replica.
        comm: all ranks with this rank's channels, replica by replica: the whole mesh if the
            tensor axis has size one.
        grid_comm: the ranks of this replica, in the order of the layout's parts.
        agreement: compares state that must match across ranks; None to compare nothing.
        tensor_comm: ranks that divide the channels of this rank's part.
        stream: number of virtual tiles along each spatial dim of this rank's part, processed in
            sequence; () for none.
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
        """Return itself: communicators cannot be copied."""
        return self

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of parts along each spatial dim of an image, one to three numbers."""
        return self.axes.spatial

    @property
    def tile_grid(self) -> tuple[int, ...]:
        """`grid` with virtual tiles counted as parts."""
        return finer_grid(self.grid, self.stream)

    @property
    def data(self) -> int:
        """Number of data replicas."""
        return self.axes.data

    @property
    def batch(self) -> int:
        """Number of ranks of a replica that divide its samples instead of its images."""
        return self.axes.batch

    @property
    def parts(self) -> int:
        """Number of tiles of an image."""
        return self.axes.parts

    @property
    def tensor(self) -> int:
        """Number of ranks that divide the channels of a part."""
        return self.axes.tensor

    @property
    def channels(self) -> int:
        """Index of this rank's channels."""
        return self.tensor_comm.rank

    @property
    def counts(self) -> bool:
        """Whether this is the first rank that holds the values that are whole here."""
        return self.channels == 0 and (self.part == 0 or self.batch > 1)

    @property
    def size(self) -> int:
        """Number of ranks with this rank's channels."""
        return self.axes.size // self.axes.tensor

    def replicated(self, module: nn.Module, sharded: bool = False) -> Replicated:
        """A module on this mesh; if `sharded`, data replicas hold shards of its parameters."""
        axes = self.axes.replicated(sharded)
        comm = self.grid_comm if sharded else self.comm
        return Replicated(module, axes, comm, prod(self.axes.degrees[axis] for axis in axes))

    def layout(self, samples: int, size: Sequence[int]) -> Layout:
        """Default layout on this mesh of images of spatial size `size`."""
        return Layout.of_ranks(samples, size, self.grid, self.stream)

    def own_box(self, layout: Layout) -> Box:
        """This rank's box of a layout."""
        return layout.boxes[self.part]

    def box(self, size: Sequence[int]) -> tuple[int, ...]:
        """Half-open box of this rank: (row0, row1, col0, col1) for an image of size (H, W).

        For a volume (d0, d1, row0, row1, col0, col1), for a signal (start, stop).

        Args:
            size: spatial size of the whole image in pixels, one number for each dim of the
                grid; where a dim has fewer pixels than parts, some boxes are empty.

        Raises:
                ValueError: if `size` and the grid have different numbers of dims.
        """
        if isinstance(size, int) or len(size) != len(self.grid):
            raise ValueError(
                f"mesh.box needs a size for each spatial dim: the grid is {self.grid}, got {size}"
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

    Collective over `comm`. The default ranks are arranged so that a grid lies within a node where
    it fits, independent of the launcher's order; ranks of an explicit `comm` keep their order.

    From then on the failure of one rank aborts all ranks, instead of a hang: after an uncaught
    exception, and when a rank waits longer than `timeout`, also for one that has exited: then all
    ranks report where they are. A single rank is not watched.

    Args:
        grid: number of parts along each spatial dim: one number for signals, two (rows,
            columns) for images, three for volumes.
        data: number of data replicas.
        comm: the ranks; by default ``MPI.COMM_WORLD``, or all ranks of torch.distributed if
            the program has initialised it and was not started by an MPI launcher.
        timeout: seconds that a rank may wait in a communication before the job aborts; None for
            no limit. Default 1800, as in torch.distributed, or the value of an earlier mesh; must
            exceed validation on a single rank. Not watched if `comm` is not the whole world.
        check: by default images, labels and weights that must match across ranks are compared
            in the first steps, and then at growing intervals; False compares nothing. True also
            compares the operations of ranks before each communication, at the cost of an
            additional small message, and names both sides of a mismatch, as does
            ``SPATIALDL_COMM_CHECK=1`` in the environment.
        tensor: number of ranks that divide the channels of weights and activations of a network
            in `spatialdl.SpatialParallel`.

    Raises:
        ValueError: if ``data * prod(grid) * tensor`` is not the number of ranks, if arguments
            differ between ranks, or if MPI does not connect the ranks that were launched.
        MpiNotFound: if no MPI library can be loaded.
    """
    if timeout != "default":
        check_timeout(timeout, by_command=False)
    if not isinstance(grid, tuple | list):
        raise ValueError(
            f"a grid has one to three numbers, such as (rows, columns) for images, got {grid!r}"
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
        same_image = mesh.grid_comm
        if mesh.tensor > 1:
            same_image = world.subset(placement.replica_ranks(mesh.replica))
        agreement = Agreement(mesh.comm, same_image, mesh.tensor_comm, mesh.grid_comm)
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
    """Ranks of a placement in a user's program, with error handling; collective.

    Args:
        comm: as in `init_mesh`.
        timeout: as in `init_mesh`.
        check: as in `init_mesh`.
        what: subject of messages about the placement.
        function: name of the function that the user calls.
        arguments: its arguments, which must match across ranks.

    Returns:
        The ranks, and the placement arranged by nodes.

    Raises:
        ValueError: if the world has another size, or arguments differ between ranks.
    """
    if comm is None:
        limit_program(timeout)  # before torch.distributed creates groups, which have timeouts too
    world = all_ranks() if comm is None else as_communicator(comm)
    if comm is None:
        check_mpi_world(world.size)
    alone = comm is None and world.size == 1
    command = program_command(placement.world_size) if alone else None
    placement.check_world(world.size, what, "data", command)
    what = f"ranks call {function} with different arguments"
    check_same(world, what, arguments, "use the same on all ranks")
    if check is not None:
        comm_check.enable(check)
    if world.size > 1:
        _end_together(world, timeout)
    choose_device_path(world, current_device())
    if comm is None:
        placement = placed_by_nodes(placement, Nodes(world).of)
    return world, placement


def _end_together(world: Communicator, timeout: Timeout) -> None:
    """Abort all ranks together from now on; waits are watched if `world` has all of them."""
    end_job_on_errors()
    launched_ranks = all_ranks()
    if launched_ranks.size == world.size:
        limit_program(timeout)
        start_watchdog(launched_ranks)


def stage_mesh(placement: Placement, position: Position, comm: Communicator) -> Mesh:
    """Mesh of one stage of one copy; collective over exactly its ranks.

    Args:
        comm: all ranks of the placement.
    """
    replica, stage, part, copy, tensor = position
    ranks = [placement.ranks(stage, n, copy, tensor) for n in range(placement.data)]
    return Mesh(
        axes=placement.axes(stage),
        part=part,
        replica=replica,
        comm=comm.subset([rank for replica_ranks in ranks for rank in replica_ranks]),
        grid_comm=comm.subset(ranks[replica]),
        tensor_comm=comm.subset(placement.tensor_ranks(position))
        if placement.tensor_parts(stage) > 1
        else SingleProcess(),
        stream=placement.stream,
    )


def dry_mesh(grid: tuple[int, ...], part: int = 0, processes: Sequence[Sequence[int]] = ()) -> Mesh:
    """A mesh without communication, to compute shapes and layouts on the ``meta`` device.

    Args:
        part: index of the simulated rank.
        processes: see `Dry`.
    """
    axes = Axes(spatial=grid)
    comm = Dry(part, axes.size, processes=processes)
    return Mesh(axes, part, 0, comm, comm)
