"""Predicts memory and time of a layout from the costs of its stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from spatialdl.layout.placement import Placement
from spatialdl.pipeline.gradients import stage_ranks
from spatialdl.pipeline.simulate import (
    Action,
    ActionSpan,
    Schedule,
    SharedCores,
    SimulatedTimeline,
    StageSeconds,
    merged,
    simulate,
)
from spatialdl.planning.cluster import Cluster
from spatialdl.planning.job import PlannedJob, Recompute
from spatialdl.planning.stage import StageCosts, stage_costs
from spatialdl.spatial.streaming.ledger import RankOperation

Held = tuple[tuple[int, int], ...]
"""(copy, stage) pairs of a rank."""


@dataclass(frozen=True)
class StoreUse:
    """Least use of a rank's store in a step, in bytes.

    Attributes:
        stored: activations above the memory limit at their peak.
        moved: written to the store, and as much read from it.
    """

    stored: float
    moved: float


@dataclass(frozen=True)
class Prediction:
    """Predicted costs of a layout.

    Attributes:
        seconds: of a training step.
        memory: bytes of each rank of a replica.
        sent: bytes per step of the rank that sends most.
        bubble: fraction of the time, 0 to 1, in which ranks wait for each other's micro-batches.
        timeline: of each rank of a replica, without averaging gradients and the optimizer.
        reducing, updating: seconds of these two.
        stores: store use of virtual tiles, per rank of a replica; () without virtual tiles.
        storing: seconds per step for the store on the rank that uses it most; part of `seconds`.
    """

    placement: Placement
    schedule: Schedule
    recompute: Recompute
    seconds: float
    memory: tuple[float, ...]
    sent: float
    bubble: float
    timeline: SimulatedTimeline
    reducing: float
    updating: float
    stores: tuple[StoreUse, ...] = ()
    storing: float = 0.0


def predict(
    job: PlannedJob,
    cluster: Cluster,
    placement: Placement,
    schedule: Schedule,
    recompute: Recompute,
) -> Prediction:
    """Predict memory and time of a layout.

    Raises:
        CannotWork: if the network cannot be cut this way.
    """
    stages = stage_costs(job, cluster, placement, schedule.microbatches, recompute)
    kinds = [
        tuple((p.copy, p.stage) for p in placement.positions(rank))
        for rank in range(placement.replica_size)
    ]
    distinct = list(dict.fromkeys(kinds))
    timeline = _simulated(cluster, placement, schedule, stages, distinct, kinds)
    reducing = _reducing(cluster, placement, stages)
    updating = _updating(job, cluster, placement, stages, distinct, recompute == "block")
    layers: list[list[StageCosts]] = [stages]
    if cluster.cores is not None and not placement.stream:
        # freed heap memory stays in the heap while other memory is mapped, so peaks add up
        layers = [
            stage_costs(job, cluster, placement, schedule.microbatches, recompute, memory)
            for memory in ("heap", "mapped")
        ]
    of_kind, stores, storing = {}, {}, 0.0
    for kind, spans in zip(distinct, timeline.spans, strict=True):
        peak = sum(_peak(layer, spans, kind) for layer in layers)
        if placement.stream:
            stores[kind] = _store_use(job.limit, stages, spans, peak)
            peak -= stores[kind].stored
        of_kind[kind] = _static(job, cluster, placement, schedule, stages, kind) + peak
    if stores:
        rate = cluster.store_bytes_per_second(job.store, placement.world_size)
        storing = max(2 * use.moved for use in stores.values()) / rate
    of_ranks = SimulatedTimeline(tuple(timeline.spans[distinct.index(kind)] for kind in kinds))
    return Prediction(
        placement=placement,
        schedule=schedule,
        recompute=recompute,
        seconds=timeline.seconds + reducing + updating + storing,
        memory=tuple(of_kind[kind] for kind in kinds),
        sent=max(_sent(placement, schedule, stages, kind) for kind in distinct),
        bubble=max(0.0, of_ranks.bubble),
        timeline=of_ranks,
        reducing=reducing,
        updating=updating,
        stores=tuple(stores[kind] for kind in kinds) if stores else (),
        storing=storing,
    )


def _simulated(
    cluster: Cluster,
    placement: Placement,
    schedule: Schedule,
    stages: Sequence[StageCosts],
    distinct: Sequence[Held],
    kinds: Sequence[Held],
) -> SimulatedTimeline:
    """Simulate one row per kind of ranks, as ranks of a grid do the same."""
    costs = StageSeconds([stage.forward for stage in stages], [stage.backward for stage in stages])
    lists = [_actions(schedule, kind) for kind in distinct]
    shared = None
    if cluster.cores is not None:
        ranks = [placement.data * kinds.count(kind) for kind in distinct]
        shared = SharedCores(cluster.cores, ranks, cluster.lone_speed)
    return simulate(lists, costs, shared)


def _actions(schedule: Schedule, kind: Held) -> list[Action]:
    return [action for action in merged(schedule.train) if (action.copy, action.stage) in kind]


def _store_use(
    limit: int | None, stages: Sequence[StageCosts], spans: Sequence[ActionSpan], peak: float
) -> StoreUse:
    """Store use of a rank that would take `peak` bytes beside the static ones without a limit.

    What is above the limit at the peak is stored once each time that the rank holds that many
    micro-batches. Memory that is loaded and stored again in between is not predicted.
    """
    if limit is None:
        return StoreUse(0.0, 0.0)
    own = [stages[number] for number in {action.stage for action, _, _ in spans}]
    weights = sum(stage.weights for stage in own)
    beside = weights + max(stage.workspace + sum(stage.arriving) for stage in own)
    kept = beside + max(limit, *(stage.largest for stage in own))
    stored = max(0.0, peak - max(kept, 2.0 * weights))
    changes = [1 if action.kind == "forward" else -1 for action, _, _ in spans]
    return StoreUse(stored, stored * changes.count(1) / max(accumulate(changes)))


def _reducing(cluster: Cluster, placement: Placement, stages: Sequence[StageCosts]) -> float:
    """Seconds to average gradients: stages in parallel, those of one rank one after the other."""
    seconds = [0.0] * placement.groups
    for number, stage in enumerate(stages):
        ranks = stage_ranks(placement, number)
        seconds[number % placement.groups] += cluster.all_reduce(ranks, stage.weights)
    return max(seconds)


def _updating(
    job: PlannedJob,
    cluster: Cluster,
    placement: Placement,
    stages: Sequence[StageCosts],
    distinct: Sequence[Held],
    again: bool,
) -> float:
    world = placement.world_size
    crowd = max(1.0, world / cluster.cores) if cluster.cores else 1.0
    of_stage = [cluster.seconds(_updates(job, stage, again), world) for stage in stages]
    return crowd * max(sum(of_stage[stage] for stage in {s for _, s in k}) for k in distinct)


def _updates(job: PlannedJob, stage: StageCosts, again: bool) -> Iterator[RankOperation]:
    """The optimizer's operations on a rank's part of the weights of a stage."""
    whole = job.weights_of(range(*stage.layers), again)
    share = stage.weights / whole if whole else 1.0
    for step in range(*stage.layers):
        for operation in job.updates(again)[step]:
            yield operation._replace(
                flops=operation.flops * share, bytes=round(operation.bytes * share)
            )


def _static(
    job: PlannedJob,
    cluster: Cluster,
    placement: Placement,
    schedule: Schedule,
    stages: Sequence[StageCosts],
    kind: Held,
) -> float:
    """Bytes of a rank during the whole step: weights, optimizer state, images."""
    numbers = {stage for _, stage in kind}
    weights = sum(stages[n].weights for n in numbers)
    static = cluster.base_bytes(placement.world_size)
    static += weights * (1 + job.state_ratio) + sum(stages[n].buffers for n in numbers)
    for copy, stage in kind:
        if stage == 0:
            static += _images(cluster, job, placement, schedule, stages[0].input, copy)
    return static


def _peak(stages: Sequence[StageCosts], spans: Sequence[ActionSpan], kind: Held) -> float:
    """Peak bytes of a rank beside the static ones."""
    most, held = 0.0, 0.0
    grads = dict.fromkeys((stage for _, stage in kind), 0)
    arriving = [stages[a.stage].arriving[a.kind == "backward"] for a, _, _ in spans]
    for (action, _, _), next_arriving in zip(spans, [*arriving[1:], 0], strict=True):
        stage = stages[action.stage]
        if action.kind == "forward":
            most = max(most, sum(grads.values()) + held + stage.forward_peak + next_arriving)
            held += stage.held
        else:
            held -= stage.held
            others = sum(grads.values()) - grads[action.stage]
            first = grads[action.stage] == 0
            peak = stage.first_backward_peak if first else stage.backward_peak
            grads[action.stage] = stage.weights
            most = max(most, others + held + peak + next_arriving)
    return max(most, 2.0 * sum(grads.values()))  # the optimizer's step


def _images(
    cluster: Cluster,
    job: PlannedJob,
    placement: Placement,
    schedule: Schedule,
    tile: int,
    copy: int,
) -> float:
    """Bytes of a batch's images on a rank of the first stage, and of loading the next ones."""
    actions = {a for actions in schedule.evaluate for a in actions if a.stage == 0}
    loaded = tile * sum(action.copy == copy for action in actions)
    if placement.stream:
        loaded = 0  # each virtual tile is read in its turn
    if cluster.cores is None:
        return loaded
    channels, *size = job.image
    grid = placement.tile_grids[0]
    pixels = prod(-(-n // parts) for n, parts in zip(size, grid, strict=True))
    samples = -(-job.batch // placement.data)
    # this batch and the next one as bytes, and buffers of the reading thread
    return loaded + 2 * samples * channels * pixels + job.read_bytes * pixels


def _sent(
    placement: Placement, schedule: Schedule, stages: Sequence[StageCosts], kind: Held
) -> float:
    """Bytes that a rank sends in a step; gradients by ring all-reduce."""
    total = 0.0
    actions = {a for actions in schedule.evaluate for a in actions}
    for place in kind:
        total += stages[place[1]].sent * sum((a.copy, a.stage) == place for a in actions)
    for stage in {stage for _, stage in kind}:
        ranks = len(stage_ranks(placement, stage))
        total += 2 * (ranks - 1) / ranks * stages[stage].weights
    return total
