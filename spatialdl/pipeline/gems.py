"""GEMS: a second copy of the network on the same ranks, in inverse order.

Jain et al. 2020, "GEMS: GPU-enabled memory-aware model-parallelism system for distributed DNN
training". A batch is cut into chunks that the copies take in turn; the ranks that are done first
with one copy begin with the other. Three groups, two chunks of one micro-batch; digits are stages,
those of the second copy have primes, a backward takes two units of time:

    mast     group 0  F0 .  .  .  .  .  .  B0 -- F2'B2'-- .  .  .  .
             group 1  .  F1 .  .  .  B1 -- F1'.  .  .  .  B1'-- .  .
             group 2  .  .  F2 B2 -- F0'.  .  .  .  .  .  .  .  B0'--

    basic    group 0  F0 .  .  F2'B2'-- .  B0 -- .  .
             group 1  .  F1 F1'.  .  B1 -- B1'-- .  .
             group 2  F0'.  F2 B2 -- .  .  .  .  B0'--

``mast`` lets a chunk begin when the activations of the one before are gone, ``basic`` has two
chunks at once: faster, but it holds the activations of both.

In the long run ``mast`` waits for (P - 1) / (P + 1/2) of the time with P groups, one micro-batch a
chunk, and backwards of two forwards (Li, Hoefler 2021, "Chimera", table 2), but it holds the
activations of one chunk only. GEMS-MASTER is the same over more than two chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

from spatialdl.pipeline.action import Action, Kind, Lists
from spatialdl.pipeline.simulate import Costs, Span, simulate

COPIES = 2
BOTH: tuple[Kind, ...] = ("forward", "backward")


def mast(groups: int, microbatches: int, times: int = 1) -> Lists:
    """Chunk after chunk, so that a group holds the activations of one chunk.

    Args:
        times: pairs of chunks in a batch.

    Raises:
        ValueError: if the micro-batches cannot be dealt out to the chunks evenly.
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
    """Two chunks at once, one in each copy, each as in GPipe."""
    size = _chunk_size(microbatches, times)
    lists: list[list[Action]] = [[] for _ in range(groups)]
    for start in range(0, microbatches, COPIES * size):
        both = _both_ways(groups, range(start, start + COPIES * size), size, BOTH)
        for actions, more in zip(lists, both, strict=True):
            actions.extend(more)
    return lists


def forwards(groups: int, microbatches: int, times: int = 1) -> Lists:
    """Evaluation: forwards alone, both copies at once."""
    size = _chunk_size(microbatches, times)
    return _both_ways(groups, range(microbatches), size, ("forward",))


def _both_ways(
    groups: int, microbatches: range, size: int, kinds: Sequence[Kind]
) -> list[list[Action]]:
    """Each copy as if it were alone; what comes together on a group is done as it would begin."""
    spans: list[list[Span]] = [[] for _ in range(groups)]
    for copy in range(COPIES):
        alone = [
            [
                action
                for kind in kinds
                for m in microbatches
                if (action := _action(kind, group, groups, m, size)).copy == copy
            ]
            for group in range(groups)
        ]
        for own, more in zip(spans, simulate(alone, Costs.even(groups)).spans, strict=True):
            own.extend(more)
    return [
        [span.action for span in sorted(own, key=lambda span: (span.start, span.action.copy))]
        for own in spans
    ]


def _action(kind: Kind, group: int, groups: int, microbatch: int, size: int) -> Action:
    copy = microbatch // size % COPIES
    return Action(kind, group if copy == 0 else groups - 1 - group, microbatch, copy)


def _chunk_size(microbatches: int, times: int) -> int:
    """Micro-batches of a chunk."""
    chunks = COPIES * times
    if microbatches % chunks:
        raise ValueError(
            f"GEMS deals micro-batches out to 2 copies, parallel.gems.times={times} times, so "
            f"their number must be a multiple of {chunks}: parallel.microbatches={microbatches} "
            f"is not, take {microbatches // chunks * chunks + chunks}"
        )
    return microbatches // chunks
