"""A schedule on ranks that share cores: who computes beside others is slower.

`pipeline.simulate` takes every action to last as long as it lasts alone. Here an action has work to
do, and at any moment the cores are dealt out to the ranks that compute.
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
    """Run a schedule on paper, on ranks of one machine.

    Args:
        schedule: what each kind of ranks does; an action that several do, they begin together.
        weights: how many ranks there are of each kind.
        costs: seconds while every core has one rank that computes.
        lone_speed: of one rank that computes while the others wait.

    Raises:
        ValueError: if ranks would wait for each other for ever.
    """
    stages = stages_of(schedule)
    todo = [list(actions)[::-1] for actions in schedule]
    ranks = Counter(action for actions in schedule for action in actions)
    spans: list[list[ActionSpan]] = [[] for _ in todo]
    ended: set[Action] = set()
    running: dict[Action, _Running] = {}
    now = 0.0
    while running or any(todo):
        busy = {rank for one in running.values() for rank in one.ranks}
        ready: dict[Action, list[int]] = {}
        for rank, actions in enumerate(todo):
            if actions and rank not in busy:
                ready.setdefault(actions[-1], []).append(rank)
        for action, there in ready.items():
            if len(there) == ranks[action] and needs(action, stages) <= ended:
                running[action] = _Running(there, now, costs.of(action))
                for rank in there:
                    todo[rank].pop()
        if not running:
            raise ValueError("the ranks wait for each other for ever")
        active = sum(weights[rank] for one in running.values() for rank in one.ranks)
        speed = _speed(active, cores, lone_speed)
        step = min(one.left for one in running.values()) / speed
        now += step
        for action, one in list(running.items()):
            one.left -= step * speed
            if one.left <= 1e-12 * now:
                del running[action]
                ended.add(action)
                for rank in one.ranks:
                    spans[rank].append(ActionSpan(action, one.start, now))
    return SimulatedTimeline(tuple(map(tuple, spans)))


def _speed(active: int, cores: int, lone_speed: float) -> float:
    """Of each of the ranks that compute, where 1 is that of a rank among as many as cores."""
    if active > cores:
        return cores / active
    if cores == 1:
        return 1.0
    return 1 + (lone_speed - 1) * (cores - active) / (cores - 1)
