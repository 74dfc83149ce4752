"""Writing in place: noticed by those that have kept what is overwritten, and by views.

Once it was not: below autograd nobody counted the writes to a tile, so the convolution before a
`relu_` worked out its weight's gradient from the overwritten tile, without a word.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import spatialdl
from spatialdl import UnsupportedSpatialOp, shard
from tests.mpi.equality import Operation, drawn, several_ranks

KEEPERS: dict[str, Operation] = {
    "conv3x3": nn.Conv2d(3, 3, 3, padding=1).double(),
    "batch_norm": nn.BatchNorm2d(3).double(),
    "square": lambda x: x * x,
}
WRITERS: dict[str, Operation] = {
    "relu_": F.relu_,
    "mul_": lambda x: x.mul_(torch.full((3, 1, 1), 2.0, dtype=torch.float64)),
    "zero_": lambda x: x.zero_(),
}


@pytest.mark.parametrize(
    ("keeper", "writer"),
    [
        *((one, "relu_") for one in KEEPERS),
        *(("conv3x3", one) for one in WRITERS if one != "relu_"),
    ],
)
def test_overwriting_what_backward_needs_is_an_error(
    keeper: str, writer: str, world: MPI.Intracomm
) -> None:
    mesh = spatialdl.init_mesh((world.size, 1))
    image = torch.randn(1, 3, 16, 16, dtype=torch.float64).requires_grad_()
    x = spatialdl.shard(image, mesh) * 1
    y = KEEPERS[keeper](x)
    WRITERS[writer](x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


VIEWS: dict[str, Operation] = {
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "channels": lambda x: x[:, 1:],
    "a view of a view": lambda x: x.permute(0, 2, 3, 1)[..., :2],
}


def written_between(x: Tensor, view: Operation) -> None:
    """Autograd keeps the view for backward; then its base is written to, beside autograd."""
    y = view(x)
    loss = (y * y).sum()
    with torch.no_grad():
        x.mul_(2)
    loss.backward()


@pytest.mark.parametrize("name", VIEWS)
def test_a_leaf_is_not_written_to_without_autograd_while_a_view_is_alive(
    name: str, meshes: dict
) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        written_between(torch.rand(2, 3, 6, 5, requires_grad=True), VIEWS[name])
    for mesh in several_ranks(meshes):
        x = shard(torch.rand(2, 3, 6, 5), mesh).requires_grad_()
        with pytest.raises(UnsupportedSpatialOp, match="its base or a view of it"):
            written_between(x, VIEWS[name])


@pytest.mark.parametrize("name", VIEWS)
def test_where_nothing_learns_a_view_may_be_written_to(name: str, meshes: dict) -> None:
    image = drawn(2, 2, 3, 6, 5)
    for mesh in meshes.values():
        with torch.no_grad():
            plain, ours = image.clone(), shard(image, mesh)
            for x in (plain, ours):
                VIEWS[name](x).mul_(3)
            assert torch.equal(ours.full_tensor(), plain)


def test_a_view_that_lies_elsewhere_is_not_written_to_when_nobody_has_it_but_its_own_views(
    meshes: dict,
) -> None:
    """Its pixels have moved to other ranks: what is written would not reach the image."""
    with torch.no_grad():
        for mesh in several_ranks(meshes):
            image = shard(drawn(2, 2, 3, 12, 12), mesh)
            part = image[:, :, :5, :4].permute(0, 2, 3, 1)  # of a view that is gone
            with pytest.raises(UnsupportedSpatialOp, match="its base or a view of it"):
                part.mul_(2)


def test_writing_into_a_view_whose_base_lives_is_refused(meshes: dict) -> None:
    """Autograd would not know that the base has changed, and give a wrong gradient."""
    for mesh in several_ranks(meshes):
        x = shard(torch.rand(2, 4, 6, 8, requires_grad=True), mesh) * 1
        y = x.permute(0, 2, 3, 1)
        with pytest.raises(UnsupportedSpatialOp, match="clone"):
            y.relu_()
        with pytest.raises(UnsupportedSpatialOp, match="clone"):
            x.relu_()
        with torch.no_grad():
            y.detach().relu_()


# --- into whole tensors, and into tiles


def test_a_refused_write_has_written_nothing(meshes: dict) -> None:
    whole = torch.ones(2, 4, 8, 8)
    for mesh in several_ranks(meshes):
        x = shard(whole + 1, mesh)
        for write in (
            lambda x: whole.__setitem__(slice(None), x),
            lambda x: torch.mul(x, x, out=whole),
            whole.add_,
        ):
            with pytest.raises(UnsupportedSpatialOp):
                write(x)
        assert bool((whole == 1).all())
