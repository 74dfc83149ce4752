"""Two parts: the first keeps 10 bytes for backward, the second 5, and each has a weight of 3."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from spatialdl.planning.ledger import Ledger, RecordedOperation, StorageRecord
from spatialdl.planning.peaks import Lives, Sum, lives, lives_between

SINCE = 3


@pytest.fixture
def run() -> Lives:
    phases = ["forward"] * 3 + ["backward"] * 3
    parts = [0, 0, 1, 1, 1, 0]
    moments = [RecordedOperation(phase, part, 0) for phase, part in zip(phases, parts, strict=True)]
    memories = [
        StorageRecord(10, 10, "forward", 0, born=0, died=5),
        StorageRecord(7, 7, "forward", 0, born=0, died=2),  # gone before backward
        StorageRecord(5, 5, "forward", 1, born=2, died=4),
        StorageRecord(3, 3, "backward", 1, born=4),  # the second part's weight
        StorageRecord(6, 6, "backward", 1, born=4, died=6),  # what it gives to the first
        StorageRecord(3, 3, "backward", 0, born=5),
    ]
    ledger = Ledger(moments=moments, memories=memories)
    gradients = {id(memories[3]), id(memories[5])}
    return lives(ledger, memories, [0, 4, 0, 0, 20, 0], SINCE, gradients)


def test_forward_counts_what_lives_and_what_operations_need(run):
    assert run.forward_peak(0, 1) == 10 + 7 + 4
    assert run.forward_peak(1, 2) == 5
    assert run.forward_peak(0, 2) == 21


def test_what_backward_needs_and_what_is_given_is_held(run):
    assert run.held(0, 1, ()) == 10
    assert run.held(0, 1, {1}) == 17
    assert run.held(0, 2, {1, 4}) == 22  # what is made in backward is not held before


def test_backward_counts_the_parts_that_are_asked_for(run):
    # its kept tensor is gone, room for the operation
    assert run.backward_peaks(1, 2, (), (), False) == (6 + 3 + 20, 6 + 3 + 20)
    # what the first part kept died, and what it was given is counted by those behind it
    assert run.backward_peaks(0, 1, (), (), False) == (3, 3)
    assert run.backward_peaks(0, 2, (), (), False) == (10 + 6 + 3 + 20, 10 + 6 + 3 + 20)


def test_what_is_given_lives_until_backward_is_over(run):
    assert run.backward_peaks(0, 1, {0, 1}, (), False) == (3 + 17, 3 + 17)


def test_the_forward_of_a_loss_belongs_to_backward(run):
    """The second part as a loss."""
    assert run.backward_peaks(0, 1, (), (), True) == (10 + 6 + 3 + 20, 10 + 6 + 3 + 20)
    later = replace(run, rooms=np.array([0, 0, 50, 0, 0, 0]))
    assert later.backward_peaks(0, 1, (), (), True) == (10 + 5 + 50,) * 2


def test_gradients_of_later_weights_were_there_before_or_come_one_after_the_other(run):
    bare = replace(run, rooms=np.zeros(6, dtype=np.int64), bytes=run.bytes * run.is_gradient)
    assert bare.backward_peaks(0, 2, (), (), False) == (3, 3 + 3)


def test_sums_live_in_the_backward_of_their_parts(run):
    assert run.backward_peaks(0, 1, (), [Sum(0, 0, 100), Sum(1, 1, 7)], False) == (103, 103)


def test_memories_of_other_numbers_of_samples_lie_on_a_line(run):
    twice = replace(run, bytes=2 * run.bytes, rooms=2 * run.rooms)
    found = lives_between(run, twice, 2.0)
    assert list(found.bytes) == list(3 * run.bytes)
    assert list(found.rooms) == list(3 * run.rooms)
    assert lives_between(run, replace(run, born=run.born + 1), 2.0) is None
