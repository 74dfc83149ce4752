"""SpatialTensor and the operations it knows, one family a file."""

from spatialdl.spatial import (  # noqa: F401  (they register)
    conv,
    norm,
    pointwise,
    pool,
    reduce,
    transposed,
)
from spatialdl.spatial.tensor import SpatialTensor, register_op

__all__ = ["SpatialTensor", "register_op"]
