"""Schedules as data: for each group of ranks the list of its actions, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

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
