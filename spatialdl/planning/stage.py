"""Costs of one stage of a layout, from the costs of its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

from spatialdl.comm.dry import Axis
from spatialdl.layout.layout import by
from spatialdl.layout.placement import Placement, Position
from spatialdl.pipeline.shapes import Border
from spatialdl.pipeline.steps import IMAGE, Value
from spatialdl.planning.cluster import Cluster
from spatialdl.planning.costs import NetworkCosts
from spatialdl.planning.job import CannotWork, PlannedJob, Recompute
from spatialdl.planning.peaks import Sum
from spatialdl.planning.program import DividedStage


@dataclass(frozen=True)
class StageCosts:
    """Costs of one stage on its rank with the largest tile; memory in bytes.

    Attributes:
        forward, backward: seconds of a micro-batch, including communication.
        input: of a micro-batch.
        held: from the forward of a micro-batch to its backward; of the first stage without input.
        forward_peak, backward_peak: peak while it runs, including `held`. `backward_peak` counts
            the gradients of all weights, `first_backward_peak` those allocated so far in the first
            micro-batch.
        weights, buffers: of its layers.
        arriving: received for the forward and for the backward of a micro-batch, in buffers
            allocated at the start of the previous action.
        sent: by a rank per micro-batch.
        halos: part of `sent` that is halos.
        channels: part of `sent` to the ranks that divide its channels.
        layers: its first step, and the one after its last.
        workspace: peak workspace of an operation.
        largest: inputs and outputs of the largest operation, on a virtual tile if there are some.
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
    largest: int = 0


def stage_costs(
    job: PlannedJob,
    cluster: Cluster,
    placement: Placement,
    microbatches: int,
    recompute: Recompute,
    memory: Literal["all", "heap", "mapped"] = "all",
) -> list[StageCosts]:
    """Compute the costs of all stages of a layout, in order.

    Args:
        memory: the kind of memory to count, see `planning.costs.NetworkCosts`.

    Raises:
        CannotWork: if the network cannot be cut this way.
    """
    again, stages = recompute == "block", placement.stages
    if again and not job.can_recompute(stages):
        raise CannotWork("parallel.recompute=block: the network has no blocks to recompute")
    bounds = job.bounds(placement.widths, again)
    samples = ceil(ceil(job.batch / microbatches) / placement.data)
    parts = job.parts(bounds, again)
    borders = job.borders(bounds, again)
    stages_found = []
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
        stage_model = _Stage(cluster, placement, stage, costs, (first, after), borders)
        stages_found.append(stage_model.costs(layers, recompute == "stage"))
    return stages_found


class _Stage:
    """A stage on its rank with the largest tile.

    Args:
        costs: of all parts, on the grid of the stage.
        parts: its first part, and the one after its last.
        borders: borders that values pass, and the values.
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
        self._tiles = prod(placement.stream)
        if placement.stream:
            self._lives = costs.lives.repeated(self._tiles)
        self._is_last = stage == placement.stages - 1
        self._loss = costs.loss if self._is_last else None
        self._input = costs.input
        self._before = {b: _sizes(costs, v) for b, v in borders.items() if b.taker == stage}
        self._behind = {b: _sizes(costs, v) for b, v in borders.items() if b.giver == stage}
        self._entering = self._received = _total(self._before.values())
        if placement.stream and not stage:
            self._entering += costs.input  # read tile by tile, and kept like other activations
        passing = {value for values in self._behind.values() for value in values}
        if self._is_last:
            passing = {output.value for output in self._own[-1].outputs} if self._own else set()
        outputs = [
            (n, output) for n, part in enumerate(self._own, parts[0]) for output in part.outputs
        ]
        self._passing = [(number, output) for number, output in outputs if output.value in passing]
        self._output = sum(output.bytes for _, output in self._passing)

    def costs(self, layers: tuple[int, int], recompute: bool) -> StageCosts:
        """Compute the costs of the stage.

        Args:
            layers: its first step, and the one after its last.
            recompute: whether the stage is recomputed in backward.
        """
        parts, weights = (self._first, self._after), sum(layer.weights for layer in self._own)
        kept = {output.memory for _, output in self._passing} - {-1}
        held = self._entering + self._lives.held(*parts, kept)
        returning = self._gradients(self._behind)
        largest = max((size for sizes in returning for size in sizes.values()), default=0)
        arriving = held + _total(returning) + largest  # gradients arrive one by one, in parts
        peaks = self._lives.backward_peaks(*parts, kept, self._sums(), self._loss is not None)
        beside = self._entering + (0 if self._is_last else self._output)  # gradients of outputs
        later, first = (max(arriving, beside + peak) for peak in peaks)
        forward, backward = self._seconds()
        messages = [
            message
            for layer in self._own
            for message in (*layer.forward_messages, *layer.backward_messages)
        ]
        return StageCosts(
            forward=forward,
            backward=backward + forward * recompute,
            input=self._received if self._stage else self._input,
            held=self._entering + self._output if recompute else held,
            forward_peak=self._entering + self._lives.forward_peak(*parts),
            backward_peak=later + weights,
            first_backward_peak=first,
            weights=weights,
            buffers=self._tiles * sum(layer.buffers for layer in self._own),
            arriving=(self._received, _total(returning) + largest),
            sent=sum(message.bytes for message in messages) + self._handed_over(),
            halos=sum(
                message.bytes
                for message in messages
                if message.kind == "exchange" and message.axis == "grid"
            ),
            channels=sum(message.bytes for message in messages if message.axis == "tensor"),
            layers=layers,
            workspace=int(self._lives.rooms.max(initial=0)),
            largest=max(
                (work.bytes for layer in self._own for work in (*layer.forward, *layer.backward)),
                default=0,
            ),
        )

    @staticmethod
    def _gradients(borders: Mapping[Border, Mapping[Value, int]]) -> list[dict[Value, int]]:
        """Sizes of the gradients of passed values; images have none."""
        return [{v: n for v, n in sizes.items() if v != IMAGE} for sizes in borders.values()]

    def _sums(self) -> list[Sum]:
        """Gradients of values that both later stages and own parts take.

        The gradient from later stages is held, and the own one is added to it. In the run of the
        whole network the sum may be in memory of the later stages.
        """
        sums = []
        for number, output in self._passing:
            own = [use for use in self._uses.get(output.value, ()) if use < self._after]
            if own and output.summed_in >= self._after and not self._is_last:
                sums.append(Sum(number, own[-1], output.bytes))
        return sums

    def _seconds(self) -> tuple[float, float]:
        """Forward and backward of a micro-batch; receivers account for communication."""
        cluster, world, ranks = self._cluster, self._placement.world_size, self._ranks()
        tiles = self._tiles
        forward = tiles * sum(cluster.seconds(layer.forward, world) for layer in self._own)
        backward = tiles * sum(cluster.seconds(layer.backward, world) for layer in self._own)
        forward += cluster.communication_seconds(
            [message for layer in self._own for message in layer.forward_messages], ranks
        )
        backward += cluster.communication_seconds(
            [message for layer in self._own for message in layer.backward_messages], ranks
        )
        for border, sizes in self._before.items():
            size = sum(sizes.values()) * self._takers(border.giver, border.taker)
            forward += self._border(border, size)
        for border, sizes in zip(self._behind, self._gradients(self._behind), strict=True):
            size = sum(sizes.values()) * self._takers(border.taker, border.giver)
            backward += self._border(border, size)
        if self._loss is not None:
            works = self._loss.forward + self._loss.backward
            backward += tiles * cluster.seconds(works, world)
            backward += cluster.communication_seconds(
                self._loss.forward_messages + self._loss.backward_messages, ranks
            )
        return forward, backward

    def _ranks(self) -> dict[Axis, Sequence[int]]:
        """Communicating ranks: of a grid, and of the furthest ranks that divide channels."""
        placement, stage = self._placement, self._stage
        parts = placement.batch_parts(stage) * prod(placement.grids[stage])
        blocks = [placement.tensor_ranks(Position(0, stage, part)) for part in range(parts)]
        furthest = max(blocks, key=lambda block: self._cluster.nodes(min(block), max(block)))
        return {"grid": placement.ranks(stage, 0), "tensor": furthest}

    def _takers(self, giver: int, taker: int) -> int:
        """Ranks dividing the taker's channels that one rank of the giver sends the same data to."""
        parts = self._placement.tensor_parts
        return ceil(parts(taker) / parts(giver))

    def _handed_over(self) -> int:
        """Bytes that a rank sends to other stages, including gradients."""
        total = 0
        for border, sizes in self._behind.items():
            total += sum(sizes.values()) * self._takers(border.giver, border.taker)
        for border, sizes in zip(self._before, self._gradients(self._before), strict=True):
            total += sum(sizes.values()) * self._takers(border.taker, border.giver)
        return total

    def _border(self, border: Border, size: int) -> float:
        """Seconds of a hand-over of `size` bytes between the ranks that are furthest apart."""
        if not size:
            return 0.0
        before, behind = (self._placement.stage_ranks(stage, 0) for stage in border)
        return self._cluster.link(min(before), max(behind)).of(size)


def _sizes(costs: NetworkCosts, values: Sequence[Value]) -> dict[Value, int]:
    return {value: costs.values.get(value, 0) for value in values}


def _total(borders: Iterable[Mapping[Value, int]]) -> int:
    return sum(size for sizes in borders for size in sizes.values())
