"""Schedules: the order of forwards and backwards on each group of ranks.

GPipe (Huang et al. 2019, section 2.3) on three stages and four micro-batches, time to the right:

    stage 0  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
    stage 1  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3
    stage 2  .  .  F0 F1 F2 F3 B0 B1 B2 B3

1F1B (Narayanan et al. 2021, section 2.2) holds at most as many micro-batches as stages follow:

    stage 0  F0 F1 F2 .  .  B0 F3 .  B1 .  B2 .  B3
    stage 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
    stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3

Layer parallelism is a pipeline with one micro-batch.

Interleaved 1F1B (Narayanan et al. 2021, section 2.2.2): each group of ranks holds several stages,
which shortens bubbles. Two groups, four stages, four micro-batches; a digit is a micro-batch, the
stages 2 and 3 have primes:

    group 0 (stages 0, 2)  F0 F1 F0' F1' F2 .  F3 .. B0' ...
    group 1 (stages 1, 3)  .  F0 F1  F0' B0' F1' B1' ...

GEMS (Jain et al. 2020, "GEMS: GPU-enabled memory-aware model-parallelism system for distributed DNN
training"): a second copy of the network on the same ranks, in reverse order. A batch is cut into
chunks that alternate between the copies; ranks that finish early with one copy begin with the
other. Three groups, two chunks of one micro-batch; digits are stages, those of the second copy
have primes, a backward takes two units of time:

    mast     group 0  F0 .  .  .  .  .  .  B0 -- F2'B2'-- .  .  .  .
             group 1  .  F1 .  .  .  B1 -- F1'.  .  .  .  B1'-- .  .
             group 2  .  .  F2 B2 -- F0'.  .  .  .  .  .  .  .  B0'--

    basic    group 0  F0 .  .  F2'B2'-- .  B0 -- .  .
             group 1  .  F1 F1'.  .  B1 -- B1'-- .  .
             group 2  F0'.  F2 B2 -- .  .  .  .  B0'--

``mast`` starts a chunk when the activations of the one before are freed; ``basic`` runs two chunks
at once: faster, but it holds the activations of both.

Asymptotically ``mast`` waits for (P - 1) / (P + 1/2) of the time with P groups, one micro-batch per
chunk, and backwards of two forwards (Li, Hoefler 2021, "Chimera", table 2), but it holds the
activations of one chunk only. GEMS-MASTER is the same with more than two chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from spatialdl.layout.layout import even_bounds
from spatialdl.layout.placement import Placement
from spatialdl.pipeline.simulate import (
    Action,
    ActionSpan,
    Kind,
    Lists,
    Schedule,
    StageSeconds,
    simulate,
)

SCHEDULES = ("gpipe", "1f1b", "interleaved")
GEMS = ("basic", "mast", "master")


def make_schedule(name: str, placement: Placement, microbatches: int, times: int = 1) -> Schedule:
    """Return the schedule named in `SCHEDULES`, or in `GEMS` for a mirrored placement.

    Args:
        times: number of chunk pairs, for GEMS-MASTER.

    Raises:
        ValueError: if it does not fit the placement or the number of micro-batches.
    """
    _check(name, placement, times)
    groups = placement.groups
    if placement.mirrored:
        train = (basic if name == "basic" else mast)(groups, microbatches, times)
        return Schedule(train, both_forwards(groups, microbatches, times), microbatches)
    if name == "interleaved":
        train = interleaved(groups, microbatches, placement.interleave)
    else:
        train = (gpipe if name == "gpipe" else one_f_one_b)(groups, microbatches)
    evaluate = forward_only(groups, microbatches, placement.interleave)
    return Schedule(train, evaluate, microbatches)


def _check(name: str, placement: Placement, times: int) -> None:
    known = GEMS if placement.mirrored else SCHEDULES
    if name == "zero_bubble":
        raise ValueError(
            "parallel.schedule=zero_bubble no longer exists: it was as fast as 1F1B; use "
            "parallel.schedule=1f1b"
        )
    if name not in known:
        raise ValueError(f"unknown schedule {name} for this layout: take one of {', '.join(known)}")
    if times != 1 and name != "master":
        raise ValueError(f"times={times} is for parallel.gems.variant=master, not for {name}")
    if (name == "interleaved") != (placement.interleave > 1):
        raise ValueError(
            f"parallel.schedule={name} with parallel.interleave={placement.interleave}: ranks that "
            "hold several stages need parallel.schedule=interleaved, which is for them only"
        )
    if placement.groups == 1 and (placement.interleave > 1 or placement.mirrored):
        raise ValueError(
            f"a layout of {placement.stages} stages on one group of ranks has no other group to "
            "alternate with: take more stages"
        )


def gpipe(stages: int, microbatches: int) -> Lists:
    """All forwards, then all backwards in the same order.

    Gradients accumulate over micro-batches in the same order as in a single process.
    """
    return [
        [Action("forward", stage, m) for m in range(microbatches)]
        + [Action("backward", stage, m) for m in range(microbatches)]
        for stage in range(stages)
    ]


def one_f_one_b(stages: int, microbatches: int) -> Lists:
    """As many forwards as stages remain, then alternate backwards and forwards.

    The bubble is GPipe's; a stage holds activations of at most ``stages - stage`` micro-batches.
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
    """Evaluation: forwards only, in blocks where a group holds several stages."""
    trained = interleaved(groups, microbatches, interleave)
    return [[action for action in actions if action.kind == "forward"] for actions in trained]


# --- interleaved stages


def interleaved(groups: int, microbatches: int, interleave: int) -> Lists:
    """1F1B over stages assigned to the groups round-robin.

    Micro-batches run in blocks of at least as many as there are groups: a block passes all stages
    of a group before the next block begins.

    Args:
        interleave: number of stages of each group.
    """
    return [_interleaved_group(group, groups, microbatches, interleave) for group in range(groups)]


def _interleaved_group(group: int, groups: int, microbatches: int, interleave: int) -> list[Action]:
    bounds = even_bounds(microbatches, max(1, microbatches // groups))
    stages = range(group, groups * interleave, groups)
    forwards = [Action("forward", s, m) for s, m in _in_blocks(stages, bounds)]
    backwards = [Action("backward", s, m) for s, m in _in_blocks(stages[::-1], bounds)]
    # Forwards before the first backward: the first block through all stages but the last, plus
    # the round trip through the groups behind this one.
    ahead = (interleave - 1) * max(b - a for a, b in pairwise(bounds)) + 2 * (groups - 1 - group)
    ahead = min(ahead, len(forwards))
    actions = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[len(forwards) - ahead :]


def _in_blocks(stages: Sequence[int], bounds: Sequence[int]) -> list[tuple[int, int]]:
    return [
        (stage, m)
        for start, stop in pairwise(bounds)
        for stage in stages
        for m in range(start, stop)
    ]


# --- GEMS

COPIES = 2
BOTH: tuple[Kind, ...] = ("forward", "backward")


def mast(groups: int, microbatches: int, times: int = 1) -> Lists:
    """Chunk after chunk, so that a group holds the activations of only one.

    Args:
        times: pairs of chunks in a batch.

    Raises:
        ValueError: if the micro-batches do not divide evenly into chunks.
    """
    size = _chunk_size(microbatches, times)
    return [
        [
            _action(kind, group, groups, m, size)
            for start in range(0, microbatches, size)
            for kind in BOTH
            for m in range(start, start + size)
        ]
        for group in range(groups)
    ]


def basic(groups: int, microbatches: int, times: int = 1) -> Lists:
    """Two chunks at once, one in each copy, each in GPipe order."""
    size = _chunk_size(microbatches, times)
    lists: list[list[Action]] = [[] for _ in range(groups)]
    for start in range(0, microbatches, COPIES * size):
        both = _both_ways(groups, range(start, start + COPIES * size), size, BOTH)
        for actions, more in zip(lists, both, strict=True):
            actions.extend(more)
    return lists


def both_forwards(groups: int, microbatches: int, times: int = 1) -> Lists:
    """Evaluation: forwards only, both copies at once."""
    size = _chunk_size(microbatches, times)
    return _both_ways(groups, range(microbatches), size, ("forward",))


def _both_ways(
    groups: int, microbatches: range, size: int, kinds: Sequence[Kind]
) -> list[list[Action]]:
    """Simulate each copy by itself; merge actions of a group by start time."""
    spans: list[list[ActionSpan]] = [[] for _ in range(groups)]
    for copy in range(COPIES):
        unmerged = [
            [
                action
                for kind in kinds
                for m in microbatches
                if (action := _action(kind, group, groups, m, size)).copy == copy
            ]
            for group in range(groups)
        ]
        for own, more in zip(
            spans, simulate(unmerged, StageSeconds.even(groups)).spans, strict=True
        ):
            own.extend(more)
    return [
        [span.action for span in sorted(own, key=lambda span: (span.start, span.action.copy))]
        for own in spans
    ]


def _action(kind: Kind, group: int, groups: int, microbatch: int, size: int) -> Action:
    copy = microbatch // size % COPIES
    return Action(kind, group if copy == 0 else groups - 1 - group, microbatch, copy)


def _chunk_size(microbatches: int, times: int) -> int:
    """Micro-batches per chunk."""
    chunks = COPIES * times
    if microbatches % chunks:
        raise ValueError(
            f"GEMS distributes micro-batches over 2 copies, {times} times, so "
            f"their number must be a multiple of {chunks}: parallel.microbatches={microbatches} "
            f"is not, take {microbatches // chunks * chunks + chunks}"
        )
    return microbatches // chunks
