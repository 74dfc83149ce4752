"""Recorded memory accesses match those of single operations."""

from __future__ import annotations

import torch

from spatialdl.planning.ledger import Ledger
from spatialdl.planning.touches import EVER, TouchedStep, Touches, touches_between


def followed(run) -> Touches:
    ledger = Ledger(touches=Touches())
    image = torch.empty(4, 8, device="meta")
    ledger.own(image, enters=True)
    with ledger.watch(), torch.device("meta"):
        run(image)
    assert ledger.touches is not None
    return ledger.touches


def test_operations_use_write_and_make_memories():
    def run(image):
        twice = image + image
        twice[0].mul_(3)
        return image * twice

    found = followed(run)
    assert found.sizes == [128] * 3
    assert found.steps == [
        TouchedStep(0, None, (0,), (), (1,)),
        TouchedStep(0, None, (1,)),  # views need what they view, too
        TouchedStep(0, None, (1,), (1,)),
        TouchedStep(0, None, (0, 1), (), (2,)),
    ]
    assert found.gone[0] == EVER
    assert found.gone[1:] == [4, 4]


def test_what_is_no_longer_held_is_gone_before_the_next_step():
    def run(image):
        first = image + 1
        first = first + 1
        return first + 1

    assert followed(run).gone[1:] == [2, 3, 3]


def test_weights_are_not_counted():
    weight = torch.empty(8, 8, device="meta")
    ledger = Ledger(touches=Touches())
    ledger.own(weight)
    with ledger.watch():
        weight + weight
    assert ledger.touches is not None
    assert [one.uses for one in ledger.touches.steps] == [()]


def test_only_runs_that_do_the_same_lie_on_a_line():
    one, other = followed(lambda image: image + 1), followed(lambda image: image * image)
    assert touches_between(one, other, 2.0) is not None
    other.sizes = [256, 384]
    between = touches_between(one, other, 2.0)
    assert between is not None
    assert between.sizes == [384, 640]
    assert touches_between(one, followed(lambda image: image[0] + image), 2.0) is None
    assert touches_between(one, None, 2.0) is None
