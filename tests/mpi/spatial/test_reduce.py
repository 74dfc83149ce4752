"""Reductions and softmax of a split image against one process: values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor

from spatialdl import SpatialTensor, shard
from tests.mpi.equality import Operation, check, check_keyed, close, drawn, same
from tests.mpi.spatial.shared import Cases, tokens

SIZE = (2, 3, 7, 4)
"""Also one column a rank."""


def few_pixels(x: Tensor) -> Tensor:
    """Fewer pixels than ranks: some have none."""
    return F.max_pool2d(x, 4)


DIMS = [None, 2, -1, (2, 3), (0, 2, 3), (1, 2)]


def vector_norm(order: float) -> Operation:
    return lambda x, dim, keepdim: torch.linalg.vector_norm(x, order, dim, keepdim)


OVER_SOME: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "nansum": torch.nansum,
    "amax": lambda x, dim, keepdim: torch.amax(x, () if dim is None else dim, keepdim),
    "var": torch.var,
    "vector_norm 3": vector_norm(3),
    "logsumexp": lambda x, dim, keepdim: torch.logsumexp(
        x, tuple(range(x.dim())) if dim is None else dim, keepdim
    ),
}
ALIKE: dict[str, Callable[..., Tensor]] = {
    "nanmean": torch.nanmean,
    "Tensor.amin": lambda x, dim, keepdim: x.amin(() if dim is None else dim, keepdim),
    "var, correction": lambda x, dim, keepdim: x.var(dim, correction=0.5, keepdim=keepdim),
    "std": torch.std,
    "var_mean": lambda x, dim, keepdim: sum(torch.var_mean(x, dim, keepdim=keepdim)),
    "linalg.norm": lambda x, dim, keepdim: torch.linalg.norm(x.tanh(), None, dim, keepdim),
    **{f"vector_norm {order}": vector_norm(order) for order in (0.5, -1, torch.inf, -torch.inf)},
}
"""Those that take the way of one of `OVER_SOME`."""

OVER_ONE: dict[str, Callable[..., Tensor]] = {
    "prod": torch.prod,
    "max": lambda x, dim, keepdim: torch.max(x, dim, keepdim).values,
    "Tensor.min": lambda x, dim, keepdim: x.min(dim=dim, keepdim=keepdim)[0],
    "aminmax": lambda x, dim, keepdim: sum(torch.aminmax(x, dim=dim, keepdim=keepdim)),
}


@pytest.mark.tiles
@pytest.mark.parametrize("name", {**OVER_SOME, **ALIKE})
def test_over_any_dims(name: str, meshes: dict) -> None:
    """The dims of size 1 are kept for every other one."""
    function = {**OVER_SOME, **ALIKE}[name]
    for number, dim in enumerate(DIMS if name in OVER_SOME else [2, (2, 3)]):
        over: Operation = lambda x, d=dim, k=number % 2 == 0: function(x, d, k)  # noqa: E731
        check(over, drawn(5, *SIZE), [], meshes, f"{name} over {dim}")
    few: Operation = lambda x: function(few_pixels(x), (2, 3), False)  # noqa: E731
    check(few, drawn(6, 2, 3, 9, 8), [], meshes, f"{name} of few pixels")


@pytest.mark.tiles
@pytest.mark.parametrize("name", OVER_ONE)
def test_over_one_dim(name: str, meshes: dict) -> None:
    if name == "aminmax" and torch.__version__ < "2.13":
        pytest.skip("older PyTorch has no gradient of it")
    function = OVER_ONE[name]
    for dim in (2, -1):
        what = f"{name} over {dim}"
        over: Operation = lambda x, d=dim: function(x, d, d % 2 == 0)  # noqa: E731
        check(over, drawn(5, *SIZE), [], meshes, what)
        few: Operation = lambda x, f=over: f(few_pixels(x))  # noqa: E731
        check(few, drawn(6, 2, 3, 9, 8), [], meshes, f"{what}, few")


WHOLE: dict[str, Operation] = {
    "amax of rounded": lambda x: (x * 2).round().amax((2, 3)) + 0 * x.sum(),
    "max of equals": lambda x: x.clamp(max=0.1).max(),
    "prod with zeros": lambda x: x.relu().prod(2),
    "var": torch.var,
    "std of equals": lambda x: (0 * x + 3).std((2, 3)),
    "norm of zeros": lambda x: (0 * x).norm(),
    "numpy's names": lambda x: x.mean(axis=(2, 3), keepdims=True),
    "normalize": F.normalize,
    "normalize over the image": lambda x: F.normalize(x, p=3.0, dim=(2, 3)),
    "all of no dims": lambda x: x * (x > 0).all(dim=()),
    "sum of no dims, which is of all": lambda x: torch.sum(x, ()) + x.nansum(dim=[]),
    "nansum": lambda x: torch.where(x > 0, x, float("nan")).nansum((2, 3)),
    "nanmean": lambda x: torch.where(x > -0.5, x, float("nan")).nanmean((1, 2)),
    "logsumexp where much is -inf": lambda x: (
        x.masked_fill(x < 0.5, float("-inf")).logsumexp((2, 3)).clamp(min=-9)
    ),
    "logsumexp of large ones": lambda x: torch.logsumexp(1000 * x, 2),
    "cumsum": lambda x: x.cumsum(1) + torch.cumprod(x, dim=0),
    "sort": lambda x: torch.sort(x, 1, descending=True)[0],
    "topk": lambda x: x.topk(2, dim=1).values,
    "median": lambda x: x.median(1)[0] + x.kthvalue(2, 1).values,
    "cummax": lambda x: x.cummax(dim=1)[0],
    "maximum": lambda x: torch.max(x, -x) + x.min(x * x),
}


def extremes_beside_infinities(sign: int) -> Operation:
    def extremes(x: Tensor) -> Tensor:
        far = x.masked_fill(x < 0.3, -torch.inf) * sign
        return (far.max(2) if sign > 0 else far.min(2))[0].sum(1).clamp(-99, 99)

    return extremes


def softmaxes(x: Tensor, dim: int) -> Tensor:
    return x.softmax(dim) + x.log_softmax(dim)


SOFTMAX: dict[str, Operation] = {
    "F.softmax": F.softmax,
    "F.softmin": F.softmin,
    "softmax in another type": lambda x, dim: F.softmax(x, dim, dtype=torch.float64),
    "softmax of large ones": lambda x, dim: F.softmax(1000 * x, dim),
    "masked softmax": lambda x, dim: F.softmax(
        x.masked_fill(x == x.amax(dim, keepdim=True), -torch.inf), dim
    ),
    "softmax of few pixels": lambda x, dim: softmaxes(few_pixels(x), dim),
    "softmax of tokens": lambda x, dim: softmaxes(tokens(x), min(dim, 2)),
    "softmax of channels at the end": lambda x, dim: softmaxes(x.permute(0, 2, 3, 1), dim),
}
CASES: Cases = {
    **{name: (operation, SIZE, []) for name, operation in WHOLE.items()},
    "infinities beside a maximum": (extremes_beside_infinities(1), (2, 3, 9, 8), []),
    "infinities beside a minimum": (extremes_beside_infinities(-1), (2, 3, 9, 8), []),
    **{
        f"{name} over {dim}": (lambda x, f=function, d=dim: f(x, d), (2, 3, 9, 8), [])
        for name, function in SOFTMAX.items()
        for dim in ((0, 1, 2, 3) if "of " in name else (1, 2))
    },
    **{
        f"softmax of maps over {d}": (lambda x, d=d: x[:, 0].softmax(d), (3, 1, 7, 5), [])
        for d in range(3)
    },
}


@pytest.mark.tiles
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, meshes: dict) -> None:
    check_keyed(*CASES[name], meshes, name)


REARRANGED: dict[str, Operation] = {
    "columns first": lambda x: x.permute(3, 0, 1, 2),
    "rows and columns swapped": lambda x: x.transpose(2, 3),
    "tokens": tokens,
    "samples and tokens": lambda x: x.permute(0, 2, 3, 1).flatten(0, 2),
    "samples and rows": lambda x: x.transpose(1, 2).flatten(0, 1),
}


@pytest.mark.parametrize("place", REARRANGED)
def test_rows_and_columns_at_other_dims(place: str, meshes: dict) -> None:
    rearranged, whole = REARRANGED[place], drawn(5, 2, 3, 7, 5)

    def reductions(x: Tensor, dim: int) -> Tensor:
        x = rearranged(x)
        found = x.amax(dim) + 2 * x.max(dim)[0] + x.std(dim) + x.norm(dim=dim) + x.logsumexp(dim)
        return found + x.mean(dim, True).sum(dim) * x.prod(dim) + x.sum(dim, keepdim=True).mean(dim)

    for dim in range(rearranged(whole).dim()):
        check(lambda x, d=dim: reductions(x, d), whole, [], meshes, f"{place} over {dim}")
        same(lambda x, d=dim: rearranged(x).argmax(d), whole, meshes, f"{place} over {dim}")


# --- whole numbers, truths and places, which are equal to the last bit

COUNTS: dict[str, Callable[..., Tensor]] = {
    "any": lambda x, dim, keepdim: torch.any(x > 1, dim=dim, keepdim=keepdim),
    "all": lambda x, dim, keepdim: (x > -1).all(dim=dim, keepdim=keepdim),
    "count_nonzero": lambda x, dim, keepdim: torch.count_nonzero(x > 0.3, dim),
    "sum of truths": lambda x, dim, keepdim: (x > 0).sum(dim, keepdim),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str, meshes: dict) -> None:
    for dim in [None, 0, 2, -1, (2, 3), (0, 1, 2)]:
        for keepdim in {False, dim is not None}:

            def operation(x: Tensor, d: object = dim, k: bool = keepdim) -> Tensor:
                return COUNTS[name](x, d, k)

            same(operation, drawn(3, 2, 3, 6, 5), meshes, f"{name} {dim} {keepdim}")


EXTREMES: dict[str, Operation] = {
    "amin of rows": lambda x: x.amin(2),
    "max": lambda x: x.max(),
    "places of min": lambda x: x.min(3)[1],
    "argmax of rows": lambda x: x.argmax(2),
    "argmax of columns": lambda x: x.argmax(dim=-1, keepdim=True),
    "argmin of all": torch.argmin,
    "places of sort": lambda x: x.sort(dim=1, stable=True).indices,
}
CODED: dict[str, Operation] = {
    "equals": lambda x: x.round(),
    "whole numbers": lambda x: (30 + 10 * x).to(torch.int8),
    "truths": lambda x: x > 0.2,
    "not a number": lambda x: x.masked_fill(x > 0.8, torch.nan),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_and_their_first_places(name: str, meshes: dict) -> None:
    """Not a number is the extreme."""
    extreme = EXTREMES[name]
    for kind, coded in CODED.items():
        if kind == "truths" and name.startswith("arg"):
            continue  # PyTorch has none
        what = f"{name} of {kind}"
        same(lambda x, c=coded: extreme(c(x)), drawn(5, 2, 3, 9, 8), meshes, what)
        few: Operation = lambda x, c=coded: extreme(c(few_pixels(x)))  # noqa: E731
        same(few, drawn(5, 2, 3, 9, 8), meshes, f"{what}, few pixels")


def test_with_a_second_tensor_extremes_are_pairwise(meshes: dict) -> None:
    one, other = drawn(1, 2, 3, 9, 8), drawn(2, 2, 3, 9, 8)
    for mesh in meshes.values():
        x = shard(one, mesh)
        for call in (torch.max, torch.min, Tensor.max, Tensor.min):
            for ours in (call(x, shard(other, mesh)), call(x, other=other)):
                close(ours.full_tensor(), call(one, other), f"{call} on {mesh.grid} ")


REMOVES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "median": lambda x, dim, *more, **named: x.median(dim, *more, **named),
    "mode": lambda x, dim, *more, **named: x.mode(dim, *more, **named),
    "kthvalue": lambda x, dim, *more, **named: x.kthvalue(2, dim, *more, **named),
}
PLACES: dict[int, Operation] = {1: lambda x: x, -3: lambda x: x, 3: lambda x: x.permute(0, 2, 3, 1)}
"""Where the channels are."""


@pytest.mark.parametrize("name", REMOVES)
def test_a_dim_is_kept_if_it_is_asked_for(name: str, meshes: dict) -> None:
    call, whole = REMOVES[name], drawn(5, 2, 3, 9, 7)
    for dim, moved in PLACES.items():
        for given, named in (((), {}), ((False,), {}), ((True,), {}), ((), {"keepdim": True})):

            def both(x: Tensor, d: int = dim, m: Operation = moved, g=given, n=named) -> Tensor:
                values, places = call(m(x), d, *g, **n)
                return values + 100 * places

            same(both, whole, meshes, f"{name} over {dim} {given} {named}")


def test_what_a_reduction_gives_is_whole_and_the_same_everywhere(
    meshes: dict, world: MPI.Intracomm
) -> None:
    for mesh in meshes.values():
        x = shard(drawn(0, 2, 3, 9, 9), mesh)
        for result in (x.mean(2), x.std(), x.amax(-1), x.norm()):
            assert type(result) is Tensor
            assert all(torch.equal(result, other) for other in world.allgather(result))
        assert isinstance(x.mean(1), SpatialTensor)


# --- variances

VARIANCES = {
    "means are half a deviation apart, and those of ranks between them": (
        (torch.float16, 1000, (24, 20), 1e-2),
        (torch.bfloat16, 100, (24, 20), 1e-2),
    ),
    "the mean is a thousand deviations": ((torch.float32, 1000, (32, 32), 1e-5),),
}


@pytest.mark.parametrize("name", VARIANCES)
def test_variances_are_not_rounded_before_they_are_combined(name: str, meshes: dict) -> None:
    for dtype, mean, size, near in VARIANCES[name]:
        whole = (mean + drawn(5, 2, 3, *size)).to(dtype)
        for mesh in meshes.values():
            ours = shard(whole, mesh).var((2, 3))
            torch.testing.assert_close(ours.double(), whole.double().var((2, 3)), rtol=near, atol=0)


def test_a_correction_may_be_more_than_there_are_values(meshes: dict) -> None:
    whole = torch.arange(2.0 * 3 * 6 * 5).double().view(2, 3, 6, 5) % 7
    for correction in (6 * 5, 6 * 5 + 1, 1000):
        assert whole.var((2, 3), correction=correction).isinf().all()
        same(lambda x, c=correction: x.var((2, 3), correction=c), whole, meshes, "var")
        same(lambda x, c=correction: torch.std(x, (2, 3), correction=c), whole, meshes, "std")
    for mesh in meshes.values():
        ours = shard(whole, mesh).var((2, 3), correction=29)
        torch.testing.assert_close(ours, whole.var((2, 3), correction=29))
