"""Axes of a mesh, degrees of a layout, and the parts that a rank holds, in integer arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

from spatialdl.common.text import counted
from spatialdl.layout.layout import Layout, by, finer_grid, spatial_names


@dataclass(frozen=True)
class Axes:
    """Degrees of parallelism of a mesh; their product is the number of ranks.

    Ranks are numbered axis by axis in the order below, the last axis fastest.

    Attributes:
        data: number of replicas of the network, with different samples.
        spatial: parts along each spatial dim of an image: one number for signals, (rows, columns)
            for images, (slices, rows, columns) for volumes.
        batch: ranks of a stage that divide the samples of a micro-batch instead of images.
        tensor: ranks that divide the channels of weights and activations.

    Raises:
        ValueError: if a degree is not an integer of at least 1, there are not one to three spatial
            axes, or a stage divides both images and samples.
    """

    data: int = 1
    spatial: tuple[int, ...] = (1, 1)
    batch: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        if not 1 <= len(self.spatial) <= 3:
            raise ValueError(
                "a grid has one to three numbers, such as (rows, columns) for images, got "
                f"{self.spatial}"
            )
        for name, degree in self.degrees.items():
            if not isinstance(degree, int) or degree < 1:
                raise ValueError(
                    f"the {name} axis of a mesh needs at least 1 rank, got {degree!r}: {self}"
                )
        if self.batch > 1 and self.parts > 1:
            raise ValueError(f"a stage divides either images or samples, got {self}")

    @cached_property
    def degrees(self) -> Mapping[str, int]:
        """Degree of every axis by name; spatial axes as ``rows``, ``columns`` and so on."""
        spatial = dict(zip(spatial_names(len(self.spatial)), self.spatial, strict=True))
        return {"data": self.data, **spatial, "batch": self.batch, "tensor": self.tensor}

    def replicated(self, sharded: bool = False) -> tuple[str, ...]:
        """Axes along which ranks hold copies of a parameter; `sharded`: over data replicas."""
        divided = ("tensor", "data" if sharded else "")
        return tuple(name for name in self.degrees if name not in divided)

    @property
    def parts(self) -> int:
        """Number of tiles of an image."""
        return prod(self.spatial)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.degrees.values())

    def __str__(self) -> str:
        """``data 2 x rows 2 x columns 1 = 4 ranks``; other axes of degree 1 are omitted.

        Degrees that are not numbers are written unchanged.
        """
        shown = {
            name: degree
            for name, degree in self.degrees.items()
            if degree != 1 or name not in ("batch", "tensor")
        }
        product = " x ".join(f"{name} {degree}" for name, degree in shown.items())
        if not all(isinstance(degree, int) for degree in shown.values()):
            return product
        return f"{product} = {counted(self.size, 'rank')}"


class Position(NamedTuple):
    """What a rank holds: a part of the grid of a stage, of a data replica, of a copy.

    Attributes:
        tensor: index of its part of the channels of weights.
    """

    replica: int
    stage: int
    part: int
    copy: int = 0
    tensor: int = 0


@dataclass(frozen=True)
class Placement:
    """All degrees of a layout, and the ranks that hold each stage.

    Places are numbered replica by replica, then stage by stage, then over the grid in row-major
    order, then over the ranks that divide channels, so that ranks that communicate most are
    neighbours. Each rank has the place of its number, unless `order` is given, see `node_order`.

    Args:
        data: number of data replicas, each with a separate slice of every micro-batch.
        grids: parts along each spatial dim of a stage's images, one grid for each stage.
        interleave: stages that each rank holds: with P groups of ranks, group g holds the stages g,
            g + P, g + 2 P ...
        batch: ranks over which each stage divides the samples of a micro-batch; () for one each.
        mirrored: whether the same ranks hold a second copy of the network in reverse order, which
            processes separate micro-batches.
        order: the rank at each place; () where rank and place are the same.
        tensor: ranks over which each stage divides the channels of a part; () for one each.
        stream: virtual tiles along each spatial dim of a rank's part of images, processed in
            sequence; () for none.

    Raises:
        ValueError: if a degree is smaller than 1, there is no stage, stages that share ranks need
            different numbers of them, or the order is not a permutation of all ranks.
    """

    data: int
    grids: tuple[tuple[int, ...], ...]
    interleave: int = 1
    mirrored: bool = False
    batch: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    tensor: tuple[int, ...] = ()
    stream: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.batch and (len(self.batch) != len(self.grids) or self.batch[0] != 1):
            raise ValueError(
                f"batch={list(self.batch)} must have one number for each of {len(self.grids)} "
                "stages, and 1 for the first: its samples are divided by parallel.data"
            )
        if not self.grids or len({len(grid) for grid in self.grids}) > 1:
            raise ValueError(
                "there must be at least one stage, and grids of all stages with the same number of "
                f"dims, got grids={list(self.grids)}"
            )
        if self.tensor and len(self.tensor) != len(self.grids):
            raise ValueError(
                f"tensor={list(self.tensor)} must have one number of ranks for each of "
                f"{len(self.grids)} stages"
            )
        for stage in range(self.stages):
            self.axes(stage)  # validates the degrees
        if self.interleave < 1 or self.stages % self.interleave:
            raise ValueError(
                f"{self.stages} stages cannot be distributed over ranks {self.interleave} at a time"
            )
        self._check_shared()
        if self.order and sorted(self.order) != list(range(self.world_size)):
            raise ValueError(
                f"order must be a permutation of {self.world_size} ranks, got {list(self.order)}"
            )

        self._check_stream()

    def _check_stream(self) -> None:
        if not self.stream:
            return
        if len(self.stream) != self.dims or min(self.stream) < 1:
            raise ValueError(
                f"stream needs a number of at least 1 for each of {self.dims} spatial dims, "
                f"got stream={list(self.stream)}"
            )
        if self.most_batch_parts > 1 or self.most_tensor_parts > 1:
            raise ValueError(
                f"stream={list(self.stream)} cuts images into virtual tiles, which is not "
                "supported for ranks that divide samples or channels"
            )

    def _check_shared(self) -> None:
        if any(width != self.widths[n % self.groups] for n, width in enumerate(self.widths)):
            raise ValueError(
                "stages that share ranks must have equal numbers of parts, got "
                f"grids={list(self.grids)} over {self.groups} groups of ranks"
            )
        shares = self.interleave > 1 or self.mirrored
        if shares and len(set(self.tensor)) > 1:
            raise ValueError(
                "stages that share ranks must divide channels over equally many ranks, got "
                f"tensor={list(self.tensor)}"
            )

    @property
    def stages(self) -> int:
        return len(self.grids)

    @property
    def dims(self) -> int:
        """Number of spatial dims of the images."""
        return len(self.grids[0])

    @cached_property
    def tile_grids(self) -> tuple[tuple[int, ...], ...]:
        """`grids` with virtual tiles counted as parts."""
        return tuple(finer_grid(grid, self.stream) for grid in self.grids)

    def layout(self, stage: int, samples: int, size: Sequence[int]) -> Layout:
        """Default layout on the ranks of a stage of images of spatial `size`."""
        return Layout.of_ranks(samples, size, self.grids[stage], self.stream)

    @property
    def copies(self) -> int:
        """Number of copies of the network on the ranks of a replica."""
        return 2 if self.mirrored else 1

    @property
    def groups(self) -> int:
        """Number of sets of ranks that hold the same stages."""
        return self.stages // self.interleave

    @property
    def most_batch_parts(self) -> int:
        """Maximum number of ranks over which a stage divides the samples of a micro-batch."""
        return max(self.batch, default=1)

    @property
    def network_copies(self) -> int:
        """Number of copies of the network over all replicas, with different samples each."""
        return self.data * self.copies

    @property
    def _parts(self) -> list[tuple[int, tuple[int, ...]]]:
        return [(self.batch_parts(stage), grid) for stage, grid in enumerate(self.grids)]

    def axes(self, stage: int) -> Axes:
        """Axes of the ranks that hold one stage, in all replicas."""
        return Axes(
            self.data,
            spatial=self.grids[stage],
            batch=self.batch_parts(stage),
            tensor=self.tensor_parts(stage),
        )

    def batch_parts(self, stage: int) -> int:
        """Number of ranks over which a stage divides the samples of a micro-batch."""
        return self.batch[stage] if self.batch else 1

    def tensor_parts(self, stage: int) -> int:
        """Number of ranks over which a stage divides the channels of a part."""
        return self.tensor[stage] if self.tensor else 1

    @property
    def most_tensor_parts(self) -> int:
        """Maximum number of ranks over which a stage divides channels."""
        return max(self.tensor, default=1)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Number of ranks of each stage within one replica."""
        return tuple(
            parts * prod(grid) * self.tensor_parts(stage)
            for stage, (parts, grid) in enumerate(self._parts)
        )

    @cached_property
    def replica_size(self) -> int:
        """Number of ranks of one replica."""
        return sum(self.widths[: self.groups])

    @property
    def world_size(self) -> int:
        return self.data * self.replica_size

    @property
    def ranks_by_place(self) -> Sequence[int]:
        """All ranks, replica by replica, stage by stage, each grid in row-major order."""
        return self.at(range(self.world_size))

    def replica_ranks(self, replica: int) -> Sequence[int]:
        """Ranks of one replica, in the order of their places."""
        return self.at(range(replica * self.replica_size, (replica + 1) * self.replica_size))

    def check_world(
        self, ranks: int, name: str, key: str = "parallel.data", command: str | None = None
    ) -> None:
        """Check the world size.

        Args:
            ranks: world size.
            name: setting that needs these degrees, such as ``parallel=sp+pp``.
            key: key that sets the number of replicas.
            command: command line that starts the program on the right number of ranks.

        Raises:
            ValueError: if it differs; with the product, the number of ranks, and a fitting value.
        """
        if ranks == self.world_size:
            return
        one, fitting = self.replica_size, ranks // self.replica_size
        fit = f" on {counted(fitting * one, 'rank')}" if ranks % one else ""
        advice = f"set {key}={fitting}{fit}"
        if fitting == 0:
            advice = f"use a smaller layout: a replica of this one has {counted(one, 'rank')}"
        product = str(self.axes(0)) if self.stages == 1 else self.describe()
        raise ValueError(
            f"{name} needs {product}, but this world has {counted(ranks, 'rank')}: start it with "
            f"`{command or f'mpiexec -n {self.world_size}'}`, or {advice}"
        )

    def positions(self, rank: int) -> list[Position]:
        """Positions of a world rank, copy by copy, stage by stage."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size}")
        place = self.place(rank)
        replica = place // self.replica_size
        positions = []
        for copy, stage in product(range(self.copies), range(self.stages)):
            places = self._places(stage, replica, copy)
            if place in places:
                parts = self.tensor_parts(stage)
                part, tensor = divmod(places.index(place), parts)
                tensor = tensor if copy == 0 else parts - 1 - tensor
                positions.append(Position(replica, stage, part, copy, tensor))
        return positions

    def place(self, rank: int) -> int:
        """Place of a rank."""
        return self.order.index(rank) if self.order else rank

    def ranks(self, stage: int, replica: int, copy: int = 0, tensor: int = 0) -> Sequence[int]:
        """World ranks of one stage of one copy of one replica, in the order of its parts.

        Args:
            tensor: index among the ranks that divide the channels of a part.
        """
        parts = self.tensor_parts(stage)
        places = self._places(stage, replica, copy)
        return self.at(places[(tensor if copy == 0 else parts - 1 - tensor) :: parts])

    def stage_ranks(self, stage: int, replica: int, copy: int = 0) -> Sequence[int]:
        """All world ranks of one stage of one copy, those that divide channels included."""
        return self.at(self._places(stage, replica, copy))

    def tensor_ranks(self, position: Position) -> Sequence[int]:
        """World ranks that divide the channels of one part."""
        parts = self.tensor_parts(position.stage)
        places = self._places(position.stage, position.replica, position.copy)
        block = places[position.part * parts : (position.part + 1) * parts]
        return self.at(block if position.copy == 0 else block[::-1])  # in the same order in copies

    def at(self, places: range) -> Sequence[int]:
        """World ranks at some places."""
        return [self.order[place] for place in places] if self.order else places

    def _places(self, stage: int, replica: int, copy: int) -> range:
        group = stage % self.groups
        start, width = sum(self.widths[:group]), self.widths[group]
        first = replica * self.replica_size
        if copy == 0:
            return range(first + start, first + start + width)
        last = first + self.replica_size - 1
        return range(last - start, last - start - width, -1)

    def _described(self, stage: int) -> str:
        samples, channels = self.batch_parts(stage), self.tensor_parts(stage)
        what = f"{samples} by samples" if samples > 1 else by(self.grids[stage])
        if channels == 1:
            return what
        by_channels = f"{channels} by channels"
        return by_channels if self.axes(stage).parts * samples == 1 else f"{what} x {by_channels}"

    def describe(self) -> str:
        """Short description: ``1 replica x (2x1 + 1x1) = 3 ranks``."""
        replicas = "1 replica" if self.data == 1 else f"{self.data} replicas"
        grids = " + ".join(self._described(stage) for stage in range(self.groups))
        if self.groups > 1:
            grids = f"({grids})"
        if self.interleave > 1:
            grids += f" with {self.interleave} stages each"
        if self.mirrored:
            grids += " and again in reverse order"
        return f"{replicas} x {grids} = {counted(self.world_size, 'rank')}"
