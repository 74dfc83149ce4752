"""What one stage of a layout costs, from the costs of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from typing import Literal

from spatialdl.comm.dry import Talk
from spatialdl.placement import Placement
from spatialdl.planning.cluster import Cluster
from spatialdl.planning.costs import LayerCosts, NetworkCosts
from spatialdl.planning.job import Job, Recompute


class CannotWork(ValueError):
    """A layout that the network does not allow."""


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
        layers: its first layer, and the one after its last.
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
    layers: tuple[int, int]


def stage_costs(
    job: Job,
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
    if len(job.layers) < placement.stages:
        raise CannotWork(
            f"{placement.stages} stages of a network that can be cut into {len(job.layers)}"
        )
    bounds = job.bounds(placement.widths)
    again = recompute == "block"
    samples = ceil(ceil(job.batch / microbatches) / placement.data)
    found = []
    for stage, (first, after) in enumerate(job.parts(bounds, again)):
        grid = placement.grids[stage]
        costs = job.costs(ceil(samples / placement.batch_parts(stage)), grid, again)
        if memory != "all":
            costs = getattr(costs, memory) or costs
        if len(costs.layers) < after:
            raise CannotWork(f"stage {stage} on a grid of {grid[0]}x{grid[1]}: {costs.refused}")
        layers = (bounds[stage], bounds[stage + 1])
        found.append(
            _stage(cluster, placement, stage, costs, (first, after), layers, recompute == "stage")
        )
    return found


def _stage(
    cluster: Cluster,
    placement: Placement,
    stage: int,
    costs: NetworkCosts,
    parts: tuple[int, int],
    layers: tuple[int, int],
    again: bool,
) -> StageCosts:
    own = costs.layers[slice(*parts)]
    is_last = stage == placement.stages - 1
    entering = costs.layers[parts[0] - 1].output if stage else 0
    output = own[-1].output if own else 0
    held = entering + sum(one.kept for one in own)
    held += 0 if not own or own[-1].output_kept else output
    peaks = _peaks(own, entering)
    backward_peak, first_backward_peak = peaks[1:]
    if is_last and costs.loss is not None:
        extra = max(costs.loss.forward_extra, costs.loss.backward_extra)
    else:
        extra = 2 * output  # the gradient, and its parts as they arrive
    weights = sum(one.weights for one in own)
    first_backward_peak = max(first_backward_peak, held + extra)
    backward_peak = max(backward_peak, held + extra + weights)
    forward, backward, sent = _seconds(cluster, placement, stage, own, entering, output)
    if is_last and costs.loss is not None:
        ranks = placement.world_size
        backward += cluster.seconds(costs.loss.forward + costs.loss.backward, ranks)
        talks = costs.loss.forward_talks + costs.loss.backward_talks
        backward += cluster.talking(talks, placement.ranks(stage, 0))
    return StageCosts(
        forward=forward,
        backward=backward + forward * again,
        input=entering if stage else costs.input,
        held=entering + output if again else held,
        forward_peak=peaks[0],
        backward_peak=backward_peak,
        first_backward_peak=first_backward_peak,
        weights=weights,
        buffers=sum(one.buffers for one in own),
        arriving=(entering, 0 if is_last else 2 * output),
        sent=sent,
        layers=layers,
    )


def _peaks(own: Sequence[LayerCosts], entering: int) -> tuple[int, int, int]:
    """Most bytes in forward, in backward, and in the backward of the first micro-batch."""
    before = [0, *accumulate(one.kept for one in own)]
    after = sum(one.weights for one in own)
    forward, backward, first = entering, 0, 0
    total = after
    for number, one in enumerate(own):
        here = entering + before[number]
        after -= one.weights
        previous = own[number - 1] if number else None
        loose = previous.output if previous and not previous.output_kept else 0
        forward = max(forward, here + loose + one.forward_extra)
        backward = max(backward, here + one.backward_extra + total)
        first = max(first, here + one.backward_extra + after)
    return forward, backward, first


def _seconds(
    cluster: Cluster,
    placement: Placement,
    stage: int,
    own: Sequence[LayerCosts],
    entering: int,
    output: int,
) -> tuple[float, float, int]:
    """Forward and backward of a micro-batch, and bytes sent; whoever receives takes the time."""
    world, ranks = placement.world_size, placement.ranks(stage, 0)
    times = [0.0, 0.0]
    sent = 0
    for direction, name in enumerate(("forward", "backward")):
        talks: list[Talk] = []
        for one in own:
            times[direction] += cluster.seconds(getattr(one, name), world)
            talks += getattr(one, f"{name}_talks")
        times[direction] += cluster.talking(talks, ranks)
        sent += sum(talk.bytes for talk in talks)
    if stage > 0:
        times[0] += _border(cluster, placement, stage - 1, entering)
        sent += entering
    if stage < placement.stages - 1:
        times[1] += _border(cluster, placement, stage, output)
        sent += output
    return times[0], times[1], sent


def _border(cluster: Cluster, placement: Placement, stage: int, size: int) -> float:
    """A hand-over of so many bytes to a rank behind or before the border after `stage`."""
    before, after = placement.ranks(stage, 0), placement.ranks(stage + 1, 0)
    return cluster.link(min(before), max(after)).of(size)
