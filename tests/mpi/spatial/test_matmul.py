"""Products with matrices: over channels locally, over pixels as parts of a sum."""

from __future__ import annotations

import math
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spatialdl import UnsupportedSpatialOp, shard
from spatialdl.spatial.recompute import recompute
from tests.mpi.device import DEVICE
from tests.mpi.equality import (
    Operation,
    check_keyed,
    drawn,
    every_mesh,
)
from tests.mpi.spatial.shared import Cases, Shapes, flat, tokens
from tests.mpi.spatial.test_attention import Largest

N, C, H, W = 2, 4, 7, 6
Products = dict[str, tuple[Operation, Shapes]]


def last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)


PRODUCTS: Products = {
    "linear": (lambda x, w, b: F.linear(last(x), w, b), [(5, C), (5,)]),
    "matmul from the left": (lambda x, w: w @ x.flatten(2), [(3, C)]),
    "the reflected product": (lambda x, w: Tensor.__rmatmul__(x.flatten(2), w), [(3, C)]),
    "bmm": (lambda x, w: torch.bmm(tokens(x), w), [(N, C, 3)]),
    "mm": (lambda x, w: tokens(x).reshape(-1, C).mm(w), [(C, 3)]),
    "addmm": (
        lambda x, b, w: torch.addmm(b, tokens(x).reshape(-1, C), w, beta=0.5, alpha=2),
        [(3,), (C, 3)],
    ),
    "baddbmm": (lambda x, b, w: torch.baddbmm(b, tokens(x), w), [(1, 1, 3), (N, C, 3)]),
    "context of regions": (lambda x, w: w @ tokens(x), [(N, 3, H * W)]),
    "einsum, an ellipsis": (lambda x, w: torch.einsum("...c,cd->d...", last(x), w), [(C, 3)]),
    "einsum of an image and a whole one": (
        lambda x, y: torch.einsum("nchw,nhwk->nkhw", x, y),
        [(N, H, W, 3)],
    ),
    "einsum of three": (lambda x, w: torch.einsum("nchw,cd,nchw->dn", x, w, x), [(C, 3)]),
    "the same pixels on another layout": (
        lambda x: torch.einsum("nchw,ndhw->ncdhw", x, F.max_pool2d(x, 3, 1, 1)),
        [],
    ),
    # one rank along the dim has the one pixel; when each kept it, sums counted it several times
    "one pixel of columns": (lambda x, w: F.linear(x, w).sum((2, 3)), [(1, W)]),
    "one pixel of rows": (lambda x, w: (w @ x).softmax(-2).mean(), [(1, H)]),
    "one pixel before a dense layer": (
        lambda x, w, v: F.linear(F.linear(x, w).flatten(1), v),
        [(1, W), (3, C * H)],
    ),
}

# --- dense heads over a flattened map: products of a rank's own columns, added up over the ranks

M, SIZE = 3, C * H * W


def with_class(x: Tensor, c: Tensor, t: Tensor) -> Tensor:
    return torch.cat([c.expand(M, -1, -1), tokens(x), t], 1).flatten(1)


def dropped(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.dropout(flat(x), 0.4), w, b)


def again(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y: Tensor = recompute(lambda x, w, b: dropped(x, w, b).sin(), x, w, b, modules=[])
    return y


WEIGHT, BIAS = (5, SIZE), (5,)
BOTH: Shapes = [WEIGHT, BIAS]
BESIDE = [(1, 2, C), (M, 1, C), (5, SIZE + 3 * C), BIAS]
HEADS: Products = {
    "flatten": (lambda x, w, b: F.linear(flat(x), w, b), BOTH),
    "one output": (lambda x, w: F.linear(flat(x), w), [(SIZE,)]),
    "class token and register": (lambda x, c, t, w, b: F.linear(with_class(x, c, t), w, b), BESIDE),
    "matmul of tokens beside": (lambda x, c, t, w: with_class(x, c, t) @ w.t(), BESIDE[:3]),
    "addmm": (lambda x, w, b: torch.addmm(b, flat(x), w.t(), beta=0.5, alpha=2), BOTH),
    "einsum": (lambda x, w: torch.einsum("nk,ok->no", flat(x), w), [WEIGHT]),
    "all samples in one": (lambda x, w, b: F.linear(x.flatten(), w, b), [(5, M * SIZE), BIAS]),
    "rows and columns alone": (
        lambda x, w, b: F.linear(x.flatten(2), w, b),
        [(5, H * W), BIAS],
    ),
    "dropout": (dropped, BOTH),
    "one weight twice": (
        lambda x, w, b: F.linear(flat(x), w, b) * F.linear(flat(x).cos(), w),
        BOTH,
    ),
    "empty tiles": (  # on four rows of ranks some have no pixel
        lambda x, w, b: F.linear(flat(F.max_pool2d(x, 3)), w, b),
        [(5, C * 2 * 2), BIAS],
    ),
    "recomputed": (again, BOTH),
    "tokens again": (lambda x, w: tokens(x).flatten(1).view(M, H * W, C) @ w, [(C, 3)]),
}


def split_within_and_by_windows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Queries that are one small map, and keys of windows of a large one: (windows, 4, C) each."""
    small = F.avg_pool2d(x, 3).permute(0, 2, 3, 1)
    queries = small.repeat_interleave(9, 0).reshape(9 * len(x), 4, C)
    windows = x.permute(0, 2, 3, 1).view(len(x), 3, 2, 3, 2, C).permute(0, 1, 3, 2, 4, 5)
    return queries, windows.reshape(9 * len(x), 4, C)


WINDOWS: dict[str, Operation] = {
    "queries and keys": lambda q, k: q @ k.mT,
    "keys and queries": lambda q, k: torch.einsum("bse,ble->bls", k, q),
    "attention": lambda q, k: (q @ k.mT).softmax(-1) @ k.sin(),
}

CASES: Cases = {
    **{name: (product, (N, C, H, W), shapes) for name, (product, shapes) in PRODUCTS.items()},
    **{f"head, {name}": (head, (M, C, H, W), shapes) for name, (head, shapes) in HEADS.items()},
    **{
        f"windows, {name}": (
            lambda x, f=product: f(*split_within_and_by_windows(x)),
            (N, C, 6, 6),
            [],
        )
        for name, product in WINDOWS.items()
    },
}


@pytest.mark.tiles
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, meshes: dict) -> None:
    check_keyed(*CASES[name], meshes, name)


@pytest.mark.parametrize("name", WINDOWS)
def test_products_of_operands_that_are_split_along_other_letters_stay_split(
    name: str, meshes: dict
) -> None:
    for mesh in meshes.values():
        if mesh.grid_comm.size > 1:
            x = shard(drawn(1, N, C, 6, 6), mesh)
            found = WINDOWS[name](*split_within_and_by_windows(x))
            assert found.spatial_dims.at == (-3, -3)


def test_what_would_be_broadcast_or_summed_over_some_ranks_is_refused(meshes: dict) -> None:
    """Ranks without the one pixel of a dim would have had nothing where PyTorch repeats it."""
    for mesh in meshes.values():
        x = shard(torch.rand(N, C, H, W), mesh)
        if mesh.grid[0] > 1:
            with pytest.raises(UnsupportedSpatialOp, match="size 1"):
                torch.matmul(last(F.avg_pool2d(x, (H, 1))), torch.rand(5, C, 3))
    for mesh in every_mesh(3).values():
        x = shard(torch.rand(N, C, 4, 4, 4), mesh)
        if math.prod(mesh.grid[1:]) > 1:
            with pytest.raises(UnsupportedSpatialOp, match="sums over some split dims"):
                x.flatten(3) @ torch.rand(16, 5)


@pytest.mark.parametrize("product", ["linear", "addmm"])
def test_no_rank_holds_the_map(product: str) -> None:
    """Forward and backward. The weight is smaller than a map of several samples."""
    samples, channels, outputs = 8, 16, 3
    for mesh in every_mesh().values():
        if mesh.grid_comm.size < 3:
            continue
        whole = torch.rand(samples, channels, 20, 18, dtype=torch.float64).to(DEVICE)
        weight = drawn(1, outputs, channels * 20 * 18).to(DEVICE).requires_grad_()
        bias = drawn(2, outputs).to(DEVICE).requires_grad_()
        image = shard(whole * 0 + 1, mesh).requires_grad_()
        with Largest() as largest:
            y = flat(image.sin()).relu()
            if product == "linear":
                z = F.linear(y, weight, bias)
            else:
                z = torch.addmm(bias, y, weight.t())
            z.square().sum().backward()
        share = max(prod(box.shape[1:]) for box in image.spatial_layout.boxes)
        most = max(samples * channels * share, weight.numel())
        assert 0 < largest.elements <= most < whole.numel() * 0.6
