"""A schedule is data: the list of actions that the ranks of a stage carry out.

GPipe (Huang et al. 2019, section 2.3) on three stages and four micro-batches, time to the right:

    stage 0  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
    stage 1  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3
    stage 2  .  .  F0 F1 F2 F3 B0 B1 B2 B3

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


def forward_only(stages: int, microbatches: int) -> list[list[Action]]:
    """Evaluation: forwards alone."""
    return [[Action("forward", stage, m) for m in range(microbatches)] for stage in range(stages)]


SCHEDULES = {"gpipe": gpipe}
