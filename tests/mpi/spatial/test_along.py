"""What is done along a dim that is not split: which dims are left, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spatialdl import UnsupportedSpatialOp, shard
from spatialdl.spatial.tensor import SpatialTensor
from tests.mpi.equality import Operation, parameter, same

REMOVES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "median": lambda x, dim, *more, **named: x.median(dim, *more, **named),
    "nanmedian": torch.nanmedian,
    "mode": lambda x, dim, *more, **named: x.mode(dim, *more, **named),
    "torch.mode": torch.mode,
    "kthvalue": lambda x, dim, *more, **named: x.kthvalue(2, dim, *more, **named),
}
PLACES: dict[int, Operation] = {1: lambda x: x, -3: lambda x: x, 3: lambda x: x.permute(0, 2, 3, 1)}
"""Where the channels are."""


def image() -> Tensor:
    return parameter(random.Random(5), 2, 3, 9, 7)


@pytest.mark.parametrize("part", [0, 1], ids=["values", "places"])
@pytest.mark.parametrize("name", REMOVES)
def test_the_dim_is_kept_if_it_is_asked_for(name: str, part: int, meshes: dict) -> None:
    call, whole = REMOVES[name], image()
    for dim, moved in PLACES.items():
        what = f"{name} over {dim}"
        same(lambda x, d=dim, m=moved: call(m(x), d)[part], whole, meshes, what)
        same(lambda x, d=dim, m=moved: call(m(x), d, False)[part], whole, meshes, f"{what}, False")
        same(lambda x, d=dim, m=moved: call(m(x), d, True)[part], whole, meshes, f"{what}, True")
        same(lambda x, d=dim, m=moved: call(m(x), d, keepdim=True)[part], whole, meshes, what)


def test_the_last_dim_is_taken_where_none_is_named(meshes: dict) -> None:
    calls: list[Operation] = [
        lambda x: x.sort()[0],
        lambda x: x.argsort(descending=True),
        lambda x: x.topk(2)[1],
        lambda x: x.kthvalue(1)[0],
        lambda x: torch.mode(x)[0],
    ]
    for number, call in enumerate(calls):
        what = f"call {number}"
        same(lambda x, c=call: c(x.permute(0, 2, 3, 1)), image(), meshes, what)
        for mesh in meshes.values():
            if mesh.grid[1] > 1:
                with pytest.raises(UnsupportedSpatialOp, match="on one rank; use dims of samples"):
                    call(shard(image(), mesh))


def test_the_remedy_holds_where_the_grid_has_one_part(meshes: dict) -> None:
    """Columns are refused over a grid of rows, too: "a dim that is not split" would be one."""
    for mesh in meshes.values():
        x = shard(image(), mesh)
        if isinstance(x, SpatialTensor):
            with pytest.raises(UnsupportedSpatialOp, match="use dims of samples or channels, or"):
                x.cumsum(3)
            assert x.cumsum(1).shape == x.cumsum(0).shape == x.shape


def test_quantiles_are_refused_over_any_dim(meshes: dict) -> None:
    """They change which dims there are."""
    for mesh in meshes.values():
        x = shard(image(), mesh)
        for quantile in (x.quantile, x.nanquantile):
            for dim in (None, 0, 1, 2):
                with pytest.raises(UnsupportedSpatialOp, match="call full_tensor"):
                    quantile(0.5, dim)
