"""Two parts: the first keeps 10 bytes for backward, the second 5, and each has a weight of 3."""

from __future__ import annotations

from spatialdl.planning.ledger import Ledger, Memory, Moment
from spatialdl.planning.peaks import peaks_backward, peaks_forward

ROOMS = [0, 4, 0, 0, 20, 0]
SINCE = 3


def run():
    phases = ["forward"] * 3 + ["backward"] * 3
    parts = [0, 0, 1, 1, 1, 0]
    moments = [Moment(phase, part, 0) for phase, part in zip(phases, parts, strict=True)]
    memories = [
        Memory(10, 10, "forward", 0, born=0, died=5),
        Memory(7, 7, "forward", 0, born=0, died=2),  # gone before backward
        Memory(5, 5, "forward", 1, born=2, died=4),
        Memory(3, 3, "backward", 1, born=4),  # the second part's weight
        Memory(6, 6, "backward", 1, born=4, died=5),  # what it gives to the first
        Memory(3, 3, "backward", 0, born=5),
    ]
    return Ledger(moments=moments, memories=memories), {id(memories[3]), id(memories[5])}


def test_forward_counts_what_lives_and_what_operations_need():
    ledger, _ = run()
    assert peaks_forward(ledger, ledger.memories, ROOMS, 2, SINCE) == [21, 5]


def test_backward_counts_later_parts_but_not_their_gradients():
    ledger, grads = run()
    found = peaks_backward(ledger, ledger.memories, ROOMS, 2, SINCE, grads)
    assert found[1] == 6 + 3 + 20  # its kept tensor is gone, room for the operation
    assert found[0] == 3  # what the first part kept died, and what it was given


def test_only_the_memories_that_are_given_count():
    ledger, grads = run()
    assert peaks_forward(ledger, ledger.memories[:1], ROOMS, 2, SINCE) == [14, 0]
    assert peaks_backward(ledger, [], [0] * 6, 2, SINCE, grads) == [0, 0]
