"""Interleaved 1F1B: each group of ranks holds several stages, so that bubbles become shorter.

Narayanan et al. 2021, section 2.2.2. Two groups, four stages, four micro-batches; a digit is a
micro-batch, the stages 2 and 3 have primes:

    group 0 (stages 0, 2)  F0 F1 F0' F1' F2 .  F3 .. B0' ...
    group 1 (stages 1, 3)  .  F0 F1  F0' B0' F1' B1' ...
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from spatialdl.layout import even_bounds
from spatialdl.pipeline.action import Action, Lists


def interleaved(groups: int, microbatches: int, interleave: int) -> Lists:
    """1F1B over stages that are dealt out to the groups in turn.

    Micro-batches pass in blocks of at least as many as there are groups: a block goes through all
    stages of a group before the next one begins.

    Args:
        interleave: stages that each group holds.
    """
    return [_of_group(group, groups, microbatches, interleave) for group in range(groups)]


def _of_group(group: int, groups: int, microbatches: int, interleave: int) -> list[Action]:
    bounds = even_bounds(microbatches, max(1, microbatches // groups))
    stages = range(group, groups * interleave, groups)
    forwards = [Action("forward", s, m) for s, m in _in_blocks(stages, bounds)]
    backwards = [Action("backward", s, m) for s, m in _in_blocks(stages[::-1], bounds)]
    # before the first backward comes: the first block through all stages but the last, and what
    # the groups behind this one need to get there and back
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
