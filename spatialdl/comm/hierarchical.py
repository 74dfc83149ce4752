"""Hierarchical all-reduce: sum within nodes, then between nodes, then broadcast within nodes.

Only for gloo, which uses one ring independent of nodes. NCCL, MPICH and Open MPI (from 5.0 on, by
its component han) have hierarchical algorithms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.distributed import TorchCommunicator
from spatialdl.comm.waiting import noted


class HierarchicalCommunicator(TorchCommunicator):
    """Communicator whose sums cross between nodes once per node.

    Args:
        comm: over gloo.
        nodes: node index of each rank.
    """

    def __init__(self, comm: TorchCommunicator, nodes: Sequence[int]) -> None:
        super().__init__(comm.world_ranks, comm._gloo, by_host=True)
        by_node = [
            [rank for rank, node in enumerate(nodes) if node == one] for one in dict.fromkeys(nodes)
        ]
        own = next(ranks for ranks in by_node if self.rank in ranks)
        first = [ranks[0] for ranks in by_node]
        self._node = comm.subset(own)
        self._between = comm.subset(first) if self.rank in first else None

    def all_reduce_(self, values: Tensor) -> None:
        noted("all-reduce", self.world_ranks, self._all_reduce, values)

    def _all_reduce(self, values: Tensor) -> None:
        if self._node.size > 1:
            dist.reduce(values, group=self._node._gloo, group_dst=0)
        if self._between is not None:
            self._between.all_reduce_(values)
        if self._node.size > 1:
            dist.broadcast(values, group=self._node._gloo, group_src=0)

    def close(self) -> None:
        super().close()
        self._node.close()
        if self._between is not None:
            self._between.close()


def by_nodes(comm: Communicator, node: int) -> Communicator:
    """Wrap `comm` with hierarchical sums where these are faster; collective.

    Args:
        node: index of this rank's node.
    """
    if not isinstance(comm, TorchCommunicator) or comm.overlaps:
        return comm
    nodes = comm.allgather(node)
    return HierarchicalCommunicator(comm, nodes) if 1 < len(set(nodes)) < comm.size else comm
