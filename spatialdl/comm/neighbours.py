"""Neighbours over MPI: communicators in which a rank's neighbours are the peers of a plan."""

from __future__ import annotations

from functools import cached_property

from mpi4py import MPI

from spatialdl.comm.held import pieces_of
from spatialdl.comm.plan import Plan
from spatialdl.comm.waiting import noted


class Neighbours(MPI.Intracomm):
    """Ranks of MPI, what they are called in the world, and their neighbours in a plan."""

    @cached_property
    def world_ranks(self) -> tuple[int, ...]:
        """What they are called in the world, for messages."""
        here, world = self.Get_group(), MPI.COMM_WORLD.Get_group()
        ranks = here.Translate_ranks(range(here.size), world)
        here.Free()
        world.Free()
        return tuple(ranks)

    @cached_property
    def _graphs(self) -> dict[tuple[bytes, bool], MPI.Distgraphcomm]:
        return {}

    def graph(self, plan: Plan, adjoint: bool) -> MPI.Distgraphcomm:
        """The communicator in which a rank's neighbours are the plan's peers.

        One per set of neighbours, because MPI libraries have few contexts to give away. Whether
        one must be made follows from the whole plan, so all ranks make it together.
        """
        key = (plan.graph, adjoint)
        if key not in self._graphs:
            sends, receives = pieces_of(plan, adjoint)
            sources, targets = [p.peer for p in receives], [p.peer for p in sends]
            make = self.Create_dist_graph_adjacent
            self._graphs[key] = noted("setting up", self.world_ranks, make, sources, targets)
        return self._graphs[key]
