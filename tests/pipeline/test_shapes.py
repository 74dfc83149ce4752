from __future__ import annotations

from math import prod

import pytest
import torch
from torch import Tensor, nn

from spatialdl.comm.mesh import dry_mesh
from spatialdl.comm.repartition import view_of
from spatialdl.layout.layout import Layout
from spatialdl.layout.placement import Placement
from spatialdl.pipeline import autocast
from spatialdl.pipeline.partition import cut
from spatialdl.pipeline.shapes import Border, HandoverShapes, SplitShape
from spatialdl.pipeline.stage import run_stage
from spatialdl.pipeline.steps import IMAGE
from spatialdl.spatial.dims import SpatialDims
from spatialdl.spatial.meta import meta_copy
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


def test_a_stage_may_make_tensors_of_its_own():
    """On the default device, which once was not that of the dry run."""
    passing = shapes(lambda x: x + torch.arange(7.0) * torch.ones(1), lambda x: x).of(2)
    (part,) = passing[Border(0, 1)].values()
    assert part.shape == (2, 3, 9, 7)


def channels_last(x):
    return x.permute(0, 2, 3, 1) * 2


def test_an_image_with_its_rows_elsewhere_travels_as_an_image():
    found = shapes(channels_last, lambda x: x, lambda x: x, grids=((2, 1), (1, 3), (1, 1)))
    for border, grid in ((Border(0, 1), (1, 3)), (Border(1, 2), (1, 1))):
        (part,) = found.of(2)[border].values()
        assert isinstance(part, SplitShape)
        assert (part.seen, part.shape) == ((2, 9, 7, 3), (2, 3, 9, 7))
        assert part.sender == Layout.even(2, (9, 7), (2, 1) if border.giver == 0 else (1, 3))
        assert part.receiver == Layout.even(2, (9, 7), grid)


GRIDS = [((2, 1), (1, 1)), ((1, 3), (2, 2)), ((2, 2), (3, 1)), ((7, 1), (2, 1)), ((2, 2), (2, 2))]


@pytest.mark.parametrize("grids", GRIDS)
def test_tiles_of_one_grid_become_those_of_another(grids):
    """Tokens of a sample with one before and two after them, and maps whose columns come first."""
    tokens = SpatialDims.of(-2, -2)._replace(prefix=1, suffix=2)
    merged = SpatialDims.of(-2, -2, outer=(4, 1))
    for sample, dims, size in (
        ((66, 4), tokens, (9, 7)),
        ((13, 4), tokens, (5, 2)),
        ((7, 3, 9), SpatialDims.of(-1, -3), (9, 7)),
        ((4 * 63, 2), merged, (9, 7)),
    ):
        before, after = (Layout.even(2, size, grid) for grid in grids)
        whole = torch.arange(2 * prod(sample)).view(2, *sample).double()
        part = SplitShape.of(meta_split(whole.shape, dims, before), after)
        image = torch.full(part.shape, float("nan"), dtype=torch.float64)
        for number, box in enumerate(part.sender.boxes):
            tile = tile_of(whole, dims, before, number)
            sent = part.leaving(tile, number)
            assert sent.shape == part.local_shape(part.sender, number)
            assert torch.equal(part.tile_of(sent, before, number), tile)
            view_of(image, part.sender.whole, box).copy_(sent)
        for number, box in enumerate(part.receiver.boxes):
            received = part.tile_of(view_of(image, part.receiver.whole, box), after, number)
            assert torch.equal(received, tile_of(whole, dims, after, number))


def meta_split(shape, dims, pixels):
    tile = torch.empty(dims.sizes(shape, pixels.boxes[0].shape[1:]), device="meta")
    return SpatialTensor(tile, pixels, dry_mesh(pixels.grid), dims)


def tile_of(whole, dims, pixels, part):
    for dim in set(dims.at):
        own = positions_in(pixels, dims, whole.shape[dim], dim, part)
        whole = whole.index_select(dim, own)
    return whole


def test_ranks_may_divide_the_samples_of_tokens_behind_a_split_stage():
    """The stage after next got the samples of one rank only, and refused them."""
    made = (lambda x: x.flatten(2).transpose(1, 2), lambda x: x * 2, lambda x: x + 1)
    stages = cut(nn.Sequential(*map(Gives, made)), [1] * 3, ["1", "2"], (3, 9, 7))
    placement = Placement(1, ((2, 1), (1, 1), (1, 1)), batch=(1, 2, 2))
    found = HandoverShapes(stages, placement, (3, 9, 7), torch.float64).of(4)
    assert [part.shape[0] for passing in found.values() for part in passing.values()] == [4, 4]


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


# --- autocast


CPU = torch.device("cpu")


class Mixed(nn.Module):
    """Tensors of several types meet: what passes a border is of each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.pad = nn.ReflectionPad2d(1)
        self.end = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        half = self.conv(x)
        wide = self.pad(half)
        exact = x[:, :1].double()
        counts = (half > 0).sum((2, 3))
        y = self.norm(half) + wide[..., 1:-1, 1:-1] * exact.float() + counts[..., None, None]
        return self.end(y.mean((2, 3)))


def mixed_stages() -> list[nn.Module]:
    return cut(Mixed(), (1,) * 3, ["norm", "end"], (3, 9, 7))


def of_mixed(parts: list[nn.Module], device: torch.device, dtype: torch.dtype) -> HandoverShapes:
    placement = Placement(1, ((1, 1),) * 3)
    return HandoverShapes(parts, placement, (3, 9, 7), torch.float32, (device, dtype))


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="autocast there has a list")


@pytest.mark.parametrize(
    "device", [CPU, pytest.param(torch.device("cuda", 0), marks=NO_GPU)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_at_borders_are_those_of_a_real_run(dtype, device):
    parts = [part.to(device) for part in mixed_stages()]
    before = [parameter.clone() for part in parts for parameter in part.parameters()]
    passing = of_mixed(parts, device, dtype).of(2)
    after = [parameter for part in parts for parameter in part.parameters()]
    assert all(map(torch.equal, before, after))
    assert all(type(parameter) is nn.Parameter for parameter in after)
    values = {IMAGE: torch.randn(2, 3, 9, 7, device=device)}
    with autocast.autocast(device, dtype), torch.no_grad():
        for part in parts[:-1]:
            values |= run_stage(part.eval(), values, 2)
    types = set()
    for given in passing.values():
        for value, part in given.items():
            assert part.dtype == values[value].dtype
            types.add(part.dtype)
    assert {dtype, torch.float32} <= types, "the network has borders of several types"


def test_a_stage_that_cannot_be_tried_is_named():
    parts = [meta_copy(part) for part in mixed_stages()]
    parts[1].get_submodule("norm").weight = nn.Parameter(torch.ones(5, device="meta"))
    image = torch.empty(2, 3, 9, 7, device="meta")
    with pytest.raises(
        ValueError, match=r"the dtypes of the outputs of stage 1 .*precision=float32"
    ):
        autocast.value_types(parts, image, CPU, torch.bfloat16)
