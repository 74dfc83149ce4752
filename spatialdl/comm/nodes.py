"""Which ranks share a machine, found out once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property

from spatialdl.comm.communicator import Communicator
from spatialdl.parallel.node_order import numbered


class Nodes:
    """The ranks of a world by machine; all of them make it together.

    Args:
        world: the ranks.
        names: by rank, what tells its machine from others; asked of the transport without.

    Attributes:
        of: by rank the number of its node, in the order of their first ranks.
    """

    def __init__(self, world: Communicator, names: Sequence[Hashable] | None = None) -> None:
        self._world = world
        self.of = numbered(world.nodes() if names is None else names)

    @cached_property
    def own(self) -> Communicator:
        """The ranks of this rank's node; all of these ask for the first time together."""
        here = self.of[self._world.rank]
        return self._world.subset([rank for rank, node in enumerate(self.of) if node == here])
