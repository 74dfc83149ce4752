"""Reductions of a split image against one process in float64: values and gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

from spatialdl import SpatialTensor, UnsupportedSpatialOp, shard
from tests.mpi.equality import Operation, check, check_in, parameter, same

DIMS = [None, 0, 1, 2, 3, (2, 3), (-1, -2), (0, 2, 3), (1, 2), (0, 1)]
OVER_SOME: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "Tensor.sum": Tensor.sum,
    "mean": torch.mean,
    "Tensor.mean": Tensor.mean,
    "nansum": torch.nansum,
    "nanmean": torch.nanmean,
    "amax": lambda x, dim, keepdim: torch.amax(x, () if dim is None else dim, keepdim),
    "Tensor.amin": lambda x, dim, keepdim: x.amin(() if dim is None else dim, keepdim),
    "var": torch.var,
    "var, biased": lambda x, dim, keepdim: x.var(dim, False, keepdim),
    "var, correction": lambda x, dim, keepdim: x.var(dim, correction=0.5, keepdim=keepdim),
    "std": torch.std,
    "Tensor.std": lambda x, dim, keepdim: x.std(dim, keepdim=keepdim),
    "var_mean": lambda x, dim, keepdim: sum(torch.var_mean(x, dim, keepdim=keepdim)),
    "std_mean": lambda x, dim, keepdim: sum(torch.std_mean(x, dim, correction=0, keepdim=keepdim)),
    "norm": lambda x, dim, keepdim: x.norm(2, dim=dim, keepdim=keepdim),
    "torch.norm": lambda x, dim, keepdim: torch.norm(x, 1, dim, keepdim),
    "linalg.norm": lambda x, dim, keepdim: (
        torch.linalg.norm(x.tanh(), None, dim, keepdim)
        if dim is None or isinstance(dim, int) or len(dim) < 3
        else x.sum(dim, keepdim)
    ),
    "vector_norm 3": lambda x, dim, keepdim: torch.linalg.vector_norm(x, 3, dim, keepdim),
    "vector_norm 0.5": lambda x, dim, keepdim: torch.linalg.vector_norm(x, 0.5, dim, keepdim),
    "vector_norm -1": lambda x, dim, keepdim: torch.linalg.vector_norm(x, -1, dim, keepdim),
    "vector_norm 0": lambda x, dim, keepdim: torch.linalg.vector_norm(x, 0, dim, keepdim) + x.sum(),
    "vector_norm inf": lambda x, dim, keepdim: torch.linalg.vector_norm(
        x, float("inf"), dim, keepdim
    ),
    "vector_norm -inf": lambda x, dim, keepdim: torch.linalg.vector_norm(
        x, -float("inf"), dim, keepdim
    ),
    "logsumexp": lambda x, dim, keepdim: torch.logsumexp(
        x, tuple(range(x.dim())) if dim is None else dim, keepdim
    ),
}
COUNTS: dict[str, Callable[..., Tensor]] = {
    "any": lambda x, dim, keepdim: torch.any(x > 1, dim=dim, keepdim=keepdim),
    "all": lambda x, dim, keepdim: (x > -1).all(dim=dim, keepdim=keepdim),
    "any of numbers": lambda x, dim, keepdim: x.any(dim=dim, keepdim=keepdim),
    "count_nonzero": lambda x, dim, keepdim: torch.count_nonzero(x > 0.3, dim),
    "sum of truths": lambda x, dim, keepdim: (x > 0).sum(dim, keepdim),
    "sum of whole numbers": lambda x, dim, keepdim: (10 * x).int().sum(dim, keepdim),
}
OVER_ONE: dict[str, Callable[..., Tensor]] = {
    "prod": torch.prod,
    "Tensor.prod": Tensor.prod,
    "max": lambda x, dim, keepdim: torch.max(x, dim, keepdim).values,
    "Tensor.min": lambda x, dim, keepdim: x.min(dim=dim, keepdim=keepdim)[0],
    "aminmax": lambda x, dim, keepdim: sum(torch.aminmax(x, dim=dim, keepdim=keepdim)),
}
WHOLE: dict[str, Operation] = {
    "sum": lambda x: x.sum(),
    "mean": torch.mean,
    "max": lambda x: x.max(),
    "torch.min": torch.min,
    "amax of rounded": lambda x: (x * 2).round().amax((2, 3)) + 0 * x.sum(),
    "max of equals": lambda x: x.clamp(max=0.1).max(),
    "amin of equals": lambda x: x.clamp(min=0.1).amin((0, 2)),
    "prod": torch.prod,
    "prod with a zero": lambda x: (x - x.detach().max()).prod(),
    "prod with zeros": lambda x: x.relu().prod(2),
    "var": torch.var,
    "std, biased": lambda x: x.std(False),
    "std of equals": lambda x: (0 * x + 3).std((2, 3)),
    "norm of zeros": lambda x: (0 * x).norm(),
    "norm": lambda x: x.norm(),
    "norm 1": lambda x: x.norm(1),
    "sum in another type": lambda x: x.sum((2, 3), dtype=torch.float64),
    "mean in another type": lambda x: x.mean((2, 3), dtype=torch.float64),
    "numpy's names": lambda x: x.mean(axis=(2, 3), keepdims=True),
    "by name": lambda x: torch.sum(input=x, dim=3),
    "normalize": F.normalize,
    "normalize over rows": lambda x: F.normalize(x, dim=2),
    "normalize over the image": lambda x: F.normalize(x, p=3.0, dim=(2, 3)),
    "cosine-like": lambda x: (x * x).sum(1) / x.norm(dim=1).clamp_min(1e-8),
    "back on the image": lambda x: x - x.mean((2, 3), keepdim=True),
    "back on the image, rows": lambda x: x * x.mean(2, keepdim=True) + x.amax(3, keepdim=True),
    "any of no dims, which is each by itself": lambda x: x * torch.any(x > 0, dim=()),
    "all of no dims": lambda x: x * (x > 0).all(dim=()),
    "sum of no dims, which is of all": lambda x: torch.sum(x, ()) + x.nansum(dim=[]),
    "mean of no dims": lambda x: torch.mean(x, dim=()) + torch.nanmean(x, ()),
    "twice": lambda x: x.mean(1).amax(2),
    "nansum": lambda x: torch.where(x > 0, x, float("nan")).nansum((2, 3)),
    "nanmean": lambda x: torch.where(x > -0.5, x, float("nan")).nanmean((1, 2)),
    "logsumexp where much is -inf": lambda x: (
        x.masked_fill(x < 0.5, float("-inf")).logsumexp((2, 3)).clamp(min=-9)
    ),
    "logsumexp of large ones": lambda x: torch.logsumexp(1000 * x, 2),
    "AdaptiveAvgPool2d, flatten": lambda x: nn.AdaptiveAvgPool2d(1)(x).flatten(1),
    "cumsum": lambda x: x.cumsum(1) + torch.cumprod(x, dim=0),
    "sort": lambda x: torch.sort(x, 1, descending=True)[0],
    "topk": lambda x: x.topk(2, dim=1).values,
    "median": lambda x: x.median(1)[0] + x.kthvalue(2, 1).values,
    "cummax": lambda x: x.cummax(dim=1)[0],
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "maximum": lambda x: torch.max(x, -x) + x.min(x * x),
}
PLACES: dict[str, Operation] = {
    "argmax of channels": lambda x: x.argmax(1),
    "argmin of channels": lambda x: torch.argmin(x, 1, True),
    "argmax of rows": lambda x: x.argmax(2),
    "argmax of columns": lambda x: x.argmax(dim=-1, keepdim=True),
    "argmin of all": torch.argmin,
    "argmax of all": lambda x: x.argmax(),
    "max, places": lambda x: x.max(3)[1],
    "min, places of channels": lambda x: x.min(1).indices,
    "sort, places": lambda x: x.sort(dim=1, stable=True).indices,
}


def image(seed: int, size: tuple[int, int]) -> Tensor:
    return parameter(random.Random(seed), 2, 3, *size)


def few_pixels(x: Tensor) -> Tensor:
    """Fewer pixels than ranks: some have none."""
    return F.max_pool2d(x, 4)


@pytest.mark.parametrize("name", OVER_SOME)
def test_over_any_dims(name: str, meshes: dict) -> None:
    """The dims of size 1 are kept for every other one."""
    function = OVER_SOME[name]
    for mesh in meshes.values():
        for number, dim in enumerate(DIMS):
            keepdim = number % 2 == 0
            what = f"{name} over {dim} on {mesh.grid}"
            check(lambda x, d=dim, k=keepdim: function(x, d, k), image(5, (7, 5)), [], mesh, what)
        for dim in ((2, 3), 2):
            check(
                lambda x, d=dim: function(few_pixels(x), d, False),
                image(6, (9, 8)),
                [],
                mesh,
                f"{name} over {dim} of few pixels on {mesh.grid}",
            )


@pytest.mark.parametrize("name", OVER_ONE)
def test_over_one_dim(name: str, meshes: dict) -> None:
    if name == "aminmax" and torch.__version__ < "2.13":
        pytest.skip("older PyTorch has no gradient of it")
    function = OVER_ONE[name]
    for mesh in meshes.values():
        for dim in range(-1, 4):
            keepdim = dim % 2 == 0
            operation = partial(few_or_all, function=function, dim=dim, keepdim=keepdim)
            what = f"{name} over {dim} on {mesh.grid}"
            check(partial(operation, few=False), image(5, (7, 5)), [], mesh, what)
            check(partial(operation, few=True), image(6, (9, 8)), [], mesh, f"{what}, few pixels")


def few_or_all(
    x: Tensor, function: Callable[..., Tensor], dim: int, keepdim: bool, few: bool
) -> Tensor:
    return function(few_pixels(x) if few else x, dim, keepdim)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("size", [(11, 7), (4, 4)])
def test_reductions(name: str, size: tuple[int, int], meshes: dict) -> None:
    for mesh in meshes.values():
        check(WHOLE[name], image(5, size), [], mesh, f"{name} on {mesh.grid} ")


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str, meshes: dict) -> None:
    for dim in [None, 0, 1, 2, -1, (2, 3), (0, 1, 2)]:
        for keepdim in (False, True):
            if dim is None and keepdim:
                continue

            def operation(x: Tensor, d: object = dim, k: bool = keepdim) -> Tensor:
                return COUNTS[name](x, d, k)

            same(operation, image(3, (6, 5)), meshes, f"{name} {dim} {keepdim}")


@pytest.mark.parametrize("name", PLACES)
def test_places(name: str, meshes: dict) -> None:
    same(PLACES[name], image(4, (9, 7)), meshes, name)
    same(PLACES[name], image(4, (9, 7)).round(), meshes, f"{name}, equals")
    same(lambda x: PLACES[name](few_pixels(x)), image(4, (9, 8)), meshes, f"{name}, few pixels")


def test_integer_maps(meshes: dict) -> None:
    """(N, H, W)"""
    labels = (10 * parameter(random.Random(1), 3, 8, 5)).long()
    operations: list[Operation] = [
        lambda x: x.sum((1, 2)),
        lambda x: x.amax(2),
        lambda x: x.max(),
        lambda x: x.float().mean(1),
        lambda x: (x > 3).any(0),
        lambda x: x.argmax(1),
        lambda x: x.prod(2),
    ]
    for number, operation in enumerate(operations):
        same(operation, labels, meshes, f"operation {number}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(dtype: torch.dtype, meshes: dict) -> None:
    whole = image(5, (11, 7)).to(dtype)
    for name, function in OVER_SOME.items():
        expected = function(whole.float(), (2, 3), False)
        for mesh in meshes.values():
            ours = function(shard(whole, mesh), (2, 3), False)
            assert ours.dtype == dtype, name
            tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
            if dtype != torch.float32:
                tolerance = {"rtol": 3e-2, "atol": 3e-2}
            torch.testing.assert_close(
                ours.float(), expected, msg=lambda m, n=name: n + m, **tolerance
            )


def test_what_a_reduction_gives_is_whole_and_the_same_everywhere(
    meshes: dict, world: MPI.Intracomm
) -> None:
    for mesh in meshes.values():
        x = shard(image(0, (9, 9)), mesh)
        for result in (F.adaptive_avg_pool2d(x, 1), x.mean(2), x.std(), x.amax(-1), x.norm()):
            assert type(result) is Tensor
            assert all(torch.equal(result, other) for other in world.allgather(result))
        assert isinstance(x.mean(1), SpatialTensor)
        assert x.mean(1).shape == (2, 9, 9)


REFUSED: list[Operation] = [
    lambda x: x.cumsum(2),
    lambda x: torch.cumprod(x, dim=-1),
    lambda x: x.sort(),
    lambda x: x.sort(descending=True),
    lambda x: torch.topk(x, 1),
    lambda x: x.median(),
    lambda x: x.kthvalue(1, 3),
    lambda x: x.argsort(dim=2),
    lambda x: x.quantile(0.5),
    lambda x: x.cummax(3)[0],
    lambda x: torch.linalg.norm(x, 2, (2, 3)),
    lambda x: torch.norm(x, "nuc", (2, 3)),
    lambda x: torch.sum(x, 2, out=torch.empty(())),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_refused(number: int, meshes: dict) -> None:
    for mesh in meshes.values():
        with pytest.raises(UnsupportedSpatialOp, match="on an image split"):
            REFUSED[number](shard(image(0, (6, 6)), mesh))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.sum(4),
        lambda x: x.mean((1, 1)),
        lambda x: x.long().mean(),
        lambda x: x.amax((2, 2)),
        lambda x: x.max(5),
        lambda x: x.sum(1, 2, 3),
    ],
)
def test_what_pytorch_refuses_is_refused(call: Operation, meshes: dict) -> None:
    kinds = (IndexError, RuntimeError, TypeError)
    with pytest.raises(kinds) as plain:
        call(image(0, (6, 6)))
    # of integers, PyTorch 2.15 raises NotImplementedError for data, and RuntimeError without
    (kind,) = (kind for kind in kinds if issubclass(plain.type, kind))
    for mesh in meshes.values():
        with pytest.raises(kind):
            call(shard(image(0, (6, 6)), mesh))


def test_variance_where_the_mean_is_a_thousand_deviations(meshes: dict) -> None:
    whole = 1000 + image(0, (32, 32)).float()
    for mesh in meshes.values():
        ours = shard(whole, mesh).var((2, 3))
        torch.testing.assert_close(ours.double(), whole.double().var((2, 3)), rtol=1e-5, atol=0)


REARRANGED: dict[str, Operation] = {
    "channels at the end": lambda x: x.permute(0, 2, 3, 1),
    "columns first": lambda x: x.permute(3, 0, 1, 2),
    "rows and columns swapped": lambda x: x.transpose(2, 3),
    "tokens": lambda x: x.flatten(2).transpose(1, 2),
    "tokens at the end": lambda x: x.flatten(2),
    "samples and tokens": lambda x: x.permute(0, 2, 3, 1).flatten(0, 2),
    "samples and rows": lambda x: x.transpose(1, 2).flatten(0, 1),
}
OF_REARRANGED: dict[str, Callable[..., Tensor]] = {
    "mean": lambda x, dim: x.mean(dim),
    "sum": lambda x, dim: x.sum(dim, keepdim=True),
    "amax": lambda x, dim: x.amax(dim),
    "max": lambda x, dim: x.max(dim)[0],
    "std": lambda x, dim: x.std(dim),
    "norm": lambda x, dim: x.norm(dim=dim),
    "logsumexp": lambda x, dim: x.logsumexp(dim),
    "prod": lambda x, dim: x.prod(dim),
}


@pytest.mark.parametrize("place", REARRANGED)
@pytest.mark.parametrize("name", OF_REARRANGED)
def test_rows_and_columns_at_other_dims(name: str, place: str, meshes: dict) -> None:
    rearranged, reduce = REARRANGED[place], OF_REARRANGED[name]
    whole = image(5, (7, 5))
    for mesh in meshes.values():
        for dim in range(rearranged(whole).dim()):
            what = f"{name} of {place} over {dim} on {mesh.grid}"
            check(lambda x, d=dim: reduce(rearranged(x), d), whole, [], mesh, what)
            places = rearranged(shard(whole, mesh)).argmax(dim)
            full = places.full_tensor() if isinstance(places, SpatialTensor) else places
            assert torch.equal(full, rearranged(whole).argmax(dim)), what


@pytest.mark.parametrize("dims", [1, 3])
def test_of_signals_and_volumes(dims: int) -> None:
    """Over every choice of spatial dims."""
    for count in range(1, 1 + dims):
        for over in combinations(range(2, 2 + dims), count):

            def operation(x: Tensor, over: tuple[int, ...] = over) -> Tensor:
                kept = x.mean(over, keepdim=True) + x.logsumexp(over, keepdim=True)
                return x * kept + x.amax(over, keepdim=True) + x.var(over, keepdim=True)

            check_in(dims, operation, f"over {over}")
    check_in(dims, lambda x: x.max(-1, True).values + x.prod(dim=2, keepdim=True), "over one")
    check_in(dims, lambda x: x.flatten(2).var(-1) + x.flatten(2).amax(-1), "of tokens")
