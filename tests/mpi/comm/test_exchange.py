from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from spatialdl.comm import check
from spatialdl.comm.boxed import BoxedTensor, Exchange
from spatialdl.comm.exchange import start_exchange
from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.plan import Plan
from spatialdl.parallel.layout import Box
from tests.mpi.waits import told_by_the_first

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
OWN = [Box(((0, 1), (rank, rank + 1), (0, 4))) for rank in range(SIZE)]
COMM = MpiCommunicator(MPI.COMM_WORLD)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """The check would wait before the exchange does."""
    check.enable(False)
    yield
    check.enable()


@pytest.mark.skipif(SIZE < 2, reason="needs ranks")
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
        start_exchange(part, Exchange(plan, sends, room, tile.device, adjoint), "conv2d").wait()

    wait = told_by_the_first(tmp_path, "exchange for conv2d", exchange)
    if wait is not None:
        assert wait.ranks == (SIZE - 1,)
        assert wait.what[-1] == f"exchange for conv2d ({plan.describe()})"
        assert landed.unique().tolist() == [SIZE - 1]
