"""Costs combined from several counts."""

from __future__ import annotations

from spatialdl.models import unet
from spatialdl.planning.combined import between, with_stage
from spatialdl.planning.costs import count
from spatialdl.planning.parts import DividedStage
from tests.planning.test_costs import program, small


def test_other_numbers_of_samples_lie_on_a_line():
    model = program(unet(num_classes=3, width=4, depth=2), (24, 20))
    two, four, seven = (
        count(model, (n, 3, 24, 20), segments=True, on_cpu=False) for n in (2, 4, 7)
    )
    found = between(two, four, 2.5)
    assert found == seven
    assert list(found.lives.bytes) == list(seven.lives.bytes)


def test_so_does_what_a_virtual_tile_does_with_memory():
    model, stream = program(small(), (24, 20)), (2, 1)
    _, two, four, seven = (  # constants are made by the first
        count(model, (n, 3, 24, 20), stream=stream, on_cpu=False) for n in (2, 2, 4, 7)
    )
    found = between(two, four, 2.5)
    assert found == seven
    assert found.touches == seven.touches


def test_a_divided_stage_stands_in_the_place_of_the_whole_one():
    model, shape = program(small()), (2, 3, 12, 7)
    whole, which = count(model, shape), DividedStage(2, 0, 1)
    own = count(model, shape, divided=which)
    found = with_stage(whole, own, which)
    assert [one.name for one in found.layers] == [one.name for one in whole.layers]
    assert found.layers[0].weights == whole.layers[0].weights / 2
    assert found.values == whole.values  # what it gives is whole
    assert found.layers[1:] == whole.layers[1:]
    assert found.loss == whole.loss
