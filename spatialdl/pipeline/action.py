"""A schedule is data: for each group of ranks the list of actions that it carries out, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "weight"]


class Action(NamedTuple):
    """One thing that the ranks of a stage do.

    Attributes:
        kind: a schedule may have weight actions, each after its backward, which then leaves the
            gradients of the weights to them.
        copy: of the network; there is a second one under GEMS only.
    """

    kind: Kind
    stage: int
    microbatch: int
    copy: int = 0


Lists = Sequence[Sequence[Action]]
"""One list of actions a group of ranks."""


def describe(action: Action) -> str:
    """An action in a few words."""
    other = " of the second copy" if action.copy else ""
    return f"{action.kind} {action.microbatch}, stage {action.stage}{other}"


def stages_of(lists: Lists) -> int:
    """The number of stages that have something to do."""
    return 1 + max((action.stage for actions in lists for action in actions), default=-1)


@dataclass(frozen=True)
class Schedule:
    """What the ranks of a placement do in a step.

    Attributes:
        train: actions of a training step, one list a group of ranks.
        evaluate: forwards alone.
        microbatches: into which a batch is cut.
    """

    train: Lists
    evaluate: Lists
    microbatches: int


def repeated(schedule: Schedule, times: int) -> Schedule:
    """The same order again and again, each time for as many micro-batches more.

    Of no more micro-batches than before are activations held at once.
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
