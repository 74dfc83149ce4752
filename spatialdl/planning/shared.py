"""Simulates a schedule on ranks that share cores, where concurrent ranks are slower.

`pipeline.simulate` gives every action a fixed duration. Here an action has a fixed amount of work,
and the cores are shared by the ranks that compute at a moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from spatialdl.pipeline.action import Action, Lists, stages_of
from spatialdl.pipeline.simulate import ActionSpan, SimulatedTimeline, StageSeconds, needs


@dataclass
class _Running:
    ranks: list[int]
    start: float
    left: float


def simulate_shared(
    schedule: Lists, weights: Sequence[int], costs: StageSeconds, cores: int, lone_speed: float
) -> SimulatedTimeline:
    """Simulate a schedule on ranks of one machine.

    Args:
        schedule: per kind of ranks, its actions; kinds that share an action start it together.
        weights: number of ranks of each kind.
        costs: seconds while every core has one computing rank.
        lone_speed: relative speed of a single computing rank.

    Raises:
        ValueError: if the schedule deadlocks.
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
        ready: dict[Action, list[int]] = {}
        for rank, actions in enumerate(todo):
            if actions and rank not in busy:
                ready.setdefault(actions[-1], []).append(rank)
        for action, waiting in ready.items():
            if len(waiting) == ranks[action] and needs(action, stages) <= ended:
                running[action] = _Running(waiting, now, costs.of(action))
                for rank in waiting:
                    todo[rank].pop()
        if not running:
            raise ValueError("the schedule deadlocks")
        active = sum(weights[rank] for run in running.values() for rank in run.ranks)
        speed = _speed(active, cores, lone_speed)
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


def _speed(active: int, cores: int, lone_speed: float) -> float:
    """Speed of each computing rank, relative to one rank per core."""
    if active > cores:
        return cores / active
    if cores == 1:
        return 1.0
    return 1 + (lone_speed - 1) * (cores - active) / (cores - 1)
