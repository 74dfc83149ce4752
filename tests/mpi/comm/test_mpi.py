"""What is MPI's alone; `test_transport` has what both transports do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from spatialdl.comm import check
from spatialdl.comm.boxed import BoxedTensor, Exchange
from spatialdl.comm.exchange import start_exchange
from spatialdl.comm.exchange_strategies import STRATEGIES
from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.plan import Plan, plan_for
from spatialdl.comm.repartition import view_of
from spatialdl.layout.layout import Box, Layout, empty_box
from tests.mpi.one_message import start_receive, start_send
from tests.mpi.waits import told_by_the_first

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
FORWARD, BACKWARD = tuple(range(SIZE)), tuple(range(SIZE))[::-1]
COMM = MpiCommunicator(MPI.COMM_WORLD)

pytestmark = pytest.mark.skipif(SIZE < 2, reason="needs ranks")


@pytest.mark.parametrize(
    ("what", "do", "expected"),
    [
        ("barrier", lambda part: part.barrier(), BACKWARD),
        ("all-reduce", lambda part: part.all_reduce(torch.ones(3)), BACKWARD),
        ("creation of a communicator", lambda part: part.duplicate(), BACKWARD),
        ("creation of a communicator", lambda part: part.subset(BACKWARD), FORWARD),
    ],
)
def test_ranks_of_a_subset_are_told_as_the_world_calls_them(
    what: str,
    do: Callable[[MpiCommunicator], object],
    expected: tuple[int, ...],
    tmp_path: Path,
) -> None:
    """In a subset that has them backwards."""
    part = COMM.subset(BACKWARD)
    wait = told_by_the_first(tmp_path, what, lambda: do(part))
    if wait is not None:
        assert wait.ranks == expected


def test_tensors_that_lie_otherwise_on_other_ranks_are_added_up() -> None:
    values = torch.arange(35.0).view(5, 7)
    own = values.t().contiguous().t() if RANK % 2 else values.clone()
    assert torch.equal(COMM.all_reduce(own), SIZE * values)
    assert torch.equal(own, values)


def test_a_duplicate_has_messages_of_its_own() -> None:
    lanes = [COMM, COMM.duplicate()]
    if RANK == 0:
        sendings = [
            start_send(lane, torch.tensor([[number]]), 1, 5) for number, lane in enumerate(lanes)
        ]
        for sending in sendings:
            sending.wait()
    if RANK == 1:
        for number in (1, 0):  # of one lane, they would come in the order in which they left
            landed = torch.full((1, 1), -1)
            start_receive(lanes[number], landed, 0, 5).wait()
            assert landed.item() == number


def test_the_way_of_exchanges_is_found_out_once() -> None:
    ranks = COMM.duplicate()
    own = [Box(((0, 1), (rank, rank + 1), (0, 4))) for rank in range(SIZE)]
    plan = Plan(own, own[1:] + own[:1], RANK)
    for way in (None, "neighbourhood collective", "packed pieces"):
        ranks.strategy = way
        tile, landed = torch.full((1, 1, 1, 4), float(RANK)), torch.zeros(1, 1, 1, 4)
        sends, receives = [BoxedTensor(tile, plan.own)], [BoxedTensor(landed, plan.need)]
        start_exchange(ranks, Exchange(plan, sends, receives, tile.device)).wait()
        assert landed.unique().tolist() == [(RANK + 1) % SIZE]
        assert ranks.strategy is not None
        assert way in (None, ranks.strategy)


def test_other_threads_run_while_a_rank_waits_for_a_sum_of_objects() -> None:
    """In mpi4py's own `allreduce` they did not: neither a watchdog nor what reads samples ahead."""
    comm = COMM
    if comm.rank == 0:
        call = Thread(target=lambda: [sum(range(3_000_000)), MPI.COMM_WORLD.send("go on", 1, 5)])
        call.start()
    if comm.rank == 1:  # which keeps all others waiting until rank 0's thread has run
        MPI.COMM_WORLD.recv(source=0, tag=5)
    assert comm.allreduce(comm.rank) == sum(range(comm.size))
    if comm.rank == 0:
        call.join()


OWN = [Box(((0, 1), (rank, rank + 1), (0, 4))) for rank in range(SIZE)]


@pytest.fixture
def unchecked() -> Iterator[None]:
    """The check would wait before the exchange does."""
    check.enable(False)
    yield
    check.enable()


@pytest.mark.parametrize("adjoint", [False, True])
def test_ranks_that_are_waited_for_are_told_as_the_world_calls_them(
    adjoint: bool, tmp_path: Path, unchecked: None
) -> None:
    """The world's first rank waits for its last alone, in a subset that has them backwards."""
    part = COMM.subset(range(SIZE)[::-1])
    part.strategy = "a message for each piece"
    first, last = OWN[-1], OWN[0]
    giver, taker = (first, last) if adjoint else (last, first)
    needed = [giver if box == taker else box for box in OWN]
    plan = Plan(OWN, needed, part.rank)
    tile = torch.full((1, 1, 1, 4), float(RANK))
    landed = torch.zeros(1, 1, 1, 4)
    own, need = [BoxedTensor(tile, plan.own)], [BoxedTensor(tile, plan.need)]
    room = [BoxedTensor(landed, plan.own if adjoint else plan.need)]

    def exchange() -> None:
        sends = need if adjoint else own
        exchange = Exchange(plan, sends, room, tile.device, adjoint, name="conv2d")
        start_exchange(part, exchange).wait()

    wait = told_by_the_first(tmp_path, "exchange for conv2d", exchange)
    if wait is not None:
        assert wait.ranks == (SIZE - 1,)
        assert wait.what[-1] == f"exchange for conv2d ({plan.describe()})"
        assert landed.unique().tolist() == [SIZE - 1]


SHAPE = (3, 4, 13, 11)
LAID: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "a part of a larger one": lambda x: x.repeat(2, 2, 2, 2)[
        tuple(slice(n, None) for n in x.shape)
    ],
    "columns first": lambda x: x.mT.contiguous().mT,
}


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
