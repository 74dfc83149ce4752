"""A schedule is data: for each group of ranks the list of actions that it carries out, in order."""

from __future__ import annotations

from collections.abc import Sequence
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
