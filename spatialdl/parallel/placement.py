"""The degrees of a layout, and which rank holds which part of which stage: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

from spatialdl.parallel.axes import Axes
from spatialdl.parallel.layout import Layout, by, finer_grid


class Position(NamedTuple):
    """What a rank holds: a part of the grid of a stage, of a data replica, of a copy.

    Attributes:
        tensor: which part of the channels of weights.
    """

    replica: int
    stage: int
    part: int
    copy: int = 0
    tensor: int = 0


@dataclass(frozen=True)
class Placement:
    """All degrees of a layout, and which ranks hold which stages.

    Places are numbered replica by replica, within it stage by stage, within it the grid in
    row-major order, of each part the ranks that divide channels, so that ranks that talk most are
    neighbours. Each rank has the place of its
    number, unless there is an order, see `node_order`.

    Args:
        data: data replicas, each with its own slice of every micro-batch.
        grids: into how many parts each stage cuts each spatial dim of its images, one a stage.
        interleave: stages that each rank holds: with P groups of ranks, group g holds the stages g,
            g + P, g + 2 P ...
        batch: ranks over which each stage divides the samples of a micro-batch; () for one each.
        mirrored: whether a second copy of the network lies on the same ranks in inverse order,
            and works on micro-batches of its own.
        order: the rank at each place; () where rank and place are the same.
        tensor: ranks over which each stage divides the channels of a part; () for one each.
        stream: virtual tiles along each spatial dim into which each rank cuts its part of images,
            to work on one after the other; () for none.

    Raises:
        ValueError: if a degree is smaller than 1, there is no stage, stages that share ranks do
            not want equally many, or the order is none of all ranks.
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
                f"batch={list(self.batch)} says for each of {len(self.grids)} stages over how many "
                "ranks samples are divided; over those of the first stage they are by data"
            )
        if not self.grids or len({len(grid) for grid in self.grids}) > 1:
            raise ValueError(
                "there is at least one stage, and the grids of all stages have as many numbers, "
                f"got grids={list(self.grids)}"
            )
        if self.tensor and len(self.tensor) != len(self.grids):
            raise ValueError(
                f"tensor={list(self.tensor)} says for each of {len(self.grids)} stages over how "
                "many ranks channels are divided"
            )
        for stage in range(self.stages):
            self.axes(stage)  # which validates its degrees
        if self.interleave < 1 or self.stages % self.interleave:
            raise ValueError(
                f"{self.stages} stages cannot be dealt out to ranks {self.interleave} at a time"
            )
        self._check_shared()
        if self.order and sorted(self.order) != list(range(self.world_size)):
            raise ValueError(
                f"an order has each of {self.world_size} ranks once, got {list(self.order)}"
            )

        self._check_stream()

    def _check_stream(self) -> None:
        if not self.stream:
            return
        if len(self.stream) != self.dims or min(self.stream) < 1:
            raise ValueError(
                f"virtual tiles are counted along each of {self.dims} spatial dims, at least 1 "
                f"each, got stream={list(self.stream)}"
            )
        if self.most_batch_parts > 1 or self.most_tensor_parts > 1:
            raise ValueError(
                f"stream={list(self.stream)} cuts images into virtual tiles, which ranks that "
                "divide samples or channels do not have"
            )

    def _check_shared(self) -> None:
        if any(width != self.widths[n % self.groups] for n, width in enumerate(self.widths)):
            raise ValueError(
                f"stages that share ranks must have as many parts, got grids={list(self.grids)} "
                f"over {self.groups} groups of ranks"
            )
        shares = self.interleave > 1 or self.mirrored
        if shares and len(set(self.tensor)) > 1:
            raise ValueError(
                "stages that share ranks must divide channels over equally many, got "
                f"tensor={list(self.tensor)}"
            )

    @property
    def stages(self) -> int:
        return len(self.grids)

    @property
    def dims(self) -> int:
        """Spatial dims of the images."""
        return len(self.grids[0])

    @cached_property
    def tile_grids(self) -> tuple[tuple[int, ...], ...]:
        """As `grids`, but counting virtual tiles."""
        return tuple(finer_grid(grid, self.stream) for grid in self.grids)

    def layout(self, stage: int, samples: int, size: Sequence[int]) -> Layout:
        """The default layout on the ranks of a stage of images whose spatial dims have `size`."""
        return Layout.of_ranks(samples, size, self.grids[stage], self.stream)

    @property
    def copies(self) -> int:
        """How often the network lies on the ranks of a replica."""
        return 2 if self.mirrored else 1

    @property
    def groups(self) -> int:
        """Sets of ranks that hold the same stages."""
        return self.stages // self.interleave

    @property
    def most_batch_parts(self) -> int:
        """The largest number of ranks over which a stage divides the samples of a micro-batch."""
        return max(self.batch, default=1)

    @property
    def network_copies(self) -> int:
        """All copies of the network, those of all replicas; each has samples of its own."""
        return self.data * self.copies

    @property
    def _parts(self) -> list[tuple[int, tuple[int, ...]]]:
        return [(self.batch_parts(stage), grid) for stage, grid in enumerate(self.grids)]

    def axes(self, stage: int) -> Axes:
        """The axes of the ranks that hold one stage, in all replicas."""
        return Axes(
            self.data,
            spatial=self.grids[stage],
            batch=self.batch_parts(stage),
            tensor=self.tensor_parts(stage),
        )

    def batch_parts(self, stage: int) -> int:
        """Ranks over which a stage divides the samples of a micro-batch."""
        return self.batch[stage] if self.batch else 1

    def tensor_parts(self, stage: int) -> int:
        """Ranks over which a stage divides the channels of a part."""
        return self.tensor[stage] if self.tensor else 1

    @property
    def most_tensor_parts(self) -> int:
        """The largest number of ranks over which a stage divides channels."""
        return max(self.tensor, default=1)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Ranks of each stage within one replica."""
        return tuple(
            parts * prod(grid) * self.tensor_parts(stage)
            for stage, (parts, grid) in enumerate(self._parts)
        )

    @cached_property
    def replica_size(self) -> int:
        """Ranks of one replica."""
        return sum(self.widths[: self.groups])

    @property
    def world_size(self) -> int:
        return self.data * self.replica_size

    @property
    def ranks_by_place(self) -> Sequence[int]:
        """All ranks: replica by replica, stage by stage, each grid in row-major order."""
        return self.at(range(self.world_size))

    def replica_ranks(self, replica: int) -> Sequence[int]:
        """The ranks of one replica, in the order of their places."""
        return self.at(range(replica * self.replica_size, (replica + 1) * self.replica_size))

    def check_world(self, ranks: int, name: str, key: str = "parallel.data") -> None:
        """Refuse a world of another size.

        Args:
            ranks: of the world.
            name: of what needs these degrees, such as ``parallel=sp+pp``.
            key: that sets the number of replicas.

        Raises:
            ValueError: with the product, the number of ranks, and what fits it.
        """
        if ranks == self.world_size:
            return
        one, fitting = self.replica_size, ranks // self.replica_size
        advice = f"take {key}={fitting}" + f" on {_ranks(fitting * one)}" * (ranks % one > 0)
        if fitting == 0:
            advice = f"take a smaller layout: a replica of this one has {_ranks(one)}"
        product = str(self.axes(0)) if self.stages == 1 else self.describe()
        raise ValueError(
            f"{name} needs {product}, but this world has {_ranks(ranks)}: start it with "
            f"`mpiexec -n {self.world_size}`, or {advice}"
        )

    def positions(self, rank: int) -> list[Position]:
        """All that a world rank holds, copy by copy, stage by stage."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size}")
        place = self.place(rank)
        replica = place // self.replica_size
        found = []
        for copy, stage in product(range(self.copies), range(self.stages)):
            blocks = self._blocks(stage, replica, copy)
            for part, block in enumerate(blocks):
                if place in block:
                    found.append(Position(replica, stage, part, copy, block.index(place)))
        return found

    def place(self, rank: int) -> int:
        """The place of a rank."""
        return self.order.index(rank) if self.order else rank

    def ranks(self, stage: int, replica: int, copy: int = 0, tensor: int = 0) -> Sequence[int]:
        """World ranks of one stage of one copy of one replica, in the order of its parts.

        Args:
            tensor: of the ranks that divide the channels of a part, which one.
        """
        parts = self.tensor_parts(stage)
        places = self._places(stage, replica, copy)
        return self.at(places[(tensor if copy == 0 else parts - 1 - tensor) :: parts])

    def stage_ranks(self, stage: int, replica: int, copy: int = 0) -> Sequence[int]:
        """All world ranks of one stage of one copy, of each part those that divide channels."""
        return self.at(self._places(stage, replica, copy))

    def tensor_ranks(self, position: Position) -> Sequence[int]:
        """World ranks that divide the channels of one part."""
        blocks = self._blocks(position.stage, position.replica, position.copy)
        return self.at(blocks[position.part])

    def at(self, places: range) -> Sequence[int]:
        """The world ranks at some places."""
        return [self.order[place] for place in places] if self.order else places

    def _blocks(self, stage: int, replica: int, copy: int) -> list[range]:
        """For each part of a stage the places that divide its channels, in one order in copies."""
        parts, places = self.tensor_parts(stage), self._places(stage, replica, copy)
        blocks = [places[first : first + parts] for first in range(0, len(places), parts)]
        return blocks if copy == 0 else [block[::-1] for block in blocks]

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
        """The arithmetic: ``1 replica x (2x1 + 1x1) = 3 ranks``."""
        replicas = "1 replica" if self.data == 1 else f"{self.data} replicas"
        grids = " + ".join(self._described(stage) for stage in range(self.groups))
        if self.groups > 1:
            grids = f"({grids})"
        if self.interleave > 1:
            grids += f" with {self.interleave} stages each"
        if self.mirrored:
            grids += " and again in inverse order"
        return f"{replicas} x {grids} = {_ranks(self.world_size)}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
