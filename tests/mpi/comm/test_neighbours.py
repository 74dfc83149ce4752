from __future__ import annotations

import pytest
from mpi4py import MPI

from spatialdl.comm.mpi import MpiCommunicator
from spatialdl.comm.plan import plan_for
from spatialdl.parallel.layout import Layout, empty_box

WORLD = MPI.COMM_WORLD


@pytest.mark.world(2, 3, 4)
def test_ranks_are_called_what_they_are_in_the_world() -> None:
    """Also in a subset of a subset, in whichever order."""
    world = MpiCommunicator(WORLD)
    assert world.world_ranks == tuple(range(WORLD.size))
    backwards = world.subset(range(WORLD.size)[::-1])
    assert backwards.world_ranks == tuple(range(WORLD.size))[::-1]
    assert backwards.world_ranks[backwards.rank] == WORLD.rank
    if backwards.rank < 2:
        assert backwards.subset([1, 0]).world_ranks == (WORLD.size - 2, WORLD.size - 1)


@pytest.mark.world(2, 3, 4)
def test_there_is_one_graph_for_all_plans_with_the_same_neighbours() -> None:
    """MPI libraries have few to give away; forward and backward have one each."""
    world = MpiCommunicator(WORLD)
    graphs = set()
    for size in (8, 12, 16):
        layout = Layout.even(1, (size, 6), (WORLD.size, 1))
        needed = (*(empty_box(2),) * (WORLD.size - 1), layout.whole)
        plan = plan_for(layout.boxes, needed, WORLD.rank)
        forward, adjoint = world.graph(plan, False), world.graph(plan, True)
        incoming, outgoing, _ = forward.Get_dist_neighbors_count()
        others, is_last = WORLD.size - 1, WORLD.rank == WORLD.size - 1
        assert (incoming, outgoing) == ((others, 0) if is_last else (0, 1))
        assert adjoint.Get_dist_neighbors_count()[:2] == (outgoing, incoming)
        graphs |= {id(forward), id(adjoint)}
    assert len(graphs) == 2
