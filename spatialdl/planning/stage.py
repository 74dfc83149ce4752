"""What one stage of a layout costs, from the costs of its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, prod
from typing import Literal

from spatialdl.comm.dry import Axis
from spatialdl.parallel.layout import by
from spatialdl.parallel.placement import Placement, Position
from spatialdl.pipeline.shapes import Border
from spatialdl.pipeline.steps import IMAGE, Value
from spatialdl.planning.cluster import Cluster
from spatialdl.planning.costs import NetworkCosts
from spatialdl.planning.job import CannotWork, PlannedJob, Recompute
from spatialdl.planning.parts import DividedStage
from spatialdl.planning.peaks import Sum
from spatialdl.planning.store_use import StageSteps, steps_of


@dataclass(frozen=True)
class StageCosts:
    """One stage on its rank with the largest tile; memory in bytes.

    Attributes:
        forward, backward: seconds of a micro-batch, with what is said meanwhile.
        input: of a micro-batch.
        held: from the forward of a micro-batch to its backward; of the first stage without input.
        forward_peak, backward_peak: most while it runs, `held` included. `backward_peak` counts the
            gradients of all weights, `first_backward_peak` as they come in the first micro-batch.
        weights, buffers: of its layers.
        arriving: of a micro-batch from other stages, for its forward and for its backward; there is
            room for it from the beginning of the action before.
        sent: what a rank sends for a micro-batch.
        halos: that part of it which are halos.
        channels: that part of it which goes to the ranks that divide its channels.
        layers: its first step, and the one after its last.
        workspace: most that an operation needs for itself.
        steps: what a virtual tile does; None without.
    """

    forward: float
    backward: float
    input: int
    held: int
    forward_peak: int
    backward_peak: int
    first_backward_peak: int
    weights: int
    buffers: int
    arriving: tuple[int, int]
    sent: int
    halos: int
    channels: int
    layers: tuple[int, int]
    workspace: int = 0
    steps: StageSteps | None = field(default=None, compare=False)


def stage_costs(
    job: PlannedJob,
    cluster: Cluster,
    placement: Placement,
    microbatches: int,
    recompute: Recompute,
    memory: Literal["all", "heap", "mapped"] = "all",
) -> list[StageCosts]:
    """The stages of a layout in order.

    Args:
        memory: which to count, see `planning.costs.NetworkCosts`.

    Raises:
        CannotWork: if the network cannot be cut so.
    """
    again, stages = recompute == "block", placement.stages
    if again and not job.can_run_again(stages):
        raise CannotWork("parallel.recompute=block: the network has no blocks to run again")
    bounds = job.bounds(placement.widths, microbatches, again)
    samples = ceil(ceil(job.batch / microbatches) / placement.data)
    parts = job.parts(bounds, again)
    borders = job.borders(bounds, again)
    found = []
    for stage, (first, after) in enumerate(parts):
        grid = placement.grids[stage]
        own_samples = ceil(samples / placement.batch_parts(stage))
        tensor = placement.tensor_parts(stage)
        divided = DividedStage(tensor, first, after, job.tensor_plan) if tensor > 1 else None
        costs = job.costs(own_samples, grid, again, stages == 1, divided, placement.stream)
        if memory != "all":
            costs = getattr(costs, memory) or costs
        if len(costs.layers) < after:
            raise CannotWork(f"stage {stage} on a grid of {by(grid)}: {costs.refused}")
        layers = (bounds[stage], bounds[stage + 1])
        one = _Stage(cluster, placement, stage, costs, (first, after), borders)
        found.append(one.costs(layers, recompute == "stage"))
    return found


class _Stage:
    """A stage on its rank with the largest tile.

    Args:
        costs: of all parts, on the grid of the stage.
        parts: its first part, and the one after its last.
        borders: over which something passes, and what.
    """

    def __init__(
        self,
        cluster: Cluster,
        placement: Placement,
        stage: int,
        costs: NetworkCosts,
        parts: tuple[int, int],
        borders: Mapping[Border, Sequence[Value]],
    ) -> None:
        self._cluster, self._placement, self._stage = cluster, placement, stage
        self._first, self._after = parts
        self._own, self._lives, self._uses = costs.layers[slice(*parts)], costs.lives, costs.uses
        self._tiles, self._touches = prod(placement.stream), costs.touches
        if self._touches is not None:
            self._lives = costs.lives.repeated(self._tiles)
        self._is_last = stage == placement.stages - 1
        self._loss = costs.loss if self._is_last else None
        self._input = costs.input
        self._before = {b: _sizes(costs, v) for b, v in borders.items() if b.taker == stage}
        self._behind = {b: _sizes(costs, v) for b, v in borders.items() if b.giver == stage}
        self._entering = _total(self._before.values())
        given = {value for values in self._behind.values() for value in values}
        if self._is_last:
            given = {one.value for one in self._own[-1].outputs} if self._own else set()
        made = [(n, one) for n, part in enumerate(self._own, parts[0]) for one in part.outputs]
        self._given = [(number, one) for number, one in made if one.value in given]
        self._output = sum(one.bytes for _, one in self._given)

    def costs(self, layers: tuple[int, int], again: bool) -> StageCosts:
        """All of it.

        Args:
            layers: its first step, and the one after its last.
            again: whether the stage runs again in backward.
        """
        parts, weights = (self._first, self._after), sum(one.weights for one in self._own)
        given = {one.memory for _, one in self._given} - {-1}
        held = self._entering + self._lives.held(*parts, given)
        returning = self._gradients(self._behind)
        largest = max((size for sizes in returning for size in sizes.values()), default=0)
        arriving = held + _total(returning) + largest  # one gradient after the other, in parts
        peaks = self._lives.backward_peaks(*parts, given, self._sums(), self._loss is not None)
        beside = self._entering + (0 if self._is_last else self._output)  # gradients of outputs
        later, first = (max(arriving, beside + peak) for peak in peaks)
        forward, backward = self._seconds()
        talks = [t for one in self._own for t in (*one.forward_talks, *one.backward_talks)]
        return StageCosts(
            forward=forward,
            backward=backward + forward * again,
            input=self._entering if self._stage else self._input,
            held=self._entering + self._output if again else held,
            forward_peak=self._entering + self._lives.forward_peak(*parts),
            backward_peak=later + weights,
            first_backward_peak=first,
            weights=weights,
            buffers=self._tiles * sum(one.buffers for one in self._own),
            arriving=(self._entering, _total(returning) + largest),
            sent=sum(talk.bytes for talk in talks) + self._handed_over(),
            halos=sum(t.bytes for t in talks if t.kind == "exchange" and t.axis == "grid"),
            channels=sum(talk.bytes for talk in talks if talk.axis == "tensor"),
            layers=layers,
            workspace=int(self._lives.rooms.max(initial=0)),
            steps=self._steps(given, again),
        )

    def _steps(self, given: set[int], again: bool) -> StageSteps | None:
        if self._touches is None:
            return None
        numbers = [self._touches.made[one] for one in given]
        parts = (self._first, self._after)
        return steps_of(self._touches, parts, numbers, self._loss is not None, again)

    @staticmethod
    def _gradients(borders: Mapping[Border, Mapping[Value, int]]) -> list[dict[Value, int]]:
        """Of the values that pass, but for the image."""
        return [{v: n for v, n in sizes.items() if v != IMAGE} for sizes in borders.values()]

    def _sums(self) -> list[Sum]:
        """Gradients of what later stages take and own parts, too.

        That of the former is held, and that of the latter is added to it. In the run of the whole
        network that may happen in the memory of the former.
        """
        found = []
        for number, one in self._given:
            own = [use for use in self._uses.get(one.value, ()) if use < self._after]
            if own and one.summed_in >= self._after and not self._is_last:
                found.append(Sum(number, own[-1], one.bytes))
        return found

    def _seconds(self) -> tuple[float, float]:
        """Forward and backward of a micro-batch; whoever receives takes the time."""
        cluster, world, ranks = self._cluster, self._placement.world_size, self._ranks()
        tiles = self._tiles
        forward = tiles * sum(cluster.seconds(one.forward, world) for one in self._own)
        backward = tiles * sum(cluster.seconds(one.backward, world) for one in self._own)
        forward += cluster.talking([t for one in self._own for t in one.forward_talks], ranks)
        backward += cluster.talking([t for one in self._own for t in one.backward_talks], ranks)
        for border, sizes in self._before.items():
            size = sum(sizes.values()) * self._takers(border.giver, border.taker)
            forward += self._border(border, size)
        for border, sizes in zip(self._behind, self._gradients(self._behind), strict=True):
            size = sum(sizes.values()) * self._takers(border.taker, border.giver)
            backward += self._border(border, size)
        if self._loss is not None:
            works = self._loss.forward + self._loss.backward
            backward += tiles * cluster.seconds(works, world)
            backward += cluster.talking(self._loss.forward_talks + self._loss.backward_talks, ranks)
        return forward, backward

    def _ranks(self) -> dict[Axis, Sequence[int]]:
        """Who talks: the ranks of a grid, and of those that divide channels the furthest apart."""
        placement, stage = self._placement, self._stage
        parts = placement.batch_parts(stage) * prod(placement.grids[stage])
        blocks = [placement.tensor_ranks(Position(0, stage, part)) for part in range(parts)]
        furthest = max(blocks, key=lambda one: self._cluster.nodes(min(one), max(one)))
        return {"grid": placement.ranks(stage, 0), "tensor": furthest}

    def _takers(self, giver: int, taker: int) -> int:
        """Ranks that divide channels of a stage to which one of another gives the same."""
        parts = self._placement.tensor_parts
        return ceil(parts(taker) / parts(giver))

    def _handed_over(self) -> int:
        """Bytes that a rank gives to other stages, gradients included."""
        total = 0
        for border, sizes in self._behind.items():
            total += sum(sizes.values()) * self._takers(border.giver, border.taker)
        for border, sizes in zip(self._before, self._gradients(self._before), strict=True):
            total += sum(sizes.values()) * self._takers(border.taker, border.giver)
        return total

    def _border(self, border: Border, size: int) -> float:
        """A hand-over of so many bytes, of the ranks that are furthest apart."""
        if not size:
            return 0.0
        before, behind = (self._placement.stage_ranks(stage, 0) for stage in border)
        return self._cluster.link(min(before), max(behind)).of(size)


def _sizes(costs: NetworkCosts, values: Sequence[Value]) -> dict[Value, int]:
    return {value: costs.values.get(value, 0) for value in values}


def _total(borders: Iterable[Mapping[Value, int]]) -> int:
    return sum(size for sizes in borders for size in sizes.values())
