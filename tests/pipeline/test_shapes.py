from __future__ import annotations

import pytest
import torch
from torch import nn

from spatialdl.models import unet
from spatialdl.parallel.layout import Layout
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.partition import cut
from spatialdl.pipeline.shapes import Border, HandoverShapes, borders
from spatialdl.pipeline.steps import IMAGE, Value


class Gives(nn.Module):
    """Its output is made from its input."""

    def __init__(self, made) -> None:
        super().__init__()
        self.made = made

    def forward(self, *x):
        return self.made(*x)


def shapes(*made, grids=None):
    """Each function is a stage."""
    names = [str(number) for number in range(1, len(made))]
    model = nn.Sequential(*(Gives(one) for one in made))
    stages = cut(model, [1] * len(made), names, (3, 9, 7))
    placement = Placement(1, grids or ((1, 1),) * len(made))
    return HandoverShapes(stages, placement, (3, 9, 7), torch.float64)


def test_what_passes_is_found():
    conv = nn.Conv2d(3, 4, 3, stride=2, dtype=torch.float64)
    passing = shapes(conv, lambda x: x).of(5)
    (part,) = passing[Border(0, 1)].values()
    elements = Layout.by_sample(5, (4 * 4 * 3,), 1)
    assert (part.shape, part.sender, part.receiver) == ((5, 4, 4, 3), elements, elements)


def test_several_tensors_pass_with_a_layout_each():
    both = shapes(
        lambda x: (x[:, :1] * 2, x.mean((2, 3)), torch.arange(len(x))),
        lambda x: x[1] + x[2].view(-1, 1),
        lambda x: x,
        grids=((2, 1), (1, 3), (1, 1)),
    )
    passing = both.of(4)
    image, vector, numbers = passing[Border(0, 1)].values()
    assert image.shape == (4, 1, 9, 7)
    assert image.sender == Layout.even(4, (9, 7), (2, 1))
    assert image.receiver == Layout.even(4, (9, 7), (1, 3))
    assert vector.sender == vector.receiver == Layout.by_sample(4, (3,), 1)
    assert (numbers.shape, numbers.dtype) == ((4,), torch.int64)
    assert numbers.sender == numbers.receiver == Layout.by_sample(4, (1,), 1)
    assert [part.shape for part in passing[Border(1, 2)].values()] == [(4, 3)]


def test_what_jumps_over_a_stage_passes_straight():
    model = unet(width=2, depth=2)
    stages = cut(model, [1] * 3, ["encoder.2", "upsample.1"], (3, 33, 35))
    assert list(borders(stages)) == [Border(0, 1), Border(0, 2), Border(1, 2)]
    placement = Placement(1, ((2, 1), (1, 1), (2, 1)))
    passing = HandoverShapes(stages, placement, (3, 33, 35), torch.float32).of(2)
    (skip,) = passing[Border(0, 2)].values()
    assert skip.shape == (2, 2, 33, 35)
    assert skip.sender == skip.receiver == Layout.even(2, (33, 35), (2, 1))


def test_the_image_may_be_used_late():
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = (nn.Conv2d(3, 3, 1) for _ in range(3))

        def forward(self, x):
            return self.three(self.two(self.one(x)) + x)

    stages = cut(Late(), [1] * 3, ["two", "three"], (3, 9, 7))
    found = borders(stages)
    assert found == {Border(0, 1): (IMAGE, Value(0)), Border(1, 2): (Value(2),)}


def test_a_stage_may_make_tensors_of_its_own():
    """On the default device, which once was not that of the dry run."""
    passing = shapes(lambda x: x + torch.arange(7.0) * torch.ones(1), lambda x: x).of(2)
    (part,) = passing[Border(0, 1)].values()
    assert part.shape == (2, 3, 9, 7)


def test_found_once_for_every_number_of_samples():
    found = shapes(lambda x: x * 2, lambda x: x * 2)
    assert found.of(2) is found.of(2)
    (part,) = found.of(3)[Border(0, 1)].values()
    assert part.shape[0] == 3


def test_an_image_with_its_rows_elsewhere_is_refused():
    found = shapes(lambda x: x.permute(0, 2, 3, 1) * 2, lambda x: x, grids=((2, 1), (1, 1)))
    with pytest.raises(ValueError, match=r"rows in dim -3.*between stages 0 and 1.*parallel\.cut"):
        found.of(2)


def test_images_that_have_become_too_small_for_the_grid_are_refused():
    halves = [nn.AvgPool2d(2, ceil_mode=True), lambda x: x * 2]
    with pytest.raises(ValueError, match=r"stage 1 would cut images of 5x4 into 1x5 tiles: take"):
        shapes(*halves, grids=((1, 5), (1, 5))).of(2)
    assert shapes(*halves, grids=((1, 4), (1, 4))).of(2)
