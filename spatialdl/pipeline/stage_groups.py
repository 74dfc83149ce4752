"""Which ranks hold a stage, in whichever copy of the network, and how they talk to each other."""

from __future__ import annotations

from collections.abc import Mapping

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.hierarchical import by_nodes
from spatialdl.comm.mesh import Mesh
from spatialdl.comm.processes import Nodes
from spatialdl.parallel.placement import Placement


def stage_ranks(placement: Placement, stage: int, tensor: int = 0) -> list[int]:
    """The ranks of the world that hold the same of a stage.

    Args:
        tensor: which part of the channels.
    """
    return sorted(
        {
            rank
            for copy in range(placement.copies)
            for replica in range(placement.data)
            for rank in placement.ranks(stage, replica, copy, tensor)
        }
    )


def stage_groups(
    placement: Placement, meshes: Mapping[int, Mesh], comm: Communicator
) -> dict[int, Communicator]:
    """For each stage of this rank those who hold it too; all of them must ask.

    Args:
        meshes: by the stages of this rank.
        comm: all ranks of the placement.
    """
    if placement.copies == 1:
        return {stage: mesh.comm for stage, mesh in meshes.items()}
    # by number, because ranks with several stages must make these in one order
    return {
        stage: comm.subset(stage_ranks(placement, stage, meshes[stage].channels))
        for stage in sorted(meshes)
    }


def stage_reducers(
    holders: Mapping[int, Communicator],
    meshes: Mapping[int, Mesh],
    placement: Placement,
    comm: Communicator,
    backend: str | None,
    nodes: Nodes | None,
) -> Mapping[int, Communicator]:
    """The same ranks as `stage_groups`, as they add up gradients; they all must ask.

    Args:
        meshes: by the stages of this rank.
        comm: all ranks of the placement.
        backend: of torch.distributed, if that is to add them up.
        nodes: of the ranks, if gradients are to be added up by nodes where that saves time.

    Raises:
        ValueError: if the backend cannot be had here.
    """
    if backend is not None and comm.size > 1:
        from spatialdl.comm.groups import BackendCommunicator, start

        start(backend)
        return {
            stage: BackendCommunicator(
                stage_ranks(placement, stage, meshes[stage].channels), backend
            )
            if one.size > 1
            else one
            for stage, one in holders.items()
        }
    if nodes is not None:
        node = nodes.of[comm.rank]
        return {stage: by_nodes(holders[stage], node) for stage in sorted(holders)}
    return holders
