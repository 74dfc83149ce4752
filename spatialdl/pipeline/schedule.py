"""In which order the groups of ranks do their forwards and backwards.

GPipe (Huang et al. 2019, section 2.3) on three stages and four micro-batches, time to the right:

    stage 0  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
    stage 1  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3
    stage 2  .  .  F0 F1 F2 F3 B0 B1 B2 B3

1F1B (Narayanan et al. 2021, section 2.2) holds no more micro-batches than stages are to come:

    stage 0  F0 F1 F2 .  .  B0 F3 .  B1 .  B2 .  B3
    stage 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
    stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3

`zero_bubble` waits less, by doing the weights' part of backwards when there is nothing else to do.

Layer parallelism is a pipeline with one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from spatialdl.pipeline import gems
from spatialdl.pipeline.action import Action, Lists
from spatialdl.pipeline.interleaved import interleaved
from spatialdl.pipeline.zero_bubble import zero_bubble
from spatialdl.placement import Placement

SCHEDULES = ("gpipe", "1f1b", "zero_bubble", "interleaved")
GEMS = ("basic", "mast", "master")


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


def make_schedule(name: str, placement: Placement, microbatches: int, times: int = 1) -> Schedule:
    """The schedule of a name of `SCHEDULES`, or for a mirrored placement of `GEMS`.

    Args:
        times: pairs of chunks of GEMS-MASTER.

    Raises:
        ValueError: if it does not fit the placement or the micro-batches.
    """
    _check(name, placement, times)
    groups = placement.groups
    if placement.mirrored:
        train = (gems.basic if name == "basic" else gems.mast)(groups, microbatches, times)
        return Schedule(train, gems.forwards(groups, microbatches, times), microbatches)
    if name == "interleaved":
        train = interleaved(groups, microbatches, placement.interleave)
    else:
        simple = {"gpipe": gpipe, "1f1b": one_f_one_b, "zero_bubble": zero_bubble}
        train = simple[name](groups, microbatches)
    evaluate = forward_only(groups, microbatches, placement.interleave)
    return Schedule(train, evaluate, microbatches)


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


def _check(name: str, placement: Placement, times: int) -> None:
    known = GEMS if placement.mirrored else SCHEDULES
    if name not in known:
        raise ValueError(f"the schedule {name} is unknown here: take one of {', '.join(known)}")
    if times != 1 and name != "master":
        raise ValueError(
            f"parallel.gems.times={times} is for parallel.gems.variant=master, not for {name}"
        )
    if (name == "interleaved") != (placement.interleave > 1):
        raise ValueError(
            f"parallel.schedule={name} with parallel.interleave={placement.interleave}: the "
            "schedule for ranks that hold several stages is interleaved, and it is for these only"
        )
    if placement.groups == 1 and (placement.interleave > 1 or placement.mirrored):
        raise ValueError(
            f"a layout of {placement.stages} stages on one group of ranks has nobody to take "
            "turns with: take more stages"
        )


def gpipe(stages: int, microbatches: int) -> Lists:
    """All forwards, then all backwards in the same order; one list a stage.

    Gradients of the micro-batches are added up in the order in which one process that accumulates
    over the same micro-batches adds them.
    """
    return [
        [Action("forward", stage, m) for m in range(microbatches)]
        + [Action("backward", stage, m) for m in range(microbatches)]
        for stage in range(stages)
    ]


def one_f_one_b(stages: int, microbatches: int) -> Lists:
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


def forward_only(groups: int, microbatches: int, interleave: int = 1) -> Lists:
    """Evaluation: forwards alone, block by block where a group holds several stages."""
    trained = interleaved(groups, microbatches, interleave)
    return [[action for action in actions if action.kind == "forward"] for actions in trained]
