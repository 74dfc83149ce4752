"""Every exchange strategy moves the same pieces, for tensors of any strides and types."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from spatialdl.comm.boxed import BoxedTensor, Exchange
from spatialdl.comm.exchange_strategies import STRATEGIES
from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.plan import Plan, plan_for
from spatialdl.comm.repartition import view_of
from spatialdl.parallel.layout import Box, Layout, empty_box

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
SHAPE = (3, 4, 13, 11)
LAID: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "a part of a larger one": lambda x: x.repeat(2, 2, 2, 2)[
        tuple(slice(n, None) for n in x.shape)
    ],
    "columns first": lambda x: x.mT.contiguous().mT,
}
COMM = MpiCommunicator(MPI.COMM_WORLD)


def image(rank: int, dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(rank)
    return torch.randint(100, SHAPE, generator=draw).to(dtype)


def plans() -> Iterator[tuple[str, Layout, Plan]]:
    """What all ranks need of all, or the last alone: then those who give get nothing."""
    for grid in ((SIZE, 1), (1, SIZE)):
        layout = Layout.even(SHAPE[0], SHAPE[2:], grid)
        last = (*(empty_box(2),) * (SIZE - 1), layout.whole)
        for who, needed in (("all", (layout.whole,) * SIZE), ("the last", last)):
            yield f"{who} on {grid}", layout, plan_for(layout.boxes, needed, RANK)


def shape_of(box: Box) -> tuple[int, ...]:
    return box.shape[0], SHAPE[1], *box.shape[1:]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_pieces_arrive_whatever_their_strides(strategy: str, dtype: torch.dtype) -> None:
    for needed, layout, plan in plans():
        for name, laid in LAID.items():
            tile = laid(view_of(image(0, dtype), layout.whole, plan.own))
            out = laid(torch.zeros(shape_of(plan.need), dtype=dtype))
            own, window = [BoxedTensor(tile, plan.own)], [BoxedTensor(out, plan.need)]
            STRATEGIES[strategy](COMM, Exchange(plan, own, window, tile.device)).wait()
            if not plan.need.is_empty:
                view_of(out, layout.whole, plan.own).copy_(tile)
            expected = view_of(image(0, dtype), layout.whole, plan.need)
            assert torch.equal(out, expected), f"{name}, needed by {needed}"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_pieces_go_back_to_where_they_came_from(strategy: str) -> None:
    for needed, layout, plan in plans():
        for name, laid in LAID.items():
            out = laid(view_of(image(RANK, torch.float32), layout.whole, plan.need))
            rooms = [
                BoxedTensor(laid(torch.zeros(shape_of(piece.box))), piece.box)
                for piece in plan.sends
            ]
            window = [BoxedTensor(out, plan.need)]
            STRATEGIES[strategy](
                COMM, Exchange(plan, window, rooms, out.device, adjoint=True)
            ).wait()
            for piece, (room, box) in zip(plan.sends, rooms, strict=True):
                expected = view_of(image(piece.peer, torch.float32), layout.whole, box)
                assert torch.equal(room, expected), f"{name}, {needed}, from {piece.peer}"


@pytest.mark.world(2, 3, 4)
def test_ranks_are_called_what_they_are_in_the_world() -> None:
    """Also in a subset of a subset, in whichever order."""
    world = COMM
    assert world.world_ranks == tuple(range(SIZE))
    backwards = world.subset(range(SIZE)[::-1])
    assert backwards.world_ranks == tuple(range(SIZE))[::-1]
    assert backwards.world_ranks[backwards.rank] == RANK
    if backwards.rank < 2:
        assert backwards.subset([1, 0]).world_ranks == (SIZE - 2, SIZE - 1)


@pytest.mark.world(2, 3, 4)
def test_there_is_one_graph_for_all_plans_with_the_same_neighbours() -> None:
    """MPI libraries have few to give away; forward and backward have one each."""
    world = COMM
    graphs = set()
    for size in (8, 12, 16):
        layout = Layout.even(1, (size, 6), (SIZE, 1))
        needed = (*(empty_box(2),) * (SIZE - 1), layout.whole)
        plan = plan_for(layout.boxes, needed, RANK)
        forward, adjoint = world.graph(plan, False), world.graph(plan, True)
        incoming, outgoing, _ = forward.Get_dist_neighbors_count()
        others, is_last = SIZE - 1, RANK == SIZE - 1
        assert (incoming, outgoing) == ((others, 0) if is_last else (0, 1))
        assert adjoint.Get_dist_neighbors_count()[:2] == (outgoing, incoming)
        graphs |= {id(forward), id(adjoint)}
    assert len(graphs) == 2
