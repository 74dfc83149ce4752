from __future__ import annotations

import pytest
import torch
from torch import nn

from spatialdl.layout import Layout
from spatialdl.mesh import Placement
from spatialdl.pipeline.shapes import HandoverShapes


class Gives(nn.Module):
    """Its output is made from its input."""

    def __init__(self, made) -> None:
        super().__init__()
        self.made = made

    def forward(self, x):
        return self.made(x)


def shapes(*stages, grids=None):
    modules = [Gives(stage) for stage in stages]
    placement = Placement(1, grids or ((1, 1),) * len(modules))
    return HandoverShapes(modules, placement, (3, 9, 7), torch.float64)


def test_what_passes_is_found_without_running_the_last_stage():
    def never(x):
        raise AssertionError

    conv = nn.Conv2d(3, 4, 3, stride=2, dtype=torch.float64)
    (passing,) = shapes(conv, never).of(5)
    assert not passing.is_tuple
    (part,) = passing.parts
    assert (part.shape, part.dtype) == ((5, 4, 4, 3), torch.float64)
    assert (part.sender, part.receiver) == (None, None)


def test_tuples_pass_with_a_layout_for_each_tensor():
    both = shapes(
        lambda x: (x[:, :1] * 2, x.mean((2, 3)), torch.arange(len(x))),
        lambda x: x[1] + x[2].view(-1, 1),
        lambda x: x,
        grids=((2, 1), (1, 3), (1, 1)),
    )
    first, second = both.of(4)
    assert first.is_tuple
    image, vector, numbers = first.parts
    assert image.shape == (4, 1, 9, 7)
    assert image.sender == Layout.even((4, 9, 7), (2, 1))
    assert image.receiver == Layout.even((4, 9, 7), (1, 3))
    assert (vector.shape, vector.sender, vector.receiver) == ((4, 3), None, None)
    assert numbers.dtype == torch.int64
    assert [part.shape for part in second.parts] == [(4, 3)]


def test_a_stage_may_make_tensors_of_its_own():
    """On the default device, which once was not that of the dry run."""
    (passing,) = shapes(lambda x: x + torch.arange(7.0) * torch.ones(1), lambda x: x).of(2)
    assert passing.parts[0].shape == (2, 3, 9, 7)


def test_found_once_for_every_number_of_samples():
    found = shapes(lambda x: x, lambda x: x)
    assert found.of(2) is found.of(2)
    assert found.of(3)[0].parts[0].shape[0] == 3


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (lambda x: {"x": x}, "a dict: a network"),
        (lambda x: (x, None), "a tuple of Tensor, NoneType: a network"),
        (lambda x: (), "a tuple: a network"),
        (lambda x: [x], "a list: a network"),
    ],
)
def test_anything_but_tensors_is_refused(made, named):
    with pytest.raises(ValueError, match=f"stage 0 ends with {named} can be cut only where"):
        shapes(made, lambda x: x).of(1)
