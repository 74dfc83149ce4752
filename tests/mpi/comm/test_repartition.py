"""Repartition: forward slices the padded whole image, backward is the adjoint."""

from __future__ import annotations

import random
from itertools import product
from math import prod

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor

from spatialdl.comm.boxed import BoxedTensor, Exchange
from spatialdl.comm.exchange_strategies import STRATEGIES
from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.plan import Plan, plan_for
from spatialdl.comm.repartition import move, move_back, repartition, view_of
from spatialdl.layout.layout import Box, Layout, empty_box, even_bounds
from tests.mpi.equality import check

MOVED = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]


def cut(rng: random.Random, size: int, parts: int) -> tuple[int, ...]:
    """Even, or anywhere: parts may be empty."""
    if rng.random() < 0.5:
        return even_bounds(size, parts)
    return (0, *sorted(rng.randint(0, size) for _ in range(parts - 1)), size)


def draw_owned(rng: random.Random, ranks: int) -> tuple[Box, ...]:
    """Of one to three spatial dims."""
    dims = rng.randint(1, 3)
    size = rng.randint(1, 4), *(rng.randint(1, 20) for _ in range(dims))
    grids = [g for g in product(range(1, ranks + 1), repeat=1 + dims) if prod(g) == ranks]
    samples, *cuts = (cut(rng, n, p) for n, p in zip(size, rng.choice(grids), strict=True))
    return Layout(samples, tuple(cuts)).boxes


def draw_needed(rng: random.Random, image: Box) -> Box:
    """Any box, up to far outside the image; now and then none."""
    if rng.random() < 0.1:
        return empty_box(len(image.spatial))
    ends = [sorted(rng.randint(0, image[0][1]) for _ in range(2))]
    ends += [sorted(rng.randint(-5, n + 5) for _ in range(2)) for _, n in image.spatial]
    return Box((start, stop) for start, stop in ends)


def whole(owned: tuple[Box, ...]) -> Box:
    """The image that boxes make up."""
    return Box((0, max(stop for _, stop in dim)) for dim in zip(*owned, strict=True))


def draw_plan(seed: int, world: MPI.Intracomm) -> Plan:
    rng = random.Random(seed)
    owned = draw_owned(rng, world.size)
    return plan_for(owned, tuple(draw_needed(rng, whole(owned)) for _ in owned), world.rank)


def image_of(plan: Plan, dtype: torch.dtype, channels: int = 3) -> Tensor:
    samples, *size = whole(plan.owned).shape
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randn(samples, channels, *size, dtype=torch.float64, generator=draw)
    return (pixels * 100).to(dtype)


def tile_of(image: Tensor, plan: Plan) -> Tensor:
    return view_of(image, whole(plan.owned), plan.own).clone()


def channels_last(x: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if x.dim() in formats else x


def sliced(image: Tensor, plan: Plan, fill: float) -> Tensor:
    """What the need is, cut from the whole image with a frame of `fill` around it."""
    frame = 30
    samples, *spatial = outer = whole(plan.owned)
    held = Box((samples, *((-frame, stop + frame) for _, stop in spatial)))
    padded = image.new_full((*image.shape[:2], *held.shape[1:]), fill)
    view_of(padded, held, outer).copy_(image)
    return view_of(padded, held, plan.need)


@pytest.mark.parametrize("seed", range(25))
def test_forward_is_slicing_the_padded_image(seed: int, world: MPI.Intracomm) -> None:
    plan = draw_plan(seed, world)
    dtype = MOVED[seed % len(MOVED)]
    image = image_of(plan, dtype)
    tile = tile_of(image, plan)
    if seed % 2:
        tile = channels_last(tile)
    fill = 1.0 if dtype == torch.bool else 7.0
    assert torch.equal(move(world, plan, tile, fill), sliced(image, plan, fill))


@pytest.mark.parametrize("seed", range(25))
def test_backward_is_the_adjoint(seed: int, world: MPI.Intracomm) -> None:
    plan = draw_plan(seed, world)
    draw = torch.Generator().manual_seed(world.rank)
    x = tile_of(image_of(plan, torch.float64), plan)
    moved = move(world, plan, x)
    y = torch.randn(moved.shape, dtype=torch.float64, generator=draw)
    if seed % 2:
        x, y = channels_last(x), channels_last(y)
    back = move_back(world, plan, y)
    assert back.shape == x.shape
    left = world.allreduce((moved * y).sum().item())
    right = world.allreduce((x * back).sum().item())
    assert left == pytest.approx(right, rel=1e-12, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_autograd_takes_the_adjoint(seed: int, world: MPI.Intracomm) -> None:
    plan = draw_plan(100 + seed, world)
    tile = tile_of(image_of(plan, torch.float32), plan).requires_grad_()
    moved = repartition(tile, world, plan, fill=5.0)
    assert torch.equal(moved, move(world, plan, tile.detach(), 5.0))
    grad = torch.full_like(moved, world.rank + 1.0)
    moved.backward(grad)
    assert torch.equal(tile.grad, move_back(world, plan, grad))


@pytest.mark.parametrize("shape", [(2,), (2, 3, 4)])
def test_maps_and_volumes_move_as_images_do(shape: tuple[int, ...], world: MPI.Intracomm) -> None:
    """(N, H, W) and (N, C, D, H, W): only samples, rows and columns are cut."""
    layout = Layout.even(2, (8, 6), (1, world.size))
    needed = (layout.whole, *(empty_box(2),) * (world.size - 1))
    plan = plan_for(layout.boxes, needed, world.rank)
    image = torch.rand(*shape, 8, 6, generator=torch.Generator().manual_seed(0))
    moved = move(world, plan, view_of(image, layout.whole, plan.own).clone())
    assert torch.equal(moved, image if world.rank == 0 else image[:0, ..., :0, :0])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_where_nothing_is_in_the_pieces_nothing_goes_wrong(
    strategy: str, world: MPI.Intracomm
) -> None:
    """Channels are not cut, so pieces without any are in the plan."""
    layout = Layout.even(2, (8, 6), (world.size, 1))
    plan = plan_for(layout.boxes, (layout.whole,) * world.size, world.rank)
    assert plan.communicates
    tile, out = (torch.empty(2, 0, *box.shape[1:]) for box in (plan.own, plan.need))
    comm = MpiCommunicator(MPI.COMM_WORLD)
    for first, then, adjoint in ((tile, out, False), (out, tile, True)):
        sent, received = ((plan.own, plan.need), (plan.need, plan.own))[adjoint]
        sends, receives = [BoxedTensor(first, sent)], [BoxedTensor(then, received)]
        STRATEGIES[strategy](comm, Exchange(plan, sends, receives, tile.device, adjoint)).wait()


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular", "constant"])
def test_an_image_without_samples_is_padded(mode: str, meshes: dict) -> None:
    for mesh in meshes.values():
        image = torch.empty(0, 3, 5, 6, dtype=torch.float64)
        check(lambda x: F.pad(x, (1, 1, 1, 1), mode), image, [], mesh, f"on {mesh.grid}: ")


def test_what_stays_at_home_is_not_sent(world: MPI.Intracomm) -> None:
    boxes = Layout.even(1, (8, 8), (world.size, 1)).boxes
    plan = plan_for(boxes, boxes, world.rank)
    assert not plan.communicates
    tile = torch.rand(1, 2, *plan.own.shape[1:])
    assert torch.equal(move(MPI.COMM_NULL, plan, tile), tile)  # no communicator is touched
