"""What is written into while a view of it, which autograd may have kept, is alive."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from spatialdl import UnsupportedSpatialOp, shard
from tests.mpi.equality import Operation, parameter, several_ranks

VIEWS: dict[str, Operation] = {
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "channels": lambda x: x[:, 1:],
    "flatten": lambda x: x.flatten(2),
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
    image = parameter(random.Random(2), 2, 3, 6, 5)
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
            image = shard(parameter(random.Random(2), 2, 3, 12, 12), mesh)
            part = image[:, :, :5, :4].permute(0, 2, 3, 1)  # of a view that is gone
            with pytest.raises(UnsupportedSpatialOp, match="its base or a view of it"):
                part.mul_(2)
