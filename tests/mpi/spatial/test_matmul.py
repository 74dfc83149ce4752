"""Products with matrices: over channels locally, over pixels as parts of a sum."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatialdl import Mesh, UnsupportedSpatialOp, shard
from tests.mpi.equality import check, check_in, every_mesh, parameter

N, C, H, W = 2, 4, 7, 6
Meshes = dict[tuple[int, int], Mesh]


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def weights(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [parameter(random.Random(seed), *shape) for seed, shape in enumerate(shapes)]


PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "linear": (
        lambda x, w, b: F.linear(x.permute(0, 2, 3, 1), w, b),
        weights((5, C), (5,)),
    ),
    "linear on tokens": (lambda x, w: F.linear(tokens(x), w), weights((3, C))),
    "matmul": (lambda x, w: tokens(x) @ w, weights((C, 3))),
    "matmul of a vector": (lambda x, w: tokens(x).matmul(w), weights((C,))),
    "matmul from the left": (lambda x, w: w @ x.flatten(2), weights((3, C))),
    "the reflected product": (
        lambda x, w: Tensor.__rmatmul__(x.flatten(2), w),
        weights((3, C)),
    ),
    "the reflected product of two images": (
        lambda x: Tensor.__rmatmul__(tokens(x), x.flatten(2).cos()),
        [],
    ),
    "a batch of matrices": (lambda x, w: torch.matmul(tokens(x), w), weights((N, C, 3))),
    "bmm": (lambda x, w: torch.bmm(tokens(x), w), weights((N, C, 3))),
    "mm": (lambda x, w: tokens(x).reshape(-1, C).mm(w), weights((C, 3))),
    "mv": (lambda x, w: tokens(x).reshape(-1, C).mv(w), weights((C,))),
    "addmm": (
        lambda x, b, w: torch.addmm(b, tokens(x).reshape(-1, C), w, beta=0.5, alpha=2),
        weights((3,), (C, 3)),
    ),
    "baddbmm": (
        lambda x, b, w: torch.baddbmm(b, tokens(x), w),
        weights((1, 1, 3), (N, C, 3)),
    ),
    "queries and keys": (lambda x: tokens(x) @ tokens(x).mT, []),
    "attention written out": (
        lambda x: (tokens(x) @ tokens(x).transpose(-1, -2) / 2).exp() @ tokens(x),
        [],
    ),
    "attention over channels": (
        lambda x: (x.flatten(2) @ tokens(x)).softmax(-1) @ x.flatten(2),
        [],
    ),
    "context of regions": (lambda x, w: w @ tokens(x), weights((N, 3, H * W))),
    "einsum over channels": (
        lambda x, w: torch.einsum("nchw,dc->ndhw", x, w),
        weights((3, C)),
    ),
    "einsum, an ellipsis": (
        lambda x, w: torch.einsum("...c,cd->d...", x.permute(0, 2, 3, 1), w),
        weights((C, 3)),
    ),
    "einsum without an arrow": (lambda x, w: torch.einsum("bic,cj", tokens(x), w), weights((C, 3))),
    "einsum of an image and a whole one": (
        lambda x, y: torch.einsum("nchw,nhwk->nkhw", x, y),
        weights((N, H, W, 3)),
    ),
    "einsum over all pixels": (lambda x: torch.einsum("nchw,ndhw->ncd", x, x.sin()), []),
    "einsum of three": (
        lambda x, w: torch.einsum("nchw,cd,nchw->dn", x, w, x),
        weights((C, 3)),
    ),
    "einsum of queries and keys": (
        lambda x: torch.einsum("bic,bjc->bij", tokens(x), tokens(x).cos()),
        [],
    ),
    "axial attention over rows": (
        lambda x: (
            x.permute(0, 3, 2, 1).reshape(N * W, H, C) @ x.permute(0, 3, 1, 2).reshape(N * W, C, H)
        ),
        [],
    ),
    "the same pixels on another layout": (
        lambda x: torch.einsum("nchw,ndhw->ncdhw", x, F.max_pool2d(x, 3, 1, 1)),
        [],
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, meshes: Meshes) -> None:
    operation, parameters = PRODUCTS[name]
    for mesh in meshes.values():
        image = parameter(random.Random(9), N, C, H, W)
        check(operation, image, parameters, mesh, f"{name} on {mesh.grid} ")


def test_a_matrix_may_make_one_pixel_of_many(meshes: Meshes) -> None:
    """One rank along the dim has it; when each of them kept it, sums counted it several times."""
    products: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "of columns": (lambda x, w: F.linear(x, w).sum((2, 3)), weights((1, W))),
        "of rows": (lambda x, w: (w @ x).softmax(-2).mean(), weights((1, H))),
        "before a dense layer": (
            lambda x, w, v: F.linear(F.linear(x, w).flatten(1), v),
            weights((1, W), (3, C * H)),
        ),
    }
    for name, (product, parameters) in products.items():
        for mesh in meshes.values():
            image = parameter(random.Random(9), N, C, H, W)
            check(product, image, parameters, mesh, f"{name} on {mesh.grid} ")


def test_a_split_dim_of_size_1_is_not_broadcast(meshes: Meshes) -> None:
    """Ranks without that pixel would have had nothing where PyTorch repeats it."""
    for mesh in meshes.values():
        x = shard(torch.rand(N, C, H, W), mesh)
        if mesh.grid[0] > 1:
            with pytest.raises(UnsupportedSpatialOp, match="size 1"):
                torch.matmul(F.avg_pool2d(x, (H, 1)).permute(0, 2, 3, 1), torch.rand(5, C, 3))


def test_a_module_of_linear_layers(meshes: Meshes) -> None:
    """What transformers put behind attention."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(C, 8), nn.GELU(), nn.Linear(8, C)).double()
    for mesh in meshes.values():
        image = parameter(random.Random(9), N, C, H, W)
        check(lambda x: mlp(tokens(x)) + tokens(x), image, [], mesh, f"mlp on {mesh.grid} ")


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x @ x.mT,
        lambda x: torch.einsum("nchw,nchw->nch", x, x),
        lambda x: torch.einsum("nccw->nw", x.permute(0, 2, 2 - 1, 3)),
    ],
)
def test_refused_by_name(call: Callable[[Tensor], Tensor], meshes: Meshes) -> None:
    for mesh in meshes.values():
        with pytest.raises(UnsupportedSpatialOp):
            call(shard(torch.rand(N, C, C, W), mesh))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: tokens(x) @ torch.ones(C + 1, 3),
        lambda x: torch.bmm(tokens(x), torch.ones(C, 3)),
        lambda x: torch.einsum("nchw,dc->ndhw", x, torch.ones(3, C + 1)),
        lambda x: torch.einsum("nchw,dc,e->ndhw", x, torch.ones(3, C)),
        lambda x: torch.einsum("nch,dc->ndh", x, torch.ones(3, C)),
    ],
)
def test_what_pytorch_refuses(call: Callable[[Tensor], Tensor], meshes: Meshes) -> None:
    whole = torch.rand(N, C, H, W)
    for mesh in meshes.values():
        for image in (whole, shard(whole, mesh)):
            with pytest.raises((RuntimeError, ValueError)):
                call(image)


def split_within_and_by_windows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Queries that are one small map, and keys of windows of a large one: (windows, 4, C) each."""
    small = F.avg_pool2d(x, 3).permute(0, 2, 3, 1)
    queries = small.repeat_interleave(9, 0).reshape(9 * len(x), 4, C)
    windows = x.permute(0, 2, 3, 1).view(len(x), 3, 2, 3, 2, C).permute(0, 1, 3, 2, 4, 5)
    return queries, windows.reshape(9 * len(x), 4, C)


WINDOWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "queries and keys": lambda q, k: q @ k.mT,
    "keys and queries": lambda q, k: torch.einsum("bse,ble->bls", k, q),
    "attention": lambda q, k: (q @ k.mT).softmax(-1) @ k.sin(),
    "fused attention": lambda q, k: F.scaled_dot_product_attention(q, k, k.sin()),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_operands_that_are_split_along_other_letters(name: str, meshes: Meshes) -> None:
    image = parameter(random.Random(1), N, C, 6, 6)
    for mesh in meshes.values():
        check(
            lambda x: WINDOWS[name](*split_within_and_by_windows(x)),
            *(image, [], mesh, f"{name} on {mesh.grid} "),
        )
        if mesh.grid_comm.size > 1:
            found = WINDOWS[name](*split_within_and_by_windows(shard(image, mesh)))
            assert found.spatial_dims.at == (-3, -3)


@pytest.mark.parametrize("dims", [1, 3])
def test_of_signals_and_volumes(dims: int) -> None:
    letters = "dhw"[:dims]
    (weight,) = weights((3, 4))
    products: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "linear of tokens": lambda x, w: F.linear(tokens(x), w),
        "linear of channels": lambda x, w: F.linear(x.movedim(1, -1), w),
        "matmul": lambda x, w: torch.matmul(w, x.flatten(2)),
        "einsum": lambda x, w: torch.einsum(f"nc{letters},oc->no{letters}", x, w),
        "gram": lambda x, w: w @ (x.flatten(2) @ tokens(x)),
        "gram by einsum": lambda x, w: (
            w @ torch.einsum(f"nc{letters},ne{letters}->nce", x, x.exp())
        ),
    }
    for name, product in products.items():
        check_in(dims, product, name, weight)


def test_merged_rows_of_a_volume_times_a_matrix_of_another_width() -> None:
    for mesh in every_mesh(3).values():
        x = shard(torch.rand(N, C, 4, 4, 4), mesh)
        if math.prod(mesh.grid[1:]) > 1:
            with pytest.raises(UnsupportedSpatialOp, match="sums over some split dims"):
                x.flatten(3) @ torch.rand(16, 5)
