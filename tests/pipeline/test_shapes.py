from __future__ import annotations

from math import prod

import pytest
import torch
from torch import nn

from spatialdl.comm.mesh import dry_mesh
from spatialdl.models import unet
from spatialdl.parallel.layout import Layout
from spatialdl.parallel.placement import Placement
from spatialdl.pipeline.partition import cut
from spatialdl.pipeline.shapes import Border, HandoverShapes, SplitShape, borders
from spatialdl.pipeline.steps import IMAGE, Value
from spatialdl.spatial.dims import SpatialDims, token_dims
from spatialdl.spatial.span import positions_in
from spatialdl.spatial.tensor import SpatialTensor


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


def channels_last(x):
    return x.permute(0, 2, 3, 1) * 2


def test_an_image_with_its_rows_elsewhere_is_passed_tile_by_tile():
    found = shapes(channels_last, lambda x: x, grids=((2, 1), (1, 1)))
    (part,) = found.of(2)[Border(0, 1)].values()
    assert isinstance(part, SplitShape)
    assert part.shape == (2, 9, 7, 3)
    assert part.local_shape(part.sender, 0) == (2, 4, 7, 3)
    assert part.local_shape(part.sender, 1) == (2, 5, 7, 3)
    assert part.local_shape(part.receiver, 0) == (2, 9 * 7 * 3)


@pytest.mark.parametrize("grid", [(2, 1), (1, 3), (2, 2)])
def test_tiles_one_after_the_other_are_put_in_their_places(grid):
    """Tokens of a sample with one before and two after them, and maps whose columns come first."""
    mesh = dry_mesh((1, 1))
    tokens = token_dims(2).moved(lambda dim: dim - 1)._replace(prefix=1, suffix=2)
    for sample, dims in (((66, 4), tokens), ((7, 3, 9), SpatialDims.of(-1, -3))):
        pixels = Layout.even(2, (9, 7), grid)
        whole = torch.arange(2 * prod(sample)).view(2, *sample).double()
        tile = torch.empty(2, *tile_shape(sample, dims, pixels))
        output = SpatialTensor(tile, pixels, dry_mesh(grid), dims)
        part = SplitShape.of(output, 1, is_split=False)
        tiles = []
        for number in range(len(pixels.boxes)):
            tile = whole
            for dim in set(dims.at):
                own = positions_in(pixels, dims, whole.shape[dim], dim, number)
                tile = tile.index_select(dim, own)
            tiles.append(part.boxed(tile))
        assert torch.equal(part.given_to(mesh, torch.cat(tiles, 1)), whole)


def tile_shape(sample, dims, pixels):
    return dims.sizes((2, *sample), pixels.boxes[0].shape[1:])[1:]


def test_tokens_that_would_change_their_grid_are_refused():
    found = shapes(channels_last, lambda x: x, grids=((2, 1), (1, 2)))
    with pytest.raises(ValueError, match=r"rows in dim -3.*between stages 0 and 1.*2x1 and 1x2"):
        found.of(2)


def test_samples_must_come_first():
    found = shapes(lambda x: x.permute(1, 0, 2, 3) * 2, lambda x: x, grids=((2, 1), (1, 1)))
    assert found.of(2)  # an image, whatever its other dims are
    found = shapes(lambda x: x.permute(2, 0, 1, 3) * 2, lambda x: x, grids=((2, 1), (1, 1)))
    with pytest.raises(ValueError, match=r"first dim must be the 2 samples.*parallel\.cut"):
        found.of(2)


def test_images_that_have_become_too_small_for_the_grid_are_refused():
    halves = [nn.AvgPool2d(2, ceil_mode=True), lambda x: x * 2]
    with pytest.raises(ValueError, match=r"stage 1 would cut images of 5x4 into 1x5 tiles: take"):
        shapes(*halves, grids=((1, 5), (1, 5))).of(2)
    assert shapes(*halves, grids=((1, 4), (1, 4))).of(2)
