"""What tests on split images share: the same operation on one process, and random settings."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import count, product
from math import prod
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

from spatialdl import Mesh, average_gradients, init_mesh, shard, stream
from spatialdl.spatial import SpatialTensor
from spatialdl.spatial.random import keyed
from tests.mpi.device import DEVICE, CarriedOver

TOLERANCE = 1e-9
Operation = Callable[..., Tensor]


CHOSEN_GRIDS = os.environ.get("SPATIALDL_GRIDS", "")
ON_TILES = CHOSEN_GRIDS == "tiles"
RANKS = 4 if ON_TILES else MPI.COMM_WORLD.size


class Tiles(NamedTuple):
    """A grid of virtual tiles in this process, which stands for a mesh in `check`."""

    grid: tuple[int, ...]


Meshes = dict[tuple[int, ...], Mesh]


@cache
def every_mesh(dims: int = 2) -> Meshes:
    """All grids of so many spatial dims over all ranks."""
    grids = product(range(1, RANKS + 1), repeat=dims)
    make: Any = Tiles if ON_TILES else init_mesh
    return {grid: make(grid) for grid in grids if prod(grid) == RANKS}


Grids = tuple[tuple[int, ...], ...]

GRIDS: dict[tuple[int, int], tuple[Grids, ...]] = {
    (2, 3): (((2, 1, 1), (1, 2, 1)), ((1, 2, 1), (1, 1, 2)), ((1, 1, 2), (2, 1, 1))),
    (3, 3): (((3, 1, 1), (1, 3, 1)), ((1, 3, 1), (1, 1, 3)), ((1, 1, 3), (3, 1, 1))),
    (4, 2): (((2, 2), (4, 1)), ((2, 2), (1, 4))),
    (4, 3): (((2, 2, 1), (1, 1, 4)), ((1, 2, 2), (4, 1, 1)), ((2, 1, 2), (1, 4, 1))),
}
"""By ranks and dims: the grids of the first case of a parametrized test, of the second, and so on.

Other numbers of ranks and tests without parameters take every grid; so do all tests if
SPATIALDL_GRIDS is "all". If it is "tiles", tests with this mark run on the grids of four ranks, as
virtual tiles of one process: a fifth of the time of four ranks, which leave these tests out.
"""


class _Rows:
    """Rows of `GRIDS`, from the number of the running test's case on."""

    numbers = count()


@pytest.fixture(autouse=True)
def grids_of_the_case(request: pytest.FixtureRequest) -> None:
    """Cases of a test, and calls of `some_meshes` within one, take the rows of `GRIDS` in turn."""
    case = getattr(request.node, "callspec", None)
    # arguments that are parametrized together have the same number
    _Rows.numbers = count(sum(set(case.indices.values())) if case else 0)


def some_meshes(dims: int) -> Meshes:
    """Those of the next row of `GRIDS`."""
    found = every_mesh(dims)
    rows = GRIDS.get((RANKS, dims))
    if rows is None or CHOSEN_GRIDS == "all":
        return found
    return {grid: found[grid] for grid in rows[next(_Rows.numbers) % len(rows)]}


def in_all_dims(sample: int, proof: int) -> pytest.MarkDecorator:
    """A test of images with any seed, and of signals and volumes with a third as many."""
    fewer = seeds(max(1, sample // 3), max(1, proof // 3))
    cases = [(2, seed) for seed in seeds(sample, proof)]
    cases += [(dims, seed) for dims in (1, 3) for seed in fewer]
    return pytest.mark.parametrize(("dims", "seed"), list(map(_flat, cases)))


def _flat(case: tuple[int, Any]) -> Any:
    dims, seed = case
    return case if isinstance(seed, int) else pytest.param(dims, *seed.values, marks=seed.marks)


def functional(name: str, dims: int) -> Operation:
    """``functional("conv", 2)`` is `F.conv2d`."""
    found: Operation = getattr(F, f"{name}{dims}d")
    return found


@pytest.fixture
def meshes(request: pytest.FixtureRequest, grids_of_the_case: None) -> Meshes:
    """Every grid; for a case of a parametrized test that is not slow, those of a row of `GRIDS`."""
    parametrized = hasattr(request.node, "callspec")
    if not parametrized or request.node.get_closest_marker("slow"):
        return every_mesh()
    return some_meshes(2)


def several_ranks(meshes: dict[tuple[int, int], Mesh]) -> list[Mesh]:
    """Those where a tile is not the whole image, which PyTorch treats as any other."""
    return [mesh for mesh in meshes.values() if mesh.size > 1]


def mean_over_ranks(grads: Sequence[Tensor], mesh: Mesh) -> list[Tensor]:
    holder = nn.Module()
    for number, grad in enumerate(grads):
        parameter = nn.Parameter(torch.zeros_like(grad))
        parameter.grad = grad.clone()
        holder.register_parameter(f"of_{number}", parameter)
    average_gradients(holder, mesh)
    return [parameter.grad for parameter in holder.parameters()]


def close(ours: Tensor, plain: Tensor, what: str) -> None:
    assert ours.shape == plain.shape, what
    ours = ours.cpu() if plain.is_cpu else ours
    torch.testing.assert_close(ours, plain, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m: what + m)


def check(
    operation: Operation,
    image: Tensor,
    parameters: Sequence[Tensor],
    meshes: Mesh | Tiles | Meshes,
    what: str,
) -> None:
    """Value, gradient of the image and averaged gradients of the parameters, on each mesh."""
    leaves = [image, *parameters]
    plain_leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    plain = operation(*plain_leaves)
    upstream = torch.randn(
        plain.shape, dtype=plain.dtype, generator=torch.Generator().manual_seed(1)
    )
    expected = torch.autograd.grad((plain * upstream).sum(), plain_leaves)

    for mesh in meshes.values() if isinstance(meshes, dict) else [meshes]:
        where = f"{what} on {mesh.grid}: "
        if isinstance(mesh, Tiles):
            ours, grads = on_tiles(operation, leaves, upstream, mesh.grid)
            close(ours, plain, f"{where}value ")
            for number, (grad, wanted) in enumerate(zip(grads, expected, strict=True)):
                close(grad, wanted, f"{where}gradient {number} ")
            continue
        our_leaves = [leaf.to(DEVICE, copy=True).requires_grad_() for leaf in leaves]
        with CarriedOver() if DEVICE.type != "cpu" else nullcontext():
            ours = operation(shard(our_leaves[0], mesh), *our_leaves[1:])
        assert ours.shape == plain.shape, where
        is_split = isinstance(ours, SpatialTensor)
        close(ours.full_tensor() if is_split else ours, plain, f"{where}value ")
        grads = torch.autograd.grad((ours * upstream.to(DEVICE)).sum(), our_leaves)
        close(grads[0], expected[0], f"{where}gradient of the image ")
        means = mean_over_ranks(grads[1:], mesh) if parameters else ()
        for number, (grad, wanted) in enumerate(zip(means, expected[1:], strict=True)):
            close(grad, wanted, f"{where}gradient of parameter {number} ")


class _Network(nn.Module):
    def __init__(self, operation: Operation, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self.operation = operation
        self.parameters_in_order = nn.ParameterList(nn.Parameter(one.clone()) for one in parameters)

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(x, *self.parameters_in_order)


def on_tiles(
    operation: Operation, leaves: Sequence[Tensor], upstream: Tensor, grid: tuple[int, ...]
) -> tuple[Tensor, list[Tensor]]:
    """The value, and the gradients of the image and the parameters."""
    network, image = _Network(operation, leaves[1:]), leaves[0].clone().requires_grad_()
    ours = stream(network, image, grid)
    (ours * upstream).sum().backward()
    return ours, [image.grad, *(one.grad for one in network.parameters())]


def same(operation: Callable[[Tensor], Tensor], whole: Tensor, meshes: dict, what: str) -> None:
    """Without gradients, which whole numbers and truths do not have; not a number is itself."""
    expected = operation(whole)
    for mesh in meshes.values():
        ours = operation(shard(whole.to(DEVICE), mesh))
        full = (ours.full_tensor() if isinstance(ours, SpatialTensor) else ours).cpu()
        where = f"{what} on {mesh.grid} "
        torch.testing.assert_close(
            full, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m, w=where: w + m
        )


class Setting(NamedTuple):
    mesh: Mesh
    image: Tensor
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{tuple(self.image.shape)} on {self.mesh.grid}, kernel {self.kernel}, stride "
            f"{self.stride}, padding {self.padding}, dilation {self.dilation}"
        )


CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def draw(rng: random.Random, meshes: Meshes, pooling: bool = False) -> Setting:
    """Anything that PyTorch takes, on images from one pixel a rank."""
    grid = rng.choice(sorted(meshes))
    dims = len(grid)
    while True:
        size = [rng.randint(max(2, n), rng.choice((8, 40 if dims < 3 else 12))) for n in grid]
        kernel = tuple(rng.randint(1, most) for most in (7, 5, 3)[:dims])
        most = [k // 2 for k in kernel] if pooling else [5, 4, 2][:dims]
        padding = tuple(rng.randint(0, n) for n in most)
        dilation = tuple(rng.choice((1, 1, 2, 3)[: 4 - (k > 0)]) for k in range(dims))
        reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
        if all(n + 2 * p >= r for n, p, r in zip(size, padding, reach, strict=True)):
            break
    stride = tuple(rng.randint(1, most) for most in (4, 3, 2)[:dims])
    generator = torch.Generator().manual_seed(rng.randint(0, 1000))
    image = torch.randn(2, 4, *size, dtype=torch.float64, generator=generator)
    if rng.random() < 0.3 and dims in CHANNELS_LAST:
        image = image.contiguous(memory_format=CHANNELS_LAST[dims])
    return Setting(meshes[grid], image, kernel, stride, padding, dilation)


def parameter(rng: random.Random, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randint(0, 1000))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def drawn(seed: int, *shape: int) -> Tensor:
    return parameter(random.Random(seed), *shape)


def check_keyed(
    operation: Operation,
    size: Sequence[int],
    shapes: Sequence[Sequence[int]],
    meshes: Meshes,
    name: str,
) -> None:
    """`check` of images and parameters of these shapes, with the random numbers of one step."""
    values = [drawn(number, *shape) for number, shape in enumerate(shapes)]

    def run(*inputs: Tensor) -> Tensor:
        with keyed(1, 2):
            return operation(*inputs)

    check(run, drawn(9, *size), values, meshes, name)


def seeds(sample: int, proof: int) -> list[object]:
    """The first are always tried, all of them by the slow tests."""
    return [*range(sample), *slow_cases(range(sample, proof))]


def slow_cases(cases: Iterable[object]) -> list[object]:
    """Those of a longer proof; none where slow tests are left out, as they take long to collect."""
    if os.environ.get("SPATIALDL_SLOW", "0") == "0":
        return []
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def storage(value: Tensor) -> int:
    """Where the memory of a tensor begins."""
    return value.untyped_storage().data_ptr()


def kept_for_backward(operation: Operation, *inputs: Tensor) -> dict[int, int]:
    """The memory that autograd keeps of an operation: where it begins, and its bytes."""
    kept: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        tile = value.to_local() if isinstance(value, SpatialTensor) else value
        if tile.nbytes:
            kept[storage(tile)] = tile.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        result = operation(*inputs)
    assert result.requires_grad
    return kept
