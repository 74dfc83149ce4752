from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from spatialdl.comm.boxed import BoxedTensor, Exchange, Route
from spatialdl.comm.exchange import start_exchange
from spatialdl.comm.plan import Plan
from spatialdl.comm.repartition import move, move_back
from spatialdl.comm.turns import Turns
from spatialdl.comm.virtual import Virtual, virtual_ranks
from spatialdl.parallel.layout import Box


def on(count: int, work: Callable[[Virtual], Any]) -> list[Any]:
    turns: Turns[Any] = Turns(count)
    return turns.run([lambda comm=comm: work(comm) for comm in virtual_ranks(count, turns)])


def test_objects_are_copies():
    def work(comm: Virtual) -> Any:
        own = [comm.rank]
        found = comm.allgather(own)
        found[0].append("written")
        comm.barrier()
        return own, comm.bcast({"of": comm.rank}, 2), comm.gather(comm.rank, 1)

    found = on(3, work)
    assert [one[0] for one in found] == [[0], [1], [2]]
    assert [one[1] for one in found] == [{"of": 2}] * 3
    assert [one[2] for one in found] == [None, [0, 1, 2], None]


def test_objects_are_put_together():
    assert on(3, lambda comm: comm.allreduce(comm.rank + 1)) == [6, 6, 6]
    assert on(3, lambda comm: comm.allreduce(comm.rank, operator.sub)) == [-3, -3, -3]
    assert on(2, lambda comm: (comm.nodes(), comm.size, list(comm.world_ranks)))[1] == (
        [0, 0],
        2,
        [0, 1],
    )


def test_sums_and_stacks_of_tensors():
    def work(comm: Virtual) -> Any:
        values = torch.full((2,), float(comm.rank))
        total, stack = comm.all_reduce(values), comm.all_gather(values)
        under_way = comm.start_all_reduce(values)
        under_way.wait()
        total += comm.rank  # of its own
        return total.tolist(), stack.tolist(), values.tolist()

    for rank, (total, stack, values) in enumerate(on(3, work)):
        assert total == [3 + rank] * 2
        assert stack == [[0, 0], [1, 1], [2, 2]]
        assert values == [3, 3]


def test_subsets_talk_among_themselves():
    def work(comm: Virtual) -> Any:
        ranks = [2, 0] if comm.rank != 1 else [1]
        few = comm.subset(ranks)
        again = few.duplicate()
        return few.rank, list(again.world_ranks), few.allgather(comm.rank), again.allgather(5)

    assert on(3, work) == [
        (1, [2, 0], [2, 0], [5, 5]),
        (0, [1], [1], [5]),
        (0, [2, 0], [2, 0], [5, 5]),
    ]


def test_a_move_and_its_adjoint():
    """<R x, y> == <x, R* y> of tiles with halos, some of them empty."""
    owned = tuple(Box(((0, 1), bounds)) for bounds in ((0, 4), (4, 4), (4, 9)))
    needed = tuple(Box(((0, 1), bounds)) for bounds in ((-1, 6), (3, 5), (2, 10)))
    draw = torch.Generator().manual_seed(0)
    whole = torch.randn(1, 9, generator=draw, dtype=torch.float64)
    windows = [
        torch.randn(1, *box.shape[1:], generator=draw, dtype=torch.float64) for box in needed
    ]

    def work(comm: Virtual) -> tuple[float, float]:
        plan = Plan(owned, needed, comm.rank)
        tile = whole[:, slice(*plan.own[1])].clone()
        window = move(comm, plan, tile)
        back = move_back(comm, plan, windows[comm.rank])
        start, stop = plan.need[1]
        inside = [whole[0, i] if 0 <= i < 9 else torch.tensor(0.0) for i in range(start, stop)]
        assert window[0].tolist() == [float(value) for value in inside]
        return float((window * windows[comm.rank]).sum()), float((tile * back).sum())

    found = on(3, work)
    there, back = (sum(values) for values in zip(*found, strict=True))
    assert there == pytest.approx(back, rel=1e-12)


def test_what_was_sent_may_be_written_to_after_the_wait():
    owned = tuple(Box(((0, 1), bounds)) for bounds in ((0, 2), (2, 4)))
    needed = tuple(Box(((0, 1), (0, 4))) for _ in range(2))

    def work(comm: Virtual) -> Any:
        plan = Plan(owned, needed, comm.rank)
        tile = torch.full((1, 2), float(comm.rank))
        window = move(comm, plan, tile)
        tile.fill_(9.0)
        comm.barrier()
        return window.tolist()

    assert on(2, work) == [[[0, 0, 1, 1]]] * 2


def test_hand_overs_are_refused():
    owned = tuple(Box(((0, 1), bounds)) for bounds in ((0, 2), (2, 4)))

    def work(comm: Virtual) -> None:
        plan = Plan(owned, owned[::-1], comm.rank)
        tile, room = torch.zeros(1, 2), torch.zeros(1, 2)
        sends, receives = [BoxedTensor(tile, plan.own)], [BoxedTensor(room, plan.need)]
        route = Route([0, 1], 7)
        start_exchange(comm, Exchange(plan, sends, receives, tile.device, route=route))

    with pytest.raises(NotImplementedError, match="collective exchanges only"):
        on(2, work)
