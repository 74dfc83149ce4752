"""Groups of the ranks that hold a stage, in any copy of the network."""

from __future__ import annotations

from collections.abc import Mapping

from spatialdl.comm.communicator import Communicator
from spatialdl.comm.mesh import Mesh
from spatialdl.parallel.placement import Placement


def stage_ranks(placement: Placement, stage: int, tensor: int = 0) -> list[int]:
    """Ranks of the world that hold the same part of a stage.

    Args:
        tensor: index of the channel part.
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
    """Communicators of the ranks that hold each of this rank's stages; collective.

    Args:
        meshes: by the stages of this rank.
        comm: all ranks of the placement.
    """
    if placement.copies == 1:
        return {stage: mesh.comm for stage, mesh in meshes.items()}
    # by number, so that ranks with several stages create these in the same order
    return {
        stage: comm.subset(stage_ranks(placement, stage, meshes[stage].channels))
        for stage in sorted(meshes)
    }
