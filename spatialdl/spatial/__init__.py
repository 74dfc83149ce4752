"""SpatialTensor and the operations it knows, one family a file."""

from spatialdl.spatial import conv, norm, pointwise, pool, reduce  # noqa: F401  (they register)
from spatialdl.spatial.tensor import SpatialTensor, register_op

__all__ = ["SpatialTensor", "register_op"]
