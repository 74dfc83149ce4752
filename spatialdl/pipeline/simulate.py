"""Schedules as lists of actions, and their simulation: timeline, bubble, held micro-batches.

An action starts when its rank is free and its inputs have arrived: the output of the stage before
for a forward, the gradient of the stage after for a backward. Messages take no time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Literal, NamedTuple

from spatialdl.comm import trace
from spatialdl.layout.placement import Placement

Kind = Literal["forward", "backward"]


class Action(NamedTuple):
    """One unit of work of a stage's ranks.

    Attributes:
        copy: of the network; only GEMS has a second one.
    """

    kind: Kind
    stage: int
    microbatch: int
    copy: int = 0


Lists = Sequence[Sequence[Action]]
"""One list of actions per group of ranks."""


def describe(action: Action) -> str:
    """Describe an action in a few words."""
    copy = " of the second copy" if action.copy else ""
    return f"{action.kind} {action.microbatch}, stage {action.stage}{copy}"


def stages_of(lists: Lists) -> int:
    """The number of stages in a schedule."""
    return 1 + max((action.stage for actions in lists for action in actions), default=-1)


@dataclass(frozen=True)
class Schedule:
    """Actions of all ranks of a placement in a step.

    Attributes:
        train: actions of a training step, one list per group of ranks.
        evaluate: forwards only.
        microbatches: number of micro-batches in a batch.
    """

    train: Lists
    evaluate: Lists
    microbatches: int


def repeated(schedule: Schedule, times: int) -> Schedule:
    """Repeat a schedule for `times` as many micro-batches.

    The peak number of micro-batches with live activations does not grow.
    """

    def again(lists: Lists) -> Lists:
        return [
            [
                action._replace(microbatch=action.microbatch + n * schedule.microbatches)
                for n in range(times)
                for action in actions
            ]
            for actions in lists
        ]

    train, evaluate = again(schedule.train), again(schedule.evaluate)
    return Schedule(train, evaluate, times * schedule.microbatches)


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of a micro-batch in each stage."""

    forward: Sequence[float]
    backward: Sequence[float]

    @classmethod
    def even(cls, stages: int, forward: float = 1.0, backward: float = 2.0) -> StageSeconds:
        """Equal stages; a backward takes two forwards, as in most networks."""
        return cls((forward,) * stages, (backward,) * stages)

    def of(self, action: Action) -> float:
        costs: Sequence[float] = getattr(self, action.kind)
        if action.stage >= len(costs):
            raise ValueError(
                f"the costs have {len(costs)} stages for {action.kind}, but the schedule has "
                f"{describe(action)}: give StageSeconds({action.kind}=...) for all stages"
            )
        return costs[action.stage]


class ActionSpan(NamedTuple):
    """Start and end of an action, in seconds from the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class SimulatedTimeline:
    """Timeline of a step in which every action takes its cost.

    Attributes:
        spans: per rank, its actions in order.
    """

    spans: tuple[tuple[ActionSpan, ...], ...]

    @property
    def seconds(self) -> float:
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @property
    def bubble(self) -> float:
        """Idle fraction of the time of all ranks, 0 to 1."""
        busy = sum(span.end - span.start for spans in self.spans for span in spans)
        return 1 - busy / (len(self.spans) * self.seconds) if self.seconds else 0.0

    @property
    def peak_held(self) -> tuple[int, ...]:
        """Per rank, the peak number of forwards whose backward has not run yet."""
        change = {"forward": 1, "backward": -1}
        changes = ((change.get(span.action.kind, 0) for span in spans) for spans in self.spans)
        return tuple(max(accumulate(rank, initial=0)) for rank in changes)


class SharedCores(NamedTuple):
    """Cores shared by the ranks of one machine, where concurrent ranks are slower.

    Attributes:
        cores: number of cores; the costs are for one computing rank on each.
        ranks: number of ranks that each list of a schedule stands for.
        lone_speed: relative speed of a single computing rank.
    """

    cores: int
    ranks: Sequence[int]
    lone_speed: float

    def speed(self, computing: Iterable[int]) -> float:
        """Relative speed of each rank while those of some lists compute."""
        active = sum(self.ranks[number] for number in computing)
        if active > self.cores:
            return self.cores / active
        if self.cores == 1:
            return 1.0
        return 1 + (self.lone_speed - 1) * (self.cores - active) / (self.cores - 1)


@dataclass
class _Running:
    ranks: list[int]
    start: float
    left: float


def simulate(
    schedule: Lists, costs: StageSeconds, shared: SharedCores | None = None
) -> SimulatedTimeline:
    """Simulate a schedule.

    Args:
        schedule: per rank, its actions in order. Ranks that share an action, such as those of a
            grid, start it together.
        shared: cores that ranks share; None if each rank has a device of its own.

    Raises:
        ValueError: if the schedule deadlocks; the message has the action that each rank waits at.
    """
    stages = stages_of(schedule)
    todo = [list(actions)[::-1] for actions in schedule]
    ranks = Counter(action for actions in schedule for action in actions)
    spans: list[list[ActionSpan]] = [[] for _ in todo]
    ended: set[Action] = set()
    running: dict[Action, _Running] = {}
    now = 0.0
    while running or any(todo):
        busy = {rank for run in running.values() for rank in run.ranks}
        ready: dict[Action, list[int]] = {}  # ranks that have reached an action
        for rank, actions in enumerate(todo):
            if actions and rank not in busy:
                ready.setdefault(actions[-1], []).append(rank)
        for action, waiting in ready.items():
            if len(waiting) == ranks[action] and needs(action, stages) <= ended:
                running[action] = _Running(waiting, now, costs.of(action))
                for rank in waiting:
                    todo[rank].pop()
        if not running:
            raise ValueError(f"the schedule deadlocks, ranks are stuck: {_waiting(todo)}")
        computing = (rank for run in running.values() for rank in run.ranks)
        speed = 1.0 if shared is None else shared.speed(computing)
        step = min(run.left for run in running.values()) / speed
        now += step
        for action, run in list(running.items()):
            run.left -= step * speed
            if run.left <= 1e-12 * now:
                del running[action]
                ended.add(action)
                for rank in run.ranks:
                    spans[rank].append(ActionSpan(action, run.start, now))
    return SimulatedTimeline(tuple(map(tuple, spans)))


def merged(schedule: Lists) -> list[Action]:
    """All actions in an order in which each follows its dependencies.

    A rank in several groups runs its actions in this order. Every wait is then for an earlier
    action, which rules out deadlocks.
    """
    spans = simulate(schedule, StageSeconds.even(stages_of(schedule))).spans
    ordered = sorted(
        (span.start, group, place, span.action)
        for group, own in enumerate(spans)
        for place, span in enumerate(own)
    )
    return [action for *_, action in ordered]


def actions_of(rank: int, placement: Placement, schedule: Lists) -> list[Action]:
    """This rank's actions in a schedule for groups of ranks."""
    held = {(position.copy, position.stage) for position in placement.positions(rank)}
    return [action for action in merged(schedule) if (action.copy, action.stage) in held]


def needs(action: Action, stages: int) -> set[Action]:
    """Actions that must have ended before `action` can start."""
    neighbour = action.stage - 1 if action.kind == "forward" else action.stage + 1
    needed = {action._replace(stage=neighbour)} if 0 <= neighbour < stages else set()
    return needed if action.kind == "forward" else needed | {action._replace(kind="forward")}


def _waiting(todo: Sequence[Sequence[Action]]) -> str:
    heads = [actions[-1] for actions in todo if actions]
    return ", ".join(f"stage {a.stage} before {a.kind} {a.microbatch}" for a in heads)


def measured_costs(ranks: Sequence[Sequence[trace.Span]], stages: int) -> StageSeconds:
    """Median seconds of forwards and backwards over the micro-batches.

    Waits for other stages do not count.

    Args:
        ranks: per rank the spans of one or more steps.
        stages: of the network; stages without spans cost 0.
    """
    seconds: dict[tuple[Kind, int], list[float]] = {}
    for spans in ranks:
        for action, busy in busy_times(spans):
            seconds.setdefault((action.kind, action.stage), []).append(busy)

    def of(kind: Kind) -> list[float]:
        return [median(seconds.get((kind, stage), [0.0])) for stage in range(stages)]

    return StageSeconds(of("forward"), of("backward"))


def busy_times(spans: Sequence[trace.Span]) -> list[tuple[Action, float]]:
    """Actions of one rank with their seconds, without hand-overs."""
    waits = [span for span in spans if span.kind == "hand-over"]
    found = []
    for span in spans:
        if isinstance(span.detail, Action):
            inside = (w for w in waits if span.start <= w.start and w.end <= span.end)
            waited = sum(wait.end - wait.start for wait in inside)
            found.append((span.detail, span.end - span.start - waited))
    return found
