"""Exact training of ordinary vision networks on images split over many ranks.

Importing this package starts neither MPI nor a GPU; `init_mesh` does.
"""

from spatialdl.comm.gradients import average_gradients
from spatialdl.errors import CommMismatch, ShardError, SlideError, UnsupportedSpatialOp
from spatialdl.mesh import Mesh, init_mesh
from spatialdl.spatial import SpatialTensor, register_op
from spatialdl.spatial.split import from_local, shard
from spatialdl.version import __version__

__all__ = [
    "CommMismatch",
    "Mesh",
    "ShardError",
    "SlideError",
    "SpatialTensor",
    "UnsupportedSpatialOp",
    "__version__",
    "average_gradients",
    "from_local",
    "init_mesh",
    "register_op",
    "shard",
]
