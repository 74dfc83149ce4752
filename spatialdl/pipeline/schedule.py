"""A schedule is data: the list of actions that the ranks of a stage carry out.

GPipe (Huang et al. 2019, section 2.3) on three stages and four micro-batches, time to the right:

    stage 0  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
    stage 1  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3
    stage 2  .  .  F0 F1 F2 F3 B0 B1 B2 B3

1F1B (Narayanan et al. 2021, section 2.2) holds no more micro-batches than stages are to come:

    stage 0  F0 F1 F2 .  .  B0 F3 .  B1 .  B2 .  B3
    stage 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
    stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3

Layer parallelism is a pipeline with one micro-batch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Action(NamedTuple):
    """One thing that a stage does."""

    kind: Literal["forward", "backward"]
    stage: int
    microbatch: int


def gpipe(stages: int, microbatches: int) -> list[list[Action]]:
    """All forwards, then all backwards in the same order; one list a stage.

    Gradients of the micro-batches are added up in the order in which one process that accumulates
    over the same micro-batches adds them.
    """
    return [
        [Action("forward", stage, m) for m in range(microbatches)]
        + [Action("backward", stage, m) for m in range(microbatches)]
        for stage in range(stages)
    ]


def one_f_one_b(stages: int, microbatches: int) -> list[list[Action]]:
    """As many forwards as stages are to come, then a backward and a forward in turn.

    The bubble is GPipe's; activations are held of at most ``stages - stage`` micro-batches.
    """
    lists = []
    for stage in range(stages):
        ahead = min(stages - stage, microbatches)
        actions = [Action("forward", stage, m) for m in range(ahead)]
        for m in range(microbatches):
            actions.append(Action("backward", stage, m))
            if ahead + m < microbatches:
                actions.append(Action("forward", stage, ahead + m))
        lists.append(actions)
    return lists


def forward_only(stages: int, microbatches: int) -> list[list[Action]]:
    """Evaluation: forwards alone."""
    return [[Action("forward", stage, m) for m in range(microbatches)] for stage in range(stages)]


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}
